"""torch.distributed's collectives, NCCL on GPUs: an all-to-all of rank-major rows, and all-gather +
reduce-scatter.

Splits and indices are made beforehand, as if counts cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.peers import LeftOut, Peer
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import ExchangeSide


class AllToAllSingle(ExchangeSide):
    """A row for each (token, rank); the source adds up what comes back."""

    def __init__(self, sample: Sample, group: dist.ProcessGroup) -> None:
        super().__init__("all_to_all_single", sample)
        self.group = group
        # Splits and places of rows are known before the clock starts.
        x = sample.x_TD
        self.token_N = sample.needs_TR.T.nonzero()[:, 1].to(x.device)  # rank by rank
        self.splits_out = sample.rows_RR[sample.rank].tolist()
        self.splits_in = sample.rows_RR[:, sample.rank].tolist()
        # Memory for what arrives here, and for what comes back.
        self.received = x.new_empty(sum(self.splits_in), sample.hidden)
        self.home = x.new_empty(len(self.token_N), sample.hidden)

    def out(self) -> Any:
        rows = self.sample.x_TD[self.token_N]
        dist.all_to_all_single(
            self.received, rows, self.splits_in, self.splits_out, group=self.group
        )

    def back(self, handle: Any) -> Tensor:
        dist.all_to_all_single(
            self.home, self.expert_outputs, self.splits_out, self.splits_in, group=self.group
        )
        # Sums are in fp32, as ours.
        y = torch.zeros_like(self.sample.x_TD, dtype=torch.float32)
        return y.index_add_(0, self.token_N, self.home.float()).to(self.sample.dtype)

    def outputs(self, handle: Any) -> Tensor:
        return self.received.clone()

    def arrived(self, handle: Any) -> list[Tensor]:
        return [self.received]


class AllGather(ExchangeSide):
    """Every token everywhere, with its ids and weights; a rank puts out zeros for tokens that do
    not need it.
    """

    def __init__(self, sample: Sample, group: dist.ProcessGroup) -> None:
        super().__init__("all-gather", sample)
        self.group = group
        self.sent = (sample.x_TD, sample.ids_TK, sample.weights_TK)
        # Room for what all ranks send.
        self.received = [t.new_empty(group.size() * len(t), t.shape[1]) for t in self.sent]
        self.y_TD = torch.empty_like(sample.x_TD)

    def out(self) -> Any:
        for received, sent in zip(self.received, self.sent, strict=True):
            dist.all_gather_into_tensor(received, sent, group=self.group)

    def back(self, handle: Any) -> Tensor:
        dist.reduce_scatter_tensor(self.y_TD, self.expert_outputs, group=self.group)
        return self.y_TD

    def outputs(self, handle: Any) -> Tensor:
        rows, ids, _ = self.received
        return rows * self.sample.needed_here(ids).to(rows)

    def arrived(self, handle: Any) -> list[Tensor]:
        return self.received[:1]


class Collectives(Peer):
    install = "torch"

    def __init__(self, name: str, side: type[AllToAllSingle] | type[AllGather]) -> None:
        self.name = name
        self.side = side

    def version(self) -> str:
        return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""

    @contextmanager
    def exchange(
        self, sample: Sample, payload: Payload, group: dist.ProcessGroup
    ) -> Iterator[ExchangeSide]:
        if payload is not Payload.PLAIN:
            raise LeftOut("it sends rows as they are")
        yield self.side(sample, group)


PEERS = [
    Collectives("NCCL all_to_all_single", AllToAllSingle),
    Collectives("NCCL all-gather", AllGather),
]
