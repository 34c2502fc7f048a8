"""The experts stage for calls in which an expert has a few rows, as in decoding: two kernels of our own.

No library on Hopper reads the weights at the speed of memory there: their blocks have 64 rows or more, of which an
expert fills one or two. How they work stands with the kernels, `few_rows` of csrc/cuda/local.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Segments, Weights, plain_rows
from epmoe.local.quantize import quantize_fp8
from epmoe.native import ops
from epmoe.native.arguments import FP8

# Rows of an expert, on average. What was measured is in docs/experiments.md, "Experts with few rows".
MOST_ROWS = 8.0
"""The kernels take calls with at most so many."""
_NARROW_ROWS = 4.0  # up to so many, blocks of 8 tokens are faster than blocks of 16
_STEP = {FP8: 128, torch.bfloat16: 64}  # of D and F, in elements


class FewRows(Gemm):
    """Our kernels for few rows, on GPUs of compute capability 9.0: fp8 weights, and bf16 ones."""

    name = "few_rows"
    needs_gpu = True
    takes_all_calls = False
    takes_fp8 = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        major, _ = torch.cuda.get_device_capability(down.device)
        step = _STEP.get(down.dtype)
        if step is None or major != 9:
            return ValueError(
                f"the kernels take bf16 and fp8 weights on compute capability 9, got {down.dtype}, {major}"
            )
        if any(size % step for size in down.shape[1:]):
            return ValueError(f"the kernels take weights of multiples of {step}, got {tuple(down.shape[1:])}")
        if any(not weights.is_contiguous() or weights.data_ptr() % 16 for weights in (gate_up, down)):
            return ValueError("the kernels take contiguous weights")
        return None

    def takes(self, segments: Segments) -> bool:
        return segments.rows_per_expert is not None and segments.rows_per_expert <= MOST_ROWS

    def experts(self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments) -> Tensor:
        """Two kernels compute the outputs. fp8 rows stay fp8 between them, with a power of two for every 16 columns."""
        if weights.down.dtype == FP8 and scales is None:
            rows, scales = quantize_fp8(rows, num_tokens=segments.offsets[-1])
        elif weights.down.dtype != FP8:
            rows, scales = plain_rows((rows, scales), weights.down.dtype), None
        assert segments.rows_per_expert is not None
        out: Tensor = ops.few_rows(
            rows.contiguous(), scales, weights.gate_up, weights.gate_up_scales, weights.gate_up_bias, weights.down,
            weights.down_scales, weights.down_bias, segments.offsets, segments.tokens, *weights.gating,
            segments.rows_per_expert > _NARROW_ROWS,
        )  # fmt: skip
        return out
