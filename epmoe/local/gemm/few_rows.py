"""The experts stage for calls in which an expert has one or two rows, as in decoding.

Two kernels of epmoe compute it. For so few rows, the time of a call is the time to read the
weights. The libraries on Hopper do not reach the speed of memory then: their blocks have 64 rows or
more, of which an expert fills one or two. The files of the kernels, `few_rows` in csrc/cuda/local,
explain how these work.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import (
    Gemm,
    Segments,
    Weights,
    is_readable,
    plain_rows,
    problem_on_hopper,
    readable,
)
from epmoe.local.gemm.hopper import Hopper, problem_of_build
from epmoe.local.quantize import quantize_fp8
from epmoe.local.weight_formats import FP8_BLOCKS, MXFP4_GROUPS, product_dtype
from epmoe.native import ops
from epmoe.native.arguments import FP8, MXFP4

# The limits below are rows of an expert, on average. docs/experiments.md, "Experts with few rows",
# has the measurements.
# Up to this many rows, one tile of 8 tokens is the fastest.
_ONE_TILE = 4.0
# Up to this many rows, two tiles are the fastest. For more rows the kernels for MXFP4 have four.
_TWO_TILES = 12.0
MOST_ROWS_OF_MXFP4 = 24.0
"""The most rows for which the kernels for few rows are used with MXFP4 and NVFP4 weights, if
epmoe's GEMM takes the calls with more rows.
"""
# The same limit if all weights have to be dequantized for calls with more rows, which is slow.
_MOST_BEFORE_ALL = 96.0
# The share of the memory's peak speed that a copy reaches.
_COPY_SHARE = 0.87
# The peak speed of the memory of an H100.
_H100_GB_PER_S = 3352.0
# Memory counts as fast if a copy has more than this for each multiprocessor. The number lies
# between that of H100 (22) and that of H200 (32).
_FAST_GB_PER_S = 27.0
# With slow memory, the kernels by TMA are faster if a call reads for longer than this. They begin
# later than the kernels here, and read 5 % faster.
_SOON_US = 130.0
# They are also faster from this many rows of an expert on.
_FEWEST = 0.5
# A tile of the first product of `FusedExperts` has this many columns of the activations.
_TILE_COLUMNS = 128
# In fp8 other kernels are faster from this many rows of an expert on.
_MOST_OF_FP8 = 1.0
# Kernels for MXFP4 weights read rows in fp8 that start at multiples of so many bytes.
_STRIDE_BYTES = 16
# A table with this many experts fits into the shared memory of a block, in all kernels.
_MOST_EXPERTS = 8192


class Reading(NamedTuple):
    """How fast a GPU reads the weights of all its experts."""

    us: float
    """the time to read them at the speed of a copy, in µs"""
    fast: bool
    """whether memory copies more than 27 GB/s for each multiprocessor, as on H200"""

    @classmethod
    def of(cls, weight_bytes: float, copy_gb_per_s: float, multiprocessors: int) -> Reading:
        """Compute it from the speed of a copy, which counts bytes read and bytes written."""
        us = weight_bytes / 1000 / copy_gb_per_s
        return cls(us, copy_gb_per_s > _FAST_GB_PER_S * multiprocessors)

    @classmethod
    def on_gpu(cls, gate_up: Tensor, down: Tensor) -> Reading:
        """Compute it from what the driver says of the GPU that has these weights.

        If the driver says 0 for the speed of the memory, that of an H100 is assumed.
        """
        found = torch.cuda.get_device_properties(down.device)
        # On each line, memory moves 2 bits in a clock cycle.
        peak_gb_per_s = 2 * found.memory_clock_rate * found.memory_bus_width / 8e6
        copy_gb_per_s = _COPY_SHARE * (peak_gb_per_s or _H100_GB_PER_S)
        return cls.of(gate_up.nbytes + down.nbytes, copy_gb_per_s, found.multi_processor_count)


def most_rows(reading: Reading) -> float:
    """The most rows of an expert, on average, for which the kernels by TMA are not faster.

    It is for bf16 weights.
    """
    if reading.fast:
        return _ONE_TILE
    return min(_FEWEST, _rows_that_reach(_SOON_US / max(reading.us, 1e-9)))


def most_rows_of_fp8(experts: int, F: int, multiprocessors: int) -> float:
    """The most rows of an expert, on average, for which `FusedExperts` is not faster.

    The tiles of its first product are then fewer than the multiprocessors, and some of these have
    nothing to read. The kernels here have smaller tasks.
    """
    tiles = experts * F / _TILE_COLUMNS
    return min(_MOST_OF_FP8, _rows_that_reach(multiprocessors / max(tiles, 1.0)))


def fills_gpu(down: Tensor) -> bool:
    """Whether the first product of `FusedExperts` has more tiles than there are multiprocessors, if
    all experts have rows. `down` are the weights [e, D, F] in fp8.
    """
    e, _, F = down.shape
    found = torch.cuda.get_device_properties(down.device)
    return e * F > found.multi_processor_count * _TILE_COLUMNS


def _rows_that_reach(share: float) -> float:
    """The rows of an expert, on average, with which this share of the experts has any."""
    # With n rows on average it is about 1 − e⁻ⁿ of the experts.
    if share >= 1:
        return math.inf
    return -math.log1p(-share)


class FewRows(Gemm):
    """epmoe's kernels for few rows, for fp8 and bf16 weights on GPUs of compute capability 9.0."""

    name = "few_rows"
    needs_gpu = True
    takes_all_calls = False
    takes_fp8 = True
    takes_adapters = False
    # By the dtype of weights, the number that must divide D and F.
    steps: ClassVar[dict[torch.dtype, int]] = {torch.bfloat16: 64, FP8: FP8_BLOCKS.block[1]}

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`."""
        return problem_with_weights(
            "the kernel for few rows", gate_up, down, steps=self.steps, most_experts=_MOST_EXPERTS
        )

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        # If the other kernels do not run on this device, they cannot be faster.
        if problem_of_build(down.device) is not None:
            return _ONE_TILE
        if down.dtype == FP8:
            found = torch.cuda.get_device_properties(down.device)
            return most_rows_of_fp8(len(down), down.shape[2], found.multi_processor_count)
        return most_rows(Reading.on_gpu(gate_up, down))

    def takes(self, segments: Segments, most_rows: float = math.inf) -> bool:
        return segments.rows_per_expert is not None and segments.rows_per_expert <= most_rows

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Compute the outputs by two kernels.

        If the weights are fp8, the rows are fp8 between the kernels, too. Each 16 columns then have
        a power of two as their scale.
        """
        assert segments.rows_per_expert is not None
        operands = self._operands(weights, rows, scales, segments)
        token_tiles = self._token_tiles(weights.down.dtype, segments.rows_per_expert)
        out: Tensor = ops.few_rows(*operands, token_tiles, weights.tensor_scales)
        return out

    def _operands(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> tuple[object, ...]:
        """The arguments of the operator, with rows in a dtype that it takes."""
        return operands_of(weights, rows, scales, segments)

    def _token_tiles(self, dtype: torch.dtype, rows_per_expert: float) -> int:
        """How many tiles of 8 tokens share one reading of the weights."""
        return 1


class FewRowsOfMxfp4(FewRows):
    """epmoe's kernels for few rows in bf16 or fp8 and weights of 4 bits, in NVFP4 as well as in
    MXFP4, which its name says. Rows in fp8 become bf16 as they are read, and are bf16 between the
    kernels.
    """

    name = "few_rows_mxfp4"
    takes_fp8 = False
    takes_tensor_scales = True
    steps: ClassVar = {MXFP4: MXFP4_GROUPS.block[1]}

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        if Hopper().problem_with(gate_up, down) is None:
            return MOST_ROWS_OF_MXFP4
        return _MOST_BEFORE_ALL

    def _token_tiles(self, dtype: torch.dtype, rows_per_expert: float) -> int:
        if rows_per_expert <= _ONE_TILE:
            return 1
        if rows_per_expert <= _TWO_TILES:
            return 2
        return 4

    def _operands(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> tuple[object, ...]:
        if are_readable_fp8(rows, scales):
            return operands_with(weights, rows, scales, segments)
        return operands_of(weights, rows, scales, segments)


class FewestRowsOfMxfp4(FewRowsOfMxfp4):
    """The same kernels for rows in fp8, where `FusedExpertsOfMxfp4` would leave more than half of
    the multiprocessors without a tile.
    """

    name = "fewest_rows_mxfp4"
    takes_all_rows = False
    takes_tensor_scales = False

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`. Without the other kernel `FewRowsOfMxfp4` takes the calls."""
        return super().problem_with(gate_up, down) or problem_of_build(down.device)

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        found = torch.cuda.get_device_properties(down.device)
        F = 2 * down.shape[2]
        return most_rows_of_fp8(len(down), F, found.multi_processor_count // 2)

    def takes_rows(self, rows: Tensor, scales: Tensor | None) -> bool:
        return are_readable_fp8(rows, scales)


def are_readable_fp8(rows: Tensor, scales: Tensor | None) -> bool:
    """Whether rows are fp8 with scales, and lie as the kernels for MXFP4 weights read them."""
    if scales is None or rows.stride(1) != 1:
        return False
    return rows.stride(0) % _STRIDE_BYTES == 0 and rows.data_ptr() % _STRIDE_BYTES == 0


def problem_with_weights(
    name: str, gate_up: Tensor, down: Tensor, *, steps: dict[torch.dtype, int], most_experts: int
) -> Exception | None:
    """Say why a kernel for the whole stage does not take these weights, or return None.

    `name` is the kernel's name in the message, `steps` is as in `problem_on_hopper`.
    """
    problem = problem_on_hopper(name, gate_up, down, steps)
    if problem is not None:
        return problem
    for weights in (gate_up, down):
        if not is_readable(weights):
            return ValueError(
                f"{name} takes contiguous weights that start at multiples of 16 bytes"
            )
    if len(down) > most_experts:
        return ValueError(f"{name} takes at most {most_experts} experts, got {len(down)}")
    return None


def operands_of(
    weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
) -> tuple[object, ...]:
    """The arguments of an operator for the whole stage, with rows in the dtype that it needs."""
    if weights.down.dtype == FP8 and scales is None:
        rows, scales = quantize_fp8(rows, num_tokens=segments.offsets[-1])
    elif weights.down.dtype != FP8:
        rows = plain_rows((rows, scales), product_dtype(weights.down))
        scales = None
    return operands_with(weights, readable(rows), scales, segments)


def operands_with(
    weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
) -> tuple[object, ...]:
    """The same with rows as they are."""
    # Kernels can read the weights, since `problem_with` refuses others. Scales and biases may be
    # views of any kind.
    return (
        rows,
        scales,
        weights.gate_up,
        _readable(weights.gate_up_scales),
        _readable(weights.gate_up_bias),
        weights.down,
        _readable(weights.down_scales),
        _readable(weights.down_bias),
        segments.offsets,
        segments.tokens,
        *weights.gating,
    )


def _readable(value: Tensor | None) -> Tensor | None:
    return None if value is None else readable(value)
