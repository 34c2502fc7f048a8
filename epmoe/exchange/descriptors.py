"""Descriptors: what the operators of a round read about the exchange and the kind of the call.

A descriptor is an int64 tensor in host memory. It begins with the struct `ExchangeDescriptor` of
csrc/exchange.h, and the addresses of all windows follow.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.config.deadlines import Deadlines
from epmoe.exchange.memory import MemoryPlan, ll_tokens_of_training
from epmoe.native.layouts import struct, words


class WeightUse(NamedTuple):
    """What a round of training does with the weights of (token, expert) pairs."""

    adds_only: bool
    """whether combine adds the experts' rows without multiplying them by weights"""
    returns_values: bool
    """whether combine also brings one value of each pair back to the pair's source"""
    keeps_zeros: bool = True
    """whether pairs of weight 0 get a row, too. They need one where the weight has a gradient."""


class Descriptors:
    """The descriptors of one rank. Calls with the same flags share one descriptor.

    Args:
        plan: the memory plan of this rank.
        status: the address of the status words in host memory.
        windows: the addresses of the ranks' windows, by seat.
        deadlines: how long a wait in a round may take.
        zero_gaps: whether dispatch on GPUs fills the rows between the experts' segments with zeros.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        status: int,
        windows: list[int],
        deadlines: Deadlines,
        zero_gaps: bool,
    ) -> None:
        self._common_fields = {
            "first_timeout_ns": round(deadlines.first_s * 1e9),
            "timeout_ns": round(deadlines.later_s * 1e9),
            "status": status,
        }
        self._zero_gaps = zero_gaps
        self._plan = plan
        self._windows = windows
        self._descriptors: dict[tuple[bool, ...], Tensor] = {}
        self._training_descriptors: dict[tuple[object, ...], Tensor] = {}
        self._plan_type = struct("ExchangePlan")
        self._type = struct("ExchangeDescriptor")

    def any(self) -> Tensor:
        """Return any descriptor that exists, for a caller who needs none of its flags."""
        return next(iter(self._descriptors.values()))

    def of(self, expert_major: bool, weight_rows: bool, aligned: bool) -> Tensor:
        """Find the descriptor of calls with these flags, or make it.

        Args:
            expert_major: whether the layout of the call is "expert".
            weight_rows: whether dispatch multiplies rows by their weights.
            aligned: whether each expert's segment begins at a multiple of the alignment.

        Returns:
            The descriptor, which callers share and leave unchanged.
        """
        flags = expert_major, weight_rows, aligned
        if flags not in self._descriptors:
            zero_gaps = aligned and self._zero_gaps
            of_round = {
                "expert_major": expert_major,
                "weight_rows": weight_rows,
                "zero_gaps": zero_gaps,
            }
            # With an alignment of 1, segments follow one another without gaps.
            without_gaps = {}
            if not aligned:
                without_gaps = {"alignment": 1, "small_alignment": 1}
            plan = self._plan.as_ints(**without_gaps)
            # The fields that only rounds of training use are 0.
            of_descriptor = defaultdict(int, self._common_fields | of_round)
            fields = words("ExchangeDescriptor", of_descriptor)
            values = [*plan, *fields, *self._windows]
            self._descriptors[flags] = torch.tensor(values, dtype=torch.int64, device="cpu")
        return self._descriptors[flags]

    def of_training(self, descriptor: Tensor, weight_use: WeightUse, num_sms: int) -> Tensor:
        """Find the descriptor of rounds of training, or make it from that of other rounds.

        Args:
            descriptor: what `of` has returned for the flags of the call.
            weight_use: what the round does with the weights of pairs.
            num_sms: how many multiprocessors a kernel may take at most.

        Returns:
            The descriptor that the operator `dispatch_to_caller` takes.
        """
        key = (descriptor.data_ptr(), weight_use, num_sms)
        made = self._training_descriptors.get(key)
        if made is None:
            made = descriptor.clone()
            # Both structs view the words of the tensor, so assignments below change it.
            plan = self._plan_type.from_address(made.data_ptr())
            fields = self._type.from_address(made.data_ptr())
            plan.num_sms = min(plan.num_sms, num_sms)
            plan.ll_max_tokens = ll_tokens_of_training(plan.ll_max_tokens)
            # Segments of training have one alignment, however few tokens a call brings.
            plan.small_alignment = plan.alignment
            # The GEMMs for gradients of weights read the rows of gaps, too.
            fields.zero_gaps = plan.alignment > 1
            fields.to_caller = True
            fields.keeps_zeros = weight_use.keeps_zeros
            fields.adds_only = weight_use.adds_only
            fields.returns_values = weight_use.returns_values
            self._training_descriptors[key] = made
        return made

    def return_values(self, descriptor: Tensor, row_values: Tensor, pair_values: Tensor) -> None:
        """Write into the descriptor of a round of training which values combine brings back.

        Args:
            descriptor: changed in place.
            row_values: fp32 [N], a value of each expert-major row on this rank.
            pair_values: fp32 [T, K], where combine writes the values of this rank's pairs.
        """
        fields = self._type.from_address(descriptor.data_ptr())
        fields.row_values = row_values.data_ptr()
        fields.pair_values = pair_values.data_ptr()
