"""Runs work on a second CUDA stream at the same time as the current stream, such as a shared expert
during the exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epmoe.native.streams import own_stream

# The second stream of each device, by the device's number.
_streams: dict[int, torch.cuda.Stream] = {}


def record_point(device: torch.device) -> torch.cuda.Event | None:
    """Record an event at the point that the current stream has reached. Returns None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class SideStream:
    """A call `work(x)` that runs on a second stream.

    The second stream waits for the event `start`, which `record_point` has recorded in the current
    stream, and then runs the work. On the CPU `start` is None, and the work runs at once.

    The result lies in memory of the second stream. The next work there waits for a later point of
    the current stream, so it does not overwrite a result that the current stream still reads. This
    also holds when a CUDA graph that has captured both streams is replayed.
    """

    def __init__(
        self, start: torch.cuda.Event | None, work: Callable[[Tensor], Tensor], x: Tensor
    ) -> None:
        self._end: torch.cuda.Event | None = None
        if start is None:
            self._result = work(x)
            return
        # All calls on a device share one stream. Two threads may make it at the same time, and
        # `setdefault` lets both use the first one.
        device = x.get_device()
        stream = _streams.get(device) or _streams.setdefault(device, own_stream(x.device))
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            self._result = work(x)
            self._end = torch.cuda.Event()
            self._end.record(stream)

    def result(self) -> Tensor:
        """Return the result. The current stream waits until it has been computed."""
        if self._end is not None:
            stream = torch.cuda.current_stream(self._result.device)
            stream.wait_event(self._end)
            # The current stream may be another one than at the start. The memory of the result must
            # not be reused before this stream has read it. In a capture the graph sees to that.
            if not torch.cuda.is_current_stream_capturing():
                self._result.record_stream(stream)
        return self._result
