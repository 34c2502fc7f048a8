"""What a benchmark is given, and what it gives back: figures as a table, a JSON file and a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind

STDOUT = Path("-")  # as the path of a file: prints it
_TEXT = ("side", "payload", "precision", "GEMM", "host")  # columns that are not figures


@dataclass(frozen=True)
class Job:
    """What a benchmark measures. All ranks of `group`, by default the world, have the same."""

    config: EPConfig
    tokens: Sequence[int]
    """each T"""
    repeats: int = 20
    """samples of a side, or replays of a graph"""
    routing: Kind = "uniform"
    ranks: dist.ProcessGroup | None = None
    advance: Callable[[], object] = lambda: None
    """called after each step, for a progress bar"""
    log: Callable[[str], object] = lambda line: None
    """called with a line about each case as soon as it is measured, on every rank"""

    @property
    def group(self) -> dist.ProcessGroup:
        """`ranks`, or the world that torchrun started."""
        group = self.ranks or dist.group.WORLD
        assert group is not None
        return group


@dataclass(frozen=True)
class Times:
    """Microseconds of one round: dispatch with permute, combine with finalize, and both together."""

    dispatch: float
    combine: float
    round: float


@dataclass(frozen=True)
class Line:
    """One side of a plot: (T, µs) of its points, and matplotlib's colour and line style."""

    label: str
    points: Sequence[tuple[int, float]]
    color: str | None = None
    dashes: str = "-"


@dataclass(frozen=True)
class Report:
    """The figures of one benchmark, the same on every rank."""

    benchmark: str
    """its name in the JSON file"""
    content: Mapping[str, Any]
    """of the JSON file, without the facts of the run"""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """a cell for each column, T first, in ascending T"""
    lines: Sequence[Line]
    caption: str
    what: str = "dispatch + combine, µs"
    """of the plot's points"""

    def table(self, title: str = "") -> Table:
        """The figures for a terminal, in sections by T."""
        view = Table(title=title, caption=self.caption, pad_edge=False)
        for column in self.columns:
            view.add_column(column, justify="left" if column in _TEXT else "right", no_wrap=column in _TEXT)
        last = None
        for tokens, *cells in self.rows:
            if last not in (None, tokens):
                view.add_section()
            view.add_row("" if tokens == last else tokens, *cells)
            last = tokens
        return view

    def write_json(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """As the function `write_json`: the figures for a program, with the `facts` of the run before them."""
        write_json(path, {**(facts or {}), **self.content})

    def plot(self, path: Path, title: str = "") -> None:
        """Plot every side's time over T. The file's suffix picks the format (.png, .svg, .pdf)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        for line in self.lines:
            axes.loglog(*zip(*line.points, strict=True), "o", ls=line.dashes, color=line.color, label=line.label)
        tokens = sorted({at for line in self.lines for at, _ in line.points})
        axes.set(xlabel="tokens per rank", ylabel=self.what, title=title)
        axes.set_xticks(tokens, [str(T) for T in tokens])
        axes.minorticks_off()
        axes.margins(y=0.15)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper")
        figure.savefig(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write to a file, or to stdout if the path is `STDOUT`."""
    text = json.dumps(content, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def microseconds(value: float) -> str:
    """A time for a table: with a tenth below 1000."""
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def missing(left_out: Mapping[str, str] | None) -> str:
    """A line of a caption for each that was left out, with the reason."""
    return "".join(f"\n{name} was left out: {reason}" for name, reason in (left_out or {}).items())


Benchmark = Callable[[Job], Report]
"""What `epmoe bench` chooses between. Collective."""
