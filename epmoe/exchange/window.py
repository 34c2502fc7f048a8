"""Symmetric windows: one region of memory per rank, mapped by every rank of the group.

On the CPU a window is anonymous shared memory, on a GPU memory of its own (window_nvlink.py). Either has a file
descriptor, which ranks pass over Unix sockets, so a window has no name. Its memory is freed when the last process that
maps it ends, also after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from torch import Tensor

from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses, Places
from epmoe.group.deaths import Deaths, this_process
from epmoe.group.peers import Peers
from epmoe.native import ops

SOCKET_TIMEOUT_S = 60.0
_BACKLOG = 64  # connections on their way to a `Handout`
_SHORTAGE_S = 0.01  # until it looks again whether this process may open more files
_MOST_DESCRIPTORS = 253  # of one message, by Linux
_CGROUP = Path("/sys/fs/cgroup")


class Window(Protocol):
    """What a transport offers."""

    regions: list[Tensor]
    """By seat, the ranks' windows, uint8 [window_bytes] on the device where the kernels run"""
    local: Tensor
    """this rank's"""
    places: Places
    """where they are mapped in this process"""

    deaths: Deaths
    """Watches the processes of this machine's ranks. It keeps the word at `dead_at` up to date."""

    def store(self, offset: int, value: int) -> None:
        """Store an unsigned 64-bit word into every rank's window, `offset` bytes from its start. Waits for no rank."""

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        """Copy a contiguous tensor [n] into a rank's window, on a GPU by a copy on the current stream.

        `offset` is a multiple of the size of an element. On a GPU nobody sees a part of an element of 8 bytes, and who
        sees the elements of one put sees those of the puts before it, too.
        """


class SharedMemoryWindow:
    """A `Window` in shared memory of one machine."""

    def __init__(self, nbytes: int, peers: Peers, seats: Seats, addresses: Addresses, dead_at: int):
        """Collective, in a step of `Peers.together`. Reserves the memory now: a shortage is no fault in a later round.

        At `dead_at` bytes from the start of its own window a rank keeps the mask of ranks that have ended. Raises
        MemoryError where this rank has no room, and what `share_descriptors` raises.
        """
        check_room(nbytes * peers.size, available_memory_bytes())
        self.places, self.regions, processes = map_windows(nbytes, peers, seats, addresses)
        self.local = self.regions[seats.of_ranks[peers.rank]]
        self._dead_at = dead_at
        self.deaths = Deaths(processes, self._note)

    def store(self, offset: int, value: int) -> None:
        """A rank that sleeps sees the word when it next looks up, after 100 ms at most."""
        for rank in range(len(self.regions)):
            self.post(rank, offset, value)

    def put(self, rank: int, offset: int, source: Tensor) -> None:
        """No order of its own: `post` orders what was put before it."""
        self.regions[rank][offset : offset + source.nbytes].view(source.dtype).copy_(source)

    def post(self, rank: int, offset: int, value: int) -> None:
        """Store a 64-bit word, signed or not, into a rank's window. Who reads it by `ops.read_words`, or as the kernels
        do, sees all that this rank has stored before, and overwrites nothing that this rank had yet to read."""
        ops.post_word(self.regions[rank], offset, ctypes.c_int64(value).value)

    def _note(self, dead: int) -> None:
        ops.post_word(self.local, self._dead_at, ctypes.c_int64(dead).value)


def available_memory_bytes() -> int:
    """Bytes that this machine, or the container around this process, can still give."""
    free = [sys.maxsize]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int(_CGROUP.joinpath("memory.max").read_text())
        used = int(_CGROUP.joinpath("memory.current").read_text())
        statistics = dict(line.split() for line in _CGROUP.joinpath("memory.stat").read_text().splitlines())
        free.append(limit - used + int(statistics["inactive_file"]))  # page cache that is reclaimed at once
    return min(free)


def check_room(nbytes: int, available: int) -> None:
    """Raise MemoryError where windows of `nbytes` in all do not fit into `available` bytes."""
    if nbytes > available:
        raise MemoryError(
            f"the windows need {nbytes:,} bytes of memory that ranks share, but only {available:,} are available: "
            "lower capacity.max_num_tokens_per_rank"
        )


@contextlib.contextmanager
def _enough_files(ranks: int) -> Iterator[None]:
    """Explains what to do where this process may open no more files."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise RuntimeError(
            f"this process may not open more files (its limit is {most}): the windows of {ranks} ranks take up to "
            f"{4 * ranks} while they open; raise the limit, as `ulimit -n {most + 4 * ranks}` does"
        ) from error


def map_windows(
    nbytes: int,
    peers: Peers,
    seats: Seats,
    addresses: Addresses,
    clear: Callable[[Tensor], Callable[[], object]] = lambda local: lambda: None,
) -> tuple[Places, list[Tensor], dict[int, int]]:
    """Make this rank's window, and map all ranks' in their seats. Collective, in a step of `Peers.together`.

    `clear` begins to prepare the own window, and returns a function that waits for its end: other windows are mapped
    meanwhile, and no rank returns before all are prepared. An empty seat has memory that nobody reads. Returns where
    the windows are mapped, the windows by seat, and by seat the other ranks' processes as `share_descriptors` does,
    which also says what is raised.
    """
    places, mine = addresses.windows(seats.count, nbytes), seats.of_ranks[peers.rank]
    descriptors, processes = list[int](), dict[int, int]()
    with _enough_files(peers.size), contextlib.ExitStack() as undo:
        undo.callback(places.unmap)
        try:
            descriptors = [places.create(nbytes)]
            wait = clear(local := places.map(mine, descriptors[0], nbytes))
            regions = {seat: places.map_unread(seat, nbytes) for seat in seats.empty}
            descriptors, processes = share_descriptors(descriptors, peers)
            undo.callback(_close, processes.values())
            for seat, descriptor in zip(seats.of_ranks, descriptors, strict=True):
                regions[seat] = local if seat == mine else places.map(seat, descriptor, nbytes)
        finally:
            _close(descriptors)
        wait()
        peers.all_gather(None)  # all have cleared their windows: any may write into them now
        undo.pop_all()
    return (
        places,
        [regions[seat] for seat in range(seats.count)],
        {seats.of_ranks[r]: fd for r, fd in processes.items()},
    )


def share_descriptors(window: list[int], peers: Peers) -> tuple[list[int], dict[int, int]]:
    """Every rank's file descriptors. Collective, in a step of `Peers.together`.

    Each rank connects to all others before it accepts, so ranks cannot wait for one another in a circle.

    `window` is the descriptor of this rank's window; empty on all ranks if windows have none. Returns the descriptors
    of all windows, and by rank those of the other ranks' processes, where they could give one. The caller closes both.

    Raises RuntimeError where the ranks are on several machines or cannot reach one another's sockets, or a rank has
    ended, and TimeoutError where a rank did not answer.
    """
    rank = peers.rank
    size = peers.size
    if size == 1:
        return window, {}
    # Half, so that a rank whose wait fails here can still report it in time.
    timeout_s = min(SOCKET_TIMEOUT_S, (peers.timeout_s or 2 * SOCKET_TIMEOUT_S) / 2)
    with contextlib.ExitStack() as stack:
        name, admitted = _new_name(), SimpleQueue[socket.socket | OSError]()
        stack.callback(_drain, admitted)
        stack.enter_context(_admitting(name, size, admitted.put))
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        addresses = peers.all_gather((machine, name))
        if len({machine for machine, _ in addresses}) > 1:
            raise RuntimeError(
                "the ranks of a node are on several machines: set topology.ranks_per_node to the ranks of one machine"
            )
        connections, deadline = {}, time.monotonic() + timeout_s
        for peer, (_, address) in enumerate(addresses):
            if peer != rank:
                connections[peer] = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                _connect(connections[peer], address, f"rank {rank} cannot reach rank {peer}'s socket", deadline)
                if _user_of(connections[peer]) != os.getuid():  # every user can take the name of a rank that has ended
                    raise RuntimeError(f"rank {peer} has ended: another user answers at its socket")
        peers.all_gather(None)  # all have reached all: otherwise ranks would wait for one that has failed
        process = this_process()
        stack.callback(_close, process)
        deadline = time.monotonic() + timeout_s
        for _ in range(size - 1):
            try:
                connection = admitted.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                raise TimeoutError("a rank did not connect to this rank's socket") from None
            if isinstance(connection, OSError):
                raise connection
            with connection:
                socket.send_fds(connection, [b"w"], window + process)
        received: dict[int, list[int]] = {}
        try:
            for peer, connection in connections.items():
                _set_deadline(connection, deadline)
                message, received[peer], _, _ = socket.recv_fds(connection, 1, 2)
                if not message or len(received[peer]) < len(window):
                    raise RuntimeError(
                        f"rank {peer} closed its socket before it sent its window, or this process may not open more "
                        "files (`ulimit -n`)"
                    )
        except BaseException:
            _close(itertools.chain(*received.values()))
            raise
        windows = [fd for peer in range(size) for fd in (received[peer][: len(window)] if peer != rank else window)]
        return windows, {peer: fd for peer, fds in received.items() for fd in fds[len(window) :]}


class Handout:
    """Gives descriptors by number to this user's processes that ask at its abstract socket, by `fetch_descriptor`."""

    def __init__(self) -> None:
        self.name, self._kept, self._lock = _new_name(), dict[int, int](), Lock()
        stack = contextlib.ExitStack()
        stack.callback(lambda kept: _close(kept.values()), self._kept)
        stack.enter_context(_admitting(self.name, _BACKLOG, partial(_hand_out, self._kept, self._lock)))
        weakref.finalize(self, stack.close).atexit = False

    def keep(self, number: int, descriptor: int) -> None:
        """Give a descriptor, in place of the last one of this number, and close it in the end."""
        with self._lock:
            _close([self._kept.pop(number)] if number in self._kept else [])
            self._kept[number] = descriptor

    def drop(self, most: int) -> None:
        """Keep the `most` largest numbers at most."""
        with self._lock:
            for number in sorted(self._kept)[: max(len(self._kept) - most, 0)]:
                os.close(self._kept.pop(number))


def fetch_descriptor(name: str, number: int, what: str) -> int:
    """A descriptor of a `Handout`, which the caller closes.

    Raises RuntimeError, which begins with `what`, where it is not there, and TimeoutError where nobody answers.
    """
    deadline = time.monotonic() + SOCKET_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, name, what, deadline)
        if _user_of(connection) != os.getuid():
            raise RuntimeError(f"{what}: another user answers at the socket of its process")
        _set_deadline(connection, deadline)
        message, descriptors, _, _ = socket.recv_fds(connection, 8 * _MOST_DESCRIPTORS, _MOST_DESCRIPTORS)
    numbers = struct.unpack(f"{len(message) // 8}q", message)
    kept = dict(zip(numbers, descriptors, strict=False))  # fewer where this process may not open more files
    found = kept.pop(number, None)
    _close(kept.values())
    if found is None:
        raise RuntimeError(f"{what}: its process does not keep it any more (or `ulimit -n` is too low here)")
    return found


def _hand_out(kept: dict[int, int], lock: Lock, connection: socket.socket | OSError) -> bool:
    if not isinstance(connection, socket.socket):
        time.sleep(_SHORTAGE_S)
        return connection.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
    with connection, lock, contextlib.suppress(OSError):  # of one who has left
        socket.send_fds(connection, [struct.pack(f"{len(kept)}q", *kept)], list(kept.values()))
    return True


def _new_name() -> str:
    return f"\0epmoe-{secrets.token_hex(16)}"  # an abstract one leaves no file


@contextlib.contextmanager
def _admitting(name: str, size: int, take: Callable[[socket.socket | OSError], object]) -> Iterator[None]:
    """`take` gets the connections of this user's processes to an abstract socket, on a thread, or why one did not come.
    The thread goes on after that where `take` returns True.

    It takes every connection at once: other users can connect, too, and must not fill the socket's queue.
    """

    def admit() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                if _user_of(connection) == os.getuid():
                    take(connection)
                else:
                    connection.close()
            except OSError as error:  # also once it is shut down
                if not take(error) or ended:
                    return

    owner, ended = os.getpid(), False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(size)
        thread = Thread(target=admit, daemon=True, name="epmoe-sockets")
        thread.start()
        try:
            yield
        finally:
            if os.getpid() == owner:  # a fork has the same socket, and leaves it open
                ended = True
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()


def _drain(admitted: SimpleQueue[socket.socket | OSError]) -> None:
    while not admitted.empty():
        if isinstance(connection := admitted.get(), socket.socket):
            connection.close()


def _connect(connection: socket.socket, address: str, what: str, deadline: float) -> None:
    """Connect to an abstract socket. Raises RuntimeError, which begins with `what`, where nobody answers there."""
    _set_deadline(connection, deadline)
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError as error:  # its queue is full, which its process empties
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: other processes of this machine connect to it all the time") from error
            time.sleep(1e-3)
        except OSError as error:
            raise RuntimeError(
                f"{what} ({error}): its process has closed it, or is in a container with another network namespace"
            ) from error


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    """Let the next call raise TimeoutError once `deadline` has passed. A timeout of 0 would not wait at all."""
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
