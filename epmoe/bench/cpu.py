"""Times rounds of `ExpertParallel` on the CPU against the same work over `all_to_all_single` of gloo, in one run.

On several nodes ours sends a token once to each node that needs it: in padded slabs of T slots, in slabs of exact
length, and as fp8 in padded slabs. The (token, expert) pairs of `all_to_all_single` go straight to the ranks of their
experts.

All sides get the same tokens and the same routing. The expert outputs are made beforehand, so that only dispatch and
combine are timed. A sample is a few rounds back to back after a barrier; samples of the sides alternate. A figure is
in microseconds a round: the median over samples of the slowest rank.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from epmoe.bench.all_to_all import AllToAll
from epmoe.bench.report import Job, Line, Report, Times
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused, Layer
from epmoe.config.config import EPConfig
from epmoe.service import ExpertParallel

TOKENS = (1, 16, 128, 1024)
_OURS: dict[str, dict[str, str]] = {
    "epmoe, padded": {"network_splits": "padded"},
    "epmoe, exact": {"network_splits": "exact"},
    "epmoe, fp8 out": {"network_splits": "padded", "payload": "fp8"},
}
_UNITS = {
    "tokens": "tokens of a rank in a round",
    "dispatch, combine, round": "µs on the slowest rank, median of samples",
    "ratio, ratio_kept": "the round of all_to_all_single, and of it with kept buffers, divided by this side's",
}
# Most rounds of a sample; a large T gets fewer. The skew with which ranks leave the barrier must not show in the mean.
_ROUNDS = 16


@dataclasses.dataclass(frozen=True)
class Result:
    """All sides, measured at one T (tokens a rank)."""

    tokens: int
    sides: Mapping[str, Times]
    """by name; the last two are the baseline, with fresh buffers and with kept ones"""

    def ratios(self, side: str) -> dict[str, float]:
        """The baseline's time of a round, with fresh buffers and with kept ones, divided by that of `side`."""
        *_, fresh, kept = (times.round for times in self.sides.values())
        us = self.sides[side].round
        return {"ratio": fresh / us, "ratio_kept": kept / us}


def run(job: Job) -> Report:
    """Measure each T. Collective.

    `advance` is called after each set of samples, one of every side. On several nodes fp8 is left out unless D is a
    multiple of 128. Raises ValueError if the configuration asks for an fp8 payload, RuntimeError if the output of a
    side is not the weighted sum over the token's experts.
    """
    config = job.config
    if "fp8" in (config.exchange.payload, config.exchange.combine_payload):
        raise ValueError("`exchange.payload` and `exchange.combine_payload` must be auto: gloo sends no fp8 rows")
    with ExitStack() as stack:
        ours = {
            name: stack.enter_context(ExpertParallel(changed, job.group)) for name, changed in _variants(config).items()
        }
        results = [_measure(ours, T, job) for T in job.tokens]
    return report(results, several_nodes=config.topology.num_nodes > 1)


def report(results: Sequence[Result], *, several_nodes: bool) -> Report:
    """The figures of `results`: in JSON an object for each T on one node, for each T and side on several."""
    rows, objects = [], []
    for result in results:
        for name, times in result.sides.items():
            ratios = result.ratios(name)
            shown = [f"{ratio:.1f}x" if name.startswith("epmoe") else "" for ratio in ratios.values()]
            rows.append([f"{result.tokens}", name, *(f"{us:,.0f}" for us in dataclasses.astuple(times)), *shown])
            objects.append({"tokens": result.tokens, "side": name} | dataclasses.asdict(times) | ratios)
    if not several_nodes:
        objects = [_of_one_node(result) for result in results]
    lines = [Line(name, [(result.tokens, result.sides[name].round) for result in results]) for name in results[0].sides]
    return Report(
        "rail" if several_nodes else "gloo",
        {"units": _UNITS, "results": objects},
        ("T", "side", "dispatch", "combine", "round", "ratio", "ratio, kept"),
        rows,
        lines,
        "µs a round on the slowest rank, median of samples; ratio: the round of all_to_all_single, and of it with kept "
        "buffers, / this side's round",
    )


def _variants(config: EPConfig) -> dict[str, EPConfig]:
    """The configurations of our sides."""
    if config.topology.num_nodes == 1:
        return {"epmoe": config}
    sections = config.model_dump()
    return {
        name: EPConfig(**sections | {"exchange": sections["exchange"] | keys})
        for name, keys in _OURS.items()
        if "payload" not in keys or config.model.hidden_size % 128 == 0
    }


def _of_one_node(result: Result) -> dict[str, Any]:
    names = zip(("epmoe", "gloo", "gloo_kept"), result.sides.values(), strict=True)
    times = {name: dataclasses.asdict(one) for name, one in names}
    return {"tokens": result.tokens} | times | result.ratios("epmoe")


def _measure(ours: Mapping[str, ExpertParallel], tokens: int, job: Job) -> Result:
    ep, group = next(iter(ours.values())), job.group
    several = ep.config.topology.num_nodes > 1
    sample = Sample(ep.config, ep.rank, tokens, job.routing, id_dtype=torch.int64)
    padded = ep.config.padded_tokens(tokens) if several else None
    sides: list[Layer] = [Fused(one, sample, name, padded) for name, one in ours.items()]
    baseline = "pairs" if several else "gloo"
    for name, keep in ((baseline, False), (f"{baseline}, kept buffers", True)):
        sides.append(AllToAll(sample, group, name, keep_buffers=keep))
    rounds = max(2, min(_ROUNDS, 1024 // max(tokens, 1)))
    micros = torch.zeros(job.repeats, len(sides), 3, dtype=torch.float64)
    for repeat in range(job.repeats):
        for index, side in enumerate(sides):
            dist.barrier(group)
            micros[repeat, index] = _timed_rounds(side, sample, rounds)
        job.advance()
    for side in sides:
        side.check()
    dist.all_reduce(micros, dist.ReduceOp.MAX, group=group)
    medians = micros.median(dim=0).values.tolist()
    return Result(tokens, {side.name: Times(*row) for side, row in zip(sides, medians, strict=True)})


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
    sample.check(side.name, y_TD, fp8=side.fp8)
    return torch.tensor([dispatch, combine, dispatch + combine], dtype=torch.float64) * 1e6 / rounds
