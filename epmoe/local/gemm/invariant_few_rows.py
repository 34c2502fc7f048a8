"""Calls in which an expert has a few rows, with the bits of calls with many: for `batch_invariant` experts.

The kernels for few rows divide k among warps, so their sums have an order of their own. Here sums have the order of the
GEMM for many rows. How it works stands with the kernels, `invariant_few_rows` of csrc/cuda/hopper.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import FewRows
from epmoe.local.gemm.gemm import Gemm, Segments, Weights, bias_of_rows
from epmoe.local.gemm.hopper import Hopper, problem_of_build
from epmoe.local.quantize import quantize_weights
from epmoe.native.arguments import FP8

MOST_INVARIANT_ROWS = 16.0
"""Rows of an expert, on average, up to which the kernels take calls."""
_MOST_OF_FP8 = 1024, 27_264, 128_768
"""Experts of a rank, D and F in fp8: their table and the scales of a tile lie in shared memory."""
_MANY: dict[torch.dtype, Gemm] = {torch.bfloat16: Hopper(), FP8: DeepGemm()}  # the GEMM of calls with more


class InvariantFewRows(FewRows):
    """Kernels for few rows on GPUs of compute capability 9.0, with the bits of our own GEMM for bf16, and of DeepGEMM
    for fp8."""

    name = "invariant_few_rows"
    batch_invariant = True

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """Rows of both ways of computing show whether the installed DeepGEMM adds in this order."""
        if (problem := super().problem_with(gate_up, down)) is not None:
            return problem
        if down.dtype == FP8 and any(size > most for size, most in zip(down.shape, _MOST_OF_FP8, strict=True)):
            return ValueError(f"the kernel takes fp8 of at most {_MOST_OF_FP8} experts, D and F, got {(*down.shape,)}")
        ran = _MANY[down.dtype].problem_with(gate_up, down) or problem_of_build(down.device)
        return ran or _other_bits(down.dtype, down.device)

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
    size, few, more = 256, 3, 40  # D and F, and the rows of two experts
    block = DeepGemm.block

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device, torch.bfloat16)

    def weights(n: int) -> tuple[Tensor, Tensor | None]:
        plain = drawn(2, n, size) / size**0.5
        if dtype != FP8:
            return plain, None
        values, scales = zip(*map(quantize_weights, plain), strict=True)
        return torch.stack(values), torch.stack(scales)

    with torch.inference_mode(), torch.cuda.device(device):
        (gate_up, gate_up_scales), (down, down_scales) = weights(2 * size), weights(size)
        given = Weights(gate_up, down, gate_up_scales, down_scales, None, None, (False, float("inf"), 1.0, 0.0))
        numbers = (0, block, 2 * block), (few, more)
        offsets, tokens = (torch.tensor(each, dtype=torch.int32, device=device) for each in numbers)
        call = given, drawn(2 * block, size), None, Segments(offsets, tokens, block, rows_per_expert=1.0)
        got, wanted = (gemm.experts(*call).view(torch.int16) for gemm in (InvariantFewRows(), _MANY[dtype]))
        differing = sum(int((got[i : i + n] != wanted[i : i + n]).sum()) for i, n in ((0, few), (block, more)))
    return ValueError(f"few rows have other bits than many, in {differing} elements") if differing else None
