"""Times a `Side` on GPUs.

A CUDA graph of rounds is replayed. Before it, a kernel sleeps for about 1 ms, so that the host can enqueue everything,
and one round brings the ranks into step. A figure is the median over replays of the slowest rank. After the replays,
the outputs must equal, bit for bit, the outputs of an eager round; those of a peer must be close to them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.report import Times
from epmoe.bench.sides import Side, poison

ROUNDS, EAGER_ROUNDS = 10, 3
BATCHES, CALLS = 5, 50  # for host time; all kernels of a batch fit into a stream's queue
SLEEP_CYCLES = 2_000_000  # about 1 ms

_T = TypeVar("_T")


def measure(side: Side, replays: int, group: dist.ProcessGroup) -> Times:
    """The times of `side`. Collective.

    The round is timed with a graph of rounds alone. Dispatch and combine are timed with a second graph that has events
    between them, which cost about 1 µs each. Raises RuntimeError if the replays' outputs differ from an eager round's.
    """
    handle = side.out()
    wanted = [tensor.clone() for tensor in side.arrived(handle)]
    wanted.append(side.back(handle).clone())
    events: list[torch.cuda.Event] = []
    plain, plain_last = _captured(lambda: _rounds(side, ROUNDS, lambda: None))
    stamped, stamped_last = _captured(lambda: _rounds(side, ROUNDS, lambda: _stamp(events, external=True)))
    last = [tensor for handle, came_back in (plain_last, stamped_last) for tensor in (*side.arrived(handle), came_back)]
    poison(last)
    rounds = [_graph_us(side, plain, group) for _ in range(replays)]
    ways = [_ways_us(side, stamped.replay, events, group) for _ in range(replays)]
    torch.cuda.synchronize()
    if not side.exact:  # rows may arrive in another order
        last, wanted = [plain_last[1], stamped_last[1]], wanted[-1:]
    pairs = zip(last, wanted * 2, strict=True)
    if not everywhere(all(_agree(got, right, side.exact) for got, right in pairs), group):
        raise RuntimeError(f"{side.name}: the outputs of a replayed round differ from an eager round's")
    return _median(ways, rounds, group)


def measure_eager(side: Side, repeats: int, group: dist.ProcessGroup) -> Times:
    """The times of `side` called without graphs. Collective.

    A round is that of a chain of rounds, one called after the other: it takes what the slower of host and GPU takes.
    Dispatch and combine are the GPU's alone, from events, while the host is ahead. Raises RuntimeError if the last
    round of a chain puts out something else than the first.
    """
    ways = []
    for _ in range(repeats):
        events: list[torch.cuda.Event] = []
        run = partial(_rounds, side, EAGER_ROUNDS, partial(_stamp, events))
        ways.append(_ways_us(side, run, events, group))
    return _median(ways, [_chain_us(side, group) for _ in range(repeats)], group)


def _chain_us(side: Side, group: dist.ProcessGroup) -> float:
    dist.barrier(group, device_ids=[torch.cuda.current_device()])
    wanted = side.back(side.out()).clone()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        came_back = side.back(side.out())
    torch.cuda.synchronize()
    us = (time.perf_counter() - start) * 1e6 / CALLS
    if not everywhere(_agree(came_back, wanted, side.exact), group):
        raise RuntimeError(f"{side.name}: the outputs of two eager rounds differ")
    return us


def _agree(got: Tensor, wanted: Tensor, exact: bool) -> bool:
    if exact:
        return torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    return torch.allclose(got.float(), wanted.float(), rtol=2**-4, atol=2**-4 * float(wanted.float().abs().mean()))


def _median(ways: list[tuple[float, float]], rounds: list[float], group: dist.ProcessGroup) -> Times:
    outs, backs = zip(*ways, strict=True)
    return Times(*slowest([statistics.median(times) for times in (outs, backs, rounds)], group))


def _stamp(events: list[torch.cuda.Event], external: bool = False) -> None:
    events.append(torch.cuda.Event(enable_timing=True, external=external))
    events[-1].record()


def round_us(side: Side, replays: int, group: dist.ProcessGroup) -> float:
    """Microseconds of a round; the outputs are not checked. Collective."""
    graph, _ = _captured(lambda: _rounds(side, ROUNDS, lambda: None))
    return slowest([statistics.median(_graph_us(side, graph, group) for _ in range(replays))], group)[0]


def host_us(side: Side, group: dist.ProcessGroup) -> tuple[float, float]:
    """Host microseconds of an eager `out` and of an eager `back` while the GPU lags behind. Collective.

    The median over the calls of a batch, of the fastest batch: other processes on the same core slow the others down.
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
    """The largest value over all ranks, for each figure. Collective."""
    all_figures = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(all_figures, dist.ReduceOp.MAX, group=group)
    return all_figures.tolist()


def everywhere(condition: bool, group: dist.ProcessGroup) -> bool:
    """Whether `condition` holds on all ranks. Collective: a rank that raised alone would keep the others waiting."""
    return not slowest([not condition], group)[0]


def _rounds(side: Side, count: int, stamp: Callable[[], None]) -> tuple[Any, Tensor]:
    """The last round's handle and output. `stamp` is called at the start and after each `out` and each `back`."""
    stamp()
    for _ in range(count):
        handle = side.out()
        stamp()
        came_back = side.back(handle)
        stamp()
    return handle, came_back


def _captured(body: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
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
    return begin.elapsed_time(end) * 1e3 / ROUNDS


def _ways_us(
    side: Side, run: Callable[[], object], events: list[torch.cuda.Event], group: dist.ProcessGroup
) -> tuple[float, float]:
    _align(side, group)
    run()
    torch.cuda.synchronize()
    spans = [begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)]
    return statistics.fmean(spans[::2]), statistics.fmean(spans[1::2])
