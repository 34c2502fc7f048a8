"""Times rounds of `ExpertParallel` on GPUs beside the machine's floor and NCCL, on the same routing, in one run.

How a figure comes about: graphs.py. Who takes part, each with rows as the model has them, ours and the floor also with
fp8 rows: `Contender`. Outputs are checked first, over buffers that were filled with NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from epmoe.bench.all_to_all import AllToAll
from epmoe.bench.floor import BLOCKS, Floor, FloorWindow
from epmoe.bench.graphs import host_us, measure, pair_us
from epmoe.bench.report import Line, Times, plot_pairs, write_object
from epmoe.bench.sample import Sample, wire_bytes
from epmoe.bench.sides import Apart, Fused, Pipeline, RankMajor, Rows, Side
from epmoe.config import EPConfig
from epmoe.service import ExpertParallel
from epmoe.simulate import Kind

TOKENS = (1, 16, 64, 128, 512, 4096)
_CAPTION = (
    "µs on the slowest rank, median of CUDA-graph replays of 10 pairs (pipeline: of eager pairs). out, back: dispatch "
    "and combine with what belongs to them, from graphs with events between, about 1 µs more each. GB/s: unique remote "
    "rows of the busiest rank, both ways, over the pair. floor: its pair with that payload / this pair. host: µs of an "
    "eager dispatch + combine"
)


class Contender(StrEnum):
    """What is measured."""

    FLOOR = "floor"
    """one kernel each way that stores the rows, raises flags and waits; the best number of blocks"""
    ROWS = "rows"
    """NCCL's all_to_all_single of the same rows"""
    PIPELINE = "pipeline"
    """sort, all_to_all_single, permute; finalize, all_to_all_single, sum"""
    RANK_MAJOR = "rank-major"
    """ours, the exchange only: rank-major rows, and partial rows back"""
    APART = "apart"
    """ours, rank-major, with permute and finalize of their own"""
    FUSED = "fused"
    """ours, expert-major"""


class Payload(StrEnum):
    """How rows travel."""

    PLAIN = "plain"
    FP8_OUT = "fp8-out"
    FP8_BOTH = "fp8-both"

    @property
    def wires(self) -> tuple[str, str]:
        """exchange.payload and exchange.combine_payload."""
        return "auto" if self is Payload.PLAIN else "fp8", "fp8" if self is Payload.FP8_BOTH else "auto"


@dataclasses.dataclass(frozen=True)
class Result:
    """One contender with one payload at one T. Bytes are those of the busiest rank, floor the pair of the floor."""

    tokens: int
    contender: Contender
    payload: Payload
    times: Times
    wire_bytes_out: int
    wire_bytes_back: int
    remote_rows: int
    """unique (token, remote rank) pairs of the busiest rank"""
    floor: float | None
    blocks: int | None = None
    """of the floor"""
    host: tuple[float, float] | None = None
    """microseconds of an eager dispatch and combine"""

    @property
    def wire_gbps(self) -> float:
        """Gigabytes a second over both ways."""
        return (self.wire_bytes_out + self.wire_bytes_back) / self.times.pair * 1e-3

    @property
    def floor_percent(self) -> float | None:
        """100 at the floor."""
        return None if self.floor is None else 100 * self.floor / self.times.pair


def default_payloads(config: EPConfig) -> list[Payload]:
    """All, or the plain one where a row is not made of whole blocks of fp8."""
    return list(Payload) if config.model.hidden_size % 128 == 0 else [Payload.PLAIN]


def run(
    config: EPConfig,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 20,
    routing: Kind = "uniform",
    *,
    contenders: Sequence[Contender] = tuple(Contender),
    payloads: Sequence[Payload] = tuple(Payload),
    group: dist.ProcessGroup | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[Result]:
    """By T, the same on all ranks of `group` (default: the world), which all call it.

    `repeats` replays are taken of each graph; `advance` is called for each T and payload. Raises RuntimeError where an
    output is wrong.
    """
    group = group or dist.group.WORLD
    assert group is not None  # torchrun's
    results: list[Result] = []
    samples: dict[int, Sample] = {}
    floor_window = None
    for payload in payloads:
        with ExpertParallel(_with_payload(config, payload), group) as ep:
            if Contender.FLOOR in contenders and floor_window is None:
                floor_window = FloorWindow(config, ep.rank, group, ep.device)
            for T in tokens:
                if T not in samples:
                    samples[T] = Sample(config, ep.rank, T, routing, ep.device)
                results += _measure(ep, group, samples[T], payload, contenders, floor_window, repeats)
                torch.cuda.empty_cache()  # pools of the graphs, which windows would find missing
                advance()
    return sorted(results, key=lambda result: tokens.index(result.tokens))


def _with_payload(config: EPConfig, payload: Payload) -> EPConfig:
    out, back = payload.wires
    exchange = config.exchange.model_copy(update={"payload": out, "combine_payload": back})
    return config.model_copy(update={"exchange": exchange})


def _measure(
    ep: ExpertParallel,
    group: dist.ProcessGroup,
    sample: Sample,
    payload: Payload,
    contenders: Sequence[Contender],
    floor_window: FloorWindow | None,
    repeats: int,
) -> Iterator[Result]:
    out_bytes, back_bytes = (wire_bytes(sample.hidden, sample.dtype, wire) for wire in payload.wires)
    rows_out, rows_back = sample.remote_rows()
    floor: float | None = None

    def result(contender: Contender, side: Side, **more) -> Result:
        times = measure(side, repeats, group)
        wire = (rows_out * out_bytes, rows_back * back_bytes, rows_out)
        reference = times.pair if contender is Contender.FLOOR else floor
        return Result(sample.tokens, contender, payload, times, *wire, reference, **more)

    if floor_window is not None:
        side = Floor(floor_window, sample, out_bytes, back_bytes)
        side.blocks = min(BLOCKS, key=lambda blocks: _floor_us(side, blocks, repeats, group))
        yield (best := result(Contender.FLOOR, side, blocks=side.blocks))
        side.raise_if_missed()
        floor = best.times.pair
    if Contender.ROWS in contenders and payload is Payload.PLAIN:
        yield result(Contender.ROWS, Rows(sample, group))
    if Contender.PIPELINE in contenders and payload is Payload.PLAIN:
        layer = AllToAll(ep.placement, group, ep.device)
        yield result(Contender.PIPELINE, Pipeline(layer, sample, "all_to_all_single, the whole pipeline"))
    ours_of = {Contender.RANK_MAJOR: RankMajor, Contender.APART: Apart, Contender.FUSED: Fused}
    for contender, kind in ours_of.items():
        if contender in contenders:
            ours = kind(ep, sample)
            yield result(contender, ours, host=host_us(ours, group))
            ep.check()


def _floor_us(side: Floor, blocks: int, repeats: int, group: dist.ProcessGroup) -> float:
    side.blocks = blocks
    return pair_us(side, -(-repeats // 4), group)


def table(results: Sequence[Result], title: str = "") -> Table:
    """A row for each contender and payload, by T."""
    view = Table(title=title, caption=_CAPTION, pad_edge=False)
    for column in ("T", "side", "payload", "out", "back", "pair", "GB/s", "floor", "host"):
        words = column in ("side", "payload", "host")
        view.add_column(column, justify="left" if words else "right", no_wrap=words)
    last = None
    for r in results:
        if last not in (None, r.tokens):
            view.add_section()
        shown = f"{r.tokens}" if r.tokens != last else ""
        share = "" if r.floor_percent is None or r.blocks else f"[bold]{r.floor_percent:.0f}%[/]"
        note = f"{r.blocks} blocks" if r.blocks else f"{r.host[0]:.0f} + {r.host[1]:.0f}" if r.host else ""
        times = (f"{value:,.1f}" if value < 1000 else f"{value:,.0f}" for value in dataclasses.astuple(r.times))
        view.add_row(shown, r.contender, r.payload, *times, f"{r.wire_gbps:.0f}", share, note)
        last = r.tokens
    return view


def write_json(results: Sequence[Result], path: Path) -> None:
    """A list of one object for each row of the table, its wire speed and share of the floor included."""
    shares = ({"wire_gbps": r.wire_gbps, "floor_percent": r.floor_percent} for r in results)
    write_object([dataclasses.asdict(r) | share for r, share in zip(results, shares, strict=True)], path)


def plot(results: Sequence[Result], path: Path) -> None:
    """Every contender's pair over T, in the format of the file's suffix (.png, .svg, .pdf)."""
    points: dict[tuple[Contender, Payload], list[tuple[int, float]]] = {}
    for r in results:
        points.setdefault((r.contender, r.payload), []).append((r.tokens, r.times.pair))
    colors = {contender: f"C{i}" for i, contender in enumerate(Contender)}
    dashes = dict(zip(Payload, ("-", "--", ":"), strict=True))
    names = {side: side[0] if side[1] is Payload.PLAIN else ", ".join(side) for side in points}
    plot_pairs([Line(names[s], of, color=colors[s[0]], dashes=dashes[s[1]]) for s, of in points.items()], path)
