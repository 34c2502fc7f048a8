"""Predicts the µs of an exchange within a node and over several, and of two other designs.

Letters: T tokens a rank, K experts a token, N nodes of G ranks each, n and u the nodes and ranks that a token needs.
Rows are those of one way, on average. The model knows nothing of ranks that wait for one another.
docs/multinode-model.md derives the terms and compares them with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from epmoe.bench.sample import ranks_needed, wire_bytes
from epmoe.config.config import EPConfig
from epmoe.exchange.memory import RailSlot
from epmoe.local.reference import route_reference
from epmoe.local.simulate import simulate_logits

_BYTES_PER_US = 1000  # at 1 GB/s
_ROUTED = 8192  # tokens from which `Spread.of` takes its means: within 1%


@dataclass(frozen=True)
class Hardware:
    """Speeds and latencies, by default those of H200s with a 400 Gb/s network card each. 1 GB/s is 10⁹ bytes/s."""

    network_gb_per_s: float = 44.5
    """GB/s of rows that a rank sends to other nodes, and receives from them at the same time."""
    nvlink_gb_per_s: float = 340.0
    """GB/s of rows that a rank sends to the other ranks of its node."""
    local_gb_per_s: float = 2400.0
    """GB/s, bytes read plus bytes written, at which a rank moves rows between a window and the experts."""
    row_ns: float = 0.0
    """ns that such a row takes besides its bytes."""
    exchange_us: float = 4.2
    """µs of one way of the node's exchange without rows."""
    launch_us: float = 4.0
    """µs to start the collective of the network."""
    collective_us: float = 20.0
    """µs of a collective without rows, between two nodes."""
    peer_us: float = 1.5
    """µs that each node beyond the own one adds to a collective."""
    put_us: float = 30.0
    """µs of one way without rows, where a kernel writes to other nodes itself, as in the two other designs."""
    chunks: int = 8
    """Chunks of a call that the pipelined design has under way one after another."""


class Spread(NamedTuple):
    """Where a token goes, on average over tokens whose logits are all equally likely."""

    experts: int
    """K"""
    ranks: float
    """u: ranks that hold one of its experts; its own rank may be one of them"""
    nodes: float
    """n: nodes that hold one of its experts"""

    @classmethod
    def of(cls, config: EPConfig) -> Self:
        """Route random logits, in the experts' groups and placement of `config`.

        Groups are scored as with a bias, by their two best experts: the models that have groups have one.
        """
        model = config.model
        routing = config.routing
        topology = config.topology
        R = topology.ep_size
        K = model.num_experts_per_tok
        tokens = -(-_ROUTED // R)
        ids = route_reference(
            simulate_logits("uniform", R * tokens, model.num_experts),
            K,
            scoring=routing.scoring,
            bias=torch.zeros(model.num_experts) if routing.num_expert_groups > 1 else None,
            num_expert_groups=routing.num_expert_groups,
            top_groups=routing.top_groups,
        ).ids
        needs_RTR = ranks_needed(config.place_experts(), ids.view(R, tokens, K).long())
        needs_RTN = needs_RTR.view(R, tokens, topology.num_nodes, topology.ranks_here).any(-1)
        return cls(K, *(needs.sum(-1).double().mean().item() for needs in (needs_RTR, needs_RTN)))


class RowBytes(NamedTuple):
    """Bytes of a row on one way of a round."""

    network: int
    """between nodes: the values, and all that travels with them"""
    node: int
    """between the ranks of a node"""
    experts: int
    """expert-major"""

    @classmethod
    def of(cls, config: EPConfig) -> tuple[Self, Self]:
        """Rows of dispatch: a slot of a slab, and rows of the payload. Rows of combine: x's dtype, and the payload."""
        model = config.model
        exchange = config.exchange
        out, plain, back = (
            wire_bytes(model.hidden_size, model.torch_dtype, payload)
            for payload in (exchange.payload, "auto", exchange.combine_payload)
        )
        return cls(RailSlot.of(config).bytes, out, out), cls(plain, back, plain)


class Terms(NamedTuple):
    """One way of a round by its parts in µs, which follow one another."""

    start_us: float
    """the collective without rows: its launch, its latency, and that of each node"""
    network_us: float
    """rows to other nodes"""
    node_us: float
    """the exchange within the node"""


@dataclass(frozen=True)
class NetworkModel:
    """µs of one way. The bytes of its rows say whether it is dispatch or combine."""

    hardware: Hardware
    nodes: int
    """N"""
    ranks_per_node: int
    """G"""
    spread: Spread

    @classmethod
    def of(cls, config: EPConfig, hardware: Hardware) -> Self:
        """The model of a configuration's group and routing."""
        return cls(hardware, config.topology.num_nodes, config.topology.ranks_here, Spread.of(config))

    @property
    def remote(self) -> float:
        """The share of a token's experts, and of its nodes, that is elsewhere: (N − 1) / N."""
        return (self.nodes - 1) / self.nodes

    def two_levels(self, T: int, row: RowBytes, slots: int) -> Terms:
        """Our exchange: a collective between nodes, and then, or before it, the exchange within the node.

        `slots`: of the slab to each other node.
        """
        hw = self.hardware
        others = self.nodes - 1
        if not others:
            return Terms(0.0, 0.0, self.node_us(T, row))
        start = hw.launch_us + hw.collective_us + hw.peer_us * others
        return Terms(start, self._network_us(others * slots, row), self.node_us(T, row))

    def node_us(self, T: int, row: RowBytes) -> float:
        """The exchange within a node: the slower of its wire and of the rows that each GPU moves itself."""
        hw = self.hardware
        spread = self.spread
        row_us = row.experts / (hw.local_gb_per_s * _BYTES_PER_US) + hw.row_ns / 1000
        moved = T * (spread.experts + spread.ranks) * row_us
        return hw.exchange_us + max(self._wire_us(T, row), moved)

    def pipelined_us(self, T: int, row: RowBytes) -> float:
        """Two levels in one kernel, which forwards a chunk within the node while the next one is on the network."""
        network = self._network_us(T * self.spread.nodes * self.remote, row)
        slower, faster = sorted((network, self._wire_us(T, row)), reverse=True)
        return self.hardware.put_us + slower + faster / self.hardware.chunks

    def direct_us(self, T: int, row: RowBytes) -> float:
        """One level: a row for each expert of a token goes to the rank that owns it."""
        return self.hardware.put_us + self._network_us(T * self.spread.experts * self.remote, row)

    def _network_us(self, rows: float, row: RowBytes) -> float:
        return rows * row.network / (self.hardware.network_gb_per_s * _BYTES_PER_US)

    def _wire_us(self, T: int, row: RowBytes) -> float:
        """Rows between the ranks of a node, those among them that came over the network."""
        rows = T * self.spread.ranks * (self.ranks_per_node - 1) / self.ranks_per_node
        return rows * row.node / (self.hardware.nvlink_gb_per_s * _BYTES_PER_US)
