"""What ranks agree on when a group forms, and what a rank is in the group from then on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.config.seats import Seats
from epmoe.exchange.transports import device_of
from epmoe.group.checks import check_size
from epmoe.group.join import Agreement, JoinRequest
from epmoe.group.peers import Peers
from epmoe.live.slots import Table, agree_on_slots, lacking, read_slots, slots_of
from epmoe.rail.opening import prepare


@dataclass(frozen=True)
class Membership:
    """What a rank is in one group. The next group makes another `Membership`."""

    config: EPConfig
    """the config of the group"""
    placement: Placement
    """where the experts are on the ranks of the group"""
    rank: int
    """this rank in the group"""
    size: int
    """R"""
    seats: Seats
    """the seats of the ranks"""
    origin: str
    """a name that is the same on all ranks, old and new ones, in all their groups"""
    generation: int
    """how many groups the ranks have had before this one"""
    processes: list[str]
    """[R], names of the ranks' processes"""

    @property
    def seat(self) -> int:
        """The seat of this rank."""
        return self.seats.of_ranks[self.rank]


class Terms(NamedTuple):
    """What the ranks have agreed on for the next group, before its windows open."""

    member: Membership
    """what this rank is to be"""
    slots: Table | None
    """with `placement.live` the experts in the slots of each layer and rank; None if the slots
    begin as the placement has them
    """
    versions: list[list[Any]]
    """[R], the versions of weights that the ranks have, as `HeldVersions.compare` takes them"""

    def are_held(self, held: Table | None) -> bool:
        """Whether a rank already has the weights of each expert that it is to hold, in the same
        slot. `held` are the experts by layer that it has held so far; None if it has lost their
        weights.
        """
        config = self.member.config
        slots_begin_again = config.placement.live and self.slots is None
        if slots_begin_again or held is None:
            return False

        # List the experts that this rank is to hold, by layer.
        rank = self.member.rank
        if self.slots is None:
            wanted = [self.member.placement.logical_experts(rank)]
        else:
            wanted = slots_of(self.slots, rank, config)

        # Before its first group a rank has held no experts.
        return not lacking(wanted, held or [[] for _ in wanted])


def agree(
    peers: Peers,
    config: EPConfig,
    request: JoinRequest,
    agreed: Agreement,
    device: torch.device,
) -> Terms:
    """Agree with all ranks on the next group, by the requests that they exchange. It fills
    `agreed`. Collective.

    `config` and `request` are what this rank asks for, on its `device`.
    """
    # If the config names a file of slots, ask for the slots that the file has for this rank.
    slots_of_file = None
    if config.placement.slots is not None:
        slots_of_file = read_slots(config)
        held = slots_of(slots_of_file, peers.rank, config)
        request = dataclasses.replace(request, held=held)
    agreed.reach(peers, request)

    # If the ranks keep their placement, give the experts of ranks that are gone to others.
    if agreed.former is not None and not config.placement.live:
        gone = set(range(config.topology.ep_size)).difference(agreed.former)
        placement = config.place_experts().without(gone, spread_lost=request.spread_lost)
        config = config.with_placement(placement)
    check_size(config, peers)

    # With `placement.live`, make the table of slots from the slots that the ranks hold.
    spread_lost = any(request.spread_lost for request in agreed.requests)
    held_by_ranks = [request.held for request in agreed.requests]
    slots = agree_on_slots(config, held_by_ranks, peers.rank, slots_of_file, spread_lost)

    # Run the checks that may raise on this rank alone: of its device, and of the native library.
    # `device_of` is called for its errors only.
    device_of(config, device)
    prepare(config, device)
    member = Membership(
        config=config,
        placement=config.place_experts(),
        rank=peers.rank,
        size=peers.size,
        seats=agreed.seats(config),
        origin=agreed.origin,
        generation=agreed.generation,
        processes=[request.process for request in agreed.requests],
    )
    versions = [request.versions for request in agreed.requests]
    return Terms(member, slots, versions)
