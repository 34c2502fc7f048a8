"""Symmetric windows: one region of memory per rank, mapped by every rank of the group.

On the CPU a window is anonymous shared memory, on a GPU memory of its own (window_nvlink.py).
Either has a file descriptor, which ranks pass on (sockets.py), so a window has no name. Its memory
is freed when the last process that maps it ends, also after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.places import Places
from epmoe.exchange.sockets import share_descriptors
from epmoe.group.deaths import Deaths
from epmoe.group.peers import Peers
from epmoe.native import ops

_CGROUP = Path("/sys/fs/cgroup")


class Window(Protocol):
    """What a transport offers."""

    regions: list[Tensor]
    """By seat, the ranks' windows, uint8 [bytes of each] on the device where the kernels run"""
    local: Tensor
    """this rank's"""
    places: Places
    """where they are mapped in this process"""

    deaths: Deaths
    """Watches the processes of this machine's ranks. It keeps the word at `dead_at` up to date."""

    def store(self, offset: int, value: int) -> None:
        """Store an unsigned 64-bit word into every rank's window, `offset` bytes from its start.
        Waits for no rank.
        """

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        """Copy a contiguous tensor [n] into a rank's window, on a GPU by a copy on the current
        stream.

        `offset` is a multiple of the size of an element. On a GPU nobody sees a part of an element
        of 8 bytes, and who sees the elements of one put sees those of the puts before it, too.
        """

    def post(self, ranks: Iterable[int], offset: int, value: int) -> None:
        """Store a 64-bit word, signed or not, into the windows of ranks, behind what was put
        before: who sees the word sees that, too. On a GPU by a copy on the current stream.
        """


class SharedMemoryWindow:
    """A `Window` in shared memory of one machine."""

    @classmethod
    def of(cls, plan: MemoryPlan, peers: Peers, seats: Seats, addresses: Addresses) -> Self:
        return cls(plan.windows, peers, seats, addresses, plan["signal.dead"].offset)

    def __init__(
        self,
        nbytes: Sequence[int],
        peers: Peers,
        seats: Seats,
        addresses: Addresses,
        dead_at: int,
    ):
        """Collective, in a step of `Peers.together`. Reserves the memory now: a shortage is no
        fault in a later round.

        `nbytes` are the bytes of each window, by seat, the same on all ranks. At `dead_at` bytes
        from the start of its own window a rank keeps the mask of ranks that have ended. Raises
        MemoryError where this rank has no room, and what `share_descriptors` raises.
        """
        check_room(sum(nbytes[seat] for seat in seats.of_ranks), available_memory_bytes())
        mapped = map_windows(nbytes, peers, seats, addresses)
        self.places = mapped.places
        self.regions = mapped.regions
        self.local = mapped.regions[seats.of_ranks[peers.rank]]
        self._dead_at = dead_at
        self.deaths = Deaths(mapped.processes, self._note)

    def store(self, offset: int, value: int) -> None:
        """A rank that sleeps sees the word when it next looks up, after 100 ms at most."""
        self.post(range(len(self.regions)), offset, value)

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        """No order of its own: `post` orders what was put before it."""
        self.regions[rank][offset : offset + source.nbytes].view(source.dtype).copy_(source)

    def post(self, ranks: Iterable[int], offset: int, value: int) -> None:
        """Who reads it by `ops.read_words`, or as the kernels do, sees all that this rank has
        stored before, and overwrites nothing that this rank had yet to read.
        """
        for rank in ranks:
            ops.post_word(self.regions[rank], offset, ctypes.c_int64(value).value)

    def _note(self, dead: int) -> None:
        """Tell waits of this rank, which look at this word, whose process has ended."""
        ops.post_word(self.local, self._dead_at, ctypes.c_int64(dead).value)


def available_memory_bytes() -> int:
    """The bytes that this machine, or the container around this process, can still give."""
    free = [sys.maxsize]
    # The machine, which says it in KiB.
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        free.append(int(available.split()[1]) * 1024)
    # The container, where it has a limit: "max" is no number.
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int(_CGROUP.joinpath("memory.max").read_text())
        used = int(_CGROUP.joinpath("memory.current").read_text())
        lines = _CGROUP.joinpath("memory.stat").read_text().splitlines()
        statistics = dict(line.split() for line in lines)
        # The page cache among what is used is reclaimed at once.
        free.append(limit - used + int(statistics["inactive_file"]))
    return min(free)


def check_room(nbytes: int, available: int) -> None:
    """Raise MemoryError if windows of `nbytes` in all do not fit into `available` bytes."""
    if nbytes > available:
        raise MemoryError(
            f"the windows need {nbytes:,} bytes of memory that ranks share, but only {available:,} "
            "are available: lower capacity.max_num_tokens_per_rank"
        )


@contextlib.contextmanager
def _enough_files(ranks: int) -> Iterator[None]:
    """Say what to do if this process may open no more files."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise RuntimeError(
            f"this process may not open more files (its limit is {most}): the windows of {ranks} "
            f"ranks take up to {4 * ranks} while they open; raise the limit, as `ulimit -n "
            f"{most + 4 * ranks}` does"
        ) from error


class MappedWindows(NamedTuple):
    """The windows of a group in this process."""

    places: Places
    """where they are mapped"""
    regions: list[Tensor]
    """by seat, uint8 [bytes of each]"""
    processes: dict[int, int]
    """by seat, descriptors of the other ranks' processes, as `share_descriptors` gives them"""


def map_windows(
    nbytes: Sequence[int],
    peers: Peers,
    seats: Seats,
    addresses: Addresses,
    clear: Callable[[Tensor], Callable[[], object]] = lambda local: lambda: None,
) -> MappedWindows:
    """Make this rank's window, and map the windows of all ranks in their seats, of `nbytes` by
    seat. Collective, in a step of `Peers.together`.

    `clear` begins to prepare the own window, and returns a function that waits for its end: other
    windows are mapped meanwhile, and no rank returns before all are prepared. An empty seat has
    memory that nobody reads. Raises what `share_descriptors` does, and MemoryError if this rank
    has no room.
    """
    places = addresses.windows(seats.count, max(nbytes))
    mine = seats.of_ranks[peers.rank]
    with _enough_files(peers.size), contextlib.ExitStack() as undo:
        undo.callback(places.unmap)
        own = places.create(nbytes[mine])
        try:
            # The own window, then those of others and memory in empty seats.
            local = places.map(mine, own, nbytes[mine])
            wait = clear(local)
            regions = {seat: places.map_unread(seat, nbytes[seat]) for seat in seats.empty}
            with share_descriptors(own, peers) as (descriptors, processes):
                regions[mine] = local
                for seat, descriptor in zip(seats.of_ranks, descriptors, strict=True):
                    if seat != mine:
                        regions[seat] = places.map(seat, descriptor, nbytes[seat])
                # Own windows are cleared while others are mapped.
                wait()
                # All have cleared their windows: any rank may write into them from here on.
                peers.all_gather(None)
        finally:
            os.close(own)
        undo.pop_all()
    by_seat = [regions[seat] for seat in range(seats.count)]
    processes_by_seat = {seats.of_ranks[rank]: process for rank, process in processes.items()}
    return MappedWindows(places, by_seat, processes_by_seat)
