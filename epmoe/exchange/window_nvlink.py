"""Windows in the memory of GPUs. Each rank maps the windows of the other GPUs, over NVLink."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.window import check_room, map_windows
from epmoe.group.deaths import Deaths
from epmoe.group.peers import Peers
from epmoe.group.waiting import first_answer
from epmoe.native.captures import relaxed
from epmoe.native.streams import own_stream

# How long to wait after the end of a process before its death is announced. By then the words that
# it has stored last are here, and waits have seen them.
_LAST_WORDS_S = 0.02
# How many posted words may be on their way. Each needs host memory until its copy has run.
_POSTS_IN_FLIGHT = 4096


class NVLinkWindow:
    """A `Window` in GPU memory of one NVLink domain."""

    @classmethod
    def of(cls, plan: MemoryPlan, peers: Peers, seats: Seats, addresses: Addresses) -> Self:
        dead_at = plan["signal.dead"].offset
        return cls(plan.windows, peers, seats, addresses, dead_at, plan.empty_lines)

    def __init__(
        self,
        nbytes: Sequence[int],
        peers: Peers,
        seats: Seats,
        addresses: Addresses,
        dead_at: int,
        empty_lines: Sequence[slice] = (),
    ):
        """Open the windows of a group. Every rank calls it, in a step of `Peers.together`.

        No rank returns before all ranks have cleared their windows.

        Args:
            nbytes: the bytes of each window, by seat. All ranks pass the same.
            peers: the ranks of the group.
            seats: which rank has which seat.
            addresses: reserves the addresses of the windows.
            dead_at: where this rank keeps the mask of ranks that have ended, in bytes from the
                start of its own window.
            empty_lines: slices of this rank's window that begin as bytes of 0xff, in place of 0.

        Raises:
            MemoryError: the GPU of this rank has not enough memory.
            RuntimeError: this GPU has no peer access to another one, or as `share_descriptors`
                says.
            TimeoutError: as `share_descriptors` says.
        """

        def clear(local: Tensor) -> Callable[[], None]:
            """Begin to clear this rank's window. Returns a function that waits for the end."""
            local.zero_()
            for part in empty_lines:
                local[part].fill_(0xFF)
            return partial(torch.cuda.synchronize, device)

        # Check what this rank can check alone, then map the windows of all.
        device = addresses.memory.device
        check_room(nbytes[seats.of_ranks[peers.rank]], torch.cuda.mem_get_info(device)[0])
        if peers.size > 1:
            _check_peer_access(peers, device)
        mapped = map_windows(nbytes, peers, seats, addresses, clear)
        self.places = mapped.places
        self.regions = mapped.regions
        self._seat = seats.of_ranks[peers.rank]
        self.local = self.regions[self._seat]
        # `store` must not allocate: it uses views that are made here, and pinned words in turn.
        self._words = [window.view(torch.int64) for window in self.regions]
        self._stored = torch.empty(64, dtype=torch.int64, pin_memory=True)
        self._stores = itertools.count()
        self._posted = torch.empty(_POSTS_IN_FLIGHT, dtype=torch.int64, pin_memory=True)
        self._posts = 0
        self._stream = own_stream(device)
        self._dead_at = dead_at
        self.deaths = Deaths(mapped.processes, self._note)

    def store(self, offset: int, value: int) -> None:
        """See `Window.store`. The word is below 2^63. Returns once the words have arrived, or after
        1 s.
        """
        self._store(self._words, offset, value)

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        target = self.regions[rank][offset : offset + source.nbytes].view(source.dtype)
        target.copy_(source, non_blocking=True)

    def post(self, ranks: Iterable[int], offset: int, value: int) -> None:
        # The copy reads the word later, so each post uses another place in host memory, by turns.
        place = self._posts % _POSTS_IN_FLIGHT
        self._posts += 1
        self._posted[place] = value
        word = self._posted[place : place + 1]
        for rank in ranks:
            self.put(rank, offset, word)

    def _note(self, dead: int) -> None:
        """Store the mask of ranks whose process has ended, where the waits of this rank see it."""
        time.sleep(_LAST_WORDS_S)
        # The thread of `Deaths` calls this. Its current device is perhaps another one, and another
        # thread may capture a graph.
        with torch.cuda.device(self.local.device), relaxed():
            self._store(self._words[self._seat : self._seat + 1], self._dead_at, dead)

    def _store(self, windows: list[Tensor], offset: int, value: int) -> None:
        """Store a word into these windows by copies from pinned memory, on a stream of their own.

        Copy engines do the copies. Kernels of this rank that wait for other ranks may hold all
        multiprocessors, so no kernel could store the word.
        """
        # Another store may still be on its way, so each uses another place in host memory, by
        # turns.
        place = next(self._stores) % len(self._stored)
        word = self._stored[place : place + 1]
        word[0] = value
        with torch.cuda.stream(self._stream):
            for words in windows:
                words[offset // 8 : offset // 8 + 1].copy_(word, non_blocking=True)
        first_answer(self._stream.query, time.monotonic() + 1.0, pause_s=1e-4)


def _check_peer_access(peers: Peers, device: torch.device) -> None:
    """Raise RuntimeError if this GPU has no peer access to the GPU of another rank.

    It checks only the GPUs that this process sees.
    """
    devices = peers.all_gather(device.index)
    visible = torch.cuda.device_count()
    unreachable = []
    for peer, index in enumerate(devices):
        if peer == peers.rank or index == device.index or index >= visible:
            continue
        if not torch.cuda.can_device_access_peer(device.index, index):
            unreachable.append(peer)
    if unreachable:
        raise RuntimeError(
            f"the GPU of rank {peers.rank} has no peer access to that of rank(s) {unreachable}: "
            "see `epmoe doctor`"
        )
