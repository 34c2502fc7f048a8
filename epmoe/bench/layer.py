"""Times whole MoE layers: route, dispatch, experts and combine, beside the experts alone on the same rows.

On GPUs graphs.py takes the times, from replays of CUDA graphs. On the CPU they are wall times of rounds after a
barrier. The experts have random weights, and their sizes are those of the configuration. `Precision` lists what is
measured; what a machine cannot do is left out, and the report says why.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from epmoe.bench.graphs import measure, slowest
from epmoe.bench.layer_sides import (
    ExpertsAlone,
    Precision,
    WholeLayer,
    WithoutExperts,
    problem_with,
    random_experts,
)
from epmoe.bench.report import Line, Report, microseconds
from epmoe.bench.sides import Side
from epmoe.config.config import EPConfig
from epmoe.local.simulate import Kind
from epmoe.service import ExpertParallel

TOKENS = (1, 16, 128, 512, 4096)
_MOST_ROUNDS = 8  # of a sample on the CPU; a large T gets fewer
_CAPTION = (
    "µs on the slowest rank, median. layer: route, dispatch, experts and combine; experts: alone, on the same rows; on "
    "top: their difference; exchange: route, dispatch and combine alone. rows: of the busiest rank, gaps included"
)
_UNITS = {
    "tokens": "tokens of a rank",
    "rows": "expert-major rows of the busiest rank, gaps of the alignment included",
    "layer": "µs of route, dispatch, experts and combine on the slowest rank, median",
    "experts": "µs of the experts alone, on the same rows",
    "exchange": "µs of route, dispatch and combine without the experts",
    "on_top": "layer minus experts, µs",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """One precision at one T (tokens a rank); times in microseconds on the slowest rank."""

    tokens: int
    precision: Precision
    gemm: str
    """of `GroupedExperts`"""
    rows: int
    """of the busiest rank"""
    layer: float
    experts: float
    exchange: float

    @property
    def on_top(self) -> float:
        """What the layer takes on top of its experts."""
        return self.layer - self.experts


def report(results: Sequence[Result], left_out: Mapping[Precision, str], dtype: str) -> Report:
    """The figures of `results`, in ascending T. `left_out`: why other precisions are missing; `dtype`: the model's."""
    names = {precision: precision.replace("plain", dtype) for precision in Precision}
    rows, objects, lines = [], [], []
    for r in results:
        times = map(microseconds, (r.layer, r.experts, r.on_top, r.exchange))
        rows.append([f"{r.tokens}", names[r.precision], r.gemm, f"{r.rows:,}", *times])
        objects.append(dataclasses.asdict(r) | {"on_top": r.on_top})
    for i, precision in enumerate(Precision):
        if of := [r for r in results if r.precision is precision]:
            lines.append(Line(f"{names[precision]}, layer", [(r.tokens, r.layer) for r in of], f"C{i}"))
            lines.append(Line(f"{names[precision]}, experts", [(r.tokens, r.experts) for r in of], f"C{i}", ":"))
    return Report(
        "layer",
        {"units": _UNITS, "left_out": left_out, "results": objects},
        ("T", "precision", "GEMM", "rows", "layer", "experts", "on top", "exchange"),
        rows,
        lines,
        "\n".join([_CAPTION, *(f"{name} was left out: {reason}" for name, reason in left_out.items())]),
        "a layer, µs",
    )


def check(config: EPConfig) -> None:
    """Raise ValueError if `config` has no `model.intermediate_size`, or asks for fp8 rows; `Precision` decides."""
    if config.model.intermediate_size is None:
        raise ValueError("`model.intermediate_size` must be set, to the width of the experts")
    if "fp8" in (config.exchange.payload, config.exchange.combine_payload):
        raise ValueError("`exchange.payload` and `exchange.combine_payload` must be auto: fp8 is one of the precisions")


def run(
    config: EPConfig,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 20,
    routing: Kind = "uniform",
    *,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[], object] = lambda: None,
) -> Report:
    """Measure each T of `tokens`. Collective over `group` (default: the world); all ranks pass the same arguments.

    `repeats` is the number of samples, or of replays. `advance` is called once for each T and precision. Raises
    ValueError as `check`, and RuntimeError if an output is wrong.
    """
    check(config)
    group = group or dist.group.WORLD
    assert group is not None  # the world that torchrun started
    on_gpus = config.exchange.transport == "nvlink"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    results: list[Result] = []
    left_out: dict[Precision, str] = {}
    for precision in Precision:
        if reason := problem_with(precision, config, device):
            left_out[precision] = reason
            for _ in tokens:
                advance()
        else:
            results += _measure(config, precision, device, tokens, repeats, routing, group, advance)
            if on_gpus:
                torch.cuda.empty_cache()  # the next weights need the room
    return report(sorted(results, key=lambda result: result.tokens), left_out, config.model.dtype)


def _measure(
    config: EPConfig,
    precision: Precision,
    device: torch.device,
    tokens: Sequence[int],
    repeats: int,
    routing: Kind,
    group: dist.ProcessGroup,
    advance: Callable[[], object],
) -> list[Result]:
    experts = random_experts(config, dist.get_rank(group), device, precision)
    results = []
    with ExpertParallel(_fitting(config, precision), group) as ep:
        for T in tokens:
            layer = WholeLayer(ep, experts, T, routing, group)
            sides = (layer, ExpertsAlone(layer), WithoutExperts(layer))
            times = [_round_us(side, repeats, T, device, group) for side in sides]
            layer.check()
            ep.check()
            rows = int(slowest([layer.num_rows], group)[0])
            results.append(Result(T, precision, experts.gemm, rows, *times))
            del layer, sides
            if device.type == "cuda":
                torch.cuda.empty_cache()  # of the graphs' pools
            advance()
    return results


def _fitting(config: EPConfig, precision: Precision) -> EPConfig:
    """`config` with the payload of `precision`."""
    exchange = config.exchange.model_copy(update={"payload": "fp8" if precision is Precision.FP8 else "auto"})
    return config.model_copy(update={"exchange": exchange})


def _round_us(side: Side, repeats: int, tokens: int, device: torch.device, group: dist.ProcessGroup) -> float:
    """Microseconds of a round: the median over replays, or over samples of a few rounds, on the slowest rank."""
    if device.type == "cuda":
        return measure(side, repeats, group).round
    rounds, samples = max(1, min(_MOST_ROUNDS, 256 // max(tokens, 1))), []
    for _ in range(repeats):
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(rounds):
            side.back(side.out())
        samples.append((time.perf_counter() - start) * 1e6 / rounds)
    return slowest([statistics.median(samples)], group)[0]
