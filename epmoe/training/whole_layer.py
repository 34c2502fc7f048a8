"""A layer with gradients as one node of autograd: what an eager step runs.

    x [T,D] ─ logits ─ route ─ dispatch ─ experts ─ combine ─▶ y [T,D]

Each node that autograd visits costs the host 20 to 50 µs, forward and backward. The parts are those
of operators.py, route.py, logits.py and experts_gradients.py, which compilers, modes and experts of
one's own see one by one.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from epmoe.exchange.call import Call
from epmoe.exchange.handles import RoundShape
from epmoe.local.experts import GroupedExperts
from epmoe.local.experts_gradients import (
    Kept,
    OfEach,
    TrainedSegments,
    TrainedWeights,
    experts_backward,
    experts_forward,
)
from epmoe.local.logits import logits_forward, weight_gradient, x_gradient
from epmoe.local.recording import Routes
from epmoe.local.route import route
from epmoe.local.spread import gradient_of_whole, rows_of, spec_of
from epmoe.local.stage import without_autocast
from epmoe.native.named import is_looked_at
from epmoe.training.debts import find
from epmoe.training.exchange import Opening, TrainingExchange
from epmoe.training.rounds import BACKWARD, FORWARD
from epmoe.training.route import route_gradient

# Pairs of weight 0 have no gradients in a layer: their score has vanished, or is not finite.
_OUT = FORWARD._replace(keeps_zeros=False)
_BACK = BACKWARD._replace(keeps_zeros=False)


class Router(NamedTuple):
    """How logits are made, and how they choose experts."""

    bias: Tensor | None
    """fp32 [E], of the choice"""
    options: dict[str, Any]
    """of `epmoe.route`, with `top_k`"""
    invariant: bool
    """whether a token's logits have the same bits in any batch"""


class Step(NamedTuple):
    """What a call of the layer is made of, besides its tensors with gradients."""

    number: int
    """by which the exchange is found, as long as it lives"""
    router: Router
    gating: tuple[bool, float, float, float]
    """the last fields of `TrainedSegments`"""
    gemm: str
    """name of the GEMM with gradients"""
    averages_over: int
    """by which gradients of spread experts are divided"""
    tag: int
    opening: Opening


class Trained(NamedTuple):
    """The inputs with gradients, in the order of the node's."""

    x: Any
    """[T, D], of the experts"""
    scored: Any
    """the same of the router: autograd adds both gradients, in the order of a layer in parts"""
    router_weight: Any
    """[E, D]"""
    logit_bias: Any
    """[E]"""
    gate_up: Any
    """these four are `TrainedWeights`, or DTensors that have them as this rank's part"""
    down: Any
    gate_up_bias: Any
    down_bias: Any


def is_one_node(experts: object, *tensors: Tensor | None) -> TypeGuard[GroupedExperts]:
    """Whether a call of a layer with these experts may be one node: they are `GroupedExperts`, and
    nobody looks at the parts of the call.
    """
    if not isinstance(experts, GroupedExperts):
        return False
    if torch.compiler.is_compiling() or is_looked_at(tensors):
        return False
    if type(experts).forward is not GroupedExperts.forward or "forward" in vars(experts):
        return False
    return not has_hooks(experts)


def has_hooks(module: nn.Module) -> bool:
    """Whether anything else than `forward` runs when the module is called."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def run(
    exchange: TrainingExchange,
    router: Router,
    router_weight: Tensor,
    logit_bias: Tensor | None,
    experts: GroupedExperts,
    x_TD: Tensor,
    *,
    num_tokens: int | Tensor | None,
    num_rows: int | Literal["exact"],
    tag: int,
) -> tuple[Tensor, Routes]:
    """y [T, D] and what was chosen, whose weights and logits have gradients. Opens a round, and
    closes it.

    x [T, D] is in the dtype of the experts, `router_weight` [E, D] and `logit_bias` [E]. Other
    arguments and errors are those of `TrainingExchange.dispatch`.
    """
    opening = exchange.opening(x_TD, num_rows, num_tokens, aligned=False)
    step = Step(
        exchange.number,
        router,
        experts.gating,
        experts.trained_gemm(),
        experts.averages_over,
        tag,
        opening,
    )
    weights = experts.w_gate_up, experts.w_down, experts.gate_up_bias, experts.down_bias
    y, ids, weights_TK, logits, tokens = _Layer.apply(
        step, exchange.anchor, x_TD, x_TD, router_weight, logit_bias, *weights
    )
    return y, Routes(ids, weights_TK, logits, tokens)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, anchor: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        given = Trained(*inputs)
        weights = TrainedWeights(*map(rows_of, given[4:]))
        with without_autocast(given.x.device):
            return _forward(ctx, step, given, weights)

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: Tensor | None,
        _ids: None,
        grad_weights: Tensor | None,
        grad_logits: Tensor | None,
        _tokens: None,
    ) -> tuple[Tensor | None, ...]:
        with without_autocast(ctx.device):
            if not torch.is_grad_enabled():
                return None, None, *_backward(ctx, grad_y, grad_weights, grad_logits)
            with torch.no_grad():
                grads = _backward(ctx, grad_y, grad_weights, grad_logits)
        return None, None, *_without_gradients(grads)


def _without_gradients(grads: Trained) -> list[Tensor | None]:
    """Gradients whose own gradients are refused, as `once_differentiable` of torch does it."""
    refuse = torch._C._functions.DelayedError(
        b"GroupedExperts have no gradients of gradients", len(grads)
    )
    marked = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
    return list(refuse(*marked))  # type: ignore[arg-type]  # torch gives it None, too


def _forward(
    ctx: Any, step: Step, given: Trained, weights: TrainedWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x_TD = given.x
    directions = find(step.number)
    exchange = directions.forward.exchange
    opening = step.opening
    router = step.router
    num_tokens = opening.num_real if opening.num_tokens is None else opening.num_tokens

    # Choose experts.
    logits_TE = logits_forward(
        x_TD, given.router_weight, given.logit_bias, invariant=router.invariant
    )
    ids_TK, weights_TK = route(
        logits_TE,
        bias=router.bias,
        num_tokens=num_tokens,
        counters=exchange.views["health.counters"],
        **router.options,
    )

    # Tokens to their experts, and back. The link is explained in operators.py.
    call = Call(
        x_TD, ids_TK, weights_TK, num_tokens=num_tokens, tag=step.tag, aligned=opening.aligned
    )
    with directions.numbering():
        arrived = directions.forward.out(call, opening.num_rows, _OUT)
    link = directions.new_link()
    segments = TrainedSegments(arrived.expert_offsets, None, *step.gating)
    out_ND, gate_up = experts_forward(arrived.rows, weights, segments, step.gemm)
    y_TD = directions.forward.back(out_ND)

    # Keep what gradients need. What only a frozen part needs is not kept.
    needs = Trained(*ctx.needs_input_grad[2:])
    ctx.device = x_TD.device
    ctx.x_dtype = x_TD.dtype
    ctx.step = step._replace(opening=opening._replace(num_tokens=None))
    ctx.num_rows = arrived.rows.shape[0]
    ctx.specs = [spec_of(value) for value in given[4:]]
    ctx.generation = directions.generation
    ctx.mark_non_differentiable(ids_TK, arrived.tokens_per_expert)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x_TD if needs.router_weight else None,
        given.router_weight,
        logits_TE,
        ids_TK,
        weights_TK,
        link,
        opening.num_tokens,
        arrived.expert_offsets,
        arrived.rows if needs.gate_up else None,
        gate_up,
        arrived.row_weights,
        weights.gate_up,
        weights.down,
        weights.gate_up_bias,
        weights.down_bias,
    )
    shape = RoundShape(x_TD.shape[1], ids_TK.shape[1], x_TD.dtype, aligned=opening.aligned)
    ctx.order = directions.debts.add(ctx, shape, link)
    return y_TD, ids_TK, weights_TK, logits_TE, arrived.tokens_per_expert


def _backward(
    ctx: Any, grad_y: Tensor | None, grad_weights: Tensor | None, grad_logits: Tensor | None
) -> Trained:
    x_TD, router_weight, logits_TE, ids_TK, weights_TK, link, num_tokens, offsets, *kept = (
        ctx.saved_tensors
    )
    step = ctx.step
    router = step.router
    opening = step.opening
    directions = find(step.number)
    debts = directions.debts
    needs = Trained(*ctx.needs_input_grad[2:])
    grad_x = None
    of_experts = dict[str, Tensor]()

    if grad_y is None:
        debts.pay(directions, ctx.order)
    else:
        # Gradients of y to the experts, and back with those of rows and of their weights.
        directions.check_generation(ctx.generation)
        real = opening.num_real if num_tokens is None else num_tokens
        call = Call(
            grad_y, ids_TK, weights_TK, num_tokens=real, tag=int(link), aligned=opening.aligned
        )
        with debts.dropped_by_errors(directions):
            debts.pay(directions, ctx.order)
            arrived = directions.backward.out(call, ctx.num_rows, _BACK)
            debts.has_opened(directions)
            segments = TrainedSegments(offsets, None, *step.gating)
            # Other ranks need the gradients of rows and of their weights, whatever is frozen here.
            wanted = OfEach(True, True, *needs[4:])
            of_experts = experts_backward(arrived.rows, Kept(*kept), segments, wanted, step.gemm)
            grad_x, by_weights = directions.backward.back_with_values(
                of_experts["rows"], of_experts["row_weights"]
            )
        grad_weights = by_weights if grad_weights is None else grad_weights + by_weights

    # Through route to the router, which has a gradient of x of its own.
    if grad_weights is not None:
        by_route = route_gradient(grad_weights, logits_TE, ids_TK, weights_TK, router.options)
        grad_logits = by_route if grad_logits is None else grad_logits + by_route
    grad_scored = None
    grad_router = None
    grad_bias = None
    if grad_logits is not None:
        if needs.scored:
            by_router = x_gradient(grad_logits, router_weight, invariant=router.invariant)
            grad_scored = by_router.to(ctx.x_dtype)
        if needs.router_weight:
            grad_router = weight_gradient(grad_logits, x_TD)
        if needs.logit_bias:
            grad_bias = grad_logits.sum(0)

    of_weights = [
        gradient_of_whole(of_experts.get(name), spec, step.averages_over)
        for name, spec in zip(TrainedWeights._fields, ctx.specs, strict=True)
    ]
    return Trained(grad_x, grad_scored, grad_router, grad_bias, *of_weights)
