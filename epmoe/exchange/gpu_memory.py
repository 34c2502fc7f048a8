"""Memory of a GPU that other processes can map on their GPUs, too.

It uses the virtual memory management of CUDA's driver (`cuMemCreate`, `cuMemMap`), which gives each
piece of memory a file descriptor. torch's allocator has no such memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import Structure, byref, c_int, c_size_t, c_uint64, c_void_p
from functools import partial
from threading import get_ident
from typing import Any

import torch

from epmoe.native import captures

# Enumerators of cuda.h.
_PINNED = 1  # of `CUmemAllocationType`
_POSIX_DESCRIPTOR = 1  # of `CUmemAllocationHandleType`
_DEVICE = 1  # of `CUmemLocationType`
_READ_WRITE = 3  # of `CUmemAccess_flags`
_RECOMMENDED = 1  # of `CUmemAllocationGranularity_flags`
_OUT_OF_MEMORY = 2  # of `CUresult`
# The argument types of the driver's functions that are called here, for ctypes.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (c_void_p, c_void_p, c_int),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuGetErrorString": (c_int, c_void_p),
}


class _Location(Structure):  # CUmemLocation
    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(Structure):  # CUmemAllocationProp
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("unused", c_uint64 * 2),
    ]


class _Access(Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", c_int)]


class GpuMemory:
    """The `Memory` of one GPU. The kernels of this GPU reach all memory that it maps.

    `wait` is called before memory is unmapped. It must return only when no work that was launched
    can use the memory any more. By default it waits for all work of the GPU. `for_all` says that it
    does.
    """

    stays_readable = False

    def __init__(
        self,
        device: torch.device,
        wait: Callable[[], object] | None = None,
        *,
        for_all: bool = True,
    ) -> None:
        self.device = device
        self._for_all = for_all
        self._wait = wait or partial(torch.cuda.synchronize, device)
        self._driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _ARGUMENTS.items():
            getattr(self._driver, name).argtypes = arguments
        # How the driver is to make this memory, and who may read and write it.
        location = _Location(_DEVICE, device.index)
        self._properties = _Properties(_PINNED, _POSIX_DESCRIPTOR, location)
        self._access = _Access(location, _READ_WRITE)
        # The driver wants sizes and addresses that are multiples of this granularity.
        granule = c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            byref(granule),
            byref(self._properties),
            _RECOMMENDED,
        )
        self.granule = granule.value

    def reserve(self, nbytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        return address.value

    def free(self, address: int, nbytes: int) -> None:
        with captures.relaxed():
            self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        handle = self._new(nbytes)
        descriptor = c_int()
        try:
            self._call(
                "cuMemExportToShareableHandle", byref(descriptor), handle, _POSIX_DESCRIPTOR, 0
            )
        finally:
            self._call("cuMemRelease", handle)  # the descriptor keeps the memory
        # A program that this process starts must not inherit the descriptor: it would keep the
        # memory alive.
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def map(self, descriptor: int | None, address: int, nbytes: int, times: int = 1) -> None:
        """Map memory, which may be that of another GPU. Raises RuntimeError if this GPU cannot
        reach it.
        """
        # Get a handle of the memory: new memory, or that of the descriptor.
        if descriptor is None:
            handle = self._new(nbytes)
        else:
            handle = c_uint64()
            self._call(
                "cuMemImportFromShareableHandle", byref(handle), descriptor, _POSIX_DESCRIPTOR
            )
        with ExitStack() as undo:
            try:
                for begin in range(address, address + times * nbytes, nbytes):
                    self._call("cuMemMap", begin, nbytes, 0, handle, 0)
                    undo.callback(self._call, "cuMemUnmap", begin, nbytes)
            finally:
                self._call("cuMemRelease", handle)  # the mappings keep the memory
            # Allow access to all pieces by one call, since each call takes long.
            self._call("cuMemSetAccess", address, times * nbytes, byref(self._access), 1)
            undo.pop_all()

    def unmap(self, address: int, nbytes: int) -> None:
        """Wait until no kernel can use the memory, then unmap it."""
        with captures.relaxed():
            self._wait()
            self._call("cuMemUnmap", address, nbytes)

    def frees_now(self, maker: int) -> bool:
        """See `Memory.frees_now`.

        To wait for all work of the GPU ends a capture, whichever thread captures. So no thread does
        that for another one, which may be capturing, and none within a capture of its own.
        """
        if self._for_all and get_ident() != maker:
            return False
        with torch.cuda.device(self.device):
            return not torch.cuda.is_current_stream_capturing()

    def relax_captures(self) -> None:
        """Allow this thread to map and unmap memory while another thread captures a CUDA graph."""
        with torch.cuda.device(self.device):
            captures.relax()

    def _new(self, nbytes: int) -> c_uint64:
        """Allocate memory. The caller releases the handle that this returns."""
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), nbytes, byref(self._properties), 0)
        return handle

    def _call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver by name. Raises MemoryError if memory is short, and
        RuntimeError for any other error.
        """
        code = getattr(self._driver, function)(*arguments)
        if not code:
            return
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, byref(text))
        why = f"{function} of CUDA failed: {(text.value or b'unknown error').decode()}"
        if code == _OUT_OF_MEMORY:
            raise MemoryError(why)
        raise RuntimeError(why)
