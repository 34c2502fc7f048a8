"""GPUs of one machine as two nodes: the rail by NCCL in CUDA graphs and on other streams. The rest:
test_two_levels.py.

2 ranks are two nodes of one, 4 ranks two nodes of two. docs/testing.md has the command with which
NCCL, too, sees two nodes and reaches the other one by sockets only.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from exchanges import (
    assert_round,
    assert_y,
    dequantized,
    given,
    make_tokens,
    run_experts,
    run_round,
)
from helpers import ON_GPUS, poison_
from test_graphs import Captured
from test_two_levels import assert_named, check_nodes, meet
from torch import Tensor

import epmoe
from epmoe import ExpertParallel

pytestmark = ON_GPUS


@pytest.fixture(autouse=True)
def _two_nodes(device: torch.device, size: int) -> None:
    check_nodes(device, size)


def test_phases_micro_batches_and_streams(make_ep, rank, size, device):
    """Two micro-batches overlap, each with a communicator of its own; every round is on other
    streams.
    """
    eps = [make_ep(ranks_per_node=size // 2) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for n in range(6):
        # Other tokens in each round.
        batches = [
            make_tokens(ep.config, rank, (3 * n + rank) % 17, seed=2 * n + i)
            for i, ep in enumerate(eps)
        ]
        inputs = [given(ep, tokens) for ep, tokens in zip(eps, batches, strict=True)]
        torch.cuda.synchronize()
        # The phases of both overlap.
        with torch.cuda.stream(streams[n % 3]):
            sent = [ep.dispatch_send(*tensors) for ep, tensors in zip(eps, inputs, strict=True)]
            received = [ep.dispatch_recv(one) for ep, one in zip(eps, sent, strict=True)]
            for ep, d in zip(eps, received, strict=True):
                ep.combine_send(run_experts(ep, d), d)
            ys = [ep.combine_recv(d) for ep, d in zip(eps, received, strict=True)]
        for ep, y, tokens in zip(eps, ys, batches, strict=True):
            streams[n % 3].synchronize()
            assert_y(y, ep.config, tokens)


class CapturedRound(Captured):
    """A round in a graph, with slabs of `padded` rows, and rows of any payload."""

    def __init__(self, ep: ExpertParallel, T: int, padded: int | None = None) -> None:
        self.padded = padded
        super().__init__(ep, T)

    def _round(self) -> Tensor:
        with self.ep.at_most(self.padded):
            d = self.ep.dispatch(self.x, self.ids, self.weights, num_tokens=self.real)
        rows = dequantized(d.rows, d.scales, d.dtype)
        return self.ep.combine(
            self.experts(SimpleNamespace(rows=rows, expert_offsets=d.expert_offsets)), d
        )


@pytest.mark.parametrize("payload", ["auto", "fp8"])
@pytest.mark.parametrize(("T", "padded"), [(16, None), (16, 40), (1, 1), (128, 128)])
def test_replays(make_ep, rank, size, device, T, padded, payload):
    """Any number of real tokens on each rank, 0 too; rounds outside the graph between replays;
    buffers full of NaN.
    """
    options = {
        "hidden": 256,
        "dtype": "bfloat16",
        "max_tokens": 128,
        "exchange": {"payload": payload},
    }
    ep = make_ep(64, ranks_per_node=size // 2, top_k=6, **options)
    captured = CapturedRound(ep, T, padded)
    for seed, real in enumerate((0, 1, T // 2, T, 1, T)):
        # Nothing of an earlier round is left.
        for name in ("rail.received", "rail.sent", "rail.returned", "rail.slots"):
            poison_(ep.exchange.views[name])
        torch.cuda.synchronize()
        meet()  # no rank sends before all have done so
        captured.check(seed, real if rank % 2 == 0 else T - real)
        # A round outside of the graph.
        if seed % 2:
            tokens = make_tokens(ep.config, rank, 7 - rank, seed=seed)
            assert_round(ep, tokens)
    ep.check()


def test_two_graphs_of_other_lengths(make_ep, rank, size, device):
    """A server has one graph for each length, which all ranks replay together."""
    ep = make_ep(32, ranks_per_node=size // 2, top_k=6, hidden=256, max_tokens=128)
    captured = [CapturedRound(ep, T, T) for T in (8, 40, 128)]
    for n in range(12):
        mine = captured[n % 3]
        mine.check(n, len(mine.x) - (n + rank) % 8)
    ep.check()


def test_a_capture_behind_an_abort_is_refused(make_ep, rank, size, device):
    """Its transfers are outside of the graph. After one more round it can be captured."""
    ep = make_ep(ranks_per_node=size // 2, top_k=6, hidden=256, max_tokens=128)
    tokens = make_tokens(ep.config, rank, 5)
    assert_round(ep, tokens)
    inputs = given(ep, tokens)
    # A round that this rank gives up.
    ep.dispatch_send(*inputs)
    ep.abort()
    torch.cuda.synchronize()
    # The next one cannot be captured, and the one behind it can.
    refused = pytest.raises(RuntimeError, match="run a round outside of the graph first")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        ep.dispatch(*inputs)
    assert_round(ep, tokens)
    CapturedRound(ep, 8).check(0, 8)
    ep.check()


def test_resume_with_new_communicators(make_ep, rank, size, device):
    ep = make_ep(ranks_per_node=size // 2)
    tokens = make_tokens(ep.config, rank, 6)
    for _ in range(2):
        assert_round(ep, tokens)
        ep.resume()
    captured = CapturedRound(ep, 16)
    captured.check(5, 16)
    assert ep.generation == 2


def test_a_rank_that_does_not_replay_is_named(make_ep, rank, size, device):
    """y becomes zeros, in this replay and in later ones, all of which end."""
    ep = make_ep(ranks_per_node=size // 2, timeout_s=2.0)
    captured = CapturedRound(ep, 16)
    captured.check(1, 16)
    meet()
    # All others name it.
    if rank != size // 2:
        begin = time.monotonic()
        captured.replay()
        with pytest.raises(epmoe.EPTimeoutError) as error:
            ep.check()
        assert_named(ep, error.value, begin)
        # Later replays end with zeros, too.
        for _ in range(2):
            torch.cuda.synchronize()
            assert captured.y.eq(0).all()
            poison_(captured.y)
            captured.replay()
        torch.cuda.synchronize()
    meet()


def test_a_rank_that_leaves_at_its_error(make_ep, rank, size, device):
    """Its node knows of the failure by then, and names the missing rank as it does."""
    ep = make_ep(ranks_per_node=size // 2, timeout_s=2.0)
    tokens = make_tokens(ep.config, rank, 6)
    assert_round(ep, tokens)
    meet()
    # One rank stays away, and all others name it.
    if rank != size // 2:
        begin = time.monotonic()
        with pytest.raises(epmoe.EPTimeoutError, match=rf"\[{size // 2}\]") as error:
            run_round(ep, tokens)
            ep.check()
        # Rank 0 leaves at once.
        if rank == 0:
            ep.close()
        else:
            assert_named(ep, error.value, begin)
    meet()


def test_nodes_that_disagree_hear_of_it(make_ep, rank, size, device):
    """Rank 0 brings fewer experts a token. Ranks whose rail has no mismatch hear that a rank has
    left.
    """
    ep = make_ep(ranks_per_node=size // 2, timeout_s=4.0)
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
    """Which nothing checks ahead of the transfer: NCCL or the tags see it, or the
    deadline ends it.
    """
    ep = make_ep(ranks_per_node=size // 2, timeout_s=2.0)
    tokens = make_tokens(ep.config, rank, 4)
    assert_round(ep, tokens)
    begin = time.monotonic()
    most = 4 if rank < size // 2 else 16
    with pytest.raises((epmoe.EPMismatchError, epmoe.EPTimeoutError)), ep.at_most(most):
        d = ep.dispatch(*given(ep, tokens))
        ep.combine(run_experts(ep, d), d)
        ep.check()
    assert time.monotonic() - begin < 2 * (2.0 + 2.0)
    meet()
