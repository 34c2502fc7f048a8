"""The interfaces of copies that run at the same time as rounds. cpu.py and gpu.py implement them.

`Lane` carries words and weights between ranks while experts move. `WeightCopies` takes new versions
of weights from a trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from epmoe.exchange.places import Memory

Tensors = dict[str, Tensor]


class Lane(ABC):
    """A queue of copies, which run one after another and wait for no round.

    A lane also reads the board: the words that other ranks have written into this rank's window.
    """

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """A context. Copies that the caller launches within it join the queue."""

    @abstractmethod
    def follow(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """Make later copies of the lane wait for all work that was launched on these streams."""

    @abstractmethod
    def words(self) -> Tensor | None:
        """The words on the board. On a GPU each of them is read by a copy: None means that the copy
        is still on its way, and the caller asks again later.
        """

    @abstractmethod
    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy `source` to `to`. The caller changes neither tensor before the copy has ended."""

    @abstractmethod
    def readable(self, source: Tensor) -> Tensor:
        """Return a tensor of the host in memory that a copy engine can read directly: on a GPU a
        pinned copy, on the CPU the tensor itself.
        """

    @abstractmethod
    def upload(self, source: Tensor) -> Tensor:
        """Copy a tensor of the host to the device of the rounds, and wait until it is there. Any
        thread may call it.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until all copies of the lane have ended."""


class WeightCopies(ABC):
    """Copies of weights on one device. The source may be memory that another process shares.

    `memory` maps the shared memory, and waits for the copies before it unmaps it. It is None on
    CPUs, where the shared memory is a mapped file.
    """

    memory: Memory | None

    @abstractmethod
    def begin_thread(self) -> None:
        """Prepare the current thread for copies. A thread that copies calls it first, since another
        thread may be capturing a CUDA graph meanwhile.
        """

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """A context. Copies that the caller launches within it wait for no round, and have ended
        when the context ends. Raises TimeoutError if they take too long.
        """

    @abstractmethod
    def owned(self, mapped: Tensors) -> Tensors:
        """Return the weights in tensors that stay valid after the memory of the other process is
        unmapped.
        """

    @abstractmethod
    def free(self, own: Tensors, spare: Tensors, weights: Tensors) -> Tensors:
        """Return tensors into which the next version may be written. Of the sets `own` and `spare`
        they are those that the model's `weights` do not use now.
        """

    @abstractmethod
    def use(self, staged: Tensors, weights: Tensors) -> None:
        """Make the model use the staged tensors' values as its `weights`."""
