"""Weights of few bits, as checkpoints have them: as fp8 with scales of blocks where that is exact, or dequantized.

codes (e4m3, pairs of e2m1) and scales of a weight, row, group or block ─┬▶ to_blocks ─▶ e4m3, scales of blocks
                                                                         └▶ dequantized in any dtype

GPUs with kernels for MXFP4 keep it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epmoe.native.arguments import FP8
from epmoe.native.formats import SCALE_BLOCK

GROUP = 32
"""Elements of a row that share a scale in the MX formats."""
REACH = 14
"""Largest difference of the exponents of two scales in a block of MXFP4 that is exact in fp8: 6 · 2⁶ is at most e4m3's
448, and 0.5 · 2⁻⁸ its least number."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_SHIFT = 6  # 6 · 2⁶ is at most 448
_NORMAL = 2.0**-126  # GPUs may flush smaller scales to zero


def granularity(scales: Sequence[int], n: int, k: int) -> tuple[int, int] | None:
    """Rows and columns of a weight [n, k] that share a scale.

    Args:
        scales: the shape of the scales.
        n: rows of the weight.
        k: columns of the weight, in elements.

    Returns:
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


def lie_close(scales: Tensor, *, packed: bool) -> bool:
    """Whether scales alone say that `to_blocks` is exact, whatever the codes are; `packed` is whether they are e2m1."""
    if scales.numel() == 1:
        return True
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu) or scales.dim() != 2:
        return False
    per_block = SCALE_BLOCK // GROUP
    exponents = scales.view(torch.uint8).float()
    n, groups = exponents.shape
    padding = (0, -groups % per_block, 0, -n % SCALE_BLOCK)
    tiles = torch.nn.functional.pad(exponents[None, None], padding, "replicate")[0, 0]
    tiles = tiles.unflatten(1, (-1, per_block)).unflatten(0, (-1, SCALE_BLOCK))
    spread = tiles.amax((1, 3)) - tiles.amin((1, 3))
    return bool((spread <= (REACH if packed else 0)).all() and (exponents < 255).all())  # 255 is NaN


def to_blocks(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """A quantized weight as e4m3 with a scale for each block of 128 × 128, if every element keeps its value.

    Args:
        weight: e4m3 [n, k], or pairs of e2m1 [n, k/2].
        scales: of any shape that `granularity` knows.

    Returns:
        e4m3 [n, k] and fp32 scales [⌈n/128⌉, ⌈k/128⌉], or None if a value would change.
    """
    codes = codes_of(weight)
    n, k = codes.shape
    padding = (0, -k % SCALE_BLOCK, 0, -n % SCALE_BLOCK)

    def tiles(values: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(values, padding)
        return padded.unflatten(1, (-1, SCALE_BLOCK)).unflatten(0, (-1, SCALE_BLOCK))

    shift = 0 if weight.dtype == FP8 else _LARGEST_SHIFT
    of_tiles = _exact_in_tiles(tiles(codes), tiles(scale_of_each(scales, n, k)), shift)
    if of_tiles is None:
        return None
    q, block_scales = of_tiles
    return q.flatten(2).flatten(0, 1)[:n, :k].contiguous(), block_scales


def _exact_in_tiles(codes: Tensor, scales: Tensor, shift: int) -> tuple[Tensor, Tensor] | None:
    """e4m3 [a, r, b, c] and fp32 scales [a, b] of codes and scales [a, r, b, c], or None if a value would change.

    The scale of a tile is the largest one of its nonzero codes, divided by 2 ** shift.
    """
    largest = scales.where(codes != 0, 0).amax((1, 3))
    of_tiles = torch.where(largest > 0, (largest * 2.0**-shift).clamp(min=_NORMAL), 1.0)
    each = of_tiles[:, None, :, None]
    q = (codes * (scales / each)).where(codes != 0, codes).to(FP8)
    return (q, of_tiles) if torch.equal(q.float() * each, codes * scales) else None
