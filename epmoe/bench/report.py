"""The input and the output of a benchmark: a `Job` says what to measure, and a `Report` has the
figures, as a table, a JSON file and a plot.
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

# The path that stands for standard output.
STDOUT = Path("-")


@dataclass(frozen=True)
class Job:
    """What a benchmark measures. It is the same on all ranks."""

    config: EPConfig
    tokens: Sequence[int]
    """the numbers of tokens of a rank, one after the other"""
    repeats: int = 20
    """samples of a side, or replays of a graph"""
    routing: Kind = "uniform"
    ranks: dist.ProcessGroup | None = None
    advance: Callable[[], object] = lambda: None
    """the benchmark calls it after each step, for a progress bar"""
    log: Callable[[str], object] = lambda line: None
    """the benchmark calls it on every rank, with a line about each case that it has measured"""

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
    """Write a time in µs into a table. Times below 1000 have one digit behind the point."""
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


class Column(NamedTuple):
    """One figure of every result."""

    key: str
    """the key in `Figures`"""
    heading: str
    """the heading in the table, which leaves out columns without a heading"""
    unit: str = ""
    """what the figure is, for the JSON file and below the table; empty for columns of text"""
    show: Callable[[Any], str] = str
    """turns a figure into the text of a cell"""


Figures = Mapping[str, Any]
"""One row of figures by the keys of the columns. A figure that was not measured is
None or missing.
"""

TOKENS = Column("tokens", "T", "tokens of a rank")
SIDE = Column("side", "side")


def times(stage_unit: str, round_unit: str) -> list[Column]:
    """Make the columns of `Times`. `stage_unit` describes the figures of dispatch and of combine,
    `round_unit` those of the round.
    """
    return [
        Column("dispatch", "dispatch", stage_unit, microseconds),
        Column("combine", "combine", stage_unit, microseconds),
        Column("round", "round", round_unit, microseconds),
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
    """the sides and cases that are missing, each with the reason"""
    plotted: Sequence[str] = ("round",)
    """keys of the columns that the plot shows"""
    what: str = "dispatch + combine, µs"
    """label of the plot's axis of times"""

    @property
    def content(self) -> Mapping[str, Any]:
        """The content of the JSON file, but for the facts of the run."""
        units = {column.key: column.unit for column in self.columns if column.unit}
        return {
            "units": units,
            "plotted": self.plotted,
            "left_out": self.left_out,
            "results": self.results,
        }

    def table(self, title: str = "") -> Table:
        """Make the table for a terminal. Its caption says what each column is, and why sides and
        cases are missing.
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
        # Make a section for each value of the first column. The value stands in the section's first
        # row only.
        sections = itertools.groupby(self.results, lambda result: result[shown[0].key])
        for number, (_, section) in enumerate(sections):
            if number:
                view.add_section()
            for row, result in enumerate(section):
                cells = [cell(column, result) for column in shown]
                view.add_row("" if row else cells[0], *cells[1:])
        return view

    def write_json(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write the figures as JSON, with the `facts` of the run in front of them. `path` is that
        of the function `write_json`.
        """
        write_json(path, {**(facts or {}), **self.content})

    def plot(self, path: Path, title: str = "") -> None:
        """Plot the times of every side over the number of tokens. The file's suffix picks the
        format (.png, .svg, .pdf).
        """
        # Columns of text name a line; columns of times give its points.
        text_columns = [column for column in self.columns if not column.unit]
        time_columns = [column for column in self.columns if column.key in self.plotted]
        # Make a line for each side and case. With several columns of times, each has a line.
        lines: dict[str, list[tuple[int, float]]] = {}
        for column, result in itertools.product(time_columns, self.results):
            names = [cell(text_column, result) for text_column in text_columns]
            if len(time_columns) > 1 or not names:
                names.append(column.heading)
            us = result.get(column.key)
            if us is not None:
                points = lines.setdefault(", ".join(names), [])
                points.append((result["tokens"], us))
        draw(path, title, self.what, {"": lines})


def cell(column: Column, result: Figures) -> str:
    """Write a figure of `result` as text, or a dash if it was not measured."""
    value = result.get(column.key)
    return "–" if value is None else column.show(value)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON to a file, or to standard output if the path is `STDOUT`."""
    text = json.dumps(content, indent=2) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


Benchmark = Callable[[Job], Report]
"""A function that `epmoe bench` can choose. All ranks call it together."""
