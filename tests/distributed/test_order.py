"""Stages of a round out of turn, by replays that no host checks: an error at once, on
every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from exchanges import Tokens, assert_round, assert_y, given, make_tokens
from helpers import ON_GPUS, poison_
from test_graphs import capturable_experts
from waits import within

from epmoe import EPOrderError, EPTimeoutError, ExpertParallel

pytestmark = ON_GPUS
# The deadline is long, so that a test which passes has not run into it.
AT_ONCE_S = 10.0
LONG_S = 120.0


class Stages:
    """dispatch and combine of one round, each captured into a graph of its own."""

    def __init__(self, ep: ExpertParallel, T: int) -> None:
        self.ep = ep
        self.tokens = make_tokens(ep.config, ep.rank, T)
        assert_round(ep, self.tokens)
        inputs = given(ep, self.tokens)
        experts = capturable_experts(ep)
        torch.cuda.synchronize()
        # A graph of each stage.
        self.dispatch = torch.cuda.CUDAGraph()
        self.combine = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.dispatch):
            d = ep.dispatch(*inputs)
        with torch.cuda.graph(self.combine):
            self.y = ep.combine(experts(d), d)
        for _ in range(3):  # by turns they are rounds like any other: 2, 3 and 4
            poison_(self.y)
            self.dispatch.replay()
            self.combine.replay()
            assert_y(self.y, ep.config, self.tokens)
        ep.check()

    def replay(self, *graphs: torch.cuda.CUDAGraph) -> None:
        """On every rank, one after the other."""
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        dist.barrier()


def goes_on(ep: ExpertParallel, tokens: Tokens) -> None:
    """Collective: in a new group of the same ranks."""
    dist.barrier()
    ep.resume()
    assert_round(ep, tokens)
    ep.check()


def assert_ends(ep: ExpertParallel, out_of_turn: int, said: str) -> None:
    """Every rank hears of it at once: rank `out_of_turn` that it ran its stages so, the others that
    it is lost.
    """
    with within(AT_ONCE_S):
        if ep.rank == out_of_turn:
            with pytest.raises(EPOrderError, match=said):
                ep.check(timeout_s=AT_ONCE_S)
        else:
            with pytest.raises(EPTimeoutError, match="ended early: .*EPOrderError") as caught:
                ep.check(timeout_s=AT_ONCE_S)
            assert caught.value.missing_ranks == [out_of_turn]
        torch.cuda.synchronize()  # no kernel still waits


@pytest.fixture(params=[8, 100], ids=["LL", "Simple"])
def make_stages(request, make_ep) -> Callable[..., Stages]:
    return lambda **exchange: Stages(
        make_ep(ll_max_tokens=32, max_tokens=100, timeout_s=LONG_S, exchange=exchange),
        request.param,
    )


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_graphs_of_one_stage(make_stages, rank, size, device, stage):
    """Rank 0 replays a stage twice, while the others go on to the next one."""
    stages = make_stages()
    ep = stages.ep
    dispatch = stages.dispatch
    combine = stages.combine
    # Rank 0 replays again what it has just replayed.
    if stage == "dispatch":
        stages.replay(dispatch)
        (dispatch if rank == 0 else combine).replay()
        assert_ends(ep, 0, "round 5: dispatch ran on this rank's GPU where combine was due")
    else:
        stages.replay(dispatch, combine)
        (combine if rank == 0 else dispatch).replay()
        assert_ends(ep, 0, "round 6: combine ran on this rank's GPU where dispatch was due")
    for _ in range(2):  # the error stays
        poison_(stages.y)
        dispatch.replay()
        combine.replay()
        torch.cuda.synchronize()
        assert not stages.y.any()
        with pytest.raises(EPOrderError if rank == 0 else EPTimeoutError):
            ep.poll()
    # A new group works.
    goes_on(ep, stages.tokens)


def test_every_rank_replays_a_stage_twice(make_stages, rank, size, device):
    """The same mistake everywhere: a rank sees its own first, or the error word of another one."""
    stages = make_stages()
    stages.replay(stages.dispatch)
    stages.dispatch.replay()
    with within(AT_ONCE_S), pytest.raises((EPOrderError, EPTimeoutError)):
        stages.ep.check(timeout_s=AT_ONCE_S)
    goes_on(stages.ep, stages.tokens)


def test_a_replay_within_an_eager_round(make_stages, rank, size, device):
    """Rank 0 replays on another stream, between dispatch and combine of a call's round."""
    stages = make_stages()
    ep = stages.ep
    # A round is open. Rank 0 replays a dispatch, where its combine is due.
    d = ep.dispatch(*given(ep, stages.tokens))
    torch.cuda.synchronize()
    if rank == 0:
        with torch.cuda.stream(torch.cuda.Stream()):
            stages.dispatch.replay()
    else:
        with suppress(EPTimeoutError):  # the kernel may have ended before the call has
            ep.combine(d.rows, d)
    assert_ends(ep, 0, "round 5: dispatch ran on this rank's GPU where combine was due")
    goes_on(ep, stages.tokens)


def test_a_stage_that_starts_within_another(make_stages, rank, size, device):
    """Rank 0's combine starts while its dispatch waits for the other ranks. Both leave room on the
    GPU.
    """
    if size == 1:
        pytest.skip("dispatch waits for nobody")
    stages = make_stages(num_sms=16)
    # On streams that nobody orders.
    if rank == 0:
        with torch.cuda.stream(torch.cuda.Stream()):
            stages.dispatch.replay()
        time.sleep(0.5)
        with torch.cuda.stream(torch.cuda.Stream()):
            stages.combine.replay()
        torch.cuda.synchronize()
    dist.barrier()
    # The others come now.
    if rank != 0:
        stages.dispatch.replay()
        stages.combine.replay()
    assert_ends(
        stages.ep, 0, "round 5: combine ran on this rank's GPU where dispatch had not ended"
    )
    goes_on(stages.ep, stages.tokens)
