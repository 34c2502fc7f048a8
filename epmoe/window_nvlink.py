"""Symmetric windows of GPUs: torch symmetric memory, peer pointers over NVLink, no multicast.

torch counts rendezvous by process and not by group. The ranks of a group therefore meet only if all of them have opened
the same number of windows of several ranks before. They have, where every rank belongs to one group of each kind.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from epmoe.window import all_gather, check_room, raise_together


class NVLinkWindow:
    """A `Window` in GPU memory of one NVLink domain."""

    def __init__(
        self,
        nbytes: int,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        empty_lines: Iterable[slice] = (),
    ):
        """Collective. Clears the window on all ranks before it returns.

        Args:
            nbytes: size of each rank's window.
            rank: this rank in the group.
            size: ranks in the group.
            group: None is a group of one.
            device: this rank's GPU.
            empty_lines: slices of the window's bytes that begin as 0xff, where all other bytes begin as 0.

        Raises:
            MemoryError: this or another rank has no room.
            RuntimeError: this GPU has no peer access to another GPU of the group.
        """
        problem = None
        try:
            check_room(nbytes, torch.cuda.mem_get_info(device)[0])
        except MemoryError as error:
            problem = str(error)
        raise_together(problem, size, group)
        if group is None or size == 1:
            self.local = self._cleared(torch.empty(nbytes, dtype=torch.uint8, device=device), empty_lines)
            self.addresses = [self.local.data_ptr()]
            windows = [self.local]
        else:
            _check_peer_access(rank, size, group, device)
            # Not `symmetric_memory.empty`: its pool reuses the memory of closed windows, and ranks free their windows
            # at different times. Some ranks would then meet over old memory while others wait for them over new.
            self.local = self._cleared(
                _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device), empty_lines
            )
            self._handle = symmetric_memory.rendezvous(self.local, group)  # keeps the mappings
            self.addresses = list(self._handle.buffer_ptrs)
            windows = [self._handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(size)]
            torch.cuda.synchronize(device)
            dist.barrier(group, device_ids=[device.index])  # no rank writes into a window before it is cleared
        # For `store`, which allocates nothing.
        self._words = [window.view(torch.int64) for window in windows]
        self._word, self._stream = torch.empty(1, dtype=torch.int64, pin_memory=True), torch.cuda.Stream(device)

    def store(self, offset: int, value: int) -> None:
        """As `Window.store`, for a word below 2^63. It returns once the words have arrived, or after 1 s.

        The copies run on a stream of their own and from pinned memory, so by a copy engine: kernels of this rank that
        wait for other ranks may hold all multiprocessors.
        """
        self._word[0] = value
        with torch.cuda.stream(self._stream):
            for words in self._words:
                words[offset // 8 : offset // 8 + 1].copy_(self._word, non_blocking=True)
        give_up = time.monotonic() + 1.0
        while not self._stream.query() and time.monotonic() < give_up:
            time.sleep(1e-4)

    @staticmethod
    def _cleared(local: Tensor, empty_lines: Iterable[slice]) -> Tensor:
        local.zero_()
        for part in empty_lines:
            local[part].fill_(0xFF)
        return local


def _check_peer_access(rank: int, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
    devices = all_gather(device.index, size, group)
    visible = torch.cuda.device_count()
    unreachable = [
        peer
        for peer, index in enumerate(devices)
        if peer != rank and index < visible and index != device.index
        if not torch.cuda.can_device_access_peer(device.index, index)
    ]
    if unreachable:
        raise RuntimeError(
            f"the GPU of rank {rank} has no peer access to that of rank(s) {unreachable}: see `epmoe doctor`"
        )
