"""A rank of a group that can join another group: an `ExpertParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement

_Result = TypeVar("_Result")


class Follower(Protocol):
    """What a layer keeps for the experts of its rank, such as adapters, and what a change of the
    group concerns.
    """

    def regroup(self, experts: int, whole: bool) -> None:
        """This rank has so many experts now, in another group. `whole`: all ranks hold the same
        ones as before.
        """


class Member(Protocol):
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
