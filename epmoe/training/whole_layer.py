"""A whole layer with gradients as one node of autograd, for eager training steps.

    x [T,D] ─ logits ─ route ─ dispatch ─ experts ─ combine ─▶ y [T,D]

Every node that autograd visits costs the host 20 to 50 µs, in the forward and in the backward pass.
So an eager call runs all stages of the layer in one node. Under a compiler, under a mode of torch
that watches operators, or with experts other than `GroupedExperts`, a layer runs the same stages as
one or more nodes each. These are in operators.py, route.py, logits.py and experts_gradients.py.

Letters: T tokens, D elements of a token, E experts of the layer, e experts of this rank, K experts
of a token, N rows.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor

from epmoe.exchange.call import Call
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

# In a layer, a weight of 0 means that its score has vanished or was not finite. It then has no
# gradient, so the pair (token, expert) needs no row.
_FORWARD = FORWARD._replace(keeps_zeros=False)
_BACKWARD = BACKWARD._replace(keeps_zeros=False)


class Router(NamedTuple):
    """How a layer computes logits, and how these choose and weigh experts."""

    choice: Choice
    """for the forward pass: the choice of experts, and their weights"""
    weighing: Weighing
    """for the backward pass: how the weights follow from logits"""
    invariant: bool
    """whether a token's logits have the same bits in any batch"""

    @classmethod
    def of(cls, choice: Choice, invariant: bool) -> Self:
        """Make the router of a choice: its weighing follows from the choice."""
        weighing = Weighing(
            is_sigmoid=choice.is_sigmoid,
            renormalize=choice.renormalize,
            renormalize_epsilon=choice.renormalize_epsilon,
            routed_scaling_factor=choice.routed_scaling_factor,
        )
        return cls(choice=choice, weighing=weighing, invariant=invariant)


class Step(NamedTuple):
    """The settings of a call that both its forward and its backward pass need."""

    number: int
    """the number of the `TrainingExchange`. The backward pass finds the exchange by it, and raises
    if the exchange is gone. A graph that kept the exchange itself would keep its windows, too.
    """
    router: Router
    gating: Gating
    gemm: str
    """name of the GEMM with gradients"""
    averages_over: int
    """the number by which the gradients of spread experts are divided, since DDP and FSDP average
    all other gradients over so many ranks
    """
    aligned: bool
    """whether each expert's segment of rows starts at a multiple of the alignment"""
    num_real: int
    """the number of real tokens, unless a tensor on the device has this number"""


class Forward(NamedTuple):
    """The arguments of a call of the layer that have no gradients."""

    step: Step
    directions: Directions
    """the forward and backward rounds of the exchange"""
    bias: Tensor | None
    """fp32 [E], added to the scores for the choice of experts only"""
    tag: int
    """the layer's number, the tag of its forward round"""
    opening: Opening


class Trained(NamedTuple):
    """The inputs of the node that have gradients, in the order in which the node takes them. The
    same record holds the gradients of these inputs, and whether each of them is needed.
    """

    x: Any
    """[T, D], the tokens for the experts"""
    scored: Any
    """the same tensor, for the router. It is an input of its own so that autograd adds the two
    gradients of x, in the same order as in a layer whose stages are separate nodes. The gradients
    then have the same bits in both.
    """
    router_weight: Any
    """[E, D]"""
    logit_bias: Any
    """[E]"""
    gate_up: Any
    """This and the next three fields are those of `TrainedWeights`. A field may be a DTensor; its
    local tensor is then the field of `TrainedWeights`.
    """
    down: Any
    gate_up_bias: Any
    down_bias: Any


class Saved(NamedTuple):
    """The tensors that the backward pass needs, besides those of the experts, which `Kept` has."""

    x_TD: Any
    """None if the router's weight is frozen, since only its gradient needs x"""
    router_weight: Tensor
    logits_TE: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    num_tokens: Tensor | None
    offsets: Tensor


def is_one_node(experts: object, *tensors: Tensor | None) -> TypeGuard[GroupedExperts]:
    """Whether an eager call of a layer with these experts may be one node of autograd.

    The experts must be `GroupedExperts`. No mode of torch, such as selective checkpointing, may
    watch the operators of the call, and no hook the call of the experts: they would miss the stages
    inside the node.
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
    """Run the layer as one node of autograd, in one round. Collective.

    x [T, D] is in the dtype of the experts, `router_weight` is [E, D] and `logit_bias` [E].
    `TrainingExchange.dispatch` describes the keyword arguments, and the errors.

    Returns y [T, D], and what the router has chosen: ids, weights and logits. The weights and
    logits have gradients.
    """
    exchange.wrappers.check()

    # Experts whose two weights are DTensors have been spread. Only otherwise walk through all of
    # their parameters, which takes longer.
    gate_up, down, _, _, gate_up_bias, down_bias = experts.held()
    if getattr(down, "_spec", None) is None or getattr(gate_up, "_spec", None) is None:
        check_spread(exchange.ep, experts)

    # Run the node. Here and below, records and the node take their fields in order: keywords would
    # cost each layer more than 1 µs.
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
    call = Forward(step, exchange.directions, bias, tag, opening)
    y, ids, weights_TK, logits, tokens = _Layer.apply(
        call,
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
    """The node of autograd. It runs without autocast, which would cast the operands of some stages
    and not of others. Entering the context costs time, so that it is entered only under autocast.
    """

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
    """Compute the gradients of the node's inputs, which cannot be differentiated again.

    torch has the decorator `once_differentiable` for this. It would enter a context in every
    backward pass, and this does so only if the caller asks for gradients of gradients.
    """
    # The first two inputs, the call and the anchor, have no gradients.
    if not torch.is_grad_enabled():
        return None, None, *_backward(ctx, *grads)
    with torch.no_grad():
        gradients = _backward(ctx, *grads)
    return None, None, *_refuse_second_pass(gradients)


def _refuse_second_pass(grads: Trained) -> list[Tensor | None]:
    """Mark gradients, so that a backward pass through them raises, as torch's decorator
    `once_differentiable` does.
    """
    refuse = torch._C._functions.DelayedError(
        b"GroupedExperts have no gradients of gradients", len(grads)
    )
    marked = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
    return list(refuse(*marked))  # type: ignore[arg-type]  # torch gives it None, too


def _forward(
    ctx: Any, call: Forward, inputs: Trained
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the layer, keep on the node `ctx` what the backward pass needs, and note the backward
    round as owed. Returns y, ids, weights, logits and the number of tokens of each local expert.
    """
    step = call.step
    directions = call.directions
    opening = call.opening
    router = step.router
    x_TD = inputs.x
    # The inputs from `gate_up` on are those of the experts.
    expert_inputs = inputs[4:]
    weights = TrainedWeights(*[getattr(value, "_local_tensor", value) for value in expert_inputs])
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

    # Bring tokens to their experts, run these, and bring the sums back.
    real = num_real if num_tokens is None else num_tokens
    asked = Call(x_TD, ids_TK, weights_TK, num_tokens=real, tag=call.tag, aligned=step.aligned)
    with directions.counting_forward_round():
        arrived = forward.out(asked, opening.num_rows, _FORWARD)
    backward_tag = directions.backward_tag()
    offsets = arrived.expert_offsets
    segments = TrainedSegments(offsets, None, *step.gating)
    out_ND, gate_up = experts_forward(arrived.rows, weights, segments, step.gemm)
    y_TD = forward.back(out_ND)

    # Keep what the backward pass needs. A tensor that only the gradients of frozen parameters need
    # is not kept. The first two inputs of the node are the call and the anchor.
    needs = Trained(*ctx.needs_input_grad[2:])
    ctx.device = x_TD.device
    ctx.x_dtype = x_TD.dtype
    ctx.step = step
    ctx.backward_tag = backward_tag
    ctx.num_rows = arrived.rows.shape[0]
    ctx.specs = [getattr(value, "_spec", None) for value in expert_inputs]
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
    # The last four fields of `Kept` are those of `TrainedWeights`.
    rows = arrived.rows if needs.gate_up else None
    kept = Kept(rows, gate_up, arrived.row_weights, *weights)
    ctx.save_for_backward(*saved, *kept)

    # From now on this graph owes the other ranks a backward round of the same shape.
    template = exchange.rounds.template
    assert template is not None
    ctx.order = directions.owed.add(ctx, template.shape, backward_tag)
    return y_TD, ids_TK, weights_TK, logits_TE, arrived.tokens_per_expert


def _backward(
    ctx: Any, grad_y: Tensor | None, grad_weights: Tensor | None, grad_logits: Tensor | None
) -> Trained:
    """Run the backward round, and compute the gradients of all inputs from those of y, of the
    router's weights and of its logits. Each of these three is None if the pass does not have it.
    """
    tensors = ctx.saved_tensors
    num_saved = len(Saved._fields)
    saved = Saved(*tensors[:num_saved])
    kept = Kept(*tensors[num_saved:])
    ids_TK = saved.ids_TK
    weights_TK = saved.weights_TK
    step = ctx.step
    router = step.router
    directions = find(step.number)
    owed = directions.owed
    needs = Trained(*ctx.needs_input_grad[2:])
    grad_x = None
    expert_grads = dict[str, Tensor]()

    if grad_y is None:
        # All ranks make the same kind of call, so no rank opens the round: none of them owes it.
        owed.begin(directions, ctx.order)
    else:
        # Bring the gradients of y to the experts, and those of rows and of their weights back.
        directions.check_generation(ctx.generation)
        backward = directions.backward
        real = step.num_real if saved.num_tokens is None else saved.num_tokens
        tag = ctx.backward_tag
        asked = Call(grad_y, ids_TK, weights_TK, num_tokens=real, tag=tag, aligned=step.aligned)
        # This does what `informed_on_error` does, whose context would cost each layer 1 µs.
        try:
            running = owed.begin(directions, ctx.order)
            arrived = backward.out(asked, ctx.num_rows, _BACKWARD)
            if running is not None:
                running.note_opened(directions)
            segments = TrainedSegments(saved.offsets, None, *step.gating)
            # The gradients of rows and of their weights belong to tokens of other ranks, too. So
            # they are needed even if this rank needs no gradient of its own tokens. The last four
            # fields of `Trained` and `OfEach` are those of `TrainedWeights`.
            wanted = OfEach(True, True, *needs[4:])
            expert_grads = experts_backward(arrived.rows, kept, segments, wanted, step.gemm)
            grad_x, grad_pair_weights = backward.back_with_values(
                expert_grads["rows"], expert_grads["row_weights"]
            )
        except ERRORS_OF_ALL:
            owed.mark_informed(directions)
            raise
        # The weights get a gradient from y, and one from what the caller does with them.
        if grad_weights is None:
            grad_weights = grad_pair_weights
        else:
            grad_weights = grad_weights + grad_pair_weights

    # Go back from the weights to the logits.
    if grad_weights is not None:
        grad_logits_of_route = route_gradient(
            grad_weights, saved.logits_TE, ids_TK, weights_TK, router.weighing
        )
        if grad_logits is None:
            grad_logits = grad_logits_of_route
        else:
            grad_logits = grad_logits + grad_logits_of_route

    # Go back from the logits to the router's parameters, and to the x that the router has scored.
    grad_scored = None
    grad_router = None
    grad_bias = None
    if grad_logits is not None:
        if needs.scored:
            grad_x_of_router = x_gradient(
                grad_logits, saved.router_weight, invariant=router.invariant
            )
            grad_scored = grad_x_of_router.to(ctx.x_dtype)
        if needs.router_weight:
            grad_router = weight_gradient(grad_logits, saved.x_TD)
        if needs.logit_bias:
            grad_bias = grad_logits.sum(0)

    # The gradients of spread experts become DTensors, as their parameters are.
    grads_of_weights = []
    for name, spec in zip(TrainedWeights._fields, ctx.specs, strict=True):
        grad = expert_grads.get(name)
        if spec is not None:
            grad = gradient_of_whole(grad, spec, step.averages_over)
        grads_of_weights.append(grad)
    return Trained(grad_x, grad_scored, grad_router, grad_bias, *grads_of_weights)
