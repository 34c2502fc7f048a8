"""Draws times over the number of tokens, for `epmoe bench --plot` and for BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Lines = Mapping[str, Sequence[tuple[int, float]]]
"""The points (T, µs) of each line, by its label: T is the number of tokens of a rank.

A label is the name of a side, and may have the name of a case behind a comma. Lines of one side
have one colour, and lines of one case have the same dashes.
"""


_DASHES = ("-", "--", ":", "-.")


def draw(path: Path, title: str, ylabel: str, panels: Mapping[str, Lines], bold: str = "") -> None:
    """Draw a panel for each heading, over one axis of times. The file's suffix picks the format
    (.png, .svg, .pdf).

    bold: label of a wide line with its figures. The same lines give the same bytes of a .png.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colors: dict[str, str] = {}
    dashes: dict[str, str] = {}
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        # A panel for each heading, over one axis of times.
        figure = Figure(figsize=(10, 5.4), layout="constrained")
        figure.suptitle(title)
        legend = {}
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        all_axes[0].set_ylabel(ylabel)
        for axes, (heading, lines) in zip(all_axes, panels.items(), strict=True):
            for label, points in lines.items():
                # The side has a colour, the case its dashes, in all panels.
                side, _, case = label.partition(", ")
                color = colors.setdefault(side, f"C{len(colors)}")
                dash = dashes.setdefault(case, _DASHES[len(dashes) % len(_DASHES)])
                is_bold = label == bold
                style = {
                    "color": color,
                    "ls": dash,
                    "lw": 2.6 if is_bold else 1.6,
                    "zorder": 4 if is_bold else 3,
                }
                tokens_of_line, us_of_line = zip(*points, strict=True)
                (legend[label],) = axes.loglog(
                    tokens_of_line, us_of_line, marker="o", markersize=4.5, **style
                )
                if is_bold:
                    _write_figures(axes, points, color)
            tokens = sorted({T for points in lines.values() for T, _ in points})
            axes.set(title=heading, xlabel="tokens per rank")
            axes.set_xticks(tokens, [str(T) for T in tokens], rotation=45)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.margins(0.08, 0.15)
            axes.grid(alpha=0.3)
        figure.legend(
            legend.values(), legend.keys(), loc="outside lower center", ncols=2, frameon=False
        )
        figure.savefig(path, dpi=130)


def _write_figures(axes: Any, points: Sequence[tuple[int, float]], color: str) -> None:
    """Write the times of a line beside its points."""
    for T, us in points:
        axes.annotate(
            f"{us:g}", (T, us), (6, -13), textcoords="offset points", color=color, fontsize=9
        )
