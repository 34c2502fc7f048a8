"""Streams of a GPU that nobody else has.

torch has 32 streams of a priority, and hands them out again and again. So a stream of torch's may
be the very one that another thread of the host captures, or runs kernels on that wait for ranks. A
copy that is to wait for nobody needs a stream of its own.
"""

from __future__ import annotations

import os
from collections import deque

import torch

from epmoe.native import ops

HIGH = -1
"""The priority of copies and transfers for which kernels of a round wait."""

_ended = deque[int]()
"""Handles of streams that nobody has any more, until they are destroyed."""

# They belong to the parent, whose work may be on them.
os.register_at_fork(after_in_child=_ended.clear)


class EndsWithItsOwner:
    """A stream whose handle is kept to be destroyed once nobody has the object.

    torch's streams of CUDA take weak references and leave them behind as they end (`THCPStream` of
    torch 2.11 clears none), so that a later collection reads memory that is free. A finalizer of
    the object itself needs none.
    """

    handle = 0

    def __del__(self) -> None:
        # A collection, on any thread, does nothing of CUDA. The end of the process ends all
        # streams, and may have taken the list.
        if self.handle and _ended is not None:
            _ended.append(self.handle)


class _OwnStream(EndsWithItsOwner, torch.cuda.ExternalStream):
    pass


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Make a stream of a GPU that waits for no default stream. Any thread may call it, also while
    another one captures a graph.

    It lives as long as the object that this returns, and as the work on it: it is destroyed when
    the next one is made. Raises RuntimeError if CUDA has no room for it.
    """
    _destroy_idle()
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = ops.make_stream(index, priority)
    stream = _OwnStream(handle, device)
    stream.handle = handle
    return stream


def _destroy_idle() -> None:
    for _ in range(len(_ended)):
        try:
            handle = _ended.popleft()
        except IndexError:  # another thread is here, too
            return
        if not ops.end_stream(handle):
            _ended.append(handle)
