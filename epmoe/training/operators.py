"""The operators of training, with their gradients: torch.compile and selective checkpointing know
them by name.

    epmoe::train_dispatch    x, weights ─▶ rows, row weights, round tag
    epmoe::train_combine     expert rows, row weights, round tag ─▶ y

Their gradients are `train_dispatch_backward` and `train_combine_backward`. The backward pass of
combine opens a round, and that of dispatch closes it.

- `round_tag` is fp32 [1] in host memory: the number of the forward round, which is the tag of the
  backward round. It goes from dispatch to combine, so that their backward passes run in this order
  also where no gradient of rows links them, as on a rank without experts.
- `anchor` is an empty tensor that requires grad. It makes dispatch a part of every graph.
- `number` is that of the exchange, by which an operator finds it: epmoe/native/opaque.py.

The four operators have effects in one order, which compilers keep: no pass may move a round over
another one, remove it, or run it twice. Inductor needs help: epmoe/training/inductor.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

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
from epmoe.training.inductor import keep_order
from epmoe.training.owed_rounds import find, is_of_pass
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
    """Open a forward round. Returns rows [N, D], expert_offsets, tokens_per_expert, row weights
    fp32 [N] and the round tag.
    """
    directions = find(number)
    real = num_real if num_tokens is None else num_tokens
    call = Call(x, ids, weights, num_tokens=real, tag=tag, aligned=aligned)
    with directions.owed.informed_on_error(directions), directions.counting_forward_round():
        arrived = directions.forward.out(call, num_rows, ON_ROWS if on_rows else FORWARD)
    rows, offsets, tokens, row_weights, _ = arrived
    assert row_weights is not None
    return rows, offsets, tokens, row_weights, directions.new_round_tag()


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
    round_tag = anchor.new_empty(1, device="cpu")
    rows = x.new_empty(N, x.shape[1])
    row_weights = x.new_empty(N, dtype=torch.float32)
    return rows, offsets, tokens, row_weights, round_tag


@named("epmoe::train_combine")
def train_combine(
    expert_rows: Tensor,
    row_weights: Tensor | None,
    round_tag: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor | None,
    num_real: int,
    aligned: bool,
    number: int,
) -> Tensor:
    """Close the forward round. Returns y [T, D], weighted sums where `row_weights` are given; these
    have gradients then.
    """
    directions = find(number)
    with directions.owed.informed_on_error(directions):
        return directions.forward.back(expert_rows)


@train_combine.register_fake
def _(
    expert_rows: Tensor,
    row_weights: Tensor | None,
    round_tag: Tensor,
    ids: Tensor,
    *rest: Any,
) -> Tensor:
    return expert_rows.new_empty(ids.shape[0], expert_rows.shape[1])


@named("epmoe::train_combine_backward")
def train_combine_backward(
    grad_y: Tensor,
    expert_rows: Tensor | None,
    row_weights: Tensor | None,
    round_tag: Tensor,
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
    """Open a backward round. Returns the gradients of the rows [N, D], of their weights fp32 [N] or
    [0], and of the round tag.

    The round is aborted at once if the pass `ends_here`, and does not run dispatch's part of it.
    `order` is that of the forward round.
    """
    directions = find(number)
    directions.check_generation(generation)

    # Dispatch the gradients of y as the forward round dispatched tokens. Its rows arrive as
    # products with their weights where `outputs` are known and a kernel can multiply on the way.
    real = num_real if num_tokens is None else num_tokens
    call = Call(grad_y, ids, weights, num_tokens=real, tag=int(round_tag), aligned=aligned)
    outputs = None
    if expert_rows is not None and row_weights is not None:
        outputs = contiguous_rows(expert_rows)
    owed = directions.owed
    with owed.informed_on_error(directions):
        running = owed.begin(directions, order)
        arrived = directions.backward.out(call, num_rows, BACKWARD, outputs)
        if running is not None:
            running.note_opened(directions)
    if ends_here:
        directions.backward.exchange.abort(None)

    # Without weights in combine, rows are the gradients, and weights have none.
    none = grad_y.new_empty(0, dtype=torch.float32)
    if outputs is None:
        return arrived.rows, none, torch.zeros_like(round_tag)

    # With them, each row is multiplied by its weight, and its product with the output is the
    # gradient of the weight. Rows that have come as they are get both in a pass of their own.
    by_weights = arrived.products
    if by_weights is None:
        by_weights = ops.weighted_rows_backward_(
            arrived.rows, outputs, row_weights, arrived.expert_offsets, arrived.tokens_per_expert
        )
        zero_tail_(by_weights, arrived.expert_offsets)
    return arrived.rows, by_weights, torch.zeros_like(round_tag)


@train_combine_backward.register_fake
def _(
    grad_y: Tensor,
    expert_rows: Tensor | None,
    row_weights: Tensor | None,
    round_tag: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = rest[4]
    grad_weights = grad_y.new_empty(0 if expert_rows is None else num_rows, dtype=torch.float32)
    return grad_y.new_empty(num_rows, grad_y.shape[1]), grad_weights, torch.empty_like(round_tag)


@named("epmoe::train_dispatch_backward")
def train_dispatch_backward(
    grad_rows: Tensor,
    grad_row_weights: Tensor,
    grad_round_tag: Tensor | None,
    T: int,
    K: int,
    number: int,
    generation: int,
) -> tuple[Tensor, Tensor]:
    """Close the backward round. Returns the gradients of x [T, D] and of weights fp32 [T, K]."""
    directions = find(number)
    directions.check_generation(generation)
    with directions.owed.informed_on_error(directions):
        return directions.backward.back_with_values(
            grad_rows, grad_row_weights.float().contiguous()
        )


@train_dispatch_backward.register_fake
def _(
    grad_rows: Tensor,
    grad_row_weights: Tensor,
    grad_round_tag: Tensor | None,
    T: int,
    K: int,
    *rest: Any,
) -> Any:
    grad_x = grad_rows.new_empty(T, grad_rows.shape[1])
    return grad_x, grad_rows.new_empty(T, K, dtype=torch.float32)


class _Zeros(NamedTuple):
    """The shape, dtype and device of a tensor of zeros."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Self:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def make(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradients need."""
    x, ids, weights, *_, ctx.number = inputs
    ctx.T = x.shape[0]
    ctx.K = ids.shape[1]
    ctx.weights_dtype = weights.dtype
    ctx.generation = find(ctx.number).generation
    # Zeros for offsets and counts would be two kernels. Those for rows and their weights, where a
    # pass brings no gradients of them, need their shapes only.
    ctx.set_materialize_grads(False)
    rows, _, _, row_weights, _ = output
    ctx.rows = _Zeros.like(rows)
    ctx.row_weights = _Zeros.like(row_weights)


def _dispatch_gradients(
    ctx: Any, rows: Any, offsets: Any, tokens: Any, row_weights: Any, round_tag: Any
) -> Any:
    """Run `train_dispatch_backward` for a node of dispatch."""
    # The round that combine's backward pass has opened is closed in any case.
    if rows is None:
        rows = ctx.rows.make()
    if row_weights is None:
        row_weights = ctx.row_weights.make()
    grad_x, grad_weights = train_dispatch_backward(
        rows, row_weights, round_tag, ctx.T, ctx.K, ctx.number, ctx.generation
    )
    return grad_x, None, grad_weights.to(ctx.weights_dtype), *(None,) * 8


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients need, and count the backward round as owed."""
    (
        expert_rows,
        row_weights,
        round_tag,
        ids,
        weights,
        num_tokens,
        ctx.num_real,
        ctx.aligned,
        ctx.number,
    ) = inputs
    # Outputs are kept only for the gradients of weights.
    outputs = expert_rows if row_weights is not None else None
    # A checkpoint that computes again stops at the last tensor that is saved. By then the round is
    # closed.
    ctx.save_for_backward(outputs, row_weights, round_tag.detach(), ids, weights, num_tokens)

    # From now on this graph owes the other ranks its backward round.
    directions = find(ctx.number)
    ctx.num_rows = expert_rows.shape[0]
    ctx.generation = directions.generation
    ctx.dispatch = round_tag.grad_fn
    shape = RoundShape(expert_rows.shape[1], ids.shape[1], expert_rows.dtype, aligned=ctx.aligned)
    ctx.order = directions.owed.add(ctx, shape, round_tag.detach())


def _combine_gradients(ctx: Any, grad_y: Tensor) -> Any:
    """Run `train_combine_backward` for a node of combine."""
    saved = ctx.saved_tensors
    _, row_weights, *_ = saved
    # Where only gradients of the experts are asked for, dispatch's backward pass does not run. The
    # next round must not find this one open.
    ends_here = ctx.dispatch is not None and not is_of_pass(ctx.dispatch)
    grad_rows, grad_weights, grad_round_tag = train_combine_backward(
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
    return grad_rows, grad_weights, grad_round_tag, *(None,) * 6


train_dispatch.register_autograd(_dispatch_gradients, setup_context=_save_dispatch)
train_combine.register_autograd(_combine_gradients, setup_context=_save_combine)
_NAMES = ("train_dispatch", "train_combine", "train_combine_backward", "train_dispatch_backward")
_IN_ORDER = [getattr(torch.ops.epmoe, name).default for name in _NAMES]
for _operator in _IN_ORDER:
    _register_effectful_op(_operator, EffectType.ORDERED)
