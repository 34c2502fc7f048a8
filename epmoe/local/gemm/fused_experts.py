"""Calls in which an expert has some tens of rows, in fp8: one kernel of our own for the stage.

It takes the calls between those of `FewRowsByTma` and those of DeepGEMM, which spend most of their
time on reading weights. Sums have the order of both. How it works stands with the kernel,
`fused_experts` of csrc/cuda/hopper.
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

# Experts of a rank: their table lies in shared memory.
_MOST_EXPERTS = 1024
# Rows of an expert, on average, with the fast memory of H200; H100 was not measured. What was is in
# docs/experiments.md, "Experts with few rows".
# From so many rows on the kernel is faster than two by TMA, if weights take less time to read than
# this many µs: up to here these have tiles of 32 rows, and begin sooner.
_FEWEST = 20.0
_LONG_US = 150.0
# The same if weights take longer: up to here the kernels for few rows are the fastest.
_FEWEST_OF_LONG = 4.0
# From so many rows on, for each µs of reading, DeepGEMM is faster.
_ROWS_OF_US = 0.92
# The most: with 512 rows of DeepSeek-V3 both are as fast.
_MOST = 256.0
# Kernels by TMA take as many rows before DeepGEMM does. Where this kernel takes no more, it has no
# calls.
_MOST_BY_TMA = 48.0


def fewest_rows_fused(reading: Reading) -> float:
    """Rows of an expert, on average, up to which kernels by TMA or for few rows are faster. Weights
    are fp8.
    """
    if most_rows_fused(reading) < _MOST_BY_TMA:
        return math.inf
    return _FEWEST if reading.us < _LONG_US else _FEWEST_OF_LONG


def most_rows_fused(reading: Reading) -> float:
    """Rows of an expert, on average, up to which DeepGEMM is slower. Weights are fp8."""
    if not reading.fast:
        return 0.0
    return min(_ROWS_OF_US * reading.us, _MOST)


class FusedExperts(FewRows):
    """One kernel for gate and up, the activation and down, on GPUs of compute capability 9.0."""

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
        # Without DeepGEMM all weights would be dequantized.
        if DeepGemm().problem_with(gate_up, down) is not None:
            return max(most, MOST_BEFORE_ALL)
        return most

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """One kernel computes the outputs. Rows are fp8 between the products, with a scale for
        every 128 columns.
        """
        out: Tensor = ops.fused_experts(*self._operands(weights, rows, scales, segments))
        return out
