"""The grouped GEMM of the experts stage. A library does it: torch, or DeepGEMM, and a loop where neither takes the
weights.

Rows [N, k] lie expert by expert, weights are [e, n, k], and the result is [N, n]. Nothing looks at the host, except the
loop. Rows past the last segment may hold anything, and so may their results.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.local.quantize import dequantize_rows
from epmoe.native.arguments import FP8
from epmoe.native.formats import SCALE_BLOCK

Gemm = Literal["torch", "deep_gemm", "loop"]
DEEP_GEMM_ALIGNMENT = 128  # rows: DeepGEMM looks up the expert of each block of rows once


def choose(wanted: Literal["auto", "torch", "deep_gemm"], w_gate_up: Tensor, w_down: Tensor) -> Gemm:
    """The GEMM for these weights on their device.

    Raises ImportError and ValueError if "deep_gemm" is wanted on a GPU and cannot be had.
    """
    fp8 = w_down.dtype == FP8
    if w_down.is_cuda and wanted != "torch" and (fp8 or wanted == "deep_gemm"):
        problem = _problem_with_deep_gemm(w_gate_up, w_down)
        if problem is None:
            return "deep_gemm"
        if wanted == "deep_gemm":
            raise problem
        warnings.warn(f"fp8 weights are dequantised in every call, which is slow: {problem}", stacklevel=3)
    return "torch" if _torch_takes(w_gate_up, w_down) else "loop"


def multiply(
    gemm: Gemm, rows: Tensor, row_scales: Tensor | None, weights: Tensor, weight_scales: Tensor | None, layout: Tensor
) -> Tensor:
    """rows [N, k] · weights [e, n, k]ᵀ → [N, n], by expert.

    Args:
        gemm: of `choose`.
        rows: in the weights' dtype, or fp8.
        row_scales: fp32 [N, k/128] of fp8 rows, else None.
        weights: bf16, fp16, fp32, fp64 or fp8.
        weight_scales: fp32 [e, ⌈n/128⌉, ⌈k/128⌉] of fp8 weights, else None.
        layout: int32 ends [e] of the segments; for DeepGEMM `expert_of_rows` with −1 past the last segment.

    Returns:
        The products, in bf16 where the weights are fp8, else in the weights' dtype.
    """
    if torch.compiler.is_compiling() and not (gemm == "torch" and rows.dtype == weights.dtype == torch.bfloat16):
        # Opaque to the compiler, which can trace torch's grouped GEMM in bf16 only.
        product: Tensor = torch.ops.epmoe.grouped_gemm(gemm, rows, row_scales, weights, weight_scales, layout)
        return product
    if gemm == "deep_gemm":
        return _by_deep_gemm(rows, row_scales, weights, weight_scales, layout)
    return (_by_torch if gemm == "torch" else _by_loop)(rows, row_scales, weights, weight_scales, layout)


@torch.library.custom_op("epmoe::grouped_gemm", mutates_args=())
def _opaque(
    gemm: str, rows: Tensor, row_scales: Tensor | None, weights: Tensor, weight_scales: Tensor | None, layout: Tensor
) -> Tensor:
    return multiply(gemm, rows, row_scales, weights, weight_scales, layout)  # type: ignore[arg-type]


@_opaque.register_fake
def _(
    gemm: str, rows: Tensor, row_scales: Tensor | None, weights: Tensor, weight_scales: Tensor | None, layout: Tensor
) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1], dtype=_product_dtype(weights))


def expert_of_rows(ends: Tensor, num_rows: int, past_the_end: int) -> Tensor:
    """int32 [N], the expert of each row of segments that end at `ends` int32 [e], on the device."""
    numbers = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    experts = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    return experts.masked_fill_(numbers >= ends[-1], past_the_end)


def dequantize_weights(weights: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 weights [..., n, k] of blocks of 128 × 128 with scales fp32 [..., ⌈n/128⌉, ⌈k/128⌉] in `dtype`."""
    n, k = weights.shape[-2:]
    scale_of_each = scales.repeat_interleave(SCALE_BLOCK, -2)[..., :n, :].repeat_interleave(SCALE_BLOCK, -1)[..., :k]
    return (weights.float() * scale_of_each).to(dtype)


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


def _by_deep_gemm(
    rows: Tensor, row_scales: Tensor | None, weights: Tensor, weight_scales: Tensor | None, experts_N: Tensor
) -> Tensor:
    deep_gemm = importlib.import_module("deep_gemm")
    out = rows.new_empty(rows.shape[0], weights.shape[1], dtype=torch.bfloat16)
    if weight_scales is None:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows, weights, out, experts_N)
    else:
        quantised = (rows, row_scales), (weights, weight_scales)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*quantised, out, experts_N)
    return out


def _product_dtype(weights: Tensor) -> torch.dtype:
    return torch.bfloat16 if weights.dtype == FP8 else weights.dtype


def _torch_takes(w_gate_up: Tensor, w_down: Tensor) -> bool:
    """Tries it: torch wants strides that are multiples of 16 bytes, and no fp64."""
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


def _problem_with_deep_gemm(w_gate_up: Tensor, w_down: Tensor) -> Exception | None:
    """Why DeepGEMM cannot take these weights, or None."""
    if importlib.util.find_spec("deep_gemm") is None:
        return ImportError("DeepGEMM is not installed: `pip install sgl-deep-gemm`")
    fp8, major = w_down.dtype == FP8, torch.cuda.get_device_capability(w_down.device)[0]
    if w_down.dtype not in (FP8, torch.bfloat16):
        return ValueError(f"DeepGEMM takes weights in bfloat16 or float8_e4m3fn, got {w_down.dtype}")
    if major < 9 or fp8 and major > 9:  # later GPUs round the scales to powers of two
        return ValueError(f"DeepGEMM takes these weights on GPUs of compute capability 9, got {major}")
    sizes = *w_gate_up.shape[1:], *w_down.shape[1:]
    if fp8 and (any(size % SCALE_BLOCK for size in sizes) or w_down.shape[2] % SCALE_BLOCK):
        return ValueError(f"DeepGEMM takes fp8 weights whose D and F are multiples of 128, got {sizes}")
    if not (w_gate_up.is_contiguous() and w_down.is_contiguous()):
        return ValueError("DeepGEMM takes contiguous weights")
    return None
