"""How a rank joins a group: all ranks run the same steps, tell one another what they bring, and
check that it fits.
"""

from __future__ import annotations

import json
import reprlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import OPENING_ANSWER_S
from epmoe.config.seats import Seats
from epmoe.group.board import RollCall
from epmoe.group.checks import check_backend
from epmoe.group.deaths import name_of_process
from epmoe.group.errors import EPOpenError
from epmoe.group.peers import MissingRankError, Peers

# A generation, rank or seat that a new rank does not have yet.
_NEW = -1
# Keys that an error names.
_MOST_NAMED = 8


def _new_name() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True)
class JoinRequest:
    """The values that a rank tells the others when it joins a group.

    `config` is JSON, of the group to be. Without `placement.live`, if the rank `keeps` the
    placement as far as it can, it is that of the group so far.
    """

    config: str
    origin: str = field(default_factory=_new_name)
    """of all ranks that were ever in one group"""
    generation: int = _NEW
    """groups that the rank has had before the present one"""
    rank: int = _NEW
    """in the group so far"""
    keeps: bool = False
    held: list[list[int]] | None = None
    """with `placement.live`, slots [layers][S] that the rank keeps or has read"""
    spread_lost: bool = False
    """that of `ExpertParallel.resume`"""
    process: str = field(default_factory=name_of_process)
    seat: int = _NEW
    """in the groups so far"""
    versions: list[Any] = field(default_factory=list)
    """of a trainer's weights that the rank has: `HeldVersions.said`"""
    attempt: str = field(default_factory=_new_name)
    """rank 0's names this attempt to open a group"""

    @property
    def is_new(self) -> bool:
        """Whether the rank comes from no group so far."""
        return self.generation == _NEW


@dataclass
class Agreement:
    """The values on which the ranks of a group have agreed. It is empty until they have."""

    requests: list[JoinRequest] = field(default_factory=list)
    """of all ranks, in rank order"""
    origin: str = ""
    generation: int = 0
    """of the group to be"""
    former: list[int] | None = None
    """if the ranks keep the placement, their ranks in the group so far"""

    @property
    def attempt(self) -> str:
        """The name of this attempt; "" until it is known."""
        if not self.requests:
            return ""
        return self.requests[0].attempt

    def seats(self, config: EPConfig) -> Seats:
        """Where the ranks sit in the group to be, of this config."""
        if config.topology.max_ranks is None:
            return Seats.full(len(self.requests))
        had = [(request.generation, request.seat) for request in self.requests]
        return Seats.keep(config.topology.seats, had)

    @property
    def name(self) -> str:
        """The same on all ranks, and of no other attempt."""
        return f"{self.origin}.{self.generation}.{self.attempt}"

    def reach(self, peers: Peers, request: JoinRequest) -> None:
        """Exchange requests with the other ranks. Collective: all ranks agree, or all raise
        ValueError.

        With `placement.live` any ranks may keep their experts, in any order and with new ranks:
        each brings its slots.
        """
        requests = [JoinRequest(*values) for values in peers.all_gather(astuple(request))]
        self.requests = requests

        # Ranks that come from a group come from the same one.
        known = [request for request in requests if not request.is_new]
        if len({request.origin for request in known}) > 1:
            raise ValueError(
                "the ranks resume different ExpertParallels: resume the same ones, in one order, "
                "on all ranks"
            )

        # Experts that stay where they are need the ranks of that group, in its order.
        newest = max(request.generation for request in requests)
        former = [request.rank for request in requests]
        keeps = any(request.keeps for request in requests)
        moves_experts = any(request.held is not None for request in requests)
        if keeps and not moves_experts:
            are_of_one_group = all(request.generation == newest for request in requests)
            are_in_order = former == sorted(set(former))
            if not are_of_one_group or not are_in_order:
                raise ValueError(
                    "`placement` must be given where the group has new ranks, or its ranks another "
                    "order"
                )

        # All ask for the same.
        self._check_equal("keeps", "`placement`", peers.rank)
        self._check_equal("spread_lost", "`spread_lost`", peers.rank)
        self._check_equal("config", "config", peers.rank)

        self.origin = (known or requests)[0].origin
        self.generation = newest + 1
        if keeps:
            self.former = former

    def _check_equal(self, key: str, what: str, rank: int) -> None:
        """Raise ValueError if a field of requests, called `what`, differs between ranks that have
        an opinion of it. New ranks only have one of the config.
        """
        values = {}
        for number, request in enumerate(self.requests):
            if key == "config" or not request.is_new:
                values[number] = getattr(request, key)
        if rank not in values:
            return
        others = [other for other, value in values.items() if value != values[rank]]
        if not others:
            return
        keys = ""
        if key == "config":
            keys = _differing([request.config for request in self.requests], rank, others)
        raise ValueError(
            f"the {what} of rank {rank} differs from that of rank(s) {others}: it must be the same "
            f"on all{keys}"
        )


def _differing(configs: list[str], rank: int, others: list[int]) -> str:
    """Say in which keys the configs of ranks differ, and the values: the end of a sentence. The
    words come from other ranks.
    """
    # A config is JSON of sections, each of keys.
    mine = json.loads(configs[rank])
    differences = list[str]()
    for other in others:
        theirs = json.loads(configs[other])
        for section, keys in mine.items():
            for key, value in keys.items():
                got = theirs.get(section, {}).get(key)
                if got != value:
                    differences.append(
                        f"`{section}.{key}` is {reprlib.repr(value)} here and {reprlib.repr(got)} "
                        f"on rank {other}"
                    )
    if not differences:
        return ""
    return f"; {', '.join(differences[:_MOST_NAMED])}"


@contextmanager
def opening(peers: Peers, then: Callable[[], object]) -> Iterator[Agreement]:
    """Open a group within this context, a step of `Peers.together`. `then` makes this rank one of
    the group.

    Yields an agreement to be reached. Raises EPOpenError, which names ranks that are missing.
    """
    check_backend(peers.group)
    agreement = Agreement()
    # Others need not wait for the answer of a rank that has ended.
    if peers.size > 1:
        RollCall.of(peers, "opening").arrive()
    try:
        with peers.together(then):
            yield agreement
    except MissingRankError as error:
        assert peers.timeout_s is not None
        roll_call = RollCall.of(error.peers, "opening", agreement.attempt)
        missing = roll_call.missing([], OPENING_ANSWER_S)
        global_ranks = [peers.global_ranks[rank] for rank in missing]
        raise EPOpenError(peers.timeout_s, missing, global_ranks) from error.__cause__
    # The last gather may have failed on another rank, which then asks who is missing.
    if peers.size > 1:
        RollCall.of(peers, "opening", agreement.attempt).succeed()
