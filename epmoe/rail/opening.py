"""How a rank opens the exchange of its group, over one node or over several nodes with the rail
that the config names.
"""

from __future__ import annotations

from collections.abc import Callable
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
"""The rails by their names in the setting `exchange.rail`. "auto" takes the first one that serves
the device.
"""


def rail_of(config: EPConfig, device: torch.device) -> type[Rail]:
    """Choose the class of the rail between the nodes. Raises ValueError if no rail has the name in
    the config, or if no rail serves the device.
    """
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
    """Load the native library, and raise whatever would keep this rank from opening the exchange
    on this device. Every rank calls it before any rank allocates windows.
    """
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
    """Open the window of this rank, which the other ranks map. Collective, in a step of
    `Peers.together`.

    The function adds to `undo` what unmaps the window again, for the case that a later step fails.
    """
    transport = transport_of(config, addresses.processor.device)
    window = transport.window(plan, peers, seats, addresses)
    undo.callback(window.places.unmap)
    undo.callback(window.deaths.close)
    return window


def open_exchange(
    config: EPConfig,
    peers: Peers,
    seats: Seats,
    addresses: Addresses,
    name: str,
    check_weights: Callable[[], object],
) -> Exchange:
    """Open this rank's part of the exchange of a group. Collective, in a step of `Peers.together`.

    The windows lie at `addresses`. `name` is the same on all ranks, and no other attempt to open a
    group has the same name. `check_weights` is that of `Templates`. Raises MemoryError if the
    windows do not fit. Raises RuntimeError if the ranks of a node are on several machines, or if
    ranks do not reach one another.
    """
    seat = seats.of_ranks[peers.rank]
    placement = config.seated.place_experts()
    plan = addresses.processor.plan(config, seat, placement, peers)
    if config.topology.num_nodes > 1:
        return _open_over_nodes(config, plan, peers, addresses, name, check_weights)
    with ExitStack() as undo:
        window = open_window(config, plan, peers, seats, addresses, undo)
        lobby = None
        if config.exchange.idle == "wait":
            lobby = Lobby.open(peers, seats)
            undo.callback(lobby.leave)
        exchange = NodeExchange(
            config,
            plan,
            placement,
            window,
            peers.global_ranks,
            addresses,
            seats,
            lobby,
            check_weights,
        )
        undo.pop_all()
    return exchange


def _open_over_nodes(
    config: EPConfig,
    plan: MemoryPlan,
    peers: Peers,
    addresses: Addresses,
    name: str,
    check_weights: Callable[[], object],
) -> HierarchicalExchange:
    """Do what `open_exchange` does for a group of several nodes. There every seat has a rank, since
    such a group has no free seats.
    """
    processor = addresses.processor
    device = processor.device
    placement = config.seated.place_experts()
    G = config.topology.ranks_here
    N = config.topology.num_nodes
    times = config.exchange

    # Connect the ranks of this node. The gather makes ranks begin at the same time.
    node, local = divmod(peers.rank, G)
    connect = connect_within(peers.timeout_s)
    peers.all_gather(None)
    group = None
    if G > 1:
        group = gloo_group(f"{name}/node/{node}", local, G, connect)
    here = peers.global_ranks[node * G : (node + 1) * G]
    node_peers = Peers(
        group=group,
        rank=local,
        size=G,
        global_ranks=here,
        timeout_s=connect.total_seconds(),
        first=node * G,
    )
    rounds = RoundState(struct("Progress")())
    deadlines = Deadlines(times.warmup_timeout_s, times.timeout_s, lambda: rounds.count)
    with ExitStack() as undo:
        # Connect the rail to the ranks of the same local index on the other nodes.
        rail_ranks = [other_node * G + local for other_node in range(N)]
        rail_roll_call = RollCall(ranks=rail_ranks, rank=peers.rank, size=peers.size, name=name)
        rail = rail_of(config, device)(rail_roll_call, deadlines, device, connect)
        undo.callback(rail.close)

        # Connect the hosts of all ranks.
        host_roll_call = RollCall(
            ranks=list(range(peers.size)), rank=peers.rank, size=peers.size, name=f"{name}/hosts"
        )
        control = GlooRail(host_roll_call, deadlines, torch.device("cpu"), connect)
        undo.callback(control.close)

        # Wait until all ranks are connected. A rank that fails afterwards closes its connections,
        # which must not disturb a rank that still connects.
        peers.all_gather(None)

        # Open the exchange inside the node, then the exchange over the nodes, which uses it.
        with node_peers.substep():
            node_seats = Seats.full(G)
            window = open_window(config, plan, node_peers, node_seats, addresses, undo)
        node_exchange = NodeExchange(
            config.of_node(), plan, placement.of_node(node, G), window, here, addresses, node_seats
        )
        memory = RailMemory(config, plan, placement, peers.rank, device, rail)
        network_of = NetworkOnGPUs if processor.runs_ahead else Network
        network = network_of(
            node=node_exchange,
            memory=memory,
            rail=rail,
            control=control,
            global_ranks=peers.global_ranks,
            rounds=rounds,
            deadlines=deadlines,
        )
        exchange = HierarchicalExchange(config, node_exchange, memory, network, check_weights)
        undo.pop_all()
    return exchange
