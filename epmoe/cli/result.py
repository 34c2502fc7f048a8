"""The outcome of one run of `epmoe run`, which the terminal and the report show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.health import COUNTERS, Health
from epmoe.native.formats import WIRE_FORMATS

_T = TypeVar("_T")
STAGES = {
    "set up": (
        "The first call of the first layer allocates the windows, and each rank maps those of all "
        "others."
    ),
    "gather": (
        "FSDP collects the weights that the ranks share out (attention, embeddings, norms), layer "
        "by layer."
    ),
    "attention": "The attention of all layers, with its projections and its cache.",
    "other layers": (
        "Embeddings, norms, dense and shared feed-forward layers, the output head, and the "
        "residual sums."
    ),
    "route": (
        "The router scores the experts for each token and chooses the K best, with their weights."
    ),
    "dispatch": (
        "Each token goes once to every rank that holds one of its experts, and its rows are sorted "
        "by expert."
    ),
    "experts": (
        "The feed-forward networks of the experts that a rank holds compute the rows that arrived."
    ),
    "combine": (
        "Each rank sums its experts' outputs of a token, and the sums travel back and are added up."
    ),
    "agree": (
        "The host waits, once a layer, for the word of the round whether any rank needs another "
        "one."
    ),
    "loop": (
        "Around the model: the choice of the next token, the cache, and the ranks' agreement to go "
        "on."
    ),
}
"""What each stage of a run is, in the order in which the stages follow each other."""


@dataclass(frozen=True)
class Check:
    """One condition that a run must fulfil: what was measured, and whether it is within its
    limit.
    """

    what: str
    measured: str
    passed: bool

    @property
    def mark(self) -> str:
        return "✓" if self.passed else "✗"


class LateRank(NamedTuple):
    """A rank that others waited for."""

    rank: int
    seconds: float
    """how long all ranks together have waited for this one"""


@dataclass(frozen=True)
class Baseline:
    """The figures of the same model in a single process. The ranks take turns with running it, each
    with its own prompt, so each sequence has one element for each rank.
    """

    texts: Sequence[str]
    stages: Sequence[Mapping[str, float]]
    """the seconds of each stage"""
    elapsed: Sequence[float]
    """seconds of the whole run, measured independently of the stages"""
    logit_errors: Sequence[Sequence[float]]
    """by rank and step: the largest absolute difference between the logits of the run over all
    ranks and those of the single process
    """


@dataclass(frozen=True)
class Balancing:
    """The loads of the ranks in a run in which experts moved."""

    rows: Sequence[Sequence[int]]
    """[R][rounds] rows that the experts of each rank received"""
    moves: Sequence[tuple[int, int]]
    """for each plan, the number of rounds before it and the number of its moves"""

    @property
    def num_moves(self) -> int:
        return sum(moves for _, moves in self.moves)

    @property
    def ends(self) -> tuple[float, float]:
        """The load of the busiest rank, divided by the mean load: first in the first quarter of the
        rounds, then in the last quarter.
        """
        quarter = max(1, len(self.rows[0]) // 4)
        first = imbalance([sum(rows[:quarter]) for rows in self.rows])
        last = imbalance([sum(rows[-quarter:]) for rows in self.rows])
        return first or 1.0, last or 1.0

    @property
    def outcome(self) -> str:
        """One line that says how many experts moved, and how the load of the busiest rank
        changed.
        """
        have = "expert has" if self.num_moves == 1 else "experts have"
        first, last = self.ends
        took = (
            f"the busiest rank took {first:.2f} × the mean in the first quarter, {last:.2f} × in "
            "the last"
        )
        return f"{self.num_moves} {have} moved; {took}"


@dataclass(frozen=True)
class Result:
    """The outcome of one run. Counts are sums over all rounds. `traffic` counts rows, and `load`
    counts pairs of a token and an expert. R is the number of ranks, P that of physical experts.
    """

    name: str
    facts: Mapping[str, str]
    config: EPConfig
    """the configuration of the exchange that has run; for a model, that of the model's exchange"""
    checks: Sequence[Check]
    placement: Placement
    traffic: Sequence[Sequence[int]]
    """[R][R] rows from each source rank (first index) to each destination"""
    load: Sequence[int]
    """[P] tokens that each physical expert has computed; dropped pairs do not count"""
    dropped: Sequence[int]
    """[R] pairs that found no room in the `capacity.max_expert_rows` of each rank"""
    health: Mapping[str, int]
    """the sum of each health counter over the ranks"""
    waited: Sequence[Sequence[float]]
    """[R][R] seconds that each rank (first index) has waited for each other rank: the ranks'
    `Health.waited_s`
    """
    stages: Sequence[Mapping[str, float]]
    """by rank: the seconds of each stage in all rounds; `STAGES` defines the stages, which include
    waiting for other ranks
    """
    elapsed: Sequence[float]
    """by rank: seconds of the whole run, measured independently of the stages"""
    rounds: int
    """the number of rounds, over which `traffic`, `load` and `stages` are summed up"""
    unit: str = "round"
    """what `rounds` counts: "round" or "token\""""
    texts: Sequence[tuple[str, str]] = ()
    """(prompt, text that the model generated after it), by rank"""
    note: str = ""
    """what a reader must know about the texts"""
    baseline: Baseline | None = None
    balancing: Balancing | None = None
    """the loads of the ranks, if experts moved while it ran"""

    @staticmethod
    def counts(placement: Placement, healths: Sequence[Health]) -> dict[str, Any]:
        """Make the fields `traffic`, `load`, `dropped`, `health` and `waited` of a Result from the
        health of each rank.
        """
        # Put the loads of all ranks' experts into the order of the physical experts.
        load: dict[int, int] = {}
        for rank, health in enumerate(healths):
            experts = placement.local_experts(rank)
            load |= dict(zip(experts, health.tokens_per_expert, strict=True))
        counters = {}
        for name in COUNTERS:
            counters[name] = sum(getattr(health, name) for health in healths)
        return {
            "traffic": [health.rows_sent for health in healths],
            "load": [load[expert] for expert in range(placement.num_physical_experts)],
            "dropped": [health.dropped_pairs for health in healths],
            "health": counters,
            "waited": [health.waited_s for health in healths],
        }

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each stage in all rounds, on average over the ranks."""
        return mean_stages(self.stages)

    @property
    def holder(self) -> str:
        """What the loads belong to, as a word for the tables: "slot" where experts move, otherwise
        "expert".
        """
        return "slot" if self.balancing else "expert"

    @property
    def processes(self) -> str:
        R = self.placement.ep_size
        return f"{R} process{'es' if R != 1 else ''}"

    @property
    def rows_moved(self) -> int:
        return sum(map(sum, self.traffic)) - self.rows_kept

    @property
    def rows_kept(self) -> int:
        return sum(row[rank] for rank, row in enumerate(self.traffic))

    @property
    def bytes_dispatched(self) -> int:
        """The bytes that dispatch has carried between different ranks: for each row its values, and
        the ids and weights of its K experts.
        """
        ids_and_weights = 8 * self.config.model.num_experts_per_tok
        return self.rows_moved * (self._row_bytes(self.config.exchange.payload) + ids_and_weights)

    @property
    def bytes_combined(self) -> int:
        """The bytes that combine has carried between different ranks: one sum comes back for each
        row that was dispatched.
        """
        return self.rows_moved * self._row_bytes(self.config.exchange.combine_payload)

    def _row_bytes(self, payload: str) -> int:
        """The bytes of one row on the wire: its values and its scales."""
        model = self.config.model
        D = model.hidden_size
        wire = WIRE_FORMATS[payload]
        return wire.row_bytes(D, model.torch_dtype) + wire.scale_bytes(D)

    @property
    def loads(self) -> list[list[int]]:
        """`load` by rank: the loads of the physical experts of each rank."""
        return by_rank(self.placement, self.load)

    @property
    def pairs(self) -> list[int]:
        """[R] pairs that each rank computed."""
        return [sum(loads) for loads in self.loads]

    @property
    def cause(self) -> str:
        """Say why a check may have failed: ranks have dropped pairs. "" if no pair was dropped."""
        if not any(self.dropped):
            return ""
        total = sum(self.dropped) + sum(self.load)
        room = self.config.capacity.max_expert_rows
        worst_rank = self.dropped.index(max(self.dropped))
        return (
            f"{sum(self.dropped):,} of {total:,} pairs were dropped, most on rank {worst_rank} "
            f"({max(self.dropped):,}): `capacity.max_expert_rows` = {room:,} is too small for this "
            f"load, and y lacks their part"
        )

    @property
    def waiting(self) -> float:
        """How many seconds a rank has waited for other ranks, at least, on average over the ranks.

        Waits for several ranks overlap, so for each rank only the longest counts.
        """
        return sum(map(max, self.waited)) / len(self.waited)

    @property
    def late(self) -> LateRank | None:
        """The rank for which all ranks together have waited longest. None if no rank has waited."""
        seconds_by_rank = [sum(waits) for waits in zip(*self.waited, strict=True)]
        longest = max(seconds_by_rank)
        if not longest:
            return None
        return LateRank(seconds_by_rank.index(longest), longest)


def by_rank(placement: Placement, values: Sequence[_T]) -> list[list[_T]]:
    """Group values of all physical experts by the rank that holds the expert."""
    groups = []
    for rank in range(placement.ep_size):
        groups.append([values[expert] for expert in placement.local_experts(rank)])
    return groups


def mean_stages(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The seconds of each stage on average over the ranks, in the order of `STAGES`. A rank that
    does not have a stage counts with 0 seconds.
    """
    means = {}
    for stage in STAGES:
        if any(stage in seconds for seconds in ranks):
            means[stage] = sum(seconds.get(stage, 0.0) for seconds in ranks) / len(ranks)
    return means


def imbalance(loads: Sequence[int]) -> float | None:
    """The largest load divided by the mean load, which is 1 if all loads are equal. None if there
    is no load at all.
    """
    total = sum(loads)
    if not total:
        return None
    return max(loads) * len(loads) / total
