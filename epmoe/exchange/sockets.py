"""Passes file descriptors between processes of one user, over abstract Unix sockets.

`Handout` is the server: it gives its descriptors to every process of the user that asks. The ranks
of a group use it to share the descriptors of their windows (`share_descriptors`). Other processes
fetch a single descriptor by its number (`fetch_descriptor`).
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
_BACKLOG = 64  # connections that may wait in the queue of a `Handout`
_SHORTAGE_S = 0.01  # how long a `Handout` waits when this process may open no more files for now
# Errors that say so.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
MOST_DESCRIPTORS = 253
"""How many descriptors a `Handout` may have. Linux sends no more in one message."""
# The numbers of the descriptors that a rank gives to the other ranks of its group.
_WINDOW, _PROCESS = range(2)


@contextlib.contextmanager
def share_descriptors(window: int, peers: Peers) -> Iterator[tuple[list[int], dict[int, int]]]:
    """A context in which this rank has the file descriptors of all ranks' windows.

    Every rank enters it, in a step of `Peers.together`. Within the context, ranks must wait for one
    another before any of them leaves it: a rank may still ask at this rank's socket.

    Args:
        window: the descriptor of this rank's window. The caller closes it.
        peers: the ranks of the group.

    Yields:
        The descriptors of all windows by rank, which are closed at the end of the context. By rank,
        the descriptors of the other ranks' processes, of those that could give one. The caller
        closes these, unless the context ends by an exception.

    Raises:
        RuntimeError: the ranks are on several machines, cannot reach one another's sockets or may
            not open enough files, or a rank has ended.
        TimeoutError: a rank did not answer.
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
        # Offer this rank's descriptors, and tell the other ranks the name of the socket.
        for number, descriptor in enumerate([os.dup(window), *this_process()]):
            handout.keep(number, descriptor)
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        sockets = peers.all_gather((machine, handout.name))
        if len({machine for machine, _ in sockets}) > 1:
            raise RuntimeError(
                "the ranks of a node are on several machines: set topology.ranks_per_node to the "
                "ranks of one machine"
            )

        # Connect to all other ranks, and wait until every rank has done so. A rank that fails later
        # closes its socket, and by then nobody needs to connect to it.
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

        # Receive the descriptors. Those of windows are closed at the end of the context, and those
        # of processes only after a failure.
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
            # A descriptor was lost, or the window's never came. Even a lost descriptor of a process
            # is an error: without it this rank would see the end of the process only at a deadline.
            if received.lost or peer not in windows:
                raise RuntimeError(
                    f"{problems[peer]}: it has closed it, or `ulimit -n` is too low here"
                )
        yield [windows[peer] for peer in range(size)], processes
        # Nothing has failed: the caller keeps the descriptors of processes.
        undo.pop_all()


class Handout:
    """A server that gives numbered descriptors to other processes of this user.

    A thread answers at an abstract socket, whose `name` the other processes must know. The server
    ends by `close`, or when this object is gone.

    A forked child does not serve. Its copies of the socket and of the descriptors are closed at the
    fork, since they would otherwise outlive the process that answers.
    """

    def __init__(self) -> None:
        # The leading zero byte makes it an abstract socket, which leaves no file behind.
        self.name = f"\0epmoe-{secrets.token_hex(16)}"
        self._kept = dict[int, int]()
        self._lock = Lock()
        stack = contextlib.ExitStack()
        stack.callback(_close_all, self._kept)
        self._listener = stack.enter_context(_serve_descriptors(self.name, self._kept, self._lock))
        self.close = weakref.finalize(self, stack.close)
        self.close.atexit = False
        _open.add(self)

    def disown(self) -> None:
        """Close the copies of the socket and of the descriptors, in a forked child.

        It takes no lock: the child has one thread only, and a lock that another thread of the
        parent held at the fork is never released in the child.
        """
        self._listener.close()
        _close_all(self._kept)

    def keep(self, number: int, descriptor: int) -> None:
        """Take over a descriptor, and give it under this number from now on.

        An earlier descriptor of the same number is closed. The server closes its descriptors at its
        end.
        """
        with self._lock:
            if number in self._kept:
                os.close(self._kept.pop(number))
            self._kept[number] = descriptor

    def drop(self, most: int) -> None:
        """Drop descriptors with small numbers, until at most `most` are left."""
        with self._lock:
            too_many = max(len(self._kept) - most, 0)
            for number in sorted(self._kept)[:too_many]:
                os.close(self._kept.pop(number))

    def drop_others(self, numbers: set[int]) -> None:
        """Drop all descriptors but those of these numbers."""
        with self._lock:
            for number in self._kept.keys() - numbers:
                os.close(self._kept.pop(number))


# All servers of this process that were not collected yet.
_open = weakref.WeakSet[Handout]()


def _disown_all() -> None:
    """Close all copies in a forked child. Python calls it there after each fork."""
    for handout in list(_open):
        handout.disown()


os.register_at_fork(after_in_child=_disown_all)


def fetch_descriptor(name: str, number: int, what: str) -> int:
    """Fetch the descriptor of this number from the `Handout` of this name. The caller closes it.

    `what` is the beginning of each error's text. Raises RuntimeError if the server or the
    descriptor is not there any more, and TimeoutError if the server does not answer.
    """
    deadline = time.monotonic() + SOCKET_TIMEOUT_S
    with _connected(name, what, deadline) as connection:
        received = _received(connection, what, deadline)
    # The server sends all its descriptors: keep the one that was asked for, and close the others.
    descriptor = received.descriptors.pop(number, None)
    _close(received.descriptors.values())
    if descriptor is None:
        raise RuntimeError(
            f"{what}: its process does not keep it any more (or `ulimit -n` is too low here)"
        )
    return descriptor


class _Received(NamedTuple):
    """The descriptors that a `Handout` has sent."""

    descriptors: dict[int, int]
    """those that have arrived, by number"""
    lost: list[int]
    """the numbers of those that were lost, since this process may not open more files"""


def _received(connection: socket.socket, what: str, deadline: float) -> _Received:
    """Read the message of a `Handout`, with all its descriptors.

    Linux drops descriptors if this process may not open more files. Raises TimeoutError, whose text
    begins with `what`, if no message comes before the deadline.
    """
    _set_deadline(connection, deadline)
    try:
        message, descriptors, _, _ = socket.recv_fds(
            connection, 8 * MOST_DESCRIPTORS, MOST_DESCRIPTORS
        )
    except TimeoutError:
        raise TimeoutError(f"{what}: its process does not answer") from None
    # The message is the numbers of the descriptors as int64 words, in the order of the descriptors.
    # If some were dropped, they are the last ones.
    numbers = struct.unpack(f"{len(message) // 8}q", message)
    arrived = len(descriptors)
    by_number = dict(zip(numbers[:arrived], descriptors, strict=True))
    return _Received(by_number, lost=list(numbers[arrived:]))


class _Server:
    """The loop of a `Handout`'s thread: it sends all descriptors to each process that connects."""

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
            # OSError means that the process that has asked is gone.
            with connection, self._lock, contextlib.suppress(OSError):
                if _user_of(connection) == os.getuid():
                    numbers = struct.pack(f"{len(self._kept)}q", *self._kept)
                    socket.send_fds(connection, [numbers], list(self._kept.values()))


@contextlib.contextmanager
def _serve_descriptors(name: str, kept: dict[int, int], lock: Lock) -> Iterator[socket.socket]:
    """A context in which a thread serves the descriptors `kept` at an abstract socket.

    The thread accepts every connection at once, whoever connects: processes of other users can
    connect, too, and must not fill the socket's queue. They get no descriptors. Yields the socket.
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
            # A forked child must not shut the socket down, since the parent still uses it.
            if os.getpid() == owner:
                server.ended = True
                listener.shutdown(socket.SHUT_RDWR)
                # The thread is not alive if a signal handler has raised before it started.
                if thread.is_alive():
                    thread.join()


@contextlib.contextmanager
def _connected(name: str, what: str, deadline: float) -> Iterator[socket.socket]:
    """A context with a connection to an abstract socket of another process of this user.

    Raises RuntimeError, whose text begins with `what`, if no such process listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _set_deadline(connection, deadline)
        while True:
            try:
                connection.connect(name)
                break
            except BlockingIOError as error:
                # The queue of the socket is full. Its process empties the queue, so try again.
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
        # Refuse another user's process, which may have taken the name after the end of ours.
        if _user_of(connection) != os.getuid():
            raise RuntimeError(f"{what}: another user answers at the socket of its process")
        yield connection


def _close(descriptors: Iterable[int]) -> None:
    """Close these descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _close_all(kept: dict[int, int]) -> None:
    """Close all descriptors of a `Handout`, and remove them."""
    while kept:
        os.close(kept.popitem()[1])


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    """Make the next call on the connection raise TimeoutError once `deadline` has passed.

    The timeout is at least 1 ms, since a timeout of 0 would switch waiting off.
    """
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))


def _user_of(connection: socket.socket) -> int:
    """The numeric id of the user whose process is at the other end of a connection."""
    nbytes = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, nbytes)
    _process, user, _group = struct.unpack("3i", credentials)
    return int(user)
