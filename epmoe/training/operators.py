"""The operators of training, with their gradients: torch.compile and selective checkpointing know
them by name.

    epmoe::train_dispatch    x, weights ─▶ rows, row weights, link
    epmoe::train_combine     expert rows, row weights, link ─▶ y

Their gradients are `train_dispatch_backward` and `train_combine_backward`.

combine's backward opens a round, and dispatch's closes it. `link`, from dispatch to combine, makes
the second follow the first where no gradient does, as on a rank without experts. It is fp32 [1] in
host memory: the number of the forward round, which is the tag of the backward round. `anchor`, an
empty tensor that requires grad, makes dispatch a part of every graph. An operator finds its
exchange by a number, as in epmoe/native/opaque.py.

The four have effects in one order, which compilers keep: no pass may move a round over another one,
remove it, or run it twice. Inductor needs help: epmoe/training/inductor.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import _register_effectful_op

from epmoe.exchange.call import Call
from epmoe.exchange.handles import RoundShape
from epmoe.local.experts_gradients import zero_tail_
from epmoe.native import ops
from epmoe.native.arguments import contiguous_rows
from epmoe.native.named import named
from epmoe.training.debts import find, is_of_pass
from epmoe.training.inductor import keep_order
from epmoe.training.rounds import BACKWARD, EXACT, FORWARD, ON_ROWS


@named("epmoe::train_dispatch")
def train_dispatch(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor | None,
    num_real: int,
    anchor: Tensor,
    num_rows: int,
    on_rows: bool,
    tag: int,
    aligned: bool,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows [N, D], expert_offsets, tokens_per_expert, row weights fp32 [N] and the link. Opens a
    round.
    """
    directions = find(number)
    real = num_real if num_tokens is None else num_tokens
    call = Call(x, ids, weights, num_tokens=real, tag=tag, aligned=aligned)
    with directions.debts.dropped_by_errors(directions), directions.numbering():
        arrived = directions.forward.out(call, num_rows, ON_ROWS if on_rows else FORWARD)
    rows, offsets, tokens, row_weights, _ = arrived
    assert row_weights is not None
    return rows, offsets, tokens, row_weights, directions.new_link()


@train_dispatch.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: Any,
    num_real: int,
    anchor: Tensor,
    num_rows: int,
    *rest: Any,
) -> Any:
    keep_order(*_IN_ORDER)
    # The number of rows that arrive is a symbol of the graph, unless the caller gives it.
    N: Any = torch.library.get_ctx().new_dynamic_size() if num_rows == EXACT else num_rows
    e = find(rest[-1]).forward.ep.num_local_experts
    offsets = ids.new_empty(e + 1, dtype=torch.int32)
    tokens = ids.new_empty(e, dtype=torch.int32)
    link = anchor.new_empty(1, device="cpu")
    return x.new_empty(N, x.shape[1]), offsets, tokens, x.new_empty(N, dtype=torch.float32), link


@named("epmoe::train_combine")
def train_combine(
    expert_rows: Tensor,
    row_weights: Tensor | None,
    link: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor | None,
    num_real: int,
    aligned: bool,
    number: int,
) -> Tensor:
    """y [T, D]. Closes the round. Its sums are weighted where `row_weights` are given, whose
    gradient they have.
    """
    directions = find(number)
    with directions.debts.dropped_by_errors(directions):
        return directions.forward.back(expert_rows)


@train_combine.register_fake
def _(
    expert_rows: Tensor, row_weights: Tensor | None, link: Tensor, ids: Tensor, *rest: Any
) -> Tensor:
    return expert_rows.new_empty(ids.shape[0], expert_rows.shape[1])


@named("epmoe::train_combine_backward")
def train_combine_backward(
    grad_y: Tensor,
    expert_rows: Tensor | None,
    row_weights: Tensor | None,
    link: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor | None,
    num_real: int,
    num_rows: int,
    aligned: bool,
    number: int,
    generation: int,
    order: int,
    ends_here: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rows [N, D] and of their weights fp32 [N] or [0], and of the link. Opens a
    round, which is aborted at once if the pass `ends_here`: dispatch's part of it does not run.
    `order` is that of the round in the forward pass.
    """
    directions = find(number)
    directions.check_generation(generation)

    # Dispatch the gradients of y as the forward round dispatched tokens. Its rows arrive as
    # products with their weights where `outputs` are known and a kernel can multiply on the way.
    real = num_real if num_tokens is None else num_tokens
    call = Call(grad_y, ids, weights, num_tokens=real, tag=int(link), aligned=aligned)
    outputs = None if expert_rows is None or row_weights is None else contiguous_rows(expert_rows)
    debts = directions.debts
    with debts.dropped_by_errors(directions):
        running = debts.pay(directions, order)
        arrived = directions.backward.out(call, num_rows, BACKWARD, outputs)
        if running is not None:
            running.has_opened(directions)
    if ends_here:
        directions.backward.exchange.abort(None)

    # Without weights in combine, rows are the gradients, and weights have none.
    none = grad_y.new_empty(0, dtype=torch.float32)
    if outputs is None:
        return arrived.rows, none, torch.zeros_like(link)

    # With them, each row is multiplied by its weight, and its product with the output is the
    # gradient of the weight. Rows that have come as they are get both in a pass of their own.
    by_weights = arrived.products
    if by_weights is None:
        by_weights = ops.weighted_rows_backward_(
            arrived.rows, outputs, row_weights, arrived.expert_offsets, arrived.tokens_per_expert
        )
        zero_tail_(by_weights, arrived.expert_offsets)
    return arrived.rows, by_weights, torch.zeros_like(link)


@train_combine_backward.register_fake
def _(
    grad_y: Tensor, expert_rows: Tensor | None, row_weights: Tensor | None, link: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = rest[4]
    grad_weights = grad_y.new_empty(0 if expert_rows is None else num_rows, dtype=torch.float32)
    return grad_y.new_empty(num_rows, grad_y.shape[1]), grad_weights, torch.empty_like(link)


@named("epmoe::train_dispatch_backward")
def train_dispatch_backward(
    grad_rows: Tensor,
    grad_row_weights: Tensor,
    grad_link: Tensor | None,
    T: int,
    K: int,
    number: int,
    generation: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, D] and of the weights fp32 [T, K]. Closes the round."""
    directions = find(number)
    directions.check_generation(generation)
    with directions.debts.dropped_by_errors(directions):
        return directions.backward.back_with_values(
            grad_rows, grad_row_weights.float().contiguous()
        )


@train_dispatch_backward.register_fake
def _(
    grad_rows: Tensor,
    grad_row_weights: Tensor,
    grad_link: Tensor | None,
    T: int,
    K: int,
    *rest: Any,
) -> Any:
    grad_x = grad_rows.new_empty(T, grad_rows.shape[1])
    return grad_x, grad_rows.new_empty(T, K, dtype=torch.float32)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ids, weights, *_, ctx.number = inputs
    ctx.T = x.shape[0]
    ctx.K = ids.shape[1]
    ctx.weights_dtype = weights.dtype
    ctx.generation = find(ctx.number).generation
    # Zeros for offsets and counts would be two kernels. Those for rows and their weights, where a
    # pass brings no gradients of them, need their shapes only.
    ctx.set_materialize_grads(False)
    rows, _, _, row_weights, _ = output
    ctx.zeros = [
        (each.shape, {"dtype": each.dtype, "device": each.device}) for each in (rows, row_weights)
    ]


def _dispatch_gradients(
    ctx: Any, rows: Any, offsets: Any, tokens: Any, row_weights: Any, link: Any
) -> Any:
    # The round that combine's backward pass has opened is closed in any case.
    gradients = [
        torch.zeros(size, **like) if grad is None else grad
        for grad, (size, like) in zip((rows, row_weights), ctx.zeros, strict=True)
    ]
    grad_x, grad_weights = train_dispatch_backward(
        *gradients, link, ctx.T, ctx.K, ctx.number, ctx.generation
    )
    return grad_x, None, grad_weights.to(ctx.weights_dtype), *(None,) * 8


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    (
        expert_rows,
        row_weights,
        link,
        ids,
        weights,
        num_tokens,
        ctx.num_real,
        ctx.aligned,
        ctx.number,
    ) = inputs
    # Outputs are kept for the gradients of weights alone.
    saved = (None, None) if row_weights is None else (expert_rows, row_weights)
    # Where a checkpoint computes again, it stops at the last tensor that is saved: that of a closed
    # round.
    ctx.save_for_backward(*saved, link.detach(), ids, weights, num_tokens)

    # From now on this graph owes the other ranks its backward round.
    directions = find(ctx.number)
    ctx.num_rows = expert_rows.shape[0]
    ctx.generation = directions.generation
    ctx.dispatch = link.grad_fn
    shape = RoundShape(expert_rows.shape[1], ids.shape[1], expert_rows.dtype, aligned=ctx.aligned)
    ctx.order = directions.debts.add(ctx, shape, link.detach())


def _combine_gradients(ctx: Any, grad_y: Tensor) -> Any:
    saved = ctx.saved_tensors
    _, row_weights, *_ = saved
    # Where the experts alone are asked for, no gradient of the link is. A next round must not find
    # this one open.
    ends_here = ctx.dispatch is not None and not is_of_pass(ctx.dispatch)
    grad_rows, grad_weights, grad_link = train_combine_backward(
        grad_y,
        *saved,
        ctx.num_real,
        ctx.num_rows,
        ctx.aligned,
        ctx.number,
        ctx.generation,
        ctx.order,
        ends_here,
    )
    if row_weights is None:
        grad_weights = None
    return grad_rows, grad_weights, grad_link, *(None,) * 6


train_dispatch.register_autograd(_dispatch_gradients, setup_context=_save_dispatch)
train_combine.register_autograd(_combine_gradients, setup_context=_save_combine)
_NAMES = ("train_dispatch", "train_combine", "train_combine_backward", "train_dispatch_backward")
_IN_ORDER = [getattr(torch.ops.epmoe, name).default for name in _NAMES]
for _operator in _IN_ORDER:
    _register_effectful_op(_operator, EffectType.ORDERED)
