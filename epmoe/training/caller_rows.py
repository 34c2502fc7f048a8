"""Rounds of one node whose rows lie in memory of the caller's, since a backward pass reads them later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import DESCRIPTOR
from epmoe.exchange.handles import Dispatched
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import DISPATCHED
from epmoe.exchange.templates import rows_as
from epmoe.native import ops
from epmoe.native.arguments import FP8
from epmoe.native.formats import packed_row_bytes

_AT = {name: i for i, name in enumerate(DESCRIPTOR)}
_SHARE = 3 / 4  # of the multiprocessors: the rest is for kernels of NCCL that run during a round of training


class CallerRows(NamedTuple):
    """Where a round of training puts its rows: memory of the caller's, and what combine does with their weights."""

    rows: Tensor | None
    """[N, D], contiguous, whose rows past the last segment become zeros; None: the exchange's own buffer"""
    expert_offsets: Tensor
    """int32 [e + 1]"""
    tokens_per_expert: Tensor
    """int32 [e]"""
    row_weights: Tensor | None
    """fp32 [N], for the weight of each pair's row; zeros past the last segment where `rows` are given"""
    adds_only: bool
    """combine adds without weights"""
    returns_values: bool
    """combine brings a value of each pair back"""
    packed: bool
    """rows travel and arrive as `pack_fp8` makes them: fp8 [N, packed_row_bytes(D)]"""


def sms_of(device: torch.device) -> int:
    """The multiprocessors that a kernel of training may use."""
    if device.type == "cpu":
        return 1
    return max(int(torch.cuda.get_device_properties(device).multi_processor_count * _SHARE), 1)


def dispatch_into(exchange: NodeExchange, call: Call, into: CallerRows, num_sms: int) -> Dispatched:
    """`NodeExchange.dispatch` of expert-major rows into memory of the caller's, which outlives the round. Collective.

    The open round has the rows, offsets and counts of `into`. A kernel uses at most `num_sms` multiprocessors.
    """
    outer = exchange.enter()
    try:
        sent = exchange.opened(call)
        assert sent.descriptor is not None
        exchange.rows_key = "capacity.max_expert_rows, or `num_rows` in training,"
        sent.descriptor = _into_caller(exchange, sent.descriptor, into, num_sms)
        x, ids, weights, scales, tokens, num_rows, *memory, _ = sent.arguments
        if into.packed:
            x = ops.pack_fp8(x, tokens, num_rows)
        sent.arguments = x, ids, weights, scales, tokens, num_rows, *memory, sent.descriptor
        exchange.run(ops.dispatch, sent.arguments, DISPATCHED)
        dispatched = exchange.received(sent)
    finally:
        exchange.thread = outer
    if into.rows is not None:
        dispatched.rows = into.rows
    elif into.packed:
        dispatched.rows = rows_as(exchange.views["rows"], FP8, packed_row_bytes(call.x.shape[1]))
    dispatched.expert_offsets, dispatched.tokens_per_expert = into.expert_offsets, into.tokens_per_expert
    return dispatched


def combine_with_values(
    exchange: NodeExchange, rows: Tensor, dispatched: Dispatched, row_values: Tensor
) -> tuple[Tensor, Tensor]:
    """`NodeExchange.combine` that also brings a value of each row back to its pair. Collective.

    `rows` are expert-major outputs [N, D], and `row_values` fp32 [N], contiguous. Returns y [T, D], and fp32 [T, K]:
    for each pair the value of its row, 0 where it has none.
    """
    sent = dispatched.sent
    T, K = sent.num_tokens, sent.template.shape[1]
    pair_values = row_values.new_empty(max(T * K, 1))  # an empty tensor has no address
    if not len(row_values):
        row_values = row_values.new_empty(1)
    assert sent.descriptor is not None
    fields = sent.descriptor.tolist()
    fields[_AT["row_values"] : _AT["timeout_ns"]] = row_values.data_ptr(), pair_values.data_ptr()
    sent.descriptor = torch.tensor(fields, dtype=torch.int64, device="cpu")
    return exchange.combine("expert", rows, dispatched, None), pair_values[: T * K].view(T, K)


def _into_caller(exchange: NodeExchange, descriptor: Tensor, into: CallerRows, num_sms: int) -> Tensor:
    """The descriptor of a round that writes into `into`, from that of the same round without it."""
    plan, scratch = exchange.plan, exchange.memory[1].data_ptr()
    fields = descriptor.tolist()
    if into.rows is not None:
        base = exchange.window.addresses[exchange.rank] if plan["rows"].region == "window" else scratch
        fields[_AT["rows"]] = into.rows.data_ptr() - base
        fields[_AT["max_rows"]] = len(into.rows)
    fields[_AT["expert_offsets"]] = into.expert_offsets.data_ptr() - scratch
    fields[_AT["tokens_per_expert"]] = into.tokens_per_expert.data_ptr() - scratch
    fields[_AT["num_sms"]] = min(fields[_AT["num_sms"]], num_sms)
    fields[_AT["ll_alignment"]] = fields[_AT["alignment"]]  # as `Routed` has it
    fields[_AT["zero_gaps"]] = fields[_AT["alignment"]] > 1  # gradients of weights read gaps
    fields[_AT["to_caller"] : _AT["row_weights"]] = True, into.adds_only, into.returns_values, into.rows is not None
    fields[_AT["row_weights"]] = 0 if into.row_weights is None else into.row_weights.data_ptr()
    return torch.tensor(fields, dtype=torch.int64, device="cpu")
