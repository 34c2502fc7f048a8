"""Addresses that stay: a rank reserves them once, and its groups map windows and scratch there by
turns.
"""

from __future__ import annotations

from torch import Tensor

from epmoe.exchange.left_groups import LeftGroups
from epmoe.exchange.places import Memory, Places
from epmoe.exchange.processor import Processor

_WORDS_BYTES = 512  # room for `Status` and `Progress` of csrc/plan.h


class Addresses:
    """The places of the windows and the scratch of one `ExpertParallel`, through all its groups.

    Groups that are alike have all at the same addresses, so CUDA graphs of one may be replayed in
    another. Each other kind of group has scratch of its own: a kernel of an earlier group finds the
    state there that this group has left.

    `memory` is that of windows and scratch, which the kernels of `processor` reach.
    """

    def __init__(self, memory: Memory, processor: Processor) -> None:
        self.memory = memory
        self.processor = processor
        self.left = LeftGroups()
        self.abandon()

    def abandon(self) -> None:
        """Somebody may still use what is mapped, as long as it lives: the next group has other
        addresses.
        """
        self._windows: Places | None = None
        self._scratch: dict[tuple[int, ...], Places] = {}
        self._words: Tensor | None = None

    def windows(self, ranks: int, nbytes: int) -> Places:
        """For the windows of a group: the same ones as before where they have room and are free,
        otherwise new ones.
        """
        places = self._windows
        if places is not None:
            has_room = ranks <= places.count and nbytes <= places.stride
            if has_room and not places.mapped:
                return places
        self._windows = Places(self.memory, ranks, nbytes)
        return self._windows

    def scratch(self, layout: tuple[int, ...], nbytes: int) -> Tensor:
        """uint8 [nbytes], the same memory for equal layouts until `unmap_scratch`, which keeps its
        address.
        """
        places = self._scratch.get(layout)
        if places is None:
            places = Places(self.memory, 1, nbytes)
            self._scratch[layout] = places
        if places.mapped:
            return places.view(0, nbytes)
        return places.map(0, None, nbytes)

    def words(self) -> Tensor:
        """uint8, on the host: what kernels write for it, zeros."""
        if self._words is None:
            self._words = self.processor.host_memory(_WORDS_BYTES)
        return self._words.zero_()

    def unmap_windows(self) -> None:
        if self._windows is not None:
            self._windows.unmap()

    def unmap_scratch(self) -> None:
        for places in self._scratch.values():
            places.unmap()
