"""Finds out which GPUs are linked by NVLink, from CUDA's driver or from NVML.

The LL protocol works over NVLink only. A line of it has 16 bytes, and its last word tells the
reader that the whole line is there. Over PCIe a store of 16 bytes may arrive in parts. Groups with
GPUs that only PCIe connects therefore take the Simple protocol for calls of any size.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_void_p

import torch

from epmoe.group.peers import Peers

# `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED` of cuda.h: NVLink supports atomics between
# GPUs, and PCIe does not.
_NATIVE_ATOMICS = 3
# `NVML_P2P_CAPS_INDEX_NVLINK` of nvml.h.
_NVLINK = 2


def uuid_of(device: torch.device | int) -> str:
    """The UUID of a GPU. It is the same in all processes, whichever GPUs each of them sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def agree_on_lines(peers: Peers, device: torch.device, ranks_per_node: int) -> bool:
    """Agree whether the ranks may send lines of the LL protocol.

    They may if NVLink links all GPUs within each node. The answer is the same on all ranks of all
    nodes. Every rank calls this. If the answer is no, rank 0 warns.
    """
    # Compare this rank's GPU with those of the other ranks of its node.
    uuid = uuid_of(device)
    uuids = peers.all_gather(uuid)
    first = peers.rank // ranks_per_node * ranks_per_node
    node = range(first, min(first + ranks_per_node, peers.size))
    unlinked = [rank for rank in node if not are_linked(uuid, uuids[rank])]
    # Each rank learns what all ranks have found, so all of them decide alike.
    unlinked_of_ranks = peers.all_gather(unlinked)
    pairs = pairs_of(unlinked_of_ranks)
    if pairs and peers.rank == 0:
        warnings.warn(
            f"no NVLink between the GPUs of ranks {pairs[0][0]} and {pairs[0][1]}, as far as "
            "CUDA's driver and NVML tell: calls of few tokens take the Simple protocol, which is "
            "slower for them",
            stacklevel=2,
        )
    return not pairs


def pairs_of(unlinked: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The pairs of ranks without a link, sorted, each with the lower rank first.

    `unlinked` has for each rank the ranks to which it has found no link.
    """
    pairs = set()
    for rank, others in enumerate(unlinked):
        for other in others:
            pairs.add((min(rank, other), max(rank, other)))
    return sorted(pairs)


def are_linked(uuid: str, other: str) -> bool:
    """Whether two GPUs are linked by NVLink, or are the same GPU. It is False if neither the driver
    nor NVML can tell.
    """
    return uuid == other or _driver_says(uuid, other) or _nvml_says(uuid, other)


def _driver_says(*uuids: str) -> bool:
    """Ask the driver whether two GPUs are linked. It knows only the GPUs that this process sees."""
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
    """Ask NVML whether two GPUs are linked. It knows all GPUs of the machine, as nvidia-smi does,
    but some containers lack the library.
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
