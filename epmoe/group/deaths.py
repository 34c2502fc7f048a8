"""Notices which ranks of this machine have ended. A thread waits for the ends of their processes,
or a caller asks for a process by its name.
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

# When the thread is to end, a call of `note` that is under way may take so long.
_END_S = 2.0

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""the errors that say that this process, or the machine, cannot open more files"""


class Deaths:
    """Watches processes on a thread, until it is closed or collected. In a forked child it does
    nothing.

    `processes` has the descriptor (pidfd) of a process for each rank; this object closes them. Each
    time that a process ends, the thread calls `note` with the mask of all ranks that have ended so
    far. `note` is a method, whose object is kept alive only during such a call.
    """

    def __init__(self, processes: dict[int, int], note: Callable[[int], None]):
        self._processes = processes
        self._mask = 0
        self._close = None
        if processes:
            # Closing one end of a pair of sockets wakes the thread, which waits for the other end.
            # The arguments of the thread keep nothing of this object alive.
            own_end, end_of_thread = socket.socketpair()
            arguments = (dict(processes), end_of_thread, weakref.WeakMethod(note))
            thread = Thread(target=_watch, args=arguments, daemon=True, name="epmoe-deaths")
            # Register the end of the thread before its start: a signal handler may raise right
            # after the start.
            self._close = weakref.finalize(self, _end, os.getpid(), own_end, thread, processes)
            start_thread(thread)

    def mask(self) -> int:
        """The ranks whose processes have ended by now, as a mask."""
        self._mask |= _mask_of(self._processes, _readable(self._processes.values(), 0))
        return self._mask

    def close(self) -> None:
        """End the thread. `mask` returns its last value from then on."""
        if self._close is not None:
            self._close()


def this_process() -> list[int]:
    """Open a new descriptor (pidfd) of this process, and return it in a list. The list is empty if
    the kernel or a sandbox gives no such descriptor.

    Raises OSError if this process cannot open more files. That is an error, and not an empty list,
    because other ranks would not notice the end of this process.
    """
    try:
        return [os.pidfd_open(os.getpid())]
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
    except AttributeError:
        # Python was built for a kernel without such descriptors.
        pass
    return []


def name_of_process() -> str:
    """Return the name of this process, by which other processes call `has_ended`."""
    return f"{_place()}/{os.getpid()}"


def has_ended(name: str) -> bool:
    """Whether the process of this name is known to have ended. It takes microseconds.

    It returns False also if the end of the process cannot be seen from here: on another machine, in
    a container with its own numbers of processes, or if its number belongs to another process by
    now. The name may be any string, since it comes from another rank.
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
    except (OSError, AttributeError):
        # The kernel or a sandbox gives no descriptor.
        return False
    try:
        return bool(_readable([process], 0))
    finally:
        os.close(process)


def processor_time(name: str) -> str:
    """How much processor time the process of this name has used so far: two numbers in ticks of the
    clock, as a string. It is "" if the process cannot be seen from here. It takes microseconds.
    """
    place, _, number = name.rpartition("/")
    if place and place == _place() and number.isdecimal():
        with suppress(OSError):
            # Split behind the name of the program, which stands in parentheses and may hold
            # anything. The 12th and 13th fields from there are the times in user and kernel mode.
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            return " ".join(fields[11:13])
    return ""


def _place() -> str:
    """The place in which a number names one process: this machine since its last start, and its
    namespace of processes, which a container may have for itself. "" if it is unknown.
    """
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _mask_of(processes: dict[int, int], ended: set[int]) -> int:
    """The mask of the ranks whose descriptors are in `ended`."""
    return sum(1 << rank for rank, process in processes.items() if process in ended)


def _readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Wait until a descriptor is readable, and return those that are. The descriptor of a process
    is readable once the process has ended. With `timeout_s=None` it waits without limit.
    """
    # Not `select.select`, which refuses descriptors from 1024 on.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    events = poll.poll(None if timeout_s is None else timeout_s * 1e3)
    return {descriptor for descriptor, event in events if event & select.POLLIN}


def _watch(
    processes: dict[int, int], stop: socket.socket, note: weakref.WeakMethod[Callable[[int], None]]
) -> None:
    """Wait for the ends of processes, and call `note` after each. It is the work of a thread.

    It ends when the other end of the socket `stop` is closed. It must not keep the object of `note`
    alive while it waits.
    """
    mask = 0
    with stop:
        while processes:
            ended = _readable([stop.fileno(), *processes.values()], None)
            call = note()
            if stop.fileno() in ended or call is None:
                return
            mask |= _mask_of(processes, ended)
            # The descriptor of a process that has ended stays readable. Watch only the others.
            processes = {
                rank: process for rank, process in processes.items() if process not in ended
            }
            # The call raises RuntimeError if a GPU has failed. The waits of ranks then end by their
            # deadlines.
            with suppress(RuntimeError):
                call(mask)
            # Drop the reference to the object before the next wait.
            del call


def _end(owner: int, stop: socket.socket, thread: Thread, processes: dict[int, int]) -> None:
    """End the thread and close the descriptors. `owner` is the process that has opened them; in a
    forked child nothing is done.
    """
    if os.getpid() != owner:
        return
    # `close` alone would not wake the thread if a forked child has a copy of the socket.
    stop.shutdown(socket.SHUT_RDWR)
    stop.close()
    # This function may run on the thread itself, which cannot wait for its own end, or before the
    # thread has started.
    if thread.is_alive() and thread is not current_thread():
        thread.join(_END_S)
    for process in processes.values():
        os.close(process)
    processes.clear()
