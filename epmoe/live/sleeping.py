"""Frees the memory of a model's weights while its host sleeps, and brings it back at the same
addresses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epmoe.exchange.memory import BUFFER_ALIGNMENT, round_up
from epmoe.exchange.places import Places
from epmoe.exchange.processors import processor_of
from epmoe.group.errors import EPStateError


class SleepingWeights:
    """Moves the parameters and persistent buffers of a module into memory that can be freed and
    restored. Their addresses stay the same after that.

    CUDA graphs that are captured after the constructor are valid again after `restore`. While the
    memory is gone, nobody may read the weights: on a GPU this is a CUDA error, after which the
    process cannot use the GPU any more. Give `offload` or `discard` to `ExpertParallel.sleep`, and
    `restore` to `ExpertParallel.wake`.

    Args:
        module: has its tensors on one device. They stay the same tensor objects, with the same
            strides, and tensors that share memory still share it. A tensor outside of `module` that
            shares memory with them keeps the former memory.

    Raises:
        TypeError: a tensor is not plain memory: a DTensor, such as FSDP's, or a sparse tensor.
        ValueError: the module has no tensors, or they are on several devices.
        MemoryError: there is no memory for a second copy of the tensors, which the constructor
            needs while it runs.
    """

    # All that exist, for `refuse_tensors_without_memory`.
    _instances: ClassVar[weakref.WeakSet[SleepingWeights]] = weakref.WeakSet()

    def __init__(self, module: nn.Module) -> None:
        tensors = _tensors_of(module)
        device = _device_of(tensors)
        # Group the tensors by their storage, since those that share one must still share one.
        storages: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        sizes = [
            round_up(views[0].untyped_storage().nbytes(), BUFFER_ALIGNMENT)
            for views in storages.values()
        ]
        # Memory has at least one byte, also if no tensor has elements.
        self._nbytes = max(sum(sizes), 1)
        # The contents of the memory on the host, from `offload` until `restore`.
        self._copy: Tensor | None = None
        self._processor = processor_of(device)
        self._memory = self._processor.memory()
        self._places = Places(self._memory, count=1, nbytes=self._nbytes)
        self._map()
        # Move one storage after another; each begins where the one before ends.
        begin = 0
        for size, views in zip(sizes, storages.values(), strict=True):
            _move(views, self._places.view(place=0, nbytes=size, begin=begin))
            begin += size
        self._instances.add(self)

    def offload(self) -> None:
        """Free the memory of the weights, and keep a copy of them on the host. It waits for the
        GPU. If it raises, the weights are still in their memory.
        """
        if self.are_gone:
            return
        try:
            # An earlier `offload` may have been interrupted after its copy.
            if self._copy is None:
                self._copy = self._processor.host_memory(self._nbytes).copy_(self._region)
            self._places.unmap()
        except BaseException:
            self.restore()
            raise

    def discard(self) -> None:
        """Free the memory of the weights without a copy. The host loads them again after
        `restore`. It waits for the GPU.
        """
        self._places.unmap()

    def restore(self) -> None:
        """Bring the memory of the weights back. After `offload` it has the same contents. Load
        weights after this call, not before.

        Raises MemoryError if others use the memory by now. Raises EPStateError if somebody has
        written weights while their memory was gone, such as a loader of `recover` or `resize`. The
        memory is back in this case, but without what was written. Only CPUs need this check: a GPU
        refuses such writes.
        """
        was_written = False
        if self.are_gone:
            # On CPUs the addresses stay readable without their memory, and read as zeros. Any other
            # value there was written meanwhile.
            was_written = self._memory.stays_readable and bool(self._region.any())
            self._map()
        if self._copy is not None:
            self._region.copy_(self._copy)
        self._copy = None
        if was_written:
            raise EPStateError(
                "weights were written while their memory was gone, and are lost: call `restore` "
                "before what loads them, and load them again"
            )

    @property
    def are_gone(self) -> bool:
        """Whether the weights have no memory now."""
        return not self._places.mapped

    def has_place_of(self, tensor: Tensor) -> bool:
        """Whether a tensor lies at the addresses of these weights."""
        begin = self._region.data_ptr()
        return begin <= tensor.data_ptr() < begin + self._nbytes

    @property
    def _region(self) -> Tensor:
        """All bytes of the memory."""
        return self._places.view(place=0, nbytes=self._nbytes)

    def _map(self) -> None:
        """Allocate memory at the addresses. Without a descriptor, no other process can map it."""
        self._places.map(place=0, descriptor=None, nbytes=self._nbytes)


def refuse_without_memory(module: nn.Module) -> None:
    """Do as `refuse_tensors_without_memory` does for the parameters and buffers of a module."""
    refuse_tensors_without_memory(chain(module.named_parameters(), module.named_buffers()))


def refuse_tensors_without_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise EPStateError if the memory of a tensor is gone.

    Calls that save, send or load weights ask first. On CPUs such memory reads as zeros, which would
    replace a good checkpoint; on GPUs the process could not use the GPU any more.
    """
    asleep = [weights for weights in SleepingWeights._instances if weights.are_gone]
    if not asleep:
        return
    for name, tensor in named:
        if _is_plain(tensor) and any(weights.has_place_of(tensor) for weights in asleep):
            raise EPStateError(
                f"`{name}` has no memory while the weights sleep: call `SleepingWeights.restore` "
                "first, as `ExpertParallel.wake(weights.restore)` does"
            )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters and persistent buffers of a module, each once.

    Raises TypeError for a tensor that is not plain memory.
    """
    by_id = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    # The state dict leaves out buffers that are not persistent. But it may also have tensors that
    # are made for it, which are not in `by_id`.
    ids_in_state = [id(value) for value in module.state_dict(keep_vars=True).values()]
    tensors = list({key: by_id[key] for key in ids_in_state if key in by_id}.values())
    other_types = {type(tensor).__name__ for tensor in tensors if not _is_plain(tensor)}
    if other_types:
        raise TypeError(
            f"`module` must have dense tensors of one storage each, got {sorted(other_types)}"
        )
    return tensors


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    """The one device of all tensors. Raises ValueError for several devices, or the meta device."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise ValueError(
            f"`module` must have tensors on one device, got {sorted(map(str, devices))}"
        )
    return devices.pop()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is the bytes of its storage, and nothing else."""
    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _move(views: Sequence[Tensor], place: Tensor) -> None:
    """Move all tensors of one storage: copy the storage to `place`, and let the tensors view the
    copy. `place` is uint8, and at least as long as the storage.

    Each `place` is a tensor with a storage of its own. If all weights were views of one storage, a
    checkpoint would write this whole storage for each of them.
    """
    # Copy the bytes of the storage.
    with torch.no_grad():
        former = torch.empty(0, dtype=torch.uint8, device=place.device)
        former.set_(views[0].untyped_storage())
        place[: len(former)].copy_(former)
    # Let each tensor view the copy as it has viewed the storage.
    for tensor in views:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            elements = place.view(tensor.dtype)
            tensor.data = elements.as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
