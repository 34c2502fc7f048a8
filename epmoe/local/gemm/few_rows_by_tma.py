"""Calls in which an expert has some rows: kernels of our own, which read weights by TMA and
multiply by wgmma.

They take the calls between those of `FewRows` and those of a GEMM. Sums have the order of the GEMM
for many rows, so `batch_invariant` experts take them for all calls below its own. How they work
stands with the kernels, `few_rows_by_tma` of csrc/cuda/hopper.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import MOST_BEFORE_ALL, FewRows, Reading
from epmoe.local.gemm.fused_experts import FusedExperts, fewest_rows_fused
from epmoe.local.gemm.gemm import SWIGLU, Gemm, Segments, Weights
from epmoe.local.gemm.hopper import Hopper, problem_of_build
from epmoe.local.quantize import quantize_weights
from epmoe.native.arguments import FP8

# Rows of an expert, on average. What was measured is in docs/experiments.md, "Experts with few
# rows". By dtype and whether memory is fast, in three parts: rows up to which the kernels are
# faster than a GEMM where weights are many; µs · rows, which over the µs of reading add rows where
# they are few, since a GEMM begins later; the most.
_BORDERS = {
    (torch.bfloat16, False): (39.0, 10_000.0, 64.0),
    (torch.bfloat16, True): (39.0, 10_000.0, 48.0),
    (FP8, False): (39.0, 2_600.0, 64.0),
    (FP8, True): (28.0, 500.0, 48.0),
}
_HALF_TILES = {torch.bfloat16: 8.0, FP8: 20.0}  # up to so many rows tiles have 32 rows, then 64
_MOST_OF_FP8 = 1024, 27_264, 128_768
"""Experts of a rank, D and F in fp8: their table and the scales of a tile lie in shared memory."""
_MANY: dict[torch.dtype, Gemm] = {
    torch.bfloat16: Hopper(),
    FP8: DeepGemm(),
}  # the GEMM of calls with more


def most_rows_by_tma(dtype: torch.dtype, reading: Reading) -> float:
    """Rows of an expert, on average, up to which a GEMM is slower. `dtype` of weights:
    bf16 or fp8.
    """
    most, lead, of_all = _BORDERS[dtype, reading.fast]
    return min(most + lead / max(reading.us, 1e-9), of_all)


class FewRowsByTma(FewRows):
    """Kernels for few rows on GPUs of compute capability 9.0, almost as fast with 16 rows of an
    expert as with one.
    """

    name = "few_rows_by_tma"

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        problem = super().problem_with(gate_up, down)
        if problem is not None:
            return problem
        if down.dtype == FP8 and any(
            size > most for size, most in zip(down.shape, _MOST_OF_FP8, strict=True)
        ):
            return ValueError(
                f"the kernel takes fp8 of at most {_MOST_OF_FP8} experts, D and F, got "
                f"{(*down.shape,)}"
            )
        return problem_of_build(down.device)

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        """With fp8 the experts in one kernel may be faster before a GEMM is."""
        most = self._most_before_many(gate_up, down)
        if down.dtype != FP8:
            return most
        fewest = fewest_rows_fused(Reading.on_gpu(gate_up, down))
        if fewest < most and FusedExperts().problem_with(gate_up, down) is None:
            return fewest
        return most

    def _most_before_many(self, gate_up: Tensor, down: Tensor) -> float:
        """Rows of an expert, on average, up to which the GEMM for many rows is slower."""
        if down.dtype == FP8 and _MANY[FP8].problem_with(gate_up, down) is not None:
            return MOST_BEFORE_ALL
        return most_rows_by_tma(down.dtype, Reading.on_gpu(gate_up, down))

    def _token_tiles(self, dtype: torch.dtype, rows_per_expert: float) -> int:
        return 4 if rows_per_expert <= _HALF_TILES[dtype] else 8


class InvariantFewRows(FewRowsByTma):
    """The same with the bits of the GEMM for many rows: our own for bf16, DeepGEMM for fp8."""

    name = "invariant_few_rows"
    batch_invariant = True

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        return self._most_before_many(gate_up, down)

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """Rows of both ways of computing show whether the installed DeepGEMM adds in this order."""
        problem = super().problem_with(gate_up, down)
        if problem is not None:
            return problem
        return _MANY[down.dtype].problem_with(gate_up, down) or _other_bits(down.dtype, down.device)


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
        given = Weights(gate_up, down, gate_up_scales, down_scales, None, None, SWIGLU)
        numbers = (0, block, 2 * block), (few, more)
        offsets, tokens = (torch.tensor(each, dtype=torch.int32, device=device) for each in numbers)
        call = (
            given,
            drawn(2 * block, size),
            None,
            Segments(offsets, tokens, block, rows_per_expert=1.0),
        )
        got, wanted = (
            gemm.experts(*call).view(torch.int16) for gemm in (InvariantFewRows(), _MANY[dtype])
        )
        differing = sum(
            int((got[i : i + n] != wanted[i : i + n]).sum()) for i, n in ((0, few), (block, more))
        )
    return (
        ValueError(f"few rows have other bits than many, in {differing} elements")
        if differing
        else None
    )
