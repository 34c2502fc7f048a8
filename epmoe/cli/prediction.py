"""`epmoe plan CONFIG --predict`: what an exchange over several nodes would take, in µs, and two other designs.

Letters: T tokens a rank, K experts a token, N nodes of G ranks each, n and u the nodes and ranks that a token needs.
Rows are those of one way, on average; nothing here knows about ranks that wait for one another.
docs/multinode-model.md derives the terms and compares them with measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from rich import box
from rich.table import Table

from epmoe.bench.sample import ranks_needed, wire_bytes
from epmoe.config.config import EPConfig
from epmoe.config.hardware import HardwareConfig
from epmoe.exchange.memory import RailSlot
from epmoe.local.reference import route_reference
from epmoe.local.simulate import simulate_logits

_BYTES_PER_US = 1000  # of 1 GB/s
_ROUTED = 8192  # tokens from which `Spread.of` takes its means: within 1%


@dataclass(frozen=True)
class Spread:
    """Where a token goes, on average over tokens whose logits are all equally likely."""

    experts: int
    """K"""
    ranks: float
    """u: ranks that hold one of its experts, its own rank among them if that does"""
    nodes: float
    """n: nodes likewise"""

    @classmethod
    def of(cls, config: EPConfig) -> Self:
        """From routing of random logits, in the experts' groups and placement of `config`.

        Groups are scored as with a bias, by their two best experts: the models that have groups have one.
        """
        model, routing, topology = config.model, config.routing, config.topology
        R, K = topology.ep_size, model.num_experts_per_tok
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
        needs_RTNG = needs_RTR.view(R, tokens, topology.num_nodes, topology.ranks_here)
        counts = (needs.sum(-1).double().mean().item() for needs in (needs_RTR, needs_RTNG.any(-1)))
        return cls(K, *counts)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row on one way of a round."""

    network: int
    """between nodes, with all that travels beside it"""
    node: int
    """between the ranks of a node"""
    experts: int
    """expert-major"""

    @classmethod
    def of(cls, config: EPConfig) -> tuple[Self, Self]:
        """Of dispatch: a slot of a slab, and rows of the payload. Of combine: x's dtype, in the node the payload."""
        model, exchange = config.model, config.exchange
        out, plain, back = (
            wire_bytes(model.hidden_size, model.torch_dtype, payload)
            for payload in (exchange.payload, "auto", exchange.combine_payload)
        )
        return cls(RailSlot.of(config).bytes, out, out), cls(plain, back, plain)


@dataclass(frozen=True)
class Terms:
    """One way of a round by its parts in µs, which follow one another."""

    start_us: float
    """the collective without rows: its launch, its latency, and that of each node"""
    counts_us: float
    """the host reads how many rows come; 0 with padded splits and in combine"""
    network_us: float
    """rows to other nodes"""
    node_us: float
    """the exchange within the node"""

    @property
    def us(self) -> float:
        """Their sum."""
        return self.start_us + self.counts_us + self.network_us + self.node_us


@dataclass(frozen=True)
class NetworkModel:
    """µs of one way, dispatch or combine, by T. Which of the two it is, the bytes of its rows say."""

    hardware: HardwareConfig
    nodes: int
    """N"""
    ranks_per_node: int
    """G"""
    spread: Spread

    @classmethod
    def of(cls, config: EPConfig) -> Self:
        """For the group, the routing and the hardware of a configuration."""
        topology = config.topology
        return cls(config.hardware, topology.num_nodes, topology.ranks_here, Spread.of(config))

    @property
    def remote(self) -> float:
        """The share of a token's experts, and of its nodes, that is elsewhere: (N − 1) / N."""
        return (self.nodes - 1) / self.nodes

    def two_levels(self, T: int, row: RowBytes, slots: int | None, *, counts: bool = False) -> Terms:
        """Our exchange: a collective between nodes, and then, or before it, the exchange within the node.

        `slots`: of the padded slab to each other node; None where slabs have exact lengths. `counts`: whether the host
        has to read counts on this way.
        """
        hw, others = self.hardware, self.nodes - 1
        if not others:
            return Terms(0.0, 0.0, 0.0, self.node_us(T, row))
        start = hw.launch_us + hw.collective_us + hw.peer_us * others
        rows = T * self.spread.nodes * self.remote if slots is None else others * slots
        return Terms(start, hw.counts_us * counts, self._network_us(rows, row), self.node_us(T, row))

    def node_us(self, T: int, row: RowBytes) -> float:
        """The exchange within a node: the slower of its wire and of the rows that each GPU moves itself."""
        hw, spread = self.hardware, self.spread
        moved = T * (spread.experts + spread.ranks) * row.experts / (hw.local_gb_per_s * _BYTES_PER_US)
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


def predicted(config: EPConfig, tokens: Sequence[int]) -> dict[str, Any]:
    """For `--json`: what the model assumes, and µs for each T of `tokens`.

    With padded splits the slabs of T tokens have T slots, as with `padded_tokens=T`, at most
    `capacity.max_rows_per_node`.
    """
    model = NetworkModel.of(config)
    out, back = RowBytes.of(config)
    exact = config.exchange.network_splits == "exact"
    rounds = []
    for T in tokens:
        slots = None if exact else min(T, config.rows_per_node)
        line: dict[str, Any] = {
            "tokens": T,
            "dispatch": _rounded(model.two_levels(T, out, slots, counts=exact)),
            "combine": _rounded(model.two_levels(T, back, slots)),
        }
        if model.nodes > 1:
            line["pipelined_us"] = round(model.pipelined_us(T, out) + model.pipelined_us(T, back), 1)
            line["direct_us"] = round(model.direct_us(T, out) + model.direct_us(T, back), 1)
        rounds.append(line)
    return {
        "nodes": model.nodes,
        "ranks_per_node": model.ranks_per_node,
        "nodes_per_token": round(model.spread.nodes, 2),
        "ranks_per_token": round(model.spread.ranks, 2),
        "network_splits": config.exchange.network_splits,
        "hardware": config.hardware.model_dump(),
        "rounds": rounds,
    }


def prediction(content: dict[str, Any]) -> Iterator[str | Table]:
    """What `predicted` holds, as a paragraph and a table; 80 columns hold them."""
    yield _paragraph(content)
    terms = ("network", "node") if content["nodes"] > 1 else ()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("T", "dispatch", *terms, "combine", *terms, *(("pipelined", "direct") if terms else ())):
        style = "bold" if column in ("dispatch", "combine") else ""
        table.add_column(column, justify="right", no_wrap=True, style=style)
    for line in content["rounds"]:
        ways = (line["dispatch"], line["combine"])
        cells = [way[f"{name}us"] for way in ways for name in ("", *(f"{term}_" for term in terms))]
        cells += [line["pipelined_us"], line["direct_us"]] if terms else []
        table.add_row(f"{line['tokens']}", *(f"{us:,.1f}" if us < 100 else f"{us:,.0f}" for us in cells))
    yield table


def _paragraph(content: dict[str, Any]) -> str:
    N, G, first = content["nodes"], content["ranks_per_node"], content["rounds"][0]
    what = (
        f"[bold]Predicted µs by T[/] on {N} × {G} GPUs, from the constants in `hardware`. "
        f"A token needs {content['ranks_per_token']} of {N * G} ranks"
    )
    if N == 1:
        return f"{what}."
    counts, start = first["dispatch"]["counts_us"], first["dispatch"]["start_us"]
    slabs = "Slabs have exact lengths" if counts else "Slabs have T slots, as with `padded_tokens=T`"
    look = f", dispatch also with {counts} µs until the host has read the counts" if counts else ""
    return (
        f"{what}, on {content['nodes_per_token']} of {N} nodes. {slabs}. Each way starts with {start} µs of the "
        f"collective{look}; then come its rows on the network and the exchange within the node. A round of two other "
        "designs, whose kernels write to other nodes: pipelined, two levels in chunks; direct, a row for each expert."
    )


def _rounded(terms: Terms) -> dict[str, float]:
    parts = {name: round(value, 1) for name, value in dataclasses.asdict(terms).items()}
    return {"us": round(terms.us, 1), **parts}
