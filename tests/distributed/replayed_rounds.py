"""Rounds that have agreed with the references once, again and again: dispatch delivers the same
bits, y has the same.

The device compares and counts, so that the rounds may run in replays of a CUDA graph.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from checked_round import Checked
from helpers import bytes_of, poison_
from torch import Tensor

from epmoe import Dispatched


class Again:
    """A checked round and what it delivered. Every rank makes it before any rank begins its next
    round.
    """

    def __init__(self, checked: Checked) -> None:
        self.round = checked.round
        self.rows = checked.rows
        counts = checked.d.recv.counts.tolist()
        self.real = real_rows(checked.d) if checked.round.layout == "expert" else None
        slots = [(source, s) for source, count in enumerate(counts) for s in range(count)]
        self.slots = (
            torch.tensor(slots, dtype=torch.int64, device=checked.y.device).view(-1, 2).unbind(1)
        )
        self.wanted = [bits.clone() for bits in self._delivered(checked.d)]
        self.y = bytes_of(checked.y).clone()

    def play(self) -> Tensor:
        """The round, without a look of the host. Returns the bytes that differ, int64 on the
        device.
        """
        d = self.round.dispatch()
        wrong = torch.zeros((), dtype=torch.int64, device=self.y.device)
        for got, wanted in zip(self._delivered(d), self.wanted, strict=True):
            wrong += (got != wanted).sum()
        y = self.round.combine(self.rows, d)
        wrong += (bytes_of(y) != self.y).sum()
        poison_(y)  # a replay that does not write y leaves this
        return wrong

    def _delivered(self, d: Dispatched) -> list[Tensor]:
        recv = d.recv
        if self.round.layout == "expert":
            rows = [
                d.rows.view(torch.uint8)[self.real],
                *([] if d.scales is None else [d.scales[self.real]]),
            ]
            return [
                bytes_of(t) for t in (recv.counts, d.expert_offsets, d.tokens_per_expert, *rows)
            ]
        rows = [recv.x[self.slots], *([] if recv.scales is None else [recv.scales[self.slots]])]
        return [bytes_of(t) for t in (recv.counts, recv.ids, recv.weights, *rows)]


def real_rows(d: Dispatched) -> Tensor:
    """int64 [n]: the rows of segments without their gaps, on the device."""
    segments = zip(d.expert_offsets.tolist(), d.tokens_per_expert.tolist(), strict=False)
    return torch.tensor(
        [row for start, n in segments for row in range(start, start + n)], device=d.rows.device
    ).long()


class InTurn:
    """Rounds that are played in turn, on a GPU by replays of one graph. Every rank makes it and
    plays it as often.

    `wrong` counts the bytes that differ. This rank's GPU sleeps `stall` cycles before each round.
    """

    def __init__(self, rounds: list[Again], stall: int = 0) -> None:
        self.rounds = rounds
        self.stall = stall
        self.graph = None
        self.wrong = torch.zeros((), dtype=torch.int64, device=rounds[0].y.device)
        if self.wrong.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()  # every rank has kept what its last round delivered
        if self.wrong.is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._play()

    def play(self, times: int = 1) -> None:
        for _ in range(times):
            self._play() if self.graph is None else self.graph.replay()

    def _play(self) -> None:
        for again in self.rounds:
            if self.stall:
                torch.cuda._sleep(self.stall)
            self.wrong.add_(again.play())
