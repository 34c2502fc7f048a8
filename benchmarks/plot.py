"""The plots of BENCHMARKS.md and README: the time of a round, or of a whole layer, by T."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import Published
from epmoe.bench.plot import Line
from epmoe.bench.plot import draw as draw_lines


class Plot(NamedTuple):
    """What one file shows; a panel for each result.

    looks: label, colour and dashes for each `TableRow.line`, in the order of the legend.
    """

    file: str
    title: str
    alt: str
    looks: dict[str, tuple[str, str, str]]


PLOTS = {
    "rounds": Plot(
        "benchmarks/rounds.png",
        "One round (dispatch + combine) of bf16 rows: hidden size 7168, 256 experts, top-8",
        "The round by T on four and on two H200: epmoe, FlashInfer, DeepEP and the floor",
        {
            "epmoe": ("epmoe (expert-major rows)", "#1f4fd8", "-"),
            "flashinfer": ("FlashInfer 0.7.2 one-sided (rank-major rows)", "#dd7a1b", "-"),
            "flashinfer_permute": ("the same + vLLM permute, unpermute (expert-major)", "#f0b26a", "-"),
            "deepep_v2": ("DeepEP 2.1.0 (rank-major)", "#79b99a", "-"),
            "deepep_ll": ("DeepEP 1.2.1 low latency (expert-major)", "#2f9e60", "-"),
            "floor": ("floor: a kernel that only stores the remote rows", "#8a8f98", "--"),
        },
    ),
    "layer": Plot(
        "benchmarks/layer.png",
        "A whole layer: route, dispatch, experts and combine",
        "The layer by T on two H100: epmoe in fp8 and bf16, DeepGEMM's MegaMoE, FlashInfer and the floor",
        {
            "epmoe": ("epmoe, fp8", "#1f4fd8", "-"),
            "epmoe_bf16": ("epmoe, bf16", "#8fa6ea", "-"),
            "mega_moe": ("DeepGEMM MegaMoE (sgl-deep-gemm 0.1.5), fp8", "#2f9e60", "-"),
            "flashinfer": ("FlashInfer 0.7.2 whole layer (push), fp8, an earlier run", "#dd7a1b", "-"),
            "floor": ("floor, fp8: the weights of experts with rows read once, or the FLOPs", "#8a8f98", "--"),
        },
    ),
}
"""The plots by `Published.plot`."""


def draw(plot: Plot, results: Sequence[Published], path: Path) -> None:
    """Draw the results of a plot that have a `panel` into `path`, a .png. The same results give the same bytes."""
    panels = {}
    for result in results:
        if result.panel and PLOTS[result.plot] is plot:
            panels[result.panel] = [
                Line(label, [(T, float(us)) for T, us in points], color, dashes, bold=name == "epmoe")
                for name, (label, color, dashes) in plot.looks.items()
                if (points := result.line(name))
            ]
    draw_lines(path, plot.title, "µs (lower is better)", panels)
