"""Calls in which an expert has a few rows, with the bits of calls with many: for `batch_invariant` experts.

The kernel for few rows divides k among warps, so its sums have an order of their own. Here they have the order of the
GEMM that takes the calls with many rows. How it works stands with the kernels, `invariant_few_rows` of csrc/cuda/hopper.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import FewRows
from epmoe.local.gemm.gemm import Gemm, Segments, Weights, bias_of_rows
from epmoe.local.gemm.hopper import Hopper
from epmoe.local.quantize import quantize_weights
from epmoe.native.arguments import FP8

MOST_INVARIANT_ROWS = 16.0
"""Rows of an expert, on average, up to which the kernels take calls."""
_MANY: dict[torch.dtype, Gemm] = {torch.bfloat16: Hopper(), FP8: DeepGemm()}  # the GEMM of calls with more


class InvariantFewRows(FewRows):
    """Kernels for few rows on GPUs of compute capability 9.0, with the bits of our own GEMM for bf16 and of DeepGEMM for
    fp8."""

    name = "invariant_few_rows"
    batch_invariant = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """Rows of both ways of computing show whether the installed DeepGEMM adds in this order."""
        if (problem := super().problem_with(gate_up, down)) is not None:
            return problem
        return _MANY[down.dtype].problem_with(gate_up, down) or _other_bits(down.dtype, down.device)

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        return MOST_INVARIANT_ROWS

    def experts(self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments) -> Tensor:
        """Three kernels. The bias of outputs is added as for many rows, to the rounded products."""
        out = super().experts(weights._replace(down_bias=None), rows, scales, segments)
        bias = weights.down_bias
        return out if bias is None else out + bias_of_rows(bias, segments.offsets[1:], len(out))

    def _token_tiles(self, rows_per_expert: float) -> int:
        return 0


@functools.cache
def _other_bits(dtype: torch.dtype, device: torch.device) -> Exception | None:
    """Whether outputs of drawn rows have other bits than those of the GEMM for many rows."""
    generator = torch.Generator().manual_seed(0)
    size, tokens = 256, (40, 3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)

    offsets, counts = (torch.tensor(n, dtype=torch.int32, device=device) for n in ((0, 64, 128), tokens))
    segments = Segments(offsets, counts, DeepGemm.block, rows_per_expert=1.0)
    values: list[Tensor] = [drawn(len(tokens), n, size) / size**0.5 for n in (2 * size, size)]
    scales: list[Tensor | None] = [None, None]
    if dtype == FP8:
        for i, plain in enumerate(values):
            quantized = [quantize_weights(expert) for expert in plain]
            values[i], scales[i] = (torch.stack(part) for part in zip(*quantized, strict=True))
    weights = Weights(*values, *scales, None, None, (False, float("inf"), 1.0, 0.0))
    with torch.inference_mode(), torch.cuda.device(device):
        rows = drawn(128, size)
        few, many = (gemm.experts(weights, rows, None, segments) for gemm in (InvariantFewRows(), _MANY[dtype]))
        real = torch.cat([torch.arange(n, device=device) + start for n, start in zip(tokens, (0, 64), strict=True)])
        differing = int((few[real].view(torch.int16) != many[real].view(torch.int16)).sum())
    return ValueError(f"few rows have other bits than many, in {differing} elements") if differing else None
