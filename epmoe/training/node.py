"""Rounds of training over the exchange of one node: rows lie in memory of the caller's, for the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import CallerRows, returning
from epmoe.exchange.exchange import takes_turn
from epmoe.exchange.handles import Dispatched
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import DISPATCHED
from epmoe.exchange.templates import rows_as
from epmoe.native import ops

_SHARE = 3 / 4  # of the multiprocessors: the rest is for kernels of NCCL that run during a round of training


def sms_of(device: torch.device) -> int:
    """The multiprocessors that a kernel of training may use."""
    if device.type == "cpu":
        return 1
    return max(int(torch.cuda.get_device_properties(device).multi_processor_count * _SHARE), 1)


@takes_turn
def dispatch_into(exchange: NodeExchange, call: Call, into: CallerRows, num_sms: int) -> Dispatched:
    """`NodeExchange.dispatch` of expert-major rows into memory of the caller's, which outlives the round. Collective.
    The open round has the rows, offsets and counts of `into`. A kernel uses at most `num_sms` multiprocessors."""
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
    if into.rows is not None:
        dispatched.rows = into.rows
    else:
        D = call.x.shape[1]
        dtype = call.x.dtype
        wire = into.wire
        dispatched.rows = rows_as(exchange.views["rows"], wire.dtype_of(dtype), wire.row_items(D, dtype))
    dispatched.expert_offsets, dispatched.tokens_per_expert = into.expert_offsets, into.tokens_per_expert
    return dispatched


def combine_with_values(
    exchange: NodeExchange, rows: Tensor, dispatched: Dispatched, row_values: Tensor
) -> tuple[Tensor, Tensor]:
    """`NodeExchange.combine` of outputs [N, D] that also brings a value of each row, fp32 [N], contiguous, back to its
    pair. Returns y [T, D], and fp32 [T, K]: for each pair the value of its row, 0 where it has none. Collective."""
    sent = dispatched.sent
    T, K = sent.num_tokens, sent.template.shape.top_k
    pair_values = row_values.new_empty(max(T * K, 1))  # an empty tensor has no address
    if not len(row_values):
        row_values = row_values.new_empty(1)
    assert sent.descriptor is not None
    sent.descriptor = returning(sent.descriptor, row_values, pair_values)
    return exchange.combine("expert", rows, dispatched, None), pair_values[: T * K].view(T, K)
