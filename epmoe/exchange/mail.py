"""Words and bytes that a rank puts into the windows of others beside the rounds: no collective, and no multiprocessor.

A word is an int64 that one rank writes and another reads. What was put before a word is there when the word is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.window import SharedMemoryWindow, Window
from epmoe.group.errors import EPStateError
from epmoe.native import ops

_WORDS = "moves.words"
_IN_FLIGHT = 4096  # words on their way, at most


class Mail(Protocol):
    """What one rank sends and reads. On a GPU all of it runs on a stream of its own, in the order of the calls."""

    def after_rounds(self) -> None:
        """What follows happens after all rounds so far."""

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        """As `Window.put`. `source` must not change before it has arrived."""

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        """Write this rank's word of a number into the windows of ranks."""

    def words(self) -> list[list[int]] | None:
        """[R][MOVE_WORDS], by writer: what has arrived. None while they are being read."""

    def fetch(self, source: Tensor) -> Tensor:
        """A copy on the host, of now. It waits for no round, and not for the calls before it."""

    def flush(self) -> None:
        """Wait until what this rank has put and posted is there."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy within this rank."""

    def upload(self, source: Tensor) -> Tensor:
        """A tensor of the host on the device of the rounds, which it has reached. Any thread may call it."""


_W = TypeVar("_W", bound=Window)


class _Sender(Generic[_W]):
    """Puts into windows until it is closed, or, in a forked child, disowned: then that raises EPStateError."""

    def __init__(self, window: _W) -> None:
        self._window: _W | None = window
        _senders.add(self)

    def close(self, why: str = "this ExpertParallel is closed") -> None:
        self._window, self._why = None, why

    @property
    def window(self) -> _W:
        if self._window is None:
            raise EPStateError(self._why)
        return self._window


_senders: WeakSet[_Sender[Any]] = WeakSet()


def _disown_all() -> None:
    """In a forked child. What the parent's threads use is not destroyed."""
    for sender in list(_senders):
        for kept in (sender, sender._window):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        sender.close(f"the ExpertParallel belongs to process {os.getppid()}, of which this process is a fork")


os.register_at_fork(after_in_child=_disown_all)


class MailOnCPU(_Sender[SharedMemoryWindow]):
    """`Mail` in shared memory, where every call has ended when it returns."""

    def __init__(self, window: SharedMemoryWindow, plan: MemoryPlan, views: dict[str, Tensor]) -> None:
        super().__init__(window)
        self._views, self._rank = views, plan.sizes["rank"]
        self._words = plan[_WORDS]

    def after_rounds(self) -> None:
        pass

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        self.window.put(rank, offset, source)

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.window.post(rank, _place(self._words.offset, self._words.shape[1], self._rank, number), value)

    def words(self) -> list[list[int]] | None:
        return ops.read_words(self._views[_WORDS]).view(self._words.shape).tolist()

    def fetch(self, source: Tensor) -> Tensor:
        return source.clone()

    def flush(self) -> None:
        pass

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.inference_mode():  # weights that were loaded in it could not be written outside
            to.copy_(source)

    def upload(self, source: Tensor) -> Tensor:
        return source


class MailOnGPU(_Sender[Window]):
    """`Mail` by copy engines, on a stream of its own. `streams` returns those of the rounds so far."""

    def __init__(
        self,
        window: Window,
        plan: MemoryPlan,
        views: dict[str, Tensor],
        streams: Callable[[], Iterable[torch.cuda.Stream]],
    ) -> None:
        super().__init__(window)
        self._views, self._rank, self._streams = views, plan.sizes["rank"], streams
        self._words = plan[_WORDS]
        device = views[_WORDS].device
        self._uploads, self._fetches = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
        self._stream, self._event = torch.cuda.Stream(device, priority=-1), torch.cuda.Event()
        self._posted, self._posts = torch.empty(_IN_FLIGHT, dtype=torch.int64, pin_memory=True), 0
        self._read = torch.empty(self._words.shape, dtype=torch.int64, pin_memory=True)
        self._reading = False

    def after_rounds(self) -> None:
        for stream in self._streams():
            self._stream.wait_stream(stream)

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        window = self.window
        with torch.cuda.stream(self._stream):
            window.put(rank, offset, source)

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        place = self._posts % _IN_FLIGHT
        self._posts += 1
        self._posted[place] = value
        word = self._posted[place : place + 1]
        for rank in ranks:
            self.put(rank, _place(self._words.offset, self._words.shape[1], self._rank, number), word)

    def words(self) -> list[list[int]] | None:
        if self._reading:
            if not self._event.query():
                return None
            self._reading = False
            return self._read.tolist()
        with torch.cuda.stream(self._stream):
            self._read.copy_(self._views[_WORDS], non_blocking=True)
            self._event.record()
        self._reading = True
        return None

    def fetch(self, source: Tensor) -> Tensor:
        with torch.cuda.stream(self._fetches):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
            self._fetches.synchronize()
        return host

    def flush(self) -> None:
        self._stream.synchronize()

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def upload(self, source: Tensor) -> Tensor:
        with torch.cuda.device(self._uploads.device), torch.cuda.stream(self._uploads):
            on_device = source.pin_memory().to(self._uploads.device, non_blocking=True)
            self._uploads.synchronize()
        return on_device


def _place(offset: int, num_words: int, rank: int, number: int) -> int:
    return offset + 8 * (rank * num_words + number)
