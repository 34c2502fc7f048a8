"""The experts stage with fp8 or bf16 weights as one kernel, for calls of any size.

`FewRows` and `FewRowsByTma` are faster with very few rows or weights. The order of a sum is the
same in all calls, and that of `FewRowsByTma`. In fp8 it is also that of DeepGEMM, and
`batch_invariant` experts take this kernel for all calls. In bf16 it is also that of `Hopper`, which
takes this kernel for the forward pass of training. The file of the kernel, `fused_experts` in
csrc/cuda/hopper, explains how it works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.local.gemm.few_rows import operands_of, problem_with_weights
from epmoe.local.gemm.gemm import Gemm, Segments, Weights
from epmoe.local.gemm.hopper import FUSED_STEP, MOST_FUSED_EXPERTS, problem_of_build
from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native import ops
from epmoe.native.arguments import FP8

# By the dtype of the weights, the number that must divide D and F.
_STEPS = {torch.bfloat16: FUSED_STEP, FP8: FP8_BLOCKS.block[1]}
# The most experts of a rank, by the dtype of the weights. Their table lies in shared memory.
_MOST_EXPERTS = {torch.bfloat16: MOST_FUSED_EXPERTS, FP8: 512}


class FusedExperts(Gemm):
    """epmoe's kernel for the whole stage in fp8 or bf16, on GPUs of compute capability 9.0."""

    name = "fused_experts"
    needs_gpu = True
    batch_invariant = True
    takes_fp8 = True
    takes_adapters = False

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`."""
        problem = problem_with_weights(
            "the kernel of all experts",
            gate_up,
            down,
            steps=_STEPS,
            most_experts=_MOST_EXPERTS.get(down.dtype, 0),
        )
        return problem or problem_of_build(down.device)

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Compute the outputs by one kernel.

        Between the two products the rows have the dtype of the weights. In fp8 they have a scale
        for each 128 columns.
        """
        out: Tensor = ops.fused_experts(*operands_of(weights, rows, scales, segments))
        return out
