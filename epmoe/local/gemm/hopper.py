"""epmoe's own grouped GEMMs on Hopper, for bf16, MXFP4 and NVFP4 weights.

With bf16 weights they also compute gradients of rows and of weights. The size of a tile adapts to
the rows of an expert, which other libraries round up to blocks of 64 or 128. The files of the
kernels, `grouped_gemm` in csrc/cuda/hopper, explain how these work.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import (
    ExpertGradients,
    Gemm,
    Kept,
    Scaled,
    TrainedSegments,
    TrainedWeights,
    is_readable,
    plain_rows,
    problem_on_hopper,
    readable,
)
from epmoe.local.weight_formats import product_dtype
from epmoe.native import ops
from epmoe.native.arguments import MXFP4

# By the dtype of the weights, the number that must divide D and F.
_STEPS = {torch.bfloat16: 8, MXFP4: 64}
# The most experts of a rank. Their table lies in shared memory.
_MOST_EXPERTS = 512
FUSED_STEP = 64
"""The number that must divide D and F of bf16 weights in the kernel for the whole stage."""
MOST_FUSED_EXPERTS = 224
"""The most experts of a rank with bf16 weights there. Their table lies in shared memory."""


class Hopper(Gemm):
    """epmoe's grouped GEMMs on GPUs of compute capability 9.0, for any segments.

    The weights are bf16, MXFP4 or NVFP4. Only bf16 weights can be trained.
    """

    name = "hopper"
    needs_gpu = True
    takes_tensor_scales = True
    # The sum of an element has the same order in tiles of all sizes.
    batch_invariant = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`."""
        problem = problem_on_hopper("Hopper's kernel", gate_up, down, _STEPS)
        if problem is not None:
            return problem
        if len(down) > _MOST_EXPERTS:
            return ValueError(
                f"Hopper's kernel takes at most {_MOST_EXPERTS} experts, got {len(down)}"
            )
        for weights in (gate_up, down):
            is_transposed = down.dtype != MXFP4 and is_readable(weights.mT)
            if not is_readable(weights) and not is_transposed:
                return ValueError(
                    "Hopper's kernel takes contiguous weights, or transposed bf16, at multiples of "
                    "16 bytes"
                )
        return problem_of_build(down.device)

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        if not down.is_cuda or down.dtype != torch.bfloat16:
            return False
        return self.problem_with(gate_up, down) is None

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        values, scales = weights
        plain = readable(plain_rows(rows, product_dtype(values)))
        if scales is None:
            product: Tensor = ops.hopper_gemm(plain, values, ends)
        else:
            product = ops.hopper_gemm_mxfp4(plain, values, readable(scales), ends)
        return product

    def multiply_plain(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        product: Tensor = ops.hopper_gemm(readable(rows), weights, ends)
        return product

    def multiply_for_weights(self, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        gradient: Tensor = ops.hopper_gemm_weights(readable(grad), readable(rows), ends)
        return gradient

    def train(
        self, rows: Tensor, weights: TrainedWeights, segments: TrainedSegments, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Gemm.train`. If one kernel takes the weights it computes the whole stage. The bits
        are the same.
        """
        operator = ops.hopper_experts
        if _fits_one_kernel(weights):
            operator = ops.fused_experts_of_training
        out, gate_up = operator(readable(rows), weights.gate_up, weights.down, bias, *segments)
        return out, gate_up

    def train_backward(
        self,
        grad: Tensor,
        gate_up: Tensor,
        kept: Kept,
        w_down: Tensor,
        segments: TrainedSegments,
        needs_down: bool,
    ) -> ExpertGradients:
        """See `Gemm.train_backward`. One operator computes all products."""
        rows = kept.rows
        if rows is not None:
            rows = readable(rows)
        w_gate_up = kept.w_gate_up
        tensors = ops.hopper_experts_backward(
            readable(grad),
            rows,
            gate_up,
            kept.row_weights,
            w_gate_up,
            w_down,
            *segments,
            needs_down,
        )
        # The operator returns an empty tensor for a gradient that is not wanted.
        gradients = ExpertGradients(*tensors)
        if w_gate_up is None:
            gradients = gradients._replace(rows=None)
        if rows is None:
            gradients = gradients._replace(w_gate_up=None)
        if not needs_down:
            gradients = gradients._replace(w_down=None)
        return gradients


def _fits_one_kernel(weights: TrainedWeights) -> bool:
    """Whether the kernel of `FusedExperts` takes these weights, for which `trains` is True."""
    e, D, F = weights.down.shape
    if e > MOST_FUSED_EXPERTS or D % FUSED_STEP or F % FUSED_STEP:
        return False
    return is_readable(weights.gate_up) and is_readable(weights.down)


@functools.cache
def problem_of_build(device: torch.device) -> Exception | None:
    """Say why epmoe's kernels do not run on this device, or return None.

    For example, they may have been compiled for other GPUs. A lack of memory is raised, since it
    says nothing of the kernels, and the result is cached.
    """
    # Try the smallest product.
    ends = torch.tensor([8], dtype=torch.int32, device=device)
    rows = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    weights = torch.ones(1, 8, 8, dtype=torch.bfloat16, device=device)
    try:
        ops.hopper_gemm(rows, weights, ends)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return error
    return None
