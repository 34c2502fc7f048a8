"""What `capacity.max_expert_rows` is worth: the rows that a rank needs for a load, and the memory
that they save.

By default a rank has room for the worst case, in which all tokens of all ranks go to its experts:
R·M·K rows. If the router balances its load, a rank gets R·M·K·e/P of them on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from epmoe.cli.console import human_bytes, plain_table
from epmoe.config.config import EPConfig
from epmoe.exchange.memory import MemoryPlan, round_up
from epmoe.local.gemm.deep_gemm import DeepGemm

LOADS = (1.0, 1.5, 2.0)
"""Multiples of the mean load for which `suggestions` gives the rows."""
# Standard deviations for chance: one round in a thousand million has more rows.
SIGMAS = 6
# Bytes that a node saves: less is not worth the risk of an EPOverflowError.
WORTH_BYTES = 1 << 30


@dataclass(frozen=True)
class Suggestion:
    """A value of `capacity.max_expert_rows`."""

    load: float
    """the largest mean load of a rank over that of all ranks"""
    rows: int
    """enough for that load"""
    saved_bytes: int
    """bytes that the node saves against the worst case"""


@dataclass(frozen=True)
class Capacity:
    """The expert-major rows of the rank with the most experts, in rounds of M tokens
    on each rank.
    """

    worst: int
    """rows that are always enough, with the padding for `capacity.alignment`; a multiple of it"""
    mean: float
    """rows that a rank gets on average if all experts are equally likely"""
    sigma: float
    """standard deviation of these rows"""
    padding: int
    """most rows between the experts' segments"""

    @classmethod
    def of(cls, config: EPConfig) -> Capacity:
        """A token's K experts are K draws from P experts, and this rank has e of these."""
        config = config.seated
        R = config.topology.ep_size
        K = config.model.num_experts_per_tok
        P = config.num_physical_experts
        placement = config.place_experts()
        tokens = R * config.capacity.max_num_tokens_per_rank
        e = max(placement.num_local_experts(rank) for rank in range(R))
        share = e / P
        # The draws of one token are without replacement.
        variance = K * share * (1 - share) * (P - K) / max(1, P - 1)
        padding = e * (config.alignment - 1)
        worst = round_up(tokens * K + padding, config.alignment)
        return cls(worst, tokens * K * share, math.sqrt(tokens * variance), padding)

    def rows(self, load: float) -> int:
        """Rows for a rank that gets `load` times the mean, with `SIGMAS` for chance; at most the
        worst case.
        """
        chance = SIGMAS * self.sigma * math.sqrt(load)
        return min(self.worst, math.ceil(load * self.mean + chance) + self.padding)

    def load(self, rows: int) -> float:
        """The largest load, times the mean, for which `rows` are enough: the inverse of `rows`."""
        # A quadratic equation in the root of the load.
        free = max(0, rows - self.padding)
        chance = SIGMAS * self.sigma
        return ((math.sqrt(chance**2 + 4 * self.mean * free) - chance) / (2 * self.mean)) ** 2


def suggestions(config: EPConfig) -> list[Suggestion]:
    """Suggest rows for each of `LOADS`, with the bytes of the node that they save. Returns [] if
    the saving is small.
    """
    capacity = Capacity.of(config)
    whole = _node_bytes(config, None)
    found = []
    for load in LOADS:
        rows = capacity.rows(load)
        if rows < capacity.worst:
            found.append(Suggestion(load, rows, whole - _node_bytes(config, rows)))
    if not found or found[0].saved_bytes < WORTH_BYTES:
        return []
    return found


def advice(config: EPConfig) -> Iterator[str | Table]:
    """What `max_expert_rows` would save, if that is much; if it is set, the load that it is enough
    for.
    """
    capacity = Capacity.of(config)
    limit = config.capacity.max_expert_rows
    beyond = "A round with more rows raises EPOverflowError."
    if config.capacity.on_overflow == "drop":
        beyond = "Pairs beyond it are dropped and counted."
    mean = f"{capacity.mean:,.0f} rows a rank are the mean of balanced routing"
    if limit is not None:
        yield (
            f"`capacity.max_expert_rows` = {limit:,} is enough for {capacity.load(limit):.2g} × "
            f"the mean load: {mean}, {capacity.worst:,} the worst case. {beyond}"
        )
        return
    # Nothing is set: say what would be enough, if it saves much.
    found = suggestions(config)
    if not found:
        return
    yield (
        f"`capacity.max_expert_rows` would save memory. By default a rank has {capacity.worst:,} "
        f"rows, for the case that all tokens go to its experts; {mean}. Values that are safe for a "
        f"load:"
    )
    columns = ("max_expert_rows", "the most loaded rank gets", "saves per node")
    table = plain_table(columns, words=columns[1:2])
    for one in found:
        table.add_row(f"{one.rows:,}", f"{one.load:g} × the mean", human_bytes(one.saved_bytes))
    yield table
    yield beyond


def network(config: EPConfig) -> Iterator[str]:
    """Describe what crosses the network between several nodes, and how much padding adds to it."""
    nodes = config.topology.num_nodes
    limit = config.rows_per_node
    if nodes == 1:
        return
    E = config.model.num_experts
    K = config.model.num_experts_per_tok
    # The probability that a token needs none of a node's experts.
    elsewhere = math.comb(E - max(E // nodes, 1), K) / math.comb(E, K)
    per_token = nodes * (1 - elsewhere)
    yield (
        f"A token needs {per_token:.2f} of {nodes} nodes if all experts are equally likely, and "
        f"goes to each of them once. Slabs have {limit:,} rows (`capacity.max_rows_per_node`), or "
        f"as many as `ep.at_most` says. If these are its tokens, slabs are {nodes / per_token:.2f} "
        f"× as long as the rows in them."
    )
    if config.capacity.max_expert_rows is None:
        yield (
            "`capacity.max_expert_rows` should be set: for twice the mean load, "
            f"{Capacity.of(config).rows(2.0):,}."
        )


def rank_plans(config: EPConfig) -> list[MemoryPlan]:
    """The plan of every rank; plans differ only where ranks own different numbers of experts."""
    placement = config.seated.place_experts()
    return [MemoryPlan.build(config, rank, placement) for rank in range(config.topology.ep_size)]


def _node_bytes(config: EPConfig, max_expert_rows: int | None) -> int:
    """Bytes of all ranks of a node, with this limit."""
    capacity = config.capacity.model_copy(update={"max_expert_rows": max_expert_rows})
    plans = rank_plans(config.model_copy(update={"capacity": capacity}))
    return sum(plan.total_bytes for plan in plans[: config.topology.ranks_here])


def experts(config: EPConfig) -> list[str]:
    """What the plan says of the experts' GEMM on GPUs."""
    if config.exchange.transport != "nvlink" or config.alignment % DeepGemm.block:
        return []
    return [
        "Experts in bf16 or fp8 take DeepGEMM on GPUs of compute capability 9.0, where it is "
        "installed (`pip install epmoe[deep_gemm]`). Their rounds start the rows of each expert at "
        f"a multiple of {config.alignment}: the rows above have room for it."
    ]
