"""`epmoe.recover` after a SIGKILL, and `join_group` of a new rank, over processes of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers import long, slow
from host import EXPERTS, context, lose, play, play_until_timeout, serve, take

from epmoe import join_group, recover, resize
from epmoe.group.peers import MissingRankError, Peers


def go_on(state, folder: Path, min_ranks: int = 1) -> int:
    """Recovers, and brings the weights where they belong; returns how many had to be loaded."""
    loaded = 0

    def load_weights(moves) -> None:
        nonlocal loaded
        loaded += sum(move.source is None for move in moves)
        take(state, moves)

    last_call_s = 3.0 if state.device.type == "cpu" else 10.0  # ranks may share GPUs by time slices
    recover(state.ep, folder, load_weights, min_ranks=min_ranks, max_ranks=4, last_call_s=last_call_s)
    return loaded


def come(state, folder: Path) -> int:
    state.ep = ep = join_group(folder, device=state.device, timeout_s=60)
    state.held = ep.placement.logical_experts(ep.rank)
    return len(state.held)


def die(state) -> None:
    signal.raise_signal(signal.SIGKILL)


@pytest.mark.parametrize("dead", [0, 2])
def test_kill_recover_join(host, dead):
    """One dies, three go on; then a new one joins them, between two rounds."""
    alive = lose(host, serve(host, copies=1), dead)
    loaded = host.do(alive, go_on, host.folder)
    assert all(isinstance(one, int) for one in loaded), loaded
    assert sum(loaded) == EXPERTS // 4  # those of the dead rank
    assert host.do(alive, play) == ["played"] * 3
    host.spawn(4)
    host.start([4], come, host.folder)
    host.start(alive, go_on, host.folder, 4)
    assert all(isinstance(one, int) for one in host.results([*alive, 4]))
    assert host.do([*alive, 4], play) == ["played"] * 4


def test_another_dies_while_the_rest_recovers(host):
    """It never comes to the meeting, and nobody has heard of its end: the last call leaves it out."""
    lose(host, serve(host, copies=2), 3)
    host.start([2], die)
    results = host.do([0, 1], go_on, host.folder)
    assert all(isinstance(one, int) for one in results), results
    assert host.do([0, 1], play) == ["played"] * 2


def connect_late(state, late_s: float) -> None:
    """The next process group takes this rank so much longer, as on a machine that is busy."""
    connect = dist.init_process_group

    def late(*arguments, **options) -> None:
        dist.init_process_group = connect
        time.sleep(late_s)
        connect(*arguments, **options)

    dist.init_process_group = late


def test_a_rank_that_connects_late_is_not_given_up(host):
    """Later than the last call: it lives, and says so."""
    alive = lose(host, serve(host, copies=1), 3)
    host.do([1], connect_late, 5.0)
    results = host.do(alive, go_on, host.folder)
    assert all(isinstance(one, int) for one in results), results
    assert host.do(alive, play) == ["played"] * 3


def go_on_late(state, folder: Path, late_s: float) -> int:
    """As one that imports what it needs on a busy machine."""
    until = time.monotonic() + late_s
    while time.monotonic() < until:
        pass
    return go_on(state, folder)


def test_a_rank_that_calls_late_is_not_given_up(host):
    alive = lose(host, serve(host, copies=1), 3)
    host.start([1], go_on_late, host.folder, 5.0)
    host.start([0, 2], go_on, host.folder)
    results = host.results(alive)
    assert all(isinstance(one, int) for one in results), results
    assert host.do(alive, play) == ["played"] * 3


def spin() -> None:
    while True:
        pass


def rank(state) -> int:
    return state.ep.rank


@pytest.mark.parametrize("cycles", [slow(3), long(25)])
def test_no_rank_that_lives_is_lost_on_a_busy_machine(host, cycles):
    """Two recoveries in each cycle: one rank dies, and a new one joins."""
    names, busy = serve(host, ranks=3, copies=1), [context.Process(target=spin) for _ in range(4 * os.cpu_count())]
    try:
        for process in busy:
            process.start()
        for new in range(3, 3 + cycles):
            alive = lose(host, names, names[new % 3])
            assert all(isinstance(one, int) for one in host.do(alive, go_on, host.folder))
            host.spawn(new)
            host.start([new], come, host.folder)
            host.start(alive, go_on, host.folder, 3)
            assert all(isinstance(one, int) for one in host.results([*alive, new]))
            ranks = host.do([*alive, new], rank)
            names = [name for _, name in sorted(zip(ranks, [*alive, new], strict=True))]
            assert host.do(names, play) == ["played"] * 3
    finally:
        for process in busy:
            process.kill()


def lose_the_last_word(state) -> None:
    """The next opening ends well on the other ranks, and this one does not learn it."""
    part = Peers.part

    @contextmanager
    def cut(self: Peers) -> Iterator[None]:
        with part(self):
            yield
        Peers.part = part
        raise MissingRankError(self, RuntimeError("the connection was lost"))

    Peers.part = cut


@pytest.mark.parametrize("joins", [False, True])
def test_the_last_word_is_lost_on_the_way_to_one(host, joins):
    """All try again, none is left out, and weights are loaded once: the others must not go on without it."""
    names = lose(host, serve(host, copies=1), 3)
    alive = [*names, 4] if joins else names
    if joins:
        host.spawn(4)
        host.start([4], come, host.folder)
    host.do([1], lose_the_last_word)
    host.start(names, go_on, host.folder, len(alive))
    results = host.results(alive)
    assert all(isinstance(one, int) for one in results), results
    assert host.do(alive, play) == ["played"] * len(alive)


def play_on_another_thread_meanwhile(state, folder: Path, how: str) -> list[str]:
    """What another thread gets while this one loads weights, and what this one's rounds give afterwards."""

    def load_weights(moves) -> None:
        with ThreadPoolExecutor(1) as other:
            error = other.submit(play, state).exception()
        results.append(f"{type(error).__name__}: {error}")
        take(state, moves)

    results = list[str]()
    if how == "recover":
        recover(state.ep, folder, load_weights)
    elif not resize(state.ep, folder, 2, load_weights):
        return []
    return [*results, play(state)]


@pytest.mark.parametrize("how", ["recover", "resize"])
def test_no_round_of_another_thread_before_the_weights_are_there(host, how):
    names = serve(host, ranks=3, copies=1)
    alive = lose(host, names, 2) if how == "recover" else names
    for refused, played in filter(None, host.do(alive, play_on_another_thread_meanwhile, host.folder, how)):
        assert refused.startswith("RuntimeError: another thread is in a call") and played == "played"


def fail_to_load(state, folder: Path) -> str:
    """What the call raises that cannot load its weights."""
    try:
        recover(state.ep, folder, lambda moves: 1 / 0)
    except ZeroDivisionError:
        return repr(state.ep)
    return "it has not raised"


@pytest.mark.parametrize("again", [False, True])
def test_no_round_runs_where_the_weights_could_not_be_loaded(host, again):
    """The other ranks hear of it at once. They go on without this one, or with it, and it loads all its experts."""
    alive = lose(host, serve(host, ranks=3, copies=1), 2)
    host.start([1], fail_to_load, host.folder)
    assert isinstance(host.do([0], go_on, host.folder)[0], int)
    assert "closed" in host.results([1])[0]
    assert host.do([0], play_until_timeout) == [[1]]
    if not again:
        host.signal(1, signal.SIGKILL)
        alive = [0]
    loaded = host.do(alive, go_on, host.folder)
    assert loaded == ([0, EXPERTS // 2] if again else [EXPERTS // 2])
    assert host.do(alive, play) == ["played"] * len(alive)
