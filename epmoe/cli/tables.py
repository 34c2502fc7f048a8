"""Makes the tables of a run for the terminal and the report, and prints a run on the terminal."""

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

# The styles of cells on the terminal, by their first character.
_STYLES = {"✓": "green", "✗": "bold red"}


@dataclass(frozen=True)
class Cells:
    """The cells of a table. Columns that `words` names hold text and are aligned on the left; all
    others hold figures.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Container[str]
    has_sum: bool = False
    """whether the last row is the sum of the rows above it"""

    def draw(self) -> Table:
        """Make the table for the terminal."""
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
    # Show the counters of health that are not 0, and the checks.
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
    """Print a table with one line for each run, if there were several runs."""
    if len(results) > 1:
        console.rule("[bold]summary[/]")
        print_table(summary_table(results).draw())


def summary_table(results: Sequence[Result]) -> Cells:
    """Make a table with a row for each run and the outcomes of all its checks."""
    # Make a column for each check that any run has. The columns of the figures follow.
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
    """Make the table of the rows that each rank has sent and received, and of the pairs that it has
    computed. With dropped pairs, the table shows kept pairs and all pairs.
    """
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
    # Rows of the traffic are sources, so a rank has received the sum of a column.
    received = [sum(rows) for rows in zip(*result.traffic, strict=True)]
    rows = []
    for rank, loads in enumerate(result.loads):
        kept = sum(loads)
        largest_load = max(loads, default=0)
        pairs = f"{kept:,}"
        if has_drops:
            pairs += f"/{kept + result.dropped[rank]:,}"
        busiest = "–"
        if largest_load:
            expert = result.placement.local_experts(rank)[loads.index(largest_load)]
            busiest = f"#{expert}: {largest_load:,}"
        sent = f"{sum(result.traffic[rank]):,}"
        rows.append((f"{rank}", sent, f"{received[rank]:,}", pairs, busiest, sparkline(loads)))
    return Cells(columns, rows, words=(load,))


def stage_table(result: Result) -> Cells:
    """Make the table of the seconds of each stage: in the single process if there was one, on
    average over the ranks, and on the fastest and the slowest rank.
    """
    columns = ["stage", result.processes, "least to most", f"per {result.unit}", "share"]
    alone: dict[str, float] = {}
    alone_elapsed = None
    if result.baseline:
        columns.insert(1, "one process")
        alone = mean_stages(result.baseline.stages)
        alone_elapsed = mean(result.baseline.elapsed)

    # Make a row for each stage, one row for the part of these times that ranks have waited, and a
    # row for the sum.
    rows = []
    for stage in STAGES:
        if stage in result.seconds or stage in alone:
            rank_seconds = [seconds.get(stage, 0.0) for seconds in result.stages]
            rows.append(_stage_row(result, stage, alone.get(stage), rank_seconds))
    if result.waiting:
        # Waits for several ranks overlap, so each rank's longest wait is a lower bound.
        longest = [max(waited) for waited in result.waited]
        rows.append(_stage_row(result, "of it waiting", None, longest, bound="≥ "))
    # The whole run was measured independently of the stages, so set its share to 100%.
    total_row = _stage_row(result, "all stages", alone_elapsed, result.elapsed)
    total_row[-1] = "100%"
    rows.append(total_row)
    return Cells(columns, rows, words=("stage",), has_sum=True)


def _stage_row(
    result: Result, name: str, alone: float | None, rank_seconds: Sequence[float], bound: str = ""
) -> list[str]:
    """Make the cells of one row of the table of stages.

    `alone` are the seconds of the single process, or None without one. `rank_seconds` are those of
    each rank. `bound` stands in front of the average, as in "≥ ".
    """
    total = sum(result.seconds.values()) or 1.0
    rounds = max(1, result.rounds)
    average = mean(rank_seconds)
    least = human_seconds(min(rank_seconds), zeros=True)
    most = human_seconds(max(rank_seconds), zeros=True)
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
    """Write an imbalance as a factor: 1.5 becomes "1.50×". Without a load it is "–"."""
    return "–" if imbalance is None else f"{imbalance:.2f}×"
