"""Waits of a rank for others: how long they may take, and Ctrl-C in the middle of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LONG_S = 300.0
"""A deadline that a test which passes has not run into."""
AT_ONCE_S = 5.0
"""A fraction of a second, where this machine has a core for each rank."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


@contextmanager
def ctrl_c(after_s: float = 0.3) -> Iterator[None]:
    """Somebody presses Ctrl-C in the meantime, and the KeyboardInterrupt comes at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # torchrun may have left another
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    with within(after_s + AT_ONCE_S), pytest.raises(KeyboardInterrupt):
        timer.start()
        yield
    timer.join()
