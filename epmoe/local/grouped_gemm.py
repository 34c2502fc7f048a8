"""The grouped GEMM of the experts stage. A library does it: torch, or DeepGEMM, and a loop where neither takes the
weights.

Rows [N, k] lie expert by expert, weights are [e, n, k], and the result is [N, n]. Nothing looks at the host, except the
loop. Rows past the last segment may hold anything, and so may their results.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.local import deep_gemm
from epmoe.local.quantize import dequantize_rows
from epmoe.native.arguments import FP8
from epmoe.native.formats import SCALE_BLOCK

Gemm = Literal["torch", "deep_gemm", "loop"]


def choose(wanted: Literal["auto", "torch", "deep_gemm"], w_gate_up: Tensor, w_down: Tensor) -> Gemm:
    """The GEMM for these weights on their device; "auto" is DeepGEMM wherever it takes them, since it is faster.

    Warns where an installed DeepGEMM does not work, and where fp8 weights have to do without it. Raises ImportError and
    ValueError if "deep_gemm" is wanted on a GPU and cannot be had.
    """
    if w_down.is_cuda and wanted != "torch":
        problem = deep_gemm.problem(w_gate_up, w_down)
        if problem is None:
            return "deep_gemm"
        if wanted == "deep_gemm":
            raise problem
        if w_down.dtype == FP8:
            warnings.warn(f"fp8 weights are dequantised in every call, which is slow: {problem}", stacklevel=3)
        elif deep_gemm.is_installed() and isinstance(problem, ImportError):
            warnings.warn(f"torch's grouped GEMM is used, which is slower: {problem}", stacklevel=3)
    return "torch" if _torch_takes(w_gate_up, w_down) else "loop"


def multiply(
    gemm: Gemm,
    rows: Tensor,
    row_scales: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor | None,
    ends: Tensor,
    alignment: int,
) -> Tensor:
    """rows [N, k] · weights [e, n, k]ᵀ → [N, n], by expert.

    Args:
        gemm: of `choose`.
        rows: in the weights' dtype, or fp8.
        row_scales: fp32 [N, k/128] of fp8 rows, else None. DeepGEMM takes them as they are if they lie block by block.
        weights: bf16, fp16, fp32, fp64 or fp8.
        weight_scales: fp32 [e, ⌈n/128⌉, ⌈k/128⌉] of fp8 weights, else None.
        ends: int32 [e], the row behind each segment, where the next one starts.
        alignment: in rows: DeepGEMM counts on segments that start at its multiples, and wants 64 or a multiple.

    Returns:
        The products, in bf16 where the weights are fp8, else in the weights' dtype.
    """
    if torch.compiler.is_compiling() and not (gemm == "torch" and rows.dtype == weights.dtype == torch.bfloat16):
        # Opaque to the compiler, which can trace torch's grouped GEMM in bf16 only.
        product: Tensor = torch.ops.epmoe.grouped_gemm(gemm, rows, row_scales, weights, weight_scales, ends, alignment)
        return product
    if gemm == "deep_gemm":
        return deep_gemm.multiply(rows, row_scales, weights, weight_scales, ends, alignment)
    return (_by_torch if gemm == "torch" else _by_loop)(rows, row_scales, weights, weight_scales, ends)


@torch.library.custom_op("epmoe::grouped_gemm", mutates_args=())
def _opaque(
    gemm: str,
    rows: Tensor,
    row_scales: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor | None,
    ends: Tensor,
    alignment: int,
) -> Tensor:
    return multiply(gemm, rows, row_scales, weights, weight_scales, ends, alignment)  # type: ignore[arg-type]


@_opaque.register_fake
def _(gemm: str, rows: Tensor, row_scales: Tensor | None, weights: Tensor, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1], dtype=_product_dtype(weights))


def expert_of_rows(ends: Tensor, num_rows: int) -> Tensor:
    """int32 [N], the expert of each row of segments that end at `ends` int32 [e], on the device; 0 past the last."""
    numbers = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    experts = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    return experts.masked_fill_(numbers >= ends[-1], 0)


def dequantize_weights(weights: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 weights [..., n, k] of blocks of 128 × 128 with scales fp32 [..., ⌈n/128⌉, ⌈k/128⌉] in `dtype`."""
    n, k = weights.shape[-2:]
    scale_of_each = scales.repeat_interleave(SCALE_BLOCK, -2)[..., :n, :].repeat_interleave(SCALE_BLOCK, -1)[..., :k]
    return (weights.float() * scale_of_each).to(dtype)


def _torch_takes(w_gate_up: Tensor, w_down: Tensor) -> bool:
    """Whether torch's grouped GEMM does. Tries it: it wants strides of multiples of 16 bytes, and no fp64."""
    none = torch.zeros(w_down.shape[0], dtype=torch.int32, device=w_down.device)
    try:
        for weights in (w_gate_up, w_down):
            # fp8 weights become contiguous as they are dequantised
            weights = (
                torch.empty(weights.shape, dtype=torch.bfloat16, device="meta") if weights.dtype == FP8 else weights
            )
            F.grouped_mm(weights.new_zeros(1, weights.shape[2]), weights.transpose(1, 2), offs=none.to(weights.device))
    except (RuntimeError, ValueError):
        return False
    return True


def _by_torch(
    rows: Tensor, row_scales: Tensor | None, weights: Tensor, weight_scales: Tensor | None, ends: Tensor
) -> Tensor:
    if weight_scales is not None:  # expert by expert: all at once would take four times the memory
        plain = torch.empty(weights.shape, dtype=_product_dtype(weights), device=weights.device)
        for i in range(len(weights)):
            plain[i] = dequantize_weights(weights[i], weight_scales[i], plain.dtype)
        weights = plain
    rows = rows if row_scales is None else dequantize_rows(rows, row_scales, weights.dtype)
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _by_loop(
    rows: Tensor, row_scales: Tensor | None, weights: Tensor, weight_scales: Tensor | None, ends: Tensor
) -> Tensor:
    out, start = rows.new_empty(rows.shape[0], weights.shape[1], dtype=_product_dtype(weights)), 0
    for i, end in enumerate(ends.tolist()):
        if start < end:
            expert = (
                weights[i] if weight_scales is None else dequantize_weights(weights[i], weight_scales[i], out.dtype)
            )
            segment = rows[start:end]
            if row_scales is not None:
                segment = dequantize_rows(segment, row_scales[start:end], out.dtype)
            torch.mm(segment, expert.T, out=out[start:end])
        start = end
    return out


def _product_dtype(weights: Tensor) -> torch.dtype:
    return torch.bfloat16 if weights.dtype == FP8 else weights.dtype
