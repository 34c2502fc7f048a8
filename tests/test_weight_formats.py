"""Weights of few bits have the values of their codes and scales: every code, every
scale of MXFP4.
"""

from __future__ import annotations

import pytest
import torch
from helpers import randn

from epmoe.local.weight_formats import dequantize_weights
from epmoe.native.arguments import MXFP4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GROUP = 32
E8M0 = torch.float8_e8m0fnu
CODES = torch.tensor([*E2M1, *(-value for value in E2M1)])


def test_every_code_and_every_scale_of_mxfp4():
    """Experts [e, n, k] dequantized: the value in bf16 and fp32, Inf beyond their range, NaN with
    the scale of 255.
    """
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


@pytest.mark.parametrize(
    ("scales", "each"),
    [
        (torch.tensor(0.37), lambda scale: scale),
        (torch.tensor([[0.37]]).bfloat16(), lambda scale: scale),
        (torch.linspace(0.1, 0.2, 256)[:, None], lambda rows: rows),
        (torch.linspace(0.1, 0.2, 256), lambda rows: rows[:, None]),
        (
            torch.rand(2, 2),
            lambda blocks: blocks.repeat_interleave(128, 0).repeat_interleave(128, 1),
        ),
        (
            torch.rand(256, 8).to(torch.float8_e8m0fnu),
            lambda groups: groups.float().repeat_interleave(GROUP, 1),
        ),
    ],
)
def test_scales_of_fp8(scales, each):
    weight = randn(256, 256).to(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(
            dequantize_weights(weight, scales, dtype),
            (weight.float() * each(scales).float()).to(dtype),
        )
