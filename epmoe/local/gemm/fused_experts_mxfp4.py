"""The experts stage for calls whose rows are fp8 and whose weights are MXFP4.

One kernel of epmoe computes the whole stage with the tensor cores of fp8. Codes become e4m3 on
their way into the tensor cores, and e4m3 has all of their values. So a call reads half the bytes of
fp8 weights. There are two such kernels, for few rows and for many. Their files,
`fused_experts_mxfp4` and `fused_experts_many_mxfp4` in csrc/cuda/hopper, explain how they work.
"""

from __future__ import annotations

import math

from torch import Tensor

from epmoe.local.gemm.few_rows import (
    are_readable_fp8,
    operands_with,
    problem_with_weights,
)
from epmoe.local.gemm.gemm import Gemm, Segments, Weights
from epmoe.local.gemm.hopper import problem_of_build
from epmoe.native import ops
from epmoe.native.arguments import MXFP4

# The number that must divide D and F.
_STEPS = {MXFP4: 64}
# The most experts of a rank. Their table lies in shared memory.
_MOST_EXPERTS = 1024
# Up to so many rows of an expert, on average, the kernel for few rows is faster.
_MOST_OF_FEW = 27.0


class FusedExpertsOfMxfp4(Gemm):
    """epmoe's kernels for the whole stage with MXFP4 weights and fp8 rows, on GPUs of compute
    capability 9.0.
    """

    name = "fused_experts_mxfp4"
    needs_gpu = True
    takes_all_calls = False
    takes_all_rows = False
    takes_adapters = False

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`."""
        problem = problem_with_weights(
            "the kernel of all experts in MXFP4",
            gate_up,
            down,
            steps=_STEPS,
            most_experts=_MOST_EXPERTS,
        )
        return problem or problem_of_build(down.device)

    def takes(self, segments: Segments, most_rows: float = math.inf) -> bool:
        """See `Gemm.takes`. Segments may start at any row."""
        return True

    def takes_rows(self, rows: Tensor, scales: Tensor | None) -> bool:
        """See `Gemm.takes_rows`. Rows may have a stride that TMA can read.

        Rows without scales are bf16. They are also bf16 between the products then, which takes
        another kernel.
        """
        return are_readable_fp8(rows, scales)

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Compute the outputs by one kernel.

        Between the two products the rows are fp8, with a scale for each 128 columns.
        """
        many_rows = has_many_rows(segments, len(rows), len(weights.down))
        out: Tensor = ops.fused_experts(*operands_with(weights, rows, scales, segments), many_rows)
        return out


def has_many_rows(segments: Segments, num_rows: int, num_experts: int) -> bool:
    """Whether the kernel for many rows takes a call with N rows and e experts.

    If the host does not know how many rows are real, all N count: few rows cost the kernel for many
    rows half as much again at most, and many rows cost the other one more than twice its time.
    """
    rows_per_expert = segments.rows_per_expert
    if rows_per_expert is None:
        rows_per_expert = num_rows / max(num_experts, 1)
    return rows_per_expert > _MOST_OF_FEW
