"""Words and bytes that a rank puts into the windows of other ranks between rounds. It needs no
collective, and on GPUs no multiprocessor, since copy engines do the work.

A word is an int64 that one rank writes and another rank reads. Once a reader sees a word, it also
sees all bytes that the writer has put before this word.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from epmoe.exchange.node import NodeExchange
from epmoe.exchange.window import Window
from epmoe.group.errors import EPStateError

_WORDS = "moves.words"


class Mail:
    """Sends and reads words and bytes for one rank, while rounds go on. Calls take effect in their
    order.

    After `close`, and in a forked child, methods that send raise EPStateError.
    """

    def __init__(self, exchange: NodeExchange) -> None:
        self._window: Window | None = exchange.window
        self._exchange = exchange
        self._plan = exchange.plan
        self._seats = exchange.seats
        self.rank = exchange.rank
        self.size = len(exchange.global_ranks)
        # The words that other ranks have written to this rank, [R][words], one row for each writer.
        board = exchange.views[_WORDS]
        # The offset of this rank's row in every window. A word has 8 bytes.
        self._row_offset = self._plan[_WORDS].offset + 8 * exchange.seat * board.shape[1]
        self._lane = exchange.processor.lane(board)

    @property
    def window(self) -> Window:
        """The windows of all ranks. Raises EPStateError after `close`."""
        if self._window is None:
            raise EPStateError(self._why_closed)
        return self._window

    def close(self, why: str = "this ExpertParallel is closed") -> None:
        """Let later calls that send raise EPStateError, which says `why`."""
        self._window = None
        self._why_closed = why

    def after_rounds(self) -> None:
        """Let later calls take effect only after all rounds that have been launched so far."""
        self._lane.follow(self._exchange.streams())

    def put(self, rank: int, name: str, source: Tensor, begin: int = 0) -> None:
        """Copy a contiguous tensor into the buffer `name` of a rank's window, `begin` bytes behind
        the start of the buffer.

        `source` must not change before the copy has ended.
        """
        # Ask for the window first: in a forked child this raises before it touches the GPU.
        window = self.window
        with self._lane.running():
            window.put(self._seats.of_ranks[rank], self._plan[name].offset + begin, source)

    def share(self, name: str, source: Tensor, begin: int = 0) -> None:
        """Copy a tensor of the host into the buffer `name` of all ranks' windows, as `put` does."""
        source = self._lane.readable(source.contiguous()).view(-1)
        for rank in range(self.size):
            self.put(rank, name, source, begin)

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        """Write a value as word `number` of this rank into the windows of `ranks`."""
        window = self.window
        seats = [self._seats.of_ranks[rank] for rank in ranks]
        with self._lane.running():
            window.post(seats, self._row_offset + 8 * number, value)

    def words(self) -> list[list[int]] | None:
        """The words that have arrived from each rank, by rank and number of the word. None while
        a GPU still reads them.
        """
        words = self._lane.words()
        if words is None:
            return None
        return self._seats.by_rank(words.tolist())

    def fetch(self, source: Tensor) -> Tensor:
        """Copy a tensor of this rank's window to the host. It waits neither for rounds nor for
        earlier calls of this object.
        """
        return self._exchange.processor.peek(source).read()[0]

    def flush(self) -> None:
        """Wait until all that this rank has put and posted has arrived."""
        self._lane.flush()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy a tensor on this rank's device while rounds go on, after all earlier calls."""
        self._lane.copy(to, source)

    def upload(self, source: Tensor) -> Tensor:
        """Copy a tensor of the host to the device of the rounds, and wait for this copy. Any thread
        may call it.
        """
        return self._lane.upload(source)
