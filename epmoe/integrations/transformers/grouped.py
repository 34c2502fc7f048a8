"""The experts of a transformers module over expert-major rows: the module's weights and gate, a library's grouped GEMM.

    `can_group` ─ parameters_of ─▶ parameters ─ computation ─▶ experts(rows of a round)

It computes what the module's own `grouped_mm` does. That one sorts pairs of tokens and experts; here the rows are
sorted already, and `expert_offsets` say where each expert's segment starts. On GPUs nothing looks at the host where
torch takes the weights in its grouped GEMM: bf16 on compute capability 8.0 and later. Experts with SwiGLU are
`GroupedExperts`, see in_place.py: fewer operators, and the kernels for few rows and DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from epmoe.integrations.batches import Arrived, Experts
from epmoe.integrations.transformers import fp8, in_place
from epmoe.local.experts import GroupedExperts, without_autocast
from epmoe.local.gemm.gemm import expert_of_rows
from epmoe.local.gemm.gradients import choose_trained
from epmoe.local.gemm.table import GEMMS, choose
from epmoe.native.arguments import FLOATS, check_forward_only

_SAME_RESULT = (None, "eager", "grouped_mm", "batched_mm")
_gemms: dict[tuple[object, ...], str] = {}  # by what the choice depends on


class Computation(NamedTuple):
    """What a rank computes in a round."""

    experts: Experts
    aligned: bool = False
    """Whether segments have to start at multiples of a number of rows: `aligned` of `ExpertParallel.dispatch`."""


def can_group(experts: Any) -> bool:
    """Whether `computation` computes what the module's own forward would: plain or fp8 weights, no special kernel."""
    config = getattr(experts, "config", None)
    return (
        hasattr(experts, "_apply_gate")
        and hasattr(experts, "has_bias")
        and getattr(config, "_experts_implementation", None) in _SAME_RESULT
        and (experts.down_proj.dtype in FLOATS or fp8.is_quantized(experts))
    )


def parameters_of(experts: Any) -> list[Tensor]:
    """The parameters that `computation` takes: the up and down projections, and scales or biases if there are any."""
    if fp8.is_quantized(experts) and experts.has_gate:
        return [getattr(experts, name) for name in fp8.PARAMETERS]
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    names = (up, "down_proj", f"{up}_bias", "down_proj_bias")[: 4 if experts.has_bias else 2]
    return [getattr(experts, name) for name in names]


def computation(experts: Any, parameters: list[Tensor], held: slice) -> Computation:
    """The function that computes the experts `held` of a module over rows of a round.

    The module's class has transformers' decorator `use_experts_implementation`, and `parameters` are those of
    `parameters_of`. Outputs of rows past the last segment are undefined. Raises ValueError for a module that is
    quantized in a way that epmoe does not take.
    """
    local = local_parameters(parameters, held)
    if in_place.takes(experts):
        made = in_place.grouped(experts, local)
        return Computation(partial(_by_swiglu, made, local), aligned=made.alignment > 1)
    return Computation(lambda arrived: grouped_experts(experts, local, arrived.plain(), arrived.expert_offsets))


def local_parameters(parameters: list[Tensor], held: slice) -> list[Tensor]:
    """The parameters of this rank's experts. `held` is that of `computation`."""
    return [(p.to_local() if isinstance(p, DTensor) else p)[held] for p in parameters]


def _by_swiglu(experts: GroupedExperts, parameters: list[Tensor], arrived: Arrived) -> Tensor:
    """Outputs [n, D] of `GroupedExperts` in the memory of `parameters`."""
    check_forward_only(*parameters)
    rows = arrived.rows
    scales = arrived.scales
    if rows.shape[0] == 0:
        return rows.to(arrived.dtype)
    rows = rows.to(experts.dtype) if scales is None else rows
    return experts(rows, arrived.expert_offsets, scales, **arrived.segments).to(arrived.dtype)


def grouped_experts(experts: Any, parameters: list[Tensor], rows_nD: Tensor, expert_offsets: Tensor) -> Tensor:
    """Outputs [n, D] of experts with plain weights, whose `parameters` are this rank's part.

    Rows are fp32, fp16 or bf16 [n, D], expert by expert. Outputs have the dtype of the rows. Rows past the last segment
    may hold anything, and their outputs are undefined.
    """
    ends = expert_offsets[1:]
    n = rows_nD.shape[0]
    e = ends.shape[0]
    if e == 0 or n == 0:
        return rows_nD
    up, down, biases = weights_and_biases(experts, parameters)
    gemm = GEMMS[gemm_for(up, down)]
    experts_n = expert_of_rows(ends, n) if biases else None

    def product(rows: Tensor, which: int) -> Tensor:
        weights = down if which else up
        out = gemm.product((rows.to(weights.dtype), None), (weights, None), ends)
        return out if experts_n is None else out.add_(biases[which].index_select(0, experts_n))

    return between_products(experts, rows_nD, product)


def weights_and_biases(experts: Any, parameters: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The up projection [e, n, D], the down projection [e, D, F], and their biases if there are any."""
    up, down, *biases = parameters
    return (up.transpose(1, 2), down.transpose(1, 2), biases) if experts.is_transposed else (up, down, biases)


def between_products(experts: Any, rows_nD: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The outputs of `product(rows, 0)`, the module's gate, and `product(rows, 1)`, in the dtype of the rows."""
    with without_autocast(rows_nD.device):
        hidden = product(rows_nD, 0)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        out = product(hidden, 1)
        if getattr(experts, "has_post_expert_norm", False):
            out = experts.post_expert_norm(out)
        return out.to(rows_nD.dtype)


def gemm_for(up: Tensor, down: Tensor, *, trained: bool = False) -> str:
    """The name of the GEMM that multiplies by these weights, without or with gradients."""
    key = (trained, up.dtype, up.device, up.shape, up.stride(), down.shape, down.stride())
    if key not in _gemms:
        _gemms[key] = choose_trained("auto", up, down) if trained else choose("torch", up, down)[0]
    return _gemms[key]
