"""One rank's part of the exchange: windows, scratch, status words and the operators' descriptors."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.config.tuning import Tuning
from epmoe.exchange.handles import RoundTemplate, Sent
from epmoe.exchange.health import (
    STATUS,
    TIMEOUT,
    TOTALS,
    EPAbortedError,
    EPTimeoutError,
    Health,
    Totals,
    raise_on_failure,
    raise_on_overflow,
)
from epmoe.exchange.memory import OFFSETS, SIZES, MemoryPlan
from epmoe.exchange.round_state import CLOSED, PROGRESS, RETURNING, Rounds, give_up
from epmoe.exchange.waiting import device_ends, interruptible
from epmoe.exchange.window import Window

_written_to: list[Exchange] = []  # exchanges whose kernels had not ended when they were closed
_CODE, _NEEDED_ROWS = STATUS.index("code"), STATUS.index("needed_rows")
_MISSING, _ABORTED, _ABORTED_EPOCH = map(STATUS.index, ("missing", "aborted", "aborted_epoch"))
# What the operators know of a round besides its memory, in the order of `ExchangeDescriptor` in csrc/ops_exchange.cpp.
# The address of every rank's window follows.
DESCRIPTOR = (*SIZES, *OFFSETS, "expert_major", "weight_rows", "timeout_ns", "status")
_TIMEOUT_NS = DESCRIPTOR.index("timeout_ns")
PROGRESS_AT = 200  # bytes: `progress` in `RoundState` of csrc/plan.h


@dataclass
class Exchange:
    """The memory of one rank, laid out by the plan, and what dispatch and combine keep from round to round."""

    config: EPConfig
    plan: MemoryPlan
    window: Window
    scratch: Tensor  # uint8 [scratch_bytes]
    status: Tensor  # int64 in host memory that the kernels write: `STATUS` in health.py; on CUDA, `PROGRESS` follows
    global_ranks: list[int]
    device: torch.device
    thread: int = 0  # the thread that is in a call, or 0
    tuning: Tuning = Tuning(rows=())
    # By expert_major, weight_rows and launch; see `descriptors_for`.
    descriptors: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    # Of the calls that have passed the checks, by what rounds of a template agree in.
    templates: dict[tuple[object, ...], RoundTemplate] = field(default_factory=dict)
    memory: tuple[Tensor, Tensor] = field(init=False)  # window and scratch, as the operators take them
    views: dict[str, Tensor] = field(init=False)  # every buffer of the plan
    timeout_ns: int = field(init=False)  # of each wait in the rounds to come
    rounds: Rounds = field(init=False)
    totals: Totals = field(init=False)
    routing: dict[str, Any] = field(init=False)  # options of `route`
    unread: Tensor = field(init=False)  # uint8, on GPUs; see `unread_y`

    def __post_init__(self) -> None:
        capacity = self.config.capacity
        self.rank = self.plan.sizes["rank"]  # in the group, as errors and `repr` name it
        self.max_tokens = capacity.max_num_tokens_per_rank
        self.timeout_ns = round(self.config.exchange.warmup_timeout_s * 1e9)  # ranks may still load or compile
        self.raises_overflow = capacity.on_overflow == "raise"
        self.raises_abort = self.config.exchange.on_abort == "raise"
        self.memory = self.window.local, self.scratch
        # Every call reads these words, at a hundredth of the host time that reading a tensor's element takes.
        self.status_words = (ctypes.c_int64 * len(STATUS)).from_address(self.status.data_ptr())
        self.routing = self.config.routing.model_dump(exclude={"nan_rows"})
        regions = {"window": self.window.local, "scratch": self.scratch}
        inside = (buffer for buffer in self.plan.buffers if buffer.region in regions)
        self.views = {buffer.name: buffer.view(regions[buffer.region]) for buffer in inside}
        self.totals = Totals(self.views)
        in_state = self.views["state"].data_ptr() + PROGRESS_AT
        behind_status = self.status.data_ptr() + 8 * len(STATUS)
        progress = in_state if self.device.type == "cpu" else behind_status
        self.rounds = Rounds((ctypes.c_int64 * len(PROGRESS)).from_address(progress))

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
        status = torch.zeros(len(STATUS) + len(PROGRESS), dtype=torch.int64, pin_memory=device.type == "cuda")
        tuning = Tuning.load(config.exchange.tuning) if config.exchange.tuning else Tuning(rows=())
        exchange = cls(config, plan, window, scratch, status, global_ranks, device, tuning=tuning)
        views = exchange.views
        if device.type == "cuda":
            y_bytes = plan.sizes["M"] * plan.sizes["D"] * config.model.torch_dtype.itemsize
            exchange.unread = views["rows"].flatten().view(torch.uint8)
            if exchange.unread.numel() < y_bytes:  # few rows, or rows of fp8
                exchange.unread = torch.empty(y_bytes, dtype=torch.uint8, device=device)
        for name in ("state", "counts", *TOTALS):
            views[name].zero_()
        views["table.expert_map"].copy_(placement.expert_map(rank))
        views["table.owners"].copy_(torch.tensor(placement.owners))
        views["table.copies"].copy_(placement.copies_table())
        views["table.num_copies"].copy_(placement.num_copies())
        if views["table.local_index"].numel():
            views["table.local_index"].copy_(torch.tensor(placement.local_index))
        views["table.sentinels"].copy_(torch.tensor([placement.sentinel(r) for r in range(placement.ep_size)]))
        return exchange

    def enter(self) -> None:
        """The start of a call, whose end, also by an exception, sets `thread` to 0.

        Raises RuntimeError during a call of another thread: both would write the same window.
        """
        caller = get_ident()
        # CPython switches threads at calls and jumps back only, of which there is none between comparing and storing.
        if self.thread and self.thread != caller:
            raise RuntimeError(
                "another thread is in a call of this ExpertParallel: one thread at a time, so order their calls"
            )
        self.thread = caller

    def set_timeout(self, seconds: float) -> None:
        """The deadline of each wait, from the next call of an operator on."""
        self.timeout_ns = round(seconds * 1e9)
        for descriptor in self.descriptors.values():
            descriptor[_TIMEOUT_NS] = self.timeout_ns

    def check(self) -> None:
        """Raise EPTimeoutError, EPMismatchError or EPOrderError if the kernels have left one in the status words."""
        if self.status_words[_CODE]:
            rank, latched = self.plan.sizes["rank"], self.device.type == "cuda"
            raise_on_failure(self.status, self.global_ranks, rank, latched, self.dead())

    def health(self, wait: bool) -> Health:
        """The counts; with `wait`, once the current stream has done what was launched on it."""
        if wait and self.device.type == "cuda":
            interruptible(torch.cuda.current_stream(self.device).synchronize)
        return self.totals.read()

    @property
    def failed(self) -> bool:
        """Whether a wait, or on a GPU a round, has failed, as far as the host knows: `resume` and `close` are left."""
        code = self.status_words[_CODE]
        return code == TIMEOUT or code != 0 and self.device.type == "cuda"

    def missing(self) -> int:
        """Ranks that this rank has missed, or that another has reported to it, as a mask. Waits for no kernel."""
        mask = self.status_words[_MISSING] if self.status_words[_CODE] == TIMEOUT else 0
        errors = self.views["signal.error"]
        with suppress(RuntimeError):  # of a GPU in distress
            if self.device.type == "cuda":
                with torch.cuda.stream(torch.cuda.Stream(self.device)):
                    errors = errors.cpu()
            for reported in errors.tolist():
                mask |= reported
        return mask

    def dead(self) -> int:
        """Ranks of this machine whose process has ended, as a mask."""
        return self.window.deaths.mask()

    def forget(self) -> None:
        """Drop what was reported of a round that was given up, so that it does not hit the next round."""
        if not self.failed:
            self.status_words[_CODE] = 0
        self.status_words[_NEEDED_ROWS] = self.status_words[_ABORTED] = 0

    def give_up(self) -> None:
        """Close the open round, whatever its state, without this rank's rows. Waits for no rank."""
        give_up(self)

    def leave(self) -> None:
        """End the waits of all other ranks at once, with an EPTimeoutError that names this rank. Waits for no rank."""
        sizes = self.plan.sizes
        if sizes["R"] > 1 and not self.failed:
            rank = sizes["rank"]
            with suppress(RuntimeError):  # of a GPU in distress: the others run into their deadline
                self.window.store(self.plan["signal.error"].offset + 8 * rank, 1 << rank)

    def wait_for_device(self, timeout_s: float | None = None) -> None:
        """On a GPU, wait for everything that has been launched on it, but no longer than until a failure is reported.

        Raises what `check` does, and EPTimeoutError also if the device does not end in time: then what was launched was
        perhaps never scheduled.
        """
        if device_ends(self.device, timeout_s, self.check):
            return
        rank, rounds = self.plan.sizes["rank"], self.rounds
        why = (
            f"did not end on this rank's own GPU within {timeout_s} s: its own kernel was not scheduled, since others "
            "hold the GPU, or it waits for ranks"
        )
        stage = "combine" if rounds.state in (CLOSED, RETURNING) else "dispatch"
        raise EPTimeoutError(stage, rounds.count, [rank], [self.global_ranks[rank]], why)

    def release(self) -> None:
        """Before the memory is freed: wait until no kernel can write to it, or keep it for the life of the process."""
        self.window.deaths.close()
        with suppress(RuntimeError):  # of a GPU in distress, and of a failed round, whose kernels end by themselves
            if device_ends(self.device, self.timeout_ns / 1e9):
                return
        _written_to.append(self)

    def unread_y(self, sent: Sent) -> Tensor:
        """A y [T, D] for a combine without rows, on a GPU: memory that exists, since an abort allocates nothing.

        It lies over the expert-major rows. A combine without rows does not read them, and other ranks write into them
        only after this rank has opened its next dispatch, a later kernel.
        """
        D, dtype = sent.template.hidden_size, sent.template.like.dtype
        return self.unread[: sent.num_tokens * D * dtype.itemsize].view(dtype).view(sent.num_tokens, D)

    def check_rounds(self) -> None:
        """Raise what makes the y of a round that has ended incomplete, unless the config only counts it.

        EPOverflowError if it needed more rows than there are, EPAbortedError if other ranks have given it up.
        """
        words = self.status_words
        if words[_NEEDED_ROWS] and self.raises_overflow:
            raise_on_overflow(self.status, self.plan.sizes["max_rows"])
        if words[_ABORTED] and self.raises_abort:
            ranks, words[_ABORTED] = self.of_group(words[_ABORTED]), 0
            raise EPAbortedError(words[_ABORTED_EPOCH], ranks)

    def of_group(self, mask: int) -> list[int]:
        """The ranks of a mask that the operators have written, numbered in the group."""
        return [rank for rank in range(self.plan.sizes["R"]) if mask >> rank & 1]

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
