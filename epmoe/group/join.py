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

_NEW = -1
_MOST_NAMED = 8  # keys in an error


@dataclass(frozen=True)
class JoinRequest:
    """What a rank tells the others when it joins a group.

    `config` is JSON, of the group to be. Without `placement.live`, if the rank `keeps` the
    placement as far as it can, it is that of the group so far.
    """

    config: str
    origin: str = field(
        default_factory=lambda: secrets.token_hex(8)
    )  # of all ranks that were ever in one group
    generation: int = _NEW  # groups that the rank has had before the present one
    rank: int = _NEW  # in the group so far
    keeps: bool = False
    held: list[list[int]] | None = (
        None  # with `placement.live`, slots [layers][S] that the rank keeps or has read
    )
    spread_lost: bool = False  # that of `ExpertParallel.resume`
    process: str = field(default_factory=name_of_process)
    seat: int = _NEW  # in the groups so far
    versions: list[Any] = field(
        default_factory=list
    )  # of a trainer's weights that the rank has: `HeldVersions.said`
    attempt: str = field(
        default_factory=lambda: secrets.token_hex(8)
    )  # rank 0's names this attempt to open a group


@dataclass
class Agreement:
    """What the ranks of a group have agreed on. It is empty until they have."""

    requests: list[JoinRequest] = field(default_factory=list)  # of all ranks, in rank order
    origin: str = ""
    generation: int = 0  # of the group to be
    former: list[int] | None = (
        None  # if the ranks keep the placement, their ranks in the group so far
    )

    @property
    def attempt(self) -> str:
        return self.requests[0].attempt if self.requests else ""

    def seats(self, config: EPConfig) -> Seats:
        """Where the ranks sit in the group to be, of this config."""
        if config.topology.max_ranks is None:
            return Seats.full(len(self.requests))
        return Seats.keep(
            config.topology.seats, [(one.generation, one.seat) for one in self.requests]
        )

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
        self.requests = requests = [
            JoinRequest(*values) for values in peers.all_gather(astuple(request))
        ]
        known = [one for one in requests if one.generation != _NEW]
        if len({one.origin for one in known}) > 1:
            raise ValueError(
                "the ranks resume different ExpertParallels: resume the same ones, in one order, "
                "on all ranks"
            )
        newest = max(one.generation for one in requests)
        former = [one.rank for one in requests]
        keeps = any(one.keeps for one in requests)
        lives = any(one.held is not None for one in requests)
        if (
            keeps
            and not lives
            and (any(one.generation != newest for one in requests) or former != sorted(set(former)))
        ):
            raise ValueError(
                "`placement` must be given where the group has new ranks, or its ranks another "
                "order"
            )
        for key, what in (
            ("keeps", "`placement`"),
            ("spread_lost", "`spread_lost`"),
            ("config", "config"),
        ):
            says = {
                r: getattr(one, key)
                for r, one in enumerate(requests)
                if key == "config" or one.generation != _NEW
            }
            others = [
                other for other, value in says.items() if value != says.get(peers.rank, value)
            ]
            if others:
                keys = (
                    _differing([one.config for one in requests], peers.rank, others)
                    if key == "config"
                    else ""
                )
                raise ValueError(
                    f"the {what} of rank {peers.rank} differs from that of rank(s) {others}: it "
                    f"must be the same on all{keys}"
                )
        self.origin, self.generation = (known or requests)[0].origin, newest + 1
        self.former = former if keeps else None


def _differing(configs: list[str], rank: int, others: list[int]) -> str:
    """The keys in which the configs of ranks differ, with the values: the end of a sentence. Words
    of other ranks.
    """
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
    return f"; {', '.join(differences[:_MOST_NAMED])}" if differences else ""


@contextmanager
def opening(peers: Peers, then: Callable[[], object]) -> Iterator[Agreement]:
    """A step of `Peers.together` in which a group opens; `then` makes this rank one of the group.

    Yields an agreement to be reached. Raises EPOpenError, which names ranks that are missing.
    """
    check_backend(peers.group)
    agreement = Agreement()
    if peers.size > 1:
        RollCall.of(peers, "opening").arrive()
    try:
        with peers.together(then):
            yield agreement
    except MissingRankError as error:
        assert peers.timeout_s is not None
        missing = RollCall.of(error.peers, "opening", agreement.attempt).missing(
            [], OPENING_ANSWER_S
        )
        raise EPOpenError(
            peers.timeout_s, missing, [peers.global_ranks[rank] for rank in missing]
        ) from error.__cause__
    if peers.size > 1:
        RollCall.of(
            peers, "opening", agreement.attempt
        ).succeed()  # the last gather may have failed on another rank
