"""Words and bytes that a rank puts into the windows of others between rounds: no collective, and no
multiprocessor.

A word is an int64 that one rank writes and another reads. What was put before a word is there when
the word is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from epmoe.exchange.node import NodeExchange
from epmoe.exchange.peek import Peek
from epmoe.exchange.window import SharedMemoryWindow, Window
from epmoe.group.errors import EPStateError
from epmoe.native import ops
from epmoe.native.streams import HIGH, own_stream

_WORDS = "moves.words"
_IN_FLIGHT = 4096  # words on their way, at most


class Mail:
    """What one rank sends and reads in shared memory, where every call has ended when it returns.

    After `close`, and in a forked child, what sends raises EPStateError.
    """

    def __init__(self, exchange: NodeExchange) -> None:
        self._window: Window | None = exchange.window
        self._plan, self._board = exchange.plan, exchange.views[_WORDS]
        self.rank, self.size, self._seats = (
            exchange.rank,
            len(exchange.global_ranks),
            exchange.seats,
        )
        self._row = self._plan[_WORDS].offset + 8 * exchange.seat * self._board.shape[1]

    @property
    def window(self) -> Window:
        if self._window is None:
            raise EPStateError(self._why_closed)
        return self._window

    def close(self, why: str = "this ExpertParallel is closed") -> None:
        self._window = None
        self._why_closed = why

    def after_rounds(self) -> None:
        """Let what follows happen after all rounds so far."""

    def put(self, rank: int, name: str, source: Tensor, begin: int = 0) -> None:
        """Copy a contiguous tensor into a buffer of a rank's window, `begin` bytes from the start
        of the buffer.

        `source` must not change before it has arrived.
        """
        self.window.put(self._seats.of_ranks[rank], self._plan[name].offset + begin, source)

    def share(self, name: str, source: Tensor, begin: int = 0) -> None:
        source = source.contiguous().view(-1)
        for rank in range(self.size):
            self.put(rank, name, source, begin)

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        """Write this rank's word of a number into the windows of ranks."""
        window = cast(SharedMemoryWindow, self.window)
        for rank in ranks:
            window.post(self._seats.of_ranks[rank], self._row + 8 * number, value)

    def words(self) -> list[list[int]] | None:
        """[R][number of words], by writer: what has arrived. None while a GPU still reads them."""
        return self._seats.by_rank(ops.read_words(self._board).view(self._board.shape).tolist())

    def fetch(self, source: Tensor) -> Tensor:
        """A copy on the host of what `source` holds. It waits for no round, and not for the calls
        before it.
        """
        return Peek(source).read()[0]

    def flush(self) -> None:
        """Wait until what this rank has put and posted is there."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        with torch.inference_mode():  # weights that were loaded in it could not be written outside
            to.copy_(source)

    def upload(self, source: Tensor) -> Tensor:
        """A tensor of the host on the device of the rounds, which it has reached. Any thread may
        call it.
        """
        return source


class MailOnGPU(Mail):
    """A `Mail` by copy engines, whose calls run in their order on a stream of its own."""

    def __init__(self, exchange: NodeExchange) -> None:
        super().__init__(exchange)
        self._streams = exchange.streams
        device = self._board.device
        self._uploads = own_stream(device)
        self._stream = own_stream(device, HIGH)
        self._event = torch.cuda.Event()
        self._posted = torch.empty(_IN_FLIGHT, dtype=torch.int64, pin_memory=True)
        self._posts = 0
        self._read = torch.empty(self._board.shape, dtype=torch.int64, pin_memory=True)
        self._reading = False

    def after_rounds(self) -> None:
        for stream in self._streams():
            self._stream.wait_stream(stream)

    def put(self, rank: int, name: str, source: Tensor, begin: int = 0) -> None:
        _ = self.window  # in a forked child it raises, and nothing of CUDA is touched
        with torch.cuda.stream(self._stream):
            super().put(rank, name, source, begin)

    def share(self, name: str, source: Tensor, begin: int = 0) -> None:
        super().share(name, source.contiguous().pin_memory(), begin)

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        window = self.window
        place = self._posts % _IN_FLIGHT
        self._posts += 1
        self._posted[place] = value
        word = self._posted[place : place + 1]
        with torch.cuda.stream(self._stream):
            for rank in ranks:
                window.put(self._seats.of_ranks[rank], self._row + 8 * number, word)

    def words(self) -> list[list[int]] | None:
        if self._reading:
            if not self._event.query():
                return None
            self._reading = False
            return self._seats.by_rank(self._read.tolist())
        with torch.cuda.stream(self._stream):
            self._read.copy_(self._board, non_blocking=True)
            self._event.record()
        self._reading = True
        return None

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
