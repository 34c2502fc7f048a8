"""Grouped GEMMs of our own for bf16 on Hopper, in both directions, and gradients of weights. They train, and serve.

A tile adapts to the rows of an expert, which other libraries round up to blocks of 64 or 128. How they work stands with
the kernels, `grouped_gemm` of csrc/cuda/hopper.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gemm, Scaled, plain_rows, problem_on_hopper
from epmoe.native import ops

_BYTES = 16  # addresses and strides are multiples of it
_MOST_EXPERTS = 512  # of one rank; their table is in shared memory


class Hopper(Gemm):
    """Our kernels on GPUs of compute capability 9.0: bf16 weights, whatever the segments are."""

    name = "hopper"
    needs_gpu = True
    batch_invariant = True  # an element has one order of sums, whatever tile it is in

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        problem = problem_on_hopper("Hopper's kernel", gate_up, down, {torch.bfloat16: 8})
        if problem is not None:
            return problem
        if len(down) > _MOST_EXPERTS:
            return ValueError(f"Hopper's kernel takes at most {_MOST_EXPERTS} experts, got {len(down)}")
        if not all(_is_whole(weights) or _is_whole(weights.transpose(1, 2)) for weights in (gate_up, down)):
            return ValueError("Hopper's kernel takes contiguous weights, or transposed ones, at multiples of 16 bytes")
        return _problem_on(down.device)

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        return down.is_cuda and self.problem_with(gate_up, down) is None

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        plain = plain_rows(rows, weights[0].dtype)
        product: Tensor = ops.hopper_gemm(_whole(plain), weights[0], ends)
        return product

    def multiply_for_weights(self, grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        gradient: Tensor = ops.hopper_gemm_weights(_whole(grad), _whole(rows), offsets[1:])
        return gradient


def _is_whole(tensor: Tensor) -> bool:
    """Whether TMA can read it."""
    return tensor.is_contiguous() and tensor.data_ptr() % _BYTES == 0


def _whole(tensor: Tensor) -> Tensor:
    return tensor if _is_whole(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@functools.cache
def _problem_on(device: torch.device) -> Exception | None:
    """Why the kernels do not run there, as where they were compiled for other GPUs."""
    ends = torch.tensor([8], dtype=torch.int32, device=device)
    rows, weights = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((8, 8), (1, 8, 8)))
    try:
        ops.hopper_gemm(rows, weights, ends)
    except RuntimeError as error:
        return error
    return None
