"""Which library computes the grouped GEMM, and what DeepGEMM gets. A stand-in replaces it where there is no GPU."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from expert_inputs import BF16, BLOCK, FP8, D, E, assert_right, inputs, real_rows, want, weights
from helpers import NO_CUDA, ON_GPUS, alone, assert_close, poison_, randn
from torch import Tensor

import epmoe
from epmoe.local import grouped_gemm


@pytest.fixture
def deep_gemm(monkeypatch) -> Iterator[list[Tensor]]:
    """A stand-in for DeepGEMM by its contract; returns the row layouts that it was given.

    It looks up the expert of each block of 128 rows at the block's first row, skips blocks of −1, and leaves anything
    in their results.
    """
    calls = []

    def grouped(rows: Tensor, weights: Tensor, out: Tensor, experts: Tensor) -> None:
        assert rows.is_contiguous() and weights.is_contiguous() and out.dtype == BF16
        assert experts.dtype == torch.int32 and experts.shape == rows.shape[:1] and experts.is_contiguous()
        calls.append(experts)
        poison_(out)
        for start in range(0, len(rows), BLOCK):
            block = slice(start, start + BLOCK)
            if (expert := int(experts[start])) >= 0:
                out[block] = (rows[block].float() @ weights[expert].float().T).to(BF16)

    def fp8(rows: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], out: Tensor, experts: Tensor) -> None:
        assert rows[0].dtype == weights[0].dtype == FP8 and rows[1].dtype == weights[1].dtype == torch.float32
        assert rows[1].shape == (rows[0].shape[0], rows[0].shape[1] // BLOCK)
        plain = rows[0].float() * rows[1].repeat_interleave(BLOCK, 1)
        grouped(plain, grouped_gemm.dequantize_weights(*weights, torch.float32), out, experts)

    stand_in = types.ModuleType("deep_gemm")
    stand_in.m_grouped_bf16_gemm_nt_contiguous, stand_in.m_grouped_fp8_gemm_nt_contiguous = grouped, fp8
    stand_in.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    yield calls


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_deep_gemm_gets_its_layout(deep_gemm, dtype):
    experts = epmoe.GroupedExperts(**weights(dtype, torch.device("cpu")))
    experts.gemm = "deep_gemm"
    assert experts.alignment == 128
    # fp8 rounds what travels between the two GEMMs to three bits of mantissa.
    assert_right(experts, slack=12 if dtype == FP8 else 4)
    expert_of_row = torch.tensor([0, 2, 2, 3]).repeat_interleave(128)
    for layout in deep_gemm:
        assert torch.equal(layout[:512], expert_of_row.int()) and layout[512:].eq(-1).all()
    assert len(deep_gemm) == 2


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_deep_gemm_takes_fp8_rows(deep_gemm, dtype):
    """fp8 rows go to fp8 experts as they are; bf16 experts get them dequantised."""
    experts = epmoe.GroupedExperts(**weights(dtype, torch.device("cpu")))
    experts.gemm = "deep_gemm"
    rows, offsets = inputs(BF16, torch.device("cpu"))
    q, scales = epmoe.quantize_fp8(rows)
    got = experts(q, offsets, scales)
    plain = (q.float() * scales.repeat_interleave(BLOCK, 1)).double()
    assert_close(got[real_rows()], want(experts, plain), slack=12 if dtype == FP8 else 4)
    if dtype == FP8:
        assert torch.equal(experts(rows, offsets)[real_rows()], got[real_rows()])


@pytest.mark.parametrize(
    ("installed", "capability", "dtype", "F", "problem"),
    [
        (True, 9, FP8, 128, None),
        (True, 9, BF16, 100, None),
        (True, 10, BF16, 128, None),
        (False, 9, FP8, 128, r"DeepGEMM is not installed: `pip install sgl-deep-gemm`"),
        (True, 8, BF16, 128, "GPUs of compute capability 9, got 8"),
        (True, 10, FP8, 128, "GPUs of compute capability 9, got 10"),
        (True, 9, FP8, 192, "multiples of 128"),
        (True, 9, torch.float16, 128, "weights in bfloat16 or float8_e4m3fn, got"),
    ],
)
def test_what_deep_gemm_takes(monkeypatch, installed, capability, dtype, F, problem):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    found = grouped_gemm._problem_with_deep_gemm(torch.zeros(2, 2 * F, 256).to(dtype), torch.zeros(2, 256, F).to(dtype))
    if problem is None:
        assert found is None
    else:
        with pytest.raises((ImportError, ValueError), match=problem):
            raise found


def test_a_layer_needs_the_alignment_of_deep_gemm(deep_gemm):
    for alignment in (64, 128):
        config = alone(E, 2, D, "bfloat16", 8, capacity={"alignment": alignment}, exchange={"payload": "fp8"})
        with epmoe.ExpertParallel(config) as ep:
            experts = epmoe.GroupedExperts(**weights(FP8, ep.device))
            layer = epmoe.MoELayer(ep, randn(E, D), experts)
            x = randn(8, D, dtype=BF16)
            dequantised = layer(x)
            experts.gemm = "deep_gemm"
            if alignment == 64:
                with pytest.raises(ValueError, match="`capacity.alignment` must be a multiple of 128, got 64"):
                    layer(x)
            else:
                assert_close(layer(x), dequantised.double(), slack=4)


HAS_DEEP_GEMM = pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="DeepGEMM is not installed")


@HAS_DEEP_GEMM
@ON_GPUS
@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_deep_gemm_itself(device, dtype):
    experts = epmoe.GroupedExperts(**weights(dtype, device), gemm="deep_gemm")
    assert experts.gemm == "deep_gemm" and experts.alignment == 128
    assert_right(experts, slack=12 if dtype == FP8 else 4)
    rows, offsets = inputs(BF16, device)
    eager = experts(rows, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(rows, offsets)
    graph.replay()
    torch.cuda.synchronize()
    real = real_rows().to(device)
    assert torch.equal(out[real], eager[real])


@NO_CUDA
@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is not None, reason="DeepGEMM is installed")
def test_without_deep_gemm():
    given = weights(FP8, torch.device("cuda"))
    with pytest.raises(ImportError, match="pip install sgl-deep-gemm"):
        epmoe.GroupedExperts(**given, gemm="deep_gemm")
    with pytest.warns(UserWarning, match="dequantised in every call.*pip install sgl-deep-gemm"):
        experts = epmoe.GroupedExperts(**given)
    assert experts.gemm == "torch"
    assert_right(experts)
