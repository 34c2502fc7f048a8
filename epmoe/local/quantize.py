"""Quantizes the rows of padded batches to fp8, and sets rows of padding to zero.

Padding may hold stale values of earlier batches. It is never read.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native import ops
from epmoe.native.arguments import (
    FLOATS,
    FP8,
    check_forward_only,
    check_tensor,
    contiguous_rows,
    describe,
    describe_fields,
    token_count,
)
from epmoe.native.formats import SCALE_BLOCK, format_of_rows


class Quantized(NamedTuple):
    """fp8 values q [T, D] and fp32 scales [1] or [T, ⌈D/128⌉]. A value is about q · scale."""

    q: Tensor
    scales: Tensor

    def __repr__(self) -> str:
        return describe_fields(self, self._asdict())


def zero_padding_rows_(x: Tensor, num_tokens: int | Tensor) -> Tensor:
    """Set the rows of padding to zero, in place, without reading them.

    A serving stack pads its batches for CUDA graphs, or to equal sizes on all ranks. Behind the
    rows of tokens there is then stale memory. Zeros do no harm in routing and in quantization.

    Args:
        x: [..., D]. All dimensions but the last one count rows, as in [requests, tokens of a
            request, D]. The rows must be evenly spaced in memory.
        num_tokens: how many of the rows are tokens: an int, or an int32 scalar tensor on the
            device, which a CUDA graph reads at each replay.

    Returns:
        `x` itself.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: the elements of a row are not contiguous.
        RuntimeError: the rows are not evenly spaced, or `x` requires grad in grad mode.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise TypeError(f"`x` must be a tensor [..., D], got {describe(x)}")
    # The view fails if the rows are not evenly spaced.
    rows = x.view(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"`x` must have contiguous rows, got strides {x.stride()}")
    check_forward_only(x)
    ops.zero_padding_rows_(rows, *token_count(num_tokens, rows.shape[0], x.device))
    return x


def quantize_fp8(
    x: Tensor,
    *,
    granularity: Literal["tensor", "block"] = "block",
    num_tokens: int | Tensor | None = None,
) -> Quantized:
    """Quantize rows to fp8 e4m3, with scales by the largest magnitudes.

    A scale is the largest magnitude of its values, divided by 448, but at least 2⁻¹²⁶; or 1 if all
    values are zero. NaN stays NaN, and ±Inf becomes the largest fp8 value. NaN and ±Inf do not
    count for scales, so that every scale is finite. Rows of padding are not read, and become zeros
    with scale 1. It raises the same errors as `permute`.

    Args:
        x: [T, D] fp32, fp16 or bf16, with any row stride.
        granularity: "tensor" for one scale for all values, "block" for a scale for each 128
            elements of a row.
        num_tokens: how many of the rows are tokens: an int, or an int32 scalar tensor on the
            device. All later rows are padding. None: all rows are tokens.

    Returns:
        The fp8 values [T, D], and fp32 scales [1] or [T, ⌈D/128⌉].
    """
    check_tensor("x", x, FLOATS, ("T", "D"))
    if granularity not in ("tensor", "block"):
        raise ValueError(f"`granularity` must be 'tensor' or 'block', got {granularity!r}")
    check_forward_only(x)
    scalar, rows = token_count(num_tokens, x.shape[0], x.device)
    block = SCALE_BLOCK if granularity == "block" else 0
    return Quantized(*ops.quantize_fp8(contiguous_rows(x), scalar, rows, block))


def quantize_weights(weights: Tensor) -> Quantized:
    """Quantize weights [n, k] to fp8. The scales follow the rule of `quantize_fp8`.

    Returns fp8 values [n, k], which are all finite, and fp32 scales [⌈n/128⌉, ⌈k/128⌉], a scale for
    each block of 128 × 128.
    """
    n, k = weights.shape
    rows, columns = FP8_BLOCKS.block
    most = torch.finfo(FP8).max

    # Pad to complete blocks: [blocks of rows, rows, blocks of columns, columns].
    padded = F.pad(weights.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))

    # The largest magnitude of a block determines its scale.
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, (largest / most).clamp(min=2.0**-126), 1.0)

    scaled = blocks / scales[:, None, :, None]
    values = scaled.flatten(2).flatten(0, 1)[:n, :k]
    return Quantized(values.clamp(-most, most).to(FP8), scales)


def dequantize_rows(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize fp8 rows [N, D] to `dtype`.

    `scales` is fp32 [N, B]: each row is divided into B blocks with a scale each. The size of a
    block is that of `format_of_rows(D, B)`; the last block may be smaller.
    """
    D = rows.shape[1]
    block = format_of_rows(D, scales.shape[1]).block
    # If all blocks are complete, the scales can be broadcast. Otherwise each element needs a copy.
    if D % block == 0:
        blocks = rows.float().unflatten(1, (-1, block))
        return (blocks * scales[..., None]).flatten(1).to(dtype)
    of_elements = scales.repeat_interleave(block, 1)[:, :D]
    return (rows.float() * of_elements).to(dtype)
