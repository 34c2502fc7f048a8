"""Which rank owns which expert. Every rank computes the same placement, with its maps and copies.

Letters: E logical experts, P physical experts (the logical ones and their copies), R ranks, e
experts of one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self, TypeGuard

import torch

EP = "ep"
"""The dimension of a mesh over whose ranks experts are spread."""
# The number of experts that a message names at most.
_MOST_NAMED = 20


class Move(NamedTuple):
    """A local expert of a rank whose weights are not in their place yet: the rank must load them,
    or reorder those that it has.
    """

    local_index: int
    """Where the weights belong: the expert's index among the experts of the rank."""
    logical: int
    """The logical expert whose weights these are."""
    source: int | None
    """The index at which the rank has held these weights so far; None if it must load them."""
    tag: int = 0
    """With `placement.live`, the layer whose slot this is, from 1; otherwise 0, for all layers."""


@dataclass(frozen=True)
class Placement:
    """P physical experts, that is E logical experts and their copies, on R ranks.

    Physical expert p < E is logical expert p; p ≥ E is a copy, by default of logical expert (p − E)
    mod E. Source rank s sends its token t to copy (t + s) mod n of an expert's n copies. So the
    copies share the load, and every run chooses alike.
    """

    num_experts: int
    """E"""
    ep_size: int
    """R"""
    owners: tuple[int, ...]
    """[P] the rank that owns each physical expert"""
    copied_experts: tuple[int, ...] | None = None
    """[P − E] the logical expert of each copy; None: copy i is of logical expert i mod E"""

    @classmethod
    def build(
        cls,
        num_experts: int,
        ep_size: int,
        strategy: str = "linear",
        assignment: Sequence[int] | None = None,
        num_redundant_experts: int = 0,
        copied_experts: Sequence[int] | None = None,
    ) -> Self:
        """Place P = `num_experts` + `num_redundant_experts` physical experts on `ep_size` ranks.

        - linear: blocks of experts in order; the first P mod R ranks own one expert more.
        - round_robin: expert p on rank p mod R.
        - explicit: `assignment` [P] gives the owner of each expert, and `copied_experts` [P − E],
          if given, the logical expert of each copy.

        Raises ValueError, which names the wrong argument.
        """
        for name, value, least in (
            ("num_experts", num_experts, 1),
            ("ep_size", ep_size, 1),
            ("num_redundant_experts", num_redundant_experts, 0),
        ):
            if not is_int(value) or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")

        # The lists belong to the strategy 'explicit', which needs a list of owners.
        is_explicit = strategy == "explicit"
        if is_explicit != (assignment is not None):
            given = "none" if assignment is None else "one"
            raise ValueError(
                f"`assignment` must be given with strategy 'explicit' and with no other, got "
                f"{strategy!r} with {given}"
            )
        if copied_experts is not None and not is_explicit:
            raise ValueError(
                f"`copied_experts` may be given with strategy 'explicit' only, got {strategy!r}"
            )

        # Find the owner of each expert.
        num_physical = num_experts + num_redundant_experts
        if assignment is not None:
            owners = tuple(assignment)
        else:
            owners = _owners(strategy, num_physical, ep_size)
        if len(owners) != num_physical:
            raise ValueError(
                f"`assignment` must be {num_physical} ranks, one per physical expert, got "
                f"{len(owners)}"
            )
        for p, rank in enumerate(owners):
            if not is_int(rank) or not 0 <= rank < ep_size:
                raise ValueError(
                    f"`assignment[{p}]` must be a rank from 0 to {ep_size - 1}, got {rank!r}"
                )

        # Find the logical expert of each copy.
        if copied_experts is None:
            return cls(num_experts, ep_size, owners)
        if len(copied_experts) != num_redundant_experts:
            raise ValueError(
                f"`copied_experts` must be {num_redundant_experts} experts, got "
                f"{len(copied_experts)}"
            )
        for i, logical in enumerate(copied_experts):
            _in_range(f"copied_experts[{i}]", logical, num_experts)
        return cls._with_copies(num_experts, ep_size, owners, tuple(copied_experts))

    @classmethod
    def _with_copies(
        cls, num_experts: int, ep_size: int, owners: tuple[int, ...], copied: tuple[int, ...]
    ) -> Self:
        """Make a placement with these copies. If copy i is of logical expert i mod E for all i, the
        placement does not list the copies, so that equal placements compare equal.
        """
        are_usual = all(logical == i % num_experts for i, logical in enumerate(copied))
        return cls(num_experts, ep_size, owners, None if are_usual else copied)

    def without(self, ranks: Collection[int], *, spread_lost: bool = False) -> Self:
        """Make the placement over the ranks that remain when `ranks` have gone.

        The remaining ranks are renumbered from 0, in their order. Every expert and copy stays on
        its rank, so no weights travel. If the owner of expert p < E has gone, the first remaining
        copy of this expert takes the id p. So physical ids may change, and with them the order of
        the experts on a rank: see `moves`.

        Args:
            ranks: the ranks that have gone.
            spread_lost: whether to place logical experts of which no copy remains on the ranks with
                the fewest experts. Their weights must be loaded there. A rank that has held no
                expert so far gets none, unless all remaining ranks are such.

        Returns:
            A placement of R − len(ranks) ranks. It may have fewer copies than this one.

        Raises:
            ValueError: no rank remains, or, without `spread_lost`, a logical expert is lost; the
                error names it.
        """
        gone = {_in_range("ranks", rank, self.ep_size) for rank in ranks}
        remaining = [rank for rank in range(self.ep_size) if rank not in gone]
        if not remaining:
            raise ValueError(
                f"`ranks` must leave at least one of {self.ep_size} ranks, got {sorted(gone)}"
            )
        renumbered = {rank: number for number, rank in enumerate(remaining)}

        # The first copy that remains takes the id of its logical expert. Later ones are copies.
        owner_of: dict[int, int] = {}
        copied: list[int] = []
        copy_owners: list[int] = []
        num_held = [0] * len(remaining)
        for p, rank in enumerate(self.owners):
            if rank in gone:
                continue
            logical = self.logical(p)
            new_rank = renumbered[rank]
            num_held[new_rank] += 1
            if logical in owner_of:
                copied.append(logical)
                copy_owners.append(new_rank)
            else:
                owner_of[logical] = new_rank

        # Each expert without a copy goes to the rank with the fewest experts.
        lost = [logical for logical in range(self.num_experts) if logical not in owner_of]
        if lost and not spread_lost:
            names = f"{lost[:_MOST_NAMED]}"
            if len(lost) > _MOST_NAMED:
                names += f" and {len(lost) - _MOST_NAMED} more"
            raise ValueError(
                f"logical expert(s) {names} have no copy outside rank(s) {sorted(gone)}: load "
                "their weights and say where, as Placement.without(ranks, spread_lost=True) does"
            )
        holders = [renumbered[rank] for rank in remaining if rank in self.owners]
        for logical in lost:
            candidates = holders or range(len(remaining))
            emptiest = min(candidates, key=num_held.__getitem__)
            owner_of[logical] = emptiest
            num_held[emptiest] += 1
        first_owners = [owner_of[logical] for logical in range(self.num_experts)]
        owners = (*first_owners, *copy_owners)
        return self._with_copies(self.num_experts, len(remaining), owners, tuple(copied))

    def moves(
        self, new: Placement, ranks: Sequence[int | None] | None = None
    ) -> list[tuple[Move, ...]]:
        """Find the weights that each rank must load or reorder when `new` replaces this placement.

        Args:
            new: the new placement, of the same number of logical experts.
            ranks: for each rank of `new`, its number in this placement, or None for a rank that
                holds no weights yet. By default ranks keep their numbers.

        Returns:
            For each rank of `new`, its local experts whose weights are not in their place yet.

        Raises:
            ValueError: the placements have different E, or `ranks` does not fit them.
        """
        if new.num_experts != self.num_experts:
            raise ValueError(
                f"`new` must place {self.num_experts} logical experts, got {new.num_experts}"
            )
        if ranks is None:
            # Ranks with higher numbers than those of this placement are new.
            known = range(self.ep_size)
            ranks = [rank if rank in known else None for rank in range(new.ep_size)]
        if len(ranks) != new.ep_size:
            raise ValueError(
                f"`ranks` must name {new.ep_size} ranks, one for each rank of `new`, got "
                f"{len(ranks)}"
            )
        moves = []
        for rank, before in enumerate(ranks):
            held = [] if before is None else self.logical_experts(before)
            moves.append(tuple(_moves_of_rank(held, new.logical_experts(rank))))
        return moves

    @property
    def num_physical_experts(self) -> int:
        """P: logical experts and copies."""
        return len(self.owners)

    @cached_property
    def local_index(self) -> tuple[int, ...]:
        """[P], the index of each physical expert among the experts of its owner, which are in
        ascending order of their physical ids.
        """
        num_seen = [0] * self.ep_size
        indices = []
        for rank in self.owners:
            indices.append(num_seen[rank])
            num_seen[rank] += 1
        return tuple(indices)

    def owner(self, physical: int) -> int:
        """The rank that owns a physical expert."""
        return self.owners[_in_range("physical", physical, self.num_physical_experts)]

    def local_experts(self, rank: int) -> list[int]:
        """The physical experts that a rank owns, in ascending order. Entry i is local expert i of
        the rank.
        """
        _in_range("rank", rank, self.ep_size)
        return [p for p, owner in enumerate(self.owners) if owner == rank]

    def logical_experts(self, rank: int) -> list[int]:
        """The logical experts that a rank holds. Entry i is the expert of the model whose weights
        local expert i has.

        The list is an index into a tensor of a checkpoint that has a row for each expert: for
        w [E, …], this rank needs `w[placement.logical_experts(rank)]`. An expert and its copy on
        the same rank are two entries.
        """
        return [self.logical(p) for p in self.local_experts(rank)]

    def num_local_experts(self, rank: int) -> int:
        """e, the number of experts that a rank owns. It may be 0, for instance if there are fewer
        experts than ranks.
        """
        return self.owners.count(_in_range("rank", rank, self.ep_size))

    def expert_map(self, rank: int) -> torch.Tensor:
        """int32 [P], the local index of each physical expert on this rank, or −1 if another rank
        owns the expert.
        """
        _in_range("rank", rank, self.ep_size)
        local_P = [-1] * self.num_physical_experts
        for index, p in enumerate(self.local_experts(rank)):
            local_P[p] = index
        return torch.tensor(local_P, dtype=torch.int32)

    def of_node(self, node: int, ranks_per_node: int) -> Placement:
        """Make the placement of the experts of one node on the ranks of this node.

        The exchange inside the node numbers experts by itself: in ascending order of their physical
        ids, with copies as experts of their own. With G = `ranks_per_node`, rank r of the group is
        rank r mod G of node r // G. Raises ValueError if the node owns no expert.
        """
        _in_range("node", node, self.ep_size // ranks_per_node)
        owners = tuple(
            rank % ranks_per_node for rank in self.owners if rank // ranks_per_node == node
        )
        if not owners:
            raise ValueError(
                f"every node must own an expert: node {node} owns none of "
                f"{self.num_physical_experts}"
            )
        return Placement(len(owners), ranks_per_node, owners)

    def node_ids(self, ranks_per_node: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The node of each physical expert, and the number of the expert among the experts of this
        node. Both are int32 [P].
        """
        # Experts of a node are numbered in the order of their physical ids.
        nodes = torch.tensor(self.owners, dtype=torch.int32) // ranks_per_node
        local = torch.empty_like(nodes)
        for node in nodes.unique():
            local[nodes == node] = torch.arange(int((nodes == node).sum()), dtype=torch.int32)
        return nodes, local

    def sentinel(self, rank: int) -> int:
        """The id that stands in unused slots on a rank: the first expert of another rank, which
        `expert_map` maps to −1. If this rank owns all experts, it is P.
        """
        _in_range("rank", rank, self.ep_size)
        for p, owner in enumerate(self.owners):
            if owner != rank:
                return p
        return self.num_physical_experts

    def logical(self, physical: int) -> int:
        """The logical expert of a physical expert. A physical expert below E is this logical expert
        itself, and any other one is a copy.

        Routers, ids and checkpoints use numbers of logical experts. Owners, maps and rows on the
        wire use numbers of physical experts.
        """
        # The first E physical experts are no copies, so this is negative for them.
        copy = _in_range("physical", physical, self.num_physical_experts) - self.num_experts
        if copy < 0 or self.copied_experts is None:
            return physical % self.num_experts
        return self.copied_experts[copy]

    def copies(self, logical: int) -> tuple[int, ...]:
        """The physical experts with the weights of a logical expert: the expert itself, then its
        copies.
        """
        return self._copies[_in_range("logical", logical, self.num_experts)]

    def copies_table(self) -> torch.Tensor:
        """int32 [E, C], where row i is `copies(i)`, padded with −1 to the length C of the longest
        row.
        """
        width = max(map(len, self._copies))
        rows = [copies + (-1,) * (width - len(copies)) for copies in self._copies]
        return torch.tensor(rows, dtype=torch.int32)

    def num_copies(self) -> torch.Tensor:
        """int32 [E], the number of physical experts of each logical expert, which is at least 1."""
        return torch.tensor([len(copies) for copies in self._copies], dtype=torch.int32)

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """[E], `copies` of each logical expert."""
        copies: list[list[int]] = [[] for _ in range(self.num_experts)]
        for p in range(self.num_physical_experts):
            copies[self.logical(p)].append(p)
        return tuple(map(tuple, copies))


def _owners(strategy: str, num_physical: int, ep_size: int) -> tuple[int, ...]:
    """The owner of each physical expert, [P], by a strategy that computes the owners. Raises
    ValueError for an unknown strategy.
    """
    if strategy == "round_robin":
        return tuple(p % ep_size for p in range(num_physical))
    if strategy != "linear":
        raise ValueError(
            f"`strategy` must be 'linear', 'round_robin' or 'explicit', got {strategy!r}"
        )
    # If P is no multiple of R, the first P mod R ranks own one expert more.
    block, num_longer = divmod(num_physical, ep_size)
    owners = list[int]()
    for rank in range(ep_size):
        size = block + 1 if rank < num_longer else block
        owners += [rank] * size
    return tuple(owners)


def _moves_of_rank(held: list[int], wanted: list[int]) -> Iterator[Move]:
    """The moves of one rank, which has held the logical experts `held` and is to hold `wanted`."""
    for index, logical in enumerate(wanted):
        stays = index < len(held) and held[index] == logical
        if stays:
            continue
        source = held.index(logical) if logical in held else None
        yield Move(local_index=index, logical=logical, source=source)


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int. To Python a bool is one, too, but not here."""
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(name: str, value: int, end: int) -> int:
    """Return `value`, or raise ValueError unless it is an int from 0 to `end` − 1."""
    if not is_int(value) or not 0 <= value < end:
        raise ValueError(f"`{name}` must be an integer from 0 to {end - 1}, got {value!r}")
    return value
