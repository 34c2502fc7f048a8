"""This rank's memory for what travels between nodes, and what the kernels of the rail know besides a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.memory import MemoryPlan, RailSlot
from epmoe.native.formats import WIRE_FORMATS, WireFormat

_TABLES = ("rail.table.copies", "rail.table.num_copies", "rail.table.node_of", "rail.table.node_local")


@dataclass(frozen=True)
class RailMemory:
    """The part of a memory plan that the network uses, and how it is divided.

    Attributes:
        views: buffers of the region "rail" by name; on GPUs `rail.total.needed` is memory of the host.
        device: of the buffers.
        node: of this rank.
        local: this rank in its node.
        ranks_per_node: G.
        others: the other nodes, ascending.
        rows_per_node: S, the most rows of a slab.
        exact: whether slabs travel in their own lengths, not padded.
        payload: the format of rows on their way.
        largest_block: elements that share a scale, in rows or in partial rows; 0 if there are no scales.
        slot: of a row.
        tables: what `rail_pack` knows of the placement.
        descriptor: `RailDescriptor` in csrc/ops_rail.cpp.
        differing: on GPUs the word of `rail_tags`, int64 [1] in memory of the host.
    """

    views: dict[str, Tensor]
    device: torch.device
    node: int
    local: int
    ranks_per_node: int
    others: list[int]
    rows_per_node: int
    exact: bool
    payload: WireFormat
    largest_block: int
    slot: RailSlot
    tables: list[Tensor]
    descriptor: Tensor
    differing: Tensor | None

    @classmethod
    def allocate(
        cls, config: EPConfig, plan: MemoryPlan, placement: Placement, rank: int, device: torch.device
    ) -> RailMemory:
        """The memory of `rank` of a group, with zeros in all buffers and the whole `placement` in its tables."""
        memory = torch.zeros(plan.rail_bytes, dtype=torch.uint8, device=device)
        views = {buffer.name: buffer.view(memory) for buffer in plan.buffers if buffer.region == "rail"}
        if device.type == "cuda":  # which the kernels write, and the host reads
            views["rail.total.needed"] = torch.zeros(1, dtype=torch.int32).pin_memory()
        G, N, slot = config.topology.ranks_here, config.topology.num_nodes, RailSlot.of(config)
        node, local = divmod(rank, G)
        payload, combine = (WIRE_FORMATS[wire] for wire in (config.exchange.payload, config.exchange.combine_payload))
        tables = [views[name] for name in _TABLES]
        values = placement.copies_table(), placement.num_copies(), *placement.node_ids(G)
        for table, of_placement in zip(tables, values, strict=True):
            table.copy_(of_placement)
        return cls(
            views=views,
            device=device,
            node=node,
            local=local,
            ranks_per_node=G,
            others=[other for other in range(N) if other != node],
            rows_per_node=config.rows_per_node,
            exact=config.exchange.network_splits == "exact",
            payload=payload,
            largest_block=max(payload.block, combine.block),
            slot=slot,
            tables=tables,
            descriptor=torch.tensor([*tables[0].shape, rank, node, N, payload.number, *slot], device="cpu"),
            differing=torch.zeros(1, dtype=torch.int64).pin_memory() if device.type == "cuda" else None,
        )

    @property
    def num_nodes(self) -> int:
        """N"""
        return len(self.others) + 1

    def of_rail(self, node: int) -> int:
        """The rank of this rail on a node, numbered in the group."""
        return node * self.ranks_per_node + self.local

    def one_each(self) -> list[int]:
        """[N] rows of a transfer in which each node sends one row to each other node."""
        return [int(node in self.others) for node in range(self.num_nodes)]
