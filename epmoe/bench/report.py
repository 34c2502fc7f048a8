"""What the benchmarks of the exchange share: times, their file and their plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Times:
    """Microseconds a round: to the experts (dispatch and permute), back (finalize and combine), and both."""

    dispatch: float
    combine: float
    pair: float


@dataclass(frozen=True)
class Line:
    """One side in a plot: (tokens, µs of a pair), and a note at each of them; colour and dashes as matplotlib's."""

    label: str
    points: Sequence[tuple[int, float]]
    notes: Sequence[str] = field(default=())
    color: str | None = None
    dashes: str = "-"


def write_object(content: Mapping[str, Any] | Sequence[Mapping[str, Any]], path: Path) -> None:
    """As JSON that people can read."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot_pairs(lines: Sequence[Line], path: Path) -> None:
    """Every side's time of a pair over T, in the format of the file's suffix (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        axes.loglog(*zip(*line.points, strict=True), "o", ls=line.dashes, color=line.color, label=line.label)
        for at, note in zip(line.points, line.notes, strict=False):
            axes.annotate(note, at, (0, -14), textcoords="offset points", ha="center")
    tokens = sorted({at for line in lines for at, _ in line.points})
    axes.set(xlabel="tokens per rank", ylabel="dispatch + combine, µs")
    axes.set_xticks(tokens, [str(T) for T in tokens])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path)
