"""Weights that give their memory away while their host sleeps, and get it back at the same
addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epmoe.exchange.memory import BUFFER_ALIGNMENT, round_up
from epmoe.exchange.places import Places
from epmoe.exchange.processors import processor_of
from epmoe.group.errors import EPStateError


class SleepingWeights:
    """Memory for the parameters and persistent buffers of a module that can be freed and restored.
    Addresses stay.

    CUDA graphs that are captured afterwards are good again after `restore`. Until then nobody may
    read the weights: on a GPU that is an error of CUDA, which ends the process's use of the GPU.
    `ExpertParallel.sleep` takes `offload` or `discard`, and `wake` takes `restore`.

    Args:
        module: whose tensors are on one device, and stay the tensors that they are, with their
            strides. Those that share memory still do. What else shares it, outside `module`, keeps
            the former memory.

    Raises:
        TypeError: one of them is a DTensor, as FSDP's, sparse, or another that is not plain memory.
        ValueError: it has no tensors, or they are on several devices.
        MemoryError: there is no memory for a second copy of them, which is needed until this
            returns.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = _tensors_of(module)
        device = _device_of(tensors)
        # Tensors that share a storage will share one again.
        storages: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        sizes = [
            round_up(views[0].untyped_storage().nbytes(), BUFFER_ALIGNMENT)
            for views in storages.values()
        ]
        # At least a byte, also for tensors without elements.
        self._nbytes = max(sum(sizes), 1)
        # The contents, on the host, while they are not in their memory.
        self._copy: Tensor | None = None
        self._processor = processor_of(device)
        self._memory = self._processor.memory()
        self._places = Places(self._memory, 1, self._nbytes)
        self._map()
        # Storage by storage: the next one begins where this one ends.
        begin = 0
        for size, views in zip(sizes, storages.values(), strict=True):
            _move(views, self._places.view(0, size, begin))
            begin += size

    def offload(self) -> None:
        """Free the memory of the weights, and keep a copy on the host. It waits for the GPU. If it
        raises, the weights are still there.
        """
        if not self._places.mapped:
            return
        try:
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
        """Bring the memory of the weights back; after `offload`, with its contents. Load weights
        after it, not before.

        Raises MemoryError if others use the memory by now. Raises EPStateError if somebody has
        written weights while their memory was gone, such as a loader of `recover` or `resize`: the
        memory is back then, without what was written. A GPU refuses such writes itself.
        """
        was_written = False
        if not self._places.mapped:
            # On CPUs the addresses stay readable, as zeros; a GPU refuses to write there.
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
    def _region(self) -> Tensor:
        return self._places.view(0, self._nbytes)

    def _map(self) -> None:
        self._places.map(0, None, self._nbytes)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters and persistent buffers, each once. Raises TypeError for a tensor that is no
    plain memory.
    """
    own = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    # A state dict may also have tensors that are made for it.
    keys = [id(value) for value in module.state_dict(keep_vars=True).values()]
    tensors = list({key: own[key] for key in keys if key in own}.values())
    strange = {type(tensor).__name__ for tensor in tensors if not _is_plain(tensor)}
    if strange:
        raise TypeError(
            f"`module` must have dense tensors of one storage each, got {sorted(strange)}"
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
    """Move tensors that share a storage: copy it to `place`, and let the tensors share the copy.

    Each storage moves by itself. A checkpoint would write one storage of all tensors for each of
    them.
    """
    # Copy the bytes of the storage.
    with torch.no_grad():
        former = torch.empty(0, dtype=torch.uint8, device=place.device)
        former.set_(views[0].untyped_storage())
        place[: len(former)].copy_(former)
    # Each tensor gets its view of the new one.
    for tensor in views:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            elements = place.view(tensor.dtype)
            tensor.data = elements.as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
