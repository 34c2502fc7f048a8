"""Whether any rank needs another round: ranks tell one another by the round itself, so that they need not agree first.

    with asking(exchange, more): dispatch  ─▶  experts, combine  ─▶  another(exchange), the same on all ranks

All ranks ask, or none. On GPUs the answer is in host memory as soon as the counts of all ranks are there, and whoever
looks for it after combine hardly waits. A round that does not ask pays nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epmoe.exchange.exchange import Exchange
from epmoe.exchange.round_state import ANSWER, ASKED, CLOSED, wait_on
from epmoe.native import ops

_SPIN_S = 1.0  # then the wait may take milliseconds longer, and hears of a GPU in distress


@contextmanager
def asking(exchange: Exchange, more: bool) -> Iterator[None]:
    """Within it the thread calls dispatch once, both phases, and says whether this rank needs a round after that."""
    progress = exchange.rounds.progress
    progress[ASKED] = exchange.rounds.count + 1 << 1 | more
    try:
        yield
    finally:
        progress[ASKED] = 0


def another(exchange: Exchange) -> bool:
    """Whether any rank needs a round after the last one, which asked. On GPUs it waits for the kernel of dispatch.

    On the CPU dispatch has the answer when it returns. A round that was given up before has it once every rank has
    closed the round, for which this waits.

    Raises what `Exchange.check` does, EPTimeoutError also where the kernel does not end within
    `exchange.warmup_timeout_s`, and RuntimeError as torch does on a GPU in distress.
    """
    progress, epoch = exchange.rounds.progress, exchange.rounds.count
    if exchange.device.type == "cuda":
        spin_until = time.monotonic() + _SPIN_S
        while progress[ANSWER] >> 1 != epoch and time.monotonic() < spin_until:
            exchange.check()
            time.sleep(0)  # lets other threads run
        if progress[ANSWER] >> 1 != epoch:
            exchange.wait_for_device(exchange.config.exchange.warmup_timeout_s)
            exchange.check()
    elif progress[ANSWER] >> 1 != epoch:
        _wait_until_closed(exchange)
    answer: int = progress[ANSWER]
    return answer == (epoch << 1 | 1)


def _wait_until_closed(exchange: Exchange) -> None:
    """On the CPU, with no round open: until every rank has closed the last round, for its answer."""
    arguments = torch.empty(0, 0, device="cpu"), None, *exchange.memory, next(iter(exchange.descriptors.values()))
    ops.combine_recv(*arguments)
    wait_on(exchange, ops.combine_recv, arguments, CLOSED)
    exchange.check()
