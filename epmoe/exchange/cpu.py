"""The CPU as a processor of exchanges. Its operators have finished all work when they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.copies import Lane, Tensors, WeightCopies
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.peek import Peek
from epmoe.exchange.places import HostMemory, Memory
from epmoe.exchange.processor import Processor, Streams
from epmoe.exchange.round_state import RoundState
from epmoe.exchange.unscheduled import NoWatch, Watch
from epmoe.group.peers import Peers
from epmoe.native import ops
from epmoe.native.layouts import struct


class Cpu(Processor):
    """The `Processor` of this machine's CPUs."""

    runs_ahead = False
    num_epochs = 1 << 32

    @classmethod
    def named(cls, config: EPConfig, device: torch.device) -> torch.device:
        """The device "cpu", also for "cpu:0": tensors of the CPU name their device so."""
        return torch.device("cpu")

    def load(self) -> None:
        # The module `ops` builds or loads the library when an operator is first looked up.
        _ = ops.dispatch

    def check(self, config: EPConfig) -> None:
        """Raises nothing: all kernels run on any CPU."""

    def plan(self, config: EPConfig, seat: int, placement: Placement, peers: Peers) -> MemoryPlan:
        return MemoryPlan.build(config, seat, placement, nvlink=False)

    def memory(self) -> Memory:
        return HostMemory()

    def shared_memory(self) -> None: ...

    def host_memory(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cpu")

    def peek(self, *buffers: Tensor) -> Peek:
        return _HostPeek(buffers)

    def lane(self, board: Tensor) -> Lane:
        return _HostLane(board)

    def weight_copies(self) -> WeightCopies:
        return HostCopies()

    def ends(self, timeout_s: float | None = None, look: Callable[[], None] = lambda: None) -> bool:
        return True

    def finish(self) -> None: ...

    def finish_stream(self) -> None: ...

    def stream(self) -> None: ...

    def streams(self, last: int | None) -> Streams:
        return []

    def captures(self, streams: Streams | None = None) -> bool:
        return False

    def progress_at(self, words: int, views: Mapping[str, Tensor]) -> int:
        """`Progress` is a part of the buffer "state", so the address `words` is not needed here."""
        offset: int = struct("RoundState").progress.offset
        return views["state"].data_ptr() + offset

    def watch(self, views: Mapping[str, Tensor]) -> Watch:
        return NoWatch()

    def mark_empty_seats(self, views: Mapping[str, Tensor], empty: list[int]) -> None:
        empty_field = struct("RoundHeader").empty.offset // 4  # as an index of int32 words
        for name in ("signal.dispatch", "signal.combine"):
            views[name].view(torch.int32)[empty, empty_field] = 1

    def memory_of_unread_y(self, rows: Tensor, nbytes: int) -> Tensor:
        """No bytes, since `abort` writes no y on the CPU."""
        return rows[:0].view(torch.uint8)

    def abort(self, rounds: RoundState, memory: tuple[Tensor, Tensor], unread_y: Tensor) -> None:
        """Open combine without rows. This one signal tells the other ranks in each state of the
        round, and the CPU has no lines to re-arm.
        """
        sent = rounds.sent
        ops.combine(sent.template.like, None, *memory, sent.descriptor)

    def turn_replays_away(self, state: Tensor, group: int) -> None:
        """Does nothing, since CPUs have no graphs that could be replayed."""


class _HostPeek(Peek):
    """A `Peek` at host memory, which is copied at once."""

    def __init__(self, buffers: tuple[Tensor, ...]) -> None:
        self._buffers = buffers

    def read_within(self, timeout_s: float) -> list[Tensor]:
        return [buffer.clone() for buffer in self._buffers]


class _HostLane(Lane):
    """A `Lane` on the CPU: each copy has ended when its call returns."""

    def __init__(self, board: Tensor) -> None:
        self._board = board

    def running(self) -> nullcontext[None]:
        return nullcontext()

    def follow(self, streams: Iterable[torch.cuda.Stream]) -> None: ...

    def words(self) -> Tensor:
        return ops.read_words(self._board).view(self._board.shape)

    def copy(self, to: Tensor, source: Tensor) -> None:
        # Weights that were loaded in inference mode cannot be written outside of it.
        with torch.inference_mode():
            to.copy_(source)

    def readable(self, source: Tensor) -> Tensor:
        return source

    def upload(self, source: Tensor) -> Tensor:
        return source

    def flush(self) -> None: ...


class HostCopies(WeightCopies):
    """`WeightCopies` within the host's memory."""

    memory = None

    def begin_thread(self) -> None: ...

    def running(self) -> nullcontext[None]:
        return nullcontext()

    def owned(self, mapped: Tensors) -> Tensors:
        return mapped

    def free(self, own: Tensors, spare: Tensors, weights: Tensors) -> Tensors:
        free = {}
        # A weight uses either its own tensor or the spare one: the other one of the two is free.
        for name, weight in weights.items():
            uses_own = own[name].data_ptr() == weight.data_ptr()
            free[name] = spare[name] if uses_own else own[name]
        return free

    def use(self, staged: Tensors, weights: Tensors) -> None:
        # No copy: the parameter takes over the memory of the staged tensor.
        for name, weight in weights.items():
            weight.data = staged[name]
