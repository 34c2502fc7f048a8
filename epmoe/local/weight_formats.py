"""Weights of few bits: codes (e4m3, pairs of e2m1) with scales. A format that experts take is a row
of `FORMATS`; any other format that checkpoints have is dequantized: a scale for each weight, row,
group or block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.native.arguments import FP8, MXFP4

# The values of e2m1 by their three bits behind the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of experts lie. Products with them are bf16."""

    name: str
    codes: torch.dtype
    packed: int
    """Numbers in an item of `codes`."""
    scale: torch.dtype
    block: tuple[int, int]
    """Rows and columns that share a scale."""

    def scales_shape(self, e: int, n: int, k: int) -> tuple[int, int, int]:
        """The shape of the scales of weights [e, n, k], in numbers."""
        rows, columns = self.block
        return e, -(-n // rows), -(-k // columns)


FP8_BLOCKS = WeightFormat("fp8", FP8, 1, torch.float32, (128, 128))
MXFP4_GROUPS = WeightFormat("MXFP4", MXFP4, 2, torch.float8_e8m0fnu, (1, 32))
FORMATS = {each.codes: each for each in (FP8_BLOCKS, MXFP4_GROUPS)}
"""The formats with scales, by the dtype of weights. Weights of any other dtype have none."""


def bits_of(values: Tensor) -> Tensor:
    """The same memory as integers, which torch indexes, joins and leaves alone in casts, whatever
    the dtype is.
    """
    return values.view(_INTEGERS[values.itemsize])


def take_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of these rows, without gradients."""
    return bits_of(values.detach())[list(rows)].view(values.dtype)


def plain_shape(weights: Tensor) -> tuple[int, ...]:
    """The shape of weights [e, n, k] in numbers."""
    *shape, k = weights.shape
    quantized = FORMATS.get(weights.dtype)
    if quantized is not None:
        k *= quantized.packed
    return *shape, k


def product_dtype(weights: Tensor) -> torch.dtype:
    """The dtype of products with these weights."""
    if weights.dtype in FORMATS:
        return torch.bfloat16
    return weights.dtype


def granularity(scales: Sequence[int], n: int, k: int) -> tuple[int, int] | None:
    """Find how many rows and columns of a weight [n, k] share a scale, by the shape of its scales:
    those of a block, the weight, a row or a group. None: no such shape.
    """
    shape = list(scales)
    for block in (FP8_BLOCKS.block, (n, k), (1, k), MXFP4_GROUPS.block):
        rows, columns = block
        parts = [-(-n // rows), -(-k // columns)]
        # Checkpoints leave out dimensions of 1: of a scale for each row, and of one for all.
        is_by_row = shape == parts[:1] and parts[1] == 1
        is_for_all = not shape and parts == [1, 1]
        if shape == parts or is_by_row or is_for_all:
            return block
    return None


def codes_of(weight: Tensor) -> Tensor:
    """Convert e4m3, or pairs of e2m1 [..., n, k/2] with the low four bits first, to unscaled fp32
    values [..., n, k].
    """
    if weight.dtype != MXFP4:
        return weight.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=weight.device)
    # A byte has two codes, and each names a value.
    pairs = weight.view(torch.uint8)
    return table[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()]


def dequantize_weights(weights: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize weights [..., n, k] to `dtype`: the product of code and scale in fp32, rounded
    once. `scales`, in any float dtype, have a shape that `granularity` knows.
    """
    codes = codes_of(weights)
    *before, n, k = codes.shape
    rows, columns = granularity(scales.shape[len(before) :], n, k) or (n, k)
    # The scale of each part for each of its rows, then for each of its columns.
    of_parts = _plain_scales(scales).reshape(*before, -(-n // rows), -(-k // columns))
    of_rows = of_parts.repeat_interleave(rows, -2)[..., :n, :]
    return (codes * of_rows.repeat_interleave(columns, -1)[..., :k]).to(dtype)


def _plain_scales(scales: Tensor) -> Tensor:
    """Convert scales to fp32. torch's kernels of GPUs do not convert e8m0."""
    if scales.dtype != torch.float8_e8m0fnu:
        return scales.float()
    exponents = scales.view(torch.uint8).int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is a subnormal number
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)
