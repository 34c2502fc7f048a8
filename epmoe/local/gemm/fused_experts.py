"""Calls in which an expert has some rows or many, in fp8: one kernel of our own for the stage.

On H200 it takes the calls with more rows than those of `FewRowsByTma`. Sums have the order of those
kernels and of DeepGEMM. How it works stands with the kernel, `fused_experts` of csrc/cuda/hopper.
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
# The most rows that were measured, where the kernel was still faster than DeepGEMM.
_MOST = 1024.0
# Weights that take less time to read were not measured. The least that were take 70 µs.
_LEAST_US = 50.0


def fewest_rows_fused(reading: Reading) -> float:
    """Rows of an expert, on average, up to which kernels by TMA or for few rows are faster. Weights
    are fp8.
    """
    if most_rows_fused(reading) == 0:
        return math.inf
    return _FEWEST if reading.us < _LONG_US else _FEWEST_OF_LONG


def most_rows_fused(reading: Reading) -> float:
    """Rows of an expert, on average, up to which DeepGEMM is slower. Weights are fp8."""
    return _MOST if reading.fast and reading.us >= _LEAST_US else 0.0


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
