"""Ranks that agree on their next group at a board. epmoe/group/board.py, recovery.py.

Each write to the board is a step of its own, and a rank may end before any of them. The others may
see an end at any time after it. Of a slow rank they may say at any time that it has been silent for
too long, also if it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.explorer import Broken

BOARD_RULES = ("first-decides", "last-call", "one-outcome")
COMES = "comes"
MEETS = "meets"
DECIDES = "decides"
CONNECTS = "connects"
OPENS = "opens"
CONFIRMS = "confirms"
GOES_ON = "goes on"
LEFT_OUT = "left out"
DEAD = "dead"
FORMED = "formed"
FAILED = "failed"
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


class BoardModel:
    """For `explore`.

    Args:
        ranks: of the group so far.
        deaths, errors: how many ranks may end, and how many attempts may fail while all members
            live.
        slow: ranks of which the others may say that they are silent.
        without: the rule of `BOARD_RULES` that is taken out.
    """

    def __init__(
        self, ranks: int, deaths: int = 0, errors: int = 0, slow: Members = (), without: str = ""
    ) -> None:
        self.ranks, self.slow, self.without = range(ranks), slow, without
        self.start = State((Place(COMES),) * ranks, frozenset(), deaths, errors)

    def has_ended(self, state: State) -> bool:
        return all(place.state in (GOES_ON, LEFT_OUT, DEAD) for place in state.places)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for rank, place in enumerate(state.places):
            if place.state in (GOES_ON, LEFT_OUT, DEAD):
                continue
            for name, following, words, *cost in getattr(self, f"_{place.state}")(
                state, rank, place.attempt
            ):
                step = f"{rank} {name} in attempt {place.attempt}"
                self._check(step, state, rank, following)
                yield (
                    step,
                    self._at(state, rank, following)._replace(
                        words=words, errors=state.errors - len(cost)
                    ),
                )
            if state.deaths:
                yield (
                    f"{rank} dies",
                    self._at(state, rank, Place(DEAD))._replace(deaths=state.deaths - 1),
                )
            if state.errors and place.state in (CONNECTS, OPENS):
                after = self._at(state, rank, Place(COMES, place.attempt + 1))
                words = self._settled(state, place.attempt, "outcome", FAILED)
                yield f"{rank} raises", after._replace(words=words, errors=state.errors - 1)

    def _comes(self, state: State, rank: int, n: int) -> Iterator[Step]:
        outcome = self._read(state, n, "outcome")
        if outcome == FORMED:
            yield "comes too late", Place(LEFT_OUT), state.words
        elif outcome == FAILED:
            yield "goes further", Place(COMES, n + 1), state.words
        else:
            yield "comes", Place(MEETS, n), state.words | {(n, "came", rank)}

    def _meets(self, state: State, rank: int, n: int) -> Iterator[Step]:
        members = self._read(state, n, "decision")
        if members is not None:
            yield "reads", Place(CONNECTS, n) if rank in members else Place(LEFT_OUT), state.words
            return
        came = [one for one in self.ranks if (n, "came", one) in state.words]
        absent = [
            one for one in self.ranks if one not in came and not self._may_be_lost(state, one)
        ]
        if not absent or self.without == "last-call":
            for given_up in self._choices(
                [one for one in came if one != rank and self._may_be_lost(state, one)]
            ):
                members = tuple(one for one in came if one not in given_up)
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
        words = state.words | {(n, "address", rank)}
        yield "shows its address", Place(OPENS, n), words
        yield from self._failures(state, rank, n)

    def _opens(self, state: State, rank: int, n: int) -> Iterator[Step]:
        if self._all(state, n, "address"):
            on = self.without == "one-outcome"
            after = (
                Place(GOES_ON, n, self._read(state, n, "decision")) if on else Place(CONFIRMS, n)
            )
            yield "is in", after, state.words | {(n, "in", rank)}
        yield from self._failures(state, rank, n)

    def _confirms(self, state: State, rank: int, n: int) -> Iterator[Step]:
        outcome = self._read(state, n, "outcome")
        if outcome == FORMED:
            yield "goes on", Place(GOES_ON, n, self._read(state, n, "decision")), state.words
        elif outcome == FAILED:
            yield "tries again", Place(COMES, n + 1), state.words
        elif self._all(state, n, "in"):
            yield "settles formed", Place(CONFIRMS, n), self._settled(state, n, "outcome", FORMED)
        else:
            yield from self._failures(state, rank, n, Place(CONFIRMS, n))

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
        return state.places[rank].state in (DEAD, LEFT_OUT)

    def _may_be_lost(self, state: State, rank: int) -> bool:
        return rank in self.slow or self._is_gone(state, rank)

    def _check(self, step: str, state: State, rank: int, after: Place) -> None:
        if after.state == LEFT_OUT and rank not in self.slow:
            raise Broken(step, "a rank that lives is left out")
        if after.state == GOES_ON:
            others = [place for place in state.places if place.state == GOES_ON]
            if rank not in after.members or any(place != after for place in others):
                raise Broken(step, "two groups go on")

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
