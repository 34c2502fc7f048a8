"""Times whole MoE layers, from logits to y, and their experts alone on the same rows. Beside them
stand the least time that the hardware allows, and the layers of peers.

The experts have random weights, and their sizes are those of the configuration. Each `Precision` is
measured. A precision that this machine cannot compute is left out, and the report says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from epmoe.bench.layer_sides import (
    OF_FP8_ROWS,
    Precision,
    WholeLayer,
    copy_bytes_per_us,
    experts_alone,
    problem_with,
    random_experts,
    without_experts,
)
from epmoe.bench.peers import Contest, Peer
from epmoe.bench.report import SIDE, TOKENS, Column, Figures, Job, Report, microseconds
from epmoe.bench.sample import Payload
from epmoe.bench.sides import Side
from epmoe.bench.timing import round_us, slowest
from epmoe.config.config import EPConfig
from epmoe.service import ExpertParallel

DEFAULT_TOKENS = (1, 16, 128, 512, 4096)
# The most rounds in a sample on the CPU. With many tokens a sample has fewer rounds.
_MOST_ROUNDS = 8
_FIGURES = (
    Column("rows", "rows", "of the busiest rank, gaps of the alignment included", "{:,}".format),
    Column(
        "floor",
        "floor",
        (
            "µs to read the weights of experts that have rows at the speed of a copy, or to "
            "compute, where that is longer"
        ),
        microseconds,
    ),
    Column(
        "layer",
        "layer",
        "µs of route, dispatch, experts and combine on the slowest rank, median",
        microseconds,
    ),
    Column("experts", "experts", "µs of the experts alone, on the same rows", microseconds),
    Column("on_top", "on top", "layer minus experts", microseconds),
    Column("exchange", "exchange", "µs of route, dispatch and combine alone", microseconds),
)


def report(results: Sequence[Figures], left_out: Mapping[str, str], dtype: str) -> Report:
    """Make the report of `results`, which are in ascending order of the number of tokens.

    `left_out` says why precisions and peers are missing. `dtype` is that of the model, which the
    table shows in place of the word "plain".
    """
    precision = Column(
        "precision", "precision", show=lambda name: name.replace(Precision.PLAIN, dtype)
    )
    columns = (TOKENS, precision, SIDE, *_FIGURES)
    return Report(
        "layer", columns, results, left_out, plotted=("layer", "experts"), what="a layer, µs"
    )


def check(config: EPConfig) -> None:
    """Raise ValueError if `config` has no `model.intermediate_size`, or asks for fp8 rows;
    `Precision` decides.
    """
    if config.model.intermediate_size is None:
        raise ValueError("`model.intermediate_size` must be set, to the width of the experts")
    if config.exchange.quantizes:
        raise ValueError(
            "`exchange.payload` and `exchange.combine_payload` must be auto: fp8 is one of the "
            "precisions"
        )


def run(job: Job, *, peers: Sequence[Peer] = ()) -> Report:
    """Measure the layer for each number of tokens, in each precision. Collective.

    `job.advance` is called once for each number of tokens and precision. A peer whose output is
    wrong is left out. Raises the errors of `check`, and RuntimeError if an output of epmoe is
    wrong.
    """
    check(job.config)
    device = torch.device("cpu")
    if job.on_gpus:
        device = torch.device("cuda", torch.cuda.current_device())
    results: list[Figures] = []
    contest = Contest(peers, "layer", job.group)
    copy = copy_bytes_per_us(device)
    left_out: dict[str, str] = {}
    for precision in Precision:
        reason = problem_with(precision, job.config, device)
        if reason:
            left_out[precision] = reason
            for _ in job.tokens:
                job.advance()
        else:
            results += _measure(job, precision, device, contest, copy)
            # Free the memory, which the weights of the next precision need.
            if job.on_gpus:
                torch.cuda.empty_cache()
    ordered = sorted(results, key=lambda result: result["tokens"])
    return report(ordered, left_out | contest.left_out, job.config.model.dtype)


def _measure(
    job: Job, precision: Precision, device: torch.device, contest: Contest, copy: float
) -> list[Figures]:
    """Measure one precision for each number of tokens. Collective. `copy` is the speed of memory in
    bytes a µs.
    """
    config = job.config
    group = job.group
    experts = random_experts(config, dist.get_rank(group), device, precision)
    results: list[Figures] = []
    payload = Payload.FP8_OUT if precision in OF_FP8_ROWS else Payload.PLAIN
    with ExpertParallel(payload.applied(config), group) as ep:
        for T in job.tokens:
            # Time epmoe's layer, its experts alone, and the layer without them. The layer is
            # checked when it is made, and once more behind the timing.
            layer = WholeLayer(ep, experts, T, job.routing, group)
            sides = (layer, experts_alone(layer), without_experts(layer))
            whole, alone, exchange = (_round_us(side, T, job) for side in sides)
            layer.check()
            ep.check()
            job.log(
                f"{T} tokens, {precision}: layer {whole:.1f} µs, experts {alone:.1f}, exchange "
                f"{exchange:.1f}"
            )
            rows, floor = slowest([layer.num_rows, layer.floor_us(copy)], group)
            case: dict[str, Any] = {
                "tokens": T,
                "precision": precision,
                "rows": int(rows),
                "floor": floor,
            }
            ours = {"layer": whole, "experts": alone, "on_top": whole - alone, "exchange": exchange}
            results.append(case | {"side": f"epmoe, {experts.gemm}"} | ours)
            # Time the peers, in the precisions that they take.
            if precision in (Precision.PLAIN, Precision.FP8):
                time_peer = partial(_round_us, tokens=T, job=job)
                for name, us in contest.layers(layer, precision, time_peer):
                    job.log(f"{T} tokens, {precision}, {name}: layer {us:.1f} µs")
                    results.append(case | {"side": name, "layer": us})
            # Free the memory of this case's graphs, which the next case needs.
            del layer, sides
            if job.on_gpus:
                torch.cuda.empty_cache()
            job.advance()
    return results


def _round_us(side: Side, tokens: int, job: Job) -> float:
    """Time a round of `side` in µs: with CUDA graphs on GPUs, by the wall clock on the CPU."""
    if job.on_gpus:
        return round_us(side, job.repeats, job.group)
    rounds = max(1, min(_MOST_ROUNDS, 256 // max(tokens, 1)))
    return round_us(side, job.repeats, job.group, rounds=rounds, how="cpu")
