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
    """Something of each of the first six inputs of `train_experts`, in their order."""

    rows: Any
    row_weights: Any
    gate_up: Any
    down: Any
    gate_up_bias: Any
    down_bias: Any


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
    gating = interleaved, limit, alpha, up_offset
    gate_up = train_gemm(rows, w_gate_up, offsets, gemm)
    bias = None if gate_up_bias is None else gate_up_bias.contiguous()
    activated = (
        ops.gated_activation(gate_up, offsets, tokens, bias, *gating, False)[0]
        if len(w_down)
        else gate_up
    )
    out = train_gemm(activated, w_down, offsets, gemm)
    if down_bias is not None and len(w_down):
        out += bias_of_rows(down_bias, offsets[1:], len(rows))
    return zero_tail_(out, offsets), gate_up


def zero_tail_(rows: Tensor, offsets: Tensor) -> Tensor:
    """Set rows [N, …] past the last segment to zero, in place."""
    ops.zero_padding_rows_(rows if rows.dim() == 2 else rows[:, None], offsets[-1], len(rows))
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
    `grad` [N, D] is that of outputs times `row_weights`.
    """
    segments = (offsets, tokens, interleaved, limit, alpha, up_offset)
    N = len(grad)
    wanted = _OfEach(*needs)
    found = dict[str, Tensor]()
    if gate_up_bias is not None and len(gate_up_bias):
        gate_up = gate_up + bias_of_rows(gate_up_bias, offsets[1:], N)
    if wanted.down:
        found["down"] = train_gemm_weights(
            grad, ops.weighted_gates(gate_up, row_weights, *segments), offsets, gemm
        )
    if wanted.down_bias:
        found["down_bias"] = bias_gradients(grad, row_weights, offsets, gemm)
    if w_down is not None:  # otherwise nobody asks for what lies in front of it
        by_gate_up, by_weights = ops.weighted_gates_backward(
            train_gemm(grad, w_down.transpose(1, 2), offsets, gemm), gate_up, row_weights, *segments
        )
        if wanted.row_weights and down_bias is not None and len(down_bias):
            of_bias = bias_of_rows(down_bias, offsets[1:], N)
            by_weights += ops.weighted_rows_backward_(of_bias, grad, None, offsets, tokens)
        if wanted.row_weights:
            found["row_weights"] = zero_tail_(by_weights, offsets)
        if wanted.rows and w_gate_up is not None:
            by_rows = train_gemm(by_gate_up, w_gate_up.transpose(1, 2), offsets, gemm)
            found["rows"] = zero_tail_(by_rows, offsets)
        if wanted.gate_up and rows is not None:
            found["gate_up"] = train_gemm_weights(by_gate_up, rows, offsets, gemm)
        if wanted.gate_up_bias:
            found["gate_up_bias"] = bias_gradients(by_gate_up, None, offsets, gemm)
    return [found[name] if name in found else grad.new_empty(0) for name in _OfEach._fields]


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
    offsets = rest[2]
    needs = rest[-1]
    e, (N, D), width = offsets.shape[0] - 1, grad.shape, gate_up.shape[1]
    shapes = (N, D), (N,), (e, width, D), (e, D, width // 2), (e, width), (e, D)
    dtypes = (grad.dtype, torch.float32, *(grad.dtype,) * 4)
    of_each = zip(shapes, dtypes, needs, strict=True)
    return [
        grad.new_empty(shape, dtype=dtype) if needed else grad.new_empty(0)
        for shape, dtype, needed in of_each
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, row_weights, w_gate_up, w_down, gate_up_bias, down_bias, offsets, tokens, *ctx.rest = (
        inputs
    )
    needs = _OfEach(*ctx.needs_input_grad[:6])
    ctx.needs = list(needs)
    in_front = needs.rows or needs.row_weights or needs.gate_up or needs.gate_up_bias
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        rows if needs.gate_up else None,
        output[1],
        row_weights,
        w_gate_up if needs.rows else None,
        w_down if in_front else None,
        gate_up_bias,
        down_bias if needs.row_weights else None,
        offsets,
        tokens,
    )


def _gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    by = train_experts_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest, ctx.needs)
    return *(
        gradient if needed else None for gradient, needed in zip(by, ctx.needs, strict=True)
    ), *(None,) * 7


def _no_second_gradients(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError("GroupedExperts have no gradients of gradients")


train_experts.register_autograd(_gradients, setup_context=_save)
train_experts_backward.register_autograd(_no_second_gradients)
