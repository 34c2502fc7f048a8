"""The gated activation between the experts' GEMMs: right, and rows past the last segment are left
alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from helpers import FLOATS, ON_GPUS, assert_close, captured, poison_, poisoned_memory, randn
from torch import Tensor

from epmoe.native import ops

N = 90
OFFSETS = [0, 3, 3, 70, 75]  # expert 1 has no rows, and the last 15 rows belong to nobody


class Gating(NamedTuple):
    """The arguments of the operator between `bias` and `quantize`."""

    interleaved: bool = False
    limit: float = math.inf
    alpha: float = 1.0
    up_offset: float = 0.0


SWIGLU = Gating()
GPT_OSS = Gating(True, 7.0, 1.702, 1.0)


def inputs(
    F: int, dtype: torch.dtype, device: torch.device, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """gate_up, far beyond any limit and NaN past the last segment; expert_offsets; bias."""
    gate_up = poison_(torch.empty(N, 2 * F, dtype=dtype))
    gate_up[: OFFSETS[-1]] = randn(OFFSETS[-1], 2 * F, dtype=dtype) * 5
    bias = randn(len(OFFSETS) - 1, 2 * F, dtype=dtype, seed=1).to(device) * 3 if biased else None
    return gate_up.to(device), torch.tensor(OFFSETS, dtype=torch.int32, device=device), bias


def gated(
    gate_up: Tensor, offsets: Tensor, bias: Tensor | None, *options: object
) -> tuple[Tensor, Tensor]:
    """Outputs and their scales, [N, F] and [N, B]; options: a `Gating`, whether to quantize, and
    tokens_per_expert.
    """
    *options, tokens = options if isinstance(options[-1], Tensor) else (*options, None)
    out, scales = ops.gated_activation(gate_up, offsets, tokens, bias, *options)
    assert scales.shape[1] % 4 == 0
    return out, scales.t()[: len(gate_up)]


def reference(gate_up: Tensor, bias: Tensor | None, gating: Gating) -> Tensor:
    """The real rows in fp64."""
    real = gate_up[: OFFSETS[-1]].double()
    if bias is not None:
        real = real + bias.double().repeat_interleave(
            torch.tensor(OFFSETS).diff().to(bias.device), 0
        )
    gate, up = (real[:, ::2], real[:, 1::2]) if gating.interleaved else real.chunk(2, 1)
    gate = gate.clamp(max=gating.limit)
    up = up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(gating.alpha * gate) * (up + gating.up_offset)


@pytest.mark.parametrize("F", [1, 7, 96, 128, 200, 768])
@pytest.mark.parametrize("gating", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_agrees_with_torch(device, dtype, gating, F):
    for biased in (False, True):
        gate_up, offsets, bias = inputs(F, dtype, device, biased)
        with poisoned_memory():
            out, scales = gated(gate_up, offsets, bias, *gating, False)
        assert out.shape == (N, F) and out.dtype == dtype and scales.shape == (0, -(-F // 128))
        assert_close(out[: OFFSETS[-1]], reference(gate_up, bias, gating))
        assert out[OFFSETS[-1] :].isnan().all(), "rows past the last segment are not written"


@pytest.mark.parametrize("F", [6, 128, 200, 768])
@pytest.mark.parametrize("gating", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantized(device, dtype, gating, F):
    """A scale for each 128 outputs of a row: the largest becomes 448."""
    gate_up, offsets, bias = inputs(F, dtype, device, biased=True)
    with poisoned_memory():
        q, scales = gated(gate_up, offsets, bias, *gating, True)
    blocks = -(-F // 128)
    assert q.dtype == torch.float8_e4m3fn and q.shape == (N, F) and scales.shape == (N, blocks)
    # The largest of each block is 448.
    real = OFFSETS[-1]
    want = reference(gate_up, bias, gating)
    amax = torch.stack([block.abs().amax(1) for block in want.split(128, 1)], 1)
    torch.testing.assert_close(scales[:real].double(), amax / 448, rtol=3e-6, atol=0)
    # Values are within half a step of fp8.
    step = (want.abs() * 2**-4).maximum(
        scales[:real].double().repeat_interleave(128, 1)[:, :F] * 2**-10
    )
    got = q[:real].double() * scales[:real].double().repeat_interleave(128, 1)[:, :F]
    assert ((got - want).abs() <= step * 1.001).all()
    assert scales[real:].isnan().all(), "rows past the last segment are not written"


def test_a_nan_stays_where_it_is(device):
    """Neither a limit nor the scale of its block hides it."""
    gate_up, offsets, _ = inputs(256, torch.bfloat16, device, biased=False)
    before, _ = gated(gate_up, offsets, None, *GPT_OSS, False)
    # NaN in one gate and in one up.
    gate_up[2, 10] = gate_up[4, 301] = math.nan  # a gate and an up
    out, _ = gated(gate_up, offsets, None, *GPT_OSS, False)
    assert out[: OFFSETS[-1]].isnan().nonzero().tolist() == [[2, 5], [4, 150]]
    q, scales = gated(gate_up, offsets, None, *GPT_OSS, True)
    assert q.float()[: OFFSETS[-1]].isnan().nonzero().tolist() == [[2, 5], [4, 150]]
    assert scales[: OFFSETS[-1]].isfinite().all()
    # All other values are as before.
    out[2, 5] = before[2, 5]
    out[4, 150] = before[4, 150]
    assert torch.equal(out[: OFFSETS[-1]], before[: OFFSETS[-1]])


@pytest.mark.parametrize("quantize", [False, True])
def test_strides_and_addresses_that_no_vector_fits(device, quantize):
    gate_up, offsets, bias = inputs(128, torch.bfloat16, device, biased=True)
    beside = torch.zeros(N, 300, dtype=torch.bfloat16, device=device)
    beside[:, 1:257] = gate_up
    real = OFFSETS[-1]
    for given in ((gate_up, bias), (beside[:, 1:257], bias)):
        got = gated(given[0], offsets, given[1], *GPT_OSS, quantize)
        want = gated(gate_up, offsets, bias, *GPT_OSS, quantize)
        assert all(
            torch.equal(a[:real].float(), b[:real].float()) for a, b in zip(got, want, strict=True)
        )


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("F", [96, 768])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gaps_are_neither_read_nor_written(device, dtype, F, quantize):
    gate_up, offsets, bias = inputs(F, dtype, device, biased=True)
    # The last count is clamped to its segment.
    tokens = torch.tensor([2, 0, 67, 10**6], dtype=torch.int32, device=device)
    want = gated(gate_up, offsets, bias, *GPT_OSS, quantize)
    gate_up[2] = math.nan
    with poisoned_memory():
        got = gated(gate_up, offsets, bias, *GPT_OSS, quantize, tokens)
    real = [t for t in range(OFFSETS[-1]) if t != 2]
    for a, b in zip(got, want, strict=True) if quantize else [(got[0], want[0])]:
        assert torch.equal(a[real].float(), b[real].float())
        assert a[2].float().isnan().all() and a[OFFSETS[-1] :].float().isnan().all()


@pytest.mark.parametrize("B", [1, 6, 56])
def test_scales_by_block(device, B):
    """Those of real rows, in columns; nothing else is read or written."""
    # Only real rows have scales.
    scales = poison_(torch.empty(N, B))
    real = [0, 1, *range(3, 70), *range(70, 73)]
    scales[real] = torch.rand(len(real), B)
    offsets, tokens = (
        torch.tensor(v, dtype=torch.int32, device=device) for v in (OFFSETS, [2, 0, 67, 3])
    )
    given = torch.zeros(N, B + 3, device=device)[:, :B].copy_(scales)  # with a stride of its own
    # In columns, they are there, and nothing else.
    with poisoned_memory():
        out = ops.scales_by_block(given, offsets, tokens)
    assert out.shape == (B, 92) and out.stride() == (92, 1)
    assert (
        torch.equal(out.t()[:N].nan_to_num(-1), scales.nan_to_num(-1).to(device))
        and out[:, N:].isnan().all()
    )
    # Without counts all rows up to the last segment are real.
    whole = ops.scales_by_block(given, offsets, None)
    assert torch.equal(whole.t()[: OFFSETS[-1]].nan_to_num(-1), given[: OFFSETS[-1]].nan_to_num(-1))
    assert ops.scales_by_block(given[:0], offsets, tokens).shape == (B, 0)
    torch.library.opcheck(
        ops.scales_by_block, (torch.rand(8, B, device=device), offsets.clamp(max=8), None)
    )


@pytest.mark.parametrize("last", [-5, 0, N, 10**6])
def test_a_wild_end_is_clamped(device, last):
    gate_up = randn(N, 64).to(device)
    offsets = torch.tensor([0, last], dtype=torch.int32, device=device)
    with poisoned_memory():
        out, _ = gated(gate_up, offsets, None, *SWIGLU, False)
    assert out.isfinite().all() if last > 0 else out.isnan().all()
    gated(gate_up[:0], offsets, None, *SWIGLU, False)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(device, biased, quantize):
    gate_up, offsets, bias = inputs(96, torch.float32, device, biased)
    # opcheck compares all rows and columns, so no row may lie past the segments.
    real = gate_up[:72].contiguous()
    offsets = offsets.clamp(max=72)
    torch.library.opcheck(ops.gated_activation, (real, offsets, None, bias, *GPT_OSS, quantize))


def test_opcheck_with_tensor_scales():
    """Of NVFP4, whose rows are bf16."""
    gate_up, offsets, bias = inputs(96, torch.bfloat16, torch.device("cpu"), True)
    real = gate_up[:72].contiguous()
    offsets = offsets.clamp(max=72)
    scales = torch.rand(len(offsets) - 1, 3)
    given = (real, offsets, None, bias, *GPT_OSS, False, scales)
    torch.library.opcheck(ops.gated_activation, given)


@ON_GPUS
@pytest.mark.parametrize("quantize", [False, True])
def test_a_replay_takes_the_offsets_of_its_time(device, quantize):
    gate_up, _, bias = inputs(768, torch.bfloat16, device, biased=True)
    gate_up.nan_to_num_(1.0)
    offsets = torch.zeros(len(OFFSETS), dtype=torch.int32, device=device)
    replay, got = captured(lambda: gated(gate_up, offsets, bias, *GPT_OSS, quantize))
    # One row, all, and up to the last row.
    for ends in ([0, 0, 0, 0, 1], OFFSETS, [0, 1, 2, 3, N]):
        for tensor in got:
            tensor.copy_(torch.full_like(tensor.float(), math.nan))
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        replay()
        want = gated(gate_up, offsets, bias, *GPT_OSS, quantize)
        for a, b in zip(got, want, strict=True):
            assert (
                torch.equal(a[: ends[-1]].float(), b[: ends[-1]].float())
                and a[ends[-1] :].float().isnan().all()
            )


@ON_GPUS
def test_more_than_2_to_the_31_elements(device):
    rows = 270_000
    F = 4096
    gate_up = torch.empty(rows, 2 * F, dtype=torch.bfloat16, device=device).normal_()
    offsets = torch.tensor([0, 7, rows], dtype=torch.int32, device=device)
    out, _ = gated(gate_up, offsets, None, *SWIGLU, False)
    q, scales = gated(gate_up, offsets, None, *SWIGLU, True)
    # The last rows are right.
    few = slice(rows - 500, rows)
    want = torch.nn.functional.silu(gate_up[few, :F].double()) * gate_up[few, F:].double()
    assert_close(out[few], want)
    dequantized = q[few].double() * scales[few].double().repeat_interleave(128, 1)
    assert ((dequantized - want).norm(dim=1) <= 0.04 * want.norm(dim=1)).all()
