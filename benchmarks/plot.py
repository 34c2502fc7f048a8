"""The plots of BENCHMARKS.md and README: the time of a round, or of a whole layer, by T."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import Published

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Style:
    """How one line looks, in matplotlib's terms."""

    label: str
    color: str
    marker: str
    dashes: str = "-"
    width: float = 1.6
    order: int = 3


@dataclass(frozen=True)
class Plot:
    """What one file shows; a panel for each result.

    styles: for each `TableRow.line`, in the order of the legend. micros: the ticks of the y axis, µs; its ends are the
    first and the last.
    """

    file: str
    title: str
    alt: str
    styles: dict[str, Style]
    tokens: tuple[int, ...]
    micros: tuple[int, ...]


PLOTS = {
    "rounds": Plot(
        "benchmarks/rounds.png",
        "One round (dispatch + combine) of bf16 rows: hidden size 7168, 256 experts, top-8",
        "The round by T on four and on two H200: epmoe, FlashInfer, DeepEP and the floor",
        {
            "epmoe": Style("epmoe (expert-major rows)", "#1f4fd8", "o", width=2.6, order=5),
            "flashinfer": Style("FlashInfer 0.7.2 one-sided (rank-major rows)", "#dd7a1b", "s"),
            "flashinfer_permute": Style("the same + vLLM permute, unpermute (expert-major)", "#f0b26a", "D"),
            "deepep_v2": Style("DeepEP 2.1.0 (rank-major)", "#79b99a", "v"),
            "deepep_ll": Style("DeepEP 1.2.1 low latency (expert-major)", "#2f9e60", "^"),
            "floor": Style("floor: a kernel that only stores the remote rows", "#8a8f98", "", "--", 1.4, 2),
        },
        (1, 16, 64, 128, 512, 4096),
        (5, 10, 20, 50, 100, 200, 500, 1000, 1500),
    ),
    "layer": Plot(
        "benchmarks/layer.png",
        "A whole layer: route, dispatch, experts and combine",
        "The layer by T on two H100: epmoe in fp8 and bf16, DeepGEMM's MegaMoE, FlashInfer and the floor",
        {
            "epmoe": Style("epmoe, fp8", "#1f4fd8", "o", width=2.6, order=5),
            "epmoe_bf16": Style("epmoe, bf16", "#8fa6ea", "o", width=1.8, order=4),
            "mega_moe": Style("DeepGEMM MegaMoE (sgl-deep-gemm 0.1.5), fp8", "#2f9e60", "^"),
            "flashinfer": Style("FlashInfer 0.7.2 whole layer (push), fp8, an earlier run", "#dd7a1b", "s"),
            "floor": Style(
                "floor, fp8: the weights of experts with rows read once, or the FLOPs", "#8a8f98", "", "--", 1.4, 2
            ),
        },
        (1, 4, 16, 64, 256, 1024, 4096),
        (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000),
    ),
}
"""The plots by `Published.plot`."""


def draw(plot: Plot, results: Sequence[Published], path: Path) -> None:
    """Draw the results of a plot that have a `panel` into `path`, a .png. The same results give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = [result for result in results if result.panel and PLOTS[result.plot] is plot]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        figure = Figure(figsize=(10, 5.4), layout=layout, facecolor="white")
        figure.suptitle(plot.title, fontsize=11.5, fontweight="bold", color="#22262e")
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, result in zip(panels, shown, strict=True):
            _panel(axes, plot, result)
        panels[0].set_ylabel("µs (lower is better)")
        handles: dict[str, Artist] = {}
        for axes in panels:
            handles |= {str(line.get_label()): line for line in axes.get_lines()}
        labels = [style.label for style in plot.styles.values() if style.label in handles]
        figure.legend(
            [handles[label] for label in labels], labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )
        figure.savefig(path, dpi=130)


def _panel(axes: Axes, plot: Plot, result: Published) -> None:
    for name, style in plot.styles.items():
        points = result.line(name)
        if not points:
            continue
        tokens, micros = zip(*((T, float(us)) for T, us in points), strict=True)
        axes.loglog(
            tokens,
            micros,
            color=style.color,
            linestyle=style.dashes,
            linewidth=style.width,
            marker=style.marker,
            markersize=4.5,
            label=style.label,
            zorder=style.order,
        )
        if name == "floor":
            axes.fill_between(tokens, micros, plot.micros[0] / 2, color="#eef0f3", linewidth=0, zorder=1)
        if name == "epmoe":
            for T, us in points:
                axes.annotate(
                    f"{us}",
                    (T, float(us)),
                    (6, -13),
                    textcoords="offset points",
                    color=style.color,
                    fontsize=9,
                    fontweight="bold",
                    bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "alpha": 0.75, "linewidth": 0},
                    zorder=6,
                )
    axes.set_title(result.panel or "", loc="left", fontsize=10.5, fontweight="bold", color="#22262e")
    axes.set(xlabel="tokens per rank", xlim=(0.8, 8500), ylim=(plot.micros[0], plot.micros[-1]))
    axes.set_xticks(plot.tokens, [str(T) for T in plot.tokens])
    axes.set_yticks(plot.micros[:-1], [str(us) for us in plot.micros[:-1]])
    axes.minorticks_off()
    axes.tick_params(length=0, labelcolor="#3b414c")
    axes.set_axisbelow(True)
    axes.grid(color="#dfe2e8", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bdc6")
