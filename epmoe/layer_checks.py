"""Checks what a `MoELayer` is made of: that router, experts, exchange and adapters fit the config
and one another. A layer that was made has passed them, so its calls need not ask again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.local.adapters import ExpertAdapters
from epmoe.local.experts import GroupedExperts
from epmoe.local.gemm.blocks import place_matters
from epmoe.local.spread import local_view
from epmoe.native.arguments import FLOATS, check_tensor, describe
from epmoe.service import ExpertParallel
from epmoe.training.exchange import TrainingExchange
from epmoe.training.models import unspread


def check_parts(
    ep: ExpertParallel,
    router_weight: Tensor,
    experts: object,
    *,
    bias: Tensor | None,
    logit_bias: Tensor | None,
    shared: object,
    exchange: TrainingExchange | None,
) -> None:
    """Raise the TypeErrors and ValueErrors of `MoELayer` for these arguments of it."""
    # The router and the experts.
    if not isinstance(ep, ExpertParallel):
        raise TypeError(f"`ep` must be an ExpertParallel, got {describe(ep)}")
    _check_router(ep.config, router_weight, bias, logit_bias)
    if not callable(experts):
        raise TypeError(
            f"`experts` must be callable on (rows, expert_offsets, scales), got {describe(experts)}"
        )
    if isinstance(experts, GroupedExperts):
        _check_experts(ep, experts, router_weight)

    # What goes beside them.
    if shared is not None and not callable(shared):
        raise TypeError(f"`shared` must be callable on x [T, D], got {describe(shared)}")
    if exchange is not None and not isinstance(exchange, TrainingExchange):
        raise TypeError(
            f"`exchange` must be an epmoe.training.TrainingExchange, got {describe(exchange)}"
        )
    if exchange is not None and exchange.ep is not ep:
        raise ValueError("`exchange` must be over `ep`")

    # The layer spreads `GroupedExperts` itself if they train. Others must be spread already.
    if not isinstance(experts, GroupedExperts):
        trained = unspread(ep, experts)
        if trained:
            raise ValueError(
                f"`experts` must be spread, since `{trained[0]}` requires grad: "
                "`epmoe.training.spread(experts, ep)` tells torch's tools that ranks have "
                "different experts"
            )


def adapter_room(
    ep: ExpertParallel,
    experts: object,
    count: int,
    rank: int,
    exchange: TrainingExchange | None,
) -> ExpertAdapters:
    """Make room for `count` adapters of a rank up to `rank`. Raises ValueError if there can be
    none. `exchange` is the argument of `MoELayer`.
    """
    if not isinstance(experts, GroupedExperts):
        raise ValueError(
            f"`experts` must be GroupedExperts with `adapters`, got {describe(experts)}"
        )
    extra_bytes = ep.config.capacity.extra_bytes
    needed = torch.int32.itemsize
    if extra_bytes < needed:
        raise ValueError(
            f"`capacity.extra_bytes` must be at least {needed} with `adapters`, got {extra_bytes}"
        )
    if ep.config.experts.weights_on_input:
        raise ValueError("`experts.weights_on_input` must be unset with `adapters`")
    if exchange is not None:
        raise ValueError("`exchange` must be unset with `adapters`")
    return ExpertAdapters(experts, count, rank)


def _check_router(
    config: EPConfig, weight: Tensor, bias: Tensor | None, logit_bias: Tensor | None
) -> None:
    """Raise TypeError or ValueError unless the router fits the config."""
    E = config.model.num_experts
    want = (E, config.model.hidden_size)
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
        check_tensor("router_weight", weight, FLOATS, want)
    if weight.shape != want:
        raise ValueError(f"`router_weight` must be {list(want)}, got {list(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias, FLOATS, (E,))
    elif config.routing.selection_bias:
        raise ValueError(
            "`bias` must be given, since `routing.selection_bias` says that the router has one"
        )
    if bias is not None and not config.routing.selection_bias:
        raise ValueError(
            "`bias` must be None, unless `routing.selection_bias` says that the choice has one: "
            "set `routing: {selection_bias: true}` in the config"
        )
    if logit_bias is not None:
        check_tensor("logit_bias", logit_bias, (weight.dtype,), (E,), weight.device)
    elif config.routing.logit_bias:
        raise ValueError(
            "`logit_bias` must be given, since `routing.logit_bias` says that the logits have one"
        )
    if logit_bias is not None and not config.routing.logit_bias:
        raise ValueError(
            "`logit_bias` must be None, unless `routing.logit_bias` says that the logits have one: "
            "a bias of the choice is `bias`"
        )


def _check_experts(ep: ExpertParallel, experts: GroupedExperts, router_weight: Tensor) -> None:
    """Raise ValueError unless the experts are those of this rank and fit the config."""
    E, D = router_weight.shape
    config = ep.config.experts
    got = local_view(experts.w_down.detach()).shape[:2]
    if got != (ep.num_local_experts, D):
        held = f"the {ep.num_local_experts} of this rank, with D={D}"
        raise ValueError(f"`experts` must be {held}, got {got[0]} with D={got[1]}")
    # An option that has its default in the config says nothing about the experts.
    defaults = type(config)().options
    for name, wanted in config.options.items():
        value = getattr(experts, name)
        if wanted not in (defaults[name], value):
            raise ValueError(
                f"`experts` must have {name}={wanted}, as `experts.{name}` says, got {name}={value}"
            )
    if config.biases and (experts.gate_up_bias is None or experts.down_bias is None):
        raise ValueError(
            "`experts` must have a `gate_up_bias` and a `down_bias`, as `experts.biases` says"
        )
    if experts.batch_invariant and ep.device.type == "cpu":
        why = place_matters(router_weight.dtype, E, D)
        if why:
            raise ValueError(f"`experts` must not be batch_invariant with this router: {why}")
