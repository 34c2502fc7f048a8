"""Draws times over T, for `epmoe bench --plot` and for BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """The times of one side."""

    label: str
    points: Sequence[tuple[int, float]]
    """(T, µs)"""
    color: str
    dashes: str = "-"
    bold: bool = False
    """a wide line with its figures"""


def draw(path: Path, title: str, ylabel: str, panels: Mapping[str, Sequence[Line]]) -> None:
    """Draw a panel for each heading, over one axis of times. The file's suffix picks the format (.png, .svg, .pdf).

    The same lines give the same bytes of a .png.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure = Figure(figsize=(10, 5.4), layout="constrained")
        figure.suptitle(title)
        legend = {}
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        all_axes[0].set_ylabel(ylabel)
        for axes, (heading, lines) in zip(all_axes, panels.items(), strict=True):
            for label, points, color, dashes, bold in lines:
                look = {"color": color, "ls": dashes, "lw": 2.6 if bold else 1.6, "zorder": 4 if bold else 3}
                (legend[label],) = axes.loglog(*zip(*points, strict=True), marker="o", markersize=4.5, **look)
                for T, us in points if bold else ():
                    axes.annotate(f"{us:g}", (T, us), (6, -13), textcoords="offset points", color=color, fontsize=9)
            tokens = sorted({T for line in lines for T, _ in line.points})
            axes.set(title=heading, xlabel="tokens per rank")
            axes.set_xticks(tokens, [str(T) for T in tokens], rotation=45)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.margins(0.08, 0.15)
            axes.grid(alpha=0.3)
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=130)
