"""The tables of a run, for the terminal and the report, and all else that the terminal shows."""

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
    # Show what the model has written.
    texts = Table.grid(padding=(0, 2, 0, 2))
    for rank, (prompt, continuation) in enumerate(result.texts):
        texts.add_row(
            f"[dim]rank {rank}",
            Text.assemble(prompt, (" → ", "dim"), (continuation.strip(), "bold cyan")),
        )
    if result.texts:
        console.print(texts)
    # Show loads and times.
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
    # Say whether all is well.
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
    """Make a row for each run, with the outcomes of all checks."""
    # A column for each check that any run has, then those of the figures.
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
    """Make the table of the rows and pairs of each rank."""
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
    """Make the table of the seconds of each stage: of the single process, of the mean rank, and of
    the fastest and slowest rank.
    """
    columns = ["stage", result.processes, "least to most", f"per {result.unit}", "share"]
    alone: dict[str, float] = {}
    alone_elapsed = None
    if result.baseline:
        columns.insert(1, "one process")
        alone = mean_stages(result.baseline.stages)
        alone_elapsed = mean(result.baseline.elapsed)

    # A row for each stage, one for the time in them that ranks waited, and the sum.
    rows = []
    for stage in STAGES:
        if stage in result.seconds or stage in alone:
            of_ranks = [seconds.get(stage, 0.0) for seconds in result.stages]
            rows.append(_stage_row(result, stage, alone.get(stage), of_ranks))
    if result.waiting:
        longest = [max(waited) for waited in result.waited]
        rows.append(_stage_row(result, "of it waiting", None, longest, bound="≥ "))
    *sums, _share = _stage_row(result, "all stages", alone_elapsed, result.elapsed)
    rows.append([*sums, "100%"])
    return Cells(columns, rows, words=("stage",), has_sum=True)


def _stage_row(
    result: Result, name: str, alone: float | None, of_ranks: Sequence[float], bound: str = ""
) -> list[str]:
    """The cells of one row: seconds of the single process, `alone`, and of each rank."""
    total = sum(result.seconds.values()) or 1.0
    rounds = max(1, result.rounds)
    average = mean(of_ranks)
    least = human_seconds(min(of_ranks), zeros=True)
    most = human_seconds(max(of_ranks), zeros=True)
    cells = [
        name,
        bound + human_seconds(average, zeros=True),
        f"{least} to {most}",
        human_seconds(average / rounds, zeros=True),
        share(average / total),
    ]
    if result.baseline:
        cells.insert(1, "–" if alone is None else human_seconds(alone, zeros=True))
    return cells


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def times(imbalance: float | None) -> str:
    """1.5 → "1.50×"; "–" where there is no load."""
    return "–" if imbalance is None else f"{imbalance:.2f}×"
