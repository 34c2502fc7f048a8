"""Times rounds of `ExpertParallel` on the CPU against the same work over `all_to_all_single` of
gloo, in one run.

On several nodes ours sends a token once to each node that needs it, in slabs of T slots, as it is
and as fp8. The (token, expert) pairs of `all_to_all_single` go straight to the ranks of their
experts.

All sides get the same tokens and the same routing, and take turns. The expert outputs are made
beforehand, so that only dispatch and combine are timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from epmoe.bench.report import SIDE, TOKENS, Column, Figures, Job, Report, times
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import AllToAll, ExchangeSide, Fused
from epmoe.bench.timing import Times, measure_in_turns
from epmoe.service import ExpertParallel

DEFAULT_TOKENS = (1, 16, 128, 1024)
_COLUMNS = (
    TOKENS,
    SIDE,
    *times("µs on the slowest rank", "both, the median of samples"),
    Column(
        "ratio", "ratio", "the round of all_to_all_single divided by this side's", "{:.1f}x".format
    ),
    Column(
        "ratio_kept",
        "ratio, kept",
        "the same, where all_to_all_single keeps its buffers",
        "{:.1f}x".format,
    ),
)
# Most rounds of a sample; a large T gets fewer. The skew with which ranks leave the barrier must
# not show in the mean.
_ROUNDS = 16


def run(job: Job) -> Report:
    """Measure each T. Collective.

    `advance` is called after each set of samples, one of every side. On several nodes fp8 is left
    out unless D is a multiple of 128. Raises ValueError if the configuration asks for an fp8
    payload, RuntimeError if the output of a side is not the weighted sum over the token's experts.
    """
    config = job.config
    if config.exchange.quantizes:
        raise ValueError(
            "`exchange.payload` and `exchange.combine_payload` must be auto: gloo sends no fp8 rows"
        )
    # With several nodes, ours is measured in fp8, too.
    several = config.topology.num_nodes > 1
    payloads = {"epmoe": Payload.PLAIN}
    if several and Payload.FP8_OUT in Payload.for_rows(config):
        payloads["epmoe, fp8 out"] = Payload.FP8_OUT
    with ExitStack() as stack:
        ours = {}
        for name, payload in payloads.items():
            ep = ExpertParallel(payload.applied(config), job.group)
            ours[name] = stack.enter_context(ep)
        taken = {T: _measure(ours, T, job) for T in job.tokens}
    return report(taken, several_nodes=several)


def report(taken: Mapping[int, Mapping[str, Times]], *, several_nodes: bool) -> Report:
    """Make the figures of each T by side. The last two sides are the baseline, with fresh buffers
    and with kept ones.
    """
    results: list[Figures] = []
    for T, sides in taken.items():
        *_, fresh, kept = sides.values()
        for side, of_side in sides.items():
            ratios = {
                "ratio": fresh.round / of_side.round,
                "ratio_kept": kept.round / of_side.round,
            }
            results.append({"tokens": T, "side": side, **of_side._asdict(), **ratios})
    return Report("rail" if several_nodes else "gloo", _COLUMNS, results)


def _measure(ours: Mapping[str, ExpertParallel], tokens: int, job: Job) -> dict[str, Times]:
    """Measure the times of each side, by its name, for T tokens of a rank."""
    rank = torch.distributed.get_rank(job.group)
    sample = Sample(job.config, rank, tokens, job.routing, id_dtype=torch.int64)
    baseline = "pairs" if job.config.topology.num_nodes > 1 else "gloo"
    rounds = max(2, min(_ROUNDS, 1024 // max(tokens, 1)))
    with ExitStack() as bounds:
        for ep in ours.values():
            bounds.enter_context(ep.at_most(tokens))
        # Ours, and the baseline with fresh buffers and with kept ones.
        sides: list[ExchangeSide] = [Fused(ep, sample, name) for name, ep in ours.items()]
        for name, keep in ((baseline, False), (f"{baseline}, kept buffers", True)):
            sides.append(AllToAll(sample, job.group, name, keep_buffers=keep))
        taken = measure_in_turns(sides, job.repeats, rounds, job.group, job.advance)
        for side in sides:
            side.check()
    return {side.name: of_side for side, of_side in zip(sides, taken, strict=True)}
