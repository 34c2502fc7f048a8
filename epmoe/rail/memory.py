"""This rank's memory for what travels between nodes, and what the kernels of the rail know besides
a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.memory import MemoryPlan, RailSlot
from epmoe.exchange.processors import processor_of
from epmoe.native.formats import WIRE_FORMATS
from epmoe.native.layouts import words
from epmoe.rail.rail import Rail

_TABLES = (
    "rail.table.copies",
    "rail.table.num_copies",
    "rail.table.node_of",
    "rail.table.node_local",
)
# Words that replays of CUDA graphs write, of earlier groups, too: nobody else gets their memory.
written_by_replays: list[Tensor] = []


class FailedWords(NamedTuple):
    """Words of a GPU that make the sums of a round zeros, or None on CPUs, where the host knows of
    a failure.
    """

    missed: Tensor | None
    """int64 [G], not 0 where a rank of this node misses one of another node"""
    latched: Tensor | None
    """int32 [1], not 0 once the node's exchange has failed"""
    noticed: Tensor | None
    """int64 [1] on the host, by which it learns that sums are zeros"""


class RailMemory:
    """The part of a memory plan that the network uses. All buffers begin as zeros.

    It takes config and placement of the whole group. `others` are the other nodes, ascending, and
    `rows_per_node` is S, the most rows of a slab. `largest_block` counts elements that share a
    scale, in rows or in partial rows; 0 if there are no scales.
    """

    def __init__(
        self,
        config: EPConfig,
        plan: MemoryPlan,
        placement: Placement,
        rank: int,
        device: torch.device,
        rail: Rail,
    ) -> None:
        # The buffers of the plan, in memory that the network can reach.
        memory = rail.allocate(plan.rail_bytes)
        self.processor = processor_of(device)
        of_rail = [buffer for buffer in plan.buffers if buffer.region == "rail"]
        self.views = {buffer.name: buffer.view(memory) for buffer in of_rail}
        # Words of the host, which the kernels write where the host does not wait for them.
        if self.processor.runs_ahead:
            needed = self.processor.host_memory(1, torch.int32).zero_()
            noticed = self.processor.host_memory(1, torch.int64).zero_()
            self.views |= {"rail.total.needed": needed, "rail.noticed": noticed}
            written_by_replays.extend((needed, noticed))

        # The nodes, and this rank among them.
        self.ranks_per_node = config.topology.ranks_here
        nodes = range(config.topology.num_nodes)
        self.node, self.local = divmod(rank, self.ranks_per_node)
        self.others = [node for node in nodes if node != self.node]

        # Rows as they travel.
        self.rows_per_node = config.rows_per_node
        self.payload = WIRE_FORMATS[config.exchange.payload]
        combine = WIRE_FORMATS[config.exchange.combine_payload]
        self.largest_block = max(self.payload.block, combine.block)
        self.may_have_extra = config.capacity.extra_bytes > 0
        self.slot = RailSlot.of(config)

        # Where experts are, for the kernels.
        self.tables = [self.views[name] for name in _TABLES]
        values = (
            placement.copies_table(),
            placement.num_copies(),
            *placement.node_ids(self.ranks_per_node),
        )
        for table, of_placement in zip(self.tables, values, strict=True):
            table.copy_(of_placement)

        # The descriptor of the operators of the rail: a `RailDescriptor` and a `RailSlot`.
        E, copies = self.tables[0].shape
        of_rank = {
            "E": E,
            "copies": copies,
            "rank": rank,
            "node": self.node,
            "num_nodes": len(nodes),
            "format": self.payload.number,
        }
        fields = words("RailDescriptor", of_rank)
        fields += words("RailSlot", self.slot._asdict())
        self.descriptor = torch.tensor(fields, device="cpu")

    @property
    def num_nodes(self) -> int:
        """N"""
        return len(self.others) + 1

    def of_rail(self, node: int) -> int:
        """The rank of this rail on a node, numbered in the group."""
        return node * self.ranks_per_node + self.local

    def of_node(self, ranks: Iterable[int]) -> list[int]:
        """Ranks of this node, numbered in the group."""
        return [self.node * self.ranks_per_node + rank for rank in ranks]

    def of_mask(self, mask: int) -> list[int]:
        """The ranks of a mask of this node's ranks, numbered in the group."""
        return self.of_node(rank for rank in range(self.ranks_per_node) if mask >> rank & 1)

    def one_each(self) -> list[int]:
        """[N] rows of a transfer in which each node sends one row to each other node."""
        return [int(node in self.others) for node in range(self.num_nodes)]
