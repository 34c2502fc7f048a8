"""Tensors that begin at any address, as views of longer ones do: each stage returns the bits that
it returns elsewhere, but for the sums of softmax and of logits, which may have another order.
"""

from __future__ import annotations

import pytest
import torch
from addresses import moved
from expert_inputs import BF16
from helpers import alone, randn
from torch import Tensor

import epmoe
from epmoe.local.logits import router_logits

T = 37
E = 128
K = 8
D = 512
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16])


def inputs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids and weights."""
    routing = epmoe.route(randn(T, E, seed=1).to(device), K)
    return randn(T, D, seed=2, dtype=dtype).to(device), routing.ids, routing.weights


@DTYPES
@pytest.mark.parametrize("experts", [8, 60, 128, 256])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_route(device, scoring, experts, dtype):
    logits = randn(T, experts, dtype=dtype).to(device)
    bias = randn(experts, seed=3).to(device)
    wanted = epmoe.route(logits, 4, scoring=scoring, bias=bias)
    got = epmoe.route(moved(logits), 4, scoring=scoring, bias=moved(bias))
    assert torch.equal(got.ids, wanted.ids)
    torch.testing.assert_close(got.weights, wanted.weights, rtol=1e-6, atol=0.0)


@DTYPES
def test_permute_and_finalize(device, dtype):
    x, ids, weights = inputs(device, dtype)
    expert_map = torch.arange(E, dtype=torch.int32, device=device)
    wanted = epmoe.permute(x, ids, expert_map, E)
    got = epmoe.permute(moved(x), moved(ids), moved(expert_map), E)
    assert torch.equal(got.rows, wanted.rows) and torch.equal(got.row_of_pair, wanted.row_of_pair)
    y = epmoe.finalize(wanted.rows, wanted, weights)
    assert torch.equal(epmoe.finalize(moved(wanted.rows), got, moved(weights)), y)


@DTYPES
@pytest.mark.parametrize("granularity", ["block", "tensor"])
def test_quantize(device, dtype, granularity):
    x, _, _ = inputs(device, dtype)
    wanted = epmoe.quantize_fp8(x, granularity=granularity)
    got = epmoe.quantize_fp8(moved(x), granularity=granularity)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("invariant", [False, True])
def test_router_logits(device, invariant):
    x, _, _ = inputs(device, BF16)
    weight = randn(E, D, seed=4, dtype=BF16).to(device)
    wanted = router_logits(x, weight, None, invariant=invariant)
    got = router_logits(moved(x), moved(weight), None, invariant=invariant)
    torch.testing.assert_close(got, wanted)


@DTYPES
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_round(device, in_fp8, layout, dtype):
    x, ids, weights = inputs(device, dtype)
    scales = None
    if in_fp8:
        x, scales = epmoe.quantize_fp8(x)
    name = str(dtype).removeprefix("torch.")
    config = alone(E, K, D, name, T, exchange={"payload": "fp8" if in_fp8 else "auto"})
    with epmoe.ExpertParallel(config, device=device) as ep:

        def played(x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None) -> Tensor:
            d = ep.dispatch(x, ids, weights, scales=scales, layout=layout)
            if layout == "expert":
                y = ep.combine(torch.ones(len(d.rows), D, device=device).to(d.dtype), d)
            else:
                rows = torch.ones(*d.recv.x.shape[:2], D, device=device).to(d.dtype)
                y = ep.combine_partial(rows, d)
            return y.clone()

        wanted = played(x, ids, weights, scales)
        if scales is not None:
            scales = moved(scales)
        assert torch.equal(played(x, moved(ids), moved(weights), scales), wanted)
        assert torch.equal(played(moved(x), ids, weights, scales), wanted)
        ep.check()
