"""Experts that stay on their ranks. A round asks them the same as `LiveExperts`."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement
from epmoe.group.errors import EPStateError
from epmoe.live.moves import SlotWeights
from epmoe.live.slots import Table


class FixedExperts:
    """The experts of a rank without `placement.live`. Nothing moves, so nothing is counted.

    `placement` is None, and it holds no experts, before the rank's first group.
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
        """None are kept, nor what they refer to."""
        return {}

    def register(self, tag: int, weights: SlotWeights) -> None:
        """A layer says where the weights of its slots are."""

    def moving(self) -> NoReturn:
        raise EPStateError("experts stay where they are: `placement.live` is not set")

    def step(self) -> None: ...

    def close(self) -> None: ...

    def disown(self, why: str) -> None: ...

    def held_by_layer(self) -> Table:
        """The experts whose weights this rank has: those of all layers."""
        if self._placement is None:
            return []
        return [self._placement.logical_experts(self._rank)]

    def kept(self, config: EPConfig, size: int, has_weights: bool) -> tuple[EPConfig, None]:
        """The configuration of a group of another size in which this rank keeps its experts, and
        its slots. The other ranks find them by the placement.
        """
        return config, None

    def to_load(
        self, held: Table | None, before: Placement, ranks_before: list[int | None]
    ) -> tuple[Move, ...]:
        """The experts that this rank has to load after a change of the group.

        It had `held` slots, and the group had the placement `before`; of each rank now the rank
        then, or None.
        """
        assert self._placement is not None, "there is a group"
        return before.moves(self._placement, ranks_before)[self._rank]

    def experts(self, tag: int) -> list[int]:
        assert self._placement is not None, "there is a group"
        return self._placement.logical_experts(self._rank)

    def holder(self, tag: int, expert: int) -> tuple[int, int]:
        assert self._placement is not None, "there is a group"
        return self._placement.owner(expert), self._placement.local_index[expert]
