"""Takes all times of the benchmarks: of the rounds of a `Side`, on GPUs and on the CPU, or of any
call.

On GPUs a CUDA graph of several rounds is replayed. Before each replay a kernel sleeps for about
1 ms, so that the host can enqueue everything, and one round without timing brings the ranks into
step. A figure is the median over the replays, on the slowest rank. The outputs are overwritten with
NaN before the replays. Afterwards they must have the same bits as the outputs of an eager round.
The outputs of a peer must be close to these.

On the CPU a sample is a few rounds back to back after a barrier, timed by the wall clock.

An eager call is one that the host makes without a CUDA graph. `out` and `back` are the two halves
of a round.
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

# Rounds in a graph, and in a sample that is called without a graph.
ROUNDS = 10
EAGER_ROUNDS = 3
# The host's time is taken in batches of calls. The kernels of a batch must fit into the queue of a
# stream, because the host would wait for room otherwise.
BATCHES = 5
CALLS = 50
# Cycles of a GPU's clock in about 1 ms.
SLEEP_CYCLES = 2_000_000

How = Literal["captured", "eager", "cpu"]
"""How a sample runs: it replays a CUDA graph, or calls rounds one after the other, on GPUs
("eager") or on the CPU.
"""
_T = TypeVar("_T")


class Times(NamedTuple):
    """The times of one round in µs: of dispatch with permute, of combine with finalize, and of
    both together.
    """

    dispatch: float
    combine: float
    round: float


def measure(side: Side, replays: int, group: dist.ProcessGroup) -> Times:
    """Time `side` on GPUs with CUDA graphs. Collective.

    One graph contains nothing but rounds, and gives the time of a round. A second graph also has
    events before and after dispatch and combine, and gives their times. An event costs about 1 µs.
    Raises RuntimeError if the outputs of the replays differ from those of an eager round.
    """
    wanted = _eager_outputs(side)
    dispatch, combine = ways_us(side, replays, group, wanted=wanted)
    (whole,) = rounds_in_turns([side], replays, group, wanted=[wanted])
    return Times(dispatch, combine, whole)


def measure_eager(side: Side, repeats: int, group: dist.ProcessGroup) -> Times:
    """Time `side` on GPUs without graphs. Collective.

    The time of a round is that of a chain of rounds, divided by their number. It is the time of the
    host or of the GPU, whichever takes longer. The times of dispatch and combine are those of the
    GPU alone: events measure them while the host is ahead of the GPU. Raises RuntimeError if the
    outputs of the last round of a chain differ from those of the first.
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
    """Time several sides on the CPU: the median over samples, on the slowest rank. Collective.

    `repeats` counts the samples of a side, and `rounds` the rounds of a sample. `advance` is called
    whenever each side has had one more sample. Raises RuntimeError if the output of a sample is
    wrong.
    """
    # The sides take turns, so that a slow moment of the machine hits all of them.
    sample_us = torch.zeros(repeats, len(sides), 3, dtype=torch.float64)
    for repeat in range(repeats):
        for index, side in enumerate(sides):
            dist.barrier(group)
            spans, came_back = _wall_us(side, rounds)
            side.check_output(came_back)
            dispatch, combine = _means(spans)
            sample_us[repeat, index] = torch.tensor([dispatch, combine, dispatch + combine])
        advance()
    dist.all_reduce(sample_us, dist.ReduceOp.MAX, group=group)
    return [Times(*row) for row in sample_us.median(dim=0).values.tolist()]


def round_us(
    side: Side,
    samples: int,
    group: dist.ProcessGroup,
    *,
    rounds: int = ROUNDS,
    how: How = "captured",
) -> float:
    """Time a round in µs: the median over the samples, on the slowest rank. Collective.

    A sample has `rounds` rounds, and runs as `how` says. Raises RuntimeError if the outputs of a
    captured round differ from those of an eager round.
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
    """Time `out` and `back` of a round in µs, as `round_us` times a round. Collective.

    On GPUs the times lie between events, each of which costs 1 µs. `wanted` are the outputs of an
    eager round, if the caller has run one already. Raises the errors of `round_us`.
    """
    # Take both times of each sample.
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
    """Time `out` and `back` in µs in a chain of calls without graphs: the median over the chains,
    on the slowest rank. Collective.

    Each time is that of the host or of the GPU, whichever takes longer.
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
    """Time captured rounds of several sides in µs, as `round_us` does. The sides take turns with
    the replays of their graphs. Collective.

    `wanted` has the outputs of an eager round of each side, if the caller has run these rounds
    already.
    """
    wanted = wanted or [_eager_outputs(side) for side in sides]
    # Capture a graph of each side, then replay one graph after the other.
    recorded = [_recorded(side, rounds) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(samples):
        for side, (graph, _), side_times in zip(sides, recorded, times, strict=True):
            side_times += _samples(side, graph.replay, rounds, samples=1, group=group)
    # Check what the last replay of each graph has written.
    for side, (_, outputs), side_wanted in zip(sides, recorded, wanted, strict=True):
        _check(side, outputs, side_wanted, group)
    return slowest(list(map(statistics.median, times)), group)


def host_us(side: Side, group: dist.ProcessGroup, *, on_gpus: bool = True) -> tuple[float, float]:
    """Time the host in an eager `out` and in an eager `back`, in µs, on the slowest rank.
    Collective.

    A GPU is kept busy, so that the host never waits for room or for results. Each time is the
    median over the calls of a batch, in the fastest batch: other processes on the same core may
    slow single batches down.
    """
    batches = [_host_batch_us(side, on_gpus) for _ in range(BATCHES)]
    out, back = slowest([min(times) for times in zip(*batches, strict=True)], group)
    return out, back


def slowest(figures: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Find the largest value of each figure over all ranks. Collective."""
    all_figures = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(all_figures, dist.ReduceOp.MAX, group=group)
    return all_figures.tolist()


def everywhere(condition: bool, group: dist.ProcessGroup) -> bool:
    """Whether `condition` holds on all ranks. Collective.

    A caller that raises if this is False raises on all ranks. A rank that raised alone would keep
    the others waiting.
    """
    return not slowest([not condition], group)[0]


def captured(body: Callable[[], _T]) -> tuple[CUDAGraph, _T]:
    """Capture a CUDA graph of what `body` enqueues. Returns the graph and the result of `body`."""
    torch.cuda.synchronize()
    graph = CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


def elapsed_us(run: Callable[[], object], on_gpu: bool = True) -> float:
    """Time one call of `run` in µs: by events on the current stream of a GPU, or by the wall
    clock.
    """
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
    """Run `count` rounds. Returns the handle and the output of the last one.

    `stamp` is called at the start, and after each `out` and each `back`.
    """
    stamp()
    for _ in range(count):
        handle = side.out()
        stamp()
        came_back = side.back(handle)
        stamp()
    return handle, came_back


def _repeat(side: Side, count: int) -> Any:
    """Run `count` rounds. Returns the output of the last one.

    Unlike `_rounds` it keeps no handle, so memory of a round is free before the next one.
    """
    for _ in range(count):
        came_back = side.back(side.out())
    return came_back


def _recorded(
    side: Side, rounds: int, stamp: Callable[[], object] = lambda: None
) -> tuple[CUDAGraph, list[Tensor]]:
    """Capture a graph of `rounds` rounds. Returns the graph, and the tensors that its last round
    writes. These are NaN until a replay writes them.
    """
    graph, (handle, came_back) = captured(lambda: _rounds(side, rounds, stamp))
    outputs = [*side.arrived(handle), *_tensors(came_back)]
    poison(outputs)
    return graph, outputs


def _eager_outputs(side: Side) -> list[Tensor]:
    """Run one round, and copy the tensors that `out` and `back` have filled.

    What `out` has filled is copied before `back`, because later stages may overwrite it.
    """
    handle = side.out()
    arrived = [tensor.clone() for tensor in side.arrived(handle)]
    return [*arrived, *(tensor.clone() for tensor in _tensors(side.back(handle)))]


def _tensors(came_back: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """List the tensors that a `back` has returned."""
    if isinstance(came_back, Tensor):
        return [came_back]
    return [*came_back]


def _check(
    side: Side, replayed: list[Tensor], wanted: list[Tensor], group: dist.ProcessGroup
) -> None:
    """Raise RuntimeError on all ranks unless the outputs of a graph agree with `wanted` on all
    ranks.
    """
    # In a side that is not exact, rows may arrive in another order. Then only the last tensor is
    # compared: what `back` has returned.
    first = 0 if side.exact else -1
    pairs = zip(replayed[first:], wanted[first:], strict=True)
    agrees_here = all(_agree(got, right, side.exact) for got, right in pairs)
    if not everywhere(agrees_here, group):
        raise RuntimeError(
            f"{side.name}: the outputs of a replayed round differ from an eager round's"
        )


def _agree(got: Tensor, wanted: Tensor, exact: bool) -> bool:
    """Whether two outputs agree. With `exact` they must have the same bits. Otherwise they must be
    close, because sums may have been added up in another order.
    """
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
    """Call `run`, which runs `rounds` rounds, once for each sample. Returns the time of a round in
    each sample, in µs.
    """
    times = []
    for _ in range(samples):
        _align(side, group, on_gpus)
        times.append(elapsed_us(run, on_gpus) / rounds)
    return times


def _align(side: Side, group: dist.ProcessGroup, on_gpus: bool = True) -> None:
    """Bring the ranks into step before a sample: the hosts by a barrier, and on GPUs the kernels by
    a round that is not timed.
    """
    dist.barrier(group, device_ids=[torch.cuda.current_device()] if on_gpus else None)
    if on_gpus:
        torch.cuda._sleep(side.head_start_ms * SLEEP_CYCLES)
        side.back(side.out())


def _stamp(events: list[torch.cuda.Event], external: bool = False) -> None:
    """Record a new event on the current stream, and add it to `events`. Within a captured graph,
    only external events can be read after a replay.
    """
    events.append(torch.cuda.Event(enable_timing=True, external=external))
    events[-1].record()


def _wall_us(side: Side, rounds: int) -> tuple[list[float], Any]:
    """Run `rounds` rounds. Returns the times of each `out` and `back`, in turn, in µs by the wall
    clock, and the output of the last round.
    """
    stamps: list[float] = []
    _, came_back = _rounds(side, rounds, lambda: stamps.append(time.perf_counter()))
    return [(end - start) * 1e6 for start, end in pairwise(stamps)], came_back


def _ways_us(
    side: Side, run: Callable[[], object], events: list[torch.cuda.Event], group: dist.ProcessGroup
) -> tuple[float, float]:
    """Call `run`, which records `events` before and after each `out` and `back` on GPUs. Returns
    the mean times of `out` and of `back`, in µs.
    """
    _align(side, group)
    run()
    torch.cuda.synchronize()
    return _means([begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)])


def _eager_ways_us(
    side: Side, rounds: int, group: dist.ProcessGroup, *, on_gpus: bool
) -> tuple[float, float]:
    """Take one sample of `rounds` rounds without a graph. Returns the mean times of `out` and of
    `back`, in µs.
    """
    if on_gpus:
        events: list[torch.cuda.Event] = []
        run = partial(_rounds, side, rounds, partial(_stamp, events))
        return _ways_us(side, run, events, group)
    _align(side, group, on_gpus)
    spans, _ = _wall_us(side, rounds)
    return _means(spans)


def _means(spans: list[float]) -> tuple[float, float]:
    """The mean time of `out` and that of `back`. Their times alternate in `spans`."""
    return statistics.fmean(spans[::2]), statistics.fmean(spans[1::2])


def _chain_us(side: Side, group: dist.ProcessGroup) -> float:
    """Time a round in a chain of calls without graphs on GPUs, in µs. Raises RuntimeError if the
    outputs of the last round differ from those of a first one, which is not timed.
    """
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
    """Take the mean times of `out` and `back` in one chain of calls, in µs. On GPUs a first round
    is not timed.
    """
    if not on_gpus:
        return _eager_ways_us(side, CALLS, group, on_gpus=False)
    dist.barrier(group, device_ids=[torch.cuda.current_device()])
    side.back(side.out())
    # The host gets no head start. Where it is slower than the GPU, the GPU waits between events, so
    # that the times are those of the host.
    events: list[torch.cuda.Event] = []
    _rounds(side, CALLS, partial(_stamp, events))
    torch.cuda.synchronize()
    return _means([begin.elapsed_time(end) * 1e3 for begin, end in pairwise(events)])


def _host_batch_us(side: Side, on_gpus: bool) -> tuple[float, float]:
    """Take the median times of `out` and `back` in a batch of calls, in µs by the host's clock. A
    GPU sleeps meanwhile, so that the host waits for no kernel.
    """
    if on_gpus:
        torch.cuda.synchronize()
        torch.cuda._sleep(50 * SLEEP_CYCLES)
    spans, _ = _wall_us(side, CALLS)
    if on_gpus:
        torch.cuda.synchronize()
    return statistics.median(spans[::2]), statistics.median(spans[1::2])
