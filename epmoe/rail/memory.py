"""The memory of a rank for rows that travel between nodes, and the tables and sizes that the
kernels of the rail need in every call.
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
# The words that replays of CUDA graphs write. A graph of an earlier group may still be replayed,
# so the words are kept for ever: nobody else may get their memory.
written_by_replays: list[Tensor] = []


class FailedWords(NamedTuple):
    """The words that a kernel reads to learn that the group has failed: it then writes zeros in
    place of the sums of a round. On CPUs they are None, since the host itself knows of a failure.
    """

    missed: Tensor | None
    """int64 [G], one word for each rank of this node: not 0 where that rank misses a rank of
    another node
    """
    latched: Tensor | None
    """int32 [1], not 0 once the exchange inside the node has failed"""
    noticed: Tensor | None
    """int64 [1] in memory of the host: the kernel writes it to tell the host that sums are zeros"""


class RailMemory:
    """The buffers of a rank that the network uses, and what is constant about them.

    `config` and `placement` are those of the whole group. All buffers begin as zeros.

    The attribute `others` has the numbers of the other nodes, ascending. `rows_per_node` is S, the
    most rows that a slab can have. `largest_block` is the largest number of elements that share a
    scale, in rows or in partial rows; it is 0 if there are no scales.
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
        # Lay the buffers of the plan out in memory that the network can reach.
        memory = rail.allocate(plan.rail_bytes)
        self.processor = processor_of(device)
        of_rail = [buffer for buffer in plan.buffers if buffer.region == "rail"]
        self.views = {buffer.name: buffer.view(memory) for buffer in of_rail}
        # On a GPU the host does not wait for kernels. They report in words of the host's memory.
        if self.processor.runs_ahead:
            needed = self.processor.host_memory(1, torch.int32).zero_()
            noticed = self.processor.host_memory(1, torch.int64).zero_()
            self.views |= {"rail.total.needed": needed, "rail.noticed": noticed}
            written_by_replays.extend((needed, noticed))

        # Find the place of this rank among the nodes.
        self.ranks_per_node = config.topology.ranks_here
        nodes = range(config.topology.num_nodes)
        self.node, self.local = divmod(rank, self.ranks_per_node)
        self.others = [node for node in nodes if node != self.node]

        # Keep the sizes and formats of rows that travel.
        self.rows_per_node = config.rows_per_node
        self.payload = WIRE_FORMATS[config.exchange.payload]
        combine = WIRE_FORMATS[config.exchange.combine_payload]
        self.largest_block = max(self.payload.block, combine.block)
        self.may_have_extra = config.capacity.extra_bytes > 0
        self.slot = RailSlot.of(config)

        # Fill the tables by which the kernels find the node of each expert.
        self.tables = [self.views[name] for name in _TABLES]
        values = (
            placement.copies_table(),
            placement.num_copies(),
            *placement.node_ids(self.ranks_per_node),
        )
        for table, of_placement in zip(self.tables, values, strict=True):
            table.copy_(of_placement)

        # Make the descriptor, which every operator of the rail takes: a `RailDescriptor` and a
        # `RailSlot` of csrc/rail.h, one behind the other.
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
        """N, the number of nodes of the group."""
        return len(self.others) + 1

    def rank_on(self, node: int) -> int:
        """The number in the group of the rank on `node` that has this rank's local index."""
        return node * self.ranks_per_node + self.local

    def group_ranks(self, local_ranks: Iterable[int]) -> list[int]:
        """The numbers in the group of these ranks of this node."""
        return [self.node * self.ranks_per_node + local for local in local_ranks]

    def group_ranks_of_mask(self, mask: int) -> list[int]:
        """The numbers in the group of the ranks of this node whose bits are set in `mask`."""
        return self.group_ranks(
            local for local in range(self.ranks_per_node) if (mask >> local) & 1
        )

    def other_nodes_mask(self) -> list[int]:
        """List 1 for each other node and 0 for this node, [N] in the order of the nodes."""
        return [int(node in self.others) for node in range(self.num_nodes)]
