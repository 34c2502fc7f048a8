"""Times rounds of `ExpertParallel` on the CPU against the same work over gloo's `all_to_all_single`, in one run.

All sides get the same tokens and the same routing. The expert outputs are made beforehand, so that only dispatch and
combine are timed. A sample is a few rounds back to back after a barrier; samples of the sides alternate. A figure is
in microseconds a round: the median over samples of the slowest rank.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from epmoe.bench.all_to_all import AllToAll
from epmoe.bench.report import Line, Times, plot_rounds, write_object
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused, Layer, Pipeline
from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind
from epmoe.service import ExpertParallel

TOKENS = (1, 16, 128, 1024)
_CAPTION = "µs a round on the slowest rank, median of samples; ratio: that side's round / epmoe's round"
_UNITS = {
    "tokens": "tokens of a rank in a round",
    "dispatch, combine, round": "µs on the slowest rank, median of samples",
    "ratio, ratio_kept": "the round of gloo, and of gloo with kept buffers, divided by the round of epmoe",
}
# Most rounds of a sample; a large T gets fewer. The skew with which ranks leave the barrier must not show in the mean.
_ROUNDS = 16


@dataclasses.dataclass(frozen=True)
class Result:
    """All sides, measured at one T (tokens a rank)."""

    tokens: int
    epmoe: Times
    gloo: Times
    gloo_kept: Times
    """gloo with buffers that are kept from round to round"""

    @property
    def ratio(self) -> float:
        """gloo's time of a round divided by epmoe's."""
        return self.gloo.round / self.epmoe.round

    @property
    def ratio_kept(self) -> float:
        """The same for gloo with kept buffers."""
        return self.gloo_kept.round / self.epmoe.round


@dataclasses.dataclass(frozen=True)
class GlooReport:
    """One result for each T."""

    results: Sequence[Result]

    def table(self, title: str = "") -> Table:
        """Microseconds of dispatch, combine and the round for each side, and gloo's ratios to epmoe."""
        view = Table(title=title, caption=_CAPTION)
        for column in ("T", "side", "dispatch", "combine", "round", "ratio"):
            view.add_column(column, justify="left" if column == "side" else "right")
        for result in self.results:
            for name, times, ratio in (
                ("epmoe", result.epmoe, ""),
                ("gloo", result.gloo, f"[bold]{result.ratio:.1f}x[/]"),
                ("gloo, kept buffers", result.gloo_kept, f"{result.ratio_kept:.1f}x"),
            ):
                tokens = f"{result.tokens}" if name == "epmoe" else ""
                view.add_row(tokens, name, *(f"{value:,.0f}" for value in dataclasses.astuple(times)), ratio)
            view.add_section()
        return view

    def write_json(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """`facts`, `units`, and `results`: one object for each T, with the times of each side and the ratios."""
        results = [dataclasses.asdict(r) | {"ratio": r.ratio, "ratio_kept": r.ratio_kept} for r in self.results]
        write_object({"benchmark": "gloo", **(facts or {}), "units": _UNITS, "results": results}, path)

    def plot(self, path: Path, title: str = "") -> None:
        """Every side's time of a round over T, in the format of the file's suffix (.png, .svg, .pdf)."""
        results = self.results
        lines = [
            Line("gloo all_to_all", [(r.tokens, r.gloo.round) for r in results]),
            Line("gloo all_to_all, kept buffers", [(r.tokens, r.gloo_kept.round) for r in results]),
            Line("epmoe", [(r.tokens, r.epmoe.round) for r in results], [f"{r.ratio:.1f}x" for r in results]),
        ]
        plot_rounds(lines, path, title, "ratio: the round of gloo all_to_all / the round of epmoe")


def run(
    config: EPConfig,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 20,
    routing: Kind = "uniform",
    *,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[], object] = lambda: None,
) -> GlooReport:
    """Measure each T of `tokens`. Collective over `group` (default: the world); all ranks pass the same arguments.

    Each side is sampled `repeats` times. `advance` is called after each set of samples, one of every side. Raises
    ValueError if the configuration asks for an fp8 payload, RuntimeError if the output of a side is not the weighted
    sum over the token's experts.
    """
    if "fp8" in (config.exchange.payload, config.exchange.combine_payload):
        raise ValueError("`exchange.payload` and `exchange.combine_payload` must be auto: gloo sends no fp8 rows")
    with ExpertParallel(config, group) as ep:
        return GlooReport([_measure(ep, T, repeats, routing, advance) for T in tokens])


def _measure(ep: ExpertParallel, tokens: int, repeats: int, routing: Kind, advance: Callable[[], object]) -> Result:
    assert ep.group is not None  # the world that torchrun started, or the caller's group
    sample = Sample(ep.config, ep.rank, tokens, routing, id_dtype=torch.int64)
    gloo = [
        Pipeline(AllToAll(ep.placement, ep.group, keep_buffers=keep), sample, name)
        for name, keep in (("gloo", False), ("gloo, kept buffers", True))
    ]
    return Result(tokens, *median_times((Fused(ep, sample), *gloo), sample, repeats, ep.group, advance))


def median_times(
    sides: Sequence[Layer], sample: Sample, repeats: int, group: dist.ProcessGroup, advance: Callable[[], object]
) -> list[Times]:
    """The times of each side: medians over `repeats` samples, of the slowest rank. Collective over `group`."""
    rounds = max(2, min(_ROUNDS, 1024 // max(sample.tokens, 1)))
    micros = torch.zeros(repeats, len(sides), 3, dtype=torch.float64)
    for repeat in range(repeats):
        for index, side in enumerate(sides):
            dist.barrier(group)
            micros[repeat, index] = _timed_rounds(side, sample, rounds)
        advance()
    for side in sides:
        side.check()
    dist.all_reduce(micros, dist.ReduceOp.MAX, group=group)
    return [Times(*row.tolist()) for row in micros.median(dim=0).values]


def _timed_rounds(side: Layer, sample: Sample, rounds: int) -> torch.Tensor:
    """Microseconds a round [3]: dispatch, combine, both."""
    dispatch = combine = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        handle = side.out()
        middle = time.perf_counter()
        y_TD = side.back(handle)
        combine += time.perf_counter() - middle
        dispatch += middle - start
    sample.check(side.name, y_TD, side.fp8)
    return torch.tensor([dispatch, combine, dispatch + combine], dtype=torch.float64) * 1e6 / rounds
