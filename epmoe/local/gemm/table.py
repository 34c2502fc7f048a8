"""The grouped GEMMs, and which of them serve given weights."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from epmoe.local.gemm.blocks import Blocks
from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import FewRows, FewRowsOfMxfp4
from epmoe.local.gemm.few_rows_by_tma import FewRowsByTma, InvariantFewRows
from epmoe.local.gemm.fused_experts import FusedExperts
from epmoe.local.gemm.gemm import Gemm
from epmoe.local.gemm.hopper import Hopper
from epmoe.local.gemm.loop import Loop
from epmoe.local.gemm.torch_grouped import TorchGrouped
from epmoe.local.weight_formats import product_dtype
from epmoe.native.arguments import FP8

GEMMS: dict[str, Gemm] = {
    gemm.name: gemm
    for gemm in (
        FewRows(),
        FewRowsOfMxfp4(),
        FewRowsByTma(),
        InvariantFewRows(),
        FusedExperts(),
        DeepGemm(),
        Hopper(),
        TorchGrouped(),
        Loop(),
        Blocks(),
    )
}
"""The GEMMs by their names, the fastest first. The loop takes all weights and all calls, so what
follows it serves with `batch_invariant` only.
"""

CHOICES = (
    "auto",
    TorchGrouped.name,
    *(name for name, gemm in GEMMS.items() if gemm.needs_gpu and gemm.takes_all_calls),
)


def choose(
    wanted: str, gate_up: Tensor, down: Tensor, *, batch_invariant: bool = False
) -> tuple[str, ...]:
    """The names of the GEMMs that serve weights [e, 2F, D] and [e, D, F] on their device, the
    fastest first.

    A call takes the first whose `takes` says so. `wanted` is one of `CHOICES`: "auto" is all,
    "torch" is all that need no GPU, and any other is that one on GPUs. With `batch_invariant` all
    have the bits of one: where it can, the one that trains the weights, so that calls with
    gradients have the bits of serving. Warns of a library that is installed but does not work, and
    where fp8 weights are dequantized in every call. Raises the `problem_with` the wanted one, and
    ValueError where `batch_invariant` finds none.
    """
    chosen: list[str] = []
    problems: list[tuple[Gemm, Exception]] = []

    def later(gemm: Gemm) -> bool:
        return batch_invariant and gemm.takes_all_calls and not gemm.trains(gate_up, down)

    for gemm in sorted(GEMMS.values(), key=later):
        if gemm.needs_gpu and (not down.is_cuda or wanted not in ("auto", gemm.name)):
            continue
        if batch_invariant != gemm.batch_invariant and (
            batch_invariant or not gemm.takes_all_calls
        ):
            continue
        problem = gemm.problem_with(gate_up, down)
        if problem is not None:
            if wanted == gemm.name and gemm.needs_gpu:
                raise problem
            problems.append((gemm, problem))
            continue
        chosen.append(gemm.name)
        if wanted == gemm.name or not gemm.needs_gpu or (batch_invariant and gemm.takes_all_calls):
            break
    if not chosen:
        reasons = "; ".join(str(problem) for gemm, problem in problems if gemm.takes_all_calls)
        raise ValueError(f"`batch_invariant` must be False for these experts: {reasons}")
    of_libraries = [
        problem for gemm, problem in problems if gemm.needs_gpu and gemm.takes_all_calls
    ]
    takes_fp8 = any(GEMMS[name].takes_fp8 and GEMMS[name].takes_all_calls for name in chosen)
    if of_libraries and down.dtype == FP8 and not takes_fp8:
        warnings.warn(
            f"fp8 weights are dequantized in every call, which is slow: {of_libraries[0]}",
            stacklevel=3,
        )
    elif broken := [problem for problem in of_libraries if type(problem) is ImportError]:
        warnings.warn(f"a slower grouped GEMM is used: {broken[0]}", stacklevel=3)
    return tuple(chosen)


@torch.library.custom_op("epmoe::grouped_gemm", mutates_args=())
def _opaque(
    gemm: str,
    rows: Tensor,
    row_scales: Tensor | None,
    weights: Tensor,
    weight_scales: Tensor | None,
    ends: Tensor,
    alignment: int,
) -> Tensor:
    return GEMMS[gemm].multiply((rows, row_scales), (weights, weight_scales), ends, alignment)


@_opaque.register_fake
def _(gemm: str, rows: Tensor, row_scales: Tensor | None, weights: Tensor, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1], dtype=product_dtype(weights))
