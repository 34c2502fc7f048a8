"""Calls of one `ExpertParallel` from several threads: one thread at a time, and a refused one harms
only itself.

While experts move: tests/test_live.py.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import interrupted_at, randn, refuse_another_thread
from test_service import CONFIG, D, E, assert_works, inputs
from waits import SOON_S

import epmoe
from epmoe.exchange import sockets
from epmoe.exchange.places import Places
from epmoe.exchange.round_state import RoundState
from epmoe.group import board, deaths, waiting
from epmoe.group.store import OutlivingStore
from epmoe.native import ops

pytestmark = pytest.mark.usefixtures("serving")


@pytest.fixture
def ep():
    with epmoe.ExpertParallel(CONFIG) as ep:
        yield ep


def test_a_second_thread_in_a_call(ep, monkeypatch):
    """Calls of one `ExpertParallel` from several threads must be ordered; every one that is not is
    refused.
    """
    inside = threading.Event()
    go_on = threading.Event()
    dispatch = ops.dispatch

    def slow_dispatch(*arguments):
        inside.set()
        assert go_on.wait(30)
        dispatch(*arguments)

    monkeypatch.setattr(ops, "dispatch", slow_dispatch)
    got = []
    thread = threading.Thread(target=lambda: got.append(ep.dispatch(*inputs())))
    thread.start()
    assert inside.wait(30)
    want = "another thread is in a call of this ExpertParallel: one thread at a time"
    for call in (
        lambda: ep.dispatch(*inputs()),
        lambda: ep.dispatch_send(*inputs()),
        lambda: ep.combine(torch.zeros(60, D), None),
        lambda: ep.route(randn(5, E)),
    ):
        with pytest.raises(RuntimeError, match=want):
            call()
    # What only reads is open to every thread.
    assert ep.health().timeouts == 0 and "round" in repr(ep)
    go_on.set()
    thread.join()
    monkeypatch.undo()
    x, *_ = inputs()
    torch.testing.assert_close(ep.combine(got[0].rows, got[0]), x)  # a thread may hand a round on
    assert_works(ep)


def test_no_thread_gets_in_while_windows_go(ep, monkeypatch):
    """One that has asked for the exchange before `close`, and calls it afterwards."""
    # Another thread tries at the moment at which windows are unmapped.
    exchange = ep.exchange
    unmap = Places.unmap
    refused = []

    def interrupted(places):
        refuse_another_thread(lambda: exchange.run(lambda: None))
        refused.append(True)
        unmap(places)

    monkeypatch.setattr(Places, "unmap", interrupted)
    ep.close()
    assert refused and all(refused)


def test_a_refused_thread_costs_another_no_round(ep, monkeypatch):
    """The thread with the open round waits for the call that is about to be refused."""
    inside = threading.Event()
    go_on = threading.Event()
    next_epoch = RoundState.next_epoch
    x, *routing = inputs()
    d = ep.dispatch(x, *routing)

    def slow_next_epoch(self):
        inside.set()
        assert go_on.wait(30)
        return next_epoch(self)

    def refused():
        with pytest.raises(epmoe.EPStateError, match="round 1 is still open"):
            ep.dispatch(x, *routing)

    # Another thread is held up in the call that is refused.
    monkeypatch.setattr(RoundState, "next_epoch", slow_next_epoch)
    thread = threading.Thread(target=refused)
    thread.start()
    assert inside.wait(30)
    # This one combines meanwhile.
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    torch.testing.assert_close(ep.combine(d.rows, d), x)
    for ends in (thread, timer):
        ends.join()
    assert_works(ep)


@pytest.mark.parametrize("during", ["a call", "a round"])
def test_what_follows_a_refusal_harms_no_round(ep, monkeypatch, during):
    """Neither `abort`, as after any exception, nor a layer that gives its round up, nor `skip`."""
    x, *routing = inputs()
    dispatch = ops.dispatch
    errors = []

    def refused():
        try:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="another thread is in a call|still open"):
                    ep.dispatch(x, *routing)
                ep.abort()
                with (
                    pytest.raises(RuntimeError, match="another thread is in a call|still open"),
                    ep.giving_up(0),
                ):
                    ep.dispatch(x, *routing)
                with pytest.raises(RuntimeError, match="another thread"):
                    ep.skip()
        except BaseException as error:
            errors.append(error)

    def on_a_thread():
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()

    def interrupted(*arguments):
        on_a_thread()
        dispatch(*arguments)

    # The other thread calls within dispatch, or between dispatch and combine.
    if during == "a call":
        monkeypatch.setattr(ops, "dispatch", interrupted)
    d = ep.dispatch(x, *routing)
    monkeypatch.undo()
    if during == "a round":
        on_a_thread()

    # The round is right, and none was aborted.
    torch.testing.assert_close(ep.combine(d.rows, d), x)
    assert not errors and ep.health().aborted_rounds == [0] and ep.health().rounds == 1
    assert_works(ep)


def test_threads_without_order_get_errors_and_no_wrong_result(ep):
    """A refused call changes nothing and may be repeated; every round that completes is right."""
    wrong = []
    refused = set()

    def repeat_until_accepted(call, *arguments):
        while True:
            try:
                return call(*arguments)
            except RuntimeError as error:
                refused.add(re.sub(r"\d+", "n", str(error)))
                # Without a pause, this loop would keep the interpreter to itself for 5 ms.
                time.sleep(1e-5)

    def play(seed: int) -> None:
        for n in range(100):
            x = torch.full((4, D), float(seed * 1000 + n))
            d = repeat_until_accepted(ep.dispatch, x, *inputs(4)[1:])
            y = repeat_until_accepted(ep.combine, d.rows, d)
            wrong.extend([] if torch.allclose(y, x) else [n])

    threads = [threading.Thread(target=play, args=[seed]) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and repr(ep).endswith("round 300 closed)")
    assert refused <= {
        (
            "another thread is in a call of this ExpertParallel: one thread at a time, so order "
            "their calls"
        ),
        "round n is still open: call combine, or abort on all ranks, before dispatch",
    }


def test_a_wait_that_fails_at_its_deadline_has_not_ended_well(monkeypatch):
    """It fails between the deadline and the look whether it has ended."""
    go_on = threading.Event()

    class Late(threading.Thread):
        looked = False

        def is_alive(self) -> bool:
            if self.looked:
                go_on.set()
                self.join()
            self.looked = True
            return super().is_alive()

    def fails() -> None:
        assert go_on.wait(30)
        raise ValueError("late")

    # The thread ends right at the second look.
    monkeypatch.setattr(waiting, "Thread", Late)
    with pytest.raises(ValueError, match="late"):
        waiting.interruptible(fails, timeout_s=0)


class Watched:
    """Whose method `Deaths` calls."""

    def note(self, dead: int) -> None:
        raise AssertionError(f"nobody has ended, got {dead}")


def begin_deaths(folder: Path) -> None:
    deaths.Deaths({0: os.pidfd_open(os.getpid())}, Watched().note)


STARTS: dict[str, Callable[[Path], object]] = {
    "interruptible": lambda folder: waiting.interruptible(lambda: None),
    "worker": lambda folder: waiting.Worker("epmoe-test"),
    "deaths": begin_deaths,
    "handout": lambda folder: sockets.Handout(),
    "presence": lambda folder: board.Presence(board.Board(OutlivingStore(folder), "x"), "there"),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_handler_at_every_place_of_a_start(tmp_path, monkeypatch, start):
    """What it raises in the start is raised as it is, and no thread outlives what has begun it."""
    monkeypatch.setattr(board, "_BEAT_S", 0.01)
    files = {threading.__file__, waiting.__file__}
    before = set(threading.enumerate())
    for step in itertools.count():
        with interrupted_at(step, files) as found:
            STARTS[start](tmp_path)
        # What has begun goes with its object; the thread sees that by itself.
        until = time.monotonic() + SOON_S
        while set(threading.enumerate()) - before and time.monotonic() < until:
            gc.collect()
            time.sleep(0.001)
        assert set(threading.enumerate()) == before, step
        assert not threading._limbo, step
        if not found.came:
            break
    assert step > 5
