"""Quantize: what a serving stack does to padded batches before and after the experts, without stale rows in it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from epmoe import ops
from epmoe.memory import SCALE_BLOCK
from epmoe.stages.checks import FLOATS, check_tensor, contiguous_rows, describe, token_count


class Quantized(NamedTuple):
    """q [T, D] float8_e4m3fn; scales fp32 [1] or [T, ⌈D/128⌉], by which q is multiplied to get the values back."""

    q: Tensor
    scales: Tensor


def zero_padding_rows_(x: Tensor, num_tokens: int | Tensor) -> Tensor:
    """Set the rows of padding to zero, in place, without looking at what they hold; returns `x`.

    A serving stack that pads its batch (for graph replay, or to equal sizes on all ranks) leaves stale memory behind
    the real rows. Zeros route and quantise harmlessly.

    Args:
        x: [..., D], rows counted over all leading dimensions, as in [requests, tokens of a request, D]; they must be
            evenly spaced.
        num_tokens: real rows, an int or an int32 scalar on the device (captured graphs read it anew at each replay).

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise TypeError(f"`x` must be a tensor [..., D], got {describe(x)}")
    rows = x.view(-1, x.shape[-1])
    if rows.stride(1) != 1 and rows.shape[1] > 1:
        raise ValueError(f"`x` must have contiguous rows, got strides {x.stride()}")
    ops.zero_padding_rows_(rows, *token_count(num_tokens, rows.shape[0], x.device))
    return x


def quantize_fp8(
    x: Tensor, *, granularity: Literal["tensor", "block"] = "block", num_tokens: int | Tensor | None = None
) -> Quantized:
    """Quantise to fp8 e4m3 by the largest magnitude of the REAL rows: a stale row neither reads as data nor as a scale.

    A scale is amax / 448, or 1 where all values are zero. NaN stays NaN and ±Inf saturates; neither enters an amax, so
    every scale is finite. Padded rows come out as zeros with scale 1.

    Args:
        x: [T, D] fp32, fp16 or bf16, any row stride.
        granularity: "tensor", one scale in all, or "block", one for each 128 elements of a row.
        num_tokens: rows at and past it are padding. An int, or an int32 scalar on the device.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    check_tensor("x", x, FLOATS, ("T", "D"))
    if granularity not in ("tensor", "block"):
        raise ValueError(f"`granularity` must be 'tensor' or 'block', got {granularity!r}")
    scalar, rows = token_count(num_tokens, x.shape[0], x.device)
    return Quantized(*ops.quantize_fp8(contiguous_rows(x), scalar, rows, granularity == "tensor"))


def dequantize_rows(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 rows [N, D] with fp32 scales [N, D/128], as an fp8 payload brings them, to rows [N, D] of `dtype`."""
    return (rows.float().unflatten(1, (-1, SCALE_BLOCK)) * scales[..., None]).flatten(1).to(dtype)
