"""Versions of weights: what ranks of a trainer leave in a folder (epmoe/live/versions.py), and what
ranks of a server hold and compare (epmoe/live/receiver.py, held.py).

In `HoldModel` a rank says what it holds, and has real weights, which may be others. A death ends
the group, and the next one is made of the ranks that are left; lost experts come from elsewhere.
Each tick of a rank and the opening of its next round are steps of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from protocol.explorer import Broken

NONE = -1


class Sent(NamedTuple):
    parts: frozenset[tuple[int, int]]
    """(version, rank) of each file"""
    last: tuple[int, ...]
    """the last version of each rank, sent or not"""
    untold: frozenset[tuple[int, int]]
    """(version that could not be sent, rank that has not heard of it)"""
    failures: int


class SendModel:
    """For `explore`: two ranks of a trainer, which keep one whole version.

    Args:
        versions: that each rank sends.
        failures: how many sends may fail, since a rank's memory is full.
        without: the rule that is taken out.
    """

    def __init__(self, versions: int, failures: int, without: str = "") -> None:
        self.versions = versions
        self.without = without
        self.start = Sent(frozenset(), (0, 0), frozenset(), failures)

    def has_ended(self, state: Sent) -> bool:
        return all(last == self.versions for last in state.last)

    def steps(self, state: Sent) -> Iterator[tuple[str, Sent]]:
        for rank, last in enumerate(state.last):
            version = last + 1
            if version > self.versions:
                continue
            # Hear of versions that the other rank could not send.
            unheard = {note for note in state.untold if note[1] == rank}
            if unheard and self.without != "tell-failures":
                yield f"{rank} hears of {unheard}", state._replace(untold=state.untold - unheard)
                continue
            if unheard:
                raise Broken(f"{rank} sends {version}", "nobody tells that a version is not whole")
            # The send fails, and the other rank is not told yet.
            now = state.last[:rank] + (version,) + state.last[rank + 1 :]
            if state.failures:
                note = (version, 1 - rank)
                yield (
                    f"{rank} cannot send {version}",
                    state._replace(
                        last=now, untold=state.untold | {note}, failures=state.failures - 1
                    ),
                )
            # Or it succeeds, and removes older versions, but none that is still needed.
            parts = self._without_old(state.parts | {(version, rank)})
            before = max(whole(state.parts), default=NONE)
            if max(whole(parts), default=NONE) < before:
                raise Broken(f"{rank} sends {version}", f"the whole version {before} has gone")
            yield f"{rank} sends {version}", state._replace(parts=parts, last=now)

    def _without_old(self, parts: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        counted = {version for version, _ in parts}
        if self.without != "keep-whole":
            counted = set(whole(parts))
        least = max(counted, default=NONE)
        return frozenset(part for part in parts if part[0] >= least)


def whole(parts: frozenset[tuple[int, int]]) -> list[int]:
    """The versions of which both ranks have left their part."""
    return [version for version, rank in parts if rank == 0 and (version, 1) in parts]


class Version(NamedTuple):
    number: int
    trainer: int


FIRST = Version(NONE, 0)
"""What each rank has loaded itself, before any receiver."""
MIXED = Version(NONE, NONE)
"""Weights of several versions, or of one that only the host knows."""
ROUNDS = 6
"""of a group: a flip comes, and rounds behind it"""


class Rank(NamedTuple):
    real: Version = FIRST
    held: Version | None = FIRST
    """what it says that it has; None: it does not know"""
    is_new: bool = False
    flipped: bool = False
    """while receivers are made"""
    count: int = 0
    """rounds that it has opened in this group"""
    ticked: bool = False
    behind: int = NONE
    """the last ROUND that it has taken"""
    staged: Version | None = None


class Group(NamedTuple):
    ranks: tuple[Rank, ...]
    folder: Version | None
    """the newest whole version there"""
    trainer: int
    serves: bool
    """all ranks have receivers"""
    making: Version | None
    """that ranks take, while receivers are made"""
    told: bool
    """that they hold different versions"""
    target: Version | None
    round: int
    of_rounds: tuple[tuple[int, Version], ...]
    """the weights in the last rounds"""
    versions: int
    deaths: int
    joins: int
    losses: int
    interrupts: int


# A group whose ranks have made no receivers yet.
_NO_RECEIVERS: dict[str, Any] = {
    "serves": False,
    "making": None,
    "told": False,
    "target": None,
    "round": NONE,
    "of_rounds": (),
}


class HoldModel:
    """For `explore`.

    Args:
        ranks: of the server.
        versions, deaths, joins, losses, interrupts: how many versions may come, ranks end or join,
            folders go with their trainers, and flips be interrupted by a signal handler.
        rounds: of each group.
        without: the rule that is taken out.
    """

    def __init__(
        self,
        ranks: int = 2,
        versions: int = 0,
        deaths: int = 0,
        joins: int = 0,
        losses: int = 0,
        interrupts: int = 0,
        rounds: int = ROUNDS,
        without: str = "",
    ) -> None:
        self.rounds = rounds
        self.without = without
        self.start = Group(
            ranks=(Rank(),) * ranks,
            folder=None,
            trainer=1,
            **_NO_RECEIVERS,
            versions=versions,
            deaths=deaths,
            joins=joins,
            losses=losses,
            interrupts=interrupts,
        )

    def has_ended(self, state: Group) -> bool:
        at_end = all(rank.count == self.rounds for rank in state.ranks)
        return state.told and state.folder is None or state.serves and at_end

    def steps(self, state: Group) -> Iterator[tuple[str, Group]]:
        # What trainers do.
        if state.versions:
            number = 1 if state.folder is None else state.folder.number + 1
            version = Version(number, state.trainer)
            yield (
                f"a trainer sends {version}",
                state._replace(folder=version, versions=state.versions - 1),
            )
        if state.losses and state.folder is not None:
            yield (
                "the folder goes, and another trainer begins",
                state._replace(folder=None, trainer=state.trainer + 1, losses=state.losses - 1),
            )
        # What the ranks of the server do: they form another group, serve, or make receivers.
        yield from self._other_groups(state)
        if state.serves:
            for rank in range(len(state.ranks)):
                yield from self._serves(state, rank)
        elif state.making is not None:
            for rank in range(len(state.ranks)):
                yield from self._takes(state, rank)
        else:
            yield from self._makes(state)

    def _other_groups(self, state: Group) -> Iterator[tuple[str, Group]]:
        if state.deaths and len(state.ranks) > 1:
            for dead in range(len(state.ranks)):
                left = state.ranks[:dead] + state.ranks[dead + 1 :]
                after = state._replace(deaths=state.deaths - 1)
                yield f"{dead} dies, which had copies only", self._regrouped(after, left)
                loaded = self._loaded(left[0])
                after = self._regrouped(after, (loaded, *left[1:]))
                yield f"{dead} dies, and another rank loads its experts", after
        if state.joins:
            joined = (*state.ranks, Rank(is_new=True))
            after = state._replace(joins=state.joins - 1)
            yield "a rank joins", self._regrouped(after, joined)

    def _loaded(self, rank: Rank) -> Rank:
        """It loads lost experts from its disk."""
        held = rank.held if self.without == "doubt-loaded" or rank.held == FIRST else None
        real = FIRST if rank.real == FIRST else MIXED
        return rank._replace(real=real, held=held)

    def _regrouped(self, state: Group, ranks: tuple[Rank, ...]) -> Group:
        """No rank has a receiver."""
        return state._replace(
            ranks=tuple(Rank(real=rank.real, held=rank.held, is_new=rank.is_new) for rank in ranks),
            **_NO_RECEIVERS,
        )

    def _makes(self, state: Group) -> Iterator[tuple[str, Group]]:
        """All ranks make a receiver."""
        if state.folder is not None:
            yield f"all take {state.folder}", state._replace(making=state.folder, told=False)
        elif not state.told:
            compared = [
                rank
                for rank in state.ranks
                if not (rank.is_new and self.without == "compare-joined")
            ]
            helds = {rank.held for rank in compared}
            if self.without == "name-trainer":
                helds = {held and held._replace(trainer=0) for held in helds}
            alike = len(helds) == 1 and None not in helds
            if alike or self.without == "compare-held":
                yield "all go on with what they hold", self._with_receivers(state)
            else:
                yield "all are told that they differ", state._replace(told=True)

    def _with_receivers(self, state: Group) -> Group:
        ranks = tuple(rank._replace(is_new=False) for rank in state.ranks)
        return state._replace(ranks=ranks, serves=True, making=None)

    def _takes(self, state: Group, rank: int) -> Iterator[tuple[str, Group]]:
        """A flip while receivers are made. All have theirs once all have flipped."""
        version = state.making
        assert version is not None
        one = state.ranks[rank]
        if one.flipped:
            return
        after = self._at(state, rank, one._replace(real=version, held=version, flipped=True))
        if all(each.flipped for each in after.ranks):
            after = self._with_receivers(after)
        yield f"{rank} flips to {version}", after
        yield from self._interrupted(state, rank)

    def _interrupted(self, state: Group, rank: int) -> Iterator[tuple[str, Group]]:
        """A signal handler raises in a flip, and all meet again."""
        if state.interrupts:
            one = state.ranks[rank]
            held = one.held if self.without == "unknown-while-flipping" else None
            after = self._at(state, rank, one._replace(real=MIXED, held=held))
            after = self._regrouped(after, after.ranks)
            yield f"{rank} is interrupted", after._replace(interrupts=state.interrupts - 1)

    def _serves(self, state: Group, rank: int) -> Iterator[tuple[str, Group]]:
        one = state.ranks[rank]
        if one.count == self.rounds:
            return
        if not one.ticked:
            yield from self._ticks(state, rank)
        elif all(other.count >= one.count for other in state.ranks):
            yield f"{rank} opens round {one.count + 1}", self._opens(state, rank)

    def _ticks(self, state: Group, rank: int) -> Iterator[tuple[str, Group]]:
        one = state.ranks[rank]
        last = one.count if self.without == "behind-two-rounds" else one.count - 1
        if one.behind < state.round < last:
            yield from self._interrupted(state, rank)
            if one.staged is not None:
                one = one._replace(real=one.staged, held=one.staged)
            one = one._replace(behind=state.round, staged=None)
        after = self._at(state, rank, one._replace(ticked=True))
        if state.round <= one.behind or self.without == "flip-first":
            after = self._looks(after, rank)
        yield f"{rank} ticks at {one.count}", after

    def _looks(self, state: Group, rank: int) -> Group:
        """No flip is to come: this rank stages the target, and rank 0 decides."""
        one = state.ranks[rank]
        target = state.target
        number = -1 if one.held is None else one.held.number
        is_newer = target is not None and target.number > number
        if is_newer and state.folder == target:
            state = self._at(state, rank, one._replace(staged=target))
        if rank > 0:
            return state
        needed = state.ranks[:1] if self.without == "all-staged" else state.ranks
        if is_newer and all(each.staged == target for each in needed):
            return state._replace(round=one.count)
        if state.folder is not None and state.folder.number > number:
            return state._replace(target=state.folder)
        return state

    def _opens(self, state: Group, rank: int) -> Group:
        one = state.ranks[rank]
        n = one.count + 1
        rounds = dict(state.of_rounds)
        real = rounds.setdefault(n, one.real)
        if real != one.real or MIXED in (real, one.real):
            raise Broken(f"{rank} opens round {n}", f"it has {one.real}, and others {real}")
        after = self._at(state, rank, one._replace(count=n, ticked=False))
        least = min(each.count for each in after.ranks)
        kept = tuple(sorted(item for item in rounds.items() if item[0] > least))
        return after._replace(of_rounds=kept)

    def _at(self, state: Group, rank: int, one: Rank) -> Group:
        return state._replace(ranks=(*state.ranks[:rank], one, *state.ranks[rank + 1 :]))
