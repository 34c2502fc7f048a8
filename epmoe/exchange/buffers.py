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
    """The buffers of a memory plan, which the kernels of one rank read and write.

    The constructor sets all counters to 0 and fills the tables that say which rank has which
    expert. It does not let rounds begin: call `let_rounds_begin` once the tables of copies are
    written, too.

    Groups with the same plan and the same window addresses share one scratch, which `addresses`
    keeps.

    Args:
        plan: the sizes and offsets of the buffers.
        placement: which rank has which expert.
        window: the memory into which other ranks write.
        addresses: reserves the scratch.
        seats: the seats of this node, of which some may have no rank.

    Attributes:
        memory: the window and the scratch, in the order in which the operators take them.
        views: the buffers by name.
        window_starts: the address of each rank's window in this process, by seat.
        layout: the sizes and addresses that CUDA graphs rest on. Groups with equal layouts may
            replay each other's graphs.
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
        sizes_and_addresses = *plan.as_ints(), *self.window_starts
        scratch = addresses.scratch(sizes_and_addresses, plan.scratch_bytes)
        self.memory = window.local, scratch
        self.views = _views_of(plan, window.local, scratch)
        self.layout = *sizes_and_addresses, scratch.data_ptr()
        # An earlier group may have left its counts in the scratch.
        for name in ("counts", *TOTALS):
            self.views[name].zero_()
        self.mark_empty_seats()
        self._write_tables(placement, plan.sizes["rank"])

    def mark_empty_seats(self) -> None:
        """Write the signals of seats that have no rank.

        Kernels wait for a signal from every seat. For an empty seat they find a signal that is
        valid in every round and announces no rows. This rank writes it into its own window, so each
        rank sees its own copy.
        """
        self._processor.mark_empty_seats(self.views, self._seats.empty)

    def write_copies(self, placement: Placement) -> None:
        """Write the table that lists the copies of each expert.

        Only groups whose experts stay in place need it. Where experts move, `LiveExperts` writes
        quotas into the same buffer.
        """
        self.views["table.copies"].copy_(placement.copies_table())
        self.views["table.num_copies"].copy_(placement.num_copies())

    def let_rounds_begin(self) -> None:
        """Let rounds begin. The caller has written all tables before.

        Replays of CUDA graphs that an earlier group has captured take part in rounds from here on.
        A kernel reads the tables before it reads the state. So this method first waits until all
        kernels that may have read old tables have ended, and then resets the state. Epochs begin
        anew, so counts of an earlier group must not look like those of a round to come.
        """
        self._processor.finish()
        self.views["part_counts"].zero_()
        self.views["state"].zero_()

    def _write_tables(self, placement: Placement, seat: int) -> None:
        """Write the tables by which kernels find the experts, for the rank in this seat."""
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
        # Buffers of the region "rail" lie in memory of their own, which epmoe/rail allocates.
        if buffer.region in regions:
            views[buffer.name] = buffer.view(regions[buffer.region])
    return views
