"""What a benchmark takes, a `Job`, and what it gives back: a `Report`, as a table, a JSON file and
a plot.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from rich.table import Table

from epmoe.bench.plot import draw
from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind

# As the path of a file: prints it.
STDOUT = Path("-")


@dataclass(frozen=True)
class Job:
    """What a benchmark measures, the same on all ranks of `group`, by default the world."""

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

    @property
    def on_gpus(self) -> bool:
        """Whether the exchange runs on GPUs."""
        return self.config.exchange.transport == "nvlink"


def microseconds(value: float) -> str:
    """A time for a table: with a tenth below 1000."""
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


class Column(NamedTuple):
    """One figure of every result."""

    key: str
    """of `Figures`"""
    heading: str
    """in the table, which leaves out a column without one"""
    unit: str = ""
    """of the figure, for the JSON file; text has none"""
    show: Callable[[Any], str] = str
    """writes a figure into a cell"""


Figures = Mapping[str, Any]
"""One row of figures by the keys of the columns. A figure that was not measured is
None or missing.
"""

TOKENS = Column("tokens", "T", "tokens of a rank")
SIDE = Column("side", "side")


def times(ways: str, whole: str) -> list[Column]:
    """The columns of `Times`: what dispatch and combine are, and what the round is."""
    return [
        Column("dispatch", "dispatch", ways, microseconds),
        Column("combine", "combine", ways, microseconds),
        Column("round", "round", whole, microseconds),
    ]


@dataclass(frozen=True)
class Report:
    """The figures of one benchmark, the same on every rank."""

    benchmark: str
    """its name in the JSON file"""
    columns: Sequence[Column]
    """the first one divides the table into sections"""
    results: Sequence[Figures]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """why sides and cases are missing, by name"""
    plotted: Sequence[str] = ("round",)
    """keys of the times that the plot shows"""
    what: str = "dispatch + combine, µs"
    """label of the plot's axis of times"""

    @property
    def content(self) -> Mapping[str, Any]:
        """The JSON file without the facts of the run."""
        units = {column.key: column.unit for column in self.columns if column.unit}
        return {
            "units": units,
            "plotted": self.plotted,
            "left_out": self.left_out,
            "results": self.results,
        }

    def table(self, title: str = "") -> Table:
        """The figures for a terminal, with what each column is and why sides and cases
        are missing.
        """
        shown = [column for column in self.columns if column.heading]
        caption = [". ".join(f"{column.heading}: {column.unit}" for column in shown if column.unit)]
        caption += [f"{name} was left out: {reason}" for name, reason in self.left_out.items()]
        view = Table(title=title, caption="\n".join(caption), pad_edge=False)
        for column in shown:
            is_figure = bool(column.unit)
            view.add_column(
                column.heading, justify="right" if is_figure else "left", no_wrap=not is_figure
            )
        # A section for each value of the first column, which stands in its first row.
        sections = itertools.groupby(self.results, lambda result: result[shown[0].key])
        for number, (_, section) in enumerate(sections):
            if number:
                view.add_section()
            for row, result in enumerate(section):
                cells = [cell(column, result) for column in shown]
                view.add_row("" if row else cells[0], *cells[1:])
        return view

    def write_json(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write the figures for a program, with the `facts` of the run before them, as the function
        `write_json`.
        """
        write_json(path, {**(facts or {}), **self.content})

    def plot(self, path: Path, title: str = "") -> None:
        """Plot the times of every side over T. The file's suffix picks the format (.png, .svg,
        .pdf).
        """
        # The words that name a line, and the times that it may show.
        texts = [column for column in self.columns if not column.unit]
        times = [column for column in self.columns if column.key in self.plotted]
        # A line for each side and case, and for each of several times.
        lines: dict[str, list[tuple[int, float]]] = {}
        for column, result in itertools.product(times, self.results):
            words = [cell(text, result) for text in texts]
            if len(times) > 1 or not words:
                words.append(column.heading)
            us = result.get(column.key)
            if us is not None:
                lines.setdefault(", ".join(words), []).append((result["tokens"], us))
        draw(path, title, self.what, {"": lines})


def cell(column: Column, result: Figures) -> str:
    """A figure of `result` as text; a dash if it was not measured."""
    value = result.get(column.key)
    return "–" if value is None else column.show(value)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write to a file, or to stdout if the path is `STDOUT`."""
    text = json.dumps(content, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


Benchmark = Callable[[Job], Report]
"""What `epmoe bench` chooses between. Collective."""
