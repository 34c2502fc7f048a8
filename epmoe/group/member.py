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


class Groups(Protocol):
    """The part of epmoe/life/life.py's `Life` that this package uses."""

    def alone(self, call: Callable[[], _Result]) -> _Result: ...

    def go_on(self, *args: Any) -> tuple[Move, ...]: ...


class Member(Protocol):
    """The part of `ExpertParallel` that this package uses. `ExpertParallel` explains each name."""

    @property
    def life(self) -> Groups: ...

    @property
    def config(self) -> EPConfig: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def origin(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def processes(self) -> list[str]: ...

    @property
    def exchange(self) -> Any: ...

    def survivors(self) -> list[int]: ...

    def ended(self) -> list[int]: ...

    def close(self) -> None: ...
