"""The buffers of one rank of a node: its memory plan, in its window and in scratch."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe.config.placement import Placement
from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.health import TOTALS
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.window import Window


class Buffers:
    """The buffers of a plan, which kernels read and write. What they count begins at 0, and the
    tables of where experts are say what `placement` does.

    Groups that are alike have the same scratch at `addresses`. No round begins before
    `let_rounds_begin`.

    Args:
        plan: the sizes and places of the buffers.
        placement: what the tables of experts say.
        window: memory that other ranks write into.
        addresses: where scratch is reserved.
        seats: the ranks of this node, of which some may be empty.

    Attributes:
        memory: window and scratch, as the operators take them.
        views: the buffers by name.
        window_starts: the addresses of the ranks' windows, by seat.
        layout: equal for groups whose CUDA graphs find the same here.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        placement: Placement,
        window: Window,
        addresses: Addresses,
        seats: Seats,
    ) -> None:
        self._processor = addresses.processor
        self._seats = seats
        self.window_starts = [region.data_ptr() for region in window.regions]
        where = *plan.as_ints(), *self.window_starts
        scratch = addresses.scratch(where, plan.scratch_bytes)
        self.memory = window.local, scratch
        self.views = _views_of(plan, window.local, scratch)
        self.layout = *where, scratch.data_ptr()
        for name in ("counts", *TOTALS):
            self.views[name].zero_()
        self.mark_empty_seats()
        self._write_tables(placement, plan.sizes["rank"])

    def mark_empty_seats(self) -> None:
        """Nobody signals from an empty seat: what kernels find there is the signal of every round,
        of no rows.

        It lies in the own window, where only this rank writes and reads it.
        """
        self._processor.mark_empty_seats(self.views, self._seats.empty)

    def write_copies(self, placement: Placement) -> None:
        """The copies of each expert, where none moves: `LiveExperts` writes quotas instead."""
        self.views["table.copies"].copy_(placement.copies_table())
        self.views["table.num_copies"].copy_(placement.num_copies())

    def let_rounds_begin(self) -> None:
        """Let rounds begin, once all tables are written: replays of graphs of earlier groups take
        part from here on.

        A kernel reads the tables before it looks at the state. On a GPU those that have read
        earlier tables end first.
        """
        self._processor.finish()
        self.views["state"].zero_()

    def _write_tables(self, placement: Placement, seat: int) -> None:
        """Where experts are, as kernels read it."""
        views = self.views
        views["table.expert_map"].copy_(placement.expert_map(seat))
        views["table.owners"].copy_(torch.tensor(placement.owners))
        # Only GPUs look up the place of an expert on another rank.
        if views["table.local_index"].numel():
            views["table.local_index"].copy_(torch.tensor(placement.local_index))
        sentinels = [placement.sentinel(seat) for seat in range(placement.ep_size)]
        views["table.sentinels"].copy_(torch.tensor(sentinels))


def _views_of(plan: MemoryPlan, window: Tensor, scratch: Tensor) -> dict[str, Tensor]:
    """The buffers of the plan in window and scratch, by name."""
    regions = {"window": window, "scratch": scratch}
    views = {}
    for buffer in plan.buffers:
        # Those of the rail have memory of their own.
        if buffer.region in regions:
            views[buffer.name] = buffer.view(regions[buffer.region])
    return views
