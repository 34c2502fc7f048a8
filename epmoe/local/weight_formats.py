"""Formats of quantized weights: codes of few bits (e4m3, or pairs of e2m1), and scales.

`FORMATS` lists the formats in which `GroupedExperts` take weights. NVFP4 has two kinds of scales: a
scale in e4m3 for each group of 16 numbers, and a tensor scale in fp32 for each matrix. Checkpoints
may have other formats, with a scale for each tensor, row, group or block. Such weights are
dequantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.native.arguments import FP8, MXFP4

# The values of e2m1, by the three bits that follow the sign bit.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The integer dtype of each size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WeightFormat:
    """A format of quantized weights. Products with such weights are bf16."""

    name: str
    codes: torch.dtype
    """the dtype of the weights"""
    packed: int
    """how many numbers an item of `codes` has"""
    scale: torch.dtype
    """the dtype of the scales"""
    block: tuple[int, int]
    """how many rows and columns share a scale"""
    has_tensor_scales: bool
    """whether each matrix of an expert has one more scale, which is fp32"""

    def scales_shape(self, e: int, n: int, k: int) -> tuple[int, int, int]:
        """The shape of the scales of weights [e, n, k]. n and k count numbers, not items."""
        rows, columns = self.block
        return e, -(-n // rows), -(-k // columns)


FP8_BLOCKS = WeightFormat(
    name="fp8",
    codes=FP8,
    packed=1,
    scale=torch.float32,
    block=(128, 128),
    has_tensor_scales=False,
)
MXFP4_GROUPS = WeightFormat(
    name="MXFP4",
    codes=MXFP4,
    packed=2,
    scale=torch.float8_e8m0fnu,
    block=(1, 32),
    has_tensor_scales=False,
)
NVFP4_GROUPS = WeightFormat(
    name="NVFP4",
    codes=MXFP4,
    packed=2,
    scale=torch.float8_e4m3fn,
    block=(1, 16),
    has_tensor_scales=True,
)
FORMATS = (FP8_BLOCKS, MXFP4_GROUPS, NVFP4_GROUPS)
"""The formats of weights that have scales. `format_of` finds the format of weights."""
PACKED = {each.codes: each.packed for each in FORMATS}
"""The dtypes of weights that have scales, and how many numbers an item of each dtype has. Weights
of any other dtype have no scales.
"""


def format_of(weights: object, scales: object) -> WeightFormat | None:
    """Find the format of weights by their dtype and the dtype of their scales.

    Returns None for weights of a dtype that has no scales. If the scales fit none of the formats
    with such weights, the first of these is returned, so that a check can say what scales must be.
    """
    fitting = [known for known in FORMATS if known.codes == getattr(weights, "dtype", None)]
    for known in fitting:
        if known.scale == getattr(scales, "dtype", None):
            return known
    return fitting[0] if fitting else None


def bits_of(values: Tensor) -> Tensor:
    """View the memory of a tensor as integers.

    torch can index and join integers, and leaves them alone in casts of modules. For fp8 and e2m1
    not all of this works.
    """
    return values.view(_INTEGERS[values.itemsize])


def take_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Copy these rows of a tensor of any dtype, without gradients."""
    return bits_of(values.detach())[list(rows)].view(values.dtype)


def plain_shape(weights: Tensor) -> tuple[int, ...]:
    """The shape of weights [e, n, k], where k counts numbers even if an item has several."""
    *shape, k = weights.shape
    return *shape, k * PACKED.get(weights.dtype, 1)


def product_dtype(weights: Tensor) -> torch.dtype:
    """The dtype of products with these weights: bf16 if they have scales, or else their own."""
    if weights.dtype in PACKED:
        return torch.bfloat16
    return weights.dtype


def granularity(scales: Sequence[int], n: int, k: int) -> tuple[int, int] | None:
    """Find out how many rows and columns of a weight [n, k] share a scale.

    `scales` is the shape of the scales. There may be a scale for each block of 128 × 128, for the
    whole weight, for each row, or for each group of 32 or 16 numbers of a row. Returns None if the
    shape is that of none of these.
    """
    shape = list(scales)
    groups = (MXFP4_GROUPS.block, NVFP4_GROUPS.block)
    for block in (FP8_BLOCKS.block, (n, k), (1, k), *groups):
        rows, columns = block
        parts = [-(-n // rows), -(-k // columns)]
        # Some checkpoints leave out dimensions of 1: they have [n] for a scale for each row, and []
        # for one scale for the whole weight.
        is_by_row = shape == parts[:1] and parts[1] == 1
        is_for_all = not shape and parts == [1, 1]
        if shape == parts or is_by_row or is_for_all:
            return block
    return None


def codes_of(weight: Tensor) -> Tensor:
    """Convert codes to the values that they have without scales, in fp32.

    e4m3 weights keep their shape. e2m1 weights [..., n, k/2] become [..., n, k]: each item has two
    codes, of which the one in the low four bits comes first.
    """
    if weight.dtype != MXFP4:
        return weight.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=weight.device)
    # Split each byte into its two codes. A code is an index of the table.
    pairs = weight.view(torch.uint8)
    return table[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).int()]


def dequantize_weights(
    weights: Tensor, scales: Tensor, dtype: torch.dtype, tensor_scales: Tensor | None = None
) -> Tensor:
    """Dequantize weights [..., n, k] to `dtype`.

    Each code is multiplied by its scale in fp32, and the product is rounded once. `scales` have any
    float dtype, and a shape that `granularity` knows. `tensor_scales` of NVFP4 are fp32, and of a
    shape that fits [..., n, k], such as [] for one matrix. Without them NVFP4 weights keep that
    factor out, and bf16 has all of their values.
    """
    codes = codes_of(weights)
    *before, n, k = codes.shape
    rows, columns = granularity(scales.shape[len(before) :], n, k) or (n, k)
    # Repeat each scale for the rows of its block, then for the columns of its block. The last block
    # may be incomplete.
    block_scales = _plain_scales(scales).reshape(*before, -(-n // rows), -(-k // columns))
    row_scales = block_scales.repeat_interleave(rows, -2)[..., :n, :]
    element_scales = row_scales.repeat_interleave(columns, -1)[..., :k]
    values = codes * element_scales
    if tensor_scales is not None:
        # The value without the tensor scale has at most six bits, so fp64 has the whole product.
        values = values.double() * tensor_scales
    return values.to(dtype)


def _plain_scales(scales: Tensor) -> Tensor:
    """Convert scales to fp32. For e8m0 it computes the bits, as torch cannot convert it on GPUs."""
    if scales.dtype != torch.float8_e8m0fnu:
        return scales.float()
    # A byte of e8m0 is the exponent field of an fp32 number. Exponent 0 means 2^-127, which is a
    # subnormal number in fp32. Exponent 255 means NaN.
    exponents = scales.view(torch.uint8).int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)
