"""Windows: each rank has one region of memory, which every rank of the group maps.

On the CPU a window is anonymous shared memory. On a GPU it is memory of the GPU (window_nvlink.py).
Both kinds have a file descriptor and no name. Ranks pass the descriptors to one another
(sockets.py). The operating system frees the memory when the last process that maps it has ended,
also after a crash.
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
    """The windows of a group, as one rank uses them. Each transport implements this."""

    regions: list[Tensor]
    """the window of each seat, as uint8 [bytes of the window] on the device of the kernels"""
    local: Tensor
    """the window of this rank"""
    places: Places
    """the addresses at which this process maps the windows"""

    deaths: Deaths
    """Watches the processes of this machine's ranks. When one ends, the window stores the mask of
    all that have ended into this rank's buffer "signal.dead", where waits see it.
    """

    def store(self, offset: int, value: int) -> None:
        """Store an unsigned 64-bit word into the windows of all ranks, `offset` bytes from their
        starts. It waits for no rank.
        """

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        """Copy a contiguous tensor [n] into the window of a rank, `offset` bytes from its start.

        On a GPU it is a copy on the current stream. The offset is a multiple of the size of an
        element.

        On a GPU a reader never sees a part of an element of 8 bytes. A reader that sees the
        elements of one put also sees those of all puts before it.
        """

    def post(self, ranks: Iterable[int], offset: int, value: int) -> None:
        """Store a 64-bit word, signed or unsigned, into the windows of some ranks.

        A reader that sees the word also sees all that this rank has put before. On a GPU it is a
        copy on the current stream.
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
        """Open the windows of a group. Every rank calls it, in a step of `Peers.together`.

        All memory is allocated now, so that a shortage cannot end a process in a later round.

        Args:
            nbytes: the bytes of each window, by seat. All ranks pass the same.
            peers: the ranks of the group.
            seats: which rank has which seat.
            addresses: reserves the addresses of the windows.
            dead_at: where this rank keeps the mask of ranks that have ended, in bytes from the
                start of its own window.

        Raises:
            MemoryError: there is not enough memory for this rank.
            RuntimeError: as `share_descriptors` says.
            TimeoutError: as `share_descriptors` says.
        """
        check_room(sum(nbytes[seat] for seat in seats.of_ranks), available_memory_bytes())
        mapped = map_windows(nbytes, peers, seats, addresses)
        self.places = mapped.places
        self.regions = mapped.regions
        self.local = mapped.regions[seats.of_ranks[peers.rank]]
        self._dead_at = dead_at
        self.deaths = Deaths(mapped.processes, self._note)

    def store(self, offset: int, value: int) -> None:
        """See `Window.store`. A rank that sleeps in a wait sees the word when it next wakes, after
        100 ms at most.
        """
        self.post(range(len(self.regions)), offset, value)

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        """See `Window.put`. On the CPU puts have no order among themselves. A later `post` makes
        them visible together.
        """
        self.regions[rank][offset : offset + source.nbytes].view(source.dtype).copy_(source)

    def post(self, ranks: Iterable[int], offset: int, value: int) -> None:
        """See `Window.post`. It is a release store.

        A reader must use `ops.read_words`, or load as the kernels do. It then sees all that this
        rank has stored before. And whatever the reader writes because of the word cannot overwrite
        data that this rank still had to read.
        """
        for rank in ranks:
            ops.post_word(self.regions[rank], offset, ctypes.c_int64(value).value)

    def _note(self, dead: int) -> None:
        """Store the mask of ranks whose process has ended, where the waits of this rank see it."""
        ops.post_word(self.local, self._dead_at, ctypes.c_int64(dead).value)


def available_memory_bytes() -> int:
    """The bytes of memory that are still free on this machine, or in the container of this process
    if that has fewer.
    """
    free = [sys.maxsize]
    # Ask the machine, which answers in KiB.
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        free.append(int(available.split()[1]) * 1024)
    # Ask the container. Without a limit it says "max", which is no number: ValueError.
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int(_CGROUP.joinpath("memory.max").read_text())
        used = int(_CGROUP.joinpath("memory.current").read_text())
        lines = _CGROUP.joinpath("memory.stat").read_text().splitlines()
        statistics = dict(line.split() for line in lines)
        # Inactive page cache counts as used, but the kernel frees it as soon as memory is needed.
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
    """A context that turns the error "too many open files" into one that says what to do."""
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
    """the addresses at which they are mapped"""
    regions: list[Tensor]
    """the window of each seat, as uint8 [bytes of the window]"""
    processes: dict[int, int]
    """by seat, the descriptors of the other ranks' processes, as `share_descriptors` yields them"""


def map_windows(
    nbytes: Sequence[int],
    peers: Peers,
    seats: Seats,
    addresses: Addresses,
    clear: Callable[[Tensor], Callable[[], object]] = lambda local: lambda: None,
) -> MappedWindows:
    """Make this rank's window, and map the windows of all ranks.

    Every rank calls it, in a step of `Peers.together`. No rank returns before the windows of all
    ranks are cleared, so each may write into them at once.

    Args:
        nbytes: the bytes of each window, by seat. All ranks pass the same.
        peers: the ranks of the group.
        seats: which rank has which seat. For an empty seat, memory that nobody reads is mapped.
        addresses: reserves the addresses of the windows.
        clear: begins to clear the window of this rank, and returns a function that waits for the
            end. Other windows are mapped meanwhile. By default nothing is cleared, since new shared
            memory is zeros.

    Returns:
        The windows, mapped in this process.

    Raises:
        MemoryError: there is not enough memory for this rank.
        RuntimeError: as `share_descriptors` says.
        TimeoutError: as `share_descriptors` says.
    """
    places = addresses.windows(seats.count, max(nbytes))
    mine = seats.of_ranks[peers.rank]
    with _enough_files(peers.size), contextlib.ExitStack() as undo:
        undo.callback(places.unmap)
        own = places.create(nbytes[mine])
        try:
            # Map this rank's own window, then memory in empty seats, then the windows of other
            # ranks.
            local = places.map(mine, own, nbytes[mine])
            wait = clear(local)
            regions = {seat: places.map_unread(seat, nbytes[seat]) for seat in seats.empty}
            with share_descriptors(own, peers) as (descriptors, processes):
                regions[mine] = local
                for seat, descriptor in zip(seats.of_ranks, descriptors, strict=True):
                    if seat != mine:
                        regions[seat] = places.map(seat, descriptor, nbytes[seat])
                # Wait until the own window is cleared, then until every rank has done so.
                wait()
                peers.all_gather(None)
        finally:
            os.close(own)
        undo.pop_all()
    by_seat = [regions[seat] for seat in range(seats.count)]
    processes_by_seat = {seats.of_ranks[rank]: process for rank, process in processes.items()}
    return MappedWindows(places, by_seat, processes_by_seat)
