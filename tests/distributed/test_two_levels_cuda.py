"""GPUs of one machine as two nodes: the rail by NCCL, eager and in CUDA graphs.

2 ranks are two nodes of one, 4 ranks two nodes of two. docs/testing.md has the command with which NCCL, too, sees two
nodes and reaches the other one by sockets only.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, dequantised, make_tokens, run_experts, run_round
from helpers import ON_GPUS, RANKS_SHARE_GPUS, poison_
from test_graphs import Captured
from test_phases import abort_round, given
from test_two_levels import (
    check_aborts_of_other_shapes,
    check_counts_of_bad_pairs,
    check_fp8_round,
    check_ragged_rounds,
)
from torch import Tensor

import epmoe
from epmoe import ExpertParallel

pytestmark = ON_GPUS
COPIES = {"strategy": "round_robin", "num_redundant_experts": 3}


@pytest.fixture(autouse=True)
def _two_nodes(size: int) -> None:
    if size not in (2, 4):
        pytest.skip("needs 2 or 4 ranks: docs/testing.md")
    if RANKS_SHARE_GPUS and "NCCL_HOSTID" not in os.environ:
        pytest.skip(
            "NCCL takes ranks that share a GPU only if these have host ids of their own: tests/two_gpu_nodes.sh"
        )


def meet() -> None:
    """Every rank is here. On the host: a barrier of GPUs would wait for what this rank has queued."""
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("splits", ["padded", "exact"])
@pytest.mark.parametrize("placement", [{}, COPIES])
@pytest.mark.parametrize("ll_max_tokens", [8, 256])
def test_against_the_dense_reference(make_ep, rank, size, device, ll_max_tokens, placement, splits, layout):
    ep = make_ep(
        ll_max_tokens,
        ranks_per_node=size // 2,
        hidden=72,
        dtype="bfloat16",
        placement=placement,
        exchange={"network_splits": splits},
    )
    check_ragged_rounds(ep, layout)
    ep.check()


@pytest.mark.parametrize("splits", ["padded", "exact"])
@pytest.mark.parametrize("quantised_by_caller", [False, True])
def test_fp8_rows(make_ep, rank, size, device, splits, quantised_by_caller):
    options = {"payload": "fp8", "network_splits": splits}
    ep = make_ep(ranks_per_node=size // 2, hidden=256, dtype="bfloat16", exchange=options)
    check_fp8_round(ep, quantised_by_caller)


@pytest.mark.parametrize("splits", ["padded", "exact"])
def test_phases_micro_batches_and_streams(make_ep, rank, size, device, splits):
    """Two micro-batches overlap, each with a communicator of its own; every round is on other streams."""
    eps = [make_ep(ranks_per_node=size // 2, exchange={"network_splits": splits}) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for n in range(6):
        batches = [make_tokens(ep.config, rank, (3 * n + rank) % 17, seed=2 * n + i) for i, ep in enumerate(eps)]
        inputs = [given(ep, tokens) for ep, tokens in zip(eps, batches, strict=True)]
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[n % 3]):
            sent = [ep.dispatch_send(*tensors) for ep, tensors in zip(eps, inputs, strict=True)]
            received = [ep.dispatch_recv(one) for ep, one in zip(eps, sent, strict=True)]
            for ep, d in zip(eps, received, strict=True):
                ep.combine_send(run_experts(ep, d), d)
            ys = [ep.combine_recv(d) for ep, d in zip(eps, received, strict=True)]
        for ep, y, tokens in zip(eps, ys, batches, strict=True):
            streams[n % 3].synchronize()
            assert_y(y, ep.config, tokens)


def test_padded_tokens(make_ep, rank, size, device):
    ep = make_ep(ranks_per_node=size // 2)
    tokens = make_tokens(ep.config, rank, 1)
    for n in (1, 5, 16):
        d = ep.dispatch(*given(ep, tokens), padded_tokens=n)
        assert_y(ep.combine(run_experts(ep, d), d), ep.config, tokens)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    ep.check()


@pytest.mark.parametrize("splits", ["padded", "exact"])
def test_more_rows_for_a_node_than_its_slab_holds(make_ep, rank, size, device, splits):
    """All tokens want experts of both nodes. The host hears of it in a later call, once."""
    options = {"capacity": {"max_rows_per_node": 5}, "exchange": {"network_splits": splits}}
    ep = make_ep(ranks_per_node=size // 2, experts=8, top_k=2, **options)
    tokens = make_tokens(ep.config, rank, 9)
    tokens.ids[:] = torch.tensor([1, 6])
    with pytest.raises(epmoe.EPOverflowError, match="9 rows for one node, but capacity.max_rows_per_node is 5"):
        run_round(ep, tokens)
        ep.check()
    ep.check()
    assert ep.health().dropped_pairs == 8
    few = make_tokens(ep.config, rank, 5)
    assert_y(run_round(ep, few), ep.config, few)


def test_counts_stay_at_the_source(make_ep, rank, size, device):
    ep = make_ep(ranks_per_node=size // 2, experts=8, top_k=3)
    check_counts_of_bad_pairs(ep)


@pytest.mark.parametrize("splits", ["padded", "exact"])
@pytest.mark.parametrize("after", ["dispatch_send", "dispatch_recv", "combine_send"])
@pytest.mark.parametrize("alone", [False, True])
def test_abort_between_phases(make_ep, rank, size, device, after, alone, splits):
    """On every rank, or on the last one alone: the round is closed, and the next round is complete."""
    ep = make_ep(ranks_per_node=size // 2, exchange={"network_splits": splits})
    for n in range(3):
        tokens = make_tokens(ep.config, rank, 16 - rank, seed=n)
        abort_round(ep, given(ep, tokens), after, alone)
        assert_y(run_round(ep, tokens), ep.config, tokens)


def test_aborts_of_other_shapes(make_ep, rank, size, device):
    check_aborts_of_other_shapes(make_ep(ranks_per_node=size // 2))


class CapturedRound(Captured):
    """A round in a graph, with slabs of `padded` rows, and rows of any payload."""

    def __init__(self, ep: ExpertParallel, T: int, padded: int | None = None) -> None:
        self.padded = padded
        super().__init__(ep, T)

    def _round(self) -> Tensor:
        d = self.ep.dispatch(self.x, self.ids, self.weights, num_tokens=self.real, padded_tokens=self.padded)
        rows = dequantised(d.rows, d.scales, d.dtype)
        return self.ep.combine(self.experts(SimpleNamespace(rows=rows, expert_offsets=d.expert_offsets)), d)


@pytest.mark.parametrize("payload", ["auto", "fp8"])
@pytest.mark.parametrize(("T", "padded"), [(16, None), (16, 40), (1, 1), (128, 128)])
def test_replays(make_ep, rank, size, device, T, padded, payload):
    """Any number of real tokens on each rank, 0 too; rounds outside the graph between replays; buffers full of NaN."""
    options = {"hidden": 256, "dtype": "bfloat16", "max_tokens": 128, "exchange": {"payload": payload}}
    ep = make_ep(64, ranks_per_node=size // 2, top_k=6, **options)
    captured = CapturedRound(ep, T, padded)
    for seed, real in enumerate((0, 1, T // 2, T, 1, T)):
        for name in ("rail.received", "rail.sent", "rail.returned", "rail.slots"):
            poison_(ep._exchange.views[name])
        torch.cuda.synchronize()
        meet()  # no rank sends before all have done so
        captured.check(seed, real if rank % 2 == 0 else T - real)
        if seed % 2:
            tokens = make_tokens(ep.config, rank, 7 - rank, seed=seed)
            assert_y(run_round(ep, tokens), ep.config, tokens)
    ep.check()


def test_two_graphs_of_other_lengths(make_ep, rank, size, device):
    """As a server has them: one for each length, which all ranks replay together."""
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
    assert_y(run_round(ep, tokens), ep.config, tokens)
    inputs = given(ep, tokens)
    ep.dispatch_send(*inputs)
    ep.abort()
    torch.cuda.synchronize()
    refused = pytest.raises(RuntimeError, match="run a round outside of the graph first")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        ep.dispatch(*inputs)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    CapturedRound(ep, 8).check(0, 8)
    ep.check()


def test_exact_slabs_are_not_captured(make_ep, rank, size, device):
    """The error says what to do, and comes before anything is sent."""
    ep = make_ep(ranks_per_node=size // 2, exchange={"network_splits": "exact"})
    tokens = make_tokens(ep.config, rank, 5)
    inputs = given(ep, tokens)
    refused = pytest.raises(RuntimeError, match="set `exchange.network_splits` to padded")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        ep.dispatch(*inputs)
    assert_y(run_round(ep, tokens), ep.config, tokens)


def test_resume_with_new_communicators(make_ep, rank, size, device):
    ep = make_ep(ranks_per_node=size // 2)
    tokens = make_tokens(ep.config, rank, 6)
    for _ in range(2):
        assert_y(run_round(ep, tokens), ep.config, tokens)
        ep.resume()
    captured = CapturedRound(ep, 16)
    captured.check(5, 16)
    assert ep.generation == 2
