"""The rail of a GPU without one: the thread that watches it, and what the host refuses or gives up."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch

from epmoe.config.deadlines import RETURN_S, Deadlines
from epmoe.group.errors import EPTimeoutError
from epmoe.rail import nccl
from epmoe.rail.network_cuda import NetworkOnGPUs
from epmoe.rail.rail import RailError, Transfer

TIMEOUT_S, FIRST_S = 0.3, 0.9


class Watcher:
    def __init__(self) -> None:
        self.lost_at: float | None = None

    def on_late(self) -> None:
        self.lost_at = time.monotonic()


class Watched:
    def __init__(self) -> None:
        self.memory = torch.zeros(7, dtype=torch.int64)
        self.counts, self.told = nccl.words_of(self.memory)
        self.counts[2] = self.counts[3] = 1  # the first round has ended
        self.exchange, self.closed = Watcher(), Event()
        deadlines = Deadlines(FIRST_S, TIMEOUT_S, lambda: 2)
        arguments = weakref.WeakMethod(self.exchange.on_late), self.memory, deadlines, self.closed
        self.thread = Thread(target=nccl._watch, args=arguments, daemon=True)
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


@pytest.mark.parametrize(("way", "deadline_s"), [(0, TIMEOUT_S), (1, TIMEOUT_S + RETURN_S)])
def test_a_transfer_that_does_not_end(watched, way, deadline_s):
    watched.memory[2 * way] = 5
    watched.memory[2 * way + 1] = 4
    assert deadline_s <= watched.lost_after() < deadline_s + 4 * nccl._LOOK_S + 0.2


def test_the_first_round_has_its_own_deadline(watched):
    """Also where the host is in a later round already: ranks may still load or compile."""
    watched.memory[:4] = torch.tensor([2, 1, 0, 0])
    assert FIRST_S <= watched.lost_after() < FIRST_S + 4 * nccl._LOOK_S + 0.2


def test_transfers_that_end_are_left_alone(watched):
    """Each starts anew, although at every look one is under way."""
    deadline = time.monotonic() + 3 * TIMEOUT_S
    while time.monotonic() < deadline:
        watched.counts[0] += 1
        time.sleep(TIMEOUT_S / 5)
        watched.counts[1] += 1
        watched.counts[2] += 1
        watched.counts[3] += 1
    time.sleep(2 * TIMEOUT_S)
    assert watched.exchange.lost_at is None


def test_a_node_that_has_failed(watched):
    watched.memory[4] = 1
    assert watched.told.wanted == 1
    assert watched.lost_after() < TIMEOUT_S
    watched.told.done = 1
    assert watched.memory[5] == 1


def test_the_thread_does_not_keep_the_exchange_alive(watched):
    del watched.exchange
    gc.collect()
    watched.thread.join(5.0)
    assert not watched.thread.is_alive()


class Levels(NetworkOnGPUs):
    """Without memory or a GPU."""

    def __init__(self, error: BaseException | None = None) -> None:
        def start(*args: object) -> None:
            if error is not None:
                raise error

        self.rail, self.rank, self.device = SimpleNamespace(start=start), 3, torch.device("cuda")
        self.memory, self._last_stream = SimpleNamespace(), None
        self.pending, self.lost = [], []

    def record_failure(self, found: list[int]) -> None:
        self.lost.append(found)

    def check(self) -> None:
        raise EPTimeoutError("dispatch", 1, [0], [0], "is missing")


@pytest.mark.parametrize(
    ("error", "raised", "lost"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, [3]),
        (MemoryError(), MemoryError, [3]),
        (RailError(), EPTimeoutError, []),
    ],
)
def test_a_start_that_an_exception_ends(error, raised, lost):
    """What is queued is unknown then: the others get this rank's name, not another round's rows."""
    levels = Levels(error)
    with pytest.raises(raised):
        levels.start(Transfer(torch.empty(0), torch.empty(0), [], []))
    assert levels.lost == [lost]


def test_a_capture_behind_an_abort(monkeypatch):
    """Its transfers are outside of the graph, which cannot wait for them."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    levels = Levels()
    levels.wait_for_pending()
    levels.pending.append(Transfer(torch.empty(0), torch.empty(0), [], []))
    with pytest.raises(RuntimeError, match="run a round outside of the graph first, on all ranks"):
        levels.wait_for_pending()
