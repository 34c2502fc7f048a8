"""Takes all times of the benchmarks: of a `Side` on GPUs and on the CPU, or of any call.

On GPUs a CUDA graph of rounds is replayed. Before it, a kernel sleeps for about 1 ms, so that the
host can enqueue everything, and one round brings the ranks into step. A figure is the median over
replays of the slowest rank. The outputs are poisoned before the replays. After them they must
equal, bit for bit, the outputs of an eager round; those of a peer must be close to them.

On the CPU a sample is a few rounds back to back after a barrier, by the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import CUDAGraph

from epmoe.bench.sides import ExchangeSide, Side, poison

# Rounds of a graph, and of a sample without one.
ROUNDS = 10
EAGER_ROUNDS = 3
# Batches for host time, and calls of one: all its kernels fit into a stream's queue.
BATCHES = 5
CALLS = 50
# About 1 ms.
SLEEP_CYCLES = 2_000_000

How = Literal["captured", "eager", "cpu"]
"""Whether a sample replays a CUDA graph, or calls rounds one after the other, on GPUs or on the
CPU.
"""
_T = TypeVar("_T")


class Times(NamedTuple):
    """Microseconds of one round: dispatch with permute, combine with finalize, and
    both together.
    """

    dispatch: float
    combine: float
    round: float


def measure(side: Side, replays: int, group: dist.ProcessGroup) -> Times:
    """The times of `side` on GPUs. Collective.

    The round is timed with a graph of rounds alone. Dispatch and combine are timed with a second
    graph that has events between them, which cost about 1 µs each. Raises RuntimeError if the
    replays' outputs differ from an eager round's.
    """
    wanted = _eager_outputs(side)
    dispatch, combine = ways_us(side, replays, group, wanted=wanted)
    (whole,) = rounds_in_turns([side], replays, group, wanted=[wanted])
    return Times(dispatch, combine, whole)


def measure_eager(side: Side, repeats: int, group: dist.ProcessGroup) -> Times:
    """The times of `side` called without graphs, on GPUs. Collective.

    A round is that of a chain of rounds, one called after the other: it takes what the slower of
    host and GPU takes. Dispatch and combine are the GPU's alone, from events, while the host is
    ahead. Raises RuntimeError if the last round of a chain puts out something else than the first.
    """
    chain_us = statistics.median(_chain_us(side, group) for _ in range(repeats))
    dispatch, combine = ways_us(side, repeats, group, rounds=EAGER_ROUNDS, how="eager")
    (whole,) = slowest([chain_us], group)
    return Times(dispatch, combine, whole)


def measure_in_turns(
    sides: Sequence[ExchangeSide],
    repeats: int,
    rounds: int,
    group: dist.ProcessGroup,
    advance: Callable[[], object],
) -> list[Times]:
    """Time each side on the CPU, by turns: the median over samples of the slowest rank. Collective.

    `advance` is called after a sample of every side. Raises RuntimeError if the output of a sample
    is wrong.
    """
    # A sample of each side in turn, so that a slow moment of the machine hits all.
    micros = torch.zeros(repeats, len(sides), 3, dtype=torch.float64)
    for repeat in range(repeats):
        for index, side in enumerate(sides):
            dist.barrier(group)
            spans, came_back = _wall_us(side, rounds)
            side.check_output(came_back)
            dispatch, combine = _means(spans)
            micros[repeat, index] = torch.tensor([dispatch, combine, dispatch + combine])
        advance()
    dist.all_reduce(micros, dist.ReduceOp.MAX, group=group)
    return [Times(*row) for row in micros.median(dim=0).values.tolist()]


def round_us(
    side: Side,
    samples: int,
    group: dist.ProcessGroup,
    *,
    rounds: int = ROUNDS,
    how: How = "captured",
) -> float:
    """Time a round, in µs: the median over samples of `rounds` rounds, on the slowest rank.
    Collective.

    Raises RuntimeError if the outputs of a captured round differ from an eager round's.
    """
    if how == "captured":
        return rounds_in_turns([side], samples, group, rounds)[0]
    run = partial(_repeat, side, rounds)
    times = _samples(side, run, rounds, samples, group, on_gpus=how == "eager")
    return slowest([statistics.median(times)], group)[0]


def ways_us(
    side: Side,
    samples: int,
    group: dist.ProcessGroup,
    *,
    rounds: int = ROUNDS,
    how: How = "captured",
    wanted: Any = (),
) -> tuple[float, float]:
    """Time `out` and `back` of a round as `round_us` does: on GPUs between events, of 1 µs each.
    `wanted`: outputs of an eager round.
    """
    # The times of each sample, both ways.
    if how == "captured":
        wanted = wanted or _eager_outputs(side)
        events: list[torch.cuda.Event] = []
        graph, outputs = _recorded(side, rounds, partial(_stamp, events, external=True))
        ways = [_ways_us(side, graph.replay, events, group) for _ in range(samples)]
        _check(side, outputs, wanted, group)
    else:
        ways = [_eager_ways_us(side, rounds, group, on_gpus=how == "eager") for _ in range(samples)]
    out, back = slowest([statistics.median(times) for times in zip(*ways, strict=True)], group)
    return out, back


def chained_ways_us(
    side: Side, samples: int, group: dist.ProcessGroup, *, on_gpus: bool = True
) -> tuple[float, float]:
    """Microseconds of `out` and of `back` in a chain of calls without graphs, the median over
    chains, on the slowest rank. Each takes what the slower of host and GPU takes. Collective.
    """
    ways = [_chain_ways_us(side, group, on_gpus) for _ in range(samples)]
    out, back = slowest([statistics.median(times) for times in zip(*ways, strict=True)], group)
    return out, back


def rounds_in_turns(
    sides: Sequence[Side],
    samples: int,
    group: dist.ProcessGroup,
    rounds: int = ROUNDS,
    wanted: Any = (),
) -> list[float]:
    """Time captured rounds as `round_us` does, for sides whose graphs are replayed by turns.
    `wanted` is that of `ways_us`.
    """
    wanted = wanted or [_eager_outputs(side) for side in sides]
    # Graphs of all sides, then a sample of each in turn.
    recorded = [_recorded(side, rounds) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(samples):
        for side, (graph, _), taken in zip(sides, recorded, times, strict=True):
            taken += _samples(side, graph.replay, rounds, 1, group)
    # The last replay of each has written what is right.
    for side, (_, outputs), right in zip(sides, recorded, wanted, strict=True):
        _check(side, outputs, right, group)
    return slowest(list(map(statistics.median, times)), group)


def host_us(side: Side, group: dist.ProcessGroup, *, on_gpus: bool = True) -> tuple[float, float]:
    """Host microseconds of an eager `out` and of an eager `back` while the GPU, if there is one,
    lags behind. Collective.

    The median over the calls of a batch, of the fastest batch: other processes on the same core
    slow the others down.
    """
    batches = [_host_batch_us(side, on_gpus) for _ in range(BATCHES)]
    out, back = slowest([min(times) for times in zip(*batches, strict=True)], group)
    return out, back


def slowest(figures: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """The largest value over all ranks, for each figure. Collective."""
    all_figures = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(all_figures, dist.ReduceOp.MAX, group=group)
    return all_figures.tolist()


def everywhere(condition: bool, group: dist.ProcessGroup) -> bool:
    """Whether `condition` holds on all ranks. Collective: a rank that raised alone would keep the
    others waiting.
    """
    return not slowest([not condition], group)[0]


def captured(body: Callable[[], _T]) -> tuple[CUDAGraph, _T]:
    """A CUDA graph of what `body` enqueues, and what `body` returns."""
    torch.cuda.synchronize()
    graph = CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


def elapsed_us(run: Callable[[], object], on_gpu: bool = True) -> float:
    """Time `run()`, in µs: between events on the current stream of a GPU, or by the wall clock."""
    if not on_gpu:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _rounds(side: Side, count: int, stamp: Callable[[], object] = lambda: None) -> tuple[Any, Any]:
    """The last round's handle and output. `stamp` is called at the start and after each `out` and
    each `back`.
    """
    stamp()
    for _ in range(count):
        handle = side.out()
        stamp()
        came_back = side.back(handle)
        stamp()
    return handle, came_back


def _repeat(side: Side, count: int) -> Any:
    """The output of the last of `count` rounds. No handle outlives its round."""
    for _ in range(count):
        came_back = side.back(side.out())
    return came_back


def _recorded(
    side: Side, rounds: int, stamp: Callable[[], object] = lambda: None
) -> tuple[CUDAGraph, list[Tensor]]:
    """A graph of rounds, and what the last of them is to put out, poisoned."""
    graph, (handle, came_back) = captured(lambda: _rounds(side, rounds, stamp))
    outputs = [*side.arrived(handle), *_tensors(came_back)]
    poison(outputs)
    return graph, outputs


def _eager_outputs(side: Side) -> list[Tensor]:
    """Copies of the outputs of one round. Rows are copied before `back`, which ends their round."""
    handle = side.out()
    arrived = [tensor.clone() for tensor in side.arrived(handle)]
    return [*arrived, *(tensor.clone() for tensor in _tensors(side.back(handle)))]


def _tensors(came_back: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(came_back, Tensor):
        return [came_back]
    return [*came_back]


def _check(
    side: Side, replayed: list[Tensor], wanted: list[Tensor], group: dist.ProcessGroup
) -> None:
    """Raise RuntimeError on all ranks unless the outputs of a graph agree with `wanted` on all."""
    # Rows may arrive in another order: then only what came back.
    first = 0 if side.exact else -1
    pairs = zip(replayed[first:], wanted[first:], strict=True)
    if not everywhere(all(_agree(got, right, side.exact) for got, right in pairs), group):
        raise RuntimeError(
            f"{side.name}: the outputs of a replayed round differ from an eager round's"
        )


def _agree(got: Tensor, wanted: Tensor, exact: bool) -> bool:
    """Whether outputs have the same bits, or are close where sums may have another order."""
    if exact:
        return torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    mean = float(wanted.float().abs().mean())
    return torch.allclose(got.float(), wanted.float(), rtol=2**-4, atol=2**-4 * mean)


def _samples(
    side: Side,
    run: Callable[[], object],
    rounds: int,
    samples: int,
    group: dist.ProcessGroup,
    on_gpus: bool = True,
) -> list[float]:
    """Time samples of `run`, which plays `rounds` rounds. Returns µs of a round in each."""
    times = []
    for _ in range(samples):
        _align(side, group, on_gpus)
        times.append(elapsed_us(run, on_gpus) / rounds)
    return times


def _align(side: Side, group: dist.ProcessGroup, on_gpus: bool = True) -> None:
    """Bring hosts into step, and on GPUs the kernels, by a round that nobody times."""
    dist.barrier(group, device_ids=[torch.cuda.current_device()] if on_gpus else None)
    if on_gpus:
        torch.cuda._sleep(side.head_start_ms * SLEEP_CYCLES)
        side.back(side.out())


def _stamp(events: list[torch.cuda.Event], external: bool = False) -> None:
    events.append(torch.cuda.Event(enable_timing=True, external=external))
    events[-1].record()


def _wall_us(side: Side, rounds: int) -> tuple[list[float], Any]:
    """Microseconds of each `out` and each `back` by the wall clock, and what came back last."""
    stamps: list[float] = []
    _, came_back = _rounds(side, rounds, lambda: stamps.append(time.perf_counter()))
    return [(end - start) * 1e6 for start, end in pairwise(stamps)], came_back


def _ways_us(
    side: Side, run: Callable[[], object], events: list[torch.cuda.Event], group: dist.ProcessGroup
) -> tuple[float, float]:
    """Means of `out` and `back` in a run that records events, on GPUs."""
    _align(side, group)
    run()
    torch.cuda.synchronize()
    return _means([begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)])


def _eager_ways_us(
    side: Side, rounds: int, group: dist.ProcessGroup, *, on_gpus: bool
) -> tuple[float, float]:
    if on_gpus:
        events: list[torch.cuda.Event] = []
        run = partial(_rounds, side, rounds, partial(_stamp, events))
        return _ways_us(side, run, events, group)
    _align(side, group, on_gpus)
    return _means(_wall_us(side, rounds)[0])


def _means(spans: list[float]) -> tuple[float, float]:
    """The means of dispatch and of combine, which alternate."""
    return statistics.fmean(spans[::2]), statistics.fmean(spans[1::2])


def _chain_us(side: Side, group: dist.ProcessGroup) -> float:
    """Time a round in a chain of calls, in µs. Raises RuntimeError if outputs differ."""
    dist.barrier(group, device_ids=[torch.cuda.current_device()])
    wanted = side.back(side.out()).clone()
    torch.cuda.synchronize()
    start = time.perf_counter()
    came_back = _repeat(side, CALLS)
    torch.cuda.synchronize()
    us = (time.perf_counter() - start) * 1e6 / CALLS
    if not everywhere(_agree(came_back, wanted, side.exact), group):
        raise RuntimeError(f"{side.name}: the outputs of two eager rounds differ")
    return us


def _chain_ways_us(side: Side, group: dist.ProcessGroup, on_gpus: bool) -> tuple[float, float]:
    """Means of `out` and `back` in one chain, whose first pass nobody times."""
    if not on_gpus:
        return _eager_ways_us(side, CALLS, group, on_gpus=False)
    dist.barrier(group, device_ids=[torch.cuda.current_device()])
    side.back(side.out())
    # No head start: where the host is late, the GPU waits, and the events tell.
    events: list[torch.cuda.Event] = []
    _rounds(side, CALLS, partial(_stamp, events))
    torch.cuda.synchronize()
    return _means([begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)])


def _host_batch_us(side: Side, on_gpus: bool) -> tuple[float, float]:
    """Medians of `out` and `back` by the host's clock, while a GPU sleeps."""
    if on_gpus:
        torch.cuda.synchronize()
        torch.cuda._sleep(50 * SLEEP_CYCLES)
    spans, _ = _wall_us(side, CALLS)
    if on_gpus:
        torch.cuda.synchronize()
    return statistics.median(spans[::2]), statistics.median(spans[1::2])
