"""The rounds of training: rows and their weights in new memory, and a value of each pair on the way
back.

    forward    x, weights ─ out ─▶ rows, row weights
               expert rows ─ back ─▶ y
    backward   grad y ─ out ─▶ grad expert rows
               grad rows, grad row weights ─ back ─▶ grad x, grad weights

The backward pass of a layer is one round, since the gradient of a sum over rows is a copy, and that
of a copy a sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import Way
from epmoe.exchange.exchange import takes_turn
from epmoe.exchange.handles import Dispatched, RoundShape
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import DISPATCHED
from epmoe.exchange.templates import rows_as
from epmoe.group.errors import EPStateError
from epmoe.local.experts_gradients import zero_tail_
from epmoe.native import ops
from epmoe.native.formats import TRAINING_FORMATS, WireFormat
from epmoe.native.layouts import constant
from epmoe.service import ExpertParallel

EXACT = -1  # as many rows as there are, which the host reads
_SHARE = (
    3 / 4
)  # of the multiprocessors: the rest is for kernels of NCCL that run during a round of training


FORWARD = Way(adds_only=False, returns_values=False)
ON_ROWS = Way(adds_only=True, returns_values=False)
BACKWARD = Way(adds_only=True, returns_values=True)


class TrainingRows(NamedTuple):
    """What arrives on a rank."""

    rows: Tensor  # [N, D]
    expert_offsets: Tensor  # int32 [e + 1]
    tokens_per_expert: Tensor  # int32 [e]
    row_weights: (
        Tensor | None
    )  # fp32 [N], 0 in gaps and past the last segment; None where values return
    products: Tensor | None
    """fp32 [N]: rows have been multiplied by their weights, and these are their products with the
    outputs; or None
    """


class Multiplied(NamedTuple):
    """Rows that are gradients of weighted outputs: each becomes its product with its weight as it
    arrives.
    """

    outputs: Tensor
    """[N, D], in x's dtype; rows of at most `kMostProductBytes`, which start at multiples of 16
    bytes
    """
    products: Tensor
    """fp32 [N, `kProductParts`], zeros: a row's parts become the sum of its products with its
    outputs
    """


class Rounds:
    """The rounds of one direction, over an `ExpertParallel` of one node. They raise what dispatch
    and combine raise. Rows go out in the format `wire`, and arrive as values of x's dtype.
    """

    def __init__(self, ep: ExpertParallel, wire: WireFormat = TRAINING_FORMATS["auto"]) -> None:
        self.ep = ep
        self._wire = wire
        self._num_sms = 1
        if ep.device.type == "cuda":
            sms = int(torch.cuda.get_device_properties(ep.device).multi_processor_count * _SHARE)
            self._num_sms = max(sms, 1)

    @property
    def exchange(self) -> NodeExchange:
        exchange = self.ep.exchange
        if not isinstance(exchange, NodeExchange):
            raise ValueError("training needs a group of one node: `topology.num_nodes` must be 1")
        return exchange

    def out(
        self, call: Call, num_rows: int, way: Way, outputs: Tensor | None = None
    ) -> TrainingRows:
        """Dispatch tokens into memory of their own, of `num_rows` rows or as many as arrive. The
        round stays open. Rows past the last segment are zeros. With `outputs` [N, D] rows may
        arrive as products with their weights: see `TrainingRows`.
        """
        exchange = self.exchange
        before = exchange.rounds.count
        try:
            return self._out(exchange, call, num_rows, way, outputs)
        except BaseException:
            exchange.give_up(before)
            raise

    def _out(
        self,
        exchange: NodeExchange,
        call: Call,
        num_rows: int,
        way: Way,
        outputs: Tensor | None,
    ) -> TrainingRows:
        """`out`, whose exception leaves the round open."""
        x = call.x
        multiplied = None
        if outputs is not None:
            multiplied = self._multiplied(exchange, x, outputs)
        rows, offsets, tokens, weights = _dispatch(
            exchange, call, num_rows, way, self._wire, multiplied, self._num_sms
        )
        row_weights = None if way.returns_values else weights
        if num_rows == EXACT:
            N = int(offsets[-1])
            rows = rows[:N]
            if row_weights is not None:
                row_weights = row_weights[:N].clone()
        if self._wire.packed:
            rows = ops.unpack_fp8(rows, x, offsets)
            if num_rows != EXACT:
                zero_tail_(rows, offsets)
        elif num_rows == EXACT:
            rows = rows.clone()
        products = None if multiplied is None else multiplied.products.sum(1)
        return TrainingRows(rows, offsets, tokens, row_weights, products)

    def _multiplied(self, exchange: NodeExchange, x: Tensor, outputs: Tensor) -> Multiplied | None:
        """The outputs with which dispatch of tokens `x` multiplies its rows. None where a pass over
        the rows has to do it later: a call by the LL protocol is too short to gain, and only
        kernels on GPUs multiply.
        """
        few = x.shape[0] <= exchange.plan.sizes["ll_max_tokens"]
        row_bytes, stride = (each * x.itemsize for each in (x.shape[1], outputs.stride(0)))
        if (
            few
            or not x.is_cuda
            or self._wire.packed
            or outputs.dtype != x.dtype
            or not len(outputs)
        ):
            return None
        if row_bytes > constant("kMostProductBytes") or outputs.data_ptr() % 16 or stride % 16:
            return None
        return Multiplied(
            outputs, x.new_zeros(len(outputs), constant("kProductParts"), dtype=torch.float32)
        )

    def skip(self, shape: RoundShape, tag: int, way: Way) -> None:
        """Take part in a round without tokens, and abort it."""
        none = self.exchange.templates.no_tokens(shape, tag)
        self.out(Call(none.x, none.ids, none.weights, tag=tag, aligned=none.aligned), EXACT, way)
        self.exchange.abort(None)

    def back(self, rows: Tensor) -> Tensor:
        """Combine in the open round: rows [N, D] → y [T, D]."""
        exchange = self.exchange
        return exchange.combine("expert", rows, _open(exchange, "combine"), None)

    def back_with_values(self, rows: Tensor, row_values: Tensor) -> tuple[Tensor, Tensor]:
        """Combine in the open round, with values fp32 [N], contiguous → y [T, D] and the value of
        each pair, fp32 [T, K], 0 where it has no row.
        """
        exchange = self.exchange
        dispatched = _open(exchange, "the backward pass of dispatch")
        sent = dispatched.sent
        T = sent.num_tokens
        K = sent.template.shape.top_k
        pair_values = row_values.new_empty(max(T * K, 1))  # an empty tensor has no address
        if not row_values.shape[0]:
            row_values = row_values.new_empty(1)
        assert sent.descriptor is not None
        exchange.descriptors.return_values(sent.descriptor, row_values, pair_values)
        y = exchange.combine("expert", rows, dispatched, None)
        return y, pair_values[: T * K].view(T, K)


def _open(exchange: NodeExchange, call: str) -> Dispatched:
    """The handle of the open round, which `call` closes."""
    rounds = exchange.rounds
    handle = rounds.handle
    if rounds.state != DISPATCHED or not isinstance(handle, Dispatched):
        raise EPStateError(
            f"{call} needs an open round, but none is open: it was aborted or belongs elsewhere"
        )
    return handle


@takes_turn
def _dispatch(
    exchange: NodeExchange,
    call: Call,
    num_rows: int,
    way: Way,
    wire: WireFormat,
    multiplied: Multiplied | None,
    num_sms: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Expert-major rows in memory of the caller's, which outlives the round, or else in the window;
    their offsets and counts, which the open round has, too; and their weights, [0] where values
    return. A kernel uses at most `num_sms` multiprocessors.
    """
    sent = exchange.opened(call)
    assert sent.descriptor is not None
    exchange.rows_key = "capacity.max_expert_rows, or `num_rows` in training,"
    x, ids, weights, _, tokens, num_real, *memory, _ = sent.arguments
    if wire.packed:
        x = ops.pack_fp8(x, tokens, num_real)
    prepared = exchange.descriptors.of_training(sent.descriptor, way, num_sms)
    outputs, products = multiplied or (None, None)
    arguments = (x, ids, weights, tokens, num_real, *memory, prepared, outputs, products, num_rows)

    def again(found: tuple[Tensor, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
        """The operator of a round that has its memory, and has not ended."""
        return ops.dispatch, (x, ids, weights, None, tokens, num_real, *memory, found[-1])

    found = exchange.launch(ops.dispatch_to_caller, arguments, DISPATCHED, again)
    rows, offsets, counts, row_weights, sent.descriptor = found
    dispatched = exchange.received(sent)
    dispatched.expert_offsets = offsets
    dispatched.tokens_per_expert = counts
    if num_rows == EXACT:
        dtype = call.x.dtype
        items = wire.row_items(call.x.shape[1], dtype)
        rows = rows_as(exchange.views["rows"], wire.dtype_of(dtype), items)
    dispatched.rows = rows
    return rows, offsets, counts, row_weights
