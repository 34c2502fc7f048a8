"""The experts stage for calls in which an expert has a few rows, as in decoding: two kernels of our own.

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
_ONE_TILE, _TWO_TILES = 4.0, 12.0  # up to so many rows, one tile of 8 tokens is the fastest, or two; then four
MOST_ROWS = 8.0
"""The kernels take calls with at most so many, or with up to `_ONE_TILE`: see `most_rows`."""
MOST_ROWS_OF_MXFP4 = 24.0
"""The same for MXFP4, where our GEMM takes more; where all weights are dequantized for more, `_MOST_BEFORE_ALL`."""
_MOST_BEFORE_ALL = 96.0

# What bounds a call that reads all experts, measured on H100 and H200. Tiles of 8 tokens read weights as fast as a
# copy, and faster than any GEMM. Tiles of 16 tokens read at a share of a copy's speed, and fp8, which they widen, at so
# many GB/s on each multiprocessor at most. GEMMs read at another share, and begin later.
_TWO_TILES_SHARE = {2: 0.916, 1: 0.94}  # by bytes of an element
_TWO_TILES_GB_PER_S = {2: math.inf, 1: 27.0}  # of a multiprocessor
_GEMM_SHARE = {2: 0.967, 1: 0.92}
_GEMM_LATER_US = 14.0
_COPY_SHARE = 0.87  # of the memory's peak speed, that a copy reaches


def most_rows(weight_bytes: float, itemsize: int, copy_gb_per_s: float, multiprocessors: int) -> float:
    """Rows of an expert, on average, up to which the kernels take less time than a GEMM. `weight_bytes` are those of
    all experts of a rank, `itemsize` is 2 for bf16 and 1 for fp8, and the GPU copies `copy_gb_per_s`, bytes read plus
    bytes written."""
    two_tiles = min(_TWO_TILES_SHARE[itemsize] * copy_gb_per_s, _TWO_TILES_GB_PER_S[itemsize] * multiprocessors)
    lost_us = weight_bytes / 1000 * (1 / two_tiles - 1 / (_GEMM_SHARE[itemsize] * copy_gb_per_s))
    return MOST_ROWS if lost_us <= _GEMM_LATER_US else _ONE_TILE


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
        found = torch.cuda.get_device_properties(down.device)
        peak_gb_per_s = 2 * found.memory_clock_rate * found.memory_bus_width / 8e6  # a clock in kHz moves two bits
        weight_bytes = gate_up.nbytes + down.nbytes
        return most_rows(weight_bytes, down.itemsize, _COPY_SHARE * peak_gb_per_s, found.multi_processor_count)

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
        return 1 if rows_per_expert <= _ONE_TILE else 2 if rows_per_expert <= _TWO_TILES else 4


class FewRowsOfMxfp4(FewRows):
    """The same for weights in MXFP4 and bf16 rows, with bf16 between the kernels."""

    name = "few_rows_mxfp4"
    takes_fp8 = False
    steps: ClassVar = {MXFP4: MXFP4_GROUPS.block[1]}

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        return MOST_ROWS_OF_MXFP4 if Hopper().problem_with(gate_up, down) is None else _MOST_BEFORE_ALL
