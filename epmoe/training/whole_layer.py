"""A layer with gradients as one node of autograd: what an eager step runs.

    x [T,D] ─ logits ─ route ─ dispatch ─ experts ─ combine ─▶ y [T,D]

Each node that autograd visits costs the host 20 to 50 µs, forward and backward. The parts are those
of operators.py, route.py, logits.py and experts_gradients.py, which compilers, modes and experts of
one's own see one by one.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor

from epmoe.exchange.call import new_call
from epmoe.local.experts import GroupedExperts, is_called_alone
from epmoe.local.experts_gradients import OfEach, experts_backward, experts_forward
from epmoe.local.gemm.gemm import Gating, Kept, TrainedSegments, TrainedWeights
from epmoe.local.logits import logits_forward, weight_gradient, x_gradient
from epmoe.local.recording import Routes
from epmoe.local.route import Choice
from epmoe.local.spread import gradient_of_whole
from epmoe.local.stage import without_autocast
from epmoe.native.named import is_looked_at
from epmoe.training.debts import ERRORS_OF_ALL, Directions, find
from epmoe.training.exchange import Opening, TrainingExchange
from epmoe.training.models import check_spread
from epmoe.training.rounds import BACKWARD, FORWARD
from epmoe.training.route import Weighing, route_gradient

# Pairs of weight 0 have no gradients in a layer: their score has vanished, or is not finite.
_OUT = FORWARD._replace(keeps_zeros=False)
_BACK = BACKWARD._replace(keeps_zeros=False)


class Router(NamedTuple):
    """How logits are made, and how they choose experts."""

    choice: Choice
    weighing: Weighing
    invariant: bool
    """whether a token's logits have the same bits in any batch"""

    @classmethod
    def of(cls, choice: Choice, invariant: bool) -> Self:
        weighing = Weighing(
            choice.is_sigmoid,
            choice.renormalize,
            choice.renormalize_epsilon,
            choice.routed_scaling_factor,
        )
        return cls(choice, weighing, invariant)


class Step(NamedTuple):
    """What both passes of a call know, besides tensors."""

    number: int
    """by which the exchange is found, as long as it lives"""
    router: Router
    gating: Gating
    gemm: str
    """name of the GEMM with gradients"""
    averages_over: int
    """by which gradients of spread experts are divided"""
    aligned: bool
    num_real: int
    """tokens, where no tensor says how many"""


class Forward(NamedTuple):
    """A call of the layer, besides its tensors with gradients."""

    step: Step
    directions: Directions
    bias: Tensor | None
    """fp32 [E], of the choice"""
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
    """Whether an eager call of a layer with these experts may be one node: they are
    `GroupedExperts`, and nobody looks at the parts of the call.
    """
    return is_called_alone(experts) and not is_looked_at(tensors)


def run(
    exchange: TrainingExchange,
    router: Router,
    bias: Tensor | None,
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
    exchange.wrappers.check()
    gate_up, down, _, _, gate_up_bias, down_bias = experts.held()
    if getattr(down, "_spec", None) is None or getattr(gate_up, "_spec", None) is None:
        check_spread(exchange.ep, experts)
    opening = exchange.opening(x_TD, num_rows, num_tokens, aligned=False)
    step = Step(
        exchange.number,
        router,
        experts.gating,
        experts.trained_gemm(x_TD.dtype),
        experts.averages_over,
        opening.aligned,
        opening.num_real,
    )
    y, ids, weights_TK, logits, tokens = _Layer.apply(
        Forward(step, exchange.directions, bias, tag, opening),
        exchange.anchor,
        x_TD,
        x_TD,
        router_weight,
        logit_bias,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
    )
    return y, Routes(ids, weights_TK, logits, tokens)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Forward, anchor: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        device = inputs[0].device
        if torch.is_autocast_enabled(device.type):
            with without_autocast(device):
                return _forward(ctx, call, Trained(*inputs))
        return _forward(ctx, call, Trained(*inputs))

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: Tensor | None,
        _ids: None,
        grad_weights: Tensor | None,
        grad_logits: Tensor | None,
        _tokens: None,
    ) -> tuple[Tensor | None, ...]:
        grads = grad_y, grad_weights, grad_logits
        if torch.is_autocast_enabled(ctx.device.type):
            with without_autocast(ctx.device):
                return _once_differentiable(ctx, *grads)
        return _once_differentiable(ctx, *grads)


def _once_differentiable(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the node's inputs, which have none themselves."""
    if not torch.is_grad_enabled():
        return None, None, *_backward(ctx, *grads)
    with torch.no_grad():
        found = _backward(ctx, *grads)
    return None, None, *_without_gradients(found)


def _without_gradients(grads: Trained) -> list[Tensor | None]:
    """Gradients whose own gradients are refused, as `once_differentiable` of torch does it."""
    refuse = torch._C._functions.DelayedError(
        b"GroupedExperts have no gradients of gradients", len(grads)
    )
    marked = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
    return list(refuse(*marked))  # type: ignore[arg-type]  # torch gives it None, too


def _forward(
    ctx: Any, call: Forward, given: Trained
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    step, directions, bias, tag, opening = call
    router = step.router
    x_TD = given.x
    of_experts = given[4:]
    weights = TrainedWeights(*[getattr(value, "_local_tensor", value) for value in of_experts])
    forward = directions.forward
    exchange = forward.exchange
    num_tokens = opening.num_tokens
    num_real = opening.num_real

    # Choose experts.
    logits_TE = logits_forward(
        x_TD, given.router_weight, given.logit_bias, invariant=router.invariant
    )
    counters = exchange.views["health.counters"]
    ids_TK, weights_TK = router.choice.of(logits_TE, bias, num_tokens, num_real, counters)

    # Tokens to their experts, and back.
    real = num_real if num_tokens is None else num_tokens
    arguments = (x_TD, ids_TK, weights_TK, None, real, "expert", False, tag)
    sent = new_call((*arguments, step.aligned, None))
    with directions.numbering():
        arrived = forward.out(sent, opening.num_rows, _OUT)
    number = directions.last_number()
    offsets = arrived.expert_offsets
    segments = TrainedSegments(offsets, None, *step.gating)
    out_ND, gate_up = experts_forward(arrived.rows, weights, segments, step.gemm)
    y_TD = forward.back(out_ND)

    # Keep what gradients need. What only a frozen part needs is not kept.
    needs = Trained(*ctx.needs_input_grad[2:])
    ctx.device = x_TD.device
    ctx.x_dtype = x_TD.dtype
    ctx.step = step
    ctx.number = number
    ctx.num_rows = arrived.rows.shape[0]
    ctx.specs = [getattr(value, "_spec", None) for value in of_experts]
    ctx.generation = directions.generation
    ctx.mark_non_differentiable(ids_TK, arrived.tokens_per_expert)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x_TD if needs.router_weight else None,
        given.router_weight,
        logits_TE,
        ids_TK,
        weights_TK,
        num_tokens,
        offsets,
        arrived.rows if needs.gate_up else None,
        gate_up,
        arrived.row_weights,
        weights.gate_up,
        weights.down,
        weights.gate_up_bias,
        weights.down_bias,
    )
    template = exchange.rounds.template
    assert template is not None
    ctx.order = directions.debts.add(ctx, template.shape, number)
    return y_TD, ids_TK, weights_TK, logits_TE, arrived.tokens_per_expert


def _backward(
    ctx: Any, grad_y: Tensor | None, grad_weights: Tensor | None, grad_logits: Tensor | None
) -> Trained:
    x_TD, router_weight, logits_TE, ids_TK, weights_TK, num_tokens, offsets, *kept = (
        ctx.saved_tensors
    )
    step = ctx.step
    router = step.router
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
        backward = directions.backward
        real = step.num_real if num_tokens is None else num_tokens
        arguments = (grad_y, ids_TK, weights_TK, None, real, "expert", False, ctx.number)
        sent = new_call((*arguments, step.aligned, None))
        # Not by `dropped_by_errors`, whose context manager would cost each layer 1 µs.
        try:
            running = debts.pay(directions, ctx.order)
            arrived = backward.out(sent, ctx.num_rows, _BACK)
            if running is not None:
                running.has_opened(directions)
            segments = TrainedSegments(offsets, None, *step.gating)
            # Other ranks need the gradients of rows and of their weights, whatever is frozen here.
            wanted = OfEach(True, True, *needs[4:])
            of_experts = experts_backward(arrived.rows, Kept(*kept), segments, wanted, step.gemm)
            grad_x, by_weights = backward.back_with_values(
                of_experts["rows"], of_experts["row_weights"]
            )
        except ERRORS_OF_ALL:
            debts.drop(directions)
            raise
        grad_weights = by_weights if grad_weights is None else grad_weights + by_weights

    # Through route to the router, which has a gradient of x of its own.
    if grad_weights is not None:
        by_route = route_gradient(grad_weights, logits_TE, ids_TK, weights_TK, router.weighing)
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

    of_weights = []
    for name, spec in zip(TrainedWeights._fields, ctx.specs, strict=True):
        grad = of_experts.get(name)
        if spec is not None:
            grad = gradient_of_whole(grad, spec, step.averages_over)
        of_weights.append(grad)
    return Trained(grad_x, grad_scored, grad_router, grad_bias, *of_weights)
