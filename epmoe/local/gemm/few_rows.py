"""The experts stage for calls in which an expert has a row or two, as in decoding: two kernels of
our own.

No library on Hopper reads the weights at the speed of memory there: their blocks have 64 rows or
more, of which an expert fills one or two. How they work stands with the kernels, `few_rows` of
csrc/cuda/local.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Segments, Weights, plain_rows, problem_on_hopper
from epmoe.local.gemm.hopper import Hopper, problem_of_build
from epmoe.local.quantize import quantize_fp8
from epmoe.local.weight_formats import FP8_BLOCKS, MXFP4_GROUPS, product_dtype
from epmoe.native import ops
from epmoe.native.arguments import FP8, MXFP4

# Rows of an expert, on average. What was measured is in docs/experiments.md, "Experts with few
# rows".
# Up to so many rows one tile of 8 tokens is the fastest.
_ONE_TILE = 4.0
# Up to so many rows two tiles are. MXFP4 has four.
_TWO_TILES = 12.0
MOST_ROWS_OF_MXFP4 = 24.0
"""The kernels take calls with at most so many, where our GEMM takes more; where all weights are
dequantized for more, `MOST_BEFORE_ALL`.
"""
MOST_BEFORE_ALL = 96.0
# Share of the memory's peak speed that a copy reaches.
_COPY_SHARE = 0.87
# Peak speed of the memory of H100.
_H100_GB_PER_S = 3352.0
# Memory is fast if it has more for each multiprocessor: between H100 (22) and H200 (32).
_FAST_GB_PER_S = 27.0
# With fast memory, TMA wins where fp8 weights take less time to read: they are widened too slowly.
_SHORT_US = 150.0
# With slow memory, TMA wins where a call reads for longer: it begins later, and reads 5 % faster.
_SOON_US = 130.0
# Rows of an expert: with more, TMA wins in both these cases.
_FEWEST = 0.5
# The table of so many experts fits into the shared memory of a block, in all kernels.
_MOST_EXPERTS = 8192


class Reading(NamedTuple):
    """How a GPU reads the weights of all experts that it has."""

    us: float
    """µs to read them at a copy's speed"""
    fast: bool
    """whether memory copies more than 27 GB/s for each multiprocessor, as on H200"""

    @classmethod
    def of(cls, weight_bytes: float, copy_gb_per_s: float, multiprocessors: int) -> Reading:
        """By the speed of a copy, which counts bytes read and bytes written."""
        us = weight_bytes / 1000 / copy_gb_per_s
        return cls(us, copy_gb_per_s > _FAST_GB_PER_S * multiprocessors)

    @classmethod
    def on_gpu(cls, gate_up: Tensor, down: Tensor) -> Reading:
        """By what the driver says of the GPU of these weights, or as on H100 where it says 0."""
        found = torch.cuda.get_device_properties(down.device)
        # Memory moves 2 bits a clock and line.
        peak_gb_per_s = 2 * found.memory_clock_rate * found.memory_bus_width / 8e6
        copy_gb_per_s = _COPY_SHARE * (peak_gb_per_s or _H100_GB_PER_S)
        return cls.of(gate_up.nbytes + down.nbytes, copy_gb_per_s, found.multi_processor_count)


def most_rows(dtype: torch.dtype, reading: Reading) -> float:
    """The most rows of an expert, on average, with which kernels by TMA are no faster. `dtype` is
    that of weights, bf16 or fp8.
    """
    if reading.fast:
        is_widened_too_slowly = dtype == FP8 and reading.us < _SHORT_US
        return _FEWEST if is_widened_too_slowly else _ONE_TILE
    # With n rows an expert, a call reads the share 1 − e⁻ⁿ of the experts, and takes this share of
    # `reading.us`.
    share = min(_SOON_US / max(reading.us, 1e-9), 0.9)
    return min(_FEWEST, -math.log1p(-share))


class FewRows(Gemm):
    """Our kernels for few rows, on GPUs of compute capability 9.0: fp8 weights, and bf16 ones."""

    name = "few_rows"
    needs_gpu = True
    takes_all_calls = False
    takes_fp8 = True
    # D and F are multiples of it, by dtype.
    steps: ClassVar[dict[torch.dtype, int]] = {torch.bfloat16: 64, FP8: FP8_BLOCKS.block[1]}

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`."""
        problem = problem_on_hopper("the kernel for few rows", gate_up, down, self.steps)
        if problem is not None:
            return problem
        for weights in (gate_up, down):
            if not weights.is_contiguous() or weights.data_ptr() % 16:
                return ValueError(
                    "the kernel for few rows takes contiguous weights that start at multiples of "
                    "16 bytes"
                )
        if len(down) > _MOST_EXPERTS:
            return ValueError(
                f"the kernel for few rows takes at most {_MOST_EXPERTS} experts, got {len(down)}"
            )
        return None

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        # Kernels by TMA may not run there.
        if problem_of_build(down.device) is not None:
            return _ONE_TILE
        return most_rows(down.dtype, Reading.on_gpu(gate_up, down))

    def takes(self, segments: Segments, most_rows: float = math.inf) -> bool:
        return segments.rows_per_expert is not None and segments.rows_per_expert <= most_rows

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Compute the outputs by two kernels. fp8 rows stay fp8 between them, with a power of two
        as the scale of every 16 columns.
        """
        assert segments.rows_per_expert is not None
        operands = self._operands(weights, rows, scales, segments)
        token_tiles = self._token_tiles(weights.down.dtype, segments.rows_per_expert)
        out: Tensor = ops.few_rows(*operands, token_tiles)
        return out

    def _operands(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> tuple[object, ...]:
        """The arguments of the operators, with rows as the kernels want them."""
        if weights.down.dtype == FP8 and scales is None:
            rows, scales = quantize_fp8(rows, num_tokens=segments.offsets[-1])
        elif weights.down.dtype != FP8:
            rows = plain_rows((rows, scales), product_dtype(weights.down))
            scales = None
        # `problem_with` refuses weights that are not contiguous, but asks for nothing of the rest.
        return (
            rows.contiguous(),
            scales,
            weights.gate_up,
            _contiguous(weights.gate_up_scales),
            _contiguous(weights.gate_up_bias),
            weights.down,
            _contiguous(weights.down_scales),
            _contiguous(weights.down_bias),
            segments.offsets,
            segments.tokens,
            *weights.gating,
        )

    def _token_tiles(self, dtype: torch.dtype, rows_per_expert: float) -> int:
        """Tiles of 8 tokens that share a reading of the weights."""
        return 1


class FewRowsOfMxfp4(FewRows):
    """Our kernels for few bf16 rows and weights in MXFP4, with bf16 between the kernels."""

    name = "few_rows_mxfp4"
    takes_fp8 = False
    steps: ClassVar = {MXFP4: MXFP4_GROUPS.block[1]}

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        if Hopper().problem_with(gate_up, down) is None:
            return MOST_ROWS_OF_MXFP4
        return MOST_BEFORE_ALL

    def _token_tiles(self, dtype: torch.dtype, rows_per_expert: float) -> int:
        if rows_per_expert <= _ONE_TILE:
            return 1
        if rows_per_expert <= _TWO_TILES:
            return 2
        return 4


def _contiguous(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.contiguous()
