"""How a rank joins a group: the ranks say what they bring, check that it fits, and open an exchange together.

All ranks of a group run the same steps, whether they are new or come from another group.
"""

from __future__ import annotations

import json
import reprlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace

import torch

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import Deadlines
from epmoe.config.placement import Placement
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.health import EPOpenError
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.peers import MissingRankError, Peers
from epmoe.group import check_backend, check_shared_memory, check_size, device_of, open_window
from epmoe.live.slots import Table, keep_slots, read_slots
from epmoe.native import ops
from epmoe.rail.exchange import HierarchicalExchange
from epmoe.rail.exchange_cuda import HierarchicalExchangeOnGPUs
from epmoe.rail.gloo import GlooRail, connect_within, gloo_group
from epmoe.rail.memory import RailMemory
from epmoe.rail.nccl import NcclRail
from epmoe.rail.roll_call import RollCall

_NEW = -1
_MOST_NAMED = 8  # keys in an error


@dataclass(frozen=True)
class Hello:
    """What a rank says to the others when it joins a group.

    config: JSON, of the group to be. Without `placement.live`, if the rank `keeps` the placement as far as it can, of
        the group so far.
    origin: the same on all ranks that were ever in one group.
    generation: how many groups the rank has had before the present one; `_NEW` if it has none yet.
    rank: in the group so far.
    held: with `placement.live`, of a rank that keeps its slots or has read them from a file.
    spread_lost: as of `ExpertParallel.resume`.
    attempt: rank 0's names this attempt to open a group, and what is connected in it.
    """

    config: str
    origin: str = field(default_factory=lambda: secrets.token_hex(8))
    generation: int = _NEW
    rank: int = _NEW
    keeps: bool = False
    held: Table | None = None
    spread_lost: bool = False
    attempt: str = field(default_factory=lambda: secrets.token_hex(8))


def agree(hellos: list[Hello], rank: int) -> tuple[str, int, list[int] | None]:
    """What the ranks of a group make of their hellos. All return alike, or all raise.

    With `placement.live` any ranks may keep their experts, in any order and beside new ones: a rank brings its slots.

    Args:
        hellos: of all ranks, in rank order.
        rank: this one.

    Returns:
        Origin and generation of the group to be; and if the ranks keep the placement, their ranks in the group so far.

    Raises:
        ValueError: the hellos do not fit together.
    """
    known = [hello for hello in hellos if hello.generation != _NEW]
    if len({hello.origin for hello in known}) > 1:
        raise ValueError("the ranks resume different ExpertParallels: resume the same ones, in one order, on all ranks")
    newest = max(hello.generation for hello in hellos)
    former = [hello.rank for hello in hellos]
    keeps, lives = any(hello.keeps for hello in hellos), any(hello.held is not None for hello in hellos)
    if keeps and not lives and (any(hello.generation != newest for hello in hellos) or former != sorted(set(former))):
        raise ValueError("`placement` must be given where the group has new ranks, or its ranks another order")
    for key, what in (("keeps", "`placement`"), ("spread_lost", "`spread_lost`"), ("config", "config")):
        says = {r: getattr(h, key) for r, h in enumerate(hellos) if key == "config" or h.generation != _NEW}
        others = [other for other, value in says.items() if value != says.get(rank, value)]
        if others:
            keys = _differing([hello.config for hello in hellos], rank, others) if key == "config" else ""
            raise ValueError(
                f"the {what} of rank {rank} differs from that of rank(s) {others}: it must be the same on all{keys}"
            )
    return (known or hellos)[0].origin, newest + 1, former if keeps else None


def _differing(configs: list[str], rank: int, others: list[int]) -> str:
    """The keys in which the configs of ranks differ, with the values: the end of a sentence. Words of other ranks."""
    mine, differences = json.loads(configs[rank]), list[str]()
    for other in others:
        theirs = json.loads(configs[other])
        for section, keys in mine.items():
            for key, value in keys.items():
                got = theirs.get(section, {}).get(key)
                if got != value:
                    differences.append(
                        f"`{section}.{key}` is {reprlib.repr(value)} here and {reprlib.repr(got)} on rank {other}"
                    )
    return f"; {', '.join(differences[:_MOST_NAMED])}" if differences else ""


@dataclass(frozen=True)
class Joined:
    """A rank's part of a group.

    Attributes:
        exchange: over the ranks of the group.
        config: of the group.
        placement: of its experts.
        origin: as of `Hello`.
        generation: of the group.
        slots: with `placement.live`, where ranks keep their experts, [layers][P]; otherwise None.
    """

    exchange: Exchange
    config: EPConfig
    placement: Placement
    origin: str
    generation: int
    slots: Table | None


def join(peers: Peers, config: EPConfig, hello: Hello, device: torch.device, close: Callable[[], None]) -> Joined:
    """Become a rank of a group. Collective; where a step fails on one rank, all raise.

    Args:
        peers: the ranks of the group.
        config: of the group so far, or of the group to be.
        hello: of this rank.
        device: of all tensors.
        close: releases the windows of the group so far, which might not fit beside the new ones. It is called once all
            ranks are able to join.

    Returns:
        This rank's part.

    Raises:
        ValueError: the ranks do not fit together, or the config does not fit the group or the device.
        EPOpenError: ranks ended, or did not come in time.
        MemoryError: the windows do not fit.
        RuntimeError: another rank has failed otherwise.
    """
    exchange: Exchange | None = None
    try:
        with _opening(peers) as attempt:
            first = None if config.placement.slots is None else read_slots(config)
            if first is not None:
                hello = replace(hello, held=_of_rank(first, peers.rank, config))
            hellos = [Hello(*values) for values in peers.all_gather(astuple(hello))]
            attempt.append(hellos[0].attempt)
            origin, generation, former = agree(hellos, peers.rank)
            if former is not None and not config.placement.live:
                gone = set(range(config.topology.ep_size)).difference(former)
                config = config.with_placement(config.place_experts().without(gone, spread_lost=hello.spread_lost))
            check_size(config, peers)
            slots = _slots(config, hellos, peers.rank, first)
            device_of(config, device)
            placement = config.place_experts()
            _ = ops.dispatch  # builds or loads the library now, not in a round in which other ranks wait
            if device.type == "cuda":
                ops.load_cuda()
            check_shared_memory(config, placement, device)
            peers.all_gather(None)  # all can: whoever resumes releases the old windows now
            close()
            name = f"{origin}.{generation}.{hellos[0].attempt}"
            with torch.inference_mode(False):  # otherwise the buffers could not be written outside inference mode
                if config.topology.num_nodes > 1:
                    exchange = _open_nodes(config, placement, peers, device, name)
                else:
                    exchange = _open_node(config, placement, peers, device)
    except BaseException:
        if exchange is not None:
            exchange.release()
        raise
    return Joined(exchange, config, placement, origin, generation, slots)


def _slots(config: EPConfig, hellos: list[Hello], rank: int, first: Table | None) -> Table | None:
    """What the ranks of a group hold, where some bring experts; `first` is what this rank has read from a file.

    Raises ValueError where an expert has no slot left, or ranks have read other files.
    """
    if all(hello.held is None for hello in hellos):
        return None
    others = [r for r, hello in enumerate(hellos) if first is not None and hello.held != _of_rank(first, r, config)]
    if others:
        raise ValueError(
            f"the file of `placement.slots` on rank {rank} differs from that of rank(s) {others}: it must be the same"
        )
    return keep_slots(config, [hello.held for hello in hellos], any(hello.spread_lost for hello in hellos))


def _of_rank(table: Table, rank: int, config: EPConfig) -> Table:
    S = config.placement.slots_per_rank or 0
    return [layer[rank * S : (rank + 1) * S] for layer in table]


def _open_node(config: EPConfig, placement: Placement, peers: Peers, device: torch.device) -> NodeExchange:
    """The exchange of a group on one node. Collective, in a step of `Peers.together`."""
    plan = MemoryPlan.build(config, peers.rank, placement, nvlink=device.type == "cuda")
    window = open_window(plan, peers, device)
    return NodeExchange(config, plan, placement, window, peers.global_ranks, device)


def _open_nodes(
    config: EPConfig, placement: Placement, peers: Peers, device: torch.device, name: str
) -> HierarchicalExchange:
    """The exchange of a group over several nodes. Collective, in a step of `Peers.together`.

    `name` is the same on all ranks, and of no other attempt to open a group.

    Raises MemoryError if the windows do not fit, and RuntimeError if the ranks of a node are on several machines, or do
    not reach one another.
    """
    G, N, times = config.topology.ranks_here, config.topology.num_nodes, config.exchange
    node, local = divmod(peers.rank, G)
    here = peers.global_ranks[node * G : (node + 1) * G]
    plan = MemoryPlan.build(config, peers.rank, placement, nvlink=device.type == "cuda")
    connect = connect_within(peers.timeout_s)
    peers.all_gather(None)  # all are about to connect
    group = gloo_group(f"{name}/node/{node}", local, G, connect) if G > 1 else None
    mates = Peers(group, local, G, here, connect.total_seconds(), first=node * G)
    deadlines = Deadlines(times.warmup_timeout_s, times.timeout_s)
    on_cpu = device.type == "cpu"
    roll = RollCall([m * G + local for m in range(N)], peers.rank, peers.size, name)
    rail = GlooRail(roll, deadlines, connect) if on_cpu else NcclRail(roll, deadlines, device, connect)
    with ExitStack() as undo:
        undo.callback(rail.close)
        all_ranks = RollCall(list(range(peers.size)), peers.rank, peers.size, f"{name}/everyone")
        everyone = GlooRail(all_ranks, deadlines, connect)
        undo.callback(everyone.close)
        peers.all_gather(None)  # all are connected: a rank that fails from here on cuts no other's connecting
        with mates.part():
            window = open_window(plan, mates, device)
        inside = NodeExchange(config.of_node(), plan, placement.of_node(node, G), window, here, device)
        memory = RailMemory(config, plan, placement, peers.rank, device)
        exchanges = HierarchicalExchange if on_cpu else HierarchicalExchangeOnGPUs
        exchange = exchanges(config, inside, memory, rail, everyone, peers.global_ranks, deadlines)
        undo.pop_all()
    return exchange


@contextmanager
def _opening(peers: Peers) -> Iterator[list[str]]:
    """A step of `Peers.together`. It yields a list for the name of this attempt, once that is known.

    Raises EPOpenError, which names the ranks, where some end or do not come.
    """
    check_backend(peers.group)
    attempt = list[str]()

    try:
        with peers.together():
            yield attempt
    except MissingRankError as error:
        assert peers.timeout_s is not None
        missing = RollCall.after(error, "opening", attempt="".join(attempt))
        raise EPOpenError(peers.timeout_s, missing, [peers.global_ranks[rank] for rank in missing]) from error.__cause__
    if peers.size > 1:
        RollCall.of(peers, "opening", "".join(attempt)).succeed()  # the last gather may have failed on another rank
