"""The timing of GPUs, on a CPU that stands for one: which rounds are played, and that wrong outputs
are found.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from epmoe.bench import timing
from epmoe.bench.sides import Calls

OUT_US = 200
BACK_US = 50


class Clock:
    """Seconds that pass only where a side says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


class Event:
    """An event of torch.cuda whose GPU is never behind the host."""

    def __init__(self, enable_timing: bool, external: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = CLOCK.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The world of one rank, whose graphs call again what they have captured. Yields how long the
    GPU slept, in ms.
    """

    def captured(body):
        handle, came_back = body()

        def replay() -> None:
            again, returned = body()
            for kept, new in zip([handle, *came_back], [again, *returned], strict=True):
                kept.copy_(new)

        return SimpleNamespace(replay=replay), (handle, came_back)

    def stamp(events, external=False):
        # A replay records the events of its graph again.
        full = external and len(events) == 1 + 2 * timing.ROUNDS
        events.append(events.pop(0) if full else Event(True))
        events[-1].record()

    slept: list[float] = []
    for name in ("synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: slept.append(cycles / timing.SLEEP_CYCLES)
    )
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(timing, "_stamp", stamp)
    monkeypatch.setattr(timing, "time", CLOCK)
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids=None: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield slept
    dist.destroy_process_group()


def side(played: list[str], back=lambda rows: rows + 1, **options: object) -> Calls:
    """A side that says in `played` what it was called for."""

    def out() -> torch.Tensor:
        played.append("out")
        CLOCK.now += OUT_US * 1e-6
        return torch.arange(4.0)

    def home(rows: torch.Tensor) -> torch.Tensor:
        played.append("back")
        CLOCK.now += BACK_US * 1e-6
        return back(rows)

    return Calls("a side", out, home, lambda rows: [rows], **options)


def test_a_round_and_its_ways(gpu):
    played: list[str] = []
    times = timing.measure(side(played), 3, dist.group.WORLD)
    assert times == pytest.approx((OUT_US, BACK_US, OUT_US + BACK_US))
    alignments = 2 * 3
    graphs = 2 * (1 + 3)
    assert gpu == [1] * alignments and played == ["out", "back"] * (1 + alignments + 10 * graphs)


@pytest.mark.parametrize("how", ["captured", "eager", "cpu"])
def test_both_ways_of_a_pass_with_several_outputs(gpu, how):
    passes = side([], lambda rows: [rows + 1, rows.view(2, 2) * 2], head_start_ms=5)
    assert timing.ways_us(passes, 2, dist.group.WORLD, how=how) == pytest.approx((OUT_US, BACK_US))
    wrong = iter(range(10_000))
    if how == "captured":
        with pytest.raises(RuntimeError, match="a side: the outputs of a replayed round differ"):
            timing.ways_us(side([], lambda rows: [rows, rows + next(wrong)]), 1, dist.group.WORLD)


@pytest.mark.parametrize(
    ("how", "rounds"), [("captured", 1 + 5 * 4 + 3), ("eager", 5 * 3 + 3), ("cpu", 5 * 3)]
)
def test_rounds_alone(gpu, how, rounds):
    played: list[str] = []
    us = timing.round_us(side(played, head_start_ms=5), 3, dist.group.WORLD, rounds=5, how=how)
    assert us == pytest.approx(OUT_US + BACK_US)
    assert gpu == ([] if how == "cpu" else [5] * 3) and played == ["out", "back"] * rounds


def test_sides_that_take_turns(gpu):
    played: list[str] = []
    calls = [
        Calls(name, partial(lambda name: played.append(name) or torch.ones(1), name))
        for name in "ab"
    ]
    timing.rounds_in_turns(calls, 3, dist.group.WORLD, rounds=2)
    assert played == [*"ab", *"aabb", *"aaabbb" * 3] and gpu == [1] * 6


def test_eager_rounds_and_the_host(gpu):
    played: list[str] = []
    times = timing.measure_eager(side(played), 2, dist.group.WORLD)
    assert times == pytest.approx((OUT_US, BACK_US, OUT_US + BACK_US))
    assert len(played) // 2 == 2 * (1 + timing.EAGER_ROUNDS + 1 + timing.CALLS)
    assert timing.host_us(side(played), dist.group.WORLD) == pytest.approx((OUT_US, BACK_US))


@pytest.mark.parametrize("exact", [True, False])
def test_outputs_that_differ(gpu, exact):
    """Every call puts out something else, as a graph does whose replay leaves a row out."""
    wrong = iter(range(10_000))
    with pytest.raises(RuntimeError, match="a side: the outputs of a replayed round differ"):
        timing.measure(side([], lambda rows: rows + next(wrong), exact=exact), 1, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="a side: the outputs of a replayed round differ"):
        timing.round_us(side([], lambda rows: rows + next(wrong), exact=exact), 1, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="a side: the outputs of two eager rounds differ"):
        timing.measure_eager(
            side([], lambda rows: rows + next(wrong), exact=exact), 1, dist.group.WORLD
        )


def test_outputs_are_poisoned(gpu, monkeypatch):
    """A graph that writes nothing leaves NaN."""
    monkeypatch.setattr(
        timing, "captured", lambda body: (SimpleNamespace(replay=lambda: None), body())
    )
    for measure in (timing.measure, timing.round_us):
        with pytest.raises(RuntimeError, match="the outputs of a replayed round differ"):
            measure(side([]), 1, dist.group.WORLD)


def test_rows_in_another_order(gpu):
    """What came back is then compared alone, and only to the precision of a peer."""
    turns = iter(range(10_000))

    def out() -> torch.Tensor:
        return torch.arange(5.0).roll(next(turns))

    one = Calls(
        "a peer", out, lambda rows: rows.sum(0, keepdim=True), lambda rows: [rows], exact=False
    )
    timing.measure(one, 2, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="a peer: the outputs"):
        timing.measure(Calls("a peer", out, one.back, one.arrived), 2, dist.group.WORLD)
