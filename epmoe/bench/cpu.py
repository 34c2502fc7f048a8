"""Times rounds of `ExpertParallel` on the CPU, and beside them the same work over gloo's
`all_to_all_single`.

On several nodes epmoe sends a token once to each node that needs it, in slabs with as many slots as
a rank has tokens. It is measured with rows as they are, and with rows in fp8. `all_to_all_single`
sends one row for each pair of a token and an expert, straight to the rank of the expert.

All sides get the same tokens and the same routing, and take turns. The experts' outputs are
computed before the timing, so that only dispatch and combine are timed.
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
# The most rounds in a sample. With many tokens a sample has fewer rounds. Ranks do not leave the
# barrier before a sample at the same moment, and several rounds keep that out of their mean.
_ROUNDS = 16


def run(job: Job) -> Report:
    """Measure all sides for each number of tokens. Collective.

    `job.advance` is called whenever each side has had one more sample. On several nodes fp8 is left
    out unless the hidden size is a multiple of 128. Raises ValueError if the configuration asks for
    an fp8 payload, and RuntimeError if the output of a side is not the weighted sum over the
    token's experts.
    """
    config = job.config
    if config.exchange.quantizes:
        raise ValueError(
            "`exchange.payload` and `exchange.combine_payload` must be auto: gloo sends no fp8 rows"
        )
    # With several nodes, epmoe is also measured with rows in fp8.
    several_nodes = config.topology.num_nodes > 1
    payloads = {"epmoe": Payload.PLAIN}
    if several_nodes and Payload.FP8_OUT in Payload.for_rows(config):
        payloads["epmoe, fp8 out"] = Payload.FP8_OUT
    with ExitStack() as stack:
        exchanges = {}
        for name, payload in payloads.items():
            ep = ExpertParallel(payload.applied(config), job.group)
            exchanges[name] = stack.enter_context(ep)
        times_by_tokens = {T: _measure(exchanges, T, job) for T in job.tokens}
    return report(times_by_tokens, several_nodes=several_nodes)


def report(times_by_tokens: Mapping[int, Mapping[str, Times]], *, several_nodes: bool) -> Report:
    """Make the report of the times, which are given by number of tokens and by side.

    The last two sides are `all_to_all_single`: first with new buffers in each call, then with kept
    buffers. All other times are divided by theirs.
    """
    results: list[Figures] = []
    for T, sides in times_by_tokens.items():
        new_buffers, kept_buffers = list(sides.values())[-2:]
        for side, side_times in sides.items():
            ratios = {
                "ratio": new_buffers.round / side_times.round,
                "ratio_kept": kept_buffers.round / side_times.round,
            }
            results.append({"tokens": T, "side": side, **side_times._asdict(), **ratios})
    return Report("rail" if several_nodes else "gloo", _COLUMNS, results)


def _measure(exchanges: Mapping[str, ExpertParallel], tokens: int, job: Job) -> dict[str, Times]:
    """Measure each side with `tokens` tokens of a rank. `exchanges` are epmoe's, by the name of
    their side. Returns the times by the name of the side. Collective.
    """
    rank = torch.distributed.get_rank(job.group)
    sample = Sample(job.config, rank, tokens, job.routing, id_dtype=torch.int64)
    baseline = "pairs" if job.config.topology.num_nodes > 1 else "gloo"
    rounds = max(2, min(_ROUNDS, 1024 // max(tokens, 1)))
    with ExitStack() as limits:
        # Slabs for other nodes get as many slots as a rank has tokens.
        for ep in exchanges.values():
            limits.enter_context(ep.at_most(tokens))
        # epmoe's sides come first, then the baseline with new buffers and with kept buffers.
        sides: list[ExchangeSide] = [Fused(ep, sample, name) for name, ep in exchanges.items()]
        for name, keep in ((baseline, False), (f"{baseline}, kept buffers", True)):
            sides.append(AllToAll(sample, job.group, name, keep_buffers=keep))
        all_times = measure_in_turns(sides, job.repeats, rounds, job.group, job.advance)
        # Check all sides once more, now that they have been timed.
        for side in sides:
            side.check()
    return {side.name: side_times for side, side_times in zip(sides, all_times, strict=True)}
