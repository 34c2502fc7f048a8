"""What the benchmarks of the exchange share: their common shape, the times, the JSON file and the plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from rich.table import Table

from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind


class Report(Protocol):
    """The figures of one benchmark, the same on every rank."""

    def table(self, title: str = "") -> Table:
        """The figures for a terminal."""

    def write_json(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """The figures for a program, with the `facts` of the run beside them."""

    def plot(self, path: Path, title: str = "") -> None:
        """The round's time over T. The file's suffix picks the format (.png, .svg, .pdf)."""


class Benchmark(Protocol):
    """What `epmoe bench` chooses between: `gloo.run`, `gpu.run`, `layer.run` and `tune.run`."""

    def __call__(
        self,
        config: EPConfig,
        tokens: Sequence[int],
        repeats: int = ...,
        routing: Kind = ...,
        *,
        group: dist.ProcessGroup | None = ...,
        advance: Callable[[], object] = ...,
    ) -> Report:
        """Measure each T of `tokens`. Collective over `group` (default: the world); all ranks pass the same arguments.

        `advance` is called after each step, for a progress bar.
        """


@dataclass(frozen=True)
class Times:
    """Microseconds of one round: dispatch with permute, combine with finalize, and both together."""

    dispatch: float
    combine: float
    round: float


@dataclass(frozen=True)
class Line:
    """One side of a plot: (T, µs of a round), a note at each point, and matplotlib's colour and line style."""

    label: str
    points: Sequence[tuple[int, float]]
    notes: Sequence[str] = field(default=())
    color: str | None = None
    dashes: str = "-"


def write_object(content: Mapping[str, Any] | Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot_rounds(
    lines: Sequence[Line], path: Path, title: str = "", note: str = "", what: str = "dispatch + combine, µs"
) -> None:
    """Plot every side's time, which is of `what`, over T, and `note` below. The file's suffix picks the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        axes.loglog(*zip(*line.points, strict=True), "o", ls=line.dashes, color=line.color, label=line.label)
        for at, text in zip(line.points, line.notes, strict=False):
            axes.annotate(text, at, (0, -14), textcoords="offset points", ha="center")
    tokens = sorted({at for line in lines for at, _ in line.points})
    axes.set(xlabel="tokens per rank", ylabel=what, title=title)
    if note:
        figure.supxlabel(note, fontsize="small")
    axes.set_xticks(tokens, [str(T) for T in tokens])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path)
