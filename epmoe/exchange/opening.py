"""How the exchange of one node opens: its device fits, its ranks map one another's windows, and rounds can begin."""

from __future__ import annotations

from typing import Any

import torch

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.launch_policy import shared_bytes_needed
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.window import SharedMemoryWindow, Window
from epmoe.exchange.window_nvlink import NVLinkWindow
from epmoe.group.peers import Peers


def check_shared_memory(config: EPConfig, placement: Placement, device: torch.device) -> None:
    """Raises ValueError, on all ranks alike, if a block may not have the shared memory that the kernels need."""
    if device.type == "cpu":
        return
    ranks = range(placement.ep_size)
    needed = max(shared_bytes_needed(MemoryPlan.build(config, rank, placement, nvlink=True)) for rank in ranks)
    properties: Any = torch.cuda.get_device_properties(device)  # torch does not declare all of them
    available = properties.shared_memory_per_block_optin
    if needed > available:
        raise ValueError(
            f"`device` gives a block at most {available >> 10} KiB of shared memory, but the exchange of "
            f"{placement.num_physical_experts} physical experts over {placement.ep_size} ranks needs "
            f"{-(-needed >> 10)}: take fewer experts, or a GPU as large as A100 or H100"
        )


def open_window(plan: MemoryPlan, peers: Peers, device: torch.device) -> Window:
    """This rank's window, which the other ranks map. Collective, in a step of `Peers.together`."""
    dead_at = plan["signal.dead"].offset
    if device.type == "cpu":
        return SharedMemoryWindow(plan.window_bytes, peers, dead_at)
    return NVLinkWindow(plan.window_bytes, peers, device, dead_at, plan.empty_lines)


def open_node(
    config: EPConfig, plan: MemoryPlan, placement: Placement, peers: Peers, device: torch.device
) -> NodeExchange:
    """The exchange of the ranks of one node. Collective, in a step of `Peers.together`.

    `config` and `placement` are of the node, `plan` is of this rank. Raises MemoryError if the windows do not fit, and
    RuntimeError if the ranks are on several machines, or do not reach one another.
    """
    window = open_window(plan, peers, device)
    return NodeExchange(config, plan, placement, window, peers.global_ranks, device)
