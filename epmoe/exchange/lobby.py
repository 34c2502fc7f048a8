"""Where ranks wait on the host until a round begins: `exchange.idle: wait`.

A round begins when the first rank brings tokens to it. From then on the waits of the round have a
deadline. Before a rank opens a round, it says here that it comes, and whether it brings tokens. A
rank without tokens sleeps here until the round has begun. An idle service therefore runs no kernel,
and no deadline passes.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.cpu import Cpu
from epmoe.exchange.memory import PAGE_BYTES
from epmoe.exchange.places import HostMemory, Places
from epmoe.exchange.window import map_windows
from epmoe.group.errors import EPStateError
from epmoe.group.peers import Peers
from epmoe.native import ops

# A cache line for each word of `LobbyWord` in csrc/cpu/words.h.
_LINE_BYTES = 64
# Values that the word of a seat has in place of a round: the seat has no rank, or its rank has
# left. csrc/cpu/words.h calls them `kNobody` and `kLeft`.
_NO_RANK = -1
_LEFT = -2
# The longest sleep. After it Python can run signal handlers, and this rank checks whether other
# ranks have died.
_LONGEST_SLEEP_NS = 100_000_000


class Lobby:
    """The words by which the ranks of a group meet, in a page of host memory that all of them map.

    Each seat has one word: the last round to which its rank has come. `open` makes the object that
    each rank uses, with the rank's own `seat`.
    """

    def __init__(self, words: Tensor, seat: int, places: Places) -> None:
        self._words = words
        self._seat = seat
        self._places = places
        self._owner = os.getpid()

    @classmethod
    def open(cls, peers: Peers, seats: Seats) -> Lobby:
        """Make the page of a group, and map it on all ranks.

        Every rank calls it, in a step of `Peers.together`. Raises the errors of `map_windows`, and
        RuntimeError if this rank cannot watch the processes of the other ranks: it would sleep on
        after a rank has died.
        """
        nbytes = max(PAGE_BYTES, _LINE_BYTES * (1 + seats.count))
        addresses = Addresses(HostMemory(), Cpu(torch.device("cpu")))
        mapped = map_windows([nbytes] * seats.count, peers, seats, addresses)
        # The window watches the other processes already, by other descriptors.
        for process in mapped.processes.values():
            os.close(process)
        if len(mapped.processes) < peers.size - 1:
            mapped.places.unmap()
            raise RuntimeError(
                "`exchange.idle` must be timeout here: the kernel or a sandbox gives no "
                "descriptors of processes (pidfd), so ranks that wait would not see a death"
            )
        # Each rank has made a page. All use that of the first rank.
        words = mapped.regions[seats.of_ranks[0]][: _LINE_BYTES * (1 + seats.count)]
        for seat in seats.empty:
            ops.come(words, seat, _NO_RANK)
        return cls(words, seats.of_ranks[peers.rank], mapped.places)

    def come(self, round: int, brings_tokens: bool) -> None:
        """Say that this rank comes to a round. Wakes the ranks that sleep until it begins."""
        # One word has both: the round, and in the lowest bit whether there are tokens.
        ops.come(self._words, self._seat, 2 * round + brings_tokens)

    def has_begun(self, round: int) -> bool:
        """Whether a round has begun: a rank has brought tokens to it, or has come to a later round,
        or all ranks have come to it.
        """
        # A sleep of 0 ns: only look.
        has_begun: bool = ops.await_round(self._words, round, 0)
        return has_begun

    def wait(self, round: int) -> bool:
        """Sleep until a round has begun, but at most for `_LONGEST_SLEEP_NS`. Returns whether the
        round has begun.

        It also wakes when a rank has left, since the round may then never begin. The caller checks
        why it woke, and calls again. Raises EPStateError in a forked child, which is no rank.
        """
        if os.getpid() != self._owner:
            raise EPStateError(
                f"round {round} belongs to process {self._owner}, of which this process is a fork"
            )
        has_begun: bool = ops.await_round(self._words, round, _LONGEST_SLEEP_NS)
        return has_begun

    def left(self) -> int:
        """The seats whose ranks have left, as a mask with a bit for each seat."""
        words = ops.read_words(self._words.view(torch.int64)).tolist()
        # The word of a seat stands at the start of a cache line. The first line is for the futex.
        words_per_line = _LINE_BYTES // 8
        words_of_seats = words[words_per_line::words_per_line]
        return sum(1 << seat for seat, word in enumerate(words_of_seats) if word == _LEFT)

    def leave(self) -> None:
        """Tell the other ranks that this rank has left, so that nobody waits for it, and unmap the
        page. A second call does nothing.
        """
        if self._places.mapped:
            ops.come(self._words, self._seat, _LEFT)
            self._places.unmap()
