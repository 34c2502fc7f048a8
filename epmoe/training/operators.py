"""The rounds of training as operators of torch, with their gradients. torch.compile and selective
checkpointing refer to operators by name.

    epmoe::train_dispatch    x, weights ─▶ rows, row weights, round tag
    epmoe::train_combine     expert rows, row weights, round tag ─▶ y

Their gradients are `train_dispatch_backward` and `train_combine_backward`. The backward pass of
combine opens a round, and that of dispatch closes it.

- `round_tag` is fp32 [1] in host memory. Its value is the number of the forward round, which is the
  tag of the backward round. It is an output of dispatch and an input of combine. So autograd runs
  combine's backward pass before that of dispatch, even if no gradient of rows links the two, as on
  a rank without experts.
- `anchor` is an empty tensor that requires grad. It gives dispatch a node in the graph of autograd,
  even if neither x nor weights require grad on this rank.
- `number` is the number of the `TrainingExchange`, by which an operator finds it, since operators
  take no Python objects: see epmoe/native/opaque.py.
- `num_tokens` is the number of real tokens as a tensor on the device. If it is None, `num_real` is
  this number.

The four operators are registered as having effects in one order, which compilers must keep. No pass
of a compiler may move a round over another one, remove it, or run it twice. Inductor needs help to
keep the order: see epmoe/training/inductor.py.
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
    """Open a forward round: bring tokens to their experts.

    `on_rows`: the experts apply the weights, and combine only adds. Returns rows [N, D],
    expert_offsets, tokens_per_expert, the weights of rows fp32 [N], and the round tag.
    """
    directions = find(number)
    real = num_real if num_tokens is None else num_tokens
    call = Call(x, ids, weights, num_tokens=real, tag=tag, aligned=aligned)
    weight_use = ON_ROWS if on_rows else FORWARD
    with directions.owed.informed_on_error(directions), directions.counting_forward_round():
        arrived = directions.forward.out(call, num_rows, weight_use)
    row_weights = arrived.row_weights
    assert row_weights is not None
    round_tag = directions.new_round_tag()
    offsets = arrived.expert_offsets
    return arrived.rows, offsets, arrived.tokens_per_expert, row_weights, round_tag


@train_dispatch.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: Any,
    num_real: int,
    anchor: Tensor,
    num_rows: int,
    on_rows: bool,
    tag: int,
    aligned: bool,
    number: int,
) -> Any:
    # This function runs whenever a compiler traces a round, before inductor lowers the graph.
    keep_order(*_IN_ORDER)
    # N is a symbol of the graph if only the run knows how many rows arrive.
    N: Any = num_rows
    if num_rows == EXACT:
        N = torch.library.get_ctx().new_dynamic_size()
    e = find(number).forward.ep.num_local_experts
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
    """Close the forward round. Returns y [T, D], the sum of each token's rows.

    The open round already knows the weights, and combine multiplies rows by them unless dispatch
    was called with `on_rows`. All other arguments are for the backward pass. `row_weights` are
    given if they get their gradients from combine.
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
    """Open a backward round: bring the gradients of y to the experts.

    `generation` is that of the group in the forward pass, and `order` the number under which the
    forward pass has noted this round as owed. `ends_here`: the backward pass will not run the node
    of dispatch, which would close the round. The round is then aborted at once.

    Returns the gradients of the rows [N, D], of their weights fp32 [N], and of the round tag. The
    second is [0] if the weights get no gradients here.
    """
    directions = find(number)
    directions.check_generation(generation)

    # Dispatch the gradients of y as the forward round has dispatched the tokens. With `outputs`, a
    # kernel may multiply the rows by their weights when they arrive.
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

    # If combine has not multiplied rows by weights, the rows that have arrived are the gradients.
    if outputs is None:
        no_gradients = grad_y.new_empty(0, dtype=torch.float32)
        return arrived.rows, no_gradients, torch.zeros_like(round_tag)

    # Otherwise the gradient of a row is the arrived row times the weight, and the gradient of the
    # weight is the dot product of the arrived row and the output. If the kernel has not computed
    # them on arrival, a pass over the rows does so now, in place.
    grad_row_weights = arrived.products
    if grad_row_weights is None:
        grad_row_weights = ops.weighted_rows_backward_(
            arrived.rows, outputs, row_weights, arrived.expert_offsets, arrived.tokens_per_expert
        )
        zero_tail_(grad_row_weights, arrived.expert_offsets)
    return arrived.rows, grad_row_weights, torch.zeros_like(round_tag)


@train_combine_backward.register_fake
def _(
    grad_y: Tensor,
    expert_rows: Tensor | None,
    row_weights: Tensor | None,
    round_tag: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: Tensor | None,
    num_real: int,
    num_rows: int,
    *_rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    num_row_weights = 0 if expert_rows is None else num_rows
    grad_rows = grad_y.new_empty(num_rows, grad_y.shape[1])
    grad_row_weights = grad_y.new_empty(num_row_weights, dtype=torch.float32)
    return grad_rows, grad_row_weights, torch.empty_like(round_tag)


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
    """Close the backward round: bring the gradients of rows and of their weights back to the
    tokens. Returns the gradients of x [T, D] and of weights fp32 [T, K].

    Nothing reads `grad_round_tag`. It is an argument so that a compiler runs this operator after
    `train_combine_backward`, which returns it. `T` and `K` are for the compiler, too, which must
    know the shapes of the results before it runs the operator.
    """
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
    """How to make a tensor of zeros that is rarely needed: its shape, dtype and device."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Self:
        """Describe zeros of the shape of `tensor`, without keeping its memory."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def make(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep on the node `ctx` what `_dispatch_gradients` needs. torch calls it after dispatch, with
    the operator's inputs and outputs.
    """
    x = inputs[0]
    ids = inputs[1]
    weights = inputs[2]
    ctx.number = inputs[-1]
    ctx.T = x.shape[0]
    ctx.K = ids.shape[1]
    ctx.weights_dtype = weights.dtype
    ctx.generation = find(ctx.number).generation
    # A backward pass may bring no gradient for an output. By default torch then makes zeros, which
    # would be two kernels for the offsets and counts, whose gradients nobody reads. So this node
    # makes its own zeros, for rows and their weights only, if they are needed.
    ctx.set_materialize_grads(False)
    rows, _, _, row_weights, _ = output
    ctx.rows = _Zeros.like(rows)
    ctx.row_weights = _Zeros.like(row_weights)


def _dispatch_gradients(
    ctx: Any, rows: Any, offsets: Any, tokens: Any, row_weights: Any, round_tag: Any
) -> Any:
    """Run `train_dispatch_backward` for a node of dispatch. torch calls it in a backward pass, with
    the gradient of each output of dispatch; None: the pass has none.
    """
    # The backward pass of combine has opened a round, and the other ranks wait until this rank
    # closes it. So it is closed with zeros if there are no gradients.
    if rows is None:
        rows = ctx.rows.make()
    if row_weights is None:
        row_weights = ctx.row_weights.make()
    grad_x, grad_weights = train_dispatch_backward(
        rows, row_weights, round_tag, ctx.T, ctx.K, ctx.number, ctx.generation
    )
    # x and weights are the first and the third of the eleven inputs of dispatch.
    return grad_x, None, grad_weights.to(ctx.weights_dtype), *(None,) * 8


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep on the node `ctx` what `_combine_gradients` needs, and note the backward round as owed.
    torch calls it after combine, with the operator's inputs and output.
    """
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
    # Only the gradients of weights need the experts' outputs.
    outputs = expert_rows if row_weights is not None else None

    # Save the tensors here, after the round, and not earlier. When a checkpoint of torch computes a
    # forward pass again, it stops at the last tensor that was saved. Here the round is closed.
    ctx.save_for_backward(outputs, row_weights, round_tag.detach(), ids, weights, num_tokens)

    # From now on this graph owes the other ranks a backward round. Its node of dispatch tells the
    # backward pass whether dispatch's part of the round will run.
    directions = find(ctx.number)
    ctx.num_rows = expert_rows.shape[0]
    ctx.generation = directions.generation
    ctx.dispatch = round_tag.grad_fn
    hidden_size = expert_rows.shape[1]
    top_k = ids.shape[1]
    shape = RoundShape(hidden_size, top_k, expert_rows.dtype, aligned=ctx.aligned)
    ctx.order = directions.owed.add(ctx, shape, round_tag.detach())


def _combine_gradients(ctx: Any, grad_y: Tensor) -> Any:
    """Run `train_combine_backward` for a node of combine. torch calls it in a backward pass, with
    the gradient of y.
    """
    # These are in the order in which `_save_combine` has saved them, which is the order of the
    # operator's arguments.
    saved = ctx.saved_tensors
    row_weights = saved[1]
    # If the caller asks for gradients of the experts alone, the pass does not run the node of
    # dispatch, which would close this round. The next round must not find it open.
    ends_here = (ctx.dispatch is not None) and not is_of_pass(ctx.dispatch)
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
    # Rows, their weights and the round tag are the first three of the nine inputs of combine.
    return grad_rows, grad_weights, grad_round_tag, *(None,) * 6


train_dispatch.register_autograd(_dispatch_gradients, setup_context=_save_dispatch)
train_combine.register_autograd(_combine_gradients, setup_context=_save_combine)
_NAMES = ("train_dispatch", "train_combine", "train_combine_backward", "train_dispatch_backward")
_IN_ORDER = [getattr(torch.ops.epmoe, name).default for name in _NAMES]
for _operator in _IN_ORDER:
    _register_effectful_op(_operator, EffectType.ORDERED)
