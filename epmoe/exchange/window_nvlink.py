"""Symmetric windows of GPUs: torch symmetric memory, peer pointers over NVLink, no multicast.

torch numbers the messages of a rendezvous by process and not by group: over a store, a process that has opened fewer
windows than the others would wait for them in vain. The messages therefore travel by `Peers.all_gather`.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

from epmoe.exchange.window import check_room, share_descriptors
from epmoe.group.deaths import Deaths
from epmoe.group.peers import MissingRankError, Peers
from epmoe.group.waiting import interruptible

_LAST_WORDS_S = 0.02  # after the end of a process, until what it has stored is here and waits have seen it


class NVLinkWindow:
    """A `Window` in GPU memory of one NVLink domain."""

    def __init__(
        self, nbytes: int, peers: Peers, device: torch.device, dead_at: int, empty_lines: Iterable[slice] = ()
    ):
        """Collective, in a step of `Peers.together`. Clears the window on all ranks before it returns.

        `dead_at` is that of `SharedMemoryWindow`. `empty_lines` are slices of the window's bytes that begin as 0xff,
        not as 0. Raises MemoryError where this rank has no room, and RuntimeError where this GPU has no peer access.
        """
        check_room(nbytes, torch.cuda.mem_get_info(device)[0])
        peers.all_gather(None)  # all have room
        if peers.group is None or peers.size == 1:
            self.local = self._cleared(torch.empty(nbytes, dtype=torch.uint8, device=device), empty_lines)
            self.addresses = [self.local.data_ptr()]
            windows = [self.local]
        else:
            _check_peer_access(peers, device)
            # Not `symmetric_memory.empty`: its pool reuses the memory of closed windows, and ranks free their windows
            # at different times. Some ranks would then meet over old memory while others wait for them over new.
            self.local = self._cleared(
                _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device), empty_lines
            )
            self._handle = _rendezvous(self.local, peers)  # keeps the mappings
            self.addresses = list(self._handle.buffer_ptrs)
            windows = [self._handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(peers.size)]
            torch.cuda.synchronize(device)
            peers.all_gather(None)  # no rank writes into a window before it is cleared
        # For `store`, which allocates nothing.
        self._words = [window.view(torch.int64) for window in windows]
        self._rank = peers.rank
        self._stored = torch.empty(64, dtype=torch.int64, pin_memory=True)
        self._stores = itertools.count()
        self._stream = torch.cuda.Stream(device)
        self._dead_at = dead_at
        self.deaths = Deaths(processes_of(peers), self._note)

    def store(self, offset: int, value: int) -> None:
        """See `Window.store`. The word is below 2^63. Returns once the words have arrived, or after 1 s."""
        self._store(self._words, offset, value)

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        there = self._words[rank].view(torch.uint8)[offset : offset + source.nbytes].view(source.dtype)
        there.copy_(source, non_blocking=True)

    def _note(self, dead: int) -> None:
        time.sleep(_LAST_WORDS_S)
        with torch.cuda.device(self.local.device):  # this thread has another one
            self._store(self._words[self._rank : self._rank + 1], self._dead_at, dead)

    def _store(self, windows: list[Tensor], offset: int, value: int) -> None:
        """Store a word into these windows by a copy engine, on a stream of its own and from pinned memory: kernels of
        this rank that wait for other ranks may hold all multiprocessors."""
        place = next(self._stores) % len(self._stored)  # another store may be on its way
        word = self._stored[place : place + 1]
        word[0] = value
        with torch.cuda.stream(self._stream):
            for words in windows:
                words[offset // 8 : offset // 8 + 1].copy_(word, non_blocking=True)
        deadline = time.monotonic() + 1.0
        while not self._stream.query() and time.monotonic() < deadline:
            time.sleep(1e-4)

    @staticmethod
    def _cleared(local: Tensor, empty_lines: Iterable[slice]) -> Tensor:
        local.zero_()
        for part in empty_lines:
            local[part].fill_(0xFF)
        return local


class PeersStore(dist.Store):
    """What a rendezvous of torch needs of a store. Each rank calls `set` and `add` in the same order."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers
        self._values = [b""] * peers.size

    def set(self, key: str, value: bytes | str) -> None:
        """Collective: brings every rank's value to all. The keys are this rank's and mean nothing to others."""
        mine = value.encode() if isinstance(value, str) else bytes(value)
        self._values = [bytes.fromhex(theirs) for theirs in self._peers.all_gather(mine.hex())]

    def get(self, key: str) -> bytes:
        """The value of the rank at the end of the key, from the last `set`."""
        return self._values[int(key.rpartition("/")[2])]

    def add(self, key: str, value: int) -> int:
        """Collective: a counter that every rank has raised by one."""
        self._peers.all_gather(None)
        return self._peers.size

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns at once: `set` and `add` have waited."""


def _rendezvous(local: Tensor, peers: Peers) -> _SymmetricMemory:
    """Map the ranks' windows. Collective. Within the deadline of `peers`: torch awaits descriptors without one."""
    handles = []

    def meet() -> None:
        name: Any = f"epmoe-{secrets.token_hex(8)}"  # a `GroupName`, which older versions of torch do not have
        store = PeersStore(peers)
        group = dist.ProcessGroup(store, peers.rank, peers.size)  # torch keeps neither of them alive
        _register_process_group(name, group)
        try:
            with torch.cuda.device(local.device):
                handles.append(_SymmetricMemory.rendezvous(local, name))
        finally:
            _unregister_process_group(name)

    if not interruptible(meet, peers.timeout_s):
        raise TimeoutError("a rank did not hand over its window")
    return handles[0]


def processes_of(peers: Peers) -> dict[int, int]:
    """The other ranks' processes for `Deaths`; none where not all ranks reach one another's sockets. Collective."""
    processes: dict[int, int] = {}
    try:
        with peers.together():
            _, processes = share_descriptors([], peers)
    except MissingRankError:
        raise
    except (RuntimeError, OSError):  # ranks are on several machines, or in containers with networks of their own
        for process in processes.values():
            os.close(process)
        return {}
    return processes


def _check_peer_access(peers: Peers, device: torch.device) -> None:
    devices = peers.all_gather(device.index)
    visible = torch.cuda.device_count()
    unreachable = [
        peer
        for peer, index in enumerate(devices)
        if peer != peers.rank and index < visible and index != device.index
        if not torch.cuda.can_device_access_peer(device.index, index)
    ]
    if unreachable:
        raise RuntimeError(
            f"the GPU of rank {peers.rank} has no peer access to that of rank(s) {unreachable}: see `epmoe doctor`"
        )
