"""A peer gone mad: it writes any bits into the window of this rank. Errors and wrong rows may follow, but no crash."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, make_tokens, run_round

import epmoe

ON_THE_CPU = pytest.mark.parametrize("device", [torch.device("cpu")])
SIGNALS = ("signal.dispatch", "signal.combine", "signal.error")


@ON_THE_CPU
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("payload_only", [True, False])
def test_a_window_of_random_bits(make_ep, rank, size, device, payload_only, seed):
    """Every index, count and epoch of the last rank's window is random. The process lives, and a new group works."""
    ep = make_ep(timeout_s=0.3, max_tokens=40)
    tokens = make_tokens(ep.config, rank, 40, seed=seed)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    dist.barrier()
    if rank == size - 1:
        bits = torch.Generator().manual_seed(seed)
        for name, buffer in ep._exchange.views.items():
            region = next(b.region for b in ep.memory_plan().buffers if b.name == name)
            if region == "window" and name != "doorbell" and not (payload_only and name in SIGNALS):
                words = buffer.flatten().view(torch.uint8)
                words.copy_(torch.randint(0, 256, words.shape, generator=bits, dtype=torch.uint8))
    dist.barrier()
    for layout in ("expert", "rank"):
        if payload_only:  # every round writes anew what it reads
            assert_y(run_round(ep, tokens, layout=layout), ep.config, tokens)
        else:
            with suppress(epmoe.EPError, RuntimeError):
                run_round(ep, tokens, layout=layout)
    ep.close()
    dist.barrier()
    again = make_ep(max_tokens=40)
    assert_y(run_round(again, tokens), again.config, tokens)


@ON_THE_CPU
def test_an_error_word_that_names_no_rank(make_ep, rank, size, device):
    """Bits past the last rank mean nothing: the wait goes on to its deadline, and names the rank that is missing."""
    ep = make_ep(timeout_s=0.5)
    tokens = make_tokens(ep.config, rank, 6)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    dist.barrier()
    if rank != 0:
        ep._exchange.views["signal.error"][0] = -(2**63) + 2**40
        begin = time.monotonic()
        with pytest.raises(epmoe.EPTimeoutError, match=r"rank\(s\) \[0\]"):
            run_round(ep, tokens)
        assert time.monotonic() - begin >= 0.4
    dist.barrier()
