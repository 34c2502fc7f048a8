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

from epmoe.local.gemm.gemm import bias_of_rows
from epmoe.local.gemm.gradients import bias_gradients, train_gemm, train_gemm_weights
from epmoe.native import ops
from epmoe.native.named import named


class _OfEach(NamedTuple):
    """Something of each of the first six inputs of `train_experts`, in their order: those that may
    have gradients.
    """

    rows: Any
    row_weights: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any


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
    """Outputs [N, D] of the experts over rows [N, D], and [N, 2F] in front of the bias and the
    activation. Arguments are those of `GroupedExperts` and its `forward`, contiguous; `limit` is
    infinite for none, and `gemm` is that of `train_gemm`. `row_weights` get gradients, and outputs
    are not multiplied by them.
    """
    # Rows times gate and up.
    gate_up = train_gemm(rows, w_gate_up, offsets, gemm)

    # The activation, which a rank without experts does not have.
    activated = gate_up
    if len(w_down):
        bias = gate_up_bias
        if bias is not None:
            bias = bias.contiguous()
        gating = (interleaved, limit, alpha, up_offset)
        activated, _ = ops.gated_activation(gate_up, offsets, tokens, bias, *gating, False)

    # Times down.
    out = train_gemm(activated, w_down, offsets, gemm)
    if down_bias is not None and len(w_down):
        out += bias_of_rows(down_bias, offsets[1:], len(rows))
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
    segments = (offsets, tokens, interleaved, limit, alpha, up_offset)
    N = len(grad)
    wanted = _OfEach(*needs)
    grads = dict[str, Tensor]()

    # In front of the activation, rows [N, 2F] with their bias.
    if gate_up_bias is not None and len(gate_up_bias):
        gate_up = gate_up + bias_of_rows(gate_up_bias, offsets[1:], N)

    # Down and its bias: the weights of rows multiply where rows are narrow.
    if wanted.down:
        activated = ops.weighted_gates(gate_up, row_weights, *segments)
        grads["down"] = train_gemm_weights(grad, activated, offsets, gemm)
    if wanted.down_bias:
        grads["down_bias"] = bias_gradients(grad, row_weights, offsets, gemm)

    # What lies in front of it, if somebody asks for that.
    if w_down is not None:
        grad_activated = train_gemm(grad, w_down.transpose(1, 2), offsets, gemm)
        grad_gate_up, grad_row_weights = ops.weighted_gates_backward(
            grad_activated, gate_up, row_weights, *segments
        )
        if wanted.row_weights:
            # A weight multiplies the bias of down, too.
            if down_bias is not None and len(down_bias):
                biases = bias_of_rows(down_bias, offsets[1:], N)
                grad_row_weights += ops.weighted_rows_backward_(biases, grad, None, offsets, tokens)
            grads["row_weights"] = zero_tail_(grad_row_weights, offsets)
        if wanted.rows and w_gate_up is not None:
            grad_rows = train_gemm(grad_gate_up, w_gate_up.transpose(1, 2), offsets, gemm)
            grads["rows"] = zero_tail_(grad_rows, offsets)
        if wanted.gate_up and rows is not None:
            grads["gate_up"] = train_gemm_weights(grad_gate_up, rows, offsets, gemm)
        if wanted.gate_up_bias:
            grads["gate_up_bias"] = bias_gradients(grad_gate_up, None, offsets, gemm)

    # An operator returns tensors only: one of no elements for what nobody asks for.
    return [grads[name] if name in grads else grad.new_empty(0) for name in _OfEach._fields]


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
    shapes = _OfEach(
        rows=(N, D),
        row_weights=(N,),
        gate_up=(e, width, D),
        down=(e, D, width // 2),
        gate_up_bias=(e, width),
        down_bias=(e, D),
    )
    grads = []
    for name, shape, needed in zip(_OfEach._fields, shapes, needs, strict=True):
        if not needed:
            grads.append(grad.new_empty(0))
            continue
        dtype = torch.float32 if name == "row_weights" else grad.dtype
        grads.append(grad.new_empty(shape, dtype=dtype))
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the gradients that are asked for need, and nothing else."""
    of_each = _OfEach(*inputs[:6])
    offsets, tokens, *ctx.rest = inputs[6:]
    _out, gate_up = output
    needs = _OfEach(*ctx.needs_input_grad[:6])
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
