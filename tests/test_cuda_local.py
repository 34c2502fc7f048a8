"""The local kernels on a GPU: agreement with the CPU, CUDA graphs, streams, and large tensors."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FLOATS,
    assert_close,
    captured,
    distinct_ids,
    generator,
    poison_,
    poisoned_memory,
    randn,
    random_bits,
)
from torch import Tensor

import epmoe
from epmoe.local.reference import finalize_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
SCORINGS = ["softmax", "sigmoid"]


def assert_same_permutation(x: Tensor, ids: Tensor, expert_map: Tensor, e: int, **options) -> None:
    """CPU and CUDA agree bitwise in every map, offset, row and counter."""
    results = []
    for device in ("cpu", "cuda"):
        counters = torch.zeros(8, dtype=torch.int64, device=device)
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
        with poisoned_memory():
            got = epmoe.permute(
                x.to(device), ids.to(device), expert_map.to(device), e, counters=counters, **moved
            )
        results.append((got, counters.cpu()))
    # Maps, offsets, rows and counters are equal.
    (want, counted), (got, counted_cuda) = results
    assert torch.equal(got.expert_offsets.cpu(), want.expert_offsets)
    assert torch.equal(got.tokens_per_expert.cpu(), want.tokens_per_expert)
    assert torch.equal(got.row_of_pair.cpu(), want.row_of_pair)
    rows = int(want.expert_offsets[-1])
    assert torch.equal(got.rows[:rows].cpu().view(torch.uint8), want.rows[:rows].view(torch.uint8))
    assert torch.equal(counted_cuda, counted)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_route_agrees_with_the_cpu_for_every_number_of_experts(dtype, scoring):
    for E in range(1, 514):
        K = min(E, 1 + E % 32)
        logits = torch.cat(
            [randn(16, E, dtype=dtype, seed=E) * 3, random_bits(48, E, dtype=dtype, seed=E)]
        )
        want = epmoe.route(logits, K, scoring=scoring)
        got = epmoe.route(logits.cuda(), K, scoring=scoring)
        assert torch.equal(got.ids.cpu(), want.ids), (E, K)
        torch.testing.assert_close(got.weights.cpu(), want.weights, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("E", [32, 100, 128, 256, 513, 1000, 1024, 4096])
def test_route_agrees_with_the_cpu_for_every_top_k(E):
    for K in range(1, 33):
        for dtype in FLOATS:
            logits = random_bits(40, E, dtype=dtype, seed=K)
            logits[:8] = randn(8, E, dtype=dtype, seed=K)
            assert torch.equal(
                epmoe.route(logits.cuda(), K).ids.cpu(), epmoe.route(logits, K).ids
            ), (K, dtype)


@pytest.mark.parametrize(
    ("E", "groups", "top_groups"), [(256, 8, 4), (256, 1, 1), (160, 8, 3), (96, 32, 5), (72, 9, 2)]
)
def test_biased_sigmoid_equals_the_cpu_bitwise(E, groups, top_groups):
    """CPU and CUDA compute a sigmoid with the same operations. The keys are bitwise equal, and so
    are the ids.
    """
    logits = randn(4000, E) * 4
    bias = randn(E, seed=1) * 0.1
    options = {"scoring": "sigmoid", "num_expert_groups": groups, "top_groups": top_groups}
    want = epmoe.route(logits, 8, bias=bias, **options)
    got = epmoe.route(logits.cuda(), 8, bias=bias.cuda(), **options)
    assert torch.equal(got.ids.cpu(), want.ids) and torch.equal(got.weights.cpu(), want.weights)


def test_sigmoid_equals_the_cpu_bitwise():
    logits = random_bits(1 << 22, 1, dtype=torch.float32)
    want = epmoe.route(logits, 1, scoring="sigmoid")
    got = epmoe.route(logits.cuda(), 1, scoring="sigmoid")
    assert torch.equal(got.weights.cpu().view(torch.int32), want.weights.view(torch.int32))


def test_top_k_above_32_is_an_error():
    with pytest.raises(ValueError, match="`top_k` must be at most 32 on CUDA, got 33"):
        epmoe.route(torch.zeros(2, 64, device="cuda"), 33)


@pytest.mark.parametrize("alignment", [1, 4, 128])
@pytest.mark.parametrize("int64", [False, True])
def test_permute_agrees_with_the_cpu(int64, alignment):
    for S in (0, 1, 2, 31, 256, 257, 300, 1024, 5000):
        for P, e, K in [(8, 8, 2), (256, 32, 8), (60, 7, 5), (3000, 2000, 3)]:
            expert_map = torch.full((P,), -1, dtype=torch.int32)
            expert_map[torch.randperm(P, generator=generator(S))[:e]] = torch.arange(
                e, dtype=torch.int32
            )
            ids = torch.randint(
                -2,
                P + 2,
                (S, K),
                generator=generator(S),
                dtype=torch.int64 if int64 else torch.int32,
            )
            assert_same_permutation(randn(S, 24, seed=S), ids, expert_map, e, alignment=alignment)
            assert_same_permutation(
                randn(S, 24, seed=S), ids, expert_map, e, alignment=alignment, max_rows=S * K // e
            )


@pytest.mark.parametrize(
    "counts", [[0], [7], [0, 0, 0], [128, 0, 5], [90, 400, 128, 1], [-3, 1 << 30, 64, 64]]
)
@pytest.mark.parametrize("M", [16, 128, 300])
def test_permute_and_finalize_agree_with_the_cpu_on_slabs(M, counts):
    R = len(counts)
    K = 6
    P = 64
    counts_R = torch.tensor(counts, dtype=torch.int32)
    x = randn(R * M, 72, dtype=torch.bfloat16)
    ids = distinct_ids(R * M, P, K)
    # Padding of each slab is NaN.
    for r, count in enumerate(counts):
        poison_(x[r * M + max(count, 0) : (r + 1) * M])
    expert_map = torch.arange(P, dtype=torch.int32).where(torch.arange(P) < 40, -1)
    assert_same_permutation(x, ids, expert_map, 40, counts_R=counts_R)
    # And their sums.
    weights = randn(R * M, K, seed=2)
    partials = []
    for device in ("cpu", "cuda"):
        permuted = epmoe.permute(
            x.to(device), ids.to(device), expert_map.to(device), 40, counts_R=counts_R.to(device)
        )
        with poisoned_memory():
            partials.append(epmoe.finalize(permuted.rows, permuted, weights.to(device)).cpu())
    assert torch.equal(partials[0].view(torch.int16), partials[1].view(torch.int16))


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_agrees_with_the_cpu(dtype):
    for T, D, real in [(1, 128, 1), (100, 7168, 60), (33, 200, 33), (9, 77, 6), (64, 1000, 5)]:
        x = random_bits(T, D, dtype=dtype)
        x[: T // 2] = randn(T // 2, D, dtype=dtype)
        for granularity in ("tensor", "block"):
            want = epmoe.quantize_fp8(x, granularity=granularity, num_tokens=real)
            got = epmoe.quantize_fp8(x.cuda(), granularity=granularity, num_tokens=real)
            assert torch.equal(got.scales.cpu(), want.scales)
            is_nan = want.q.float().isnan()
            assert torch.equal(got.q.float().cpu().isnan(), is_nan)
            assert torch.equal(got.q.float().cpu()[~is_nan], want.q.float()[~is_nan])


class Layer:
    """The local pipeline on static buffers, so that a CUDA graph can capture it."""

    def __init__(self, T: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.logits = torch.empty(T, 128, dtype=dtype, device="cuda")
        self.x = torch.empty(T, 256, dtype=dtype, device="cuda")
        self.num_tokens = torch.zeros((), dtype=torch.int32, device="cuda")
        self.expert_map = torch.arange(128, dtype=torch.int32, device="cuda")

    def fill(self, real: int, seed: int) -> None:
        poison_(self.logits)
        poison_(self.x)
        self.logits[:real] = randn(real, 128, dtype=self.logits.dtype, seed=seed).cuda()
        self.x[:real] = randn(real, 256, dtype=self.x.dtype, seed=seed + 1).cuda()
        self.num_tokens.fill_(real)

    def run(self) -> tuple[epmoe.Routing, epmoe.Permuted, Tensor, epmoe.Quantized]:
        routing = epmoe.route(self.logits, 8, num_tokens=self.num_tokens, renormalize=True)
        permuted = epmoe.permute(self.x, routing.ids, self.expert_map, 128)
        y = epmoe.finalize(permuted.rows, permuted, routing.weights)
        return (
            routing,
            permuted,
            y,
            epmoe.quantize_fp8(y, granularity="tensor", num_tokens=self.num_tokens),
        )

    def check(self, real: int, y: Tensor, quantized: epmoe.Quantized) -> None:
        assert_close(y[:real], self.x[:real].double())
        assert (
            y[real:].eq(0).all()
            and quantized.scales.isfinite().all()
            and quantized.q[real:].float().eq(0).all()
        )


@pytest.mark.parametrize("T", [1, 128, 256, 257, 1024])
def test_graph_replays_with_stale_rows(T):
    layer = Layer(T)
    layer.fill(T, 0)
    with poisoned_memory():
        replay, (routing, permuted, y, quantized) = captured(layer.run)
        for seed, real in enumerate([T, 1, min(4, T), 0, T // 2]):
            layer.fill(real, seed)
            for written in (routing.ids, routing.weights, permuted.rows, permuted.row_of_pair, y):
                poison_(written)
            replay()
            layer.check(real, y, quantized)


def test_the_current_stream_is_used():
    layer = Layer(512)
    stream = torch.cuda.Stream()
    layer.fill(0, 0)
    torch.cuda.synchronize()
    fresh = Layer(512)
    fresh.fill(512, 3)
    # On another stream the inputs come late.
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        layer.logits.copy_(fresh.logits)
        layer.x.copy_(fresh.x)
        layer.num_tokens.fill_(512)
        _, _, y, quantized = layer.run()
    stream.synchronize()
    layer.check(512, y, quantized)


def test_more_than_2_to_the_31_elements():
    """E = 256 and 300 000 rows of 7168 elements: offsets exceed 2³¹ elements and 2³² bytes."""
    S = 37_500
    D = 7168
    K = 8
    x = torch.randint(-100, 100, (S, D), dtype=torch.int8, device="cuda").bfloat16()
    ids = torch.rand(S, 256, device="cuda").argsort(1)[:, :K].int()
    permuted = epmoe.permute(x, ids, torch.arange(256, dtype=torch.int32, device="cuda"), 256)
    assert permuted.rows.numel() > 2**31
    # Where each pair must be.
    order = ids.flatten().long().argsort(stable=True)
    where = torch.empty_like(order).scatter_(0, order, torch.arange(S * K, device="cuda"))
    assert torch.equal(permuted.row_of_pair.flatten().long(), where)
    for begin in range(0, S * K, 50_000):
        assert torch.equal(
            permuted.rows[begin : begin + 50_000], x[order[begin : begin + 50_000] // K]
        )
    # Weights of 1/K give x again.
    weights = torch.full((S, K), 0.125, device="cuda")
    assert torch.equal(epmoe.finalize(permuted.rows, permuted, weights), x)


@pytest.mark.parametrize("K", [1, 7, 8, 9, 33, 40])
def test_finalize_of_any_top_k(K):
    rows = randn(50, 264, dtype=torch.bfloat16).cuda()
    weights = randn(30, K, seed=1).cuda()
    row_of_pair = torch.randint(-20, 50, (30, K), dtype=torch.int32, generator=generator(K)).cuda()
    permuted = epmoe.Permuted(rows, row_of_pair, row_of_pair, row_of_pair, None)
    assert_close(
        epmoe.finalize(rows, permuted, weights), finalize_reference(rows, permuted, weights)
    )
