"""Copies of weights into a GPU's memory while rounds go on, also from memory that another process has shared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epmoe.exchange.gpu_memory import GpuMemory
from epmoe.group.waiting import device_ends

_GLANCE_S, _LATE_S = 2e-4, 60.0  # between two looks at copies, and until they are late


class GpuCopies:
    """Copies on a stream of their own. `memory` maps what they read, and unmaps it once they have ended."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._end = torch.cuda.Stream(device), torch.cuda.Event()
        self.memory = GpuMemory(device, self._await_end)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched within it waits for no round, and has ended behind it, or TimeoutError is raised."""
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._end.record()  # torch may have given others this stream, too: it need not become idle
            self._await_end()

    def _await_end(self) -> None:
        deadline = time.monotonic() + _LATE_S
        while not self._end.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"copies of weights have not ended within {_LATE_S} s")
            time.sleep(_GLANCE_S)


def idle(device: torch.device) -> None:
    """Wait until a GPU has done all that was launched. Raises TimeoutError."""
    if not device_ends(device, _LATE_S):
        raise TimeoutError(f"{device} has not done within {_LATE_S} s what was launched on it")


def copies_on(device: torch.device) -> GpuCopies | None:
    """None on CPUs, where copies end at once."""
    return GpuCopies(device) if device.type == "cuda" else None
