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
"""The GEMMs by their names, the fastest first. The loop takes all weights and all calls, so GEMMs
behind it only serve with `batch_invariant`.
"""

CHOICES = (
    "auto",
    TorchGrouped.name,
    *(name for name, gemm in GEMMS.items() if gemm.needs_gpu and gemm.takes_all_calls),
)


def choose(
    wanted: str, gate_up: Tensor, down: Tensor, *, batch_invariant: bool = False
) -> tuple[str, ...]:
    """Choose the GEMMs that serve weights on their device. A call takes the first of them whose
    `takes` says so.

    It warns of a library that is installed but does not work, and where fp8 weights are dequantized
    in every call.

    Args:
        wanted: one of `CHOICES`: "auto" for all, "torch" for all that need no GPU, or the name of
            the one to take on GPUs.
        gate_up: weights [e, 2F, D].
        down: weights [e, D, F].
        batch_invariant: take GEMMs that have the bits of one GEMM. Where it can, that is the one
            that trains the weights, so that calls with gradients have the bits of serving.

    Returns:
        Names of GEMMs, the fastest first.

    Raises:
        Exception: what `problem_with` of the wanted GEMM returns.
        ValueError: no GEMM is batch invariant for these weights.
    """
    # With `batch_invariant`, GEMMs that train the weights come before others that take all calls.
    candidates = [
        gemm
        for gemm in GEMMS.values()
        if _is_candidate(gemm, wanted, on_gpu=down.is_cuda, batch_invariant=batch_invariant)
    ]
    if batch_invariant:
        candidates.sort(key=lambda gemm: gemm.takes_all_calls and not gemm.trains(gate_up, down))

    # Take them in order, up to the first that takes all calls that may come.
    chosen: list[str] = []
    problems: dict[str, Exception] = {}
    for gemm in candidates:
        problem = gemm.problem_with(gate_up, down)
        if problem is not None:
            if wanted == gemm.name and gemm.needs_gpu:
                raise problem
            problems[gemm.name] = problem
            continue
        chosen.append(gemm.name)
        is_last_invariant = batch_invariant and gemm.takes_all_calls
        if wanted == gemm.name or not gemm.needs_gpu or is_last_invariant:
            break
    if not chosen:
        reasons = "; ".join(
            str(problem) for name, problem in problems.items() if GEMMS[name].takes_all_calls
        )
        raise ValueError(f"`batch_invariant` must be False for these experts: {reasons}")
    _warn_of_slower(chosen, problems, down.dtype)
    return tuple(chosen)


def _is_candidate(gemm: Gemm, wanted: str, *, on_gpu: bool, batch_invariant: bool) -> bool:
    """Whether `choose` may take this GEMM, if the weights fit."""
    if gemm.needs_gpu and not (on_gpu and wanted in ("auto", gemm.name)):
        return False
    if batch_invariant:
        return gemm.batch_invariant
    # Invariant GEMMs for some calls only are slower than others for these calls.
    return gemm.takes_all_calls or not gemm.batch_invariant


def _warn_of_slower(chosen: list[str], problems: dict[str, Exception], dtype: torch.dtype) -> None:
    """Warn where a library that takes all calls is left out, and the chosen GEMMs are slow.

    `problems`: by the names of the GEMMs that are left out. `dtype`: of the weights.
    """
    of_libraries = []
    for name, problem in problems.items():
        if GEMMS[name].needs_gpu and GEMMS[name].takes_all_calls:
            of_libraries.append(problem)
    takes_fp8 = any(GEMMS[name].takes_fp8 and GEMMS[name].takes_all_calls for name in chosen)
    if of_libraries and dtype == FP8 and not takes_fp8:
        warnings.warn(
            f"fp8 weights are dequantized in every call, which is slow: {of_libraries[0]}",
            stacklevel=4,
        )
        return
    # A library that is not installed is ModuleNotFoundError, and no reason to warn.
    broken = [problem for problem in of_libraries if type(problem) is ImportError]
    if broken:
        warnings.warn(f"a slower grouped GEMM is used: {broken[0]}", stacklevel=4)


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
