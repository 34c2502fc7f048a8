"""The number of a round has 32 bits: rounds go on past the last one."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from checked_round import check_round
from exchanges import assert_round, assert_y, make_tokens, node_of, run_round
from helpers import RANKS_SHARE_GPUS

import epmoe

LASTS = (0x7FFFFFFD, 0xFFFFFFFB)
NEXT = 6
"""Rounds that seem to be over: in the NEXT ones the number becomes negative as an int32, or begins
again.
"""


def set_epoch(ep: epmoe.ExpertParallel, epoch: int) -> None:
    """Pretends that so many rounds have been played. The headers of the CPU compare as signed
    differences.
    """
    exchange = ep.exchange
    signed = (epoch + (1 << 31)) % (1 << 32) - (1 << 31)
    exchange.rounds.progress.phases = node_of(ep).rounds.progress.phases = 4 * epoch
    exchange.views["state"][:2] = signed
    if ep.device.type == "cpu":
        for name in ("signal.dispatch", "signal.combine"):
            exchange.views[name].view(torch.int32)[:, 0] = signed
        exchange.views["doorbell"][:] = signed
    else:
        torch.cuda.synchronize()
    ep.health()  # goes on from there
    dist.barrier()


@pytest.mark.parametrize("ll_max_tokens", [256, 4])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("last", LASTS)
def test_rounds_past_the_last_epoch(make_ep, rank, size, device, layout, ll_max_tokens, last):
    """On GPUs no round has a number that windows hold at first, 0 or above 0xfffffffc."""
    ep = make_ep(ll_max_tokens, max_tokens=40)
    set_epoch(ep, last)
    for number, tokens in enumerate((7, 40, 0, 16, 40, 3), last + 1):
        given = [
            make_tokens(ep.config, r, max(tokens - r, 0), seed=number % 7) for r in range(size)
        ]
        if device.type == "cpu" and rank == number % size:
            time.sleep(0.02)  # the others sleep on their doorbells
        check_round(ep, given, layout)
        ep.check()
        assert ep.health().rounds == ep.exchange.rounds.count == number


@pytest.mark.parametrize("last", LASTS)
def test_rounds_over_nodes_past_the_last_epoch(make_ep, rank, size, device, last):
    if size % 2 or device.type == "cuda" and RANKS_SHARE_GPUS and "NCCL_HOSTID" not in os.environ:
        pytest.skip("needs two nodes of as many ranks: tests/two_gpu_nodes.sh")
    ep = make_ep(ranks_per_node=size // 2)
    set_epoch(ep, last)
    for number in range(last + 1, last + 1 + NEXT):
        tokens = make_tokens(ep.config, rank, 16 - rank, seed=number % 7)
        assert_round(ep, tokens)
        assert ep.health().rounds == ep.exchange.rounds.count == number


@pytest.mark.parametrize("last", LASTS)
def test_more_rounds_past_the_last_epoch(make_ep, rank, size, last):
    """The answer whether more follow carries the number of its round."""
    ep = make_ep()
    set_epoch(ep, last)
    for number in range(last + 1, last + 1 + NEXT):
        tokens = make_tokens(ep.config, rank, 5, seed=number % 7)
        y = ep.exchange.sending(rank == number % size, partial(run_round, ep, tokens))
        assert ep.exchange.has_more_rounds()
        assert_y(y, ep.config, tokens)
