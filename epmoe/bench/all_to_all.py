"""The baseline: dispatch and combine as layers usually write them, over `all_to_all_single`.

One row travels for each (token, expert) pair. Dispatch sorts pairs by expert, exchanges counts, exchanges rows and
puts the arrived rows into expert order. Combine exchanges rows, undoes the sort and sums with the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from epmoe.bench.sample import Sample
from epmoe.bench.sides import Layer


@dataclass(frozen=True)
class Sent:
    """The expert-major rows [N, D] and what `back` needs to send their outputs back."""

    rows: torch.Tensor
    expert_offsets: torch.Tensor  # [e+1] first row of each local expert
    order: torch.Tensor  # [T·K] pair of each row that left
    arrival: torch.Tensor  # [N] for each expert-major row, its index among the arrived rows
    splits_out: list[int]
    splits_in: list[int]


class AllToAll(Layer):
    """The baseline for one rank of `group`. The host reads the counts.

    By default every call allocates its buffers, as such layers do because sizes change with the routing. With
    `keep_buffers` each buffer stays at the largest size seen. No page fault is left then: the best case of this method.
    """

    def __init__(self, sample: Sample, group: dist.ProcessGroup, name: str, *, keep_buffers: bool = False) -> None:
        self.keep_buffers = keep_buffers
        self.rank, self.group = sample.rank, group
        placement = sample.placement
        self.experts_per_rank = [placement.num_local_experts(rank) for rank in range(placement.ep_size)]
        owner_major = sorted(range(placement.num_physical_experts), key=lambda p: (placement.owner(p), p))
        self.position_P = torch.tensor(owner_major).argsort().to(sample.x_TD.device)
        self._buffers: dict[str, torch.Tensor] = {}
        super().__init__(name, sample)
        self.check()

    def out(self) -> Sent:
        """Rows in the order of the local experts; within an expert by source rank, then token."""
        x_TD, ids_TK = self.sample.x_TD, self.sample.ids_TK
        positions = self.position_P[ids_TK.flatten()]
        order = positions.argsort(stable=True)
        counts_P = positions.bincount(minlength=len(self.position_P))
        local = self.experts_per_rank[self.rank]
        counts_Re = torch.empty(len(self.experts_per_rank), local, dtype=torch.int64, device=x_TD.device)
        dist.all_to_all_single(
            counts_Re.view(-1), counts_P, [local] * len(counts_Re), self.experts_per_rank, group=self.group
        )
        splits_out = [int(counts.sum()) for counts in counts_P.cpu().split(self.experts_per_rank)]
        splits_in = counts_Re.sum(dim=1).tolist()
        out = self._rows("out", len(order), x_TD)
        torch.index_select(x_TD, 0, order // ids_TK.shape[1], out=out)
        arrived = self._rows("arrived", sum(splits_in), x_TD)
        dist.all_to_all_single(arrived, out, splits_in, splits_out, group=self.group)
        expert = torch.arange(local, device=x_TD.device).repeat(len(counts_Re)).repeat_interleave(counts_Re.view(-1))
        arrival = expert.argsort(stable=True)
        rows = self._rows("rows", len(arrival), x_TD)
        torch.index_select(arrived, 0, arrival, out=rows)
        offsets = torch.nn.functional.pad(counts_Re.sum(dim=0).cumsum(dim=0), (1, 0))
        return Sent(rows, offsets, order, arrival, splits_out, splits_in)

    def back(self, handle: Sent) -> torch.Tensor:
        """y [T, D]: the sum over each token's experts of weight times output row."""
        rows_ND, weights_TK = self.given, self.sample.weights_TK
        T, K = weights_TK.shape
        back = self._rows("arrived", len(rows_ND), rows_ND)
        back.index_copy_(0, handle.arrival, rows_ND)
        home = self._rows("out", T * K, rows_ND)
        dist.all_to_all_single(home, back, handle.splits_out, handle.splits_in, group=self.group)
        pairs = self._rows("pairs", T * K, rows_ND)
        pairs.index_copy_(0, handle.order, home)
        weights_T1K = weights_TK.unsqueeze(1).to(rows_ND.dtype)
        return torch.bmm(weights_T1K, pairs.view(T, K, rows_ND.shape[1])).squeeze(1)

    def rows(self, handle: Sent) -> tuple[torch.Tensor, None, torch.Tensor]:
        return handle.rows, None, handle.expert_offsets

    def _rows(self, name: str, count: int, like: torch.Tensor) -> torch.Tensor:
        if not self.keep_buffers:
            return like.new_empty(count, like.shape[1])
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            buffer = self._buffers[name] = like.new_empty(count, like.shape[1])
        return buffer[:count]
