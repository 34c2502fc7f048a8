"""The experts stage for calls in which an expert has a few rows, as in decoding: two kernels of our own.

No library on Hopper reads the weights at the speed of memory there: their blocks have 64 rows or more, of which an
expert fills one or two. How they work stands with the kernels, `few_rows` of csrc/cuda/local.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Segments, Weights, plain_rows, problem_on_hopper, product_dtype
from epmoe.local.quantize import quantize_fp8
from epmoe.native import ops
from epmoe.native.arguments import FP8, MXFP4
from epmoe.native.formats import SCALE_BLOCK

# Rows of an expert, on average. What was measured is in docs/experiments.md, "Experts with few rows".
MOST_ROWS = 8.0
"""The kernels take calls with at most so many."""
MOST_ROWS_OF_MXFP4 = 96.0
"""The same for MXFP4: the alternative is to dequantize all weights in every call."""
_ONE_TILE, _TWO_TILES = 4.0, 12.0  # up to so many rows, one tile of 8 tokens is the fastest, or two; then four


class FewRows(Gemm):
    """Our kernels for few rows, on GPUs of compute capability 9.0: fp8 weights, and bf16 ones."""

    name = "few_rows"
    needs_gpu = True
    takes_all_calls = False
    takes_fp8 = True
    steps: ClassVar[dict[torch.dtype, int]] = {torch.bfloat16: 64, FP8: SCALE_BLOCK}
    """Dtypes of weights, and of what D and F are multiples"""
    most_rows: ClassVar[float] = MOST_ROWS

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        problem = problem_on_hopper("the kernel for few rows", gate_up, down, self.steps)
        if problem is None and any(weights.data_ptr() % 16 for weights in (gate_up, down)):
            return ValueError("the kernel for few rows takes contiguous weights that start at multiples of 16 bytes")
        return problem

    def takes(self, segments: Segments) -> bool:
        return segments.rows_per_expert is not None and segments.rows_per_expert <= self.most_rows

    def experts(self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments) -> Tensor:
        """Two kernels compute the outputs. fp8 rows stay fp8 between them, with a power of two for every 16 columns."""
        if weights.down.dtype == FP8 and scales is None:
            rows, scales = quantize_fp8(rows, num_tokens=segments.offsets[-1])
        elif weights.down.dtype != FP8:
            rows, scales = plain_rows((rows, scales), product_dtype(weights.down)), None
        assert segments.rows_per_expert is not None
        gate_up, down, *scales_and_biases, gating, _ = weights
        # Weights are contiguous, or `problem_with` refuses them.
        gate_up_scales, down_scales, gate_up_bias, down_bias = (
            None if given is None else given.contiguous() for given in scales_and_biases
        )
        token_tiles = 1 if segments.rows_per_expert <= _ONE_TILE else 2 if segments.rows_per_expert <= _TWO_TILES else 4
        out: Tensor = ops.few_rows(
            rows.contiguous(), scales, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias,
            segments.offsets, segments.tokens, *gating, token_tiles,
        )  # fmt: skip
        return out


class FewRowsOfMxfp4(FewRows):
    """The same for weights in MXFP4 and bf16 rows, with bf16 between the kernels."""

    name = "few_rows_mxfp4"
    takes_fp8 = False
    steps: ClassVar = {MXFP4: 32}
    most_rows = MOST_ROWS_OF_MXFP4
