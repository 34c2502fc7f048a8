"""What runs the kernels of an exchange: the CPU, or a GPU. What differs between them is here, and
nobody above asks which of them it is.

cpu.py and gpu.py have them, and `processor_of` in processors.py the one of a device. Windows are a
transport's (transports.py): a processor may reach several kinds of memory.
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
    """The processor of a device. It holds nothing of any exchange."""

    runs_ahead: ClassVar[bool]
    """whether the host runs ahead of it: a call returns before its kernels have run. Then a failure
    lasts, since later kernels are launched already, and the host does not know what has arrived.
    """
    num_epochs: ClassVar[int]
    """after which epochs begin again"""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # Before a group opens.

    @classmethod
    @abstractmethod
    def named(cls, config: EPConfig, device: torch.device) -> torch.device:
        """The device by the name that its tensors give. Raises ValueError where there is none, and
        for numbers of the config that no kernel takes.
        """

    @abstractmethod
    def load(self) -> None:
        """Build or load the native library now, not while other ranks wait."""

    @abstractmethod
    def check(self, config: EPConfig) -> None:
        """Raises ValueError, on all ranks alike, where the kernels do not fit on it."""

    @abstractmethod
    def plan(self, config: EPConfig, seat: int, placement: Placement, peers: Peers) -> MemoryPlan:
        """The memory of the rank in a seat. Collective."""

    # Memory.

    @abstractmethod
    def memory(self) -> Memory:
        """Its own memory."""

    @abstractmethod
    def shared_memory(self) -> Memory | None:
        """Memory that other processes map by its descriptor, and that is unmapped once the
        processor has done all; None where they map files.
        """

    @abstractmethod
    def host_memory(self, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """[size] on the host, which kernels reach, and which copies read and write without a
        detour. Not written yet.
        """

    @abstractmethod
    def peek(self, *buffers: Tensor) -> Peek: ...

    @abstractmethod
    def lane(self, board: Tensor) -> Lane:
        """Copies of words and bytes for the windows of a group, whose words this rank finds on
        `board`, int64 [R, n].
        """

    @abstractmethod
    def weight_copies(self) -> WeightCopies: ...

    # What was launched.

    @abstractmethod
    def ends(self, timeout_s: float | None = None, look: Callable[[], None] = lambda: None) -> bool:
        """Waits by `interruptible` for everything that has been launched. Returns whether it has
        ended.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for everything that has been launched."""

    @abstractmethod
    def finish_stream(self) -> None:
        """Wait by `interruptible` for what has been launched on the current stream."""

    @abstractmethod
    def stream(self) -> torch.cuda.Stream | None:
        """The current stream; None where there are no streams."""

    @abstractmethod
    def streams(self, last: int | None) -> Streams:
        """The current stream, where replays run, and the stream of the handle `last` if that is
        another one.
        """

    @abstractmethod
    def captures(self, streams: Streams | None = None) -> bool:
        """Whether one of these streams captures a graph, by default the current one."""

    # The kernels of an exchange, whose buffers are `views` by name.

    @abstractmethod
    def progress_at(self, words: int, views: Mapping[str, Tensor]) -> int:
        """The address of `Progress`, which the kernels keep, where `words` is that of host memory
        for them.
        """

    @abstractmethod
    def watch(self, views: Mapping[str, Tensor]) -> Watch: ...

    @abstractmethod
    def mark_empty_seats(self, views: Mapping[str, Tensor], empty: list[int]) -> None:
        """Let kernels find in each empty seat the signal of every round, of no rows."""

    @abstractmethod
    def memory_of_unread_y(self, rows: Tensor, nbytes: int) -> Tensor:
        """uint8, for `abort`, which allocates nothing. `rows` are the expert-major rows."""

    @abstractmethod
    def abort(self, rounds: RoundState, memory: tuple[Tensor, Tensor], unread_y: Tensor) -> None:
        """Tell the other ranks that this one sends nothing back in the open round."""

    @abstractmethod
    def turn_replays_away(self, state: Tensor, group: int) -> None:
        """From now on, kernels of this group in replays do nothing, and tell the host this number
        of the group.
        """
