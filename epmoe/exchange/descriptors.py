"""Descriptors: int64 in host memory, an `ExchangeDescriptor` of csrc/exchange.h and the addresses
of all windows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.config.deadlines import Deadlines
from epmoe.exchange.memory import MemoryPlan
from epmoe.native.formats import WireFormat
from epmoe.native.layouts import struct, words


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


class Way(NamedTuple):
    """What a round of training does with weights."""

    adds_only: bool
    """combine adds without weights"""
    returns_values: bool
    """combine brings a value of each pair back"""
    keeps_zeros: bool = True
    """pairs of weight 0 have a row, too, since their weight has a gradient"""


class CallerRows(NamedTuple):
    """Where a round of training puts its rows: memory of the caller's, and what combine does with
    their weights.
    """

    rows: Tensor | None
    """[N, D], contiguous, whose rows past the last segment become zeros; None: the exchange's own
    buffer
    """
    expert_offsets: Tensor
    """int32 [e + 1]"""
    tokens_per_expert: Tensor
    """int32 [e]"""
    row_weights: Tensor | None
    """fp32 [N], for the weight of each pair's row; zeros past the last segment where `rows` are
    given
    """
    way: Way
    wire: WireFormat
    """in which rows travel and arrive: a row of `rows` has its `row_items`"""
    multiplies: Multiplied | None
    """None: rows arrive as they were sent"""


class Descriptors:
    """The descriptors of one rank. Calls with the same flags share one.

    `status` is the address of the status words, `windows` those of the ranks' windows. `zero_gaps`:
    on GPUs dispatch zeroes the rows between segments.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        status: int,
        windows: list[int],
        deadlines: Deadlines,
        zero_gaps: bool,
    ) -> None:
        self._of_all = {
            "first_timeout_ns": round(deadlines.first_s * 1e9),
            "timeout_ns": round(deadlines.later_s * 1e9),
            "status": status,
        }
        self._zero_gaps = zero_gaps
        self._plan = plan
        self._windows = windows
        self._rows_in_window = plan["rows"].region == "window"
        self._made: dict[tuple[bool, ...], Tensor] = {}
        self._of_training: dict[tuple[object, ...], Tensor] = {}
        self._plan_type = struct("ExchangePlan")
        self._type = struct("ExchangeDescriptor")

    def any(self) -> Tensor:
        """One of those that calls have had."""
        return next(iter(self._made.values()))

    def of(self, expert_major: bool, weight_rows: bool, aligned: bool) -> Tensor:
        """The descriptor of calls with these flags. `aligned`: each expert's segment begins at a
        multiple of the alignment.
        """
        flags = expert_major, weight_rows, aligned
        if flags not in self._made:
            zero_gaps = aligned and self._zero_gaps
            of_round = {
                "expert_major": expert_major,
                "weight_rows": weight_rows,
                "zero_gaps": zero_gaps,
            }
            # Without gaps, every row is a multiple.
            without_gaps = {}
            if not aligned:
                without_gaps = {"alignment": 1, "small_alignment": 1}
            plan = self._plan.as_ints(**without_gaps)
            # Fields of training are 0.
            fields = words("ExchangeDescriptor", defaultdict(int, self._of_all | of_round))
            values = [*plan, *fields, *self._windows]
            self._made[flags] = torch.tensor(values, dtype=torch.int64, device="cpu")
        return self._made[flags]

    def for_training(
        self, descriptor: Tensor, into: CallerRows, scratch: int, num_sms: int
    ) -> Tensor:
        """The descriptor of a round like `descriptor`, which writes into the caller's memory.

        `into` must live until the round is closed. `scratch` is the address of this rank's scratch,
        and `num_sms` the most multiprocessors of a kernel.
        """
        rows = into.rows
        key = (descriptor.data_ptr(), into.way, rows is not None, num_sms)
        prepared = self._of_training.get(key)
        if prepared is None:
            prepared = self._prepared(descriptor, into.way, rows is not None, num_sms)
            self._of_training[key] = prepared
        made = prepared.clone()
        address = made.data_ptr()
        plan = self._plan_type.from_address(address)
        fields = self._type.from_address(address)

        # Where rows go: offsets from the start of the region in which the plan has the buffer.
        if rows is not None:
            region = self._windows[plan.rank] if self._rows_in_window else scratch
            plan.rows = rows.data_ptr() - region
            plan.max_rows = rows.shape[0]
        plan.expert_offsets = into.expert_offsets.data_ptr() - scratch
        plan.tokens_per_expert = into.tokens_per_expert.data_ptr() - scratch
        if into.row_weights is not None:
            fields.row_weights = into.row_weights.data_ptr()
        if into.multiplies is not None:
            outputs, products = into.multiplies
            fields.outputs = outputs.data_ptr()
            fields.outputs_stride_bytes = outputs.stride(0) * outputs.itemsize
            fields.products = products.data_ptr()
        return made

    def _prepared(self, descriptor: Tensor, way: Way, has_rows: bool, num_sms: int) -> Tensor:
        """What rounds of training that do the same with weights have in common."""
        made = descriptor.clone()
        plan = self._plan_type.from_address(made.data_ptr())
        fields = self._type.from_address(made.data_ptr())
        plan.num_sms = min(plan.num_sms, num_sms)
        plan.small_alignment = plan.alignment  # as `Routed` has it
        fields.zero_gaps = plan.alignment > 1  # gradients of weights read gaps
        fields.to_caller = True
        fields.keeps_zeros = way.keeps_zeros
        fields.adds_only = way.adds_only
        fields.returns_values = way.returns_values
        fields.zero_tail = has_rows
        fields.row_weights = 0
        return made

    def return_values(self, descriptor: Tensor, row_values: Tensor, pair_values: Tensor) -> None:
        """Let a combine by a descriptor `for_training` bring values back, too: `row_values` fp32
        [N] to `pair_values` fp32 [T, K].
        """
        fields = self._type.from_address(descriptor.data_ptr())
        fields.row_values = row_values.data_ptr()
        fields.pair_values = pair_values.data_ptr()
