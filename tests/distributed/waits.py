"""Waits of a rank for others: how long they may take, and signals in the middle of one.

A machine may stop any process for seconds. So these helpers wait until a thread sleeps, and no time
passes for it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

LONG_S = 300.0
"""A deadline that a test which passes has not run into."""
AT_ONCE_S = 5.0
"""What this rank does alone: a fraction of a second, where this machine has a core for
each rank.
"""
SOON_S = 60.0
"""What ranks do together without a deadline of `LONG_S`, also where one of them gets no core for
seconds.
"""
SHORT_S = 2.0
"""A deadline that tests run into, and that ranks which come do not, although the
machine is busy.
"""
LOOK_S = 0.01


@contextmanager
def stalls() -> Iterator[Callable[[], float]]:
    """Yields how long this process has not run since, in seconds: a thread that wakes up all the
    time has come late.
    """
    ended = threading.Event()
    beat = time.monotonic()
    late_s = 0.0

    def stalled_s() -> float:
        return late_s + max(0.0, time.monotonic() - beat - 2 * LOOK_S)

    # A thread looks at the clock all the time: what it misses the process has missed.
    def look() -> None:
        nonlocal beat, late_s
        while not ended.wait(LOOK_S):
            beat = time.monotonic()
            late_s = stalled_s()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield stalled_s
    finally:
        ended.set()
        thread.join()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """So long at most, but for the time in which this process has not run."""
    with stalls() as stalled_s:
        started = time.monotonic()
        yield
        assert time.monotonic() - started - stalled_s() < seconds


def until(condition: Callable[[], object], within_s: float = SOON_S) -> None:
    """Looks again and again. Raises AssertionError where the condition takes longer."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(LOOK_S)


def until_it_sleeps(process: int, looks: int = 3) -> None:
    """Returns when the main thread of a process has slept in so many looks in a row, as in a wait
    for other ranks, or after 500 looks: some waits for GPUs do not sleep.
    """
    # The state of the thread is the field behind its name.
    seen = 0
    for _ in range(500):
        time.sleep(LOOK_S)
        state = (
            Path(f"/proc/{process}/task/{process}/stat").read_text().rpartition(")")[2].split()[0]
        )
        seen = seen + 1 if state == "S" else 0
        if seen == looks:
            return


@contextmanager
def meanwhile(call: Callable[[], object], after_s: float = 0.0) -> Iterator[None]:
    """Another thread calls it once the main thread has waited for so long."""

    def run() -> None:
        until_it_sleeps(os.getpid())
        time.sleep(after_s)
        call()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@contextmanager
def says_that_it_waits(key: str, after_s: float = 0.0) -> Iterator[None]:
    """For other ranks, which `store().wait` for the key, and one of which deletes it."""
    with meanwhile(lambda: store().set(key, ""), after_s):
        yield


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def signalled(number: int, after_s: float = 0.0) -> Iterator[None]:
    """This process gets a signal in its wait, which then ends at once."""
    sent = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    with meanwhile(send, after_s), stalls() as stalled_s:
        yield
        assert time.monotonic() - sent[0] - stalled_s() < AT_ONCE_S


@contextmanager
def ctrl_c(after_s: float = 0.0, then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Somebody presses Ctrl-C in the meantime, and the KeyboardInterrupt comes at once. Its handler
    calls `then`.
    """

    def handler(*_: object) -> None:
        then()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    with signalled(signal.SIGINT, after_s), pytest.raises(KeyboardInterrupt):
        yield
    signal.signal(signal.SIGINT, signal.default_int_handler)  # torchrun may have left another
