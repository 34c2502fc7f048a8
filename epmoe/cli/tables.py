"""A run's results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from epmoe.cli.console import console, human_bytes, human_seconds, plain_table, print_table, sparkline
from epmoe.cli.result import Check, Result

WAITING = "in dispatch and combine, at least"


def show(result: Result) -> None:
    """Print the texts, loads, times, health counters and checks of one run."""
    texts = Table.grid(padding=(0, 2, 0, 2))
    for rank, (prompt, continuation) in enumerate(result.texts):
        texts.add_row(f"[dim]rank {rank}", Text.assemble(prompt, (" → ", "dim"), (continuation.strip(), "bold cyan")))
    if result.texts:
        console.print(texts)
    console.print()
    print_table(_ranks(result))
    console.print()
    print_table(_stages(result))
    console.print()
    sizes = f"{human_bytes(result.bytes_dispatched)} out, {human_bytes(result.bytes_combined)} back"
    console.print(f"  travelled: {result.rows_moved:,} rows between ranks ({sizes}); {result.rows_kept:,} stayed")
    if result.late:
        rank, seconds = result.late
        console.print(f"  waits: longest for rank {rank}, {human_seconds(seconds)} of all ranks together")
    problems = {name: count for name, count in result.health.items() if count}
    counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in problems.items())
    console.print(f"  health: {counts or 'nothing to report'}")
    for check in result.checks:
        console.print(f"  {mark(check)} {escape(check.what)}: {escape(check.measured)}")
    if result.cause:
        console.print(f"  [bold yellow]cause[/]: {escape(result.cause)}")
    if not result.checks:
        console.print("  – nothing was checked: no rank brought tokens")
    console.print()


def summarise(results: Sequence[Result]) -> None:
    """Print one line for each run, if there were several."""
    if len(results) < 2:
        return
    console.rule("[bold]summary[/]")
    columns = ["", *(check.what for check in results[0].checks), "rows between ranks"]
    table = plain_table(columns, words=columns)
    for result in results:
        verdicts = [f"{mark(check)} {escape(check.measured)}" for check in result.checks]
        table.add_row(result.name, *verdicts, f"{result.rows_moved:,}")
    print_table(table)


def mark(check: Check) -> str:
    return "[green]✓[/]" if check.passed else "[bold red]✗[/]"


def _ranks(result: Result) -> Table:
    drops, holder = any(result.dropped), "slot" if result.balancing else "expert"
    pairs, load = "kept/pairs" if drops else "pairs", f"load per {holder}"
    table = plain_table(("rank", "rows sent", "received", pairs, f"busiest {holder}", load), words=(load,))
    for number, rank in enumerate(result.ranks):
        pairs = f"{rank.pairs:,}/{rank.routed:,}" if drops else f"{rank.pairs:,}"
        top = max(rank.load, default=0)
        busiest = f"#{result.placement.local_experts(number)[rank.load.index(top)]}: {top:,}" if top else "–"
        table.add_row(f"{number}", f"{rank.sent:,}", f"{rank.received:,}", pairs, busiest, sparkline(rank.load))
    return table


def _stages(result: Result) -> Table:
    table = plain_table(("stage", f"per {result.unit}", "share", ""), words=("stage", ""))
    total, rounds = sum(result.seconds.values()) or 1.0, max(1, result.rounds)
    for stage, seconds in result.seconds.items():
        bar = Text("█" * round(24 * seconds / total), style="blue")
        table.add_row(stage, human_seconds(seconds / rounds), f"{seconds / total:.0%}", bar)
    if result.waiting:
        waiting = human_seconds(result.waiting / rounds)
        table.add_row("waiting for others", waiting, f"{result.waiting / total:.0%}", WAITING, style="dim")
    return table
