"""Ranks that wait on the host until a round begins. epmoe/exchange/lobby.py, csrc/cpu/words.h.

In each round a rank brings tokens, or none, or gives the round up before it has begun. It says so
in its word, rings, and opens D(n), the wait of the protocol, whose deadline runs from then on. A
rank without tokens sleeps first, until the round has begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.explorer import Broken


class Rank(NamedTuple):
    """A rank, in the round that it calls for."""

    round: int = 1
    at: str = "between calls"
    """the step that comes next; between calls it chooses what it brings"""
    brings: bool = False  # tokens, to this round
    waits_for: int = 0  # the round whose begin it awaits
    seen: int = 0  # the futex, as it has read it before it looks at the words
    opened: int = 0  # its last D(n)
    owes: int = 0  # a round that it has given up before it had begun, or 0


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    words: tuple[int, ...]
    futex: int = 0
    give_ups: int = 0  # so many are left


class LobbyModel:
    """For `explore`: `ranks` run `rounds` rounds, and together give up at most `give_ups`."""

    def __init__(self, ranks: int, rounds: int, give_ups: int = 0, without: str = "") -> None:
        self.rounds = rounds
        self.without = without
        self.start = State((Rank(),) * ranks, (0,) * ranks, 0, give_ups)

    def has_ended(self, state: State) -> bool:
        return all(rank.round > self.rounds for rank in state.ranks)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for number, rank in enumerate(state.ranks):
            if rank.round <= self.rounds:
                for step, after in self._steps_of(number, rank, state):
                    yield f"rank {number} {step}", after

    def _steps_of(self, number: int, rank: Rank, state: State) -> Iterator[tuple[str, State]]:
        n = rank.round
        if rank.at == "between calls":
            if rank.owes and self.without != "owe-skip":
                # The round that it gave up must have begun before this call comes to the next.
                waits = rank._replace(at="reads", waits_for=rank.owes)
                yield f"calls for {n}", _put(state, number, waits)
                return
            first = "writes"
            if self.without == "come-first":
                first = "opens"
            with_tokens = rank._replace(at=first, brings=True, waits_for=n)
            yield f"brings tokens to {n}", _put(state, number, with_tokens)
            without_tokens = rank._replace(at="writes", brings=False, waits_for=n)
            yield f"brings nothing to {n}", _put(state, number, without_tokens)
            if state.give_ups and n < self.rounds and not _has_begun(state.words, n):
                gives_up = without_tokens._replace(owes=n)
                yield (
                    f"gives up {n}",
                    _put(state, number, gives_up)._replace(give_ups=state.give_ups - 1),
                )
        elif rank.at == "writes":
            words = list(state.words)
            words[number] = 2 * n + rank.brings
            after = _put(state, number, rank._replace(at="rings"))
            yield f"writes its word for {n}", after._replace(words=tuple(words))
        elif rank.at == "rings":
            after = self._behind_word(rank)
            yield "rings", _put(state, number, after)._replace(futex=state.futex + 1)
        elif rank.at == "reads":
            yield (
                "reads the futex",
                _put(state, number, rank._replace(at="looks", seen=state.futex)),
            )
        elif rank.at == "looks":
            following = "opens" if _has_begun(state.words, rank.waits_for) else "sleeps"
            yield "looks at the words", _put(state, number, rank._replace(at=following))
        elif rank.at == "sleeps" and state.futex != rank.seen:
            yield "wakes up", _put(state, number, rank._replace(at="reads"))
        elif rank.at == "opens":
            yield f"opens D({rank.waits_for})", _put(state, number, self._opened(rank, state))
        elif rank.at == "waits" and all(each.opened >= rank.opened for each in state.ranks):
            yield f"ends {rank.opened}", _put(state, number, self._behind_round(rank))

    def _behind_word(self, rank: Rank) -> Rank:
        """What a rank does once the others know that it comes."""
        if rank.owes == rank.round:
            # It returns to its caller, who calls for the next round.
            return rank._replace(at="between calls", round=rank.round + 1)
        if rank.opened == rank.round:
            # Without the rule come-first it has opened D(n) before.
            return rank._replace(at="between calls", round=rank.round + 1)
        if rank.brings or self.without == "await-begin":
            return rank._replace(at="opens")
        return rank._replace(at="reads")

    def _opened(self, rank: Rank, state: State) -> Rank:
        n = rank.waits_for
        if not _is_wanted(state.ranks, n):
            raise Broken(f"opens D({n})", "a deadline runs, and nobody has tokens for the round")
        if rank.opened != n - 1:
            raise Broken(f"opens D({n})", f"the others wait for it in D({rank.opened + 1})")
        return rank._replace(at="waits", opened=n)

    def _behind_round(self, rank: Rank) -> Rank:
        if rank.owes:
            # Behind the round that it gave up it comes to the one that its call is for.
            return rank._replace(at="between calls", owes=0)
        if self.without == "come-first" and rank.brings:
            return rank._replace(at="writes")
        return rank._replace(at="between calls", round=rank.round + 1)


def _put(state: State, number: int, rank: Rank) -> State:
    ranks = list(state.ranks)
    ranks[number] = rank
    return state._replace(ranks=tuple(ranks))


def _has_begun(words: tuple[int, ...], n: int) -> bool:
    """What a rank reads in the words: `look` of csrc/cpu/words.h."""
    return any(word > 2 * n for word in words) or all(word >= 2 * n for word in words)


def _is_wanted(ranks: tuple[Rank, ...], n: int) -> bool:
    """Whether somebody has tokens for a round or has gone beyond it, or all have come to it: then
    its waits may have a deadline.
    """
    has_come = []
    for rank in ranks:
        is_in_call = rank.at != "between calls"
        if rank.round > n and (is_in_call or rank.owes != n):
            return True
        if rank.round == n and is_in_call and rank.brings:
            return True
        has_come.append(rank.round > n or (rank.round == n and is_in_call))
    return all(has_come)
