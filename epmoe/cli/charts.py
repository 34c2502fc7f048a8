"""The report's charts as numbers: what to draw where, in percent of the drawing. `charts.html.j2` draws them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epmoe.cli.console import human_seconds
from epmoe.cli.result import STAGES, Balancing, Result, by_rank, imbalance, mean_stages

MOST_RANKS = 16  # with more, a chart that has a bar or a line for each rank shows one for all of them
MOST_LABELLED = 16  # with more ranks, the cells of the heat map have no numbers in them
MOST_PARTS = 12  # of a run


@dataclass(frozen=True)
class Tick:
    at: float  # percent
    label: str


@dataclass(frozen=True)
class Segment:
    stage: str
    width: float  # percent
    seconds: float
    share: float


@dataclass(frozen=True)
class Bar:
    name: str
    seconds: float
    segments: Sequence[Segment]


@dataclass(frozen=True)
class StageChart:
    """One bar for the single process, one for each rank."""

    bars: Sequence[Bar]
    ticks: Sequence[Tick]


@dataclass(frozen=True)
class StageRow:
    """One line of the table of stages; `alone` is None where the single process has no such stage, or was not run."""

    stage: str
    alone: float | None
    mean: float
    least: float
    most: float
    share: float


@dataclass(frozen=True)
class Cell:
    text: str
    own: bool
    level: float  # of the colour scale, 0 to 1


@dataclass(frozen=True)
class Heat:
    """A value for each pair of ranks, the rank of the row first. The scale leaves out a rank's value for itself."""

    rows: Sequence[Sequence[Cell]]
    low: str
    top: str
    labelled: bool


@dataclass(frozen=True)
class Part:
    """Rounds of a run, one after another."""

    first: int
    last: int
    cells: Sequence[Cell]
    """of each rank: its load over the mean"""
    busiest: str
    moves: int


@dataclass(frozen=True)
class BalanceChart:
    """Loads of ranks as the run goes on, and the moves of experts."""

    parts: Sequence[Part]
    low: str
    top: str
    labelled: bool


@dataclass(frozen=True)
class Expert:
    index: int
    logical: int
    count: int
    height: float  # percent
    times_mean: float


@dataclass(frozen=True)
class LoadChart:
    """Bars of the experts, rank by rank."""

    ranks: Sequence[Sequence[Expert]]
    mean: float
    mean_at: float  # percent
    ticks: Sequence[Tick]


def stage_chart(result: Result) -> StageChart:
    """Seconds by stage, of the single process (the mean over ranks) and of each rank."""
    ranks = result.stages
    named = [(f"rank {rank}", one) for rank, one in enumerate(ranks)]
    if len(ranks) > MOST_RANKS:
        named = [(f"mean of {len(ranks)} ranks", result.seconds)]
    if result.baseline:
        named.insert(0, ("one process", mean_stages(result.baseline.stages)))
    top, ticks = axis(max((sum(one.values()) for _, one in named), default=0.0), human_seconds)
    bars = []
    for name, one in named:
        total = sum(one.values())
        segments = [
            Segment(stage, 100 * one[stage] / top, one[stage], one[stage] / total)
            for stage in STAGES
            if one.get(stage, 0.0) > 0
        ]
        bars.append(Bar(name, total, segments))
    return StageChart(bars, ticks)


def stage_rows(result: Result) -> list[StageRow]:
    """One line for each stage that the ranks or the single process have."""
    alone = mean_stages(result.baseline.stages) if result.baseline else {}
    mean = result.seconds
    total = sum(mean.values()) or 1.0
    rows = []
    for stage in STAGES:
        if stage in mean or stage in alone:
            each = [one.get(stage, 0.0) for one in result.stages]
            seconds = mean.get(stage, 0.0)
            rows.append(StageRow(stage, alone.get(stage), seconds, min(each), max(each), seconds / total))
    return rows


def heat(result: Result) -> Heat:
    """The heat map of the rows from rank to rank."""
    return _heat(result.traffic, lambda rows: f"{rows:,.0f}")


def waits(result: Result) -> Heat:
    """The heat map of the time that each rank waited for each other rank."""
    return _heat(result.waited, lambda seconds: human_seconds(seconds) if seconds else "0")


def _heat(values: Sequence[Sequence[float]], label: Callable[[float], str]) -> Heat:
    others = [one for i, row in enumerate(values) for j, one in enumerate(row) if i != j] or [0]
    low, top = min(others), max(others)
    rows = [
        [Cell(label(one), i == j, 0.0 if i == j else (one - low) / (top - low or 1)) for j, one in enumerate(row)]
        for i, row in enumerate(values)
    ]
    return Heat(rows, label(low), label(top), labelled=len(rows) <= MOST_LABELLED)


def balance_chart(balancing: Balancing) -> BalanceChart:
    """The load of each rank over the mean, by parts of the run."""
    rounds = len(balancing.rows[0])
    count = min(rounds, MOST_PARTS)
    bounds = [rounds * n // count for n in range(count + 1)]
    spans = list(itertools.pairwise(bounds))
    loads = [[sum(rows[begin:end]) for rows in balancing.rows] for begin, end in spans]
    over = [[load * len(part) / (sum(part) or 1) for load in part] for part in loads]
    low, top = min(map(min, over)), max(map(max, over))
    parts = [
        Part(
            begin + 1,
            end,
            [Cell(f"{one:.2f}", False, (one - low) / (top - low or 1)) for one in part],
            f"{imbalance(load) or 1:.2f}",
            sum(moves for tick, moves in balancing.moves if begin < tick <= end),
        )
        for (begin, end), part, load in zip(spans, over, loads, strict=True)
    ]
    return BalanceChart(parts, f"{low:.2f}×", f"{top:.2f}×", len(balancing.rows) <= MOST_LABELLED)


def load_chart(result: Result) -> LoadChart:
    """Tokens of each physical expert."""
    placement, loads = result.placement, result.load
    mean = sum(loads) / len(loads)
    top, ticks = axis(max(loads), lambda value: f"{value:,.0f}", whole=True)
    experts = [
        Expert(index, placement.logical(index), load, 100 * load / top, load / (mean or 1))
        for index, load in enumerate(loads)
    ]
    return LoadChart(by_rank(placement, experts), mean, 100 * mean / top, ticks)


def axis(top: float, label: Callable[[float], str], whole: bool = False) -> tuple[float, list[Tick]]:
    """The end of an axis that starts at 0 and holds `top`, and three to six ticks at round numbers."""
    top = top if top > 0 and math.isfinite(top) else 1.0
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= top / 4)
    step = max(1.0, step) if whole else step
    count = math.ceil(top / step - 1e-9)
    return count * step, [Tick(100 * n / count, label(n * step) if n else "0") for n in range(count + 1)]
