"""Copies of weights while rounds go on, also from memory that another process has shared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from epmoe.exchange.gpu_memory import GpuMemory
from epmoe.group.waiting import device_ends, first_answer
from epmoe.native.streams import own_stream

_GLANCE_S, _LATE_S = 2e-4, 60.0  # between two looks at copies, and until they are late


Tensors = dict[str, Tensor]


class HostCopies:
    """Copies in the host's memory, which end at once."""

    memory = None
    running = staticmethod(nullcontext)

    def begin_thread(self) -> None: ...

    def owned(self, mapped: Tensors) -> Tensors:
        return mapped

    def free(self, own: Tensors, spare: Tensors, weights: Tensors) -> Tensors:
        """Of two sets the memory that does not serve."""
        return {
            name: (spare if own[name].data_ptr() == w.data_ptr() else own)[name]
            for name, w in weights.items()
        }

    def use(self, staged: Tensors, weights: Tensors) -> None:
        for name, weight in weights.items():
            weight.data = staged[name]


class GpuCopies:
    """Copies on a stream of their own. `memory` maps what they read, and unmaps it once they have
    ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = own_stream(device)
        self._end = torch.cuda.Event()
        self.memory = GpuMemory(device, self._await_end)
        self.begin_thread = (
            self.memory.relax_captures
        )  # it copies while another thread captures a graph

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched within it waits for no round, and has ended behind it, or TimeoutError
        is raised.
        """
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._end.record()
            self._await_end()

    def owned(self, mapped: Tensors) -> Tensors:
        """Tensors that may outlive the mapped memory of another process."""
        with torch.inference_mode(False):
            owned = {
                name: torch.empty_like(value) for name, value in mapped.items()
            }  # this stream's
        with self.running():
            for name, value in owned.items():
                value.copy_(mapped[name])
        return owned

    def free(self, own: Tensors, spare: Tensors, weights: Tensors) -> Tensors:
        return spare

    @torch.inference_mode()
    def use(self, staged: Tensors, weights: Tensors) -> None:
        """Copy, since CUDA graphs have the addresses of the weights."""
        for name, weight in weights.items():
            weight.copy_(staged[name])

    def _await_end(self) -> None:
        if not first_answer(self._end.query, time.monotonic() + _LATE_S, _GLANCE_S):
            raise TimeoutError(f"copies of weights have not ended within {_LATE_S} s")


def idle(device: torch.device) -> None:
    """Wait until a GPU has done all that was launched. Raises TimeoutError."""
    if not device_ends(device, _LATE_S):
        raise TimeoutError(f"{device} has not done within {_LATE_S} s what was launched on it")


def copies_on(device: torch.device) -> HostCopies | GpuCopies:
    return GpuCopies(device) if device.type == "cuda" else HostCopies()
