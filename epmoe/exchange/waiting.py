"""Waits that may block for long, beside which this thread still runs signal handlers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from threading import Thread

import torch


def device_ends(device: torch.device, timeout_s: float | None = None, look: Callable[[], None] = lambda: None) -> bool:
    """Waits for everything that has been launched on a GPU, as `interruptible` does. Returns whether it has ended."""
    return device.type == "cpu" or interruptible(partial(torch.cuda.synchronize, device), timeout_s, look)


def interruptible(
    wait: Callable[[], None], timeout_s: float | None = None, look: Callable[[], None] = lambda: None
) -> bool:
    """Calls `wait`, which may block for long, on another thread, so that this thread can run signal handlers meanwhile.

    Args:
        wait: runs to its end, also after this function has returned.
        timeout_s: how long this function waits, in seconds; None: until `wait` ends.
        look: called about every 20 ms. What it raises ends this function.

    Returns:
        Whether `wait` has ended.

    Raises:
        BaseException: what `wait`, `look` or a signal handler raises.
    """
    errors: list[BaseException] = []

    def call() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=call, daemon=True)  # which must not keep the process alive
    thread.start()
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.02)
        look()
    if errors:
        raise errors[0]
    return not thread.is_alive()
