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
from epmoe.native.layouts import struct, words


class WeightUse(NamedTuple):
    """What a round of training does with the weights of pairs."""

    adds_only: bool
    """combine adds without weights"""
    returns_values: bool
    """combine brings a value of each pair back"""
    keeps_zeros: bool = True
    """pairs of weight 0 have a row, too, since their weight has a gradient"""


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
        self._made: dict[tuple[bool, ...], Tensor] = {}
        self._of_training: dict[tuple[object, ...], Tensor] = {}
        self._plan_type = struct("ExchangePlan")
        self._type = struct("ExchangeDescriptor")

    def any(self) -> Tensor:
        """The descriptor of some call so far."""
        return next(iter(self._made.values()))

    def of(self, expert_major: bool, weight_rows: bool, aligned: bool) -> Tensor:
        """Make, or find, the descriptor of calls with these flags. `aligned`: each expert's segment
        begins at a multiple of the alignment.
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

    def of_training(self, descriptor: Tensor, weight_use: WeightUse, num_sms: int) -> Tensor:
        """Make, or find, the descriptor of rounds of training like `descriptor`, for
        `dispatch_to_caller`. `num_sms`: the most multiprocessors of a kernel.
        """
        key = (descriptor.data_ptr(), weight_use, num_sms)
        made = self._of_training.get(key)
        if made is None:
            made = descriptor.clone()
            plan = self._plan_type.from_address(made.data_ptr())
            fields = self._type.from_address(made.data_ptr())
            plan.num_sms = min(plan.num_sms, num_sms)
            plan.small_alignment = plan.alignment  # as `Routed` has it
            fields.zero_gaps = plan.alignment > 1  # gradients of weights read gaps
            fields.to_caller = True
            fields.keeps_zeros = weight_use.keeps_zeros
            fields.adds_only = weight_use.adds_only
            fields.returns_values = weight_use.returns_values
            self._of_training[key] = made
        return made

    def return_values(self, descriptor: Tensor, row_values: Tensor, pair_values: Tensor) -> None:
        """Let combine by the descriptor of a round of training bring values back: `row_values` fp32
        [N] to `pair_values` fp32 [T, K].
        """
        fields = self._type.from_address(descriptor.data_ptr())
        fields.row_values = row_values.data_ptr()
        fields.pair_values = pair_values.data_ptr()
