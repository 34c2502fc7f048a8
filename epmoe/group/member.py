"""A rank of a group, as the life of the group needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement


class _Rounds(Protocol):
    @property
    def count(self) -> int: ...


class _Exchange(Protocol):
    @property
    def rounds(self) -> _Rounds: ...


class Member(Protocol):
    """A rank of a group that can go on in another group: an `ExpertParallel`."""

    config: EPConfig
    placement: Placement
    group: dist.ProcessGroup | None
    rank: int
    size: int
    origin: str
    generation: int

    @property
    def exchange(self) -> _Exchange: ...

    def survivors(self) -> list[int]: ...

    def close(self) -> None: ...

    def resume(
        self,
        group: dist.ProcessGroup | None = None,
        placement: Placement | None = None,
        *,
        spread_lost: bool = False,
        confirm: Callable[[Callable[[], int]], bool] | None = None,
    ) -> tuple[Move, ...]: ...
