"""Hosts that run ahead of their GPUs flip to a version between the same rounds: real ticks, on a
model of GPUs.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from random import Random
from threading import Condition, Event, Thread
from types import SimpleNamespace

import pytest
import torch
from waits import until

from epmoe import WeightReceiver
from epmoe.exchange.round_state import CLOSED
from epmoe.group.waiting import Worker
from epmoe.live import receiver as receiver_module
from epmoe.live.flip_words import FlipWords

RANKS = 3
STEPS = 400
LAYERS = 2
AHEAD = 16


class Gpus:
    """A round has ended once all hosts have launched it."""

    def __init__(self) -> None:
        self.launched = [0] * RANKS
        self.change = Condition()

    def launch(self, rank: int) -> None:
        with self.change:
            self.launched[rank] += LAYERS
            self.change.notify_all()
        self.wait(rank, AHEAD)

    def wait(self, rank: int, running: int = 0) -> None:
        with self.change:
            assert self.change.wait_for(
                lambda: min(self.launched) >= self.launched[rank] - running, 20.0
            )


class Receiver(WeightReceiver):
    """Of a rank of a server whose weights are a number."""

    def __init__(self, gpus: Gpus, rank: int, words: torch.Tensor, random: Random) -> None:
        exchange = SimpleNamespace(
            rounds=SimpleNamespace(count=0, state=CLOSED),
            run=lambda call: call(),
            deadlines=SimpleNamespace(wait_s=lambda: 20.0),
            wait_for_device=lambda timeout_s: gpus.wait(rank),
            health=lambda wait: SimpleNamespace(rounds=gpus.launched[rank]),
        )
        self._ep = SimpleNamespace(rank=rank, exchange=exchange, generation=0)
        self._generation = 0
        self._words = FlipWords(words, rank)
        self._random = random
        self._folder = Path()
        self._worker = Worker("model")
        self._looked = 0.0
        self.version = self._target = self._flipped_behind = self._begun = -1
        self._staged = self.problem = None

    def _stage(self, number: int) -> SimpleNamespace:
        time.sleep(self._random.choice((0, 0.001, 0.005)))
        if not self._random.randrange(8):
            raise MemoryError
        return SimpleNamespace(number=number)

    def _flip(self, version: SimpleNamespace) -> None:
        self.version = version.number


def serve(gpus: Gpus, rank: int, words: torch.Tensor, seen: list[list[int]], seed: int) -> None:
    random = Random(RANKS * seed + rank)
    receiver = Receiver(gpus, rank, words, random)
    for _ in range(STEPS):
        receiver.tick()
        seen[rank].append(receiver.version)
        gpus.launch(rank)
        time.sleep(random.choice((0, 0, 0, 0.001, 0.002)))
    receiver.close()


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_flip_between_the_same_rounds(monkeypatch, seed):
    start = time.monotonic()
    monkeypatch.setattr(
        receiver_module, "newest_version", lambda folder: int((time.monotonic() - start) / 0.02)
    )
    monkeypatch.setattr(receiver_module, "_LOOK_S", 0.0)
    gpus = Gpus()
    words = torch.full((2 + RANKS,), -1)
    seen = [[] for _ in range(RANKS)]
    threads = [
        Thread(target=partial(serve, gpus, rank, words, seen, seed)) for rank in range(RANKS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [seen[0]] * RANKS and len(seen[0]) == STEPS
    assert len(set(seen[0])) > 3, "versions pass"


def test_no_older_version_takes_the_place_of_a_failure():
    """Rank 2 could not take version 1, which this rank had still to stage, nor this
    rank version 2.
    """

    class Slow(Receiver):
        def _stage(self, number: int) -> SimpleNamespace:
            assert goes_on.wait(20.0)
            if number == 2:
                raise MemoryError
            return SimpleNamespace(number=number)

    goes_on = Event()
    words = torch.full((2 + RANKS,), -1)
    receiver = Slow(Gpus(), 1, words, Random())
    target = 0
    others = 2 + 2
    ours = 2 + 1
    # Version 1 is to come, which this rank has still to stage, and rank 2 could not take it.
    words[target] = 1
    receiver.tick()
    words[others] = -2 - 1
    # So version 2 is to come, which this rank cannot take.
    words[target] = 2
    receiver.tick()
    goes_on.set()
    staged = receiver._worker.submit(lambda: None)
    until(lambda: staged.done)
    # Rank 2 has it. What this rank says is its failure, not version 1.
    words[others] = 2
    receiver.tick()
    receiver.close()
    assert words[ours] == -2 - 2
