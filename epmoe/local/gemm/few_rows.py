"""The experts stage for calls in which an expert has a row or two, as in decoding: two kernels of our own.

No library on Hopper reads the weights at the speed of memory there: their blocks have 64 rows or more, of which an
expert fills one or two. How they work stands with the kernels, `few_rows` of csrc/cuda/local.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Segments, Weights, plain_rows, problem_on_hopper
from epmoe.local.gemm.hopper import Hopper
from epmoe.local.quantize import quantize_fp8
from epmoe.local.weight_formats import FP8_BLOCKS, MXFP4_GROUPS, product_dtype
from epmoe.native import ops
from epmoe.native.arguments import FP8, MXFP4

# Rows of an expert, on average. What was measured is in docs/experiments.md, "Experts with few rows".
_ONE_TILE, _TWO_TILES = 4.0, 12.0  # up to so many rows, one tile of 8 tokens is the fastest, or two; MXFP4 has four
MOST_ROWS_OF_MXFP4 = 24.0
"""The kernels take calls with at most so many, where our GEMM takes more; where all weights are dequantized for more,
`_MOST_BEFORE_ALL`."""
_MOST_BEFORE_ALL = 96.0
_COPY_SHARE = 0.87  # of the memory's peak speed, that a copy reaches
_FEWEST = 1.0  # up to so many rows, fp8 takes least time in registers
_LATER_US = 8.0  # with more, it takes so many µs longer than by TMA, whatever the shape
_WORTH = 0.02  # of the reading time


def reading_us(gate_up: Tensor, down: Tensor) -> float:
    """µs in which a copy reads the weights of all experts on their GPU, bytes read plus bytes written."""
    found = torch.cuda.get_device_properties(down.device)
    peak_gb_per_s = 2 * found.memory_clock_rate * found.memory_bus_width / 8e6  # a clock in kHz moves two bits
    return (gate_up.nbytes + down.nbytes) / 1000 / (_COPY_SHARE * peak_gb_per_s)


def most_rows(dtype: torch.dtype, read_us: float) -> float:
    """Rows of an expert, on average, up to which weights in bf16 or fp8 take no more time than by TMA."""
    return _FEWEST if dtype == FP8 and _WORTH * read_us < _LATER_US else _ONE_TILE


class FewRows(Gemm):
    """Our kernels for few rows, on GPUs of compute capability 9.0: fp8 weights, and bf16 ones."""

    name = "few_rows"
    needs_gpu = True
    takes_all_calls = False
    takes_fp8 = True
    # Of which D and F are multiples:
    steps: ClassVar[dict[torch.dtype, int]] = {torch.bfloat16: 64, FP8: FP8_BLOCKS.block[1]}

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        problem = problem_on_hopper("the kernel for few rows", gate_up, down, self.steps)
        if problem is None and any(not each.is_contiguous() or each.data_ptr() % 16 for each in (gate_up, down)):
            return ValueError("the kernel for few rows takes contiguous weights that start at multiples of 16 bytes")
        return problem

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        return most_rows(down.dtype, reading_us(gate_up, down))

    def takes(self, segments: Segments, most_rows: float = math.inf) -> bool:
        return segments.rows_per_expert is not None and segments.rows_per_expert <= most_rows

    def experts(self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments) -> Tensor:
        """Two kernels compute the outputs. fp8 rows stay fp8 between them, with a power of two for every 16 columns."""
        if weights.down.dtype == FP8 and scales is None:
            rows, scales = quantize_fp8(rows, num_tokens=segments.offsets[-1])
        elif weights.down.dtype != FP8:
            rows, scales = plain_rows((rows, scales), product_dtype(weights.down)), None
        assert segments.rows_per_expert is not None
        gate_up, down, *scales_and_biases = weights[:6]
        # Weights are contiguous, or `problem_with` refuses them.
        gate_up_scales, down_scales, gate_up_bias, down_bias = (
            None if given is None else given.contiguous() for given in scales_and_biases
        )
        out: Tensor = ops.few_rows(
            rows.contiguous(), scales, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias,
            segments.offsets, segments.tokens, *weights.gating, self._token_tiles(segments.rows_per_expert),
        )  # fmt: skip
        return out

    def _token_tiles(self, rows_per_expert: float) -> int:
        """Tiles of 8 tokens that share a reading of the weights."""
        return 1


class FewRowsOfMxfp4(FewRows):
    """The same for weights in MXFP4 and bf16 rows, with bf16 between the kernels."""

    name = "few_rows_mxfp4"
    takes_fp8 = False
    steps: ClassVar = {MXFP4: MXFP4_GROUPS.block[1]}

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        return MOST_ROWS_OF_MXFP4 if Hopper().problem_with(gate_up, down) is None else _MOST_BEFORE_ALL

    def _token_tiles(self, rows_per_expert: float) -> int:
        return 1 if rows_per_expert <= _ONE_TILE else 2 if rows_per_expert <= _TWO_TILES else 4
