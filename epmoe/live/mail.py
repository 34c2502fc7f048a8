"""Words and bytes that a rank puts into the windows of others between rounds: no collective, and no
multiprocessor.

A word is an int64 that one rank writes and another reads. What was put before a word is there when
the word is.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from epmoe.exchange.node import NodeExchange
from epmoe.exchange.window import Window
from epmoe.group.errors import EPStateError

_WORDS = "moves.words"


class Mail:
    """What one rank sends and reads beside the rounds, in the order of the calls.

    After `close`, and in a forked child, what sends raises EPStateError.
    """

    def __init__(self, exchange: NodeExchange) -> None:
        self._window: Window | None = exchange.window
        self._exchange = exchange
        self._plan = exchange.plan
        self._seats = exchange.seats
        self.rank = exchange.rank
        self.size = len(exchange.global_ranks)
        board = exchange.views[_WORDS]
        self._row = self._plan[_WORDS].offset + 8 * exchange.seat * board.shape[1]
        self._lane = exchange.processor.lane(board)

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
        self._lane.follow(self._exchange.streams())

    def put(self, rank: int, name: str, source: Tensor, begin: int = 0) -> None:
        """Copy a contiguous tensor into a buffer of a rank's window, `begin` bytes from the start
        of the buffer.

        `source` must not change before it has arrived.
        """
        # In a forked child it raises, and nothing of a GPU is touched.
        window = self.window
        with self._lane.running():
            window.put(self._seats.of_ranks[rank], self._plan[name].offset + begin, source)

    def share(self, name: str, source: Tensor, begin: int = 0) -> None:
        source = self._lane.readable(source.contiguous()).view(-1)
        for rank in range(self.size):
            self.put(rank, name, source, begin)

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        """Write this rank's word of a number into the windows of ranks."""
        window = self.window
        seats = [self._seats.of_ranks[rank] for rank in ranks]
        with self._lane.running():
            window.post(seats, self._row + 8 * number, value)

    def words(self) -> list[list[int]] | None:
        """[R][number of words], by writer: what has arrived. None while a GPU still reads them."""
        words = self._lane.words()
        if words is None:
            return None
        return self._seats.by_rank(words.tolist())

    def fetch(self, source: Tensor) -> Tensor:
        """A copy on the host of what `source` holds. It waits for no round, and not for the calls
        before it.
        """
        return self._exchange.processor.peek(source).read()[0]

    def flush(self) -> None:
        """Wait until what this rank has put and posted is there."""
        self._lane.flush()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy a tensor beside the rounds, behind what was put before."""
        self._lane.copy(to, source)

    def upload(self, source: Tensor) -> Tensor:
        """A tensor of the host on the device of the rounds, which it has reached. Any thread may
        call it.
        """
        return self._lane.upload(source)
