"""A GPU as a processor of exchanges.

The host runs ahead of the GPU: a call returns before its kernels have run. What the host has to
read or write meanwhile, it copies on streams of its own by the copy engines, which wait for no
kernel.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.copies import Lane, Tensors, WeightCopies
from epmoe.exchange.gpu_memory import GpuMemory
from epmoe.exchange.handles import Sent
from epmoe.exchange.launch_policy import shared_bytes_needed
from epmoe.exchange.links import agree_on_lines
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.peek import Peek
from epmoe.exchange.places import Memory
from epmoe.exchange.processor import Processor, Streams
from epmoe.exchange.round_state import DISPATCHED, RETURNING, SENT, RoundState
from epmoe.exchange.unscheduled import Watch, WatchOfGpu
from epmoe.group.peers import Peers
from epmoe.group.waiting import first_answer, interruptible
from epmoe.native import ops
from epmoe.native.captures import relaxed
from epmoe.native.layouts import constant, struct
from epmoe.native.streams import HIGH, own_stream

# The time between two looks whether copies of weights have ended.
_POLL_INTERVAL_S = 2e-4
# After so long the host gives up waiting for copies of weights, or for the whole GPU.
_LATE_S = 60.0


class Gpu(Processor):
    """The `Processor` of one GPU."""

    runs_ahead = True
    # See `next_epoch` in csrc/cuda.
    num_epochs = (1 << 32) - 4

    @classmethod
    def named(cls, config: EPConfig, device: torch.device) -> torch.device:
        _check_limits(config)
        if not torch.cuda.is_available():
            raise ValueError(
                "torch finds no GPU here: `device` must be cpu, and exchange.transport "
                "shared_memory or auto"
            )
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def load(self) -> None:
        _ = ops.dispatch
        ops.load_cuda()

    def check(self, config: EPConfig) -> None:
        """Check that a block may have the shared memory that the kernels need."""
        # Ranks own different numbers of experts: the one that needs most counts.
        placement = config.seated.place_experts()
        needed = 0
        for rank in range(placement.ep_size):
            plan = MemoryPlan.build(config, rank, placement, nvlink=True)
            needed = max(needed, shared_bytes_needed(plan))
        # `Any`, since torch's type stubs lack some properties.
        properties: Any = torch.cuda.get_device_properties(self.device)
        available = properties.shared_memory_per_block_optin
        if needed > available:
            raise ValueError(
                f"`device` gives a block at most {available >> 10} KiB of shared memory, but the "
                f"exchange of {placement.num_physical_experts} physical experts over "
                f"{placement.ep_size} ranks needs {-(-needed >> 10)}: take fewer experts, or a GPU "
                "as large as A100 or H100"
            )

    def plan(self, config: EPConfig, seat: int, placement: Placement, peers: Peers) -> MemoryPlan:
        lines = agree_on_lines(peers, self.device, config.topology.ranks_here)
        return MemoryPlan.build(config, seat, placement, nvlink=True, lines=lines)

    def memory(self) -> Memory:
        return GpuMemory(self.device)

    def shared_memory(self) -> Memory:
        return GpuMemory(self.device, self._finish_in_time)

    def host_memory(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)

    def peek(self, *buffers: Tensor) -> Peek:
        return GpuPeek(buffers)

    def lane(self, board: Tensor) -> Lane:
        return GpuLane(board)

    def weight_copies(self) -> WeightCopies:
        return GpuCopies(self.device)

    def ends(self, timeout_s: float | None = None, look: Callable[[], None] = lambda: None) -> bool:
        return interruptible(self.finish, timeout_s, look)

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def finish_stream(self) -> None:
        stream = torch.cuda.current_stream(self.device)

        def wait() -> None:
            # Another thread may capture a graph.
            with relaxed():
                stream.synchronize()

        interruptible(wait)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def streams(self, last: int | None) -> Streams:
        current = torch.cuda.current_stream(self.device)
        if last is None or last == current.cuda_stream:
            return [current]
        if last == 0:
            return [current, torch.cuda.default_stream(self.device)]
        return [current, torch.cuda.ExternalStream(last, self.device)]

    def captures(self, streams: Streams | None = None) -> bool:
        if streams is None:
            return torch.cuda.is_current_stream_capturing()
        for stream in streams:
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    return True
        return False

    def progress_at(self, words: int, views: Mapping[str, Tensor]) -> int:
        """`Progress` follows the status words in the host memory at `words`."""
        return words + ctypes.sizeof(struct("Status"))

    def watch(self, views: Mapping[str, Tensor]) -> Watch:
        return WatchOfGpu(views)

    def mark_empty_seats(self, views: Mapping[str, Tensor], empty: list[int]) -> None:
        """Write a signal for each seat without a rank. Every round finds it valid."""
        # Words of 8 bytes: an epoch in the low half, which each round takes for its own, and a
        # value in the high half.
        epoch = constant("kEmptySeat")
        # No rows: in dispatch by the LL protocol, and in combine of a rank that aborts nothing.
        no_rows = epoch | 1 << 32
        # A shape that agrees with every call. Its highest bit is set, so the int64 is negative.
        any_shape = (epoch | constant("kEmptySeatShape") << 32) - (1 << 64)

        # Pairs of each expert: none. The first words are the rows, the shape and the tokens of the
        # call.
        counts = views["recv.counts"]
        counts[empty] = epoch
        counts[empty, 0] = no_rows
        counts[empty, 1] = any_shape
        views["signal.combine"].view(torch.int64)[empty, 0] = no_rows

    def memory_of_unread_y(self, rows: Tensor, nbytes: int) -> Tensor:
        """The memory of the expert-major rows if it has `nbytes` bytes, otherwise new memory."""
        row_bytes = rows.flatten().view(torch.uint8)
        if row_bytes.numel() >= nbytes:
            return row_bytes
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def abort(self, rounds: RoundState, memory: tuple[Tensor, Tensor], unread_y: Tensor) -> None:
        """Launch the phases that are left of the open round, without rows of this rank.

        The launch itself waits for no rank. The receive phases must run, too: lines of the LL
        protocol that other ranks send have to be re-armed for the next round.
        """
        sent = rounds.sent
        if rounds.state == SENT:
            ops.dispatch_recv(*sent.operands, *memory, sent.descriptor)
        if rounds.state == DISPATCHED:
            ops.combine(_unread_y(sent, unread_y), None, *memory, sent.descriptor)
        elif rounds.state == RETURNING:
            ops.combine_recv(rounds.y, None, *memory, sent.descriptor)

    def turn_replays_away(self, state: Tensor, group: int) -> None:
        # Kernels do nothing in a latched state. Its failure tells the host which group it was.
        latched = struct("RoundState")()
        latched.latched = 1
        failure = struct("Status").from_buffer(latched, struct("RoundState").failure.offset)
        failure.code = constant("kOutdated")
        failure.epoch = group
        state.copy_(torch.frombuffer(latched, dtype=torch.int32))
        self.finish()

    def _finish_in_time(self) -> None:
        """Wait until the GPU has done all work. Raises TimeoutError after `_LATE_S` seconds."""
        if not self.ends(_LATE_S):
            raise TimeoutError(
                f"{self.device} has not done within {_LATE_S} s what was launched on it"
            )


def _check_limits(config: EPConfig) -> None:
    """Raise ValueError if the config has more ranks or experts than the kernels support. The error
    names the key that the user has set.
    """
    ranks = "`topology.max_ranks`" if config.topology.max_ranks else "`topology.ep_size`"
    experts = "`model.num_experts` with copies"
    if config.placement.live:
        experts = "`placement.slots_per_rank` of all seats"
    limits = (
        (ranks, config.seated.topology.ranks_here, 32),
        ("`model.num_experts_per_tok`", config.model.num_experts_per_tok, 32),
        (experts, config.seated.num_physical_experts, 4096),
    )
    for what, value, most in limits:
        if value > most:
            raise ValueError(f"{what} must be at most {most} on GPUs, got {value}")


def _unread_y(sent: Sent, memory: Tensor) -> Tensor:
    """View `memory` as the output y [T, D] of a combine without rows. Nobody reads this y.

    An abort must work after any error, so it allocates nothing, and y takes the memory of the
    expert-major rows. That is safe: a combine without rows does not read them. Other ranks write
    into them only after this rank has opened its next dispatch, which is a later kernel.
    """
    T = sent.num_tokens
    D = sent.template.shape.hidden_size
    dtype = sent.template.dtype
    return memory[: T * D * dtype.itemsize].view(dtype).view(T, D)


@cache
def peek_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which every `GpuPeek` of a device copies.

    It is one stream for all buffers, since the driver has few hardware queues, and a copy may wait
    in its queue behind a kernel of another stream. Its priority is high: streams of models rarely
    have this priority, and so they rarely share its queue.
    """
    return own_stream(device, HIGH)


class GpuPeek(Peek):
    """A `Peek` by copy engines, on a stream on which no kernel runs."""

    def __init__(self, buffers: tuple[Tensor, ...]) -> None:
        self._buffers = buffers
        self._stream = peek_stream(buffers[0].device)
        self._event = torch.cuda.Event()
        self._lock = RLock()
        # Whether a copy was started whose reader gave up before it came.
        self._under_way = False
        # These tensors must not be inference tensors: reads outside of inference mode write them.
        with torch.inference_mode(False):
            self._copies = [
                torch.empty_like(buffer, device="cpu", pin_memory=True) for buffer in buffers
            ]

    def read_within(self, timeout_s: float) -> list[Tensor] | None:
        until_s = time.monotonic() + timeout_s
        # Another thread may capture a graph.
        with self._lock, relaxed():
            # An earlier copy still writes the same host memory: wait for it first.
            if self._under_way and not self._has_come(until_s):
                return None
            with torch.cuda.stream(self._stream):
                for copy, buffer in zip(self._copies, self._buffers, strict=True):
                    copy.copy_(buffer, non_blocking=True)
                self._event.record()
            self._under_way = True
            if not self._has_come(until_s):
                return None
            return [copy.clone() for copy in self._copies]

    def _has_come(self, until_s: float) -> bool:
        """Wait for the copy until `until_s` at most. Returns whether it is here."""
        if until_s == math.inf:
            self._event.synchronize()
        self._under_way = not first_answer(self._event.query, until_s)
        return not self._under_way


class GpuLane(Lane):
    """A `Lane` by copy engines, on a stream of its own."""

    def __init__(self, board: Tensor) -> None:
        self._board = board
        self._uploads = own_stream(board.device)
        self._stream = own_stream(board.device, HIGH)
        self._event = torch.cuda.Event()
        # The board on the host, and whether a copy of it is on its way.
        self._read = torch.empty(board.shape, dtype=torch.int64, pin_memory=True)
        self._reading = False

    def running(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._stream)

    def follow(self, streams: Iterable[torch.cuda.Stream]) -> None:
        for stream in streams:
            self._stream.wait_stream(stream)

    def words(self) -> Tensor | None:
        # One call starts the copy. A later call finds it, and the call after that starts the next.
        if self._reading:
            if not self._event.query():
                return None
            self._reading = False
            return self._read
        with torch.cuda.stream(self._stream):
            self._read.copy_(self._board, non_blocking=True)
            self._event.record()
        self._reading = True
        return None

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def readable(self, source: Tensor) -> Tensor:
        return source.pin_memory()

    def upload(self, source: Tensor) -> Tensor:
        with torch.cuda.device(self._uploads.device), torch.cuda.stream(self._uploads):
            on_device = source.pin_memory().to(self._uploads.device, non_blocking=True)
            self._uploads.synchronize()
        return on_device

    def flush(self) -> None:
        self._stream.synchronize()


class GpuCopies(WeightCopies):
    """`WeightCopies` on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)
        self._end = torch.cuda.Event()
        memory = GpuMemory(device, self._await_end, for_all=False)
        self.memory = memory
        self._relax_captures = memory.relax_captures

    def begin_thread(self) -> None:
        self._relax_captures()

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._end.record()
            self._await_end()

    def owned(self, mapped: Tensors) -> Tensors:
        # Allocate on the caller's stream, to which the tensors then belong. They must not be
        # inference tensors, which could not be written outside of inference mode.
        with torch.inference_mode(False):
            owned = {name: torch.empty_like(value) for name, value in mapped.items()}
        with self.running():
            for name, value in owned.items():
                value.copy_(mapped[name])
        return owned

    def free(self, own: Tensors, spare: Tensors, weights: Tensors) -> Tensors:
        # The model always uses its own tensors, since `use` copies into them.
        return spare

    @torch.inference_mode()
    def use(self, staged: Tensors, weights: Tensors) -> None:
        """Copy the staged values into the weights. The weights keep their memory, since CUDA graphs
        hold its addresses.
        """
        for name, weight in weights.items():
            weight.copy_(staged[name])

    def _await_end(self) -> None:
        if not first_answer(self._end.query, time.monotonic() + _LATE_S, _POLL_INTERVAL_S):
            raise TimeoutError(f"copies of weights have not ended within {_LATE_S} s")
