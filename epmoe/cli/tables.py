"""A run's results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from epmoe.cli.console import console, human_bytes, human_seconds, print_table, sparkline
from epmoe.cli.result import Check, Result

WAITING = "in dispatch and combine, at least"
_PLAIN = {"box": None, "pad_edge": False, "header_style": "dim", "padding": (0, 2, 0, 2)}


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
    table = Table(*("", *(check.what for check in results[0].checks), "rows between ranks"), **_PLAIN)  # type: ignore[arg-type]
    for result in results:
        verdicts = [f"{mark(check)} {escape(check.measured)}" for check in result.checks]
        table.add_row(result.name, *verdicts, f"{result.rows_moved:,}")
    print_table(table)


def mark(check: Check) -> str:
    return "[green]✓[/]" if check.passed else "[bold red]✗[/]"


def _ranks(result: Result) -> Table:
    table = Table(**_PLAIN)  # type: ignore[arg-type]
    for column in ("rank", "rows sent", "received", "kept/pairs" if any(result.dropped) else "pairs", "busiest expert"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("load per expert", no_wrap=True)
    for rank, (sent, received, pairs, load) in enumerate(result.rank_rows()):
        busiest = max(range(len(load)), key=load.__getitem__) if any(load) else None
        experts = result.placement.local_experts(rank)
        hot = "–" if busiest is None else f"#{experts[busiest]}: {load[busiest]:,}"
        kept = f"{pairs:,}/{result.routed[rank]:,}" if any(result.dropped) else f"{pairs:,}"
        table.add_row(f"{rank}", f"{sent:,}", f"{received:,}", kept, hot, sparkline(load))
    return table


def _stages(result: Result) -> Table:
    table = Table(**_PLAIN)  # type: ignore[arg-type]
    table.add_column("stage")
    table.add_column(f"per {result.unit}", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    total = sum(result.seconds.values()) or 1.0
    for stage, seconds in result.seconds.items():
        share = seconds / total
        bar = Text("█" * round(24 * share), style="blue")
        table.add_row(stage, human_seconds(seconds / max(1, result.rounds)), f"{share:.0%}", bar)
    if result.waiting:
        waiting = human_seconds(result.waiting / max(1, result.rounds))
        table.add_row(
            "[dim]waiting for others", f"[dim]{waiting}", f"[dim]{result.waiting / total:.0%}", "[dim]" + WAITING
        )
    return table
