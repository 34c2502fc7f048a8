"""The experts stage with gradients: one operator for the forward pass, one for the backward pass.

    rows [N,D] ─ gate and up ─▶ [N,2F] ─ gated activation ─▶ [N,F] ─ down ─▶ outputs [N,D]

The outputs have the same bits as in serving. They are not weighted here: combine multiplies each
row by its weight. The backward pass therefore gets the gradients of weighted outputs. It multiplies
by the weights of rows at the activation [N, F], where the fewest numbers have to be multiplied.

The forward pass keeps the rows [N, D] and the first product [N, 2F], and it does not keep outputs.
If some parameters are frozen, it also does not keep what only their gradients would need.

N counts also rows behind the last expert's segment. Their outputs and gradients are set to 0, since
modules around the experts may sum over all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import (
    ExpertGradients,
    Kept,
    TrainedSegments,
    TrainedWeights,
    of_rows,
)
from epmoe.local.gemm.gradients import bias_gradients, product_for_weights
from epmoe.local.gemm.table import GEMMS
from epmoe.native import ops
from epmoe.native.named import named


class OfEach(NamedTuple):
    """A value for each of the six inputs of `train_experts` that may have gradients."""

    rows: Any
    row_weights: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any


def experts_forward(
    rows: Tensor, weights: TrainedWeights, segments: TrainedSegments, gemm: str
) -> tuple[Tensor, Tensor]:
    """Run the experts on rows [N, D], by the GEMM of this name.

    Returns the outputs [N, D], undefined behind the last segment, and the first product [N, 2F],
    without its bias and before the activation.
    """
    # Without rows or experts there is nothing to compute, and kernels would not take such shapes.
    if not rows.shape[0] or not weights.down.shape[0]:
        N = rows.shape[0]
        return rows.new_empty(rows.shape), rows.new_empty(N, weights.gate_up.shape[1])
    bias = weights.gate_up_bias
    if bias is not None:
        bias = bias.contiguous()
    out, gate_up = GEMMS[gemm].train(rows, weights, segments, bias)
    if weights.down_bias is not None:
        out += of_rows(weights.down_bias, segments.offsets[1:], rows.shape[0])
    return out, gate_up


def experts_backward(
    grad: Tensor, kept: Kept, segments: TrainedSegments, needs: OfEach, gemm: str
) -> dict[str, Tensor]:
    """Compute the gradients that `needs` asks for, by the GEMM of this name.

    `grad` [N, D] is the gradient of the weighted outputs, output times row weight. Returns the
    gradients by the names of `OfEach`. Gradients of rows and of row weights are undefined behind
    the last segment.
    """
    N = grad.shape[0]
    offsets = segments.offsets
    gate_up = kept.gate_up
    row_weights = kept.row_weights
    found = dict[str, Tensor]()
    if kept.gate_up_bias is not None and len(kept.gate_up_bias):
        gate_up = gate_up + of_rows(kept.gate_up_bias, offsets[1:], N)

    # Start at the end of the stage: the bias of the second product.
    if needs.down_bias:
        found["down_bias"] = bias_gradients(grad, row_weights, offsets, gemm)
    # If only gradients of the second product are needed, the forward pass has not kept `w_down`.
    # Then the gradient of `w_down` is the last one to compute.
    w_down = kept.w_down
    if w_down is None:
        if needs.down:
            weighted = ops.weighted_gates(gate_up, row_weights, *segments)
            found["down"] = product_for_weights(grad, weighted, offsets[1:], gemm)
        return found

    # Go back through both products and the activation. `train_backward` computes the gradient of
    # rows if it gets `w_gate_up`, and the gradient of `w_gate_up` if it gets rows. So leave out the
    # tensors whose counterpart needs no gradient.
    if not needs.gate_up and kept.rows is not None:
        kept = kept._replace(rows=None)
    if not needs.rows and kept.w_gate_up is not None:
        kept = kept._replace(w_gate_up=None)
    train_backward = _empty_backward
    if N and w_down.shape[0]:
        train_backward = GEMMS[gemm].train_backward
    gradients = train_backward(grad, gate_up, kept, w_down, segments, needs.down)
    if gradients.rows is not None:
        found["rows"] = gradients.rows
    if gradients.w_gate_up is not None:
        found["gate_up"] = gradients.w_gate_up
    if gradients.w_down is not None:
        found["down"] = gradients.w_down

    # The gradient of a row weight is the product of the row's output and its gradient. So far it
    # lacks the part of the output that is the bias of down.
    if needs.row_weights:
        grad_weights = gradients.row_weights
        if kept.down_bias is not None and len(kept.down_bias):
            bias_ND = of_rows(kept.down_bias, offsets[1:], N)
            grad_weights += ops.weighted_rows_backward_(
                bias_ND, grad, None, offsets, segments.tokens
            )
        found["row_weights"] = grad_weights
    # The bias of the first product is last.
    if needs.gate_up_bias:
        found["gate_up_bias"] = bias_gradients(gradients.gate_up, None, offsets, gemm)
    return found


def _empty_backward(
    grad: Tensor,
    gate_up: Tensor,
    kept: Kept,
    w_down: Tensor,
    segments: TrainedSegments,
    needs_down: bool,
) -> ExpertGradients:
    """Do the work of `Gemm.train_backward` for a call without rows or without experts.

    Gradients of weights are zeros, and those of rows are empty. A gradient is None under the same
    conditions as there.
    """
    e, D, F = w_down.shape
    return ExpertGradients(
        gate_up=gate_up.new_empty(gate_up.shape),
        row_weights=grad.new_empty(grad.shape[0], dtype=torch.float32),
        rows=None if kept.w_gate_up is None else grad.new_empty(grad.shape),
        w_gate_up=None if kept.rows is None else grad.new_zeros(e, 2 * F, D),
        w_down=grad.new_zeros(e, D, F) if needs_down else None,
    )


# How many inputs `train_experts` has.
_INPUTS = 13


@named("epmoe::train_experts")
def train_experts(
    rows: Tensor,
    row_weights: Tensor | None,
    w_gate_up: Tensor,
    w_down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor,
    tokens: Tensor | None,
    interleaved: bool,
    limit: float,
    alpha: float,
    up_offset: float,
    gemm: str,
) -> tuple[Tensor, Tensor]:
    """Run `experts_forward` as an operator with gradients.

    The tensors are contiguous. `rows`, `row_weights`, the weights and the biases are those of
    `GroupedExperts` and its `forward`, and so are `interleaved`, `alpha` and `up_offset`. `limit`
    is infinite if there is no limit. `offsets` and `tokens` are fields of `TrainedSegments`. `gemm`
    is the name of a GEMM of `choose_trained`. Outputs are not multiplied by `row_weights`, but
    `row_weights` get gradients. Outputs behind the last segment are zeros.
    """
    weights = TrainedWeights(w_gate_up, w_down, gate_up_bias, down_bias)
    segments = TrainedSegments(offsets, tokens, interleaved, limit, alpha, up_offset)
    out, gate_up = experts_forward(rows, weights, segments, gemm)
    return zero_tail_(out, offsets), gate_up


def zero_tail_(rows: Tensor, offsets: Tensor) -> Tensor:
    """Set rows [N, …] behind the last segment to zero, in place. Returns `rows`."""
    matrix = rows if rows.dim() == 2 else rows[:, None]
    ops.zero_padding_rows_(matrix, offsets[-1], len(rows))
    return rows


@train_experts.register_fake
def _(
    rows: Tensor, row_weights: Tensor | None, w_gate_up: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape[0], w_gate_up.shape[1])


@named("epmoe::train_experts_backward")
def train_experts_backward(
    grad: Tensor,
    rows: Tensor | None,
    gate_up: Tensor,
    row_weights: Tensor | None,
    w_gate_up: Tensor | None,
    w_down: Tensor | None,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor,
    tokens: Tensor | None,
    interleaved: bool,
    limit: float,
    alpha: float,
    up_offset: float,
    gemm: str,
    needs: list[bool],
) -> list[Tensor]:
    """Compute the gradients of the six inputs of `train_experts` that may have them.

    `grad` [N, D] is the gradient of the weighted outputs. `needs` says for each input of `OfEach`
    whether its gradient is wanted; a gradient that is not wanted is an empty tensor [0]. The other
    arguments are those of `train_experts`, and `gate_up` [N, 2F] is the first product. A tensor is
    None if no gradient that is wanted needs it.
    """
    kept = Kept(rows, gate_up, row_weights, w_gate_up, w_down, gate_up_bias, down_bias)
    segments = TrainedSegments(offsets, tokens, interleaved, limit, alpha, up_offset)
    found = experts_backward(grad, kept, segments, OfEach(*needs), gemm)
    for name in ("row_weights", "rows"):
        if name in found:
            zero_tail_(found[name], offsets)
    return [found[name] if name in found else grad.new_empty(0) for name in OfEach._fields]


@train_experts_backward.register_fake
def _(
    grad: Tensor,
    rows: Any,
    gate_up: Tensor,
    row_weights: Any,
    w_gate_up: Any,
    w_down: Any,
    *rest: Any,
) -> Any:
    # Gradients have the shapes of the inputs. Most inputs may be None, so the sizes come from those
    # that are always there. The last arguments begin with two biases, and end with `needs`.
    offsets = rest[2]
    needs = rest[-1]
    e = offsets.shape[0] - 1
    N, D = grad.shape
    width = gate_up.shape[1]
    shapes = OfEach(
        rows=(N, D),
        row_weights=(N,),
        gate_up=(e, width, D),
        down=(e, D, width // 2),
        gate_up_bias=(e, width),
        down_bias=(e, D),
    )
    grads = []
    for name, shape, needed in zip(OfEach._fields, shapes, needs, strict=True):
        if not needed:
            grads.append(grad.new_empty(0))
            continue
        dtype = torch.float32 if name == "row_weights" else grad.dtype
        grads.append(grad.new_empty(shape, dtype=dtype))
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save for the backward pass what the wanted gradients need, and nothing else.

    torch calls it after the forward pass, with the inputs of `train_experts`.
    """
    of_each = OfEach(*inputs[:6])
    offsets, tokens, *ctx.rest = inputs[6:]
    _out, gate_up = output
    needs = OfEach(*ctx.needs_input_grad[:6])
    ctx.needs = list(needs)
    # All gradients of inputs in front of the second product go through the weights of down.
    needs_w_down = needs.rows or needs.row_weights or needs.gate_up or needs.gate_up_bias
    ctx.mark_non_differentiable(gate_up)
    ctx.set_materialize_grads(False)
    # The order is that of the arguments of `train_experts_backward`.
    ctx.save_for_backward(
        of_each.rows if needs.gate_up else None,
        gate_up,
        of_each.row_weights,
        of_each.gate_up if needs.rows else None,
        of_each.down if needs_w_down else None,
        of_each.gate_up_bias,
        of_each.down_bias if needs.row_weights else None,
        offsets,
        tokens,
    )


def _gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    """Return a gradient or None for each input of `train_experts`. torch calls it.

    The second output, the first product, is not differentiable, so its gradient is None.
    """
    if grad is None:
        return (None,) * _INPUTS
    found = train_experts_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest, ctx.needs)
    grads: list[Tensor | None] = [None] * _INPUTS
    for index, needed in enumerate(ctx.needs):
        if needed:
            grads[index] = found[index]
    return tuple(grads)


def _no_second_gradients(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError("GroupedExperts have no gradients of gradients")


train_experts.register_autograd(_gradients, setup_context=_save)
train_experts_backward.register_autograd(_no_second_gradients)
