"""The rounds of training. Rows and their weights arrive in new memory, and a value of each pair can
travel back.

    forward    x, weights ─ out ─▶ rows, row weights
               expert rows ─ back ─▶ y
    backward   grad y ─ out ─▶ grad expert rows
               grad rows, grad row weights ─ back ─▶ grad x, grad weights

The gradient of a sum over rows is a copy, and that of a copy is a sum. So the backward pass of a
layer is one round, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import WeightUse
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

# For `num_rows`: as many rows as there are. The host waits for their number.
EXACT = -1
# Share of the multiprocessors that a round of training uses. NCCL's kernels, which run at the same
# time, have the rest.
_SHARE = 3 / 4

FORWARD = WeightUse(adds_only=False, returns_values=False)
ON_ROWS = WeightUse(adds_only=True, returns_values=False)
BACKWARD = WeightUse(adds_only=True, returns_values=True)


class ReceivedRows(NamedTuple):
    """The rows that `dispatch_to_caller` has brought to this rank, before they are unpacked."""

    rows: Tensor
    """[N, D] in the format that travels, or in the window where the call is EXACT"""
    expert_offsets: Tensor
    """int32 [e + 1]"""
    tokens_per_expert: Tensor
    """int32 [e]"""
    row_weights: Tensor
    """fp32 [N]; [0] where values return"""


class TrainingRows(NamedTuple):
    """The rows of a round on the rank of their experts, in memory of their own."""

    rows: Tensor
    """[N, D] in the dtype of x"""
    expert_offsets: Tensor
    """int32 [e + 1]"""
    tokens_per_expert: Tensor
    """int32 [e]"""
    row_weights: Tensor | None
    """fp32 [N], 0 in gaps and past the last segment; None where values return"""
    products: Tensor | None
    """fp32 [N], the dot product of each row with its output. Then `rows` have been multiplied by
    their weights. Otherwise None
    """


class Multiplied(NamedTuple):
    """How a kernel multiplies arriving gradients of weighted outputs by the weights of their
    rows.
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
    """The rounds of one direction, forward or backward, over an `ExpertParallel` of one node.

    Rows travel in the format `wire`, and arrive as values of x's dtype. Methods raise what dispatch
    and combine raise.
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
        self, call: Call, num_rows: int, weight_use: WeightUse, outputs: Tensor | None = None
    ) -> TrainingRows:
        """Dispatch the tokens of `call`, and leave the round open.

        Args:
            call: the checked arguments of dispatch.
            num_rows: N; or EXACT, for as many rows as arrive.
            weight_use: what dispatch and combine do with weights.
            outputs: [N, D], of experts. With them rows may arrive multiplied by their weights.

        Returns:
            Rows in memory of their own. Those past the last segment are zeros.
        """
        exchange = self.exchange
        before = exchange.rounds.count
        try:
            return self._out(exchange, call, num_rows, weight_use, outputs)
        except BaseException:
            exchange.give_up(before)
            raise

    def _out(
        self,
        exchange: NodeExchange,
        call: Call,
        num_rows: int,
        weight_use: WeightUse,
        outputs: Tensor | None,
    ) -> TrainingRows:
        """Do what `out` says. An exception leaves the round open."""
        x = call.x
        multiplied = None
        if outputs is not None:
            multiplied = self._multiplied(exchange, x, outputs)
        received = _dispatch(
            exchange, call, num_rows, weight_use, self._wire, multiplied, self._num_sms
        )
        rows = received.rows
        offsets = received.expert_offsets
        row_weights = None
        if not weight_use.returns_values:
            row_weights = received.row_weights

        # Cut rows and weights to what has arrived. They lie in the window, so weights are copied.
        if num_rows == EXACT:
            N = int(offsets[-1])
            rows = rows[:N]
            if row_weights is not None:
                row_weights = row_weights[:N].clone()

        # Unpacking copies rows out of the window, too.
        if self._wire.packed:
            rows = ops.unpack_fp8(rows, x, offsets)
            if num_rows != EXACT:
                zero_tail_(rows, offsets)
        elif num_rows == EXACT:
            rows = rows.clone()

        # A kernel leaves each product in parts.
        products = None
        if multiplied is not None:
            products = multiplied.products.sum(1)
        return TrainingRows(rows, offsets, received.tokens_per_expert, row_weights, products)

    def _multiplied(self, exchange: NodeExchange, x: Tensor, outputs: Tensor) -> Multiplied | None:
        """The outputs and the room with which a kernel multiplies the rows of tokens `x`.

        None where a later pass over the rows has to do it: only kernels on GPUs multiply, and a
        call by the LL protocol is too short to gain.
        """
        few_tokens = x.shape[0] <= exchange.plan.sizes["ll_max_tokens"]
        if few_tokens or not x.is_cuda or self._wire.packed:
            return None
        if outputs.dtype != x.dtype or not len(outputs):
            return None
        # Kernels read outputs in lines of 16 bytes.
        row_bytes = x.shape[1] * x.itemsize
        stride_bytes = outputs.stride(0) * x.itemsize
        is_aligned = outputs.data_ptr() % 16 == 0 and stride_bytes % 16 == 0
        if row_bytes > constant("kMostProductBytes") or not is_aligned:
            return None
        parts = constant("kProductParts")
        products = x.new_zeros(len(outputs), parts, dtype=torch.float32)
        return Multiplied(outputs, products)

    def skip(self, shape: RoundShape, tag: int, weight_use: WeightUse) -> None:
        """Take part in a round without tokens, and abort it."""
        none = self.exchange.templates.no_tokens(shape, tag)
        call = Call(none.x, none.ids, none.weights, tag=tag, aligned=none.aligned)
        self.out(call, EXACT, weight_use)
        self.exchange.abort(None)

    def back(self, rows: Tensor) -> Tensor:
        """Close the open round by combine: rows [N, D] → y [T, D]."""
        exchange = self.exchange
        return exchange.combine("expert", rows, _open(exchange, "combine"), None)

    def back_with_values(self, rows: Tensor, row_values: Tensor) -> tuple[Tensor, Tensor]:
        """Close the open round by combine, which brings a value of each row back, too.

        Args:
            rows: [N, D].
            row_values: fp32 [N], contiguous.

        Returns:
            y [T, D], and the value of each pair, fp32 [T, K]: 0 where the pair has no row.
        """
        exchange = self.exchange
        dispatched = _open(exchange, "the backward pass of dispatch")
        sent = dispatched.sent
        T = sent.num_tokens
        K = sent.template.shape.top_k
        # The kernel takes addresses, and an empty tensor has none.
        pair_values = row_values.new_empty(max(T * K, 1))
        if not row_values.shape[0]:
            row_values = row_values.new_empty(1)
        assert sent.descriptor is not None
        exchange.descriptors.return_values(sent.descriptor, row_values, pair_values)
        y = exchange.combine("expert", rows, dispatched, None)
        return y, pair_values[: T * K].view(T, K)


def _open(exchange: NodeExchange, call: str) -> Dispatched:
    """The handle of the open round, which `call` closes. Raises EPStateError if none is open."""
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
    weight_use: WeightUse,
    wire: WireFormat,
    multiplied: Multiplied | None,
    num_sms: int,
) -> ReceivedRows:
    """Dispatch into memory that outlives the round; into the window if `num_rows` is EXACT.

    The open round has the offsets and counts that this returns. A kernel uses at most `num_sms`
    multiprocessors.
    """
    sent = exchange.opened(call)
    assert sent.descriptor is not None
    exchange.rows_key = "capacity.max_expert_rows, or `num_rows` in training,"
    x, ids, weights, _, tokens, num_real, *memory, _ = sent.arguments
    if wire.packed:
        x = ops.pack_fp8(x, tokens, num_real)
    prepared = exchange.descriptors.of_training(sent.descriptor, weight_use, num_sms)
    outputs, products = multiplied or (None, None)
    operands = (x, ids, weights, None, tokens, num_real, *memory)
    arguments = (x, ids, weights, tokens, num_real, *memory, prepared, outputs, products, num_rows)

    def again(found: tuple[Tensor, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
        """The operator that continues a round whose memory has been made."""
        return ops.dispatch, (*operands, found[-1])

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
    return ReceivedRows(rows, offsets, counts, row_weights)
