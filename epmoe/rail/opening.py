"""How the exchange of a group opens: over one node or several, with the rail that the
config names.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import Deadlines
from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.lobby import Lobby
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.processors import processor_of
from epmoe.exchange.round_state import RoundState
from epmoe.exchange.transports import transport_of
from epmoe.exchange.window import Window
from epmoe.group.board import RollCall
from epmoe.group.peers import Peers
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
    """The rail between the nodes. Raises ValueError if there is none of this name, or none for
    the device.
    """
    # Rails that serve the device. "auto" takes the first one.
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


def prepare(config: EPConfig, device: torch.device) -> None:
    """Find what would keep this rank from opening, and load the library."""
    processor = processor_of(device)
    processor.load()
    processor.check(config)
    if config.topology.num_nodes > 1:
        rail_of(config, device)


def open_window(
    config: EPConfig,
    plan: MemoryPlan,
    peers: Peers,
    seats: Seats,
    addresses: Addresses,
    undo: ExitStack,
) -> Window:
    """Collective, in a step of `Peers.together`. `undo` unmaps the window where a
    later step fails.
    """
    transport = transport_of(config, addresses.processor.device)
    window = transport.window(plan, peers, seats, addresses)
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
    plan = addresses.processor.plan(config, seat, placement, peers)
    if config.topology.num_nodes > 1:
        return _open_over_nodes(config, plan, peers, addresses, name)
    with ExitStack() as undo:
        window = open_window(config, plan, peers, seats, addresses, undo)
        lobby = None
        if config.exchange.idle == "wait":
            lobby = Lobby.open(peers, seats)
            undo.callback(lobby.leave)
        exchange = NodeExchange(
            config, plan, placement, window, peers.global_ranks, addresses, seats, lobby
        )
        undo.pop_all()
    return exchange


def _open_over_nodes(
    config: EPConfig, plan: MemoryPlan, peers: Peers, addresses: Addresses, name: str
) -> HierarchicalExchange:
    """`open_exchange` where the group has several nodes, with a rank in each seat."""
    processor = addresses.processor
    device = processor.device
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
            window = open_window(config, plan, node_peers, full, addresses, undo)
        inside = NodeExchange(
            config.of_node(), plan, placement.of_node(node, G), window, here, addresses, full
        )
        memory = RailMemory(config, plan, placement, peers.rank, device, rail)
        network_of = NetworkOnGPUs if processor.runs_ahead else Network
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
