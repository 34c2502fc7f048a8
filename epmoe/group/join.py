"""How a rank joins a group. All ranks run the same steps: each tells the others what it has and
what it asks for, and all check that these values fit one another.
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

# The generation, rank and seat of a new rank, which has none yet.
_NEW = -1
# An error names at most so many keys of a config.
_MOST_NAMED = 8


def _new_name() -> str:
    """Make a name that no other call makes, in any process."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class JoinRequest:
    """The values that a rank tells the others when it joins a group. "The next group" is the group
    that it joins, and "the group so far" the one that it comes from, if it is no new rank.
    """

    config: str
    """the config of the next group, as JSON. If the rank `keeps` its placement, and experts do not
    move, it is the config of the group so far.
    """
    origin: str = field(default_factory=_new_name)
    """a name that is the same on all ranks that were ever in one group"""
    generation: int = _NEW
    """how many groups the rank has had before the group so far"""
    rank: int = _NEW
    """the number of the rank in the group so far"""
    keeps: bool = False
    """whether the experts are to stay on their ranks as far as possible"""
    held: list[list[int]] | None = None
    """with `placement.live`: the experts in the slots [layers][S] that the rank keeps, or that it
    has read from a file
    """
    spread_lost: bool = False
    """the argument `spread_lost` of `ExpertParallel.resume`"""
    process: str = field(default_factory=name_of_process)
    """the name of the rank's process"""
    seat: int = _NEW
    """the seat that the rank has had so far"""
    versions: list[Any] = field(default_factory=list)
    """the versions of a trainer's weights that the rank has, as `HeldVersions.said` returns them"""
    attempt: str = field(default_factory=_new_name)
    """a name for this attempt to open a group; the name of rank 0 counts"""

    @property
    def is_new(self) -> bool:
        """Whether the rank comes from no group."""
        return self.generation == _NEW


@dataclass
class Agreement:
    """The values on which the ranks of the next group have agreed. It is empty until `reach` has
    been called.
    """

    requests: list[JoinRequest] = field(default_factory=list)
    """the requests of all ranks, in rank order"""
    origin: str = ""
    """the origin of the ranks, see `JoinRequest`"""
    generation: int = 0
    """the generation of the next group"""
    former: list[int] | None = None
    """the numbers of the ranks in the group so far, in the order of their numbers in the next
    group; None if the ranks do not keep their placement
    """

    @property
    def attempt(self) -> str:
        """The name of this attempt; "" until it is known."""
        if not self.requests:
            return ""
        return self.requests[0].attempt

    def seats(self, config: EPConfig) -> Seats:
        """The seats of the ranks in the next group, which has this config. Ranks keep the seats
        that they have had.
        """
        if config.topology.max_ranks is None:
            return Seats.full(len(self.requests))
        had = [(request.generation, request.seat) for request in self.requests]
        return Seats.keep(config.topology.seats, had)

    @property
    def name(self) -> str:
        """A name of the next group. It is the same on all ranks, and no other attempt has it."""
        return f"{self.origin}.{self.generation}.{self.attempt}"

    def reach(self, peers: Peers, request: JoinRequest) -> None:
        """Exchange requests with the other ranks, and fill this object. Collective: all ranks
        agree, or all raise ValueError.

        If the ranks keep a placement, they must be ranks of one group, in their old order. With
        `placement.live` ranks may come in any order, also with new ranks, since each of them brings
        the slots that it holds.
        """
        requests = [JoinRequest(*values) for values in peers.all_gather(astuple(request))]
        self.requests = requests

        # Check that all ranks that come from a group come from the same one.
        known = [request for request in requests if not request.is_new]
        if len({request.origin for request in known}) > 1:
            raise ValueError(
                "the ranks resume different ExpertParallels: resume the same ones, in one order, "
                "on all ranks"
            )

        # Check that experts can stay where they are: their placement is by number of rank, so the
        # ranks must be of one group, in its order.
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

        # Check that all ranks ask for the same.
        self._check_equal("keeps", "`placement`", peers.rank)
        self._check_equal("spread_lost", "`spread_lost`", peers.rank)
        self._check_equal("config", "config", peers.rank)

        self.origin = (known or requests)[0].origin
        self.generation = newest + 1
        if keeps:
            self.former = former

    def _check_equal(self, key: str, what: str, rank: int) -> None:
        """Raise ValueError if the field `key` of another rank's request differs from that of this
        rank, `rank`. The error calls the field `what`. New ranks do not count, except for the field
        "config": a new rank asks for nothing else.
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
    """Say in which keys the configs of the `others` differ from the config of `rank`, with the
    values. The result is the end of a sentence; it is "" if no key differs.
    """
    # A config has sections, and a section has keys. The values come from other processes, so the
    # text of each is limited by `reprlib`.
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
    """Open a group within this context, which is a step of `Peers.together`.

    It yields an empty agreement; the body of the context calls `reach`. `then` is called once all
    ranks have succeeded, and makes this rank a rank of the group. Raises EPOpenError, which names
    the missing ranks, if ranks have ended or do not come.
    """
    check_backend(peers.group)
    agreement = Agreement()
    # Leave the name of this process. If it ends, the others need not wait for its answer.
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
    # The last gather may have failed on another rank. That rank asks which ranks are missing, so
    # say that this rank is not.
    if peers.size > 1:
        RollCall.of(peers, "opening", agreement.attempt).succeed()
