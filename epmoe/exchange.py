"""One rank's memory in the exchange, and which round is open: what dispatch and combine work on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epmoe.config import EPConfig
from epmoe.handles import Dispatched, Form, Sent
from epmoe.health import STATUS, raise_on_failure, raise_on_overflow
from epmoe.memory import OFFSETS, SIZES, MemoryPlan
from epmoe.placement import Placement
from epmoe.tuning import Tuning
from epmoe.window import Window

_CODE, _NEEDED_ROWS = STATUS.index("code"), STATUS.index("needed_rows")
# What the operators know of a round beside its memory, `Words` in csrc/ops_exchange.cpp; every rank's window follows.
WORDS = (*SIZES, *OFFSETS, "expert_major", "weight_rows", "timeout_ns", "status")
_TIMEOUT_NS = WORDS.index("timeout_ns")


@dataclass
class Exchange:
    """Windows, scratch and status of one rank, laid out by the plan."""

    config: EPConfig
    plan: MemoryPlan
    window: Window
    scratch: Tensor  # uint8 [scratch_bytes]
    status: Tensor  # int64 [8], host memory
    global_ranks: list[int]
    device: torch.device
    open_round: Sent | Dispatched | None = None
    rounds: int = 0
    tuning: Tuning = Tuning(rows=())
    words: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # as the operators take them; see `words_for`
    memory: tuple[Tensor, Tensor] = field(init=False)  # as the operators take it: window, scratch
    views: dict[str, Tensor] = field(init=False)
    timeout_ns: int = field(init=False)  # of this round's waits: during the first ranks may still load or compile
    forms: dict[tuple[object, ...], Form] = field(default_factory=dict)  # of the calls that have passed the checks

    def __post_init__(self) -> None:
        capacity, window = self.config.capacity, self.window
        self.max_tokens = capacity.max_num_tokens_per_rank
        self.timeout_ns = round(self.config.exchange.warmup_timeout_s * 1e9)
        self.raises_overflow = capacity.on_overflow == "raise"
        self.memory = window.local, self.scratch
        # Looked at in every call: a hundredth of what a tensor's element takes.
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
        """Allocate this rank's scratch and fill its tables."""
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
        status = torch.zeros(8, dtype=torch.int64, pin_memory=device.type == "cuda")  # the kernels write it
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

    def next_epoch(self) -> int:
        """The epoch of a round that opens now."""
        self.rounds += 1
        if self.rounds == 2:
            self.timeout_ns = round(self.config.exchange.timeout_s * 1e9)
            for words in self.words.values():
                words[_TIMEOUT_NS] = self.timeout_ns
        return self.rounds

    def check(self) -> None:
        """Raise what the kernels have left in the status word."""
        if self.status_words[_CODE]:
            raise_on_failure(self.status, self.global_ranks)

    def check_overflow(self) -> None:
        """Raise, unless the config wants it only counted, if a round needed more rows than there are."""
        if self.status_words[_NEEDED_ROWS] and self.raises_overflow:
            raise_on_overflow(self.status, self.plan.sizes["max_rows"])

    def expect(self, handle: Sent | Dispatched, call: str | None, name: str) -> None:
        """Raises ValueError where `handle` is not the open round, or that awaits another call; None is any call."""
        current = self.open_round
        if current is handle and (call is None or call in handle.awaits):
            return
        if current is None:
            first, second = ("dispatch_send", call) if call == "dispatch_recv" else ("dispatch", "combine")
            raise ValueError(f"round {handle.epoch} is closed: {first} comes before {second}")
        if handle in (current, getattr(current, "sent", None)):
            raise ValueError(f"round {current.epoch} awaits {' or '.join(current.awaits)}, got {call}")
        raise ValueError(
            f"`{name}` must be the handle of the open round {current.epoch}, got another's, of round {handle.epoch}"
        )

    def retune(self, tuning: Tuning) -> None:
        """Calls from now on are launched by another table."""
        self.tuning = tuning
        self.forms.clear()

    def words_for(self, hidden_size: int, expert_major: bool, weight_rows: bool) -> tuple[list[int], list[Tensor]]:
        """Steps of tokens, and for each, as `Tuning.steps`, what the operators know of a round beside its memory.

        That is int64 on the host: `WORDS`, then every rank's window; one tensor for each launch and both flags.
        """
        steps, launches = self.tuning.steps(hidden_size, self.plan.sizes["R"])
        addresses = [self.status.data_ptr(), *self.window.addresses]
        keys = [(expert_major, weight_rows, *launch.values()) for launch in launches]
        with torch.inference_mode(False):  # else another timeout could not be written outside inference mode
            for key, launch in zip(keys, launches, strict=True):
                if key not in self.words:
                    words = [*self.plan.as_ints(**launch), expert_major, weight_rows, self.timeout_ns, *addresses]
                    self.words[key] = torch.tensor(words, dtype=torch.int64, device="cpu")
        return steps, [self.words[key] for key in keys]

    def rows_as(self, name: str, dtype: torch.dtype, length: int) -> Tensor:
        """A scratch buffer as rows [N_cap, length] that follow one another, whatever the call's D and dtype."""
        buffer = self.views[name]
        flat = buffer.flatten().view(torch.uint8).view(dtype)
        return flat.as_strided((buffer.shape[0], length), (length, 1))

    def slabs(self, name: str, dtype: torch.dtype, length: int) -> Tensor:
        """A window buffer as [R, M, length], which may be less than the plan's; its strides stay the plan's."""
        slabs = self.views[name].view(torch.uint8).view(dtype)
        return slabs[..., :length]
