"""`epmoe.recover` after a SIGKILL, and `join_group` of a new rank, over processes of this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from host import EXPERTS, lose, play, serve, take

from epmoe import join_group, recover
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
