"""Memory at reserved addresses. It has a file descriptor, by which other processes map it, too, and
is free once no process maps it any more.
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

# Flags of Linux that `mmap` does not have.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_UNREAD_BYTES = 16 << 20  # of the memory that fills an empty seat, again and again
_MAP_FAILED = ctypes.c_void_p(-1).value


class Memory(Protocol):
    """A kind of memory. Addresses and sizes are multiples of `granule` bytes."""

    device: torch.device
    granule: int
    stays_readable: bool
    """whether addresses may be read and written also while nothing is mapped there"""

    def reserve(self, nbytes: int) -> int:
        """An address behind which `nbytes` are free, and stay so until `free`."""

    def free(self, address: int, nbytes: int) -> None: ...

    def create(self, nbytes: int) -> int:
        """The descriptor of new memory, which the caller closes. Raises MemoryError where there is
        none.
        """

    def map(self, descriptor: int | None, address: int, nbytes: int, times: int = 1) -> None:
        """Map memory at a reserved address, for reading and writing; None: new memory of this
        process alone.

        With `times` it lies there again and again, and each of these mappings is unmapped by
        itself.
        """

    def unmap(self, address: int, nbytes: int) -> None: ...


class HostMemory:
    """Anonymous shared memory (memfd) of this machine: it has no name, and needs no room in
    /dev/shm.
    """

    device = torch.device("cpu")
    granule = mmap.PAGESIZE
    stays_readable = True

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def reserve(self, nbytes: int) -> int:
        return self._mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def free(self, address: int, nbytes: int) -> None:
        self._libc.munmap(address, nbytes)

    def create(self, nbytes: int) -> int:
        # Reserve all of it now: a shortage in a round would end this process.
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
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
        )
        return descriptor

    def map(self, descriptor: int | None, address: int, nbytes: int, times: int = 1) -> None:
        if descriptor is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            descriptor = -1
        else:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        for begin in range(address, address + times * nbytes, nbytes):
            self._mmap(begin, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor)

    def unmap(self, address: int, nbytes: int) -> None:
        """Leaves private memory behind: a tensor that outlives its group harms nobody."""
        self.map(None, address, nbytes)

    def _mmap(
        self, address: int | None, nbytes: int, protection: int, flags: int, descriptor: int = -1
    ) -> int:
        """Map memory at `address`, or for None at a free one. Returns the address. Raises
        MemoryError if there is no memory, and OSError for other reasons.
        """
        if address is not None:
            flags |= _MAP_FIXED
        mapped: int = self._libc.mmap(address, nbytes, protection, flags, descriptor, 0)
        if mapped != _MAP_FAILED:
            return mapped
        code = ctypes.get_errno()
        why = f"cannot map {nbytes:,} bytes: {os.strerror(code)}"
        if code == errno.ENOMEM:
            raise MemoryError(why)
        raise OSError(code, why)


class Places:
    """Reserved addresses for `count` pieces of memory, of up to `nbytes` bytes each.

    They stay until this object and all tensors of its memory are gone.
    """

    def __init__(self, memory: Memory, count: int, nbytes: int) -> None:
        self.count = count
        self.stride = round_up(nbytes, memory.granule)
        self._memory = memory
        self._mapped = dict[int, int]()  # bytes by address
        self._begin = memory.reserve(count * self.stride)
        # With the last tensor of it the memory goes, but not at the end of the process: other
        # threads may still use it there.
        kept = os.getpid(), memory, self._mapped, self._begin, count * self.stride
        weakref.finalize(self, _give_back, *kept).atexit = False

    @property
    def mapped(self) -> bool:
        return bool(self._mapped)

    def create(self, nbytes: int) -> int:
        """The descriptor of memory for one piece. Raises MemoryError where there is none."""
        return self._memory.create(round_up(nbytes, self._memory.granule))

    def map(self, place: int, descriptor: int | None, nbytes: int) -> Tensor:
        """Map memory of `create`, also another process's, or of this process alone:
        uint8 [nbytes].
        """
        address = self._begin + place * self.stride
        mapped = round_up(nbytes, self._memory.granule)
        self._memory.map(descriptor, address, mapped)
        self._mapped[address] = mapped
        return self.view(place, nbytes)

    def map_unread(self, place: int, nbytes: int) -> Tensor:
        """Fill the place with mappings of one small memory: uint8 [nbytes]. Values that are written
        there are lost.
        """
        begin = self._begin + place * self.stride
        piece = round_up(_UNREAD_BYTES, self._memory.granule)
        times, rest = divmod(round_up(nbytes, self._memory.granule), piece)
        # Whole pieces share one memory. The rest has one of its own.
        for address, size, many in ((begin, piece, times), (begin + times * piece, rest, 1)):
            if size * many == 0:
                continue
            descriptor = self._memory.create(size)
            try:
                self._memory.map(descriptor, address, size, many)
            finally:
                os.close(descriptor)
            self._mapped |= {address + i * size: size for i in range(many)}
        return self.view(place, nbytes)

    def view(self, place: int, nbytes: int, begin: int = 0) -> Tensor:
        """What is mapped at a place, `begin` bytes behind its start: uint8 [nbytes]."""
        address = self._begin + place * self.stride + begin
        device = self._memory.device
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        # This object lives as long as the storage, also one that only C++ has.
        storage.places = self
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def unmap(self) -> None:
        """Unmap all. Nobody may be about to read or write them. What `Memory` refuses to unmap
        stays mapped.
        """
        _unmap(self._memory, self._mapped)


def _give_back(owner: int, memory: Memory, mapped: dict[int, int], begin: int, nbytes: int) -> None:
    """Unmap what is left, and free the addresses, unless this process is a fork of the owner."""
    if os.getpid() != owner:
        return
    # The GPU may have failed, or may still read the memory.
    with suppress(RuntimeError, TimeoutError):
        _unmap(memory, mapped)
        memory.free(begin, nbytes)


def _unmap(memory: Memory, mapped: dict[int, int]) -> None:
    for address, nbytes in list(mapped.items()):
        memory.unmap(address, nbytes)
        del mapped[address]
