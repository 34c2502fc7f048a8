"""The HTML report of a run: one file that contains its pictures and needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from epmoe.cli.console import human_seconds
from epmoe.cli.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, LINE, BLUE, AMBER = "#1c2733", "#64748b", "#e2e8f0", "#2563eb", "#d97706"


def write_report(results: Sequence[Result], path: Path, facts: dict[str, str]) -> None:
    """Write `results` to `path`. `facts` describe the run as a whole. Raises OSError if `path` cannot be written."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("epmoe.cli", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["seconds"] = human_seconds
    pictures = {
        result.name: {"traffic": traffic(result), "load": load(result), "time": time(result)} for result in results
    }
    html = environment.get_template("report.html.j2").render(results=results, pictures=pictures, facts=facts)
    path.write_text(html, encoding="utf-8")


def traffic(result: Result) -> str:
    """Heat map of the rows sent from rank to rank, as a data URI."""
    size = len(result.traffic)

    def draw(axes: Axes) -> None:
        axes.imshow(result.traffic, cmap="Blues", vmin=0)
        top = max(map(max, result.traffic)) or 1
        if size <= 8:
            for source, row in enumerate(result.traffic):
                for rank, count in enumerate(row):
                    colour = "white" if count > 0.55 * top else INK
                    axes.text(rank, source, f"{count:,}", ha="center", va="center", color=colour, fontsize=9)
            axes.set_xticks(range(size))
            axes.set_yticks(range(size))
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        axes.spines[:].set_visible(False)

    return _picture(draw, 3.6, 3.4)


def load(result: Result) -> str:
    """Bars of the tokens per physical expert, with a line at the mean, as a data URI."""

    def draw(axes: Axes) -> None:
        experts = range(len(result.load))
        owners = result.placement.owners
        axes.bar(
            experts,
            result.load,
            width=0.8,
            color=[BLUE if owners[p] % 2 == 0 else "#93b4f5" for p in experts],
        )
        mean = sum(result.load) / len(result.load)
        axes.axhline(mean, color=AMBER, linewidth=1.2)
        axes.annotate(
            f"balanced:\n{mean:,.0f}", (1, mean), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", color=AMBER, fontsize=9,
        )  # fmt: skip
        axes.set_xlim(-0.6, len(result.load) - 0.4)
        axes.set_xlabel("expert")
        axes.set_ylabel("tokens")
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # an AutoLocator takes it
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)

    return _picture(draw, 6.4, 3.4)


def time(result: Result) -> str:
    """Bars of the time per round of each stage, as a data URI."""

    def draw(axes: Axes) -> None:
        stages = list(result.seconds)
        each = [result.seconds[stage] / max(1, result.rounds) for stage in stages]
        axes.barh(stages, each, color=BLUE, height=0.6)
        for row, seconds in enumerate(each):
            axes.annotate(
                human_seconds(seconds), (seconds, row), xytext=(4, 0), textcoords="offset points", va="center",
                fontsize=9,
            )  # fmt: skip
        axes.set_xlim(0, 1.25 * max(each, default=1.0) or 1.0)
        axes.set_xticks([])
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)

    return _picture(draw, 3.6, 3.4)


def _picture(draw: Callable[[Axes], None], width: float, height: float) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "font.size": 10, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": LINE,
        "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
