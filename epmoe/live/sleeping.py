"""Weights whose memory goes while their host sleeps, and comes back at the same addresses."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from epmoe.exchange.addresses import Places
from epmoe.exchange.gpu_memory import memory_of
from epmoe.exchange.memory import BUFFER_ALIGNMENT, round_up


class SleepingWeights:
    """Memory for the parameters and persistent buffers of a module, which can go and come back while addresses stay.

    CUDA graphs that are captured afterwards are good again after `restore`. Until then nobody may read the weights: on
    a GPU that is an error of CUDA, which ends the process's use of the GPU. `ExpertParallel.sleep` takes `offload` or
    `discard`, and `wake` takes `restore`.

    Args:
        module: whose tensors are on one device, and stay the tensors that they are.

    Raises:
        ValueError: it has no tensors, or they are on several devices.
        MemoryError: there is no memory for a second copy of them, which is needed until this returns.
    """

    def __init__(self, module: nn.Module) -> None:
        own = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
        state = map(id, module.state_dict(keep_vars=True).values())  # some of it may be made for it
        tensors = list({key: own[key] for key in state if key in own}.values())
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"`module` must have tensors on one device, got {sorted(map(str, devices))}")
        ends = [0]
        for tensor in tensors:
            ends.append(round_up(ends[-1] + tensor.nbytes, BUFFER_ALIGNMENT))
        self._nbytes = ends[-1]
        self._copy: Tensor | None = None  # on the host
        self._places = Places(memory_of(*devices), 1, self._nbytes)
        self._map()
        for begin, tensor in zip(ends, tensors, strict=False):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                place = self._places.view(0, self._nbytes)[begin : begin + tensor.nbytes]
                tensor.data = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def offload(self) -> None:
        """Free their memory, and keep a copy on the host. It waits for the GPU."""
        if self._places.mapped:
            region = self._places.view(0, self._nbytes)
            self._copy = torch.empty_like(region, device="cpu", pin_memory=region.is_cuda).copy_(region)
            self._places.unmap()

    def discard(self) -> None:
        """Free their memory: after `restore` the host loads them again. It waits for the GPU."""
        self._places.unmap()

    def restore(self) -> None:
        """Their memory is back, after `offload` with its contents. Raises MemoryError where others have it by now."""
        if not self._places.mapped:
            region = self._map()
            if self._copy is not None:
                region.copy_(self._copy)
        self._copy = None

    def _map(self) -> Tensor:
        return self._places.map(0, None, self._nbytes)
