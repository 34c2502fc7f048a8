"""Which GPUs are linked by NVLink, as CUDA's driver or NVML tells.

Over PCIe a store of 16 bytes may arrive in parts. A line of the LL protocol has 16 bytes and tells
by its last word that all of it is there, so ranks that PCIe connects take the Simple protocol in
calls of any size.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_void_p

import torch

from epmoe.group.peers import Peers

# `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED` of cuda.h: NVLink has them, PCIe does not.
_NATIVE_ATOMICS = 3
# `NVML_P2P_CAPS_INDEX_NVLINK` of nvml.h.
_NVLINK = 2


def uuid_of(device: torch.device | int) -> str:
    """The GPU's name among all, whichever of them a process sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def agree_on_lines(peers: Peers, device: torch.device, ranks_per_node: int) -> bool:
    """Agree whether lines may travel between all ranks of a node, with the same answer on all ranks
    of all nodes. Collective. If they may not, rank 0 warns.
    """
    uuid = uuid_of(device)
    uuids = peers.all_gather(uuid)
    first = peers.rank // ranks_per_node * ranks_per_node
    node = range(first, min(first + ranks_per_node, peers.size))
    unlinked = [rank for rank in node if not are_linked(uuid, uuids[rank])]
    found = peers.all_gather(unlinked)
    pairs = pairs_of(found)
    if pairs and peers.rank == 0:
        warnings.warn(
            f"no NVLink between the GPUs of ranks {pairs[0][0]} and {pairs[0][1]}, as far as "
            "CUDA's driver and NVML tell: calls of few tokens take the Simple protocol, which is "
            "slower for them",
            stacklevel=2,
        )
    return not pairs


def pairs_of(unlinked: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Pairs of ranks, the lower one first, of the ranks that each rank finds to be not linked."""
    pairs = set()
    for rank, others in enumerate(unlinked):
        for other in others:
            pairs.add((min(rank, other), max(rank, other)))
    return sorted(pairs)


def are_linked(uuid: str, other: str) -> bool:
    """Whether two GPUs are one, or NVLink is between them. False also where nobody can tell."""
    return uuid == other or _driver_says(uuid, other) or _nvml_says(uuid, other)


def _driver_says(*uuids: str) -> bool:
    """Ask the driver, which knows the GPUs that this process sees."""
    seen = {uuid_of(index): index for index in range(torch.cuda.device_count())}
    if not seen.keys() >= set(uuids):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    has_atomics = c_int()
    error = driver.cuDeviceGetP2PAttribute(
        byref(has_atomics), _NATIVE_ATOMICS, *(seen[uuid] for uuid in uuids)
    )
    return not error and has_atomics.value == 1


def _nvml_says(*uuids: str) -> bool:
    """Ask NVML, which knows all GPUs of the machine, as nvidia-smi does. Containers may lack the
    library.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if nvml.nvmlInit_v2():
        return False
    try:
        handles = []
        for uuid in uuids:
            handle = c_void_p()
            if nvml.nvmlDeviceGetHandleByUUID(c_char_p(f"GPU-{uuid}".encode()), byref(handle)):
                return False
            handles.append(handle)
        status = c_int(-1)
        error = nvml.nvmlDeviceGetP2PStatus(*handles, _NVLINK, byref(status))
        return not error and status.value == 0
    finally:
        nvml.nvmlShutdown()
