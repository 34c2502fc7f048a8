"""The interface of processors. A processor runs the kernels of an exchange: the CPU, or a GPU.

All that differs between CPU and GPU is behind this interface, so no other code asks which of them
it has. cpu.py and gpu.py implement it, and `processor_of` in processors.py finds the processor of a
device. Windows belong to a transport (transports.py), since a processor may reach several kinds of
memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.copies import Lane, WeightCopies
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.peek import Peek
from epmoe.exchange.places import Memory
from epmoe.exchange.round_state import RoundState
from epmoe.exchange.unscheduled import Watch
from epmoe.group.peers import Peers

Streams = list[torch.cuda.Stream]


class Processor(ABC):
    """The processor of a device. It has no state of any exchange, so all exchanges share it."""

    runs_ahead: ClassVar[bool]
    """Whether the host runs ahead: a call returns before its kernels have run. Then a failure
    lasts, since later kernels are launched already when the host learns of it. Nor does the host
    know which rows have arrived.
    """
    num_epochs: ClassVar[int]
    """The number of different epochs. After so many rounds epochs begin again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # Before a group opens.

    @classmethod
    @abstractmethod
    def named(cls, config: EPConfig, device: torch.device) -> torch.device:
        """Return the device under the name that its tensors have, such as "cuda:0" for "cuda".

        Raises ValueError if there is no such device, and if the config has more ranks or experts
        than the kernels support.
        """

    @abstractmethod
    def load(self) -> None:
        """Build or load the native library now. Later, other ranks would wait meanwhile."""

    @abstractmethod
    def check(self, config: EPConfig) -> None:
        """Raise ValueError if the kernels do not fit on the device. All ranks come to the same
        result.
        """

    @abstractmethod
    def plan(self, config: EPConfig, seat: int, placement: Placement, peers: Peers) -> MemoryPlan:
        """Plan the memory of the rank in a seat. Every rank of the group calls it."""

    # Memory.

    @abstractmethod
    def memory(self) -> Memory:
        """The memory for windows and scratch on this device."""

    @abstractmethod
    def shared_memory(self) -> Memory | None:
        """Memory for weights that a trainer and a server share by a descriptor. Before it is
        unmapped, it waits until the device has done all work. None on CPUs, where processes share
        files.
        """

    @abstractmethod
    def host_memory(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Allocate a tensor [size] on the host that kernels and copy engines reach directly. Its
        values are undefined.
        """

    @abstractmethod
    def peek(self, *buffers: Tensor) -> Peek:
        """Make an object that reads these buffers on the host at any time."""

    @abstractmethod
    def lane(self, board: Tensor) -> Lane:
        """Make a lane, which copies words and bytes between windows beside the rounds.

        `board` int64 [ranks, words] is the buffer in this rank's window into which the other ranks
        write their words.
        """

    @abstractmethod
    def weight_copies(self) -> WeightCopies:
        """Make an object that copies weights beside the rounds."""

    # Work that was launched on the device.

    @abstractmethod
    def ends(self, timeout_s: float | None = None, look: Callable[[], None] = lambda: None) -> bool:
        """Wait for all work that was launched, at most for `timeout_s` seconds. Returns whether it
        has ended.

        Signal handlers can run during the wait (`interruptible`). It calls `look` once in a while,
        which may raise to end the wait.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for all work that was launched, without a limit."""

    @abstractmethod
    def finish_stream(self) -> None:
        """Wait for the work that was launched on the current stream. Signal handlers can run
        during the wait.
        """

    @abstractmethod
    def stream(self) -> torch.cuda.Stream | None:
        """The current stream; None on a device without streams."""

    @abstractmethod
    def streams(self, last: int | None) -> Streams:
        """The streams on which work of an exchange may be: the current one, since replays run
        there, and the stream with the handle `last`, if that is another one.
        """

    @abstractmethod
    def captures(self, streams: Streams | None = None) -> bool:
        """Whether any of these streams captures a graph. By default it asks the current stream."""

    # The kernels of an exchange, whose buffers are `views` by name.

    @abstractmethod
    def progress_at(self, words: int, views: Mapping[str, Tensor]) -> int:
        """The address of the struct `Progress` in host memory, which operators and kernels write.

        `words` is the address of the host memory in which kernels report (`Addresses.words`).
        """

    @abstractmethod
    def watch(self, views: Mapping[str, Tensor]) -> Watch:
        """Make an object that sees whether kernels of the exchange begin."""

    @abstractmethod
    def mark_empty_seats(self, views: Mapping[str, Tensor], empty: list[int]) -> None:
        """Write, for each empty seat, a signal that kernels find valid in every round, and that
        announces no rows.
        """

    @abstractmethod
    def memory_of_unread_y(self, rows: Tensor, nbytes: int) -> Tensor:
        """Memory for an output y that nobody reads, as uint8. `abort` needs it, since it must not
        allocate. `rows` are the expert-major rows, whose memory may serve.
        """

    @abstractmethod
    def abort(self, rounds: RoundState, memory: tuple[Tensor, Tensor], unread_y: Tensor) -> None:
        """Tell the other ranks that this rank sends no rows back in the open round.

        `memory` is window and scratch, and `unread_y` what `memory_of_unread_y` has returned.
        """

    @abstractmethod
    def turn_replays_away(self, state: Tensor, group: int) -> None:
        """Make kernels of replayed graphs do nothing from now on, and report the number `group`.

        The exchange calls it when it leaves a group. `state` is the buffer with the `RoundState`.
        """
