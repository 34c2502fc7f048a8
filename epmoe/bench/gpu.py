"""Times rounds of `ExpertParallel` on GPUs, and beside them the machine's floor and NCCL, on the
same routing.

The floor is the simplest kernel that moves the same rows: see `epmoe.bench.floor`. `Contender`
lists all sides. All sides carry rows in the model's dtype; epmoe and the floor also carry fp8 rows.
The output of each side is checked before the timing, after its buffers were filled with NaN.
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
    """one kernel for each direction that stores the rows, sets flags and waits for flags, with the
    number of blocks that is fastest
    """
    ROWS = "rows"
    """NCCL's all_to_all_single of the same rows"""
    RANK_MAJOR = "rank-major"
    """epmoe's exchange alone: rows arrive by source rank, and partial rows go back"""
    FUSED = "fused"
    """epmoe's usual round: rows arrive sorted by expert"""


def report(
    results: Sequence[Figures], left_out: dict[str, str] | None = None, *, eager: bool = False
) -> Report:
    """Make the report of `results`, which are in ascending order of the number of tokens.

    `left_out` says why peers are missing. `eager` says that no CUDA graphs were used.
    """
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
    """Measure all sides for each number of tokens and each payload. Collective.

    With `eager`, rounds are called one after the other instead of replaying CUDA graphs, but for
    the floor. `job.advance` is called after each number of tokens and payload. A peer whose output
    is wrong is left out. Raises RuntimeError if any other output is wrong.
    """
    config = job.config
    group = job.group
    results: list[Figures] = []
    samples: dict[int, Sample] = {}
    window = None
    contest = Contest(peers, "exchange", group)
    # An exchange has one payload, and serves all numbers of tokens.
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
                # Free the memory of this case's graphs, which the next windows need.
                if ep.device.type == "cuda":
                    torch.cuda.empty_cache()
                job.advance()
    ordered = sorted(results, key=lambda result: job.tokens.index(result["tokens"]))
    return report(ordered, contest.left_out, eager=eager)


def result(
    sample: Sample, side: str, payload: Payload, taken: Times, floor_us: float | None
) -> dict[str, Any]:
    """Make the figures of one side, for one row of the table.

    `taken` are its times, and `floor_us` is the floor's round in µs, or None without a floor. Bytes
    are those of the rank that sends or receives most.
    """
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
    """Measure each side with this sample and payload, and yield its figures. Collective."""
    group = contest.group
    floor_us = None
    time = measure_eager if eager else measure

    def row(side: str, taken: Times, **figures: Any) -> Figures:
        # `floor_us` is read when a row is made, so rows behind the floor's have its time.
        return result(sample, side, payload, taken, floor_us) | figures

    def with_host(side: Side) -> dict[str, Any]:
        return {"taken": time(side, repeats, group), "host": host_us(side, group)}

    # The floor goes first, because the other sides are compared with it. It takes the number of
    # blocks that is fastest.
    if window is not None:
        floor = Floor(window, sample, *sample.row_bytes(payload))
        floor.blocks = min(BLOCKS, key=lambda blocks: _floor_us(floor, blocks, repeats, group))
        taken = measure(floor, repeats, group)
        floor_us = taken.round
        yield row(Contender.FLOOR, taken, blocks=floor.blocks)
        floor.raise_if_missed()
    # Then come NCCL, epmoe, and the peers.
    if Contender.ROWS in contenders and payload is Payload.PLAIN:
        yield row(Contender.ROWS, time(rows_alone(sample, group), repeats, group))
    for contender, kind in ((Contender.RANK_MAJOR, RankMajor), (Contender.FUSED, Fused)):
        if contender in contenders:
            yield row(contender, **with_host(kind(ep, sample)))
            ep.check()
    for name, figures in contest.exchanges(sample, payload, with_host):
        yield row(name, **figures)


def _floor_us(floor: Floor, blocks: int, repeats: int, group: dist.ProcessGroup) -> float:
    """Time a round of the floor with `blocks` blocks in µs, by a quarter of the usual samples."""
    floor.blocks = blocks
    return round_us(floor, -(-repeats // 4), group)
