"""Times rounds of `ExpertParallel` on GPUs beside the machine's floor and NCCL, on the same routing, in one run.

graphs.py takes the times. `Contender` lists who takes part. All contenders carry rows in the model's dtype; ours and
the floor also carry fp8 rows. Every contender's output is checked first, with its buffers filled with NaN before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from epmoe.bench.floor import BLOCKS, Floor, FloorWindow
from epmoe.bench.graphs import host_us, measure, measure_eager, round_us
from epmoe.bench.peers import Peer, Peers
from epmoe.bench.report import Job, Line, Report, Times, microseconds, missing
from epmoe.bench.sample import Payload, Sample, wire_bytes
from epmoe.bench.sides import Fused, RankMajor, Rows, Side
from epmoe.config.config import EPConfig
from epmoe.service import ExpertParallel

TOKENS = (1, 16, 64, 128, 512, 4096)
_CAPTION = (
    "µs on the slowest rank, median of CUDA-graph replays of 10 rounds. out: dispatch and permute, back: "
    "finalize and combine, both from graphs with events between, about 1 µs more each. "
)
_EAGER_CAPTION = (
    "µs on the slowest rank, median. round: of a chain of 50 rounds called one after the other, without a graph "
    "(floor: with one). out, back: the GPU's alone, with events between, while the host is ahead. "
)
_BOTH_CAPTIONS = (
    "GB/s: unique remote rows of the busiest rank, both ways, over the round. floor: the floor's round with that "
    "payload / this round. host: µs of an eager dispatch + combine"
)

_UNITS = {
    "tokens": "tokens of a rank in a round",
    "times.dispatch, times.combine, times.round": "µs on the slowest rank, median of replays; dispatch and combine "
    "with events between, about 1 µs more each",
    "wire_bytes_out, wire_bytes_back": "bytes between ranks of the busiest rank in a round",
    "remote_rows": "(token, remote rank) combinations of the busiest rank in a round",
    "floor": "µs of the floor's round with the same payload",
    "blocks": "thread blocks of the floor's kernel",
    "host": "µs of the host in an eager dispatch and in an eager combine",
    "wire_gbps": "gigabytes a second, both ways, over the round",
    "floor_percent": "the floor's round as a percentage of this round",
}
_EAGER_UNITS = {
    "times.dispatch, times.combine, times.round": "µs on the slowest rank, median; round: of a chain of eager rounds, "
    "host included; dispatch and combine: the GPU's alone, with events between",
}


class Contender(StrEnum):
    """What is measured."""

    FLOOR = "floor"
    """one kernel each way that stores the rows, raises flags and waits, with the fastest number of blocks"""
    ROWS = "rows"
    """NCCL's all_to_all_single of the same rows"""
    RANK_MAJOR = "rank-major"
    """ours, the exchange alone: rank-major rows out, partial rows back"""
    FUSED = "fused"
    """ours, expert-major"""


@dataclasses.dataclass(frozen=True)
class Result:
    """One contender with one payload at one T (tokens a rank). Bytes and rows are those of the busiest rank."""

    tokens: int
    contender: str
    """a `Contender`, or a peer's name and version"""
    payload: Payload
    times: Times
    wire_bytes_out: int
    wire_bytes_back: int
    remote_rows: int
    """unique (token, remote rank) combinations"""
    floor: float | None
    """microseconds of the floor's round with this payload"""
    blocks: int | None = None
    """of the floor"""
    host: tuple[float, float] | None = None
    """host microseconds of an eager dispatch and of an eager combine"""

    @property
    def wire_gbps(self) -> float:
        """Gigabytes a second, both ways together over the time of the round."""
        return (self.wire_bytes_out + self.wire_bytes_back) / self.times.round * 1e-3

    @property
    def floor_percent(self) -> float | None:
        """The floor's round as a percentage of this round; 100 is as fast as the floor."""
        return None if self.floor is None else 100 * self.floor / self.times.round


def report(results: Sequence[Result], left_out: Mapping[str, str] | None = None, *, eager: bool = False) -> Report:
    """The figures of `results`, in ascending T, with the speed of the wire and the share of the floor.

    `left_out`: why peers are missing.
    """
    rows, objects = [], []
    points: dict[tuple[str, Payload], list[tuple[int, float]]] = {}
    for r in results:
        share = "" if r.floor_percent is None or r.blocks else f"[bold]{r.floor_percent:.0f}%[/]"
        note = f"{r.blocks} blocks" if r.blocks else f"{r.host[0]:.0f} + {r.host[1]:.0f}" if r.host else ""
        times = map(microseconds, dataclasses.astuple(r.times))
        rows.append([f"{r.tokens}", r.contender, r.payload, *times, f"{r.wire_gbps:.0f}", share, note])
        objects.append(dataclasses.asdict(r) | {"wire_gbps": r.wire_gbps, "floor_percent": r.floor_percent})
        points.setdefault((r.contender, r.payload), []).append((r.tokens, r.times.round))
    names = dict.fromkeys([*Contender, *(side for side, _ in points)])
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    dashes = dict(zip(Payload, ("-", "--", ":"), strict=True))
    lines = [
        Line(side if payload is Payload.PLAIN else f"{side}, {payload}", of, colors[side], dashes[payload])
        for (side, payload), of in points.items()
    ]
    content = {"units": _UNITS | (_EAGER_UNITS if eager else {}), "results": objects}
    return Report(
        "eager" if eager else "gpu",
        content | ({"left_out": left_out} if left_out else {}),
        ("T", "side", "payload", "out", "back", "round", "GB/s", "floor", "host"),
        rows,
        lines,
        (_EAGER_CAPTION if eager else _CAPTION) + _BOTH_CAPTIONS + missing(left_out),
    )


def default_payloads(config: EPConfig) -> list[Payload]:
    """All payloads, or plain alone if `hidden_size` is not a multiple of the 128 elements of an fp8 block."""
    return list(Payload) if config.model.hidden_size % 128 == 0 else [Payload.PLAIN]


def run(
    job: Job,
    *,
    contenders: Sequence[Contender] = tuple(Contender),
    payloads: Sequence[Payload] = tuple(Payload),
    peers: Sequence[Peer] = (),
    eager: bool = False,
) -> Report:
    """Measure each T. Collective.

    `eager`: calls one after the other in place of graphs, but for the floor. `advance` is called after each
    (T, payload). Raises RuntimeError if an output is wrong; that of a peer leaves the peer out.
    """
    config, group = job.config, job.group
    results: list[Result] = []
    samples: dict[int, Sample] = {}
    floor_window, others = None, Peers(peers, "exchange", group)
    for payload in payloads:
        with ExpertParallel(_with_payload(config, payload), group) as ep:
            if Contender.FLOOR in contenders and floor_window is None:
                floor_window = FloorWindow(config, ep.rank, group, ep.device)
            for T in job.tokens:
                if T not in samples:
                    samples[T] = Sample(config, ep.rank, T, job.routing, ep.device)
                for result in _measure(ep, others, samples[T], payload, contenders, floor_window, job.repeats, eager):
                    job.log(f"{T} tokens, {payload}, {result.contender}: round {result.times.round:.1f} µs")
                    results.append(result)
                if ep.device.type == "cuda":
                    torch.cuda.empty_cache()  # the graphs' pools would leave the next windows too little memory
                job.advance()
    ordered = sorted(results, key=lambda result: job.tokens.index(result.tokens))
    return report(ordered, others.left_out, eager=eager)


def _with_payload(config: EPConfig, payload: Payload) -> EPConfig:
    out, back = payload.wires
    exchange = config.exchange.model_copy(update={"payload": out, "combine_payload": back})
    return config.model_copy(update={"exchange": exchange})


def _measure(
    ep: ExpertParallel,
    peers: Peers,
    sample: Sample,
    payload: Payload,
    contenders: Sequence[Contender],
    floor_window: FloorWindow | None,
    repeats: int,
    eager: bool,
) -> Iterator[Result]:
    group = peers.group
    out_bytes, back_bytes = (wire_bytes(sample.hidden, sample.dtype, wire) for wire in payload.wires)
    rows_out, rows_back = sample.remote_rows()
    result = partial(
        Result,
        sample.tokens,
        payload=payload,
        wire_bytes_out=rows_out * out_bytes,
        wire_bytes_back=rows_back * back_bytes,
        remote_rows=rows_out,
        floor=None,
    )
    time = measure_eager if eager else measure

    def with_host(side: Side) -> dict[str, Any]:
        return {"times": time(side, repeats, group), "host": host_us(side, group)}

    if floor_window is not None:
        side = Floor(floor_window, sample, out_bytes, back_bytes)
        side.blocks = min(BLOCKS, key=lambda blocks: _floor_us(side, blocks, repeats, group))
        times = measure(side, repeats, group)
        result = partial(result, floor=times.round)
        yield result(Contender.FLOOR, times=times, blocks=side.blocks)
        side.raise_if_missed()
    if Contender.ROWS in contenders and payload is Payload.PLAIN:
        yield result(Contender.ROWS, times=time(Rows(sample, group), repeats, group))
    for contender, kind in ((Contender.RANK_MAJOR, RankMajor), (Contender.FUSED, Fused)):
        if contender in contenders:
            yield result(contender, **with_host(kind(ep, sample)))
            ep.check()
    for name, figures in peers.exchanges(sample, payload, with_host):
        yield result(name, **figures)


def _floor_us(side: Floor, blocks: int, repeats: int, group: dist.ProcessGroup) -> float:
    side.blocks = blocks
    return round_us(side, -(-repeats // 4), group)
