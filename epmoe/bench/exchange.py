"""Times a round of `ExpertParallel` against the same work over gloo's `all_to_all_single`, in one run.

All sides get the same tokens and the same routing. A sample is a few rounds back to back after a barrier, with
the experts' output made beforehand, so that nothing but dispatch and combine is timed; samples of the sides
alternate. Times are microseconds a round on the slowest rank, medians over the samples.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from epmoe.bench.all_to_all import AllToAll
from epmoe.bench.report import Line, Times, plot_pairs, write_object
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused, Layer, Pipeline
from epmoe.config import EPConfig
from epmoe.service import ExpertParallel
from epmoe.simulate import Kind

TOKENS = (1, 16, 128, 1024)
_CAPTION = "µs a round on the slowest rank, median of samples; ratio: that pair / epmoe's pair"
_ROUNDS = 16  # in a sample, fewer of many tokens: enough that ranks which leave the barrier apart do not show


@dataclasses.dataclass(frozen=True)
class Result:
    """One number of tokens a rank, T, measured on all sides."""

    tokens: int
    epmoe: Times
    gloo: Times
    gloo_kept: Times
    """gloo with buffers kept from round to round"""

    @property
    def ratio(self) -> float:
        """How many of our rounds fit into one of gloo's."""
        return self.gloo.pair / self.epmoe.pair

    @property
    def ratio_kept(self) -> float:
        """Likewise where gloo's buffers are kept."""
        return self.gloo_kept.pair / self.epmoe.pair


def run(
    config: EPConfig,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 20,
    routing: Kind = "uniform",
    *,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[Result]:
    """One result for each T of `tokens`, the same on all ranks of `group` (default: the world), who all call it.

    `repeats` samples are taken of each side; `advance` is called after each set of them. Raises RuntimeError where
    the output of a side is not the weighted sum that it has to be, ValueError with an fp8 payload.
    """
    if "fp8" in (config.exchange.payload, config.exchange.combine_payload):
        raise ValueError("`exchange.payload` and `exchange.combine_payload` must be auto: gloo sends no fp8 rows")
    with ExpertParallel(config, group) as ep:
        return [_measure(ep, T, repeats, routing, advance) for T in tokens]


def _measure(ep: ExpertParallel, tokens: int, repeats: int, routing: Kind, advance: Callable[[], object]) -> Result:
    assert ep.group is not None  # torchrun's world, or what the caller gave
    given = Sample(ep.config, ep.rank, tokens, routing, id_dtype=torch.int64)
    gloo = [
        Pipeline(AllToAll(ep.placement, ep.group, keep_buffers=keep), given, name)
        for name, keep in (("gloo", False), ("gloo, kept buffers", True))
    ]
    sides: tuple[Layer, ...] = (Fused(ep, given), *gloo)
    rounds = max(2, min(_ROUNDS, 1024 // max(tokens, 1)))
    micros = torch.zeros(repeats, len(sides), 3, dtype=torch.float64)
    for sample in range(repeats):
        for index, side in enumerate(sides):
            dist.barrier(ep.group)
            micros[sample, index] = _timed_rounds(side, given, rounds)
        advance()
    for side in sides:
        side.check()
    dist.all_reduce(micros, dist.ReduceOp.MAX, group=ep.group)
    return Result(tokens, *(Times(*row.tolist()) for row in micros.median(dim=0).values))


def _timed_rounds(side: Layer, given: Sample, rounds: int) -> torch.Tensor:
    """Microseconds a round [3], of dispatch, of combine and of both."""
    dispatch = combine = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        handle = side.out()
        middle = time.perf_counter()
        y_TD = side.back(handle)
        combine += time.perf_counter() - middle
        dispatch += middle - start
    given.check(side.name, y_TD)
    return torch.tensor([dispatch, combine, dispatch + combine], dtype=torch.float64) * 1e6 / rounds


def table(results: Sequence[Result], title: str = "") -> Table:
    """Microseconds each way and both ways, ours and gloo's, and their ratio."""
    view = Table(title=title, caption=_CAPTION)
    for column in ("T", "side", "dispatch", "combine", "pair", "ratio"):
        view.add_column(column, justify="left" if column == "side" else "right")
    for result in results:
        for name, times, ratio in (
            ("epmoe", result.epmoe, ""),
            ("gloo", result.gloo, f"[bold]{result.ratio:.1f}x[/]"),
            ("gloo, kept buffers", result.gloo_kept, f"{result.ratio_kept:.1f}x"),
        ):
            tokens = f"{result.tokens}" if name == "epmoe" else ""
            view.add_row(tokens, name, *(f"{value:,.0f}" for value in dataclasses.astuple(times)), ratio)
        view.add_section()
    return view


def write_json(results: Sequence[Result], path: Path) -> None:
    """A list of one object for each T: `tokens`, the sides with their µs, and the ratios."""
    ratios = ({"ratio": result.ratio, "ratio_kept": result.ratio_kept} for result in results)
    write_object([dataclasses.asdict(result) | ratio for result, ratio in zip(results, ratios, strict=True)], path)


def plot(results: Sequence[Result], path: Path) -> None:
    """Every side's time of a pair over T, in the format of the file's suffix (.png, .svg, .pdf)."""
    lines = [
        Line("gloo all_to_all", [(r.tokens, r.gloo.pair) for r in results]),
        Line("gloo all_to_all, kept buffers", [(r.tokens, r.gloo_kept.pair) for r in results]),
        Line("epmoe", [(r.tokens, r.epmoe.pair) for r in results], [f"{r.ratio:.1f}x" for r in results]),
    ]
    plot_pairs(lines, path)
