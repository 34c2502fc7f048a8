"""Times rounds over several nodes on the CPU against `all_to_all_single` of (token, expert) pairs, on one network.

Ours sends a token once to each node that needs it: in padded slabs of T slots, in slabs of exact length, and as fp8 in
padded slabs. The pairs go straight to the ranks of their experts. All sides are measured as in epmoe/bench/gloo.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from epmoe.bench.all_to_all import AllToAll
from epmoe.bench.gloo import median_times
from epmoe.bench.report import Line, Times, plot_rounds, write_object
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused, Layer, Pipeline
from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind
from epmoe.service import ExpertParallel

PAIRS, KEPT = "pairs", "pairs, kept buffers"
_OURS: dict[str, dict[str, str]] = {
    "epmoe, padded": {"network_splits": "padded"},
    "epmoe, exact": {"network_splits": "exact"},
    "epmoe, fp8 out": {"network_splits": "padded", "payload": "fp8"},
}
_CAPTION = "µs a round on the slowest rank, median of samples; ratios: the round of pairs / this side's round"
_UNITS = {
    "tokens": "tokens of a rank in a round",
    "dispatch, combine, round": "µs on the slowest rank, median of samples",
    "ratio, ratio_kept": "the round of pairs, and of pairs with kept buffers, divided by this side's",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """All sides, measured at one T (tokens a rank)."""

    tokens: int
    sides: Mapping[str, Times]
    """by name, `PAIRS` and `KEPT` among them"""

    def ratios(self, side: str) -> tuple[float, float]:
        """The time of a round of `PAIRS`, and of `KEPT`, divided by that of `side`."""
        pairs, kept = (self.sides[name].round / self.sides[side].round for name in (PAIRS, KEPT))
        return pairs, kept


@dataclasses.dataclass(frozen=True)
class RailReport:
    """One result for each T."""

    results: Sequence[Result]

    def table(self, title: str = "") -> Table:
        """Microseconds of dispatch, combine and the round for each side, and the ratios of ours."""
        view = Table(title=title, caption=_CAPTION)
        for column in ("T", "side", "dispatch", "combine", "round", "ratio", "ratio, kept"):
            view.add_column(column, justify="left" if column == "side" else "right")
        for result in self.results:
            for index, (name, times) in enumerate(result.sides.items()):
                figures = [f"{value:,.0f}" for value in dataclasses.astuple(times)]
                ratios = [f"{ratio:.1f}x" for ratio in result.ratios(name)] if name in _OURS else []
                view.add_row("" if index else f"{result.tokens}", name, *figures, *ratios)
            view.add_section()
        return view

    def write_json(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """`facts`, `units`, and `results`: one object for each T and side, with its times and ratios."""
        results = [
            {"tokens": result.tokens, "side": name}
            | dataclasses.asdict(times)
            | dict(zip(("ratio", "ratio_kept"), result.ratios(name), strict=True))
            for result in self.results
            for name, times in result.sides.items()
        ]
        write_object({"benchmark": "rail", **(facts or {}), "units": _UNITS, "results": results}, path)

    def plot(self, path: Path, title: str = "") -> None:
        """Every side's time of a round over T, in the format of the file's suffix (.png, .svg, .pdf)."""
        names = self.results[0].sides
        plot_rounds(
            [Line(name, [(r.tokens, r.sides[name].round) for r in self.results]) for name in names], path, title
        )


def run(
    config: EPConfig,
    tokens: Sequence[int],
    repeats: int = 20,
    routing: Kind = "uniform",
    *,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[], object] = lambda: None,
) -> RailReport:
    """Measure each T of `tokens`, for a configuration of several nodes. As `gloo.run`, with the same errors.

    fp8 is left out unless D is a multiple of 128.
    """
    if "fp8" in (config.exchange.payload, config.exchange.combine_payload):
        raise ValueError("`exchange.payload` and `exchange.combine_payload` must be auto: fp8 is a side of its own")
    sections = config.model_dump()
    with ExitStack() as stack:
        ours = {}
        for name, keys in _OURS.items():
            if "payload" not in keys or config.model.hidden_size % 128 == 0:
                changed = EPConfig(**sections | {"exchange": sections["exchange"] | keys})
                ours[name] = stack.enter_context(ExpertParallel(changed, group))
        return RailReport([_measure(ours, T, repeats, routing, advance) for T in tokens])


def _measure(
    ours: Mapping[str, ExpertParallel], tokens: int, repeats: int, routing: Kind, advance: Callable[[], object]
) -> Result:
    ep = next(iter(ours.values()))
    assert ep.group is not None
    sample = Sample(ep.config, ep.rank, tokens, routing, id_dtype=torch.int64)
    padded = ep.config.padded_tokens(tokens)
    sides: list[Layer] = [Fused(one, sample, name, padded) for name, one in ours.items()]
    for name in (PAIRS, KEPT):
        sides.append(Pipeline(AllToAll(ep.placement, ep.group, keep_buffers=name == KEPT), sample, name))
    times = median_times(sides, sample, repeats, ep.group, advance)
    return Result(tokens, {side.name: one for side, one in zip(sides, times, strict=True)})
