"""Work that runs on a stream of its own, beside the current stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epmoe.native.streams import own_stream

_streams: dict[int, torch.cuda.Stream] = {}  # by device


def record_point(device: torch.device) -> torch.cuda.Event | None:
    """The point that the current stream has reached; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class SideStream:
    """A call `work(x)` that runs on another stream, behind the point `start` of the current one; on
    the CPU at once. The result lies in memory of the other stream, whose next work starts behind a
    later point of the current stream. So nothing overwrites what the current stream still reads,
    also in replays of a graph that has captured both.
    """

    def __init__(
        self, start: torch.cuda.Event | None, work: Callable[[Tensor], Tensor], x: Tensor
    ) -> None:
        self._end: torch.cuda.Event | None = None
        if start is None:
            self._result = work(x)
            return
        # One stream for each device, which threads may make at the same time.
        device = x.get_device()
        stream = _streams.get(device) or _streams.setdefault(device, own_stream(x.device))
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            self._result = work(x)
            self._end = torch.cuda.Event()
            self._end.record(stream)

    def result(self) -> Tensor:
        """The result, for the current stream, which waits for it."""
        if self._end is not None:
            stream = torch.cuda.current_stream(self._result.device)
            stream.wait_event(self._end)
            # The next round may be on another stream.
            if not torch.cuda.is_current_stream_capturing():
                self._result.record_stream(stream)
        return self._result
