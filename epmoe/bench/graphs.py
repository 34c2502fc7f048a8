"""Times a `Side` on GPUs.

A CUDA graph of pairs is replayed behind a sleeping kernel, in which the host gets ahead, and one pair that brings the
ranks into step. What the host takes part in is run instead, behind the pair. A figure is the median over replays, of
the rank where that is longest. What the replays leave must be, bit for bit, what a round launched by hand left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.report import Times
from epmoe.bench.sides import Side, poison

PAIRS, EAGER_PAIRS = 10, 3
BATCHES, CALLS = 5, 50  # of the host; the kernels of a batch all fit into the queue of a stream
SLEEP_CYCLES = 2_000_000  # about 1 ms


def measure(side: Side, replays: int, group: dist.ProcessGroup) -> Times:
    """Of a pair from a graph of nothing else; each way from another, with events between, which cost about 1 µs each.

    Collective. RuntimeError where the replays leave something else than a round launched by hand.
    """
    handle = side.out()
    wanted = [tensor.clone() for tensor in side.arrived(handle)]
    wanted.append(side.back(handle).clone())
    events: list[torch.cuda.Event] = []

    def stamp() -> None:
        events.append(torch.cuda.Event(enable_timing=True, external=side.captured))
        events[-1].record()

    if side.captured:
        plain, plain_last = _captured(lambda: _pairs(side, PAIRS, lambda: None))
        stamped, stamped_last = _captured(lambda: _pairs(side, PAIRS, stamp))
        last = [*_left(side, *plain_last), *_left(side, *stamped_last)]
        poison(last)
        pairs = [_graph_us(side, plain, group) for _ in range(replays)]
        ways = [_ways_us(side, stamped.replay, events, group) for _ in range(replays)]
        _compare(side, last, wanted * 2)
    else:
        ways = []
        for _ in range(replays):
            events.clear()
            ways.append(_ways_us(side, lambda: _pairs(side, EAGER_PAIRS, stamp), events, group))
        pairs = [out + back for out, back in ways]
    outs, backs = zip(*ways, strict=True)
    return Times(*slowest([statistics.median(times) for times in (outs, backs, pairs)], group))


def pair_us(side: Side, replays: int, group: dist.ProcessGroup) -> float:
    """Microseconds of a pair alone, unchecked. Collective."""
    graph, _ = _captured(lambda: _pairs(side, PAIRS, lambda: None))
    return slowest([statistics.median(_graph_us(side, graph, group) for _ in range(replays))], group)[0]


def host_us(side: Side, group: dist.ProcessGroup) -> tuple[float, float]:
    """Microseconds of the host in `out` and in `back`, launched by hand while the GPU is behind. Collective.

    Medians of a batch of calls, of the batch that was disturbed least: other processes on the core are no cost of ours.
    """
    batches = [_host_batch_us(side) for _ in range(BATCHES)]
    out, back = slowest([min(times) for times in zip(*batches, strict=True)], group)
    return out, back


def _host_batch_us(side: Side) -> tuple[float, float]:
    outs, backs = [], []
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * SLEEP_CYCLES)
    for _ in range(CALLS):
        start = time.perf_counter()
        handle = side.out()
        middle = time.perf_counter()
        side.back(handle)
        backs.append(time.perf_counter() - middle)
        outs.append(middle - start)
    torch.cuda.synchronize()
    return statistics.median(outs) * 1e6, statistics.median(backs) * 1e6


def slowest(figures: list[float], group: dist.ProcessGroup) -> list[float]:
    """The largest of all ranks, each. Collective."""
    all_figures = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(all_figures, dist.ReduceOp.MAX, group=group)
    return all_figures.tolist()


def _pairs(side: Side, count: int, stamp: Callable[[], None]) -> tuple[Any, Tensor]:
    """The last pair's handle and what came back; `stamp` is called before the first and after each way."""
    stamp()
    for _ in range(count):
        handle = side.out()
        stamp()
        came_back = side.back(handle)
        stamp()
    return handle, came_back


def _captured(body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


def _align(side: Side, group: dist.ProcessGroup) -> None:
    dist.barrier(group, device_ids=[torch.cuda.current_device()])
    torch.cuda._sleep(SLEEP_CYCLES)
    side.back(side.out())


def _graph_us(side: Side, graph: torch.cuda.CUDAGraph, group: dist.ProcessGroup) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _align(side, group)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / PAIRS


def _ways_us(
    side: Side, run: Callable[[], object], events: list[torch.cuda.Event], group: dist.ProcessGroup
) -> tuple[float, float]:
    _align(side, group)
    run()
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)]
    return statistics.fmean(spans[::2]), statistics.fmean(spans[1::2])


def _left(side: Side, handle: Any, came_back: Tensor) -> list[Tensor]:
    return [*side.arrived(handle), came_back]


def _compare(side: Side, got: list[Tensor], wanted: list[Tensor]) -> None:
    torch.cuda.synchronize()
    for left, right in zip(got, wanted, strict=True):
        if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            raise RuntimeError(f"{side.name}: a replayed round leaves something else than one launched by hand")
