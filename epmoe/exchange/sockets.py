"""File descriptors that processes of one user pass on over abstract Unix sockets.

The ranks of a group share those of their windows, and a `Handout` gives its own to whoever asks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

from epmoe.group.deaths import this_process
from epmoe.group.peers import Peers
from epmoe.group.waiting import start_thread

SOCKET_TIMEOUT_S = 60.0
_BACKLOG = 64  # connections on their way to a `Handout`
_SHORTAGE_S = 0.01  # until it looks again whether this process may open more files
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
MOST_DESCRIPTORS = 253
"""of a `Handout`, since Linux sends no more in one message"""
_WINDOW, _PROCESS = range(2)  # numbers of what a rank gives to the others


@contextlib.contextmanager
def share_descriptors(window: int, peers: Peers) -> Iterator[tuple[list[int], dict[int, int]]]:
    """Give every rank's file descriptors to all ranks. Collective, in a step of `Peers.together`.

    `window` is the descriptor of this rank's window. Gives those of all windows, and by rank those
    of the other ranks' processes, where they could give one. The caller closes its own, and those
    of processes where nothing has failed. Before the context ends the ranks wait for one another:
    some may yet ask at this rank's socket.

    Raises RuntimeError if the ranks are on several machines or cannot reach one another's
    sockets, may not open enough files, or a rank has ended, and TimeoutError if a rank did not
    answer.
    """
    rank = peers.rank
    size = peers.size
    if size == 1:
        yield [window], {}
        return
    # Half, so that a rank whose wait fails here can still report it in time.
    timeout_s = min(SOCKET_TIMEOUT_S, (peers.timeout_s or 2 * SOCKET_TIMEOUT_S) / 2)
    with (
        contextlib.closing(Handout()) as handout,
        contextlib.ExitStack() as stack,
        contextlib.ExitStack() as undo,
    ):
        # Offer the own ones, and tell where.
        for number, descriptor in enumerate([os.dup(window), *this_process()]):
            handout.keep(number, descriptor)
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        sockets = peers.all_gather((machine, handout.name))
        if len({machine for machine, _ in sockets}) > 1:
            raise RuntimeError(
                "the ranks of a node are on several machines: set topology.ranks_per_node to the "
                "ranks of one machine"
            )

        # Connect to all others, and wait until all have reached all: a rank that fails later cuts
        # off nobody who still connects.
        deadline = time.monotonic() + timeout_s
        problems = {}
        connections = {}
        for peer in range(size):
            if peer == rank:
                continue
            problems[peer] = f"rank {rank} cannot reach rank {peer}'s socket"
            _, name = sockets[peer]
            connected = _connected(name, problems[peer], deadline)
            connections[peer] = stack.enter_context(connected)
        peers.all_gather(None)

        # Take what they give. Windows are closed in the end, processes after a failure.
        windows = {rank: window}
        processes = {}
        for peer, connection in connections.items():
            received = _received(connection, problems[peer], deadline)
            for number, descriptor in received.descriptors.items():
                if number == _PROCESS:
                    undo.callback(os.close, descriptor)
                    processes[peer] = descriptor
                else:
                    stack.callback(os.close, descriptor)
                    windows[peer] = descriptor
            # Without the descriptor of a process, its end would be seen at a deadline only.
            if received.lost or peer not in windows:
                raise RuntimeError(
                    f"{problems[peer]}: it has closed it, or `ulimit -n` is too low here"
                )
        yield [windows[peer] for peer in range(size)], processes
        undo.pop_all()


class Handout:
    """Gives descriptors by number to this user's processes that ask at its abstract socket, by
    `fetch_descriptor`.

    `close` ends it, as the end of this object does. A forked child has no part in it: its copies of
    the socket and of the descriptors are closed, or they would outlive the process that answers.
    """

    def __init__(self) -> None:
        self.name = f"\0epmoe-{secrets.token_hex(16)}"  # an abstract one leaves no file
        self._kept = dict[int, int]()
        self._lock = Lock()
        stack = contextlib.ExitStack()
        stack.callback(_close_all, self._kept)
        self._listener = stack.enter_context(_handing_out(self.name, self._kept, self._lock))
        self.close = weakref.finalize(self, stack.close)
        self.close.atexit = False
        _open.add(self)

    def disown(self) -> None:
        """In a forked child: close its copies. Its only thread waits for no lock of another one."""
        self._listener.close()
        _close_all(self._kept)

    def keep(self, number: int, descriptor: int) -> None:
        """Give a descriptor, in place of the last one of this number, and close it in the end."""
        with self._lock:
            if number in self._kept:
                os.close(self._kept.pop(number))
            self._kept[number] = descriptor

    def drop(self, most: int) -> None:
        """Keep the `most` largest numbers at most."""
        with self._lock:
            too_many = max(len(self._kept) - most, 0)
            for number in sorted(self._kept)[:too_many]:
                os.close(self._kept.pop(number))

    def drop_others(self, numbers: set[int]) -> None:
        """Keep none but these numbers."""
        with self._lock:
            for number in self._kept.keys() - numbers:
                os.close(self._kept.pop(number))


_open = weakref.WeakSet[Handout]()


def _disown_all() -> None:
    for handout in list(_open):
        handout.disown()


os.register_at_fork(after_in_child=_disown_all)


def fetch_descriptor(name: str, number: int, what: str) -> int:
    """Fetch a descriptor of a `Handout`. The caller closes it.

    Raises RuntimeError, which begins with `what`, where it is not there, and TimeoutError where
    nobody answers.
    """
    deadline = time.monotonic() + SOCKET_TIMEOUT_S
    with _connected(name, what, deadline) as connection:
        kept = _received(connection, what, deadline)
    found = kept.descriptors.pop(number, None)
    _close(kept.descriptors.values())
    if found is None:
        raise RuntimeError(
            f"{what}: its process does not keep it any more (or `ulimit -n` is too low here)"
        )
    return found


class _Received(NamedTuple):
    """What a `Handout` keeps."""

    descriptors: dict[int, int]
    """by number"""
    lost: list[int]
    """numbers of others, for which this process may not open more files"""


def _received(connection: socket.socket, what: str, deadline: float) -> _Received:
    """Read all that a `Handout` has sent. This process may have no room to open some of it. Raises
    TimeoutError, which begins with `what`.
    """
    _set_deadline(connection, deadline)
    try:
        message, descriptors, _, _ = socket.recv_fds(
            connection, 8 * MOST_DESCRIPTORS, MOST_DESCRIPTORS
        )
    except TimeoutError:
        raise TimeoutError(f"{what}: its process does not answer") from None
    # The message has the number of each descriptor, in their order: int64 words.
    numbers = struct.unpack(f"{len(message) // 8}q", message)
    arrived = len(descriptors)
    by_number = dict(zip(numbers[:arrived], descriptors, strict=True))
    return _Received(by_number, lost=list(numbers[arrived:]))


class _Server:
    """Answers connections to a socket with all descriptors that are kept."""

    def __init__(self, listener: socket.socket, kept: dict[int, int], lock: Lock) -> None:
        self._listener = listener
        self._kept = kept
        self._lock = lock
        self.ended = False
        """whether the socket is shut down, or about to be"""

    def serve(self) -> None:
        """Answer until the socket is shut down."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                # It was shut down, or this process may open no more files for now.
                if self.ended or error.errno not in _SHORTAGES:
                    return
                time.sleep(_SHORTAGE_S)
                continue
            # OSError: the process that has asked has left.
            with connection, self._lock, contextlib.suppress(OSError):
                if _user_of(connection) == os.getuid():
                    numbers = struct.pack(f"{len(self._kept)}q", *self._kept)
                    socket.send_fds(connection, [numbers], list(self._kept.values()))


@contextlib.contextmanager
def _handing_out(name: str, kept: dict[int, int], lock: Lock) -> Iterator[socket.socket]:
    """Send all that is kept to each of this user's processes that connects to an abstract socket,
    on a thread. Yields the socket.

    It takes every connection at once: other users can connect, too, and must not fill the socket's
    queue.
    """

    owner = os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(_BACKLOG)
        server = _Server(listener, kept, lock)
        thread = Thread(target=server.serve, daemon=True, name="epmoe-sockets")
        try:
            start_thread(thread)
            yield listener
        finally:
            # A fork has closed its copy, and leaves this one open.
            if os.getpid() == owner:
                server.ended = True
                listener.shutdown(socket.SHUT_RDWR)
                # A signal handler may have raised before the thread had started.
                if thread.is_alive():
                    thread.join()


@contextlib.contextmanager
def _connected(name: str, what: str, deadline: float) -> Iterator[socket.socket]:
    """Connect to an abstract socket. Raises RuntimeError, which begins with `what`, if nobody
    answers there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _set_deadline(connection, deadline)
        while True:
            try:
                connection.connect(name)
                break
            except BlockingIOError as error:
                # Its queue is full, which its process empties.
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{what}: other processes of this machine connect to it all the time"
                    ) from error
                time.sleep(1e-3)
            except OSError as error:
                raise RuntimeError(
                    f"{what} ({error}): its process has closed it, or is in a container with "
                    "another network namespace"
                ) from error
        # Every user can take the name of a process that has ended.
        if _user_of(connection) != os.getuid():
            raise RuntimeError(f"{what}: another user answers at the socket of its process")
        yield connection


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _close_all(kept: dict[int, int]) -> None:
    while kept:
        os.close(kept.popitem()[1])


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    """Let the next call raise TimeoutError once `deadline` has passed. A timeout of 0 would not
    wait at all.
    """
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))


def _user_of(connection: socket.socket) -> int:
    """The number of the user whose process is at the other end."""
    nbytes = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, nbytes)
    _process, user, _group = struct.unpack("3i", credentials)
    return int(user)
