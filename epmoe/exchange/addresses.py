"""Addresses that stay the same while groups come and go.

A rank reserves them once. Each group that the rank joins later maps its windows and its scratch at
these addresses, after the group before has unmapped its own.
"""

from __future__ import annotations

from torch import Tensor

from epmoe.exchange.left_groups import LeftGroups
from epmoe.exchange.places import Memory, Places, free_left
from epmoe.exchange.processor import Processor

_WORDS_BYTES = 512  # room for `Status` and `Progress` of csrc/plan.h


class Addresses:
    """Where one `ExpertParallel` maps its windows and its scratch, in all groups that it joins.

    Two groups with the same memory plan have every buffer at the same address, so a CUDA graph that
    was captured in one group may be replayed in the other. Groups with different plans have
    different scratch. A replayed kernel of an earlier group therefore reads the state that the
    earlier group has left there, and never the state of the present group.

    `memory` is the kind of memory that windows and scratch are made of. The kernels of `processor`
    must be able to reach it.
    """

    def __init__(self, memory: Memory, processor: Processor) -> None:
        self.memory = memory
        self.processor = processor
        self.left = LeftGroups()
        self.abandon()

    def abandon(self) -> None:
        """Forget all addresses, so that the next group gets new ones.

        A rank calls it when a kernel or another thread may still use the memory that is mapped now.
        """
        self._windows: Places | None = None
        self._scratch: dict[tuple[int, ...], Places] = {}
        self._words: Tensor | None = None

    def windows(self, ranks: int, nbytes: int) -> Places:
        """The addresses for the windows of a group of `ranks`, of up to `nbytes` bytes each.

        They are the addresses of the group before if they are large enough and nothing is mapped
        there any more. Otherwise new addresses are reserved.
        """
        # A group that opens waits for the GPU.
        free_left(waits=True)
        places = self._windows
        if places is not None:
            has_room = ranks <= places.count and nbytes <= places.stride
            if has_room and not places.mapped:
                return places
        self._windows = Places(self.memory, count=ranks, nbytes=nbytes)
        return self._windows

    def scratch(self, layout: tuple[int, ...], nbytes: int) -> Tensor:
        """The scratch of groups with this layout, as uint8 [nbytes].

        Calls with equal layouts return the same memory until `unmap_scratch`. Later calls map new
        memory at the same address.
        """
        places = self._scratch.get(layout)
        if places is None:
            places = Places(self.memory, count=1, nbytes=nbytes)
            self._scratch[layout] = places
        if places.mapped:
            return places.view(place=0, nbytes=nbytes)
        # No descriptor: scratch is memory of this process alone.
        return places.map(place=0, descriptor=None, nbytes=nbytes)

    def words(self) -> Tensor:
        """Host memory, uint8, in which kernels report to the host. Each call sets it to zeros."""
        if self._words is None:
            self._words = self.processor.host_memory(_WORDS_BYTES)
        return self._words.zero_()

    def unmap_windows(self) -> None:
        if self._windows is not None:
            self._windows.unmap()

    def unmap_scratch(self) -> None:
        for places in self._scratch.values():
            places.unmap()
