"""Streams of a GPU that no other code uses.

torch has 32 streams of each priority, and hands out the same ones again and again. Another thread
may capture a graph on a stream of torch's, or run kernels on it that wait for ranks. A copy that
must wait for no kernel needs a stream that no other code has.
"""

from __future__ import annotations

import os
from collections import deque

import torch

from epmoe.native import ops

HIGH = -1
"""The priority of copies and transfers for which kernels of a round wait."""

_ended = deque[int]()
"""The handles of streams whose objects are gone, until the streams are destroyed."""

# In a forked child they are forgotten: the streams belong to the parent, whose work may be on them.
os.register_at_fork(after_in_child=_ended.clear)


class EndsWithItsOwner:
    """A base class of streams. When the object is gone, the handle of its stream goes into
    `_ended`, to be destroyed later.

    It uses `__del__` and no `weakref.finalize`: torch's class of CUDA streams does not clear weak
    references when an object ends (`THCPStream` of torch 2.11), so a later garbage collection would
    read memory that is free.
    """

    handle = 0

    def __del__(self) -> None:
        # The garbage collector calls this on any thread, so it must not call CUDA. At the end of
        # the process the list may be gone. The streams then end with the process.
        if self.handle and _ended is not None:
            _ended.append(self.handle)


class _OwnStream(EndsWithItsOwner, torch.cuda.ExternalStream):
    """A stream that `own_stream` has made."""


def own_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Make a stream of a GPU that waits for no default stream.

    Any thread may call it, also while another thread captures a graph. The stream stays as long as
    the returned object and the work on the stream. It is destroyed when a later stream is made.
    Raises RuntimeError if CUDA cannot make a stream.
    """
    _destroy_idle()
    index = torch.cuda.current_device() if device.index is None else device.index
    handle = ops.make_stream(index, priority)
    stream = _OwnStream(handle, device)
    stream.handle = handle
    return stream


def _destroy_idle() -> None:
    """Destroy the streams whose objects are gone and whose work has ended."""
    for _ in range(len(_ended)):
        try:
            handle = _ended.popleft()
        except IndexError:
            # Another thread has taken the rest of the list.
            return
        # A stream that still has work stays in the list.
        if not ops.end_stream(handle):
            _ended.append(handle)
