"""The experts stage for calls in which an expert has a few rows, as in decoding: two kernels of our own.

No library on Hopper reads the weights at the speed of memory there: their blocks have 64 rows or more, of which an
expert fills one or two. How they work stands with the kernels, `few_rows` of csrc/cuda/local.
"""

from __future__ import annotations

from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Segments, Weights, plain_rows, problem_on_hopper
from epmoe.local.quantize import quantize_fp8
from epmoe.native import ops
from epmoe.native.arguments import FP8

# Rows of an expert, on average. What was measured is in docs/experiments.md, "Experts with few rows".
MOST_ROWS = 8.0
"""The kernels take calls with at most so many."""
_NARROW_ROWS = 4.0  # up to so many, blocks of 8 tokens are faster than blocks of 16


class FewRows(Gemm):
    """Our kernels for few rows, on GPUs of compute capability 9.0: fp8 weights, and bf16 ones."""

    name = "few_rows"
    needs_gpu = True
    takes_all_calls = False
    takes_fp8 = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        problem = problem_on_hopper("the kernel for few rows", gate_up, down)
        if problem is None and any(weights.data_ptr() % 16 for weights in (gate_up, down)):
            return ValueError("the kernel for few rows takes contiguous weights that start at multiples of 16 bytes")
        return problem

    def takes(self, segments: Segments) -> bool:
        return segments.rows_per_expert is not None and segments.rows_per_expert <= MOST_ROWS

    def experts(self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments) -> Tensor:
        """Two kernels compute the outputs. fp8 rows stay fp8 between them, with a power of two for every 16 columns."""
        if weights.down.dtype == FP8 and scales is None:
            rows, scales = quantize_fp8(rows, num_tokens=segments.offsets[-1])
        elif weights.down.dtype != FP8:
            rows, scales = plain_rows((rows, scales), weights.down.dtype), None
        assert segments.rows_per_expert is not None
        gate_up, down, *scales_and_biases, gating, _ = weights
        # Weights are contiguous, or `problem_with` refuses them.
        gate_up_scales, down_scales, gate_up_bias, down_bias = (
            None if given is None else given.contiguous() for given in scales_and_biases
        )
        out: Tensor = ops.few_rows(
            rows.contiguous(), scales, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias,
            segments.offsets, segments.tokens, *gating, segments.rows_per_expert > _NARROW_ROWS,
        )  # fmt: skip
        return out
