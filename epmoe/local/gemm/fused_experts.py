"""The experts stage for calls in which an expert has some rows or many, with fp8 weights.

One kernel of epmoe computes the whole stage. On H200 it is used for calls with more rows than
those of `FewRowsByTma`. Sums have the same order as in those kernels and in DeepGEMM. The file of
the kernel, `fused_experts` in csrc/cuda/hopper, explains how it works.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import MOST_BEFORE_ALL, FewRows, Reading
from epmoe.local.gemm.gemm import Segments, Weights
from epmoe.local.gemm.hopper import problem_of_build
from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native import ops
from epmoe.native.arguments import FP8

# The most experts of a rank. Their table lies in shared memory.
_MOST_EXPERTS = 1024
# The limits below are rows of an expert, on average, with the fast memory of H200. H100 was not
# measured. docs/experiments.md, "Experts with few rows", has the measurements.
# From this many rows on, the kernel is faster than the two kernels by TMA, if the weights take less
# than `_LONG_US` to read. With fewer rows the kernels by TMA have tiles of 32 rows, and begin
# sooner.
_FEWEST = 20.0
_LONG_US = 150.0
# The same limit if the weights take longer to read. With fewer rows the kernels for few rows are
# the fastest.
_FEWEST_OF_LONG = 4.0
# The kernel is used up to this many rows, the most that were measured. It was still faster than
# DeepGEMM there.
_MOST = 1024.0
# The kernel is not used for weights that take less time to read than this many µs. The shortest
# time that was measured is 70 µs.
_LEAST_US = 50.0


def fewest_rows_fused(reading: Reading) -> float:
    """The rows of an expert, on average, from which on the fused kernel is used with fp8 weights.

    With fewer rows the kernels by TMA or those for few rows are faster. The result is infinite if
    the kernel is never the fastest.
    """
    if most_rows_fused(reading) == 0:
        return math.inf
    return _FEWEST if reading.us < _LONG_US else _FEWEST_OF_LONG


def most_rows_fused(reading: Reading) -> float:
    """The most rows of an expert, on average, for which DeepGEMM is slower with fp8 weights."""
    return _MOST if reading.fast and reading.us >= _LEAST_US else 0.0


class FusedExperts(FewRows):
    """epmoe's kernel for the whole stage in fp8, on GPUs of compute capability 9.0."""

    name = "fused_experts"
    steps: ClassVar[dict[torch.dtype, int]] = {FP8: FP8_BLOCKS.block[1]}

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        problem = super().problem_with(gate_up, down)
        if problem is not None:
            return problem
        if len(down) > _MOST_EXPERTS:
            return ValueError(
                f"the experts in one kernel are at most {_MOST_EXPERTS}, got {len(down)}"
            )
        return problem_of_build(down.device)

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        most = most_rows_fused(Reading.on_gpu(gate_up, down))
        # Without DeepGEMM, calls with more rows have to dequantize all weights, which is slow.
        if DeepGemm().problem_with(gate_up, down) is not None:
            return max(most, MOST_BEFORE_ALL)
        return most

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Compute the outputs by one kernel.

        Between the two products the rows are fp8, with a scale for each 128 columns.
        """
        out: Tensor = ops.fused_experts(*self._operands(weights, rows, scales, segments))
        return out
