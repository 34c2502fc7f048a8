"""Copies beside the rounds, as a processor makes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from epmoe.exchange.places import Memory

Tensors = dict[str, Tensor]


class Lane(ABC):
    """Copies that follow one another and wait for no round, and a look at a board of words."""

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """What is launched within it is one of these copies."""

    @abstractmethod
    def follow(self, streams: Iterable[torch.cuda.Stream]) -> None:
        """Let what follows happen after all that was launched on these streams."""

    @abstractmethod
    def words(self) -> Tensor | None:
        """The board on the host, as it is now. None while a GPU still reads it."""

    @abstractmethod
    def copy(self, to: Tensor, source: Tensor) -> None:
        """Neither tensor may change before the copy has ended."""

    @abstractmethod
    def readable(self, source: Tensor) -> Tensor:
        """A tensor of the host, in memory that a copy reads without waiting."""

    @abstractmethod
    def upload(self, source: Tensor) -> Tensor:
        """A tensor of the host on the device of the rounds, which it has reached. Any thread may
        call it.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until these copies have ended."""


class WeightCopies(ABC):
    """Copies of weights, also from memory that another process has shared.

    `memory` maps what they read, and unmaps it once they have ended; None on CPUs, where files are
    mapped.
    """

    memory: Memory | None

    @abstractmethod
    def begin_thread(self) -> None:
        """The first call on a thread that copies while another one captures a graph."""

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """What is launched within it waits for no round, and has ended behind it, or TimeoutError
        is raised.
        """

    @abstractmethod
    def owned(self, mapped: Tensors) -> Tensors:
        """Tensors that may outlive the mapped memory of another process."""

    @abstractmethod
    def free(self, own: Tensors, spare: Tensors, weights: Tensors) -> Tensors:
        """Of two sets of tensors the one that does not serve as `weights`."""

    @abstractmethod
    def use(self, staged: Tensors, weights: Tensors) -> None:
        """Let what is staged serve as `weights`."""
