"""A layer with gradients as one node of autograd, which an eager step runs.

    x [T,D] ─ logits ─ route ─ dispatch ─ experts ─ combine ─▶ y [T,D]

Each node that autograd visits costs the host 20 to 50 µs, forward and backward. Compilers, modes of
torch and other experts than `GroupedExperts` run the same stages as nodes of their own:
operators.py, route.py, logits.py and experts_gradients.py.
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
from epmoe.training.exchange import Opening, TrainingExchange
from epmoe.training.models import check_spread
from epmoe.training.owed_rounds import ERRORS_OF_ALL, Directions, find
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
    """The settings of a call that its forward and its backward pass need."""

    number: int
    """of the exchange, by which it is found as long as it lives"""
    router: Router
    gating: Gating
    gemm: str
    """name of the GEMM with gradients"""
    averages_over: int
    """gradients of spread experts are divided by it"""
    aligned: bool
    """each segment starts at a multiple of the alignment"""
    num_real: int
    """real tokens, where no tensor has their number"""


class Forward(NamedTuple):
    """A call of the layer without its tensors that have gradients."""

    step: Step
    directions: Directions
    bias: Tensor | None
    """fp32 [E], added to scores for the choice"""
    tag: int
    opening: Opening


class Trained(NamedTuple):
    """The inputs that have gradients, in the order in which the node takes them."""

    x: Any
    """[T, D], for the experts"""
    scored: Any
    """the same tensor, for the router. Autograd adds both gradients, in the order of a layer whose
    stages are nodes of their own
    """
    router_weight: Any
    """[E, D]"""
    logit_bias: Any
    """[E]"""
    gate_up: Any
    """this and the next three: `TrainedWeights`, or DTensors whose local tensors these are"""
    down: Any
    gate_up_bias: Any
    down_bias: Any


class Saved(NamedTuple):
    """The tensors that the backward pass needs, besides the experts' (`Kept`)."""

    x_TD: Any
    """None where the router is frozen"""
    router_weight: Tensor
    logits_TE: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    num_tokens: Tensor | None
    offsets: Tensor


def is_one_node(experts: object, *tensors: Tensor | None) -> TypeGuard[GroupedExperts]:
    """Whether an eager call of a layer with these experts may be one node. They must be
    `GroupedExperts`, and no mode or hook may look at the stages of the call.
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
    """Run the layer in a round of its own. Returns y [T, D], and the choice of the router, whose
    weights and logits have gradients.

    x [T, D] is in the dtype of the experts, `router_weight` is [E, D] and `logit_bias` [E]. Other
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
    """The gradients of the node's inputs. They have no gradients themselves."""
    if not torch.is_grad_enabled():
        return None, None, *_backward(ctx, *grads)
    with torch.no_grad():
        found = _backward(ctx, *grads)
    return None, None, *_without_gradients(found)


def _without_gradients(grads: Trained) -> list[Tensor | None]:
    """Mark gradients, so that a pass through them raises, as torch's `once_differentiable` does."""
    refuse = torch._C._functions.DelayedError(
        b"GroupedExperts have no gradients of gradients", len(grads)
    )
    marked = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
    return list(refuse(*marked))  # type: ignore[arg-type]  # torch gives it None, too


def _forward(
    ctx: Any, call: Forward, inputs: Trained
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the layer, and keep what the backward pass needs. Returns y, ids, weights, logits and the
    tokens of each local expert.
    """
    step = call.step
    directions = call.directions
    opening = call.opening
    router = step.router
    x_TD = inputs.x
    of_experts = inputs[4:]
    weights = TrainedWeights(*[getattr(value, "_local_tensor", value) for value in of_experts])
    forward = directions.forward
    exchange = forward.exchange
    num_tokens = opening.num_tokens
    num_real = opening.num_real

    # Choose experts.
    logits_TE = logits_forward(
        x_TD, inputs.router_weight, inputs.logit_bias, invariant=router.invariant
    )
    counters = exchange.views["health.counters"]
    ids_TK, weights_TK = router.choice.of(logits_TE, call.bias, num_tokens, num_real, counters)

    # Bring tokens to their experts, and the sums back.
    real = num_real if num_tokens is None else num_tokens
    arguments = (x_TD, ids_TK, weights_TK, None, real, "expert", False, call.tag)
    sent = new_call((*arguments, step.aligned, None))
    with directions.counting_forward_round():
        arrived = forward.out(sent, opening.num_rows, _OUT)
    number = directions.backward_tag()
    offsets = arrived.expert_offsets
    segments = TrainedSegments(offsets, None, *step.gating)
    out_ND, gate_up = experts_forward(arrived.rows, weights, segments, step.gemm)
    y_TD = forward.back(out_ND)

    # Keep what the backward pass needs, without what only frozen parameters need.
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
    saved = Saved(
        x_TD if needs.router_weight else None,
        inputs.router_weight,
        logits_TE,
        ids_TK,
        weights_TK,
        num_tokens,
        offsets,
    )
    kept = Kept(arrived.rows if needs.gate_up else None, gate_up, arrived.row_weights, *weights)
    ctx.save_for_backward(*saved, *kept)
    template = exchange.rounds.template
    assert template is not None
    ctx.order = directions.owed.add(ctx, template.shape, number)
    return y_TD, ids_TK, weights_TK, logits_TE, arrived.tokens_per_expert


def _backward(
    ctx: Any, grad_y: Tensor | None, grad_weights: Tensor | None, grad_logits: Tensor | None
) -> Trained:
    """Run the backward round, and compute the gradients of all inputs."""
    tensors = ctx.saved_tensors
    saved = Saved(*tensors[: len(Saved._fields)])
    kept = Kept(*tensors[len(Saved._fields) :])
    ids_TK = saved.ids_TK
    weights_TK = saved.weights_TK
    step = ctx.step
    router = step.router
    directions = find(step.number)
    owed = directions.owed
    needs = Trained(*ctx.needs_input_grad[2:])
    grad_x = None
    of_experts = dict[str, Tensor]()

    if grad_y is None:
        owed.begin(directions, ctx.order)
    else:
        # Bring gradients of y to the experts, and those of rows and of their weights back.
        directions.check_generation(ctx.generation)
        backward = directions.backward
        real = step.num_real if saved.num_tokens is None else saved.num_tokens
        arguments = (grad_y, ids_TK, weights_TK, None, real, "expert", False, ctx.number)
        sent = new_call((*arguments, step.aligned, None))
        # Not by `informed_on_error`, whose context manager would cost each layer 1 µs.
        try:
            running = owed.begin(directions, ctx.order)
            arrived = backward.out(sent, ctx.num_rows, _BACK)
            if running is not None:
                running.note_opened(directions)
            segments = TrainedSegments(saved.offsets, None, *step.gating)
            # Other ranks need the gradients of rows and of their weights, whatever is frozen here.
            wanted = OfEach(True, True, *needs[4:])
            of_experts = experts_backward(arrived.rows, kept, segments, wanted, step.gemm)
            grad_x, by_weights = backward.back_with_values(
                of_experts["rows"], of_experts["row_weights"]
            )
        except ERRORS_OF_ALL:
            owed.mark_informed(directions)
            raise
        grad_weights = by_weights if grad_weights is None else grad_weights + by_weights

    # Go back through route to the router, which gives x a gradient, too.
    if grad_weights is not None:
        by_route = route_gradient(
            grad_weights, saved.logits_TE, ids_TK, weights_TK, router.weighing
        )
        grad_logits = by_route if grad_logits is None else grad_logits + by_route
    grad_scored = None
    grad_router = None
    grad_bias = None
    if grad_logits is not None:
        if needs.scored:
            by_router = x_gradient(grad_logits, saved.router_weight, invariant=router.invariant)
            grad_scored = by_router.to(ctx.x_dtype)
        if needs.router_weight:
            grad_router = weight_gradient(grad_logits, saved.x_TD)
        if needs.logit_bias:
            grad_bias = grad_logits.sum(0)

    # Gradients of spread experts become DTensors.
    of_weights = []
    for name, spec in zip(TrainedWeights._fields, ctx.specs, strict=True):
        grad = of_experts.get(name)
        if spec is not None:
            grad = gradient_of_whole(grad, spec, step.averages_over)
        of_weights.append(grad)
    return Trained(grad_x, grad_scored, grad_router, grad_bias, *of_weights)
