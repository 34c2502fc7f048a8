"""Times replays of CUDA graphs, on the slowest rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist


def captured(play: Callable[[int], None], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `play(0)` to `play(count - 1)`."""
    for i in range(min(count, 4)):
        play(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            play(i)
    return graph


def timed(run: Callable[[], object]) -> float:
    """In µs, of the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)


def slowest(value: float) -> float:
    worst = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)
