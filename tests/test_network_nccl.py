"""The thread that watches the rail of a GPU: what it makes of the counts that the GPU writes. It needs no GPU."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from threading import Event, Thread

import pytest
import torch

from epmoe import network_nccl

TIMEOUT_S, LATER_S, FIRST_S = 0.3, 0.5, 1.2


class Exchange:
    timeout_ns = round(TIMEOUT_S * 1e9)

    def __init__(self) -> None:
        self.lost_at: float | None = None

    def lose(self, found: list[int]) -> None:
        assert found == []
        self.lost_at = time.monotonic()


class Watched:
    def __init__(self) -> None:
        self.memory = torch.zeros(7, dtype=torch.int64)
        self.words = network_nccl._Words.from_address(self.memory.data_ptr())
        self.words.ways[1].started = self.words.ways[1].ended = 1  # the first round has ended
        self.exchange, self.closed = Exchange(), Event()
        arguments = weakref.ref(self.exchange), self.memory, self.words, FIRST_S, LATER_S, self.closed
        self.thread = Thread(target=network_nccl._watch, args=arguments, daemon=True)
        self.thread.start()
        self.began = time.monotonic()

    def lost_after(self) -> float:
        self.thread.join(5.0)
        assert self.exchange.lost_at is not None
        return self.exchange.lost_at - self.began


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.closed.set()
    watched.thread.join(5.0)
    assert not watched.thread.is_alive()


@pytest.mark.parametrize(("way", "deadline_s"), [(0, TIMEOUT_S), (1, TIMEOUT_S + LATER_S)])
def test_a_transfer_that_does_not_end(watched, way, deadline_s):
    watched.memory[2 * way] = 5
    watched.memory[2 * way + 1] = 4
    assert deadline_s <= watched.lost_after() < deadline_s + 4 * network_nccl._LOOK_S + 0.2


def test_the_first_round_has_its_own_deadline(watched):
    """Also where the host is in a later round already: ranks may still load or compile."""
    watched.memory[:4] = torch.tensor([2, 1, 0, 0])
    assert FIRST_S <= watched.lost_after() < FIRST_S + 4 * network_nccl._LOOK_S + 0.2


def test_transfers_that_end_are_left_alone(watched):
    """Each starts anew, although at every look one is under way."""
    give_up = time.monotonic() + 3 * TIMEOUT_S
    while time.monotonic() < give_up:
        watched.words.ways[0].started += 1
        time.sleep(TIMEOUT_S / 5)
        watched.words.ways[0].ended += 1
        watched.words.ways[1].started += 1
        watched.words.ways[1].ended += 1
    time.sleep(2 * TIMEOUT_S)
    assert watched.exchange.lost_at is None


def test_a_node_that_has_failed(watched):
    watched.memory[4] = 1
    assert watched.words.stop_wanted == 1
    assert watched.lost_after() < TIMEOUT_S
    watched.words.stopped = 1
    assert watched.memory[5] == 1


def test_the_thread_does_not_keep_the_exchange_alive(watched):
    del watched.exchange
    gc.collect()
    watched.thread.join(5.0)
    assert not watched.thread.is_alive()


def test_the_environment_is_restored(monkeypatch):
    monkeypatch.setenv("EPMOE_A", "1")
    monkeypatch.delenv("EPMOE_B", raising=False)
    with network_nccl._environment({"EPMOE_A": "2", "EPMOE_B": "3"}):
        assert (network_nccl.os.environ["EPMOE_A"], network_nccl.os.environ["EPMOE_B"]) == ("2", "3")
    assert network_nccl.os.environ["EPMOE_A"] == "1" and "EPMOE_B" not in network_nccl.os.environ
