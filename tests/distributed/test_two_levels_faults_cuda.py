"""Two nodes of GPUs, of which one rank stays away or makes another call: every rank hears of it in time."""

from __future__ import annotations

import re
import time

import pytest
import torch
from exchanges import assert_y, make_tokens, run_experts, run_round
from helpers import ON_GPUS, poison_
from test_phases import given
from test_two_levels_cuda import CapturedRound, _two_nodes, meet

import epmoe
from epmoe import ExpertParallel

__all__ = ["_two_nodes"]  # a fixture
pytestmark = ON_GPUS


def victim(size: int) -> int:
    return size // 2  # (1, 0)


def assert_named(ep: ExpertParallel, size: int, error: epmoe.EPTimeoutError, begin: float) -> None:
    """Every rank names the victim, in time and in every later call."""
    assert time.monotonic() - begin < ep.config.exchange.timeout_s + 2.0
    assert error.missing_ranks == [victim(size)], error
    assert re.search(rf"rank\(s\) \[{victim(size)}\] of the group.*\(1, 0\)", str(error))
    for call in (ep.poll, ep.check):
        with pytest.raises(epmoe.EPTimeoutError, match=rf"\[{victim(size)}\]"):
            call()
    assert ep.survivors() == [rank for rank in range(size) if rank != victim(size)]


@pytest.mark.parametrize("splits", ["padded", "exact"])
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_rank_of_another_node_that_stays_away_is_named(make_ep, rank, size, device, stage, splits):
    ep = make_ep(ranks_per_node=size // 2, timeout_s=2.0, exchange={"network_splits": splits})
    tokens = make_tokens(ep.config, rank, 6)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    d = ep.dispatch(*given(ep, tokens)) if stage == "combine" else None
    if d is not None:
        torch.cuda.synchronize()
    meet()
    if rank != victim(size):
        begin = time.monotonic()
        with pytest.raises(epmoe.EPTimeoutError) as error:
            d = d or ep.dispatch(*given(ep, tokens))
            ep.combine(run_experts(ep, d), d)
            ep.check()
        assert_named(ep, size, error.value, begin)
    meet()


def test_a_rank_that_does_not_replay_is_named(make_ep, rank, size, device):
    """y becomes zeros, in this replay and in later ones, all of which end."""
    ep = make_ep(ranks_per_node=size // 2, timeout_s=2.0)
    captured = CapturedRound(ep, 16)
    captured.check(1, 16)
    meet()
    if rank != victim(size):
        begin = time.monotonic()
        captured.graph.replay()
        with pytest.raises(epmoe.EPTimeoutError) as error:
            ep.check()
        assert_named(ep, size, error.value, begin)
        for _ in range(2):
            torch.cuda.synchronize()
            assert captured.y.eq(0).all()
            poison_(captured.y)
            captured.graph.replay()
        torch.cuda.synchronize()
    meet()


@pytest.mark.parametrize("splits", ["padded", "exact"])
def test_nodes_that_disagree_hear_of_it(make_ep, rank, size, device, splits):
    """Rank 0 brings fewer experts a token. Ranks whose rail has no mismatch hear that a rank has left."""
    ep = make_ep(ranks_per_node=size // 2, timeout_s=4.0, exchange={"network_splits": splits})
    tokens = make_tokens(ep.config, rank, 6)
    x, ids, weights = given(ep, tokens)
    K = 3 if rank == 0 else 4
    errors = (epmoe.EPMismatchError, epmoe.EPTimeoutError)
    with pytest.raises(errors if rank % (size // 2) else epmoe.EPMismatchError):
        d = ep.dispatch(x, ids[:, :K], weights[:, :K])
        ep.check()
        ep.combine(run_experts(ep, d), d)
        ep.check()
    meet()


def test_slabs_of_other_lengths_end_in_an_error(make_ep, rank, size, device):
    """Which nothing checks ahead of the transfer: NCCL or the tags see it, or the deadline ends it."""
    ep = make_ep(ranks_per_node=size // 2, timeout_s=2.0)
    tokens = make_tokens(ep.config, rank, 4)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    begin = time.monotonic()
    with pytest.raises((epmoe.EPMismatchError, epmoe.EPTimeoutError)):
        d = ep.dispatch(*given(ep, tokens), padded_tokens=4 if rank < size // 2 else 16)
        ep.combine(run_experts(ep, d), d)
        ep.check()
    assert time.monotonic() - begin < 2 * (2.0 + 2.0)
    meet()
