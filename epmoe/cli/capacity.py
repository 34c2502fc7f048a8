"""Computes what `capacity.max_expert_rows` is worth: how many rows a rank needs for a certain load,
and how much memory fewer rows save.

By default a rank has room for the worst case, in which all tokens of all ranks go to its experts:
R·M·K rows. If the router balances the load, a rank gets R·M·K·e/P rows on average. R is the number
of ranks, M is `max_num_tokens_per_rank`, and K counts the experts of a token. P counts all physical
experts, e those of one rank.
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
"""The loads for which `suggestions` gives the rows, as multiples of the mean load."""
# How many standard deviations are left for chance. With six, one round in a thousand million has
# more rows.
SIGMAS = 6
# How many bytes a node must save. Less is not worth the risk of an EPOverflowError.
WORTH_BYTES = 1 << 30


@dataclass(frozen=True)
class Suggestion:
    """A value for `capacity.max_expert_rows`."""

    load: float
    """the load of the most loaded rank, as a multiple of the mean load"""
    rows: int
    """the value, which is enough for that load"""
    saved_bytes: int
    """how many bytes a node saves, compared with room for the worst case"""


@dataclass(frozen=True)
class Capacity:
    """How many expert-major rows the rank with the most experts gets in a round, if each rank
    brings M tokens.
    """

    worst: int
    """the rows that are always enough, padding included; a multiple of `capacity.alignment`"""
    mean: float
    """the rows that the rank gets on average if all experts are equally likely"""
    sigma: float
    """the standard deviation of the rows that the rank gets"""
    padding: int
    """the most rows that may lie between the segments of experts"""

    @classmethod
    def of(cls, config: EPConfig) -> Capacity:
        """Compute the capacity of a configuration. The K experts of a token are taken for K random
        draws from all P experts, of which this rank has e.
        """
        config = config.seated
        R = config.topology.ep_size
        K = config.model.num_experts_per_tok
        P = config.num_physical_experts
        placement = config.place_experts()
        tokens = R * config.capacity.max_num_tokens_per_rank
        e = max(placement.num_local_experts(rank) for rank in range(R))
        share = e / P
        # A token draws no expert twice, so the variance is that of draws without replacement.
        variance = K * share * (1 - share) * (P - K) / max(1, P - 1)
        padding = e * (config.alignment - 1)
        worst = round_up(tokens * K + padding, config.alignment)
        return cls(worst, tokens * K * share, math.sqrt(tokens * variance), padding)

    def rows(self, load: float) -> int:
        """The rows that are enough for a rank that gets `load` times the mean, with a margin of
        `SIGMAS` standard deviations. They are at most those of the worst case.
        """
        chance = SIGMAS * self.sigma * math.sqrt(load)
        return min(self.worst, math.ceil(load * self.mean + chance) + self.padding)

    def load(self, rows: int) -> float:
        """The largest load for which `rows` are enough, as a multiple of the mean: the inverse of
        the method `rows`.
        """
        # Solve the quadratic equation of that method for the square root of the load.
        free = max(0, rows - self.padding)
        chance = SIGMAS * self.sigma
        return ((math.sqrt(chance**2 + 4 * self.mean * free) - chance) / (2 * self.mean)) ** 2


def suggestions(config: EPConfig) -> list[Suggestion]:
    """Suggest a value of `max_expert_rows` for each load in `LOADS`. Returns [] if none of them
    saves much memory.
    """
    capacity = Capacity.of(config)
    worst_bytes = _node_bytes(config, max_expert_rows=None)
    suggested = []
    for load in LOADS:
        rows = capacity.rows(load)
        if rows < capacity.worst:
            saved_bytes = worst_bytes - _node_bytes(config, rows)
            suggested.append(Suggestion(load, rows, saved_bytes))
    # The first suggestion has the smallest load, so it saves most.
    if not suggested or suggested[0].saved_bytes < WORTH_BYTES:
        return []
    return suggested


def advice(config: EPConfig) -> Iterator[str | Table]:
    """Advise on `max_expert_rows`, as paragraphs and a table for `epmoe plan`.

    If the key is set, the advice says for which load it is enough. Otherwise it says what the key
    would save, if that is much.
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
    # The key is not set. Suggest values, if they save much.
    suggested = suggestions(config)
    if not suggested:
        return
    yield (
        f"`capacity.max_expert_rows` would save memory. By default a rank has {capacity.worst:,} "
        f"rows, for the case that all tokens go to its experts; {mean}. Values that are safe for a "
        f"load:"
    )
    columns = ("max_expert_rows", "the most loaded rank gets", "saves per node")
    table = plain_table(columns, words=columns[1:2])
    for suggestion in suggested:
        load = f"{suggestion.load:g} × the mean"
        table.add_row(f"{suggestion.rows:,}", load, human_bytes(suggestion.saved_bytes))
    yield table
    yield beyond


def network(config: EPConfig) -> Iterator[str]:
    """Describe how many rows go from node to node, and how much padding comes with them. With one
    node there is nothing to say.
    """
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
    """The memory plan of every rank. Plans differ only where ranks have different numbers of
    experts.
    """
    placement = config.seated.place_experts()
    return [MemoryPlan.build(config, rank, placement) for rank in range(config.topology.ep_size)]


def _node_bytes(config: EPConfig, max_expert_rows: int | None) -> int:
    """The bytes of all ranks of a node, if `max_expert_rows` has this value."""
    capacity = config.capacity.model_copy(update={"max_expert_rows": max_expert_rows})
    plans = rank_plans(config.model_copy(update={"capacity": capacity}))
    return sum(plan.total_bytes for plan in plans[: config.topology.ranks_here])


def experts(config: EPConfig) -> list[str]:
    """Say for `epmoe plan` which GEMM the experts take on GPUs."""
    if config.exchange.transport != "nvlink" or config.alignment % DeepGemm.block:
        return []
    return [
        "Experts in bf16 or fp8 with adapters take DeepGEMM on GPUs of compute capability 9.0, "
        "where it is installed (`pip install epmoe[deep_gemm]`). Rounds of experts in bf16 or fp8 "
        f"then start the rows of each expert at a multiple of {config.alignment}: the rows "
        "above have room for it."
    ]
