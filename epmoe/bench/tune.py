"""Finds the fastest launch of the exchange's kernels on this machine for each number of tokens.

The search starts from the launch that the kernels choose by themselves. It varies one parameter at a time, with the
parameters before it at their best values. Each launch is timed over rounds of the fused pipeline, as in timing.py, and
its output is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from epmoe.bench.report import TOKENS, Column, Figures, Job, Report, microseconds
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused
from epmoe.bench.timing import round_us
from epmoe.config.tuning import Launch, Tuning, TuningRow
from epmoe.exchange import memory
from epmoe.service import ExpertParallel

# Senders are given in eighths of the multiprocessors. A kernel has one or two blocks on each, so that the grid goes up
# to 8 eighths for LL and to 14 for Simple.
_Grid = dict[str, tuple[int, ...]]
_LL: _Grid = {"combine_senders": (3, 4, 5, 6, 8), "dispatch_senders": (1, 2, 3, 4, 5)}  # LL has no warp teams
_SIMPLE: _Grid = {
    "combine_team": (1, 2, 4, 8, 16),
    "combine_senders": (8, 10, 12, 14),
    "dispatch_senders": (8, 10, 12, 14),
}


_COLUMNS = (
    TOKENS,
    *(Column(name, name.replace("_", " "), "0: the kernels choose", str) for name in Launch.model_fields),
    Column("round", "round", "µs on the slowest rank", microseconds),
    Column("untuned", "untuned", "µs of a round with the launch that the kernels choose", microseconds),
)


def launches(tokens: Sequence[int]) -> int:
    """How many launches `run` tries for these numbers of tokens."""
    return sum(1 + sum(map(len, _grid(T).values())) for T in tokens)


def run(job: Job) -> Report:
    """Tune each T. Collective. `advance` is called after each launch. Raises RuntimeError if an output is wrong."""
    config = job.config
    results = list[Figures]()
    with ExpertParallel(config, job.group) as ep:
        for T in sorted(job.tokens):
            side = Fused(ep, Sample(config, ep.rank, T, job.routing, ep.device))
            own = TuningRow(tokens=T, hidden_size=config.model.hidden_size, ranks=ep.size)
            untuned_us = _round_us(ep, side, own, job)
            job.advance()
            best, least_us = own, untuned_us
            for name, values in _values(T, ep.device):
                start = best
                for value in values:
                    row = start.model_copy(update={name: value})
                    if (us := _round_us(ep, side, row, job)) < least_us:
                        best, least_us = row, us
                    job.advance()
            results.append({**best.model_dump(), "round": least_us, "untuned": untuned_us})
    return report(results)


def report(results: Sequence[Figures]) -> Report:
    """The launch for each T, the time of its round, and the time untuned. The file is what `exchange.tuning` names."""
    rows = [{key: result[key] for key in TuningRow.model_fields} for result in results]
    return Report("tune", _COLUMNS, results, plotted=("untuned", "round"), file={"rows": rows})


def _grid(tokens: int) -> _Grid:
    return _LL if tokens <= memory.LL_MAX_TOKENS else _SIMPLE


def _values(tokens: int, device: torch.device) -> Iterator[tuple[str, list[int]]]:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for name, values in _grid(tokens).items():
        yield name, [processors * value // 8 if name.endswith("senders") else value for value in values]


def _round_us(ep: ExpertParallel, side: Fused, row: TuningRow, job: Job) -> float:
    ep.retune(Tuning(rows=(row,)))
    side.check()
    return round_us(side, job.repeats, job.group)
