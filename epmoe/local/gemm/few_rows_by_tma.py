"""The experts stage for calls in which an expert has some rows.

Kernels of epmoe compute it. They read the weights by TMA and multiply by wgmma. They are used for
calls with more rows than `FewRows` takes, and with fewer rows than a GEMM for many rows needs. They
add in the same order as that GEMM, so `batch_invariant` experts use them for all calls with fewer
rows. The files of the kernels, `few_rows_by_tma` in csrc/cuda/hopper, explain how these work.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import MOST_BEFORE_ALL, FewRows, Reading
from epmoe.local.gemm.fused_experts import FusedExperts, fewest_rows_fused
from epmoe.local.gemm.gemm import SWIGLU, Gemm, Segments, Weights
from epmoe.local.gemm.hopper import Hopper, problem_of_build
from epmoe.local.quantize import quantize_weights
from epmoe.native.arguments import FP8


class _Border(NamedTuple):
    """The numbers from which `most_rows_by_tma` computes its result.

    The result is how many rows an expert may have, on average, before a GEMM is faster.
    """

    many_weights: float
    """the result if the weights take long to read"""
    lead_rows_us: float
    """This number, divided by the µs to read the weights, is added to the result. A GEMM begins its
    work later, which counts if the weights are read in a short time.
    """
    at_most: float
    """the largest result"""


# The border by the dtype of the weights, and by whether memory is fast. The numbers are in the
# order of the fields. docs/experiments.md, "Experts with few rows", has the measurements.
_BORDERS = {
    (torch.bfloat16, False): _Border(39.0, 10_000.0, 64.0),
    (torch.bfloat16, True): _Border(39.0, 10_000.0, 48.0),
    (FP8, False): _Border(39.0, 2_600.0, 64.0),
    (FP8, True): _Border(28.0, 500.0, 48.0),
}
# Up to this many rows of an expert, tiles have 32 rows. For more rows they have 64.
_HALF_TILES = {torch.bfloat16: 8.0, FP8: 20.0}
# The most experts of a rank, the largest D and the largest F in fp8. The table of the experts and
# the scales of a tile lie in shared memory.
_MOST_OF_FP8 = 1024, 27_264, 128_768
# The GEMM for calls with many rows, by the dtype of the weights.
_MANY: dict[torch.dtype, Gemm] = {
    torch.bfloat16: Hopper(),
    FP8: DeepGemm(),
}


def most_rows_by_tma(dtype: torch.dtype, reading: Reading) -> float:
    """The most rows of an expert, on average, for which a GEMM is slower.

    `dtype` is that of the weights, bf16 or fp8.
    """
    border = _BORDERS[dtype, reading.fast]
    lead = border.lead_rows_us / max(reading.us, 1e-9)
    return min(border.many_weights + lead, border.at_most)


class FewRowsByTma(FewRows):
    """epmoe's kernels for some rows, on GPUs of compute capability 9.0.

    They are almost as fast with 16 rows of an expert as with one.
    """

    name = "few_rows_by_tma"

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        problem = super().problem_with(gate_up, down)
        if problem is not None:
            return problem
        if down.dtype == FP8:
            for size, most in zip(down.shape, _MOST_OF_FP8, strict=True):
                if size > most:
                    return ValueError(
                        f"the kernel takes fp8 of at most {_MOST_OF_FP8} experts, D and F, got "
                        f"{(*down.shape,)}"
                    )
        return problem_of_build(down.device)

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        """See `Gemm.most_rows`. With fp8 weights, `FusedExperts` may be faster before a GEMM is."""
        most = self._most_before_many(gate_up, down)
        if down.dtype != FP8:
            return most
        fewest = fewest_rows_fused(Reading.on_gpu(gate_up, down))
        if fewest < most and FusedExperts().problem_with(gate_up, down) is None:
            return fewest
        return most

    def _most_before_many(self, gate_up: Tensor, down: Tensor) -> float:
        """The most rows of an expert, on average, for which the GEMM for many rows is slower.

        If that GEMM cannot be used, the alternative is to dequantize all weights.
        """
        if down.dtype == FP8 and _MANY[FP8].problem_with(gate_up, down) is not None:
            return MOST_BEFORE_ALL
        return most_rows_by_tma(down.dtype, Reading.on_gpu(gate_up, down))

    def _token_tiles(self, dtype: torch.dtype, rows_per_expert: float) -> int:
        return 4 if rows_per_expert <= _HALF_TILES[dtype] else 8


class InvariantFewRows(FewRowsByTma):
    """The kernels of `FewRowsByTma` for `batch_invariant` experts.

    Their outputs have the bits of the GEMM for many rows: epmoe's own for bf16, DeepGEMM for fp8.
    """

    name = "invariant_few_rows"
    batch_invariant = True

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        return self._most_before_many(gate_up, down)

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """See `Gemm.problem_with`. It also compares outputs with those of the GEMM for many rows.

        Another version of DeepGEMM might add in another order.
        """
        problem = super().problem_with(gate_up, down)
        if problem is not None:
            return problem
        return _MANY[down.dtype].problem_with(gate_up, down) or _other_bits(down.dtype, down.device)


@functools.cache
def _other_bits(dtype: torch.dtype, device: torch.device) -> ValueError | None:
    """Compare outputs of random rows, bit by bit, with those of the GEMM for many rows.

    Returns an error if they differ, and None if they are equal.
    """
    # Take two experts of D = F = `size`. Their segments start at multiples of a block.
    size = 256
    few = 3
    more = 40
    block = DeepGemm.block
    random = _Random(device)
    with torch.inference_mode(), torch.cuda.device(device):
        gate_up, gate_up_scales = random.weights(2 * size, size, dtype)
        down, down_scales = random.weights(size, size, dtype)
        weights = Weights(gate_up, down, gate_up_scales, down_scales, None, None, SWIGLU)
        offsets = torch.tensor([0, block, 2 * block], dtype=torch.int32, device=device)
        tokens = torch.tensor([few, more], dtype=torch.int32, device=device)
        segments = Segments(offsets, tokens, block, rows_per_expert=1.0)
        rows = random.values(2 * block, size)
        got = InvariantFewRows().experts(weights, rows, None, segments)
        wanted = _MANY[dtype].experts(weights, rows, None, segments)

        # Compare the rows of the two experts. Rows of gaps are undefined.
        differs = got.view(torch.int16) != wanted.view(torch.int16)
        differing = int(differs[:few].sum()) + int(differs[block : block + more].sum())
    if not differing:
        return None
    return ValueError(f"few rows have other bits than many, in {differing} elements")


class _Random:
    """Makes random rows and weights, which are the same in each process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def values(self, *shape: int) -> Tensor:
        """bf16 values of this shape."""
        values = torch.randn(shape, generator=self._generator, device="cpu")
        return values.to(self._device, torch.bfloat16)

    def weights(self, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weights [2, n, k] of two experts in bf16, or in fp8 with their scales."""
        plain = self.values(2, n, k) / k**0.5
        if dtype != FP8:
            return plain, None
        first, second = map(quantize_weights, plain)
        return torch.stack([first.q, second.q]), torch.stack([first.scales, second.scales])
