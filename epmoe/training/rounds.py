"""The rounds of training.

They differ from those of serving in two ways. Rows and their weights arrive in new memory, which
autograd may keep until the backward pass. And a round can bring a number for each pair (token,
expert) back to the token: the gradient of the pair's weight.

    forward    x, weights ─ out ─▶ rows, row weights
               expert rows ─ back ─▶ y
    backward   grad y ─ out ─▶ grad expert rows
               grad rows, grad row weights ─ back ─▶ grad x, grad weights

Dispatch copies a token to the ranks of its experts, and combine sums rows. The gradient of a copy
is a sum, and the gradient of a sum is a copy. So the backward pass of a layer is one round, too:
its dispatch is the backward pass of combine, and its combine is the backward pass of dispatch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import WeightUse
from epmoe.exchange.exchange import takes_turn
from epmoe.exchange.handles import Dispatched, RoundShape, Rows
from epmoe.exchange.memory import ll_tokens_of_training
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import DISPATCHED
from epmoe.exchange.templates import rows_as
from epmoe.group.errors import EPStateError
from epmoe.local.experts_gradients import zero_tail_
from epmoe.native import ops
from epmoe.native.formats import TRAINING_FORMATS, WireFormat
from epmoe.native.layouts import constant
from epmoe.service import ExpertParallel

# In place of a number of rows: as many rows as arrive. The host waits until it knows how many.
EXACT = -1
# The share of a GPU's multiprocessors that a round of training uses. The rest is for the kernels of
# NCCL, with which DDP and FSDP average gradients at the same time.
_SHARE_OF_SMS = 3 / 4

# Forward: combine multiplies rows by their weights.
FORWARD = WeightUse(adds_only=False, returns_values=False)
# Forward: the experts multiply rows by their weights, so that combine only adds.
ON_ROWS = WeightUse(adds_only=True, returns_values=False)
# Backward: gradients have been multiplied already, and those of weights travel back with the sums.
BACKWARD = WeightUse(adds_only=True, returns_values=True)


class ProductMemory(NamedTuple):
    """The tensors with which the kernel of a backward round multiplies rows when they arrive.

    A row is the gradient of `weight · output`. The kernel replaces the row by `row · weight`, the
    gradient of the output, and computes the dot product of the row and the output, the gradient of
    the weight.
    """

    outputs: Tensor
    """[N, D], the experts' outputs in x's dtype. A row has at most `kMostProductBytes`, and starts
    at a multiple of 16 bytes.
    """
    products: Tensor
    """fp32 [N, `kProductParts`], zeros at first. The parts in a line become partial sums of the dot
    product of this row.
    """


class Rounds:
    """The rounds of one direction, forward or backward, over an `ExpertParallel` of one node.

    Rows travel in the format `wire`, and are converted back to the dtype of x when they arrive.
    Methods raise the errors of `ExpertParallel.dispatch` and `ExpertParallel.combine`.
    """

    def __init__(self, ep: ExpertParallel, wire: WireFormat = TRAINING_FORMATS["auto"]) -> None:
        self.ep = ep
        self._wire = wire
        self._num_sms = 1
        if ep.device.type == "cuda":
            properties = torch.cuda.get_device_properties(ep.device)
            share = int(properties.multi_processor_count * _SHARE_OF_SMS)
            self._num_sms = max(share, 1)

    @property
    def exchange(self) -> NodeExchange:
        """The exchange that `ep` has now. It is another one after the group has changed. Raises
        ValueError if the group has several nodes.
        """
        exchange = self.ep.exchange
        if not isinstance(exchange, NodeExchange):
            raise ValueError("training needs a group of one node: `topology.num_nodes` must be 1")
        return exchange

    def out(
        self, call: Call, num_rows: int, weight_use: WeightUse, outputs: Tensor | None = None
    ) -> Rows:
        """Dispatch the tokens of `call`, and leave the round open.

        Args:
            call: the checked arguments of dispatch.
            num_rows: N, the number of rows to make; or EXACT, for as many rows as arrive.
            weight_use: what dispatch and combine do with weights.
            outputs: [N, D], the experts' outputs in the forward round, in the order of the rows. If
                they are given, a kernel may multiply rows on arrival: see `Rows.products`.

        Returns:
            The rows [N, D] in the dtype of x, in memory that the next round leaves alone. Those
            past the last segment are zeros.
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
    ) -> Rows:
        """Do the work of `out`, but leave the round open after an exception, which `out` then gives
        up.
        """
        # Dispatch. `takes_turn` allows no keywords, which would cost each round some time.
        x = call.x
        product_memory = None
        if outputs is not None:
            product_memory = self._product_memory(exchange, x, outputs)
        arrived = _dispatch(
            exchange, call, num_rows, weight_use, self._wire, product_memory, self._num_sms
        )
        rows = arrived.rows
        offsets = arrived.expert_offsets
        row_weights = arrived.row_weights

        # Cut rows and weights to what has arrived. Their memory belongs to the exchange, which uses
        # it again in the next round, so the weights are copied.
        if num_rows == EXACT:
            N = int(offsets[-1])
            rows = rows[:N]
            if row_weights is not None:
                row_weights = row_weights[:N].clone()

        # Copy the rows out of the window, too. Unpacking fp8 makes new rows anyway.
        if self._wire.packed:
            rows = ops.unpack_fp8(rows, x, offsets)
            if num_rows != EXACT:
                zero_tail_(rows, offsets)
        elif num_rows == EXACT:
            rows = rows.clone()

        # The kernel has left partial sums of each product.
        products = None
        if product_memory is not None:
            products = product_memory.products.sum(1)
        if rows is arrived.rows and products is None:
            return arrived
        return Rows(rows, offsets, arrived.tokens_per_expert, row_weights, products)

    def _product_memory(
        self, exchange: NodeExchange, x: Tensor, outputs: Tensor
    ) -> ProductMemory | None:
        """Make the tensors with which a kernel multiplies rows when they arrive.

        Returns None if the kernel cannot do so, or would gain nothing. The caller then multiplies
        the rows in a pass of its own.
        """
        # Only kernels on GPUs multiply, and only rows that arrive in the dtype of x. A call with
        # few tokens, by the LL protocol, is too short to gain.
        most_of_ll = ll_tokens_of_training(exchange.plan.sizes["ll_max_tokens"])
        if x.shape[0] <= most_of_ll or not x.is_cuda or self._wire.packed:
            return None
        if outputs.dtype != x.dtype or not len(outputs):
            return None
        # The kernel reads the outputs in lines of 16 bytes.
        row_bytes = x.shape[1] * x.itemsize
        stride_bytes = outputs.stride(0) * x.itemsize
        is_aligned = outputs.data_ptr() % 16 == 0 and stride_bytes % 16 == 0
        if row_bytes > constant("kMostProductBytes") or not is_aligned:
            return None
        parts = constant("kProductParts")
        products = x.new_zeros(len(outputs), parts, dtype=torch.float32)
        return ProductMemory(outputs, products)

    def skip(self, shape: RoundShape, tag: int, weight_use: WeightUse) -> None:
        """Take part in a round without tokens, and abort it, so that the other ranks do not wait
        for this rank.
        """
        empty = self.exchange.templates.no_tokens(shape, tag)
        call = Call(empty.x, empty.ids, empty.weights, tag=tag, aligned=empty.aligned)
        self.out(call, EXACT, weight_use)
        self.exchange.abort(None)

    def back(self, rows: Tensor) -> Tensor:
        """Close the open round by combine. Returns y [T, D], the sum of each token's rows out of
        `rows` [N, D].
        """
        exchange = self.exchange
        return exchange.combine("expert", rows, _open(exchange, "combine"), None)

    def back_with_values(self, rows: Tensor, row_values: Tensor) -> tuple[Tensor, Tensor]:
        """Close the open round by combine, which also brings a number for each row back to the
        row's token.

        Args:
            rows: [N, D].
            row_values: fp32 [N], contiguous; the number for each row.

        Returns:
            y [T, D], the sum of each token's rows; and fp32 [T, K], the numbers of the rows of each
            token. A pair (token, expert) without a row has 0.
        """
        exchange = self.exchange
        dispatched = _open(exchange, "the backward pass of dispatch")
        sent = dispatched.sent
        T = sent.num_tokens
        K = sent.template.shape.top_k
        # The descriptor holds the addresses of both tensors. An empty tensor has no address, so the
        # tensors have at least one element.
        pair_values = row_values.new_empty(max(T * K, 1))
        if not row_values.shape[0]:
            row_values = row_values.new_empty(1)
        assert sent.descriptor is not None
        exchange.descriptors.return_values(sent.descriptor, row_values, pair_values)
        y = exchange.combine("expert", rows, dispatched, None)
        return y, pair_values[: T * K].view(T, K)


def _open(exchange: NodeExchange, call: str) -> Dispatched:
    """The handle of the open round. Raises EPStateError if no round is open that the caller could
    close; `call` names the caller in the message.
    """
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
    product_memory: ProductMemory | None,
    num_sms: int,
) -> Rows:
    """Dispatch into new memory; if `num_rows` is EXACT, into the window. The rows of the window are
    more than have arrived, and the next round overwrites them.

    A kernel uses at most `num_sms` multiprocessors. The handle of the open round gets the rows that
    this returns, since combine reads their offsets. They are in the format in which they travel.
    """
    sent = exchange.opened(call)
    assert sent.descriptor is not None
    # An overflow in this round names both limits: `num_rows` may be the one that is too low.
    exchange.rows_key = "capacity.max_expert_rows, or `num_rows` in training,"

    # The operands are those of a round of serving. The descriptor also says what training wants.
    operands = sent.operands
    tokens = operands.num_tokens
    num_real = operands.num_rows
    if wire.packed:
        operands = operands._replace(x=ops.pack_fp8(operands.x, tokens, num_real))
    prepared = exchange.descriptors.of_training(sent.descriptor, weight_use, num_sms)
    # A combine that aborts the round must take the same protocol, wherever a signal handler raises.
    sent.descriptor = prepared
    outputs = None
    products = None
    if product_memory is not None:
        outputs = product_memory.outputs
        products = product_memory.products
    memory = exchange.memory
    # The operator takes no scales, which packed rows have behind their elements.
    tensors = operands[:3]
    arguments = (*tensors, tokens, num_real, *memory, prepared, outputs, products, num_rows)

    def rest_of_round(found: tuple[Tensor, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
        """The operator, with its arguments, that continues the round after a signal. It uses the
        memory that `dispatch_to_caller` has made, whose addresses are in its last result.
        """
        return ops.dispatch, (*operands, *memory, found[-1])

    # The last result is the descriptor with the addresses of the new memory. Combine needs it.
    found = exchange.launch(ops.dispatch_to_caller, arguments, DISPATCHED, rest_of_round)
    rows, offsets, counts, row_weights, sent.descriptor = found

    if num_rows == EXACT:
        dtype = call.x.dtype
        items = wire.row_items(call.x.shape[1], dtype)
        rows = rows_as(exchange.views["rows"], wire.dtype_of(dtype), items)
    # A backward round brings no weights.
    arrived = Rows(rows, offsets, counts, None if weight_use.returns_values else row_weights)
    exchange.received(sent).arrived = arrived
    return arrived
