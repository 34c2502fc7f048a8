"""What the operators know of a round besides its memory: descriptors, int64 in host memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.config.tuning import Tuning
from epmoe.exchange.memory import OFFSETS, SIZES, MemoryPlan
from epmoe.native.formats import WireFormat

# In the order of `ExchangeDescriptor` in csrc/ops_exchange.cpp. The address of every rank's window follows.
DESCRIPTOR = (
    *SIZES, *OFFSETS, "expert_major", "weight_rows", "zero_gaps", "to_caller", "adds_only", "returns_values",
    "zero_tail", "row_weights", "row_values", "pair_values", "timeout_ns", "status",
)  # fmt: skip
_AT = {name: i for i, name in enumerate(DESCRIPTOR)}
_TIMEOUT_NS = _AT["timeout_ns"]
_NO_TRAINING = (0,) * 7  # from "to_caller" to "pair_values"


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
    wire: WireFormat
    """in which rows travel and arrive: a row of `rows` has its `row_items`"""


class Descriptors:
    """The descriptors of one rank. Calls with the same launch and flags share one.

    Args:
        plan: of the rank.
        status: address of the status words.
        windows: the address of each rank's window.
        timeout_s: deadline of each wait, in seconds.
        tuning: the launches of the kernels.
        zero_gaps: whether dispatch zeroes the rows between segments, on GPUs.
    """

    def __init__(
        self, plan: MemoryPlan, status: int, windows: list[int], timeout_s: float, tuning: Tuning, zero_gaps: bool
    ) -> None:
        self.tuning, self.timeout_s, self._zero_gaps = tuning, timeout_s, zero_gaps
        self._plan, self._addresses = plan, [status, *windows]
        self._made: dict[tuple[int, ...], Tensor] = {}

    def set_timeout(self, seconds: float) -> None:
        """The deadline of each wait, from the next call of an operator on."""
        self.timeout_s = seconds
        for descriptor in self._made.values():
            descriptor[_TIMEOUT_NS] = round(seconds * 1e9)

    def any(self) -> Tensor:
        """One of those made so far."""
        return next(iter(self._made.values()))

    def of(
        self, hidden_size: int, expert_major: bool, weight_rows: bool, aligned: bool
    ) -> tuple[list[int], list[Tensor]]:
        """Steps of tokens, as of `Tuning.steps`, and the descriptor for each."""
        steps, launches = self.tuning.steps(hidden_size, self._plan.sizes["R"])
        flags = expert_major, weight_rows, aligned and self._zero_gaps
        if not aligned:
            launches = [launch | {"alignment": 1, "ll_alignment": 1} for launch in launches]
        keys = [(*flags, aligned, *launch.values()) for launch in launches]
        with torch.inference_mode(False):  # otherwise `set_timeout` could not write it outside inference mode
            for key, launch in zip(keys, launches, strict=True):
                if key not in self._made:
                    plan, timeout_ns = self._plan.as_ints(**launch), round(self.timeout_s * 1e9)
                    values = [*plan, *flags, *_NO_TRAINING, timeout_ns, *self._addresses]
                    self._made[key] = torch.tensor(values, dtype=torch.int64, device="cpu")
        return steps, [self._made[key] for key in keys]

    def for_training(self, descriptor: Tensor, into: CallerRows, scratch: int, num_sms: int) -> Tensor:
        """A descriptor of one round, which writes into the caller's memory.

        Args:
            descriptor: of the round.
            into: the memory, which must live until the round is closed.
            scratch: address of this rank's scratch.
            num_sms: multiprocessors that a kernel may use, at most.

        Returns:
            The descriptor of the round's calls.
        """
        fields, window = descriptor.tolist(), self._addresses[1 + self._plan.sizes["rank"]]
        if into.rows is not None:
            base = window if self._plan["rows"].region == "window" else scratch
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


def returning(descriptor: Tensor, row_values: Tensor, pair_values: Tensor) -> Tensor:
    """The descriptor of a combine that also brings values back.

    Args:
        descriptor: of the round.
        row_values: fp32 [N], for each row what goes back to its pair.
        pair_values: fp32 [T, K], which combine writes.

    Returns:
        The descriptor of the call of combine.
    """
    fields = descriptor.tolist()
    fields[_AT["row_values"] : _AT["timeout_ns"]] = row_values.data_ptr(), pair_values.data_ptr()
    return torch.tensor(fields, dtype=torch.int64, device="cpu")
