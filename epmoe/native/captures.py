"""What a thread may do while another one captures a CUDA graph.

By default CUDA refuses to all threads what would not go into a graph, such as to map memory or to
ask whether a copy has ended. The refusal also ends the capture. A thread may say that it does not
need this protection.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int
from functools import cache

import torch

_RELAXED = 2  # of `CUstreamCaptureMode`


@contextmanager
def relaxed() -> Iterator[None]:
    """Allow this thread inside what CUDA refuses during a capture by another thread.

    Nobody may ask for a stream that is being captured all the same, or wait for the whole GPU.
    """
    before = relax()
    try:
        yield
    finally:
        _exchange(before)


def relax() -> int:
    """Allow this thread the same from now on. Returns the mode that it had."""
    # A thread has no CUDA context before its first call of the runtime: this is one.
    torch.cuda.is_current_stream_capturing()
    return _exchange(_RELAXED)


def _exchange(mode: int) -> int:
    """Set the mode of this thread, and return the one before."""
    value = c_int(mode)
    code = _driver().cuThreadExchangeStreamCaptureMode(byref(value))
    if code:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode of CUDA failed: error {code}")
    return value.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
