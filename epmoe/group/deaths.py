"""Which ranks of this machine have ended: a thread waits for the ends of their processes, or a look
by name says so.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread, current_thread

from epmoe.group.waiting import start_thread

# How long a note that is under way may take when the thread is to end.
_END_S = 2.0

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""errors of a process, or a machine, that may not open more files"""


class Deaths:
    """Notes the ends of processes until it is closed or collected. In a forked child it does
    nothing.

    `processes` are descriptors (pidfd) by rank, which this object closes. `note` is a method,
    called on another thread with the mask of all ranks that have ended. Its object is kept alive
    during a call only.
    """

    def __init__(self, processes: dict[int, int], note: Callable[[int], None]):
        self._processes = processes
        self._mask = 0
        self._close = None
        if processes:
            # The end of `ours` wakes the thread. It keeps nothing of this object alive.
            ours, theirs = socket.socketpair()
            watched = (dict(processes), theirs, weakref.WeakMethod(note))
            thread = Thread(target=_watch, args=watched, daemon=True, name="epmoe-deaths")
            # First, so that a thread ends also where a signal handler raises behind its start.
            self._close = weakref.finalize(self, _end, os.getpid(), ours, thread, processes)
            start_thread(thread)

    def mask(self) -> int:
        """The ranks whose processes have ended, as a mask."""
        self._mask |= _mask_of(self._processes, _readable(self._processes.values(), 0))
        return self._mask

    def close(self) -> None:
        """End the thread. `mask` stays as it is."""
        if self._close is not None:
            self._close()


def this_process() -> list[int]:
    """Open a new descriptor of this process; [] if the kernel or a sandbox gives none.

    Raises OSError if this process may not open more files: others would not see its end.
    """
    try:
        return [os.pidfd_open(os.getpid())]
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
    except AttributeError:  # a Python that was built for an old kernel
        pass
    return []


def name_of_process() -> str:
    """Names this process for `has_ended` of other processes."""
    return f"{_place()}/{os.getpid()}"


def has_ended(name: str) -> bool:
    """Whether the process of this name is known to have ended. It takes microseconds.

    False also where its end cannot be seen from here: on another machine, in a container with
    processes of its own, or where its number belongs to another process by now. The name may be
    anything: it is the word of another rank.
    """
    place, _, number = name.rpartition("/")
    is_here = place != "" and place == _place()
    is_number = number.isdecimal() and len(number) < 10
    if not is_here or not is_number:
        return False
    try:
        process = os.pidfd_open(int(number))
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # the kernel or a sandbox gives no descriptor
        return False
    try:
        return bool(_readable([process], 0))
    finally:
        os.close(process)


def processor_time(name: str) -> str:
    """What the process of this name has computed so far, in ticks of processors; "" where it cannot
    be seen from here. It takes microseconds.
    """
    place, _, number = name.rpartition("/")
    if place and place == _place() and number.isdecimal():
        with suppress(OSError):
            # Behind the name of the program, which may hold anything: utime and stime.
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            return " ".join(fields[11:13])
    return ""


def _place() -> str:
    """Where numbers of processes mean the same: this machine since its start, and its container; ""
    if unknown.
    """
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _mask_of(processes: dict[int, int], ended: set[int]) -> int:
    """The ranks whose descriptors are among those of ended processes."""
    return sum(1 << rank for rank, process in processes.items() if process in ended)


def _readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Those that are readable, as the descriptor of a process is once it has ended."""
    # Not `select.select`, which refuses descriptors from 1024 on.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    events = poll.poll(None if timeout_s is None else timeout_s * 1e3)
    return {descriptor for descriptor, event in events if event & select.POLLIN}


def _watch(
    processes: dict[int, int], stop: socket.socket, note: weakref.WeakMethod[Callable[[int], None]]
) -> None:
    """Watch processes, on a thread. It must not keep the object of `note` alive."""
    mask = 0
    with stop:
        while processes:
            ended = _readable([stop.fileno(), *processes.values()], None)
            call = note()
            if stop.fileno() in ended or call is None:
                return
            mask |= _mask_of(processes, ended)
            # A process that has ended stays readable: watch the others.
            processes = {
                rank: process for rank, process in processes.items() if process not in ended
            }
            # Where a GPU has failed the note does, and waits run into their deadline.
            with suppress(RuntimeError):
                call(mask)
            # The next wait must not keep the object alive.
            del call


def _end(owner: int, stop: socket.socket, thread: Thread, processes: dict[int, int]) -> None:
    """End the thread and close the descriptors, in the process that has opened them."""
    if os.getpid() != owner:
        return
    # Not `close` alone: a forked child may have a copy of the socket.
    stop.shutdown(socket.SHUT_RDWR)
    stop.close()
    # The object may be collected on the thread itself, or before the thread has started.
    if thread.is_alive() and thread is not current_thread():
        thread.join(_END_S)
    for process in processes.values():
        os.close(process)
    processes.clear()
