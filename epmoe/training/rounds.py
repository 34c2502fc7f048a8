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

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import CallerRows, Multiplied, Way
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
        # Memory for what arrives.
        x = call.x
        sizes = exchange.plan.sizes
        is_exact = num_rows == EXACT
        N = sizes["max_rows"] if is_exact else num_rows
        e = sizes["num_local_experts"]
        rows = None
        if not is_exact:
            rows = x.new_empty(self._shape_of_rows(N, x), dtype=self._wire.element)
        offsets = x.new_empty(e + 1, dtype=torch.int32)
        tokens = x.new_empty(e, dtype=torch.int32)
        row_weights = None
        if not way.returns_values:
            row_weights = x.new_empty(N, dtype=torch.float32)
        multiplies = None
        if outputs is not None:
            multiplies = self._multiplied(exchange, x, outputs)
        into = CallerRows(
            rows, offsets, tokens, row_weights, way, wire=self._wire, multiplies=multiplies
        )

        rows = _dispatch(exchange, call, into, self._num_sms)
        if is_exact:
            N = int(offsets[-1])
            rows = rows[:N]
            if row_weights is not None:
                row_weights = row_weights[:N].clone()
        if self._wire.packed:
            rows = ops.unpack_fp8(rows, x, offsets)
            if not is_exact:
                zero_tail_(rows, offsets)
        elif is_exact:
            rows = rows.clone()
        products = None if multiplies is None else multiplies.products.sum(1)
        return TrainingRows(rows, offsets, tokens, row_weights, products)

    def _shape_of_rows(self, N: int, x: Tensor) -> tuple[int, int]:
        """Of N rows of tokens x, as they travel."""
        D = x.shape[1]
        if self._wire.packed:
            return N, self._wire.row_items(D, x.dtype)
        return N, D

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
def _dispatch(exchange: NodeExchange, call: Call, into: CallerRows, num_sms: int) -> Tensor:
    """Expert-major rows in memory of the caller's, which outlives the round, or else in the window.
    The open round has the offsets and counts of `into`. A kernel uses at most `num_sms`
    multiprocessors.
    """
    sent = exchange.opened(call)
    assert sent.descriptor is not None
    exchange.rows_key = "capacity.max_expert_rows, or `num_rows` in training,"
    scratch = exchange.memory[1].data_ptr()
    sent.descriptor = exchange.descriptors.for_training(sent.descriptor, into, scratch, num_sms)
    x, ids, weights, scales, tokens, num_rows, *memory, _ = sent.arguments
    if into.wire.packed:
        x = ops.pack_fp8(x, tokens, num_rows)
    sent.arguments = x, ids, weights, scales, tokens, num_rows, *memory, sent.descriptor
    exchange.launch(ops.dispatch, sent.arguments, DISPATCHED)
    dispatched = exchange.received(sent)
    dispatched.expert_offsets, dispatched.tokens_per_expert = (
        into.expert_offsets,
        into.tokens_per_expert,
    )
    rows = into.rows
    if rows is None:
        wire = into.wire
        dtype = call.x.dtype
        rows = rows_as(
            exchange.views["rows"], wire.dtype_of(dtype), wire.row_items(call.x.shape[1], dtype)
        )
    dispatched.rows = rows
    return rows
