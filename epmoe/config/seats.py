"""Seats: the places of a group, of which `topology.max_ranks` says how many there are, and the
ranks that sit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Seats:
    """`count` seats, and the seat of each rank of the group [R].

    A rank keeps its seat in all groups of its `ExpertParallel`. Windows, slabs and words between
    ranks are numbered by seat; ranks, which have no gaps between their numbers, are what callers
    see.
    """

    count: int
    of_ranks: tuple[int, ...]

    @classmethod
    def full(cls, ranks: int) -> Self:
        """A rank in every seat."""
        return cls(ranks, tuple(range(ranks)))

    @classmethod
    def keep(cls, count: int, former: Sequence[tuple[int, int]]) -> Self:
        """Let each rank keep its seat. Ranks without one take the lowest empty seats.

        `former` [R] has for each rank how many groups it has been in, and its seat; −1: none. Where
        two ranks name one seat, the rank of the later group keeps it: the ranks of that group had
        given up the other.
        """
        # The rank in each seat. The rank of the later group comes last, and takes the seat.
        kept: dict[int, int] = {}
        for rank in sorted(range(len(former)), key=lambda rank: former[rank][0]):
            seat = former[rank][1]
            if 0 <= seat < count:
                kept[seat] = rank
        # All others sit in the lowest empty seats.
        empty = iter(sorted(set(range(count)).difference(kept)))
        seats = {rank: seat for seat, rank in kept.items()}
        for rank in range(len(former)):
            if rank not in seats:
                seats[rank] = next(empty)
        return cls(count, tuple(seats[rank] for rank in range(len(former))))

    @property
    def empty(self) -> list[int]:
        """Seats in which nobody sits."""
        return sorted(set(range(self.count)).difference(self.of_ranks))

    def rank_in(self, seat: int) -> int:
        """The rank in a seat; of an empty one, which a word of a peer may name, the
        number itself.
        """
        return self.of_ranks.index(seat) if seat in self.of_ranks else seat

    def ranks_in(self, mask: int) -> list[int]:
        """The ranks in the seats of a mask."""
        return [rank for rank, seat in enumerate(self.of_ranks) if mask >> seat & 1]

    def mask_of_ranks(self, mask: int) -> int:
        """The ranks in the seats of a mask, as a mask."""
        return sum(1 << rank for rank in self.ranks_in(mask))

    def by_rank(self, values: Sequence[_Value]) -> list[_Value]:
        """[R], of values by seat; none of none."""
        return [values[seat] for seat in self.of_ranks] if values else []
