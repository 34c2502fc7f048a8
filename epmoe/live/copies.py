"""Copies of weights into a GPU's memory while rounds go on, also from memory that another process has shared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from epmoe.exchange.gpu_memory import GpuMemory

_GLANCE_S, _LATE_S = 2e-4, 60.0  # between two looks at copies, and until they are late


class GpuCopies:
    """Copies on a stream of their own. `memory` maps what they read, and unmaps it once they have ended."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.memory = GpuMemory(device, self._stream.synchronize)

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched within it waits for no round, and has ended behind it. Any thread may do so, also while
        another one captures a graph. Raises TimeoutError where the copies do not end."""
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.query()  # a thread has its context from its first call on
            with self.memory.beside_captures():
                yield
                deadline = time.monotonic() + _LATE_S
                while not self._stream.query():
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"copies of weights have not ended within {_LATE_S} s")
                    time.sleep(_GLANCE_S)


def copies_on(device: torch.device) -> GpuCopies | None:
    """None on CPUs, where copies end at once."""
    return GpuCopies(device) if device.type == "cuda" else None
