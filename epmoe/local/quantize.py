"""Quantize and zero rows of padded batches, without reading the stale rows behind the real ones."""

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
    """q [T, D] float8_e4m3fn, and scales fp32 [1] or [T, ⌈D/128⌉]: a value is about q · scale."""

    q: Tensor
    scales: Tensor

    def __repr__(self) -> str:
        return describe_fields(self, self._asdict())


def zero_padding_rows_(x: Tensor, num_tokens: int | Tensor) -> Tensor:
    """Set the rows of padding to zero, in place, without reading them.

    A serving stack that pads its batch (for graph replay, or to equal sizes on all ranks) leaves
    stale memory behind the real rows. Zeros are harmless in routing and in quantization.

    Args:
        x: [..., D]. All leading dimensions together count the rows, as in [requests, tokens of a
            request, D], and the rows must be evenly spaced.
        num_tokens: the number of real rows: an int, or an int32 scalar tensor on the device, which
            a CUDA graph reads anew at each replay.

    Returns:
        `x`.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: the elements of a row are not contiguous.
        RuntimeError: the rows are not evenly spaced, or `x` requires grad in grad mode.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise TypeError(f"`x` must be a tensor [..., D], got {describe(x)}")
    # All leading dimensions count rows, which a view must be able to say.
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
    """Quantize rows to fp8 e4m3 by the largest magnitude of the real rows. Stale rows change
    neither values nor scales.

    A scale is amax / 448, at least 2⁻¹²⁶, or 1 if all values are zero. NaN stays NaN and ±Inf
    saturates; neither enters an amax, so every scale is finite. Padded rows become zeros with scale
    1. Errors are those of `permute`.

    Args:
        x: [T, D] fp32, fp16 or bf16, any row stride.
        granularity: "tensor" for one scale in all, "block" for one for each 128 elements of a row.
        num_tokens: int or int32 scalar tensor on the device. Rows at and past it are padding.

    Returns:
        fp8 values [T, D], and fp32 scales [1] or [T, ⌈D/128⌉].
    """
    check_tensor("x", x, FLOATS, ("T", "D"))
    if granularity not in ("tensor", "block"):
        raise ValueError(f"`granularity` must be 'tensor' or 'block', got {granularity!r}")
    check_forward_only(x)
    scalar, rows = token_count(num_tokens, x.shape[0], x.device)
    block = SCALE_BLOCK if granularity == "block" else 0
    return Quantized(*ops.quantize_fp8(contiguous_rows(x), scalar, rows, block))


def quantize_weights(weights: Tensor) -> Quantized:
    """Quantize weights [n, k] to fp8 by the rule of `quantize_fp8`.

    Returns fp8 values [n, k], all finite, and scales fp32 [⌈n/128⌉, ⌈k/128⌉], one for each block of
    128 × 128.
    """
    n, k = weights.shape
    rows, columns = FP8_BLOCKS.block
    most = torch.finfo(FP8).max

    # Pad to complete blocks: [blocks of rows, rows, blocks of columns, columns].
    padded = F.pad(weights.float(), (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))

    # A scale for each, by its largest magnitude.
    largest = blocks.abs().amax((1, 3))
    scales = torch.where(largest > 0, (largest / most).clamp(min=2.0**-126), 1.0)

    scaled = blocks / scales[:, None, :, None]
    values = scaled.flatten(2).flatten(0, 1)[:n, :k]
    return Quantized(values.clamp(-most, most).to(FP8), scales)


def dequantize_rows(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize fp8 rows [N, D] to `dtype`. Each of their scales, fp32 [N, B], belongs to a block
    of `format_of_rows(D, B)`, of which the last may be smaller.
    """
    D = rows.shape[1]
    block = format_of_rows(D, scales.shape[1]).block
    # Whole blocks need no scale for each element.
    if D % block == 0:
        blocks = rows.float().unflatten(1, (-1, block))
        return (blocks * scales[..., None]).flatten(1).to(dtype)
    of_elements = scales.repeat_interleave(block, 1)[:, :D]
    return (rows.float() * of_elements).to(dtype)
