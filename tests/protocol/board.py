"""Ranks that agree on their next group at a board. epmoe/group/board.py, recovery.py.

Each write to the board is a step of its own, and a rank may end before any of them. The others may
see an end at any time after it. Of a slow rank they may say at any time that it has been silent for
too long, also if it is there. Who makes torch's process group looks at nothing meanwhile.

Behind the meeting ranks load their weights, and some of them begin rounds before others have. They
may miss one that still loads, and all come to the meeting of the next group then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.explorer import Broken

COMES = "comes"
MEETS = "meets"
DECIDES = "decides"
CONNECTS = "connects"
AWAITS_READY = "awaits ready"
IN_TORCH = "is in torch"
OPENS = "opens"
CONFIRMS = "confirms"
LOADS = "loads"
GOES_ON = "goes on"
LEFT_OUT = "left out"
LEFT = "has left"
DEAD = "dead"
FORMED = "formed"
FAILED = "failed"
NEXT_GROUP = 100
"""Attempts of the group behind that of attempt n begin at NEXT_GROUP · (n + 1)."""
Members = tuple[int, ...]
# its name, where the rank is then, the words, and 1 if an attempt fails by it while all live
Step = tuple


class Place(NamedTuple):
    """Where a rank is, in which attempt, and the members that it is about to settle or goes on
    with.
    """

    state: str
    attempt: int = 0
    members: Members = ()


class State(NamedTuple):
    places: tuple[Place, ...]
    words: frozenset[tuple]
    """(attempt, key, rank) of each rank's own words, and (attempt, key, word) of those that were
    settled.
    """
    deaths: int
    errors: int
    misses: int
    """rounds that may fail since a rank still loads"""


class BoardModel:
    """For `explore`.

    Args:
        ranks: of the group so far.
        deaths, errors: how many ranks may end, and how many attempts may fail while all members
            live.
        slow: ranks of which the others may say that they are silent.
        misses: whether ranks may miss one that loads, and meet again.
        leaves: ranks that leave the group.
        without: the rule that is taken out.
    """

    def __init__(
        self,
        ranks: int,
        deaths: int = 0,
        errors: int = 0,
        slow: Members = (),
        misses: int = 0,
        leaves: Members = (),
        without: str = "",
    ) -> None:
        self.ranks = tuple(range(ranks))
        self.leaves = leaves
        self.slow = slow
        self.without = without
        self.start = State((Place(COMES),) * ranks, frozenset(), deaths, errors, misses)

    def has_ended(self, state: State) -> bool:
        return all(
            place.state in (LEFT_OUT, LEFT, DEAD)
            or place.state == GOES_ON
            and not self._has_failed(state, place)
            for place in state.places
        )

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for rank, place in enumerate(state.places):
            if place.state in (LEFT_OUT, LEFT, DEAD):
                continue
            if place.state == GOES_ON:
                yield from self._plays(state, rank, place)
                continue
            # What the rank does next, by the method of its state.
            at = getattr(self, f"_{place.state.replace(' ', '_')}")
            for name, following, words, *cost in at(state, rank, place.attempt):
                step = f"{rank} {name} in attempt {place.attempt}"
                self._check(step, state, rank, following)
                yield (
                    step,
                    self._at(state, rank, following)._replace(
                        words=words, errors=state.errors - len(cost)
                    ),
                )
            # Or it dies.
            if state.deaths:
                dead = self._at(state, rank, Place(DEAD))
                self._check_torch(f"{rank} dies", dead)
                yield f"{rank} dies", dead._replace(deaths=state.deaths - 1)
            # Or something raises on it. Then the attempt has failed for all.
            if state.errors and place.state in (CONNECTS, AWAITS_READY, IN_TORCH, OPENS):
                after = self._at(state, rank, Place(COMES, place.attempt + 1))
                words = self._settled(state, place.attempt, "outcome", FAILED)
                yield f"{rank} raises", after._replace(words=words, errors=state.errors - 1)

    def _comes(self, state: State, rank: int, n: int) -> Iterator[Step]:
        outcome = self._read(state, n, "outcome")
        if outcome == FORMED:
            yield "comes too late", self._outside(rank), state.words
        elif outcome == FAILED:
            yield "goes further", Place(COMES, n + 1), state.words
        else:
            word = "leaves" if rank in self.leaves else "came"
            yield "comes", Place(MEETS, n), state.words | {(n, word, rank)}

    def _outside(self, rank: int) -> Place:
        """Where a rank is that is no member."""
        return Place(LEFT if rank in self.leaves else LEFT_OUT)

    def _meets(self, state: State, rank: int, n: int) -> Iterator[Step]:
        members = self._read(state, n, "decision")
        if members is not None:
            after = Place(CONNECTS, n) if rank in members else self._outside(rank)
            yield "reads", after, state.words
            return
        group = self._group(state, n)
        came = [one for one in group if (n, "came", one) in state.words]
        gone = {one for _, key, one in state.words if key == "leaves"}
        absent = [
            one
            for one in group
            if one not in came and one not in gone and not self._may_be_lost(state, one)
        ]
        if not absent or self.without == "last-call":
            for given_up in self._choices(
                [one for one in came if one != rank and self._may_be_lost(state, one)]
            ):
                members = tuple(one for one in came if one not in given_up)
                if not members:
                    if self.without != "nobody-stays":
                        yield "leaves nobody", Place(LEFT), state.words
                    continue
                yield f"chooses {members}", Place(DECIDES, n, members), state.words

    def _decides(self, state: State, rank: int, n: int) -> Iterator[Step]:
        members = state.places[rank].members
        if self.without == "first-decides":
            words = frozenset(word for word in state.words if word[:2] != (n, "decision")) | {
                (n, "decision", members)
            }
        else:
            words = self._settled(state, n, "decision", members)
        yield f"settles {members}", Place(MEETS, n), words

    def _connects(self, state: State, rank: int, n: int) -> Iterator[Step]:
        after = IN_TORCH if self.without == "ready-first" else AWAITS_READY
        yield "is ready", Place(after, n), state.words | {(n, "ready", rank)}

    def _awaits_ready(self, state: State, rank: int, n: int) -> Iterator[Step]:
        if self._all(state, n, "ready"):
            yield "connects", Place(IN_TORCH, n), state.words
        yield from self._failures(state, rank, n)

    def _is_in_torch(self, state: State, rank: int, n: int) -> Iterator[Step]:
        """Torch connects to all at once. It takes its timeout for one that has ended meanwhile."""
        yield "has connected", Place(OPENS, n), state.words | {(n, "address", rank)}
        members = self._read(state, n, "decision")
        if any(self._is_gone(state, one) for one in members):
            yield "is late", Place(COMES, n + 1), self._settled(state, n, "outcome", FAILED)

    def _opens(self, state: State, rank: int, n: int) -> Iterator[Step]:
        if self._all(state, n, "address"):
            on = self.without == "one-outcome"
            after = Place(LOADS, n, self._read(state, n, "decision")) if on else Place(CONFIRMS, n)
            yield "is in", after, state.words | {(n, "in", rank)}
        yield from self._failures(state, rank, n)

    def _confirms(self, state: State, rank: int, n: int) -> Iterator[Step]:
        outcome = self._read(state, n, "outcome")
        if outcome == FORMED:
            yield "goes on", Place(LOADS, n, self._read(state, n, "decision")), state.words
        elif outcome == FAILED:
            yield "tries again", Place(COMES, n + 1), state.words
        elif self._all(state, n, "in"):
            yield "settles formed", Place(CONFIRMS, n), self._settled(state, n, "outcome", FORMED)
        else:
            yield from self._failures(state, rank, n, Place(CONFIRMS, n))

    def _loads(self, state: State, rank: int, n: int) -> Iterator[Step]:
        yield "has loaded", Place(GOES_ON, n, state.places[rank].members), state.words

    def _plays(self, state: State, rank: int, place: Place) -> Iterator[tuple[str, State]]:
        """A round of this rank, which fails where another still loads, or has left the group."""
        others = [state.places[one] for one in place.members if one != rank]
        loading = any(other.state == LOADS for other in others)
        failed = self._has_failed(state, place)
        if failed or loading and state.misses:
            step = f"{rank} misses a rank"
            after = Place(COMES, NEXT_GROUP * (place.attempt + 1))
            misses = state.misses - (not failed)
            yield step, self._at(state, rank, after)._replace(misses=misses)

    def _has_failed(self, state: State, place: Place) -> bool:
        """Whether a rank of this group has come to the next meeting, or has been left out of it."""
        following = NEXT_GROUP * (place.attempt + 1)
        return any(
            (following, "came", one) in state.words or state.places[one].attempt >= following
            for one in place.members
        )

    def _group(self, state: State, n: int) -> Members:
        """The ranks that meet."""
        if n < NEXT_GROUP:
            return self.ranks
        return self._read(state, n // NEXT_GROUP - 1, "decision")

    def _failures(
        self, state: State, rank: int, n: int, after: Place | None = None
    ) -> Iterator[Step]:
        """A wait that ends because the attempt has failed, or because a member is lost."""
        after = after or Place(COMES, n + 1)
        words = self._settled(state, n, "outcome", FAILED)
        others = [one for one in self._read(state, n, "decision") if one != rank]
        if self._read(state, n, "outcome") == FAILED or any(
            self._is_gone(state, one) for one in others
        ):
            yield "gives up", after, words
        elif state.errors and set(others) & set(self.slow):
            yield "hears nothing", after, words, 1

    def _is_gone(self, state: State, rank: int) -> bool:
        return state.places[rank].state in (DEAD, LEFT_OUT, LEFT)

    def _may_be_lost(self, state: State, rank: int) -> bool:
        silent = self.without == "there-while-loading" and state.places[rank].state == LOADS
        return silent or rank in self.slow or self._is_gone(state, rank)

    def _check(self, step: str, state: State, rank: int, after: Place) -> None:
        if after.state == LEFT_OUT and rank not in self.slow:
            raise Broken(step, "a rank that lives is left out")
        if after.state in (LOADS, GOES_ON):
            begins = after.attempt // NEXT_GROUP
            others = [
                place
                for place in state.places
                if place.state in (LOADS, GOES_ON) and place.attempt // NEXT_GROUP == begins
            ]
            if rank not in after.members or any(place[1:] != after[1:] for place in others):
                raise Broken(step, "two groups go on")
        self._check_torch(step, self._at(state, rank, after))

    def _check_torch(self, step: str, state: State) -> None:
        """Who is in torch waits for no member that has ended before it was about to connect."""
        for place in state.places:
            if place.state == IN_TORCH:
                n = place.attempt
                for one in self._read(state, n, "decision"):
                    ready = (n, "ready", one) in state.words
                    if state.places[one].state == DEAD and not ready:
                        raise Broken(step, "torch waits for a rank that has ended before")

    def _at(self, state: State, rank: int, place: Place) -> State:
        return state._replace(places=(*state.places[:rank], place, *state.places[rank + 1 :]))

    def _read(self, state: State, n: int, key: str) -> object:
        return next(
            (word for attempt, name, word in state.words if (attempt, name) == (n, key)), None
        )

    def _settled(self, state: State, n: int, key: str, word: object) -> frozenset:
        return (
            state.words if self._read(state, n, key) is not None else state.words | {(n, key, word)}
        )

    def _all(self, state: State, n: int, key: str) -> bool:
        return all((n, key, one) in state.words for one in self._read(state, n, "decision"))

    def _choices(self, ranks: list[int]) -> Iterator[set[int]]:
        for mask in range(1 << len(ranks)):
            yield {rank for i, rank in enumerate(ranks) if mask >> i & 1}
