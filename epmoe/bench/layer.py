"""Times whole MoE layers: route, dispatch, experts and combine, beside the experts alone on the same rows, their floor,
and the layers of peers.

On GPUs graphs.py takes the times, from replays of CUDA graphs. On the CPU they are wall times of rounds after a
barrier. The experts have random weights, and their sizes are those of the configuration. `Precision` lists what is
measured; what a machine cannot do is left out, and the report says why.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from epmoe.bench.floor import copy_bytes_per_us
from epmoe.bench.graphs import measure, slowest
from epmoe.bench.layer_sides import (
    Precision,
    WholeLayer,
    experts_alone,
    problem_with,
    random_experts,
    without_experts,
)
from epmoe.bench.peers import Peer, Peers
from epmoe.bench.report import Job, Line, Report, microseconds, missing
from epmoe.bench.sides import Side
from epmoe.config.config import EPConfig
from epmoe.service import ExpertParallel

TOKENS = (1, 16, 128, 512, 4096)
_MOST_ROUNDS = 8  # of a sample on the CPU; a large T gets fewer
_CAPTION = (
    "µs on the slowest rank, median. layer: route, dispatch, experts and combine; experts: alone, on the same rows; on "
    "top: their difference; exchange: route, dispatch and combine alone. rows: of the busiest rank, gaps included. "
    "floor: to read the weights of experts that have rows at the speed of a copy, or to compute, where that is longer"
)
_UNITS = {
    "tokens": "tokens of a rank",
    "rows": "expert-major rows of the busiest rank, gaps of the alignment included",
    "layer": "µs of route, dispatch, experts and combine on the slowest rank, median",
    "experts": "µs of the experts alone, on the same rows",
    "exchange": "µs of route, dispatch and combine without the experts",
    "on_top": "layer minus experts, µs",
    "floor": "µs to read the weights of experts that have rows at the speed of a copy on this machine, or to compute "
    "at the dense rate, where that is longer; on the slowest rank",
    "peer": "name and version; ours: null",
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
    experts: float | None
    """alone; None of a peer"""
    exchange: float | None
    floor: float
    """of the experts"""
    peer: str | None = None
    """its name and version"""

    @property
    def on_top(self) -> float | None:
        """What the layer takes on top of its experts."""
        return None if self.experts is None else self.layer - self.experts


def report(results: Sequence[Result], left_out: Mapping[str, str], dtype: str) -> Report:
    """The figures of `results`, in ascending T.

    `left_out`: why precisions and peers are missing; `dtype`: the model's.
    """
    names = {precision: precision.replace("plain", dtype) for precision in Precision}
    rows, objects, lines = [], [], []
    points: dict[tuple[Precision, str | None], list[Result]] = {}
    for r in results:
        times = ("–" if us is None else microseconds(us) for us in (r.floor, r.layer, r.experts, r.on_top, r.exchange))
        rows.append([f"{r.tokens}", names[r.precision], r.peer or r.gemm, f"{r.rows:,}", *times])
        objects.append(dataclasses.asdict(r) | {"on_top": r.on_top})
        points.setdefault((r.precision, r.peer), []).append(r)
    for i, ((precision, peer), of) in enumerate(points.items()):
        label = f"{names[precision]}, {peer or 'layer'}"
        lines.append(Line(label, [(r.tokens, r.layer) for r in of], f"C{i}"))
        if not peer:
            experts = [(r.tokens, r.experts) for r in of if r.experts is not None]
            lines.append(Line(f"{names[precision]}, experts", experts, f"C{i}", ":"))
    return Report(
        "layer",
        {"units": _UNITS, "left_out": left_out, "results": objects},
        ("T", "precision", "GEMM", "rows", "floor", "layer", "experts", "on top", "exchange"),
        rows,
        lines,
        _CAPTION + missing(left_out),
        "a layer, µs",
    )


def check(config: EPConfig) -> None:
    """Raise ValueError if `config` has no `model.intermediate_size`, or asks for fp8 rows; `Precision` decides."""
    if config.model.intermediate_size is None:
        raise ValueError("`model.intermediate_size` must be set, to the width of the experts")
    if "fp8" in (config.exchange.payload, config.exchange.combine_payload):
        raise ValueError("`exchange.payload` and `exchange.combine_payload` must be auto: fp8 is one of the precisions")


def run(job: Job, *, peers: Sequence[Peer] = ()) -> Report:
    """Measure each T. Collective.

    `advance` is called once for each T and precision. Raises ValueError as `check`, and RuntimeError if an output is
    wrong; that of a peer leaves the peer out.
    """
    config = job.config
    check(config)
    on_gpus = config.exchange.transport == "nvlink"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    results: list[Result] = []
    others, copy = Peers(peers, "layer", job.group), copy_bytes_per_us(device)
    left_out: dict[str, str] = {}
    for precision in Precision:
        if reason := problem_with(precision, config, device):
            left_out[precision] = reason
            for _ in job.tokens:
                job.advance()
        else:
            results += _measure(job, precision, device, others, copy)
            if on_gpus:
                torch.cuda.empty_cache()  # the next weights need the room
    return report(sorted(results, key=lambda result: result.tokens), left_out | others.left_out, config.model.dtype)


def _measure(job: Job, precision: Precision, device: torch.device, peers: Peers, copy: float) -> list[Result]:
    config, group = job.config, job.group
    experts = random_experts(config, dist.get_rank(group), device, precision)
    results = []
    with ExpertParallel(_fitting(config, precision), group) as ep:
        for T in job.tokens:
            layer = WholeLayer(ep, experts, T, job.routing, group)
            sides = (layer, experts_alone(layer), without_experts(layer))
            whole, alone, exchange = (_round_us(side, T, job) for side in sides)
            layer.check()
            ep.check()
            case = f"{T} tokens, {precision}"
            job.log(f"{case}: layer {whole:.1f} µs, experts {alone:.1f}, exchange {exchange:.1f}")
            rows, floor = slowest([layer.num_rows, layer.floor_us(copy)], group)
            results.append(Result(T, precision, experts.gemm, int(rows), whole, alone, exchange, floor))
            if precision is not Precision.PLAIN_DEEP_GEMM:  # the same case as plain
                time_peer = partial(_round_us, tokens=T, job=job)
                for name, us in peers.layers(layer, precision, time_peer):
                    job.log(f"{case}, {name}: layer {us:.1f} µs")
                    results.append(Result(T, precision, name, int(rows), us, None, None, floor, name))
            del layer, sides
            if device.type == "cuda":
                torch.cuda.empty_cache()  # of the graphs' pools
            job.advance()
    return results


def _fitting(config: EPConfig, precision: Precision) -> EPConfig:
    """`config` with the payload of `precision`."""
    exchange = config.exchange.model_copy(update={"payload": "fp8" if precision is Precision.FP8 else "auto"})
    return config.model_copy(update={"exchange": exchange})


def _round_us(side: Side, tokens: int, job: Job) -> float:
    """Microseconds of a round: the median over replays, or over samples of a few rounds, on the slowest rank."""
    if job.config.exchange.transport == "nvlink":
        return measure(side, job.repeats, job.group).round
    rounds, samples = max(1, min(_MOST_ROUNDS, 256 // max(tokens, 1))), []
    for _ in range(job.repeats):
        dist.barrier(job.group)
        start = time.perf_counter()
        for _ in range(rounds):
            side.back(side.out())
        samples.append((time.perf_counter() - start) * 1e6 / rounds)
    return slowest([statistics.median(samples)], job.group)[0]
