"""CUDA graphs of calls that are no `Side` of the benchmarks, and figures of the slowest rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from epmoe.bench import timing
from epmoe.bench.timing import elapsed_us as timed

__all__ = ["captured", "slowest", "timed"]


def captured(play: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `play(0)` to `play(count - 1)`."""

    def calls(number: int) -> None:
        for i in range(number):
            play(i)

    calls(min(count, 4))
    return timing.captured(lambda: calls(count))[0]


def slowest(value: float) -> float:
    """The largest value over all ranks of the world."""
    return timing.slowest([value])[0]
