"""Experts that stay on their ranks, without `placement.live`. `FixedExperts` has the methods and
attributes of `LiveExperts` that every `ExpertParallel` uses.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement
from epmoe.group.errors import EPStateError
from epmoe.live.moves import SlotWeights
from epmoe.live.slots import Table


class FixedExperts:
    """The experts of a rank that stay where they are. Nothing moves, so all counters are 0.

    Before the first group of a rank, `placement` is None, and the rank holds no experts.
    """

    can_move: ClassVar[bool] = False
    moved: ClassVar[int] = 0
    moved_bytes: ClassVar[int] = 0
    stalls: ClassVar[int] = 0
    stalled_plans: ClassVar[int] = 0
    refused_plans: ClassVar[int] = 0

    def __init__(self, placement: Placement | None = None, rank: int = 0) -> None:
        self._placement = placement
        self._rank = rank

    @property
    def weights(self) -> dict[int, SlotWeights]:
        """By tag, the functions that return weights of slots. None is needed, so none is kept, and
        layers stay free to be deleted.
        """
        return {}

    def register(self, tag: int, weights: SlotWeights) -> None:
        """Do nothing: `LiveExperts` takes the function of a layer that returns its weights."""

    def moving(self) -> NoReturn:
        """Raise EPStateError: a caller needs experts that move."""
        raise EPStateError("experts stay where they are: `placement.live` is not set")

    def step(self) -> None:
        """Do nothing, as no expert moves."""

    def close(self) -> None:
        """Do nothing, as there is no thread to end."""

    def disown(self, why: str) -> None:
        """Do nothing, as a forked child has nothing to send."""

    def held_by_layer(self) -> Table:
        """The experts whose weights this rank has. One list is enough, as they are the same in all
        layers.
        """
        if self._placement is None:
            return []
        return [self._placement.logical_experts(self._rank)]

    def kept(self, config: EPConfig, size: int, has_weights: bool) -> tuple[EPConfig, None]:
        """What this rank brings into a group of another size: the configuration, and no slots,
        since the other ranks know the experts of this rank by the placement.
        """
        return config, None

    def to_load(
        self, held: Table | None, before: Placement, ranks_before: list[int | None]
    ) -> tuple[Move, ...]:
        """The experts that this rank has to load after a change of the group.

        `before` is the placement of the former group. `ranks_before` has for each rank of the
        present group its rank in the former one, or None for a new rank. `held` is for
        `LiveExperts`, whose method has the same arguments.
        """
        assert self._placement is not None, "there is a group"
        return before.moves(self._placement, ranks_before)[self._rank]

    def experts(self, tag: int) -> list[int]:
        """The logical experts of this rank, which are the same in all layers."""
        assert self._placement is not None, "there is a group"
        return self._placement.logical_experts(self._rank)

    def holder(self, tag: int, expert: int) -> tuple[int, int]:
        """The rank of an expert, and its index among the experts of this rank."""
        assert self._placement is not None, "there is a group"
        return self._placement.owner(expert), self._placement.local_index[expert]
