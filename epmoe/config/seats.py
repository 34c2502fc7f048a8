"""Seats: the places of a group for ranks. There are `topology.max_ranks` of them, some of which may
be empty, so that ranks can leave and come while memory and CUDA graphs stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Seats:
    """The seats of a group of R ranks, and who sits where.

    A rank keeps its seat in all groups of its `ExpertParallel`. Windows, slabs and words between
    ranks are numbered by seat. Callers see ranks, which are numbered without gaps.
    """

    count: int
    """the number of seats, empty ones included"""
    of_ranks: tuple[int, ...]
    """[R], the seat of each rank"""

    @classmethod
    def full(cls, ranks: int) -> Self:
        """Make as many seats as ranks, with rank i in seat i."""
        return cls(count=ranks, of_ranks=tuple(range(ranks)))

    @classmethod
    def keep(cls, count: int, former: Sequence[tuple[int, int]]) -> Self:
        """Seat the ranks of a new group. Each rank keeps its former seat; ranks without one take
        the lowest empty seats.

        `former` [R] has for each rank the number of groups in which it has been, and its seat in
        the last of them, or −1 for a rank that had none. Two ranks may name the same seat, if one
        of them was given up and the other took its seat. The rank that has been in more groups then
        keeps the seat, since it belongs to the group that gave the other up.
        """
        # Find the rank that keeps each seat. Ranks of later groups come last in this order, and so
        # replace ranks of earlier groups.
        kept: dict[int, int] = {}
        for rank in sorted(range(len(former)), key=lambda rank: former[rank][0]):
            seat = former[rank][1]
            if 0 <= seat < count:
                kept[seat] = rank
        # Give all other ranks the lowest empty seats.
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
        """The rank in a seat. A message of another rank may name an empty seat; its own number is
        returned then, so that errors can name something.
        """
        return self.of_ranks.index(seat) if seat in self.of_ranks else seat

    def ranks_in(self, mask: int) -> list[int]:
        """The ranks in the seats whose bits are set in `mask`."""
        return [rank for rank, seat in enumerate(self.of_ranks) if mask >> seat & 1]

    def mask_of_ranks(self, mask: int) -> int:
        """Turn a mask of seats into a mask of the ranks in these seats."""
        return sum(1 << rank for rank in self.ranks_in(mask))

    def by_rank(self, values: Sequence[_Value]) -> list[_Value]:
        """Reorder values from seats to ranks: [R], the value of each rank's seat. Without values it
        returns an empty list.
        """
        return [values[seat] for seat in self.of_ranks] if values else []
