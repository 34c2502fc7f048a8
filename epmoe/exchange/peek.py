"""Reads buffers of a GPU on the host at any time: the copy waits for no kernel, and no kernel for
the copy.
"""

from __future__ import annotations

import math
import time
from functools import cache
from threading import RLock

import torch
from torch import Tensor

from epmoe.group.waiting import first_answer
from epmoe.native.streams import HIGH, own_stream

LONG_S = 0.2
"""Longer than a copy takes on a GPU that works, and shorter than any deadline."""


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all buffers: the driver has few queues, in which a copy may wait behind a kernel of
    another stream. Streams of models rarely have its priority, nor then its queue.
    """
    return own_stream(device, HIGH)


class Peek:
    """Copies of buffers on the host. On a GPU they travel on a stream that no kernel is on, by the
    copy engines.

    The buffers are contiguous and of one device. Any thread may read, and a signal handler during a
    read.
    """

    def __init__(self, *buffers: Tensor) -> None:
        self._buffers = buffers
        self._on_gpu = buffers[0].is_cuda
        if self._on_gpu:
            self._stream = _stream_of(buffers[0].device)
            self._event = torch.cuda.Event()
            self._lock = RLock()
            # There is a copy whose reader did not wait for it.
            self._under_way = False
            # A later read outside inference mode must be able to write them.
            with torch.inference_mode(False):
                self._copies = [
                    torch.empty_like(buffer, device="cpu", pin_memory=True) for buffer in buffers
                ]

    def read(self) -> list[Tensor]:
        """What the buffers hold now, in tensors of the caller's."""
        read = self.read_within(math.inf)
        assert read is not None
        return read

    def read_within(self, timeout_s: float) -> list[Tensor] | None:
        """The same; None where no copy has come in time."""
        if not self._on_gpu:
            return [buffer.clone() for buffer in self._buffers]
        until_s = time.monotonic() + timeout_s
        with self._lock:
            # The copies are written by one at a time.
            if self._under_way and not self._has_come(until_s):
                return None
            with torch.cuda.stream(self._stream):
                for copy, buffer in zip(self._copies, self._buffers, strict=True):
                    copy.copy_(buffer, non_blocking=True)
                self._event.record()
            self._under_way = True
            if not self._has_come(until_s):
                return None
            return [copy.clone() for copy in self._copies]

    def _has_come(self, until_s: float) -> bool:
        """Whether the copy is here, by then at the latest."""
        if until_s == math.inf:
            self._event.synchronize()
        self._under_way = not first_answer(self._event.query, until_s)
        return not self._under_way
