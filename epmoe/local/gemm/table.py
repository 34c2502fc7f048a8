"""The table of all grouped GEMMs, and the choice of GEMMs for given weights."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from epmoe.local.gemm.blocks import Blocks
from epmoe.local.gemm.deep_gemm import DeepGemm
from epmoe.local.gemm.few_rows import FewestRowsOfMxfp4, FewRows, FewRowsOfMxfp4
from epmoe.local.gemm.few_rows_by_tma import FewRowsByTma, InvariantFewRows
from epmoe.local.gemm.fused_experts import FusedExperts
from epmoe.local.gemm.fused_experts_mxfp4 import FusedExpertsOfMxfp4
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
        FewestRowsOfMxfp4(),
        FusedExpertsOfMxfp4(),
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
"""The GEMMs by their names, the fastest first. The loop takes all weights and all calls. GEMMs that
come behind it are therefore chosen only with `batch_invariant`.
"""

# What users may pass as `GroupedExperts(gemm=…)`.
CHOICES = (
    "auto",
    TorchGrouped.name,
    *(
        name
        for name, gemm in GEMMS.items()
        if gemm.needs_gpu and gemm.takes_all_calls and gemm.takes_adapters
    ),
)


def choose(
    wanted: str,
    gate_up: Tensor,
    down: Tensor,
    *,
    batch_invariant: bool = False,
    has_tensor_scales: bool = False,
) -> tuple[str, ...]:
    """Choose the GEMMs for calls without gradients, for weights on their device.

    Some GEMMs take only some calls, such as those with few rows. A call uses the first of the
    chosen GEMMs whose method `takes` returns True. A warning is given if a library is installed but
    does not work, and if fp8 weights will be dequantized in every call.

    Args:
        wanted: one of `CHOICES`: "auto" allows all GEMMs, and "torch" allows those that need no
            GPU. The name of a GEMM allows this GEMM on GPUs, and those that need no GPU elsewhere.
        gate_up: weights [e, 2F, D].
        down: weights [e, D, F].
        batch_invariant: choose only GEMMs whose outputs have the same bits. If possible, they have
            the bits of the GEMM that trains the weights, so that serving and training agree.
        has_tensor_scales: whether the weights are NVFP4, which have the dtype of MXFP4.

    Returns:
        The names of the GEMMs, the fastest first.

    Raises:
        Exception: the error that `problem_with` of the wanted GEMM returns.
        ValueError: no GEMM is batch invariant for these weights.
    """
    # With `batch_invariant`, a GEMM that can train the weights is preferred. GEMMs that take all
    # calls but cannot train them come last.
    candidates = [
        gemm
        for gemm in GEMMS.values()
        if _is_candidate(gemm, wanted, on_gpu=down.is_cuda, batch_invariant=batch_invariant)
    ]
    if batch_invariant:
        candidates.sort(key=lambda gemm: gemm.takes_all_calls and not gemm.trains(gate_up, down))

    # Choose GEMMs in order, up to the first one that takes any call. GEMMs that come later would
    # never be used.
    chosen: list[str] = []
    problems: dict[str, Exception] = {}
    for gemm in candidates:
        problem = gemm.problem_with(gate_up, down)
        if problem is None and has_tensor_scales and not gemm.takes_tensor_scales:
            problem = ValueError(f"{gemm.name} does not take weights in NVFP4")
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
    """Whether the arguments of `choose` allow this GEMM, if it takes the weights."""
    if gemm.needs_gpu and not (on_gpu and wanted in ("auto", gemm.name)):
        return False
    if batch_invariant:
        return gemm.batch_invariant
    # A batch invariant GEMM for some calls only is slower than the other GEMM for these calls.
    return gemm.takes_all_calls or not gemm.batch_invariant


def _warn_of_slower(chosen: list[str], problems: dict[str, Exception], dtype: torch.dtype) -> None:
    """Warn if the chosen GEMMs are slow because a library cannot be used.

    `problems` says why GEMMs do not take the weights, by the names of the GEMMs. `dtype` is that of
    the weights.
    """
    library_problems = []
    for name, problem in problems.items():
        if GEMMS[name].needs_gpu and GEMMS[name].takes_all_calls:
            library_problems.append(problem)
    takes_fp8 = any(GEMMS[name].takes_fp8 and GEMMS[name].takes_all_calls for name in chosen)
    if library_problems and dtype == FP8 and not takes_fp8:
        warnings.warn(
            f"fp8 weights are dequantized in every call, which is slow: {library_problems[0]}",
            stacklevel=4,
        )
        return
    # If a library is not installed, that is a choice of the user and no reason to warn. The problem
    # is then a ModuleNotFoundError, a subclass of ImportError, so the type is compared exactly.
    broken = [problem for problem in library_problems if type(problem) is ImportError]
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
    """Run `multiply` of the GEMM of this name, as an operator that torch.compile does not trace."""
    return GEMMS[gemm].multiply((rows, row_scales), (weights, weight_scales), ends, alignment)


@_opaque.register_fake
def _(gemm: str, rows: Tensor, row_scales: Tensor | None, weights: Tensor, *_: object) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1], dtype=product_dtype(weights))
