"""Weights of few bits become fp8 with scales of blocks where no value changes: every code, every pair of scales."""

from __future__ import annotations

import pytest
import torch
from helpers import randn
from torch import Tensor

from epmoe.local.quantize import dequantize_weights
from epmoe.local.weight_formats import (
    REACH,
    _exact_in_tiles,
    codes_of,
    dequantized,
    granularity,
    lie_close,
    scale_values,
    to_blocks,
)

FP8 = torch.float8_e4m3fn
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
CODES = torch.tensor([*E2M1, *(-value for value in E2M1)])


def value(weight: Tensor, scales: Tensor) -> Tensor:
    """In fp64, where no product is rounded."""
    codes = codes_of(weight).double()
    each = scale_values(scales).double().repeat_interleave(32, 1)
    return codes * each


def test_codes_are_those_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    pairs = torch.arange(256, dtype=torch.uint8)[:, None]
    table = torch.tensor(mxfp4.FP4_VALUES)
    assert torch.equal(codes_of(pairs), table[torch.cat([pairs & 15, pairs >> 4], 1).int()])
    assert torch.equal(codes_of(pairs).signbit(), table.signbit()[torch.cat([pairs & 15, pairs >> 4], 1).int()])


def test_every_code_and_every_pair_of_scales():
    """A tile has all 16 codes with one scale and all with the other; UE8M0 has 255 scales and NaN."""
    exponents = torch.arange(255)
    first, second = (each.flatten() for each in torch.meshgrid(exponents, exponents, indexing="ij"))
    both = scale_values(torch.stack([first, second], 1).to(torch.uint8))
    scales = both.repeat_interleave(16, 1).view(1, -1, 1, 32).transpose(1, 2)  # [1, r, b, c] → one row of tiles
    codes = CODES.repeat(2).expand_as(scales)
    close = (first - second).abs() <= REACH
    # All tiles within reach at once, then each of those outside of it for itself.
    q, of_tiles = _exact_in_tiles(codes[:, :, close], scales[:, :, close], 6)
    got = q.double() * of_tiles.double()[:, None, :, None]
    assert torch.equal(got, codes[:, :, close].double() * scales[:, :, close].double())
    assert torch.equal(q.float().signbit(), codes[:, :, close].signbit())
    assert of_tiles.min() >= 2.0**-126
    far = (~close).nonzero().flatten()
    for tile in far[:: len(far) // 500].tolist():
        assert _exact_in_tiles(codes[:, :, tile : tile + 1], scales[:, :, tile : tile + 1], 6) is None
    edge = ((first - second).abs() == REACH + 1).nonzero().flatten().tolist()
    assert all(_exact_in_tiles(codes[:, :, t : t + 1], scales[:, :, t : t + 1], 6) is None for t in edge)


def test_every_code_and_every_scale_of_mxfp4():
    """Experts [e, n, k] dequantized: the value in bf16 and fp32, Inf beyond their range, NaN with the scale of 255."""
    codes = torch.arange(16, dtype=torch.uint8)
    weights = (codes | codes.flip(0) << 4).repeat(1, 256, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    each = CODES[torch.stack([codes, codes.flip(0)], 1).flatten().int()].double()
    want = each * torch.exp2(scales.double() - 127)
    want[:, 255] = torch.nan
    for dtype in (torch.float32, torch.bfloat16):
        got = dequantize_weights(weights, scales, dtype)
        assert torch.equal(got[:, :255], want[:, :255].to(dtype)) and got[:, 255].isnan().all()
        assert torch.equal(got[:, :255].signbit(), want[:, :255].signbit())
        finite = want.abs() <= torch.finfo(dtype).max
        assert torch.equal(got[finite].double(), want[finite])


def mxfp4(n: int, k: int, *, lowest: int = 120, highest: int = 124) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randint(256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(lowest, highest + 1, (n, k // 32), generator=generator, dtype=torch.uint8)
    return weight, scales


@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 384), (200, 96), (5, 32), (129, 160)])
def test_mxfp4_in_blocks_has_the_same_values(n, k):
    weight, scales = mxfp4(n, k, lowest=110, highest=110 + REACH)
    assert lie_close(scales, packed=True)
    q, of_blocks = to_blocks(weight, scales)
    assert q.shape == (n, k) and of_blocks.shape == (-(-n // 128), -(-k // 128)) and q.is_contiguous()
    assert torch.equal(dequantize_weights(q, of_blocks, torch.float32).double(), value(weight, scales))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantized(weight, scales, dtype).double(), value(weight, scales))


def test_scales_too_far_apart_are_exact_only_where_no_code_needs_them():
    weight, scales = mxfp4(256, 256)
    scales[130, 7] = 124 - REACH - 8
    assert not lie_close(scales, packed=True) and to_blocks(weight, scales) is None
    weight[130].view(8, 16)[7] = 0x80  # zeros, one of them negative
    q, of_blocks = to_blocks(weight, scales)
    assert torch.equal(dequantize_weights(q, of_blocks, torch.float32).double(), value(weight, scales))
    scales[130, 7] = 255  # is NaN
    assert not lie_close(scales, packed=True) and to_blocks(weight, scales) is None
    assert dequantized(weight, scales, torch.bfloat16)[130, 224:].isnan().all()


@pytest.mark.parametrize(
    ("scales", "exact"),
    [
        (torch.tensor(0.37), True),
        (torch.tensor([[0.37]]).bfloat16(), True),
        (torch.full((256, 1), 0.37), True),
        (torch.linspace(0.1, 0.2, 256)[:, None], False),
        (torch.linspace(0.1, 0.2, 256), False),
        (torch.full((256, 8), 121, dtype=torch.uint8), True),
        (torch.randint(118, 123, (256, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8), False),
    ],
)
def test_other_scales_of_fp8(scales, exact):
    weight = randn(256, 256).to(FP8)
    assert granularity(scales.shape, 256, 256) in ((256, 256), (1, 256), (1, 32))
    made = to_blocks(weight, scales)
    assert (made is not None) == exact and (exact or not lie_close(scales, packed=False))
    want = dequantized(weight, scales, torch.float32)
    if made is not None:
        assert torch.equal(dequantize_weights(*made, torch.float32), want)
    assert torch.equal(dequantized(weight, scales, torch.bfloat16), want.bfloat16())
