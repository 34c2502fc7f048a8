"""The experts stage with gradients: one operator forward, and one backward.

    rows [N,D] ─ gate and up ─▶ [N,2F] ─ gated activation ─▶ [N,F] ─ down ─▶ outputs [N,D]

Outputs are those of serving, to the bit, and combine weights them. The backward pass gets gradients
of weighted outputs, and multiplies by the weights where it is cheapest, at the activation [N, F].
It therefore keeps rows [N, D] and [N, 2F] in front of the activation, and no outputs. What only a
frozen part needs is not kept. Rows past the last segment have outputs and gradients of 0: modules
around the experts sum over all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Kept, TrainedSegments, TrainedWeights, bias_of_rows
from epmoe.local.gemm.gradients import bias_gradients, product_for_weights
from epmoe.local.gemm.table import GEMMS
from epmoe.native import ops
from epmoe.native.named import named


class OfEach(NamedTuple):
    """Something of each of the first six inputs of `train_experts`, in their order: those that may
    have gradients.
    """

    rows: Any
    row_weights: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any


def experts_forward(
    rows: Tensor, weights: TrainedWeights, segments: TrainedSegments, gemm: str
) -> tuple[Tensor, Tensor]:
    """Outputs [N, D] of the experts over rows [N, D], and [N, 2F] before the bias and the
    activation. Outputs past the last segment are undefined.
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
    """Gradients by the names of `OfEach`, of those that `needs` asks for.

    `grad` [N, D] is that of outputs times `row_weights`. Gradients of rows and of their weights are
    undefined past the last segment.
    """
    N = grad.shape[0]
    offsets = segments.offsets
    gate_up = kept.gate_up
    row_weights = kept.row_weights
    found = dict[str, Tensor]()
    if kept.gate_up_bias is not None and len(kept.gate_up_bias):
        gate_up = gate_up + bias_of_rows(kept.gate_up_bias, offsets[1:], N)

    # Of the bias behind the second product, and of its weights where nothing in front is asked for.
    if needs.down_bias:
        found["down_bias"] = bias_gradients(grad, row_weights, offsets, gemm)
    w_down = kept.w_down
    if w_down is None:
        if needs.down:
            weighted = ops.weighted_gates(gate_up, row_weights, *segments)
            found["down"] = product_for_weights(grad, weighted, offsets[1:], gemm)
        return found

    # Of the products and the activation, with the weights of the rows.
    if not needs.gate_up and kept.rows is not None:
        kept = kept._replace(rows=None)
    if not needs.rows and kept.w_gate_up is not None:
        kept = kept._replace(w_gate_up=None)
    train_backward = _none_backward
    if N and w_down.shape[0]:
        train_backward = GEMMS[gemm].train_backward
    grad_gate_up, grad_weights, *of_products = train_backward(
        grad, gate_up, kept, w_down, segments, needs.down
    )
    for name, gradient in zip(("rows", "gate_up", "down"), of_products, strict=True):
        if gradient is not None:
            found[name] = gradient

    # Of the row weights, and of the bias in front.
    if needs.row_weights:
        if kept.down_bias is not None and len(kept.down_bias):
            of_bias = bias_of_rows(kept.down_bias, offsets[1:], N)
            grad_weights += ops.weighted_rows_backward_(
                of_bias, grad, None, offsets, segments.tokens
            )
        found["row_weights"] = grad_weights
    if needs.gate_up_bias:
        found["gate_up_bias"] = bias_gradients(grad_gate_up, None, offsets, gemm)
    return found


def _none_backward(
    grad: Tensor,
    gate_up: Tensor,
    kept: Kept,
    w_down: Tensor,
    segments: TrainedSegments,
    needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`Gemm.train_backward` without rows or without experts."""
    e, D, F = w_down.shape
    return (
        gate_up.new_empty(gate_up.shape),
        grad.new_empty(grad.shape[0], dtype=torch.float32),
        None if kept.w_gate_up is None else grad.new_empty(grad.shape),
        None if kept.rows is None else grad.new_zeros(e, 2 * F, D),
        grad.new_zeros(e, D, F) if needs_down else None,
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
    """Outputs [N, D] of the experts over rows [N, D], and [N, 2F] before the bias and the
    activation. Arguments are those of `GroupedExperts` and its `forward`, contiguous; `limit` is
    infinite for none, and `gemm` is that of `train_gemm`. `row_weights` get gradients, and outputs
    are not multiplied by them.
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
    """Gradients of the first six inputs of `train_experts`, [0] where `needs` does not ask for one.
    `grad` [N, D] is that of outputs times `row_weights`. A tensor is None where nothing that is
    asked for needs it.
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
    needs_in_front = needs.rows or needs.row_weights or needs.gate_up or needs.gate_up_bias
    ctx.mark_non_differentiable(gate_up)
    ctx.set_materialize_grads(False)
    # In the order of the arguments of `train_experts_backward`.
    ctx.save_for_backward(
        of_each.rows if needs.gate_up else None,
        gate_up,
        of_each.row_weights,
        of_each.gate_up if needs.rows else None,
        of_each.down if needs_in_front else None,
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
