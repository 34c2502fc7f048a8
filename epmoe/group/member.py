"""What the modules of this package need of an `ExpertParallel`: a rank of a group that can join
another group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement

_Result = TypeVar("_Result")


class Follower(Protocol):
    """An object of a layer that depends on the experts of its rank, such as its adapters. It must
    follow when the group changes.
    """

    def regroup(self, experts: int, whole: bool) -> None:
        """Follow this rank into another group, where it has `experts` experts. With `whole` all
        ranks hold the same experts as before.
        """


class Member(Protocol):
    """The part of `ExpertParallel` that this package uses. `ExpertParallel` explains each name."""

    config: EPConfig
    placement: Placement
    group: dist.ProcessGroup | None
    rank: int
    size: int
    origin: str
    generation: int
    processes: list[str]

    @property
    def exchange(self) -> Any: ...

    def alone(self, call: Callable[[], _Result]) -> _Result: ...

    def survivors(self) -> list[int]: ...

    def ended(self) -> list[int]: ...

    def go_on(self, *args: Any) -> tuple[Move, ...]: ...

    def lose_weights(self) -> None: ...

    def close(self) -> None: ...
