"""The experts stage with gradients: one operator forward, and one backward.

    rows [N,D] ─ gate and up ─▶ [N,2F] ─ gated activation ─▶ [N,F] ─ down ─▶ outputs [N,D]

Outputs have the bits of serving, and combine weights them. The backward pass gets gradients of
weighted outputs, and multiplies by the weights where it is cheapest, at the activation [N, F]. So
the forward pass keeps rows [N, D] and [N, 2F] before the activation, and no outputs. It keeps
nothing that only frozen parameters need. Rows past the last segment have outputs and gradients of
0, since modules around the experts sum over all rows.
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
    bias_of_rows,
)
from epmoe.local.gemm.gradients import bias_gradients, product_for_weights
from epmoe.local.gemm.table import GEMMS
from epmoe.native import ops
from epmoe.native.named import named


class OfEach(NamedTuple):
    """A value for each of the first six inputs of `train_experts`, which may have gradients."""

    rows: Any
    row_weights: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any


def experts_forward(
    rows: Tensor, weights: TrainedWeights, segments: TrainedSegments, gemm: str
) -> tuple[Tensor, Tensor]:
    """Run the experts over rows [N, D].

    Returns outputs [N, D], undefined past the last segment, and [N, 2F], the first product before
    its bias and the activation.
    """
    # Without rows or experts there is nothing to compute.
    if not rows.shape[0] or not weights.down.shape[0]:
        N = rows.shape[0]
        return rows.new_empty(rows.shape), rows.new_empty(N, weights.gate_up.shape[1])
    bias = weights.gate_up_bias
    if bias is not None:
        bias = bias.contiguous()
    out, gate_up = GEMMS[gemm].train(rows, weights, segments, bias)
    if weights.down_bias is not None:
        out += bias_of_rows(weights.down_bias, segments.offsets[1:], rows.shape[0])
    return out, gate_up


def experts_backward(
    grad: Tensor, kept: Kept, segments: TrainedSegments, needs: OfEach, gemm: str
) -> dict[str, Tensor]:
    """Compute the gradients that `needs` asks for.

    `grad` [N, D] is the gradient of outputs times `row_weights`. Returns gradients by the names of
    `OfEach`. Those of rows and of their weights are undefined past the last segment.
    """
    N = grad.shape[0]
    offsets = segments.offsets
    gate_up = kept.gate_up
    row_weights = kept.row_weights
    found = dict[str, Tensor]()
    if kept.gate_up_bias is not None and len(kept.gate_up_bias):
        gate_up = gate_up + bias_of_rows(kept.gate_up_bias, offsets[1:], N)

    # The bias of the second product; its weights, if no gradient before it is asked for.
    if needs.down_bias:
        found["down_bias"] = bias_gradients(grad, row_weights, offsets, gemm)
    w_down = kept.w_down
    if w_down is None:
        if needs.down:
            weighted = ops.weighted_gates(gate_up, row_weights, *segments)
            found["down"] = product_for_weights(grad, weighted, offsets[1:], gemm)
        return found

    # The products and the activation, with the weights of the rows.
    if not needs.gate_up and kept.rows is not None:
        kept = kept._replace(rows=None)
    if not needs.rows and kept.w_gate_up is not None:
        kept = kept._replace(w_gate_up=None)
    train_backward = _none_backward
    if N and w_down.shape[0]:
        train_backward = GEMMS[gemm].train_backward
    gradients = train_backward(grad, gate_up, kept, w_down, segments, needs.down)
    if gradients.rows is not None:
        found["rows"] = gradients.rows
    if gradients.w_gate_up is not None:
        found["gate_up"] = gradients.w_gate_up
    if gradients.w_down is not None:
        found["down"] = gradients.w_down

    # The row weights, and the bias of the first product.
    if needs.row_weights:
        grad_weights = gradients.row_weights
        if kept.down_bias is not None and len(kept.down_bias):
            of_bias = bias_of_rows(kept.down_bias, offsets[1:], N)
            grad_weights += ops.weighted_rows_backward_(
                of_bias, grad, None, offsets, segments.tokens
            )
        found["row_weights"] = grad_weights
    if needs.gate_up_bias:
        found["gate_up_bias"] = bias_gradients(gradients.gate_up, None, offsets, gemm)
    return found


def _none_backward(
    grad: Tensor,
    gate_up: Tensor,
    kept: Kept,
    w_down: Tensor,
    segments: TrainedSegments,
    needs_down: bool,
) -> ExpertGradients:
    """`Gemm.train_backward` without rows or without experts."""
    e, D, F = w_down.shape
    return ExpertGradients(
        gate_up=gate_up.new_empty(gate_up.shape),
        row_weights=grad.new_empty(grad.shape[0], dtype=torch.float32),
        rows=None if kept.w_gate_up is None else grad.new_empty(grad.shape),
        w_gate_up=None if kept.rows is None else grad.new_zeros(e, 2 * F, D),
        w_down=grad.new_zeros(e, D, F) if needs_down else None,
    )


# Inputs of `train_experts`, in the order of its arguments.
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
    """`experts_forward`, whose outputs past the last segment are zeros.

    Arguments are those of `GroupedExperts` and its `forward`, contiguous. `limit` is infinite for
    none, and `gemm` is that of `train_gemm`. `row_weights` get gradients; outputs are not
    multiplied by them.
    """
    weights = TrainedWeights(w_gate_up, w_down, gate_up_bias, down_bias)
    segments = TrainedSegments(offsets, tokens, interleaved, limit, alpha, up_offset)
    out, gate_up = experts_forward(rows, weights, segments, gemm)
    return zero_tail_(out, offsets), gate_up


def zero_tail_(rows: Tensor, offsets: Tensor) -> Tensor:
    """Set rows [N, …] past the last segment to zero, in place."""
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
    """The gradients of the first six inputs of `train_experts`. One that `needs` does not ask for
    is an empty tensor [0].

    `grad` [N, D] is the gradient of outputs times `row_weights`. A tensor is None where no gradient
    that is asked for needs it.
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
    # Gradients have the shapes of the inputs, which may be None here.
    _gate_up_bias, _down_bias, offsets, *_, needs = rest
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
    """Keep what the gradients that are asked for need, and nothing else."""
    of_each = OfEach(*inputs[:6])
    offsets, tokens, *ctx.rest = inputs[6:]
    _out, gate_up = output
    needs = OfEach(*ctx.needs_input_grad[:6])
    ctx.needs = list(needs)
    # Gradients before the second product go through its weights.
    needs_w_down = needs.rows or needs.row_weights or needs.gate_up or needs.gate_up_bias
    ctx.mark_non_differentiable(gate_up)
    ctx.set_materialize_grads(False)
    # In the order of the arguments of `train_experts_backward`.
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
    if grad is None:
        return (None,) * _INPUTS
    found = train_experts_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest, ctx.needs)
    grads: list[Tensor | None] = [None] * _INPUTS
    for number, needed in enumerate(ctx.needs):
        if needed:
            grads[number] = found[number]
    return tuple(grads)


def _no_second_gradients(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError("GroupedExperts have no gradients of gradients")


train_experts.register_autograd(_gradients, setup_context=_save)
train_experts_backward.register_autograd(_no_second_gradients)
