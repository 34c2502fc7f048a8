"""Memory that several processes map, each at addresses that it has reserved before.

Memory has a file descriptor, which one process passes to the others. The operating system frees the
memory once no process maps it any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from epmoe.exchange.memory import round_up

# Flags of Linux that Python's module `mmap` does not define.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
# The size of the memory that `Places.map_unread` maps again and again, to fill an empty seat.
_UNREAD_BYTES = 16 << 20
_MAP_FAILED = ctypes.c_void_p(-1).value

_left = deque["_Remains"]()
"""What is left of objects that are gone, until it is freed."""

# In a forked child it is forgotten: it belongs to the parent.
os.register_at_fork(after_in_child=_left.clear)


class Memory(Protocol):
    """A kind of memory. Addresses and sizes are multiples of `granule` bytes."""

    device: torch.device
    granule: int
    stays_readable: bool
    """whether addresses may be read and written also while nothing is mapped there"""

    def reserve(self, nbytes: int) -> int:
        """Reserve `nbytes` of addresses, and return the first. Nothing else is mapped there until
        `free`.
        """

    def free(self, address: int, nbytes: int) -> None:
        """Give up addresses that `reserve` has returned."""

    def create(self, nbytes: int) -> int:
        """Allocate memory, and return its descriptor, which the caller closes. Raises MemoryError
        if there is not enough.
        """

    def map(self, descriptor: int | None, address: int, nbytes: int, times: int = 1) -> None:
        """Map memory at a reserved address, for reading and writing.

        Without a descriptor it is new memory of this process alone. With `times` the same memory is
        mapped so many times, one mapping behind another. The caller unmaps each of these mappings.
        """

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap what one mapping of `map` has put at an address, which stays reserved."""

    def frees_now(self, maker: int) -> bool:
        """Whether this thread may call `unmap` and `free` now, for an object that the thread
        `maker` has made. It may be in any other call.
        """


class HostMemory:
    """The `Memory` of the host: anonymous shared memory (memfd).

    It has no name that could be left behind after a crash, and needs no room in /dev/shm.
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
        # Allocate all pages now. If memory ran out in a round, the system would kill this process.
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
        # Forbid all processes to shrink the memory: others that read it would then get a SIGBUS.
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
        """Put private memory in place of the mapping. A tensor that still views these addresses
        then harms nobody.
        """
        self.map(None, address, nbytes)

    def frees_now(self, maker: int) -> bool:
        return True

    def _mmap(
        self, address: int | None, nbytes: int, protection: int, flags: int, descriptor: int = -1
    ) -> int:
        """Map memory at `address`, or at any free address for None. Returns the address.

        Raises MemoryError if there is not enough memory, and OSError for other reasons.
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

    A place is the index of a piece. The addresses stay reserved until this object and all tensors
    that view its memory are gone.
    """

    def __init__(self, memory: Memory, count: int, nbytes: int) -> None:
        free_left()
        self.count = count
        self.stride = round_up(nbytes, memory.granule)
        self._memory = memory
        self._mapped = dict[int, int]()  # the bytes of each mapping, by its address
        self._begin = memory.reserve(count * self.stride)
        # Give the memory back when the last tensor of it is gone, but not when the process ends:
        # other threads may still use it then.
        finalizer = weakref.finalize(
            self,
            _give_back,
            owner=os.getpid(),
            left=_Remains(memory, self._mapped, self._begin, count * self.stride, get_ident()),
        )
        finalizer.atexit = False

    @property
    def mapped(self) -> bool:
        """Whether memory is mapped at any place."""
        return bool(self._mapped)

    def create(self, nbytes: int) -> int:
        """Allocate memory for one place, and return its descriptor, which the caller closes. Raises
        MemoryError if there is not enough.
        """
        free_left()
        return self._memory.create(round_up(nbytes, self._memory.granule))

    def map(self, place: int, descriptor: int | None, nbytes: int) -> Tensor:
        """Map memory at a place. Returns it as uint8 [nbytes].

        The descriptor comes from `create`, in this process or in another one. Without a descriptor
        the memory is new and belongs to this process alone.
        """
        address = self._begin + place * self.stride
        mapped = round_up(nbytes, self._memory.granule)
        self._memory.map(descriptor, address, mapped)
        self._mapped[address] = mapped
        return self.view(place, nbytes)

    def map_unread(self, place: int, nbytes: int) -> Tensor:
        """Fill a place with memory that nobody reads. Returns it as uint8 [nbytes].

        The place of an empty seat needs memory only because kernels write to all seats. One small
        piece of memory is mapped there again and again, so a written value may be overwritten by
        another one.
        """
        begin = self._begin + place * self.stride
        piece = round_up(_UNREAD_BYTES, self._memory.granule)
        times, rest = divmod(round_up(nbytes, self._memory.granule), piece)
        # Whole pieces share one memory. The rest behind them has a smaller one of its own.
        rest_begin = begin + times * piece
        for address, size, many in ((begin, piece, times), (rest_begin, rest, 1)):
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
        """View the memory that is mapped at a place, from `begin` bytes behind its start, as uint8
        [nbytes].
        """
        address = self._begin + place * self.stride + begin
        device = self._memory.device
        storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        # The storage keeps this object alive, and with it the mapping. That also holds for a
        # storage that only C++ still has.
        storage.places = self
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def unmap(self) -> None:
        """Unmap the memory of all places. Nobody may read or write it any more.

        If `Memory.unmap` raises, the memory that was not unmapped yet stays mapped.
        """
        _unmap(self._memory, self._mapped)


class _Remains(NamedTuple):
    """What is left of a `Places`: the memory that is still mapped, and the addresses."""

    memory: Memory
    mapped: dict[int, int]
    begin: int
    nbytes: int
    maker: int
    """the thread that has made the object"""


def _give_back(owner: int, left: _Remains) -> None:
    """Unmap the memory that is left, and free the addresses, now or later.

    It does nothing in a process that was forked from the `owner`, to which they belong.
    """
    if os.getpid() != owner:
        return
    _left.append(left)
    free_left()


def free_left(*, waits: bool = False) -> None:
    """Free what is left of objects that are gone, where this thread may do so now.

    The garbage collector may have called it, on any thread and within any call. What may not be
    freed now is freed by a later call. With `waits` the caller waits for all work of the GPU in any
    case, so that no thread can be capturing a graph.
    """
    for _ in range(len(_left)):
        try:
            left = _left.popleft()
        except IndexError:
            # Another thread has taken the rest of the list.
            return
        maker = get_ident() if waits else left.maker
        # These errors come if the GPU has failed or still uses the memory. Then it stays mapped.
        with suppress(RuntimeError, TimeoutError):
            if not left.memory.frees_now(maker):
                _left.append(left)
                continue
            _unmap(left.memory, left.mapped)
            left.memory.free(left.begin, left.nbytes)


def _unmap(memory: Memory, mapped: dict[int, int]) -> None:
    """Unmap all mappings, and remove from `mapped` each that is unmapped."""
    for address, nbytes in list(mapped.items()):
        memory.unmap(address, nbytes)
        del mapped[address]
