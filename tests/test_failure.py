"""Ranks that die, stall or leave: the others name them, at once or at the deadline, and nothing is
left behind.

The tests start their own processes, since torchrun would end the survivors. Rounds that go on after
an exception: tests/distributed/test_mistakes.py.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from exchanges import make_config
from helpers import ON_THE_CPU, slow
from host import Host, create, play, play_round, survivors
from waits import AT_ONCE_S, LONG_S, SHORT_S, SOON_S, stalls, until, until_it_sleeps, within

import epmoe

pytestmark = ON_THE_CPU  # more on GPUs: tests/distributed/test_signals.py
ONE_TOKEN = torch.ones(1, 64), torch.zeros(1, 4, dtype=torch.int32), torch.full((1, 4), 0.25)


class Named(NamedTuple):
    """What a rank reports of the round that failed: the error, how long the round took, and when it
    ended, both without the time in which this process has not run.
    """

    stage: str
    missing: list[int]
    missing_global: list[int]
    text: str
    took: float
    at: float


def serve(host: Host, size: int = 3, nodes: int = 1, timeout_s: float = SHORT_S) -> list[int]:
    """A group whose first round, which has a deadline of its own, is over."""
    names = list(range(size))
    host.spawn(*names)
    host.form(names)
    exchange = {"warmup_timeout_s": max(timeout_s, 30.0)}
    config = make_config(
        size, experts=7, timeout_s=timeout_s, ranks_per_node=size // nodes, exchange=exchange
    )
    host.succeed(names, begin, config)
    host.succeed(names, play, 1)
    return names


def begin(state, config: epmoe.EPConfig) -> None:
    state.before = open_files()
    create(state, config)


def open_files() -> set[str]:
    """Mapped windows and open files of this process; a peer's death may close others."""
    held = {
        line.split(maxsplit=5)[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "epmoe-" in line
    }
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            held.add(os.readlink(descriptor))
    return held


def survive(state) -> Named:
    """Plays rounds until one times out. Only close() ends the failure: until then every call raises
    at once.
    """
    ep = state.ep
    while True:
        started = time.monotonic()
        try:
            with stalls() as stalled_s:
                play_round(state, 0)
        except epmoe.EPTimeoutError as error:
            at = time.monotonic() - stalled_s()
            # Survivors are the others, and all calls raise at once.
            assert not set(error.missing_ranks) & set(ep.survivors())
            for call in (ep.poll, ep.check, lambda: play_round(state, 0)):
                with within(AT_ONCE_S), pytest.raises(epmoe.EPTimeoutError):
                    call()
            assert ep.health().timeouts == 1
            return Named(
                error.stage,
                error.missing_ranks,
                error.missing_global_ranks,
                str(error),
                at - started,
                at,
            )


def begin_a_round(state) -> None:
    state.ep.dispatch(*ONE_TOKEN)


def close(state) -> set[str]:
    """What is left open then."""
    state.ep.close()
    return open_files() - state.before


def assert_named(seen: list[Named], who: int, words: str = "") -> None:
    for one in seen:
        assert one.missing == one.missing_global == [who]
        assert f"rank(s) [{who}]" in one.text and words in one.text
        assert ("process has ended" in one.text) == (words == "process has ended")


def kill(
    host: Host, dead: int, others: list[int], stages: tuple[str, ...] = ("dispatch", "combine")
) -> None:
    """The others name the rank at once, and close."""
    host.signal(dead, signal.SIGKILL)
    killed = time.monotonic()
    seen = host.answers(others)
    assert_named(seen, dead, "process has ended")
    assert all(one.at - killed < AT_ONCE_S and one.stage in stages for one in seen)
    assert host.do(others, close) == [set()] * len(others)


@pytest.mark.parametrize(("stage", "dead"), [("combine", 1), ("dispatch", 0)])
def test_a_killed_rank_is_named(host, stage, dead):
    others = [name for name in serve(host, timeout_s=LONG_S) if name != dead]
    host.start(others, survive)
    if stage == "combine":
        host.succeed([dead], begin_a_round)
    kill(host, dead, others, (stage,))
    host.form(others)
    host.succeed(others, create, make_config(2))
    host.play(others)  # a new group of the survivors starts afresh


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_a_rank_killed_at_any_moment(host, seed):
    """Between rounds, in dispatch or in combine, by chance."""
    rng = random.Random(seed)
    names = serve(host, timeout_s=LONG_S)
    dead = rng.choice(names)
    host.start(names, survive)
    time.sleep(rng.uniform(0, 0.05))
    kill(host, dead, [name for name in names if name != dead])


def test_a_rank_that_exits_after_its_part_hurts_nobody(host):
    """The others wait for one another, and its process is gone meanwhile. It has not closed
    anything.
    """
    serve(host, timeout_s=LONG_S)
    host.start([0], give_up_and_exit)
    host.processes[0].join(SOON_S)
    assert host.succeed([1, 2], play_after_the_exit) == [([1, 2], [1, 0, 0])] * 2
    assert host.do([1, 2], close) == [set()] * 2


def give_up_and_exit(state) -> None:
    """Its signals of the whole round are out when it ends."""
    state.ep.dispatch_send(*ONE_TOKEN)
    state.ep.abort()
    os._exit(0)


def play_after_the_exit(state) -> tuple[list[int], list[int]]:
    """Rank 2 keeps rank 1 waiting, in dispatch and in combine, until well after the
    end of rank 0.
    """
    ep = state.ep
    until(lambda: ep.survivors() == [1, 2])
    late_s = 0.3 * (ep.rank == 2)
    time.sleep(late_s)
    d = ep.dispatch(*ONE_TOKEN)
    time.sleep(late_s)
    ep.combine(d.rows, d)
    return ep.survivors(), ep.health().aborted_rounds


def test_a_stopped_rank_is_named_and_raises_too(host):
    """To the others SIGSTOP looks like death. The stopped rank continues, finds the group latched,
    and ends cleanly.
    """
    names = serve(host)
    host.start(names, survive)
    host.signal(2, signal.SIGSTOP)
    seen = host.answers([0, 1])
    assert_named(seen, 2)
    assert all(one.took < SHORT_S + AT_ONCE_S for one in seen)
    host.signal(2, signal.SIGCONT)
    assert host.answers([2])[0].missing == [2], "it hears what the others have found"
    assert host.do(names, close) == [set()] * 3


@pytest.mark.parametrize("fault", ["dies", "dies in a round", "stops"])
def test_every_rank_of_two_nodes_names_the_rank_that_is_gone(host, fault):
    serve(host, 4, nodes=2)
    others = [0, 1, 3]
    host.start(others, survive)
    if fault == "dies in a round":
        host.succeed([2], begin_a_round)
    host.signal(2, signal.SIGSTOP if fault == "stops" else signal.SIGKILL)
    for one in host.answers(others):
        assert one.missing == one.missing_global == [2] and one.took < SHORT_S + AT_ONCE_S, one
    assert host.do(others, survivors) == [others] * 3


def wait_until_a_signal(state) -> tuple[float, str]:
    """Leaves the `with` of its ExpertParallel: when, and by which exception."""
    # A forked server of pytest may ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with state.ep:
            survive(state)
    except BaseException as error:
        return time.monotonic(), type(error).__name__
    raise AssertionError("no signal came")


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")],
    ids=["Ctrl-C", "TERM"],
)
def test_a_signal_ends_the_wait_and_releases_the_others(host, number, error):
    """Ranks 1 and 2 wait for rank 0, which stays away. The signal ends rank 1 at once, and rank 2
    hears of it.
    """
    serve(host, timeout_s=LONG_S)
    host.start([2], survive)
    host.start([1], wait_until_a_signal)
    # Both wait.
    for name in (1, 2):
        until_it_sleeps(host.processes[name].pid)
    # Rank 1 leaves at once,
    pressed_at = time.monotonic()
    host.signal(1, number)
    ((left_at, raised),) = host.results([1])
    assert raised == error and left_at - pressed_at < SOON_S
    # and rank 2 says who has left.
    seen = host.answers([2])
    assert_named(seen, 1, "rank(s) [1] of the group (global rank(s) [1]) left the group")
    assert seen[0].at - left_at < AT_ONCE_S
    assert host.do([1, 2], close) == [set()] * 2


def test_sigterm_without_a_handler_ends_the_process_at_once(host):
    serve(host, timeout_s=LONG_S)
    host.start([1], survive)
    until_it_sleeps(host.processes[1].pid)
    host.signal(1, signal.SIGTERM)
    host.processes[1].join(SOON_S)
    assert host.processes[1].exitcode == -signal.SIGTERM
