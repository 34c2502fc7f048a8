"""One rank's part of the exchange: windows, scratch, status words and the operators' descriptors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epmoe.config import EPConfig
from epmoe.handles import RoundTemplate
from epmoe.health import STATUS, raise_on_failure, raise_on_overflow
from epmoe.memory import OFFSETS, SIZES, MemoryPlan
from epmoe.placement import Placement
from epmoe.rounds import Rounds
from epmoe.tuning import Tuning
from epmoe.window import Window

_CODE, _NEEDED_ROWS = STATUS.index("code"), STATUS.index("needed_rows")
# What the operators know of a round besides its memory, in the order of `ExchangeDescriptor` in csrc/ops_exchange.cpp.
# The address of every rank's window follows.
DESCRIPTOR = (*SIZES, *OFFSETS, "expert_major", "weight_rows", "timeout_ns", "status")
_TIMEOUT_NS = DESCRIPTOR.index("timeout_ns")


@dataclass
class Exchange:
    """The memory of one rank, laid out by the plan, and what dispatch and combine keep from round to round."""

    config: EPConfig
    plan: MemoryPlan
    window: Window
    scratch: Tensor  # uint8 [scratch_bytes]
    status: Tensor  # int64 [8], host memory that the kernels write: `epmoe.health.STATUS`
    global_ranks: list[int]
    device: torch.device
    rounds: Rounds = field(default_factory=Rounds)
    tuning: Tuning = Tuning(rows=())
    # By expert_major, weight_rows and launch; see `descriptors_for`.
    descriptors: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    # Of the calls that have passed the checks, by what rounds of a template agree in.
    templates: dict[tuple[object, ...], RoundTemplate] = field(default_factory=dict)
    memory: tuple[Tensor, Tensor] = field(init=False)  # window and scratch, as the operators take them
    views: dict[str, Tensor] = field(init=False)  # every buffer of the plan
    timeout_ns: int = field(init=False)  # of each wait in the rounds to come

    def __post_init__(self) -> None:
        capacity = self.config.capacity
        self.max_tokens = capacity.max_num_tokens_per_rank
        self.timeout_ns = round(self.config.exchange.warmup_timeout_s * 1e9)  # ranks may still load or compile
        self.raises_overflow = capacity.on_overflow == "raise"
        self.memory = self.window.local, self.scratch
        # Every call reads these words, at a hundredth of the host time that reading a tensor's element takes.
        self.status_words = (ctypes.c_int64 * len(STATUS)).from_address(self.status.data_ptr())
        regions = {"window": self.window.local, "scratch": self.scratch}
        self.views = {buffer.name: buffer.view(regions[buffer.region]) for buffer in self.plan.buffers}

    @classmethod
    def create(
        cls,
        config: EPConfig,
        plan: MemoryPlan,
        placement: Placement,
        window: Window,
        rank: int,
        global_ranks: list[int],
        device: torch.device,
    ) -> Exchange:
        """Allocate this rank's scratch and fill its tables.

        Raises ConfigError if the file that `exchange.tuning` names is missing or wrong.
        """
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
        status = torch.zeros(len(STATUS), dtype=torch.int64, pin_memory=device.type == "cuda")
        tuning = Tuning.load(config.exchange.tuning) if config.exchange.tuning else Tuning(rows=())
        exchange = cls(config, plan, window, scratch, status, global_ranks, device, tuning=tuning)
        views = exchange.views
        for name in ("state", "counts", "health.counters", "health.tokens_per_expert", "health.rows_sent"):
            views[name].zero_()
        views["table.expert_map"].copy_(placement.expert_map(rank))
        views["table.owners"].copy_(torch.tensor(placement.owners))
        views["table.copies"].copy_(placement.copies_table())
        views["table.num_copies"].copy_(placement.num_copies())
        if views["table.local_index"].numel():
            views["table.local_index"].copy_(torch.tensor(placement.local_index))
        views["table.sentinels"].copy_(torch.tensor([placement.sentinel(r) for r in range(placement.ep_size)]))
        return exchange

    def set_timeout(self, seconds: float) -> None:
        """The deadline of each wait, from the next call of an operator on."""
        self.timeout_ns = round(seconds * 1e9)
        for descriptor in self.descriptors.values():
            descriptor[_TIMEOUT_NS] = self.timeout_ns

    def check(self) -> None:
        """Raise EPTimeoutError or EPMismatchError if the kernels have left one in the status words."""
        if self.status_words[_CODE]:
            raise_on_failure(self.status, self.global_ranks)

    def check_overflow(self) -> None:
        """Raise EPOverflowError if a round needed more rows than there are, unless the config only counts them."""
        if self.status_words[_NEEDED_ROWS] and self.raises_overflow:
            raise_on_overflow(self.status, self.plan.sizes["max_rows"])

    def retune(self, tuning: Tuning) -> None:
        """Launch the kernels of the rounds to come by this table."""
        self.tuning = tuning
        self.templates.clear()

    def descriptors_for(
        self, hidden_size: int, expert_major: bool, weight_rows: bool
    ) -> tuple[list[int], list[Tensor]]:
        """Steps of tokens, as of `Tuning.steps`, and the descriptor for each.

        A descriptor is int64 in host memory: the values of `DESCRIPTOR`, then the address of each rank's window. Calls
        with the same launch and flags share one tensor.
        """
        steps, launches = self.tuning.steps(hidden_size, self.plan.sizes["R"])
        addresses = [self.status.data_ptr(), *self.window.addresses]
        keys = [(expert_major, weight_rows, *launch.values()) for launch in launches]
        with torch.inference_mode(False):  # otherwise `set_timeout` could not write it outside inference mode
            for key, launch in zip(keys, launches, strict=True):
                if key not in self.descriptors:
                    descriptor = [*self.plan.as_ints(**launch), expert_major, weight_rows, self.timeout_ns, *addresses]
                    self.descriptors[key] = torch.tensor(descriptor, dtype=torch.int64, device="cpu")
        return steps, [self.descriptors[key] for key in keys]

    def rows_as(self, name: str, dtype: torch.dtype, length: int) -> Tensor:
        """An expert-major buffer as [N_cap, length] of `dtype`: contiguous, whatever D and dtype the plan has."""
        buffer = self.views[name]
        flat = buffer.flatten().view(torch.uint8).view(dtype)
        return flat.as_strided((buffer.shape[0], length), (length, 1))

    def slabs(self, name: str, dtype: torch.dtype, length: int) -> Tensor:
        """A window buffer as [R, M, length] of `dtype`; its strides stay the plan's, whose rows may be longer."""
        slabs = self.views[name].view(torch.uint8).view(dtype)
        return slabs[..., :length]
