"""The number of a round has 32 bits: rounds go on past the last one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from checked_round import check_round
from exchanges import make_tokens

import epmoe

LAST = 0xFFFFFFFD  # of the rounds that seem to be over


def set_epoch(ep: epmoe.ExpertParallel, epoch: int) -> None:
    """As if so many rounds had been played. The headers of the CPU compare as signed differences."""
    views, signed = ep._exchange.views, epoch - (1 << 32)
    views["state"][:2] = signed
    if ep.device.type == "cpu":
        for name in ("signal.dispatch", "signal.combine"):
            views[name].view(torch.int32)[:, 0] = signed
    else:
        torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("ll_max_tokens", [256, 4])
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_rounds_past_the_last_epoch(make_ep, rank, size, device, layout, ll_max_tokens):
    """On GPUs no round has the number 0 or 0xffffffff: these are what windows hold at first."""
    ep = make_ep(ll_max_tokens, max_tokens=40)
    set_epoch(ep, LAST)
    numbers = (0xFFFFFFFE, 0xFFFFFFFF, 0, 1) if device.type == "cpu" else (0xFFFFFFFE, 1, 2, 3)
    for number, tokens in zip(numbers, (7, 40, 0, 16), strict=True):
        given = [make_tokens(ep.config, r, max(tokens - r, 0), seed=number % 7) for r in range(size)]
        check_round(ep, given, layout)
        ep.check()
        assert ep.health().rounds == number
