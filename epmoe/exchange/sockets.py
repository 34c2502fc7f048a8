"""File descriptors that processes of one user pass on over abstract Unix sockets.

The ranks of a group share those of their windows, and a `Handout` gives its own to whoever asks.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from epmoe.group.deaths import this_process
from epmoe.group.peers import Peers

SOCKET_TIMEOUT_S = 60.0
_BACKLOG = 64  # connections on their way to a `Handout`
_SHORTAGE_S = 0.01  # until it looks again whether this process may open more files
_MOST_DESCRIPTORS = 253  # of one message, by Linux


def share_descriptors(window: int, peers: Peers) -> tuple[list[int], dict[int, int]]:
    """Every rank's file descriptors. Collective, in a step of `Peers.together`.

    Each rank connects to all others before it accepts, so ranks cannot wait for one another in a circle.

    `window` is the descriptor of this rank's window. Returns those of all windows, and by rank those of the other
    ranks' processes, where they could give one. The caller closes both.

    Raises RuntimeError where the ranks are on several machines or cannot reach one another's sockets, or a rank has
    ended, and TimeoutError where a rank did not answer.
    """
    rank, size = peers.rank, peers.size
    if size == 1:
        return [window], {}
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
        stack.callback(close_all, process)
        deadline = time.monotonic() + timeout_s
        for _ in range(size - 1):
            try:
                connection = admitted.get(timeout=max(deadline - time.monotonic(), 0))
            except Empty:
                raise TimeoutError("a rank did not connect to this rank's socket") from None
            if isinstance(connection, OSError):
                raise connection
            with connection:
                socket.send_fds(connection, [b"w"], [window, *process])
        received: dict[int, list[int]] = {}
        try:
            for peer, connection in connections.items():
                _set_deadline(connection, deadline)
                message, received[peer], _, _ = socket.recv_fds(connection, 1, 2)
                if not message or not received[peer]:
                    raise RuntimeError(
                        f"rank {peer} closed its socket before it sent its window, or this process may not open more "
                        "files (`ulimit -n`)"
                    )
        except BaseException:
            close_all(itertools.chain(*received.values()))
            raise
        windows = [window if peer == rank else received[peer][0] for peer in range(size)]
        return windows, {peer: fds[1] for peer, fds in received.items() if fds[1:]}


class Handout:
    """Gives descriptors by number to this user's processes that ask at its abstract socket, by `fetch_descriptor`."""

    def __init__(self) -> None:
        self.name, self._kept, self._lock = _new_name(), dict[int, int](), Lock()
        stack = contextlib.ExitStack()
        stack.callback(lambda kept: close_all(kept.values()), self._kept)
        stack.enter_context(_admitting(self.name, _BACKLOG, partial(_hand_out, self._kept, self._lock)))
        weakref.finalize(self, stack.close).atexit = False

    def keep(self, number: int, descriptor: int) -> None:
        """Give a descriptor, in place of the last one of this number, and close it in the end."""
        with self._lock:
            close_all([self._kept.pop(number)] if number in self._kept else [])
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
    close_all(kept.values())
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


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    """Let the next call raise TimeoutError once `deadline` has passed. A timeout of 0 would not wait at all."""
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
