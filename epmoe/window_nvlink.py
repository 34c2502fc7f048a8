"""Symmetric windows of GPUs: torch symmetric memory, peer pointers over NVLink, no multicast.

torch numbers its rendezvous by process, whatever the group: the ranks of a group meet only if each has opened as
many windows of several ranks before, as it is where every rank belongs to one group of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from epmoe.window import all_gather, check_room, raise_together


class NVLinkWindow:
    """This rank's window and everyone's addresses, as `SharedMemoryWindow` has them.

    local: uint8 [window_bytes] on the device. addresses: by rank, as mapped here.
    """

    def __init__(
        self,
        nbytes: int,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        unset: Iterable[slice] = (),
    ):
        """Collective. The window begins as zeros, its bytes in `unset` as 0xff.

        Raises:
            MemoryError: no room, on this or on another rank.
            RuntimeError: two GPUs of the group cannot reach each other's memory.
        """
        problem = None
        try:
            check_room(nbytes, torch.cuda.mem_get_info(device)[0])
        except MemoryError as error:
            problem = str(error)
        raise_together(problem, size, group)
        if group is None or size == 1:
            self.local = self._cleared(torch.empty(nbytes, dtype=torch.uint8, device=device), unset)
            self.addresses = [self.local.data_ptr()]
        else:
            _check_peer_access(rank, size, group, device)
            # Not `symmetric_memory.empty`: its pool hands out what a closed window has freed, and each rank frees in
            # its own time, so that some would meet again over old memory while others wait for them over new.
            self.local = self._cleared(_SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device), unset)
            self._handle = symmetric_memory.rendezvous(self.local, group)  # keeps the mappings
            self.addresses = list(self._handle.buffer_ptrs)
            torch.cuda.synchronize(device)
            dist.barrier(group, device_ids=[device.index])  # nobody writes into a window that is still being cleared

    @staticmethod
    def _cleared(local: Tensor, unset: Iterable[slice]) -> Tensor:
        local.zero_()
        for part in unset:
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
