"""How the exchange of a group opens: over one node or several, with the rail that the
config names.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import Deadlines
from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.gpu_memory import memory_of
from epmoe.exchange.launch_policy import shared_bytes_needed
from epmoe.exchange.links import agree_on_lines
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import RoundState
from epmoe.exchange.window import SharedMemoryWindow, Window
from epmoe.exchange.window_nvlink import NVLinkWindow
from epmoe.group.board import RollCall
from epmoe.group.peers import Peers
from epmoe.native import ops
from epmoe.native.layouts import struct
from epmoe.rail.exchange import HierarchicalExchange
from epmoe.rail.gloo import GlooRail, connect_within, gloo_group
from epmoe.rail.memory import RailMemory
from epmoe.rail.nccl import NcclRail
from epmoe.rail.network import Network
from epmoe.rail.network_cuda import NetworkOnGPUs
from epmoe.rail.rail import Rail

RAILS: dict[str, type[Rail]] = {"gloo": GlooRail, "nccl": NcclRail}
"""By the name that `exchange.rail` gives; "auto" is the first one for the device."""


def rail_of(config: EPConfig, device: torch.device) -> type[Rail]:
    """The rail between the nodes. Raises ValueError where there is none of this name, or none for
    the device.
    """
    # Those that serve the device, of which "auto" takes the first one.
    name = config.exchange.rail
    fitting = [fit for fit, rail in RAILS.items() if device.type in rail.devices]
    if not fitting:
        raise ValueError(
            "`device` must be cpu with several nodes: this torch has no NCCL, by which GPUs reach "
            "others"
        )
    if name not in ("auto", *fitting):
        raise ValueError(
            f"`exchange.rail` must be auto or {' or '.join(fitting)} on {device.type}, got {name!r}"
        )
    if name == "auto":
        name = fitting[0]
    return RAILS[name]


def check_shared_memory(config: EPConfig, device: torch.device) -> None:
    """Raises ValueError, on all ranks alike, if a block may not have the shared memory that the
    kernels need.
    """
    if device.type == "cpu":
        return
    # Ranks own different numbers of experts: the one that needs most counts.
    placement = config.seated.place_experts()
    needed = 0
    for rank in range(placement.ep_size):
        plan = MemoryPlan.build(config, rank, placement, nvlink=True)
        needed = max(needed, shared_bytes_needed(plan))
    properties: Any = torch.cuda.get_device_properties(device)  # torch does not declare all of them
    available = properties.shared_memory_per_block_optin
    if needed > available:
        raise ValueError(
            f"`device` gives a block at most {available >> 10} KiB of shared memory, but the "
            f"exchange of {placement.num_physical_experts} physical experts over "
            f"{placement.ep_size} ranks needs {-(-needed >> 10)}: take fewer experts, or a GPU as "
            "large as A100 or H100"
        )


def prepare(config: EPConfig, device: torch.device) -> None:
    """Find what would keep this rank from opening, and `load`."""
    load(device)
    check_shared_memory(config, device)
    if config.topology.num_nodes > 1:
        rail_of(config, device)


def load(device: torch.device) -> None:
    """Build or load the library now, not while other ranks wait."""
    # The first look at an operator does it.
    _ = ops.dispatch
    if device.type == "cuda":
        ops.load_cuda()


def addresses_on(device: torch.device) -> Addresses:
    """For the windows of an `ExpertParallel` on a device."""
    return Addresses(memory_of(device))


def open_window(
    plan: MemoryPlan, peers: Peers, seats: Seats, addresses: Addresses, undo: ExitStack
) -> Window:
    """Collective, in a step of `Peers.together`. `undo` unmaps the window where a
    later step fails.
    """
    arguments = plan.windows, peers, seats, addresses, plan["signal.dead"].offset
    window: Window
    if addresses.memory.device.type == "cpu":
        window = SharedMemoryWindow(*arguments)
    else:
        window = NVLinkWindow(*arguments, plan.empty_lines)
    undo.callback(window.places.unmap)
    undo.callback(window.deaths.close)
    return window


def open_exchange(
    config: EPConfig, peers: Peers, seats: Seats, addresses: Addresses, name: str
) -> Exchange:
    """This rank's part of the exchange of a group. Collective, in a step of `Peers.together`.

    Its windows lie at `addresses`. `name` is the same on all ranks, and no other attempt to open a
    group has it. Raises MemoryError if the windows do not fit, and RuntimeError if the ranks of a
    node are on several machines, or ranks do not reach one another.
    """
    seat = seats.of_ranks[peers.rank]
    placement = config.seated.place_experts()
    on_gpus = addresses.memory.device.type == "cuda"
    lines = True
    if on_gpus:
        lines = agree_on_lines(peers, addresses.memory.device, config.topology.ranks_here)
    plan = MemoryPlan.build(config, seat, placement, nvlink=on_gpus, lines=lines)
    if config.topology.num_nodes > 1:
        return _open_over_nodes(config, plan, peers, addresses, name)
    with ExitStack() as undo:
        window = open_window(plan, peers, seats, addresses, undo)
        exchange = NodeExchange(
            config, plan, placement, window, peers.global_ranks, addresses, seats
        )
        undo.pop_all()
    return exchange


def _open_over_nodes(
    config: EPConfig, plan: MemoryPlan, peers: Peers, addresses: Addresses, name: str
) -> HierarchicalExchange:
    """`open_exchange` where the group has several nodes, with a rank in each seat."""
    device = addresses.memory.device
    placement = config.seated.place_experts()
    G = config.topology.ranks_here
    N = config.topology.num_nodes
    times = config.exchange

    # The ranks of this node meet first.
    node, local = divmod(peers.rank, G)
    connect = connect_within(peers.timeout_s)
    peers.all_gather(None)  # all are about to connect
    group = None
    if G > 1:
        group = gloo_group(f"{name}/node/{node}", local, G, connect)
    here = peers.global_ranks[node * G : (node + 1) * G]
    node_peers = Peers(group, local, G, here, connect.total_seconds(), first=node * G)
    rounds = RoundState(struct("Progress")())
    deadlines = Deadlines(times.warmup_timeout_s, times.timeout_s, lambda: rounds.count)
    with ExitStack() as undo:
        # The rail to the ranks of the same local index, and a group of all hosts.
        of_rail = RollCall([m * G + local for m in range(N)], peers.rank, peers.size, name)
        rail = rail_of(config, device)(of_rail, deadlines, device, connect)
        undo.callback(rail.close)
        of_group = RollCall(list(range(peers.size)), peers.rank, peers.size, f"{name}/hosts")
        control = GlooRail(of_group, deadlines, torch.device("cpu"), connect)
        undo.callback(control.close)
        # All are connected: a rank that fails from here on cuts off nobody who still connects.
        peers.all_gather(None)

        # The exchange inside of the node, then the one over the nodes around it.
        with node_peers.substep():
            full = Seats.full(G)
            window = open_window(plan, node_peers, full, addresses, undo)
        inside = NodeExchange(
            config.of_node(), plan, placement.of_node(node, G), window, here, addresses, full
        )
        memory = RailMemory(config, plan, placement, peers.rank, device, rail)
        network_of = Network if device.type == "cpu" else NetworkOnGPUs
        network = network_of(
            node=inside,
            memory=memory,
            rail=rail,
            control=control,
            global_ranks=peers.global_ranks,
            rounds=rounds,
            deadlines=deadlines,
        )
        exchange = HierarchicalExchange(config, inside, memory, network)
        undo.pop_all()
    return exchange
