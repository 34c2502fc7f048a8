"""What the operators know of a round besides its memory: descriptors, int64 in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.config.tuning import Tuning
from epmoe.exchange.memory import OFFSETS, SIZES, MemoryPlan

# In the order of `ExchangeDescriptor` in csrc/ops_exchange.cpp. The address of every rank's window follows.
DESCRIPTOR = (
    *SIZES, *OFFSETS, "expert_major", "weight_rows", "zero_gaps", "to_caller", "adds_only", "returns_values",
    "zero_tail", "row_weights", "row_values", "pair_values", "timeout_ns", "status",
)  # fmt: skip
_TIMEOUT_NS = DESCRIPTOR.index("timeout_ns")
_NO_TRAINING = (0,) * 7  # from "to_caller" to "pair_values"


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
        self, hidden_size: int, expert_major: bool, apply_router_weight_on_input: bool, aligned: bool
    ) -> tuple[list[int], list[Tensor]]:
        """Steps of tokens, as of `Tuning.steps`, and the descriptor for each."""
        steps, launches = self.tuning.steps(hidden_size, self._plan.sizes["R"])
        flags = expert_major, apply_router_weight_on_input, aligned and self._zero_gaps
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
