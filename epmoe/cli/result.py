"""The outcome of one run: what the terminal and the report show."""

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
    """One condition of a run: what was measured, and whether it is within its limit."""

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
    """of all ranks together"""


@dataclass(frozen=True)
class Baseline:
    """The same model in a single process. Sequences go by rank: the ranks run the single process in
    turn.
    """

    texts: Sequence[str]
    stages: Sequence[Mapping[str, float]]
    """stage → seconds"""
    elapsed: Sequence[float]
    """seconds of the whole run, measured on their own"""
    logit_errors: Sequence[Sequence[float]]
    """largest absolute difference of the ranks' logits from the single process's, by
    rank and step
    """


@dataclass(frozen=True)
class Balancing:
    """The loads of ranks while experts moved."""

    rows: Sequence[Sequence[int]]
    """[R][rounds] rows that the experts of each rank received"""
    moves: Sequence[tuple[int, int]]
    """of each plan: the rounds before it, and its moves"""

    @property
    def num_moves(self) -> int:
        return sum(moves for _, moves in self.moves)

    @property
    def ends(self) -> tuple[float, float]:
        """The load of the busiest rank over the mean, in the first and in the last quarter of the
        rounds.
        """
        quarter = max(1, len(self.rows[0]) // 4)
        first = imbalance([sum(rows[:quarter]) for rows in self.rows])
        last = imbalance([sum(rows[-quarter:]) for rows in self.rows])
        return first or 1.0, last or 1.0

    @property
    def outcome(self) -> str:
        """The change in one line."""
        have = "expert has" if self.num_moves == 1 else "experts have"
        first, last = self.ends
        took = (
            f"the busiest rank took {first:.2f} × the mean in the first quarter, {last:.2f} × in "
            "the last"
        )
        return f"{self.num_moves} {have} moved; {took}"


@dataclass(frozen=True)
class Result:
    """Counts are sums over all rounds and ranks; `traffic` counts rows, `load` (token, expert)
    pairs.
    """

    name: str
    facts: Mapping[str, str]
    config: EPConfig
    """of the exchange that was run; a model's own where a model was run"""
    checks: Sequence[Check]
    placement: Placement
    traffic: Sequence[Sequence[int]]
    """[R][R] rows from each source rank (first index) to each destination"""
    load: Sequence[int]
    """[P] tokens that each physical expert computed, which leaves out dropped pairs"""
    dropped: Sequence[int]
    """[R] pairs that found no room in the `capacity.max_expert_rows` of each rank"""
    health: Mapping[str, int]
    """health counter → its sum over the ranks"""
    waited: Sequence[Sequence[float]]
    """[R][R] seconds that each rank (first index) waited for each rank, as `Health.waited_s`"""
    stages: Sequence[Mapping[str, float]]
    """by rank: stage → seconds in all rounds; a stage includes waiting for other ranks, and
    `STAGES` defines it
    """
    elapsed: Sequence[float]
    """by rank: seconds of the whole run, measured on their own"""
    rounds: int
    """rounds that `traffic`, `load` and `stages` are sums of"""
    unit: str = "round"
    """what `rounds` counts: "round" or "token\""""
    texts: Sequence[tuple[str, str]] = ()
    """(prompt, text that the model generated after it), by rank"""
    note: str = ""
    """what a reader must know of the texts"""
    baseline: Baseline | None = None
    balancing: Balancing | None = None
    """where experts moved while it ran"""

    @staticmethod
    def counts(placement: Placement, healths: Sequence[Health]) -> dict[str, Any]:
        """Make the fields `traffic`, `load`, `dropped`, `health` and `waited` from the health of
        each rank.
        """
        # The load of each expert, whichever rank has it.
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
        """Stage → seconds in all rounds, mean over ranks."""
        return mean_stages(self.stages)

    @property
    def holder(self) -> str:
        """The word for what has a load: a slot if experts move, otherwise an expert."""
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
        """Bytes of the rows between different ranks, on their way to the experts: values, K ids and
        K weights.
        """
        ids_and_weights = 8 * self.config.model.num_experts_per_tok
        return self.rows_moved * (self._row_bytes(self.config.exchange.payload) + ids_and_weights)

    @property
    def bytes_combined(self) -> int:
        """Bytes of the sums that come back between different ranks: one row for each that was
        dispatched.
        """
        return self.rows_moved * self._row_bytes(self.config.exchange.combine_payload)

    def _row_bytes(self, payload: str) -> int:
        """Bytes of one row's values on the wire, and of its scales."""
        model = self.config.model
        D = model.hidden_size
        wire = WIRE_FORMATS[payload]
        return wire.row_bytes(D, model.torch_dtype) + wire.scale_bytes(D)

    @property
    def loads(self) -> list[list[int]]:
        return by_rank(self.placement, self.load)

    @property
    def pairs(self) -> list[int]:
        """[R] pairs that each rank computed."""
        return [sum(loads) for loads in self.loads]

    @property
    def cause(self) -> str:
        """Why a check may have failed: pairs that ranks have dropped; "" if there are none."""
        if not any(self.dropped):
            return ""
        total = sum(self.dropped) + sum(self.load)
        room = self.config.capacity.max_expert_rows
        most = self.dropped.index(max(self.dropped))
        return (
            f"{sum(self.dropped):,} of {total:,} pairs were dropped, most on rank {most} "
            f"({max(self.dropped):,}): `capacity.max_expert_rows` = {room:,} is too small for this "
            f"load, and y lacks their part"
        )

    @property
    def waiting(self) -> float:
        """The least seconds that a rank waited for others on average: those for its latest rank."""
        return sum(map(max, self.waited)) / len(self.waited)

    @property
    def late(self) -> LateRank | None:
        """The rank for which all ranks together have waited longest; None if nobody waited."""
        seconds = [sum(of_source) for of_source in zip(*self.waited, strict=True)]
        most = max(seconds)
        if not most:
            return None
        return LateRank(seconds.index(most), most)


def by_rank(placement: Placement, values: Sequence[_T]) -> list[list[_T]]:
    """The values of the physical experts of each rank."""
    of_ranks = []
    for rank in range(placement.ep_size):
        of_ranks.append([values[expert] for expert in placement.local_experts(rank)])
    return of_ranks


def mean_stages(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean seconds of each stage over ranks, in the order of `STAGES`. A stage that a rank does
    not have counts as 0.
    """
    means = {}
    for stage in STAGES:
        if any(stage in seconds for seconds in ranks):
            means[stage] = sum(seconds.get(stage, 0.0) for seconds in ranks) / len(ranks)
    return means


def imbalance(loads: Sequence[int]) -> float | None:
    """The largest load over the mean load: 1 if all are equal. None if there is no load."""
    total = sum(loads)
    if not total:
        return None
    return max(loads) * len(loads) / total
