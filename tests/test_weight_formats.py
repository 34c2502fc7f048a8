"""Weights of few bits have the values of their codes and scales: every code, every scale of MXFP4."""

from __future__ import annotations

import pytest
import torch
from helpers import randn
from torch import Tensor

from epmoe.local.weight_formats import codes_of, dequantize_weights
from epmoe.native.arguments import MXFP4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GROUP, E8M0 = 32, torch.float8_e8m0fnu
CODES = torch.tensor([*E2M1, *(-value for value in E2M1)])


def value(weight: Tensor, scales: Tensor) -> Tensor:
    """In fp64, where no product is rounded."""
    codes = codes_of(weight).double()
    each = scales.double().repeat_interleave(32, 1)
    return codes * each


def test_codes_are_those_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    pairs = torch.arange(256, dtype=torch.uint8)[:, None]
    table = torch.tensor(mxfp4.FP4_VALUES)
    codes = codes_of(pairs.view(MXFP4))
    assert torch.equal(codes, table[torch.cat([pairs & 15, pairs >> 4], 1).int()])
    assert torch.equal(codes.signbit(), table.signbit()[torch.cat([pairs & 15, pairs >> 4], 1).int()])


def test_every_code_and_every_scale_of_mxfp4():
    """Experts [e, n, k] dequantized: the value in bf16 and fp32, Inf beyond their range, NaN with the scale of 255."""
    codes = torch.arange(16, dtype=torch.uint8)
    weights = (codes | codes.flip(0) << 4).repeat(1, 256, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    each = CODES[torch.stack([codes, codes.flip(0)], 1).flatten().int()].double()
    want = each * torch.exp2(scales.double() - 127)
    want[:, 255] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantize_weights(weights.view(MXFP4), scales.view(E8M0), dtype)
        assert torch.equal(got[:, :255], want[:, :255].to(dtype)) and got[:, 255].isnan().all()
        assert torch.equal(got[:, :255].signbit(), want[:, :255].signbit())
        finite = want.abs() <= torch.finfo(dtype).max
        assert torch.equal(got[finite].double(), want[finite])


def mxfp4(n: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randint(256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 125, (n, k // 32), generator=generator, dtype=torch.uint8)
    return weight.view(MXFP4), scales.view(E8M0)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 384), (200, 96), (5, 32), (129, 160)])
def test_mxfp4_of_any_size(n, k):
    weight, scales = mxfp4(n, k)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize_weights(weight, scales, dtype).double(), value(weight, scales))
    scales[-1, -1] = torch.nan
    assert dequantize_weights(weight, scales, torch.bfloat16)[-1, -GROUP:].isnan().all()


@pytest.mark.parametrize(
    ("scales", "each"),
    [
        (torch.tensor(0.37), lambda scale: scale),
        (torch.tensor([[0.37]]).bfloat16(), lambda scale: scale),
        (torch.linspace(0.1, 0.2, 256)[:, None], lambda rows: rows),
        (torch.linspace(0.1, 0.2, 256), lambda rows: rows[:, None]),
        (torch.rand(2, 2), lambda blocks: blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)),
        (torch.rand(256, 8).to(torch.float8_e8m0fnu), lambda groups: groups.float().repeat_interleave(GROUP, 1)),
    ],
)
def test_scales_of_fp8(scales, each):
    weight = randn(256, 256).to(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize_weights(weight, scales, dtype), (weight.float() * each(scales).float()).to(dtype))
