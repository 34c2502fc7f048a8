"""CUDA graphs: replays with fewer real tokens than captured, ranks that replay different graphs,
and stale rows.

And the calls of a round on different streams.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from exchanges import (
    assert_round,
    assert_y,
    expected_y,
    gains,
    given,
    make_tokens,
    poison,
    run_experts,
)
from helpers import ON_GPUS, ROOT, assert_close, captured, full_layer, poison_, randn
from test_layers import D, E, K
from torch import Tensor

import epmoe
from epmoe import Dispatched, ExpertParallel

pytestmark = pytest.mark.usefixtures("serving")


def capturable_experts(ep: ExpertParallel) -> Callable[[Dispatched], Tensor]:
    """The tests' experts without host synchronisation. Rows past the last segment are undefined."""
    local = ep.placement.logical_experts(ep.rank)
    gain_eD = gains(ep.config, ep.config.model.hidden_size)[local].to(ep.device)

    def experts(d: Dispatched) -> Tensor:
        rows = torch.arange(d.rows.shape[0], device=ep.device)
        expert = torch.searchsorted(d.expert_offsets[1:], rows, right=True).clamp(
            max=len(local) - 1
        )
        return d.rows * gain_eD[expert].to(d.rows.dtype)

    return experts


class Captured:
    """A captured round of T tokens, with its input buffers and the number of real tokens."""

    def __init__(self, ep: ExpertParallel, T: int) -> None:
        model = ep.config.model
        self.ep = ep
        self.experts = capturable_experts(ep)
        # A graph reads and writes these buffers: each replay finds other values in them.
        self.x = torch.zeros(T, model.hidden_size, dtype=model.torch_dtype, device=ep.device)
        self.ids = torch.zeros(T, model.num_experts_per_tok, dtype=torch.int32, device=ep.device)
        self.weights = torch.ones(T, model.num_experts_per_tok, device=ep.device)
        self.real = torch.zeros((), dtype=torch.int32, device=ep.device)
        self.replay, self.y = captured(self._round)

    def _round(self) -> Tensor:
        d = self.ep.dispatch(self.x, self.ids, self.weights, num_tokens=self.real)
        return self.ep.combine(self.experts(d), d)

    def check(self, seed: int, real: int) -> None:
        """Replays the round on new tokens, of which the first `real` are real."""
        # New tokens into the buffers of the graph; y must be written anew.
        T = len(self.x)
        tokens = make_tokens(self.ep.config, self.ep.rank, T, seed=seed, padded=T - real)
        for buffer, values in zip(
            (self.x, self.ids, self.weights), (tokens.x, tokens.ids, tokens.weights), strict=True
        ):
            buffer.copy_(values)
        self.real.fill_(real)
        poison_(self.y)
        self.replay()
        assert_y(self.y, self.ep.config, tokens)


@ON_GPUS
@pytest.mark.parametrize(
    ("T", "ll_max_tokens"),
    # The last two by the limit of two ranks.
    [(16, 256), (128, 256), (300, 256), (400, 512), (1100, None), (2048, None)],
)
def test_any_number_of_real_tokens(make_ep, rank, size, device, T, ll_max_tokens):
    rounds = Captured(make_ep(ll_max_tokens, top_k=6, hidden=256, max_tokens=T), T)
    # Every second rank has as many as its neighbour lacks.
    for seed, real in enumerate((0, 1, T // 2, T, 1, T)):
        rounds.check(seed, real if rank % 2 == 0 else T - real)
    rounds.ep.check()


@ON_GPUS
def test_ranks_that_replay_different_graphs(make_ep, rank, size, device):
    ep = make_ep(ll_max_tokens=32, top_k=6, hidden=256, max_tokens=128)
    rounds = [Captured(ep, T) for T in (8, 40, 128)]
    for n in range(9):
        # In one round ranks replay graphs of different sizes.
        mine = rounds[(rank + n // 2) % 3]
        mine.check(n, len(mine.x) - n % 3)
    ep.check()


@ON_GPUS
@pytest.mark.parametrize("called", [1, 40, 1024, 1100, 2048, 2600])
@pytest.mark.parametrize("T", [40, 1025, 2048, 2600])
def test_replays_after_calls_of_another_size(make_ep, rank, size, device, T, called):
    """Two ranks take the LL protocol for up to 2048 tokens, and one for up to 1535."""
    ep = make_ep(top_k=6, hidden=256, max_tokens=2600)
    rounds = Captured(ep, T)
    tokens = make_tokens(ep.config, rank, called, seed=5)
    for seed in range(3):
        assert_round(ep, tokens)
        # Some ranks have less.
        rounds.check(seed, T - (rank + seed) % 2 * (T // 3))
    # The same where ranks differ: one replays, the others call.
    for turn in range(2):
        if rank % 2 == turn:
            rounds.check(turn, T)
        else:
            assert_round(ep, tokens)
    ep.check()


@ON_GPUS
@pytest.mark.parametrize("T", [128, 1024])
@pytest.mark.parametrize("real", [1, 4])  # tokens of one request
def test_stale_rows(make_ep, rank, size, device, T, real):
    """All rows but those of one request are padding. Every buffer is full of NaN before each
    replay.
    """
    ep = make_ep(experts=32, top_k=4, hidden=256, dtype="bfloat16", max_tokens=T)
    experts = capturable_experts(ep)
    num_tokens = torch.full((), real, dtype=torch.int32, device=device)
    x = torch.zeros(T, 256, dtype=torch.bfloat16, device=device)
    logits = torch.zeros(T, 32, device=device)

    def layer() -> tuple[epmoe.Routing, Tensor, Tensor]:
        routing = ep.route(logits, num_tokens=num_tokens)
        d = ep.dispatch(x, routing.ids, routing.weights, num_tokens=num_tokens)
        y = ep.combine(experts(d), d)
        return routing, y, epmoe.quantize_fp8(y, granularity="tensor").scales

    replay, (routing, y, scale) = captured(layer)
    for seed in range(5):
        # Only the rows of one request are real.
        tokens = make_tokens(ep.config, rank, T, seed=seed, padded=T - real)
        x.copy_(tokens.x)
        logits[:real] = torch.randn(
            real, 32, generator=torch.Generator().manual_seed(100 * rank + seed)
        ).to(device)
        # Everything else is NaN: padding, y, and all buffers of the window.
        poison_(logits[real:])
        poison_(y)
        poison(ep)
        replay()
        # Padding has no expert; real rows are right; no scale has seen a NaN.
        assert routing.ids[real:].eq(32).all() and routing.weights[real:].eq(0).all()
        tokens.ids = routing.ids.cpu()
        tokens.weights = routing.weights.cpu()
        assert_close(y[:real], expected_y(ep.config, tokens)[:real])
        assert y[real:].eq(0).all()
        assert scale.isfinite().all() and y.abs().amax().isfinite()
    ep.check()


def example() -> type:
    """`CapturedLayer` as it stands in docs/graphs.md."""
    page = (ROOT / "docs/graphs.md").read_text(encoding="utf-8")
    names = {}
    block = next(
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "CapturedLayer" in block
    )
    exec(compile(block, "docs/graphs.md", "exec"), names)
    return names["CapturedLayer"]


def captured_example(
    make_ep: Callable[..., ExpertParallel], **options
) -> tuple[epmoe.MoELayer, Callable]:
    ep = make_ep(experts=E, top_k=K, hidden=D, dtype="bfloat16", max_tokens=32, **options)
    layer, _ = full_layer(ep)
    assert layer.experts.is_capturable, "a loop over the experts reads the offsets on the host"
    return layer, example()(layer, 32)


@ON_GPUS
def test_the_example_of_the_documents(make_ep, rank, size, device):
    layer, step = captured_example(make_ep)
    for seed, tokens in enumerate((32, 1, 0, 17 - rank)):
        x = randn(tokens, D, dtype=torch.bfloat16, seed=10 * seed + rank).to(device)
        got = step(x).clone()
        assert_close(got, layer(x))
    layer.ep.check()


@ON_GPUS
def test_replays_after_a_timeout(make_ep, rank, size, device):
    """Rank 0 stays away: the replays of the others yield zeros, and every `poll` raises, without a
    wait.
    """
    layer, step = captured_example(make_ep, timeout_s=1.0)
    x = randn(8, D, dtype=torch.bfloat16, seed=rank).to(device)
    step(x)
    torch.cuda.synchronize()
    layer.ep.poll()
    # Rank 0 has played its last round. The others replay one more.
    if rank != 0:
        step(x)
        torch.cuda.synchronize()
        # Each further replay raises at once, and its y is zeros.
        for _ in range(2):
            started = time.perf_counter()
            with pytest.raises(epmoe.EPTimeoutError, match=r"rank\(s\) \[0\]"):
                step(x)
            assert time.perf_counter() - started < 0.5
            torch.cuda.synchronize()
            assert step.y.eq(0).all()
    dist.barrier()


@ON_GPUS
def test_a_replay_that_overflows(make_ep, rank, size, device):
    """All tokens go to rank 0, where each replay that drops rows makes `poll` raise once."""
    ep = make_ep(experts=size, top_k=1, max_tokens=16, capacity={"max_expert_rows": 8 * size})
    rounds = Captured(ep, 16)
    for real in (1, 16, 1, 16):
        rounds.real.fill_(real)
        rounds.replay()
        torch.cuda.synchronize()
        # Only rank 0 has too little room, and hears of it once.
        if real == 16 and rank == 0:
            with pytest.raises(
                epmoe.EPOverflowError, match=f"needed {16 * size} expert-major rows"
            ):
                ep.poll()
        ep.poll()


@ON_GPUS
def test_health_is_read_while_a_kernel_waits(make_ep, rank, size, device):
    """Rank 0 comes late. The others read their counts meanwhile, and the kernel that waits for it
    still runs.
    """
    ep = make_ep(timeout_s=20.0)
    tokens = make_tokens(ep.config, rank, 6)
    x, ids, weights = given(ep, tokens)
    d = ep.dispatch(x, ids, weights)
    ep.combine(d.rows, d)
    before = ep.health()
    # The kernel of the others waits for rank 0.
    if rank != 0:
        d = ep.dispatch(x, ids, weights)
        waiting = torch.cuda.Event()
        waiting.record()
        for _ in range(3):
            now = ep.health(wait=False)
            assert now.timeouts == 0 and now.rounds in (before.rounds, before.rounds + 1)
        assert not waiting.query(), "reading has waited for the kernel"
    # Now rank 0 comes, and the round ends.
    dist.barrier()
    if rank == 0:
        d = ep.dispatch(x, ids, weights)
    ep.combine(d.rows, d)
    assert ep.health().rounds == before.rounds + 1


@ON_GPUS
@pytest.mark.parametrize("T", [8, 100])
@pytest.mark.parametrize("phases", [False, True])
def test_calls_change_the_stream(make_ep, rank, size, device, phases, T):
    """They run in the order of the calls. Before each call another stream sleeps for about 2 ms,
    longer than a round, with the call before it behind the sleep.
    """
    ep = make_ep(ll_max_tokens=32, max_tokens=100)
    tokens = make_tokens(ep.config, rank, T)
    x, ids, weights = given(ep, tokens)
    # The rows of every round, and the kernels are loaded.
    d = ep.dispatch(x, ids, weights)
    rows = run_experts(ep, d)  # of every round
    assert_y(ep.combine(rows, d), ep.config, tokens)
    torch.cuda.synchronize()
    dist.barrier()
    streams = cycle(torch.cuda.Stream() for _ in range(3))
    ys = []
    # Each call goes to the next of three streams, behind a sleep.
    for _ in range(6):
        with torch.cuda.stream(next(streams)):
            torch.cuda._sleep(4_000_000)
            d = ep.dispatch_send(x, ids, weights) if phases else ep.dispatch(x, ids, weights)
        if phases:
            with torch.cuda.stream(next(streams)):
                d = ep.dispatch_recv(d)
            with torch.cuda.stream(next(streams)):
                torch.cuda._sleep(4_000_000)
                ep.combine_send(rows, d)
        with torch.cuda.stream(next(streams)):
            ys.append(ep.combine_recv(d) if phases else ep.combine(rows, d))
    ep.check()
    for y in ys:
        assert_y(y, ep.config, tokens)
