"""Weights of few bits, as checkpoints have them: codes (e4m3, pairs of e2m1) and scales of a weight, row, group or
block, dequantized in any dtype. GPUs with kernels for MXFP4 keep it as it is, and fp8 of blocks stays everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epmoe.native.arguments import FP8
from epmoe.native.formats import SCALE_BLOCK

GROUP = 32  # elements of a row that share a scale in the MX formats
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def granularity(scales: Sequence[int], n: int, k: int) -> tuple[int, int] | None:
    """Rows and columns of a weight [n, k] (in elements) that share a scale, by the shape of its scales.

    (128, 128) for blocks, (n, k) for a whole weight, (1, k) for rows, (1, 32) for groups. None: no such shape.
    """
    shape = list(scales)
    if shape == [-(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)]:
        return SCALE_BLOCK, SCALE_BLOCK
    if shape in ([], [1], [1, 1]):
        return n, k
    if shape in ([n], [n, 1]):
        return 1, k
    return (1, GROUP) if shape == [n, k // GROUP] and k % GROUP == 0 else None


def codes_of(weight: Tensor) -> Tensor:
    """Unscaled fp32 values [n, k] of e4m3 [n, k], or of pairs of e2m1 as bytes [n, k/2], the low four bits first."""
    if weight.dtype == FP8:
        return weight.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=weight.device)
    pairs = weight.view(torch.uint8)
    return table[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()]


def scale_values(scales: Tensor) -> Tensor:
    """fp32 scales of any float, or of UE8M0 as bytes."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def scale_of_each(scales: Tensor, n: int, k: int) -> Tensor:
    """fp32 [n, k], the scale of each element. The shape of `scales` is one that `granularity` knows."""
    rows, columns = granularity(scales.shape, n, k) or (n, k)
    of_parts = scale_values(scales).reshape(-(-n // rows), -(-k // columns))
    return of_parts.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, k] in `dtype`: the product of code and scale in fp32, rounded once."""
    codes = codes_of(weight)
    return (codes * scale_of_each(scales, *codes.shape)).to(dtype)
