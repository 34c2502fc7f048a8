"""Symmetric windows of GPUs: each rank maps the memory of the others' GPUs, over NVLink."""

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
from epmoe.native.streams import own_stream

# After the end of a process, until what it has stored is here and waits have seen it.
_LAST_WORDS_S = 0.02
# Words that are posted and on their way, at most.
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
        """Collective, in a step of `Peers.together`. No rank returns before all have cleared their
        windows.

        `nbytes` and `dead_at` are those of `SharedMemoryWindow`. `empty_lines` are slices of this
        rank's window that begin as 0xff, not as 0. Raises MemoryError if this rank has no room,
        and RuntimeError if this GPU has no peer access.
        """

        def clear(local: Tensor) -> Callable[[], None]:
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
        # Views for `store`, which allocates nothing.
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
        there = self.regions[rank][offset : offset + source.nbytes].view(source.dtype)
        there.copy_(source, non_blocking=True)

    def post(self, ranks: Iterable[int], offset: int, value: int) -> None:
        place = self._posts % _POSTS_IN_FLIGHT
        self._posts += 1
        self._posted[place] = value
        word = self._posted[place : place + 1]
        for rank in ranks:
            self.put(rank, offset, word)

    def _note(self, dead: int) -> None:
        """Tell waits of this rank, which look at this word, whose process has ended."""
        time.sleep(_LAST_WORDS_S)
        # The thread of `Deaths` has another device.
        with torch.cuda.device(self.local.device):
            self._store(self._words[self._seat : self._seat + 1], self._dead_at, dead)

    def _store(self, windows: list[Tensor], offset: int, value: int) -> None:
        """Store a word into these windows by a copy engine, on a stream of its own and from pinned
        memory: kernels of this rank that wait for other ranks may hold all multiprocessors.
        """
        # Another store may be on its way from its own place.
        place = next(self._stores) % len(self._stored)
        word = self._stored[place : place + 1]
        word[0] = value
        with torch.cuda.stream(self._stream):
            for words in windows:
                words[offset // 8 : offset // 8 + 1].copy_(word, non_blocking=True)
        first_answer(self._stream.query, time.monotonic() + 1.0, pause_s=1e-4)


def _check_peer_access(peers: Peers, device: torch.device) -> None:
    """Raise RuntimeError if this GPU does not reach those of other ranks, as far as this process
    sees them.
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
