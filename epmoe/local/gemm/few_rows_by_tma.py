"""The experts stage for calls in which an expert has some rows.

Kernels of epmoe compute it. They read the weights by TMA and multiply by wgmma. They are used for
calls with more rows than `FewRows` takes, and with fewer rows than a GEMM for many rows needs. They
add in the same order as that GEMM. So `batch_invariant` experts with bf16 weights use them for all
calls with fewer rows. With fp8 weights they are used only for so few weights that `FusedExperts`
does not fill the GPU. The files of the kernels, `few_rows_by_tma` in csrc/cuda/hopper, explain how
these work.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from epmoe.local.gemm.few_rows import FewRows, Reading, fills_gpu
from epmoe.local.gemm.hopper import Hopper, problem_of_build
from epmoe.native.arguments import FP8

# The limits below are rows of an expert, on average. docs/experiments.md, "Experts with few rows",
# has the measurements.
# In bf16 a GEMM is faster with more rows if the weights take long to read.
_MANY_WEIGHTS = 39.0
# This number, divided by the µs to read the weights, is added. A GEMM begins its work later, which
# counts if the weights are read in a short time.
_LEAD_ROWS_US = 10_000.0
# The limit is at most this, if memory is fast and if it is not.
_AT_MOST_FAST = 48.0
_AT_MOST_SLOW = 64.0
# In fp8 the kernels were measured up to this many rows for so few weights.
_MOST_OF_FP8 = 32.0
# Up to this many rows of an expert, tiles have 32 rows. For more rows they have 64.
_HALF_TILES = {torch.bfloat16: 8.0, FP8: 20.0}
# The most experts of a rank, the largest D and the largest F in fp8. The table of the experts and
# the scales of a tile lie in shared memory.
_LARGEST_OF_FP8 = 1024, 27_264, 128_768


def most_rows_by_tma(reading: Reading) -> float:
    """The most rows of an expert, on average, for which a GEMM in bf16 is slower."""
    at_most = _AT_MOST_FAST if reading.fast else _AT_MOST_SLOW
    return min(_MANY_WEIGHTS + _LEAD_ROWS_US / max(reading.us, 1e-9), at_most)


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
            for size, most in zip(down.shape, _LARGEST_OF_FP8, strict=True):
                if size > most:
                    return ValueError(
                        f"the kernel takes fp8 of at most {_LARGEST_OF_FP8} experts, D and F, got "
                        f"{(*down.shape,)}"
                    )
        return problem_of_build(down.device)

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        if down.dtype == FP8:
            return 0.0 if fills_gpu(down) else _MOST_OF_FP8
        return most_rows_by_tma(Reading.on_gpu(gate_up, down))

    def _token_tiles(self, dtype: torch.dtype, rows_per_expert: float) -> int:
        return 4 if rows_per_expert <= _HALF_TILES[dtype] else 8


class InvariantFewRows(FewRowsByTma):
    """The kernels of `FewRowsByTma` for `batch_invariant` experts with bf16 weights.

    Their outputs have the bits of `Hopper`, which takes the calls with more rows.
    """

    name = "invariant_few_rows"
    batch_invariant = True
    takes_fp8 = False
    steps: ClassVar[dict[torch.dtype, int]] = {torch.bfloat16: 64}

    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        return super().problem_with(gate_up, down) or Hopper().problem_with(gate_up, down)
