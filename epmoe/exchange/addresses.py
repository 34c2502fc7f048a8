"""Addresses that stay: a rank reserves them for its windows once, and its groups map memory there by turns.

Memory has a file descriptor, by which other processes map it, too. It is free once no process maps it any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from epmoe.exchange.memory import round_up

_F_ADD_SEALS = 1033
_SEAL_SEAL = 1
_SEAL_SHRINK = 2
_SEAL_GROW = 4
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


class Memory(Protocol):
    """A kind of memory. Addresses and sizes are multiples of `granule` bytes."""

    device: torch.device
    granule: int

    def reserve(self, nbytes: int) -> int:
        """An address behind which `nbytes` are free, and stay so until `free`."""

    def free(self, address: int, nbytes: int) -> None: ...

    def create(self, nbytes: int) -> int:
        """The descriptor of new memory, which the caller closes. Raises MemoryError where there is none."""

    def map(self, descriptor: int, address: int, nbytes: int) -> None:
        """Map memory at a reserved address, for reading and writing."""

    def unmap(self, address: int, nbytes: int) -> None: ...


class HostMemory:
    """Anonymous shared memory (memfd) of this machine: it has no name, and needs no room in /dev/shm."""

    device = torch.device("cpu")
    granule = mmap.PAGESIZE

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def reserve(self, nbytes: int) -> int:
        return self._mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def free(self, address: int, nbytes: int) -> None:
        self._libc.munmap(address, nbytes)

    def create(self, nbytes: int) -> int:
        descriptor = os.memfd_create("epmoe-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            name = errno.errorcode.get(error.errno or 0, "?")
            raise MemoryError(
                f"cannot reserve {nbytes:,} bytes of shared memory for a window ({name}): lower "
                "capacity.max_num_tokens_per_rank, or give the container more memory"
            ) from error
        # A reader of a window that another process has shrunk would get a SIGBUS: forbid it.
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
        return descriptor

    def map(self, descriptor: int, address: int, nbytes: int) -> None:
        populate = getattr(mmap, "MAP_POPULATE", 0)
        self._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | populate, descriptor)

    def unmap(self, address: int, nbytes: int) -> None:
        """Leaves private memory behind: a tensor that outlives its group harms nobody."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags)

    def _mmap(self, address: int | None, nbytes: int, protection: int, flags: int, descriptor: int = -1) -> int:
        fixed = 0 if address is None else _MAP_FIXED
        mapped: int = self._libc.mmap(address, nbytes, protection, flags | fixed, descriptor, 0)
        if mapped == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {nbytes:,} bytes: {os.strerror(code)}")
        return mapped


class Places:
    """Reserved addresses for one window of each rank, `ranks` in all, of up to `nbytes` bytes each.

    They stay until this object and all tensors of its memory are gone.
    """

    def __init__(self, memory: Memory, ranks: int, nbytes: int) -> None:
        self.ranks, self.stride = ranks, round_up(nbytes, memory.granule)
        self._memory, self._mapped = memory, dict[int, int]()  # bytes by address
        self._begin = memory.reserve(ranks * self.stride)
        kept = os.getpid(), memory, self._mapped, self._begin, ranks * self.stride
        weakref.finalize(self, _give_back, *kept).atexit = False

    @property
    def mapped(self) -> bool:
        return bool(self._mapped)

    def create(self, nbytes: int) -> int:
        """The descriptor of memory for a window. Raises MemoryError where there is none."""
        return self._memory.create(round_up(nbytes, self._memory.granule))

    def map(self, rank: int, descriptor: int, nbytes: int) -> Tensor:
        """Map memory of `create`, also another process's, as the window of a rank: uint8 [nbytes]."""
        address, mapped = self._begin + rank * self.stride, round_up(nbytes, self._memory.granule)
        self._memory.map(descriptor, address, mapped)
        self._mapped[address] = mapped
        device = self._memory.device
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        storage.places = self  # which lives as long as the storage, also one that only C++ has
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def unmap(self) -> None:
        """Unmap all windows. Nobody may be about to read or write them."""
        while self._mapped:
            self._memory.unmap(*self._mapped.popitem())


def _give_back(owner: int, memory: Memory, mapped: dict[int, int], begin: int, nbytes: int) -> None:
    if os.getpid() != owner:
        return
    with suppress(RuntimeError):  # of a GPU that has failed
        while mapped:
            memory.unmap(*mapped.popitem())
        memory.free(begin, nbytes)


class Addresses:
    """The places of the windows of one `ExpertParallel`, through all its groups."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._places: Places | None = None

    def places(self, ranks: int, nbytes: int) -> Places:
        """The same ones as before, where they have room and the group before has unmapped them; otherwise new ones."""
        places = self._places
        if places is None or places.mapped or ranks > places.ranks or nbytes > places.stride:
            self._places = None  # their addresses may be free now
            self._places = places = Places(self.memory, ranks, nbytes)
        return places
