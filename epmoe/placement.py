"""Which rank owns which expert: owners, maps, sentinels and copies, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from epmoe.config import EPConfig


@dataclass(frozen=True)
class Placement:
    """P physical experts, that is E logical experts and their copies, on R ranks.

    Physical expert p < E is logical expert p; p ≥ E is a copy of logical expert (p − E) mod E. Source rank s sends its
    token t to copy (t + s) mod n of an expert's n copies. So the copies share the load, and every run chooses alike.
    """

    num_experts: int
    """E"""
    ep_size: int
    """R"""
    owners: tuple[int, ...]
    """[P] the rank that owns each physical expert"""

    @classmethod
    def build(
        cls,
        num_experts: int,
        ep_size: int,
        strategy: str = "linear",
        assignment: Sequence[int] | None = None,
        num_redundant_experts: int = 0,
    ) -> Self:
        """Place P = `num_experts` + `num_redundant_experts` physical experts on `ep_size` ranks.

        - linear: blocks of experts in order; the first P mod R ranks own one expert more.
        - round_robin: expert p on rank p mod R.
        - explicit: `assignment` [P] gives the owner of each expert.

        Raises ValueError, which names the wrong argument.
        """
        for name, value, least in (
            ("num_experts", num_experts, 1),
            ("ep_size", ep_size, 1),
            ("num_redundant_experts", num_redundant_experts, 0),
        ):
            if not _is_int(value) or value < least:
                raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}")
        if (assignment is None) == (strategy == "explicit"):
            raise ValueError(
                f"`assignment` must be given with strategy 'explicit' and with no other, "
                f"got {strategy!r} with {'none' if assignment is None else 'one'}"
            )
        physical = num_experts + num_redundant_experts
        if assignment is not None:
            owners = tuple(assignment)
        elif strategy == "linear":
            block, longer = divmod(physical, ep_size)
            owners = tuple(rank for rank in range(ep_size) for _ in range(block + (rank < longer)))
        elif strategy == "round_robin":
            owners = tuple(p % ep_size for p in range(physical))
        else:
            raise ValueError(f"`strategy` must be 'linear', 'round_robin' or 'explicit', got {strategy!r}")
        if len(owners) != physical:
            raise ValueError(f"`assignment` must be {physical} ranks, one per physical expert, got {len(owners)}")
        for p, rank in enumerate(owners):
            if not _is_int(rank) or not 0 <= rank < ep_size:
                raise ValueError(f"`assignment[{p}]` must be a rank from 0 to {ep_size - 1}, got {rank!r}")
        return cls(num_experts, ep_size, owners)

    @classmethod
    def from_config(cls, config: EPConfig) -> Self:
        """The placement that the `placement` section of a configuration describes."""
        section = config.placement
        return cls.build(
            config.model.num_experts,
            config.topology.ep_size,
            section.strategy,
            section.assignment,
            section.num_redundant_experts,
        )

    @property
    def num_physical_experts(self) -> int:
        """P: logical experts and copies."""
        return len(self.owners)

    @cached_property
    def local_index(self) -> tuple[int, ...]:
        """[P] the index of each physical expert among the experts of its owner, in ascending order of physical id."""
        seen = [0] * self.ep_size
        index = []
        for rank in self.owners:
            index.append(seen[rank])
            seen[rank] += 1
        return tuple(index)

    def owner(self, physical: int) -> int:
        """The rank that owns a physical expert."""
        return self.owners[_in_range("physical", physical, self.num_physical_experts)]

    def local_experts(self, rank: int) -> list[int]:
        """Physical ids that a rank owns, ascending: entry i is its local expert i."""
        _in_range("rank", rank, self.ep_size)
        return [p for p, owner in enumerate(self.owners) if owner == rank]

    def num_local_experts(self, rank: int) -> int:
        """e; it may be 0, for instance where there are fewer experts than ranks."""
        return self.owners.count(_in_range("rank", rank, self.ep_size))

    def expert_map(self, rank: int) -> torch.Tensor:
        """int32 [P], physical id → local index, −1 where another rank owns it."""
        _in_range("rank", rank, self.ep_size)
        pairs = zip(self.owners, self.local_index, strict=True)
        return torch.tensor([i if owner == rank else -1 for owner, i in pairs], dtype=torch.int32)

    def sentinel(self, rank: int) -> int:
        """The id in unused slots: a foreign expert, which `expert_map` maps to −1, or P where no expert is foreign."""
        _in_range("rank", rank, self.ep_size)
        return next((p for p, owner in enumerate(self.owners) if owner != rank), self.num_physical_experts)

    def logical(self, physical: int) -> int:
        """The logical expert of a physical expert, which may be a copy."""
        return _in_range("physical", physical, self.num_physical_experts) % self.num_experts

    def copies(self, logical: int) -> tuple[int, ...]:
        """Physical ids of a logical expert: its own id first, then its copies."""
        _in_range("logical", logical, self.num_experts)
        return tuple(range(logical, self.num_physical_experts, self.num_experts))

    def copies_table(self) -> torch.Tensor:
        """int32 [E, C]: `copies` of every expert, padded with −1 to C, the largest number of copies."""
        most = len(self.copies(0))
        rows = [self.copies(x) + (-1,) * (most - len(self.copies(x))) for x in range(self.num_experts)]
        return torch.tensor(rows, dtype=torch.int32)

    def num_copies(self) -> torch.Tensor:
        """int32 [E]: physical experts of each logical expert, at least 1."""
        return torch.tensor([len(self.copies(x)) for x in range(self.num_experts)], dtype=torch.int32)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(name: str, value: int, end: int) -> int:
    if not _is_int(value) or not 0 <= value < end:
        raise ValueError(f"`{name}` must be an integer from 0 to {end - 1}, got {value!r}")
    return value
