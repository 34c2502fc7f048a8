"""Words between ranks: a reader sees one that was written, never a mixture of two."""

from __future__ import annotations

import ctypes
import os
import time

import torch

from epmoe import EPConfig
from epmoe.exchange.mail import MailOnCPU
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.window import SharedMemoryWindow


def test_a_word_is_never_seen_in_part():
    config = EPConfig(
        model={"num_experts": 2, "num_experts_per_tok": 1, "hidden_size": 8},
        topology={"ep_size": 1},
        placement={"live": True, "slots_per_rank": 2, "staging_mb": 1},
        capacity={"max_num_tokens_per_rank": 1},
    )
    plan = MemoryPlan.build(config, 0, config.place_experts(), nvlink=False)
    words = plan["moves.words"]
    window = SharedMemoryWindow.__new__(SharedMemoryWindow)
    window._regions = [torch.zeros(words.offset + words.nbytes, dtype=torch.uint8).share_memory_()]
    view = window._regions[0][words.offset :].view(torch.int64).view(words.shape)
    MailOnCPU(window, plan, {"moves.words": view}).post(1, 0, [0])  # the first operator may have to build the library
    end = time.monotonic() + 2
    if (writer := os.fork()) == 0:
        mail = MailOnCPU(window, plan, {"moves.words": view})  # that of a parent is not the child's
        while time.monotonic() < end:
            for value in (0, -1) * 500:
                mail.post(1, value, [0])
        os._exit(0)
    word, seen = ctypes.c_int64.from_address(view.data_ptr() + 8), set()
    while time.monotonic() < end:
        for _ in range(10000):
            seen.add(word.value)
    os.waitpid(writer, 0)
    assert seen == {0, -1}
