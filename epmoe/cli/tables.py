"""The tables of a run, which the terminal and the report draw alike, and the rest of what the
terminal shows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Container, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from epmoe.cli.console import (
    console,
    human_bytes,
    human_seconds,
    plain_table,
    print_table,
    share,
    sparkline,
)
from epmoe.cli.result import STAGES, Result, imbalance, mean_stages

# Styles of cells that begin with one of these.
_STYLES = {"✓": "green", "✗": "bold red"}


@dataclass(frozen=True)
class Cells:
    """A table. The columns that `words` names stand on the left, and their cells are no figures."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Container[str]
    has_sum: bool = False
    """whether the last row is the sum of those above"""

    def draw(self) -> Table:
        """The table for the terminal."""
        table = plain_table(self.columns, self.words)
        for number, row in enumerate(self.rows, start=1):
            cells = [Text(cell, style=_STYLES.get(cell[:1], "")) for cell in row]
            is_sum = self.has_sum and number == len(self.rows)
            table.add_row(*cells, style="bold" if is_sum else "")
        return table


def show(result: Result) -> None:
    """Print the texts, loads, times, health counters and checks of one run."""
    # What the model has written.
    texts = Table.grid(padding=(0, 2, 0, 2))
    for rank, (prompt, continuation) in enumerate(result.texts):
        texts.add_row(
            f"[dim]rank {rank}",
            Text.assemble(prompt, (" → ", "dim"), (continuation.strip(), "bold cyan")),
        )
    if result.texts:
        console.print(texts)
    # Loads and times.
    for table in (rank_table(result), stage_table(result)):
        console.print()
        print_table(table.draw())
    console.print()
    sizes = f"{human_bytes(result.bytes_dispatched)} out, {human_bytes(result.bytes_combined)} back"
    console.print(
        f"  travelled: {result.rows_moved:,} rows between ranks ({sizes}); {result.rows_kept:,} "
        "stayed"
    )
    if result.late:
        rank, seconds = result.late
        console.print(
            f"  waits: longest for rank {rank}, {human_seconds(seconds)} of all ranks together"
        )
    # Whether all is well.
    counts = []
    for name, count in result.health.items():
        if count:
            counts.append(f"{name.replace('_', ' ')} {count:,}")
    console.print(f"  health: {', '.join(counts) or 'nothing to report'}")
    for check in result.checks:
        style = "green" if check.passed else "bold red"
        console.print(f"  [{style}]{check.mark}[/] {escape(check.what)}: {check.measured}")
    if not result.checks:
        console.print("  – nothing was checked: no rank brought tokens")
    if result.cause:
        console.print(f"  [bold yellow]cause[/]: {escape(result.cause)}")
    if result.balancing:
        console.print(f"  {result.balancing.outcome}")
    console.print()


def summarise(results: Sequence[Result]) -> None:
    """Print one line for each run, if there were several."""
    if len(results) > 1:
        console.rule("[bold]summary[/]")
        print_table(summary_table(results).draw())


def summary_table(results: Sequence[Result]) -> Cells:
    """A row for each run, with the outcome of every check that any of them has."""
    # A column for each check that any run has, then for the figures.
    checks = dict.fromkeys(check.what for result in results for check in result.checks)
    figures = (
        "one process",
        results[0].processes,
        "rows on the wire",
        "busiest rank",
        "busiest expert",
    )
    columns = [textwrap.fill(column, 9) for column in ("model", *checks, *figures)]
    rows = []
    for result in results:
        outcomes = {check.what: f"{check.mark} {check.measured}" for check in result.checks}
        alone = "–"
        if result.baseline:
            alone = human_seconds(mean(result.baseline.elapsed), zeros=True)
        row = [result.name, *(outcomes.get(what, "–") for what in checks)]
        row += [alone, human_seconds(mean(result.elapsed), zeros=True), f"{result.rows_moved:,}"]
        row += [times(imbalance(result.pairs)), times(imbalance(result.load))]
        rows.append(row)
    return Cells(columns, rows, words=columns[: 1 + len(checks)])


def rank_table(result: Result) -> Cells:
    """Rows and pairs of each rank."""
    has_drops = any(result.dropped)
    load = f"load per {result.holder}"
    columns = (
        "rank",
        "rows sent",
        "received",
        "kept/pairs" if has_drops else "pairs",
        f"busiest {result.holder}",
        load,
    )
    # A column of the traffic is what a rank received.
    received = [sum(rows) for rows in zip(*result.traffic, strict=True)]
    rows = []
    for rank, loads in enumerate(result.loads):
        kept = sum(loads)
        top = max(loads, default=0)
        pairs = f"{kept:,}"
        if has_drops:
            pairs += f"/{kept + result.dropped[rank]:,}"
        busiest = "–"
        if top:
            expert = result.placement.local_experts(rank)[loads.index(top)]
            busiest = f"#{expert}: {top:,}"
        sent = f"{sum(result.traffic[rank]):,}"
        rows.append((f"{rank}", sent, f"{received[rank]:,}", pairs, busiest, sparkline(loads)))
    return Cells(columns, rows, words=(load,))


def stage_table(result: Result) -> Cells:
    """Seconds of each stage: of the single process, of the mean rank, and of the fastest and
    slowest rank.
    """
    columns = ["stage", result.processes, "least to most", f"per {result.unit}", "share"]
    if result.baseline:
        columns.insert(1, "one process")
    alone = mean_stages(result.baseline.stages) if result.baseline else {}
    total = sum(result.seconds.values()) or 1.0
    rounds = max(1, result.rounds)

    def row(name: str, single: float | None, each: Sequence[float], bound: str = "") -> list[str]:
        cells = [name, bound + human_seconds(mean(each), zeros=True)]
        least = human_seconds(min(each), zeros=True)
        most = human_seconds(max(each), zeros=True)
        cells += [
            f"{least} to {most}",
            human_seconds(mean(each) / rounds, zeros=True),
            share(mean(each) / total),
        ]
        if result.baseline:
            cells.insert(1, "–" if single is None else human_seconds(single, zeros=True))
        return cells

    rows = []
    for stage in STAGES:
        if stage in result.seconds or stage in alone:
            of_ranks = [seconds.get(stage, 0.0) for seconds in result.stages]
            rows.append(row(stage, alone.get(stage), of_ranks))
    # A part of the stages above, and their sum.
    if result.waiting:
        rows.append(
            row("of it waiting", None, [max(waited) for waited in result.waited], bound="≥ ")
        )
    alone_elapsed = mean(result.baseline.elapsed) if result.baseline else None
    rows.append([*row("all stages", alone_elapsed, result.elapsed)[:-1], "100%"])
    return Cells(columns, rows, words=("stage",), has_sum=True)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def times(imbalance: float | None) -> str:
    """1.5 → "1.50×"; "–" where there is no load."""
    return "–" if imbalance is None else f"{imbalance:.2f}×"
