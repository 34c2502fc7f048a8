"""The outcome of one run, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.health import COUNTERS, Health
from epmoe.native.formats import SCALE_BLOCK

_T = TypeVar("_T")
STAGES = {
    "set up": "The first call of the first layer allocates the windows, and each rank maps those of all others.",
    "gather": "FSDP collects the weights that the ranks share out (attention, embeddings, norms), layer by layer.",
    "attention": "The attention of all layers, with its projections and its cache.",
    "other layers": "Embeddings, norms, dense and shared feed-forward layers, the output head, and the residual sums.",
    "route": "The router scores the experts for each token and chooses the K best, with their weights.",
    "dispatch": "Each token goes once to every rank that holds one of its experts, and its rows are sorted by expert.",
    "experts": "The feed-forward networks of the experts that a rank holds compute the rows that arrived.",
    "combine": "Each rank sums its experts' outputs of a token, and the sums travel back and are added up.",
    "agree": "The host waits, once a layer, for the word of the round whether any rank needs another one.",
    "loop": "Around the model: the choice of the next token, the cache, and the ranks' agreement to go on.",
}
"""What each stage of a run is, in the order in which the stages follow each other."""


@dataclass(frozen=True)
class Check:
    """One condition of a run: what was measured, and whether it is within its limit."""

    what: str
    measured: str
    passed: bool


@dataclass(frozen=True)
class Baseline:
    """The same model in a single process. Sequences go by rank: the ranks run the single process in turn."""

    texts: Sequence[str]
    stages: Sequence[Mapping[str, float]]
    """stage → seconds"""
    elapsed: Sequence[float]
    """seconds of the whole run, measured on their own"""
    logit_errors: Sequence[Sequence[float]]
    """largest absolute difference of the ranks' logits from the single process's, by rank and step"""
    logit_limit: float
    """the largest difference that is allowed"""


@dataclass(frozen=True)
class RankCounts:
    """One rank over all rounds."""

    sent: int
    """rows, to itself too"""
    received: int
    """rows, from itself too"""
    own: int
    """rows from itself to itself"""
    load: Sequence[int]
    """pairs that each of its experts computed"""
    dropped: int
    """pairs"""

    @property
    def pairs(self) -> int:
        """That it computed."""
        return sum(self.load)

    @property
    def routed(self) -> int:
        """Pairs that it got, before it dropped any."""
        return self.pairs + self.dropped


@dataclass(frozen=True)
class Balancing:
    """What moving experts has changed."""

    rows: Sequence[Sequence[int]]
    """[R][rounds] rows that the experts of each rank received"""
    moves: Sequence[tuple[int, int]]
    """(rounds before it, moves) of each plan"""

    @property
    def num_moves(self) -> int:
        return sum(moves for _, moves in self.moves)

    @property
    def ends(self) -> tuple[float, float]:
        """Load of the busiest rank over the mean, in the first quarter of the rounds and in the last."""
        quarter = max(1, len(self.rows[0]) // 4)
        first, last = (
            imbalance([sum(rows[part]) for rows in self.rows]) for part in (slice(quarter), slice(-quarter, None))
        )
        return first or 1.0, last or 1.0

    @property
    def outcome(self) -> str:
        """In one line."""
        moves, (first, last) = self.num_moves, self.ends
        have = "expert has" if moves == 1 else "experts have"
        took = f"the busiest rank took {first:.2f} × the mean in the first quarter, {last:.2f} × in the last"
        return f"{moves} {have} moved; {took}"


@dataclass(frozen=True)
class Result:
    """Counts are sums over all rounds and ranks; `traffic` counts rows, `load` (token, expert) pairs."""

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
    stages: Sequence[Mapping[str, float]]
    """by rank: stage → seconds in all rounds; a stage includes waiting for other ranks, and `STAGES` defines it"""
    elapsed: Sequence[float]
    """by rank: seconds of the whole run, measured on their own"""
    rounds: int
    """rounds that `traffic`, `load` and `stages` are sums of"""
    health: Mapping[str, int]
    waited: Sequence[Sequence[float]]
    """[R][R] seconds that each rank (first index) waited for each rank, as `Health.waited_s`"""
    texts: Sequence[tuple[str, str]] = ()
    """(prompt, text that the model generated after it), by rank"""
    unit: str = "round"
    """what `rounds` counts: "round" or "token\""""
    baseline: Baseline | None = None
    note: str = ""
    """what a reader must know of the texts"""
    balancing: Balancing | None = None
    """where experts moved while it ran"""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def seconds(self) -> dict[str, float]:
        """Stage → seconds in all rounds, mean over ranks."""
        return mean_stages(self.stages)

    @property
    def rows_moved(self) -> int:
        """Rows between different ranks."""
        return sum(map(sum, self.traffic)) - self.rows_kept

    @property
    def rows_kept(self) -> int:
        """Rows from a rank to itself."""
        return sum(row[rank] for rank, row in enumerate(self.traffic))

    @property
    def bytes_dispatched(self) -> int:
        """Bytes of the rows between different ranks, on their way to the experts: values, K ids and K weights."""
        return self.rows_moved * bytes_out(self.config)

    @property
    def bytes_combined(self) -> int:
        """Bytes of the sums that come back between different ranks: one row for each that was dispatched."""
        return self.rows_moved * bytes_back(self.config)

    @property
    def ranks(self) -> list[RankCounts]:
        """The same counts by rank."""
        loads, received = by_rank(self.placement, self.load), [sum(rows) for rows in zip(*self.traffic, strict=True)]
        return [
            RankCounts(sum(rows), received[rank], rows[rank], loads[rank], self.dropped[rank])
            for rank, rows in enumerate(self.traffic)
        ]

    @property
    def pairs_by_rank(self) -> list[int]:
        """[R] pairs that each rank computed."""
        return [rank.pairs for rank in self.ranks]

    @property
    def cause(self) -> str:
        """Why a check may have failed, where a rank dropped pairs; else empty."""
        if not any(self.dropped):
            return ""
        total, room = sum(self.dropped) + sum(self.load), self.config.capacity.max_expert_rows
        most = self.dropped.index(max(self.dropped))
        return (
            f"{sum(self.dropped):,} of {total:,} pairs were dropped, most on rank {most} ({max(self.dropped):,}): "
            f"`capacity.max_expert_rows` = {room:,} is too small for this load, and y lacks their part"
        )

    @property
    def waiting(self) -> float:
        """Seconds of dispatch and combine that the mean rank waited for others, at least: for its latest rank."""
        return sum(map(max, self.waited)) / len(self.waited)

    @property
    def late(self) -> tuple[int, float] | None:
        """The rank that all ranks together have waited for the longest, and these seconds; None if nobody waited."""
        seconds = [sum(one) for one in zip(*self.waited, strict=True)]
        return (seconds.index(max(seconds)), max(seconds)) if any(seconds) else None


def by_rank(placement: Placement, values: Sequence[_T]) -> list[list[_T]]:
    """The values of the physical experts of each rank."""
    return [[values[expert] for expert in placement.local_experts(rank)] for rank in range(placement.ep_size)]


def mean_stages(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Stage → mean seconds over `ranks`, in the order of `STAGES`; a stage that a rank has not counts as 0."""
    return {
        stage: sum(one.get(stage, 0.0) for one in ranks) / len(ranks)
        for stage in STAGES
        if any(stage in one for one in ranks)
    }


def imbalance(loads: Sequence[int]) -> float | None:
    """The largest load over the mean load: 1 if all are equal. None if there is no load."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else None


def sum_counters(ranks: Sequence[Health]) -> dict[str, int]:
    """Counter → its sum over `ranks`."""
    return {name: sum(getattr(one, name) for one in ranks) for name in COUNTERS}


def bytes_out(config: EPConfig) -> int:
    """Bytes of a row on its way to the experts: values, K ids and K weights."""
    return _row_bytes(config, config.exchange.payload == "fp8") + 8 * config.model.num_experts_per_tok


def bytes_back(config: EPConfig) -> int:
    """Bytes of the sum that comes back for a row."""
    return _row_bytes(config, config.exchange.combine_payload == "fp8")


def _row_bytes(config: EPConfig, fp8: bool) -> int:
    """Bytes of one row's values on the wire; an fp8 row has a fp32 scale for each block of values."""
    D = config.model.hidden_size
    return D + 4 * -(-D // SCALE_BLOCK) if fp8 else D * config.model.torch_dtype.itemsize
