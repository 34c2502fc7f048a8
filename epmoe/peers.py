"""The ranks of a group as one of them sees them, and how values of one reach all others."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Peers:
    """A process group, and the place of this process in it.

    Attributes:
        group: None is this process alone.
        rank: of this process in the group.
        size: R.
        global_ranks: [R], of each rank of the group.
        timeout_s: deadline of each `all_gather` in seconds; None is the group's own.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    global_ranks: list[int]
    timeout_s: float | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> Self:
        """The ranks of `group`, of which this process must be one."""
        if group is None:
            return cls(None, 0, 1, [0], timeout_s)
        ranks = dist.get_process_group_ranks(group)
        return cls(group, dist.get_rank(group), dist.get_world_size(group), ranks, timeout_s)

    def all_gather(self, value: _Value) -> list[_Value]:
        """Every rank's value, in rank order. Collective; pickles the values.

        Raises RuntimeError at once if a rank has ended, and after the deadline if one does not arrive.
        """
        if self.group is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(length) for length in self._gather(torch.tensor([data.numel()]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = zip(self._gather(padded), lengths, strict=True)
        return [pickle.loads(row[:length].numpy().tobytes()) for row, length in rows]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        assert self.group is not None
        options = AllgatherOptions()
        if self.timeout_s is not None:  # `dist.all_gather` takes no deadline
            options.timeout = timedelta(seconds=self.timeout_s)
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group.allgather([rows], [tensor], options).wait()
        return rows
