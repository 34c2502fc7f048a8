"""Where ranks wait on the host until a round begins: `exchange.idle: wait`.

A round begins with the first rank that brings tokens to it, and from then on its waits have a
deadline. Before it opens a round, a rank says here that it comes, and whether it brings tokens. A
rank that brings none sleeps here until the round has begun. So an idle service runs no kernel, and
no deadline passes.
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
# Words of a seat, in place of a round: nobody sits there, or its rank has left. In csrc/cpu/words.h
# they are `kNobody` and `kLeft`.
_NOBODY = -1
_LEFT = -2
# So often, Python may run signal handlers, and this rank looks whether others have died.
_LOOK_NS = 100_000_000


class Lobby:
    """The words of a group, in a page of host memory that all its ranks map.

    `seat` is that of this rank. `open` makes one for each rank of a group.
    """

    def __init__(self, words: Tensor, seat: int, places: Places) -> None:
        self._words = words
        self._seat = seat
        self._places = places
        self._owner = os.getpid()

    @classmethod
    def open(cls, peers: Peers, seats: Seats) -> Lobby:
        """Make the page of a group, and map it on all ranks. Collective, in a step of
        `Peers.together`. Raises what `map_windows` does, and RuntimeError if this rank would not
        see that another one has died.
        """
        nbytes = max(PAGE_BYTES, _LINE_BYTES * (1 + seats.count))
        addresses = Addresses(HostMemory(), Cpu(torch.device("cpu")))
        mapped = map_windows([nbytes] * seats.count, peers, seats, addresses)
        # A rank that opens a window watches the processes by descriptors of its own.
        for process in mapped.processes.values():
            os.close(process)
        if len(mapped.processes) < peers.size - 1:
            mapped.places.unmap()
            raise RuntimeError(
                "`exchange.idle` must be timeout here: the kernel or a sandbox gives no "
                "descriptors of processes (pidfd), so ranks that wait would not see a death"
            )
        # The page of the first rank is that of all.
        words = mapped.regions[seats.of_ranks[0]][: _LINE_BYTES * (1 + seats.count)]
        for seat in seats.empty:
            ops.come(words, seat, _NOBODY)
        return cls(words, seats.of_ranks[peers.rank], mapped.places)

    def come(self, round: int, brings_tokens: bool) -> None:
        """Say that this rank comes to a round. Ranks that wait for it wake up."""
        ops.come(self._words, self._seat, 2 * round + brings_tokens)

    def has_begun(self, round: int) -> bool:
        """Whether a rank has brought tokens to a round, or has come to a later one, or all have
        come.
        """
        has_begun: bool = ops.await_round(self._words, round, 0)
        return has_begun

    def wait(self, round: int) -> bool:
        """Sleep until a round has begun, or cannot begin since a rank has left, but only for a
        while. Returns whether it has begun.

        Raises EPStateError in a forked child, which is no rank.
        """
        if os.getpid() != self._owner:
            raise EPStateError(
                f"round {round} belongs to process {self._owner}, of which this process is a fork"
            )
        has_begun: bool = ops.await_round(self._words, round, _LOOK_NS)
        return has_begun

    def left(self) -> int:
        """Seats whose ranks have left, as a mask."""
        words = ops.read_words(self._words.view(torch.int64)).tolist()
        # Each line has one word. The first is a futex.
        of_seats = words[_LINE_BYTES // 8 :: _LINE_BYTES // 8]
        return sum(1 << seat for seat, word in enumerate(of_seats) if word == _LEFT)

    def leave(self) -> None:
        """Let nobody wait for this rank any more, and give the page back."""
        if self._places.mapped:
            ops.come(self._words, self._seat, _LEFT)
            self._places.unmap()
