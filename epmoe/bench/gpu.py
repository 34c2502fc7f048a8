"""Times rounds of `ExpertParallel` on GPUs against the machine's floor and NCCL, on the same
routing, in one run.

`Contender` lists who takes part. All contenders carry rows in the model's dtype; ours and the floor
also carry fp8 rows. Every contender's output is checked first, with its buffers filled with NaN
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from epmoe.bench.floor import BLOCKS, Floor, FloorWindow
from epmoe.bench.peers import Contest, Peer
from epmoe.bench.report import SIDE, TOKENS, Column, Figures, Job, Report, times
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import Fused, RankMajor, Side, rows_alone
from epmoe.bench.timing import Times, host_us, measure, measure_eager, round_us
from epmoe.service import ExpertParallel

DEFAULT_TOKENS = (1, 16, 64, 128, 512, 4096)
_CAPTURED = times(
    "from graphs with events between, about 1 µs more",
    "µs on the slowest rank, median of graphs of 10",
)
_EAGER = times(
    "of the GPU alone, with events between, while the host is ahead",
    "µs on the slowest rank, median of chains of 50 calls without a graph (floor: with one)",
)
_COLUMNS = (
    Column(
        "wire_gbps",
        "GB/s",
        "unique remote rows of the busiest rank, both ways, over the round",
        "{:.0f}".format,
    ),
    Column(
        "floor_percent",
        "floor",
        "the floor's round as a percentage of this round",
        "{:.0f}%".format,
    ),
    Column(
        "host",
        "host",
        "µs of the host in an eager dispatch + combine",
        lambda us: "{:.0f} + {:.0f}".format(*us),
    ),
    Column("blocks", "blocks", "thread blocks of the floor's kernel"),
    Column("wire_bytes_out", "", "bytes between ranks that the busiest rank sends in dispatch"),
    Column("wire_bytes_back", "", "bytes between ranks that the busiest rank sends in combine"),
)


class Contender(StrEnum):
    """A side that is measured."""

    FLOOR = "floor"
    """one kernel each way that stores the rows, raises flags and waits, with the fastest number of
    blocks
    """
    ROWS = "rows"
    """NCCL's all_to_all_single of the same rows"""
    RANK_MAJOR = "rank-major"
    """ours, the exchange alone: rank-major rows out, partial rows back"""
    FUSED = "fused"
    """ours, expert-major"""


def report(
    results: Sequence[Figures], left_out: dict[str, str] | None = None, *, eager: bool = False
) -> Report:
    """The figures of `results`, in ascending T. `left_out`: why peers are missing."""
    columns = (
        TOKENS,
        SIDE,
        Column("payload", "payload"),
        *(_EAGER if eager else _CAPTURED),
        *_COLUMNS,
    )
    return Report("eager" if eager else "gpu", columns, results, left_out or {})


def run(
    job: Job,
    *,
    contenders: Sequence[Contender] = tuple(Contender),
    payloads: Sequence[Payload] = tuple(Payload),
    peers: Sequence[Peer] = (),
    eager: bool = False,
) -> Report:
    """Measure each T. Collective.

    `eager`: calls one after the other in place of graphs, but for the floor. `advance` is called
    after each (T, payload). Raises RuntimeError if an output is wrong; that of a peer leaves the
    peer out.
    """
    config = job.config
    group = job.group
    results: list[Figures] = []
    samples: dict[int, Sample] = {}
    window = None
    contest = Contest(peers, "exchange", group)
    # An exchange has one payload, and serves all T.
    for payload in payloads:
        with ExpertParallel(payload.applied(config), group) as ep:
            if Contender.FLOOR in contenders and window is None:
                window = FloorWindow(config, ep.rank, group, ep.device)
            for T in job.tokens:
                if T not in samples:
                    samples[T] = Sample(config, ep.rank, T, job.routing, ep.device)
                for row in _measure(
                    ep, contest, samples[T], payload, contenders, window, job.repeats, eager
                ):
                    job.log(f"{T} tokens, {payload}, {row['side']}: round {row['round']:.1f} µs")
                    results.append(row)
                # The graphs' pools would leave the next windows too little memory.
                if ep.device.type == "cuda":
                    torch.cuda.empty_cache()
                job.advance()
    ordered = sorted(results, key=lambda result: job.tokens.index(result["tokens"]))
    return report(ordered, contest.left_out, eager=eager)


def result(
    sample: Sample, side: str, payload: Payload, taken: Times, floor_us: float | None
) -> dict[str, Any]:
    """Make one row of figures. Bytes are those of the busiest rank."""
    out, back = sample.row_bytes(payload)
    bytes_out = int(sample.remote_RR.sum(dim=1).max()) * out
    bytes_back = int(sample.remote_RR.sum(dim=0).max()) * back
    return {
        "tokens": sample.tokens,
        "side": side,
        "payload": payload,
        **taken._asdict(),
        "wire_bytes_out": bytes_out,
        "wire_bytes_back": bytes_back,
        "wire_gbps": (bytes_out + bytes_back) / taken.round * 1e-3,
        "floor_percent": None if floor_us is None else 100 * floor_us / taken.round,
    }


def _measure(
    ep: ExpertParallel,
    contest: Contest,
    sample: Sample,
    payload: Payload,
    contenders: Sequence[Contender],
    window: FloorWindow | None,
    repeats: int,
    eager: bool,
) -> Iterator[Figures]:
    """Measure each contender in this case. Collective."""
    group = contest.group
    floor_us = None
    time = measure_eager if eager else measure

    def row(side: str, taken: Times, **figures: Any) -> Figures:
        return result(sample, side, payload, taken, floor_us) | figures

    def with_host(side: Side) -> dict[str, Any]:
        return {"taken": time(side, repeats, group), "host": host_us(side, group)}

    # The floor goes first: the others are compared with it.
    if window is not None:
        floor = Floor(window, sample, *sample.row_bytes(payload))
        floor.blocks = min(BLOCKS, key=lambda blocks: _floor_us(floor, blocks, repeats, group))
        taken = measure(floor, repeats, group)
        floor_us = taken.round
        yield row(Contender.FLOOR, taken, blocks=floor.blocks)
        floor.raise_if_missed()
    # NCCL, ours, and peers.
    if Contender.ROWS in contenders and payload is Payload.PLAIN:
        yield row(Contender.ROWS, time(rows_alone(sample, group), repeats, group))
    for contender, kind in ((Contender.RANK_MAJOR, RankMajor), (Contender.FUSED, Fused)):
        if contender in contenders:
            yield row(contender, **with_host(kind(ep, sample)))
            ep.check()
    for name, figures in contest.exchanges(sample, payload, with_host):
        yield row(name, **figures)


def _floor_us(floor: Floor, blocks: int, repeats: int, group: dist.ProcessGroup) -> float:
    floor.blocks = blocks
    return round_us(floor, -(-repeats // 4), group)
