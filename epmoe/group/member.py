"""A rank of a group, as the life of the group needs it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.distributed as dist

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement


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
    def exchange(self) -> Any: ...

    def alone(self) -> AbstractContextManager[None]: ...

    def survivors(self) -> list[int]: ...

    def resume(self, *args: Any, **kwargs: Any) -> tuple[Move, ...]: ...

    def close(self) -> None: ...
