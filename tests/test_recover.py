"""`epmoe.recover` after a SIGKILL, and `join_group` of a new rank, over processes of this machine.

Experts stay where they are, or move: a rank is then killed in the middle of a move.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import host as ranks
import pytest
import torch.distributed as dist
from helpers import ON_THE_CPU, ROOT, alone, long, slow
from host import Host
from launched import context

import epmoe
from epmoe.group.board import Board, key_of_rank
from epmoe.group.peers import MissingRankError, Peers
from epmoe.group.store import OutlivingStore


@pytest.mark.parametrize("dead", [0, 2])
def test_kill_recover_join(host, dead):
    """One dies, three go on; then a new one joins them, between two rounds."""
    alive = ranks.lose(host, ranks.serve(host, copies=1), dead)
    loaded = host.succeed(alive, ranks.go_on, host.folder)
    assert sum(map(len, loaded)) == ranks.EXPERTS // 4  # those of the dead rank
    host.play(alive)
    host.take_in(alive, [4], ranks.go_on)
    host.play([*alive, 4])


def test_another_dies_while_the_rest_recovers(host):
    """It never comes to the meeting, and nobody has heard of its end: the last call
    leaves it out.
    """
    ranks.lose(host, ranks.serve(host), 3)
    host.signal(2, signal.SIGKILL)
    host.succeed([0, 1], ranks.go_on, host.folder)
    host.play([0, 1])


LAST_CALL_S = 3.0


def go_on_late(
    state, folder: Path, how: str = "", late_s: float = 0.0, last_call_s: float = LAST_CALL_S
) -> None:
    """As on a machine that is busy: torch takes this rank so much longer, or what it imports before
    it calls.
    """
    if how == "connects":
        ranks.fail_in(state, "connects", partial(time.sleep, late_s))
    until = time.monotonic() + late_s
    while how == "calls" and time.monotonic() < until:
        pass
    ranks.go_on(state, folder, last_call_s=last_call_s)


@pytest.mark.parametrize("how", ["connects", "calls"])
def test_a_rank_that_is_late_is_not_given_up(host, how):
    """Later than the last call: it lives, and says so."""
    alive = ranks.lose(host, ranks.serve(host, copies=1), 3)
    host.start([1], go_on_late, host.folder, how, 1.5, 1.0)
    host.start([0, 2], go_on_late, host.folder, "", 0.0, 1.0)
    host.answers(alive)
    host.play(alive)


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize("cycles", [slow(3), long(25)])
def test_no_rank_that_lives_is_lost_on_a_busy_machine(host, cycles):
    """Two recoveries in each cycle: one rank dies, and a new one joins."""
    names = ranks.serve(host, ranks=3, copies=1)
    # Four processes for each core compute meanwhile.
    busy = [context.Process(target=spin) for _ in range(4 * os.cpu_count())]
    try:
        for process in busy:
            process.start()
        for new in range(3, 3 + cycles):
            alive = ranks.lose(host, names, names[new % 3])
            host.succeed(alive, go_on_late, host.folder)
            host.take_in(alive, [new], ranks.go_on)
            names = host.in_order([*alive, new])
            host.play(names)
    finally:
        for process in busy:
            process.kill()


def lose_the_last_word(state) -> None:
    """The next opening ends well on the other ranks, and this one does not learn it."""
    substep = Peers.substep

    @contextmanager
    def cut(self: Peers, then: Callable[[], object]) -> Iterator[None]:
        with substep(self):
            yield
        Peers.substep = substep
        raise MissingRankError(self, RuntimeError("the connection was lost"))

    Peers.substep = cut


@pytest.mark.parametrize("joins", [False, True])
def test_the_last_word_is_lost_on_the_way_to_one(host, joins):
    """All try again, none is left out, and weights are loaded once: the others must not go on
    without it.
    """
    names = ranks.lose(host, ranks.serve(host, copies=1), 3)
    new = [4] * joins
    host.do([1], lose_the_last_word)
    host.take_in(names, new, ranks.go_on)
    host.play([*names, *new])


def play_on_another_thread_meanwhile(state, folder: Path, how: str) -> list[str]:
    """What another thread gets while this one loads weights, and what this one's rounds give
    afterwards.
    """

    def load_weights(moves) -> None:
        with ThreadPoolExecutor(1) as other:
            error = other.submit(ranks.play, state).exception()
        results.append(f"{type(error).__name__}: {error}")
        ranks.take(state, moves)

    results = list[str]()
    if how == "recover":
        epmoe.recover(state.ep, folder, load_weights)
    elif not epmoe.resize(state.ep, folder, 2, load_weights):
        return []
    return [*results, ranks.play(state)]


@pytest.mark.parametrize("how", ["recover", "resize"])
def test_no_round_of_another_thread_before_the_weights_are_there(host, how):
    # Who recovers or resizes loads weights; another thread calls meanwhile.
    names = ranks.serve(host, ranks=3, copies=1)
    alive = ranks.lose(host, names, 2) if how == "recover" else names
    for refused, played in filter(
        None, host.do(alive, play_on_another_thread_meanwhile, host.folder, how)
    ):
        assert (
            refused.startswith("RuntimeError: another thread is in a call") and played == "played"
        )


def fail_to_load(state, folder: Path) -> str:
    """What the call raises that cannot load its weights."""
    try:
        epmoe.recover(state.ep, folder, lambda moves: 1 / 0)
    except ZeroDivisionError:
        return repr(state.ep)
    return "it has not raised"


@pytest.mark.parametrize("again", [False, True])
def test_no_round_runs_where_the_weights_could_not_be_loaded(host, again):
    """The other ranks hear of it at once. They go on without this one, or with it, and it loads all
    its experts.
    """
    alive = ranks.lose(host, ranks.serve(host, ranks=3, copies=1), 2)
    # Rank 1 cannot load, and leaves.
    host.start([1], fail_to_load, host.folder)
    host.succeed([0], ranks.go_on, host.folder)
    assert "closed" in host.results([1])[0]
    # Rank 0 hears of it in its next round.
    assert host.do([0], ranks.play_until_timeout) == [[1]]
    if not again:
        host.signal(1, signal.SIGKILL)
        alive = [0]
    # It goes on with rank 1 or without it.
    loaded = host.succeed(alive, ranks.go_on, host.folder)
    assert list(map(len, loaded)) == ([0, ranks.EXPERTS // 2] if again else [ranks.EXPERTS // 2])
    host.play(alive)


def die_while_experts_move(host: Host, stage: str) -> list[int]:
    """Rank 2 of four is killed. Returns the others, which name it."""
    names = host.begin(ranks.moving(4, seats=4))
    victim = 2
    # The move has come to its stage when the rank dies.
    ranks.begin_to_move(host, names, stage, victim)
    host.signal(victim, signal.SIGKILL)
    alive = [name for name in names if name != victim]
    for error in host.do(alive, ranks.finish):
        assert "EPTimeoutError" in error and f"rank(s) [{victim}]" in error, error
    return alive


@pytest.mark.parametrize("stage", ["drop", slow("copy"), "add"])
def test_a_rank_dies_while_experts_move(host, stage):
    """Before they are dropped, while weights are copied, and when they are ready. The others resume
    by hand.
    """
    alive = die_while_experts_move(host, stage)
    # The others form a group by hand; every expert still has a copy.
    assert ranks.resume_all(host, alive) == [[]] * 3
    ranks.all_held(host, alive)
    # Experts move again in the new group,
    host.succeed(alive, ranks.rotate)
    host.succeed(alive, ranks.finish)
    host.play(alive)
    # and all ranks find the same plan.
    plans = host.succeed(alive, ranks.balance)
    assert plans[0] and plans == plans[:1] * 3
    host.play(alive)


@pytest.mark.parametrize("stage", [slow("drop"), "copy", slow("add")])
def test_recover_and_join_while_experts_move(host, stage):
    """One is killed in the middle of a move, three go on; a new rank comes, and gets experts from
    the others.
    """
    alive = die_while_experts_move(host, stage)
    # Three go on with the copies that they have.
    assert host.succeed(alive, ranks.go_on, host.folder) == [[]] * 3  # survivors have copies of all
    ranks.all_held(host, alive)
    host.play(alive)
    # A new rank joins with empty slots,
    assert host.take_in(alive, [4], ranks.go_on) == [
        [[]] * 3,
        [[[ranks.EMPTY] * ranks.S] * ranks.L],
    ]
    names = [*alive, 4]
    host.play(names)
    # which the balancer fills with experts of the others.
    plans = host.succeed(names, ranks.balance)
    assert plans[0] and plans == plans[:1] * 4
    slots = ranks.all_held(host, names)
    # The balancer has filled the new rank's.
    assert all(set(layer[3 * ranks.S :]) != {ranks.EMPTY} for layer in slots)
    # A table without an empty slot works as well.
    host.succeed(names, ranks.fill)
    assert ranks.EMPTY not in [expert for layer in ranks.all_held(host, names) for expert in layer]
    host.play(names)
    # At last all recover in the middle of a move though nobody has died.
    ranks.begin_to_move(host, names, stage, 0)
    assert host.succeed(names, ranks.go_on, host.folder) == [[]] * 4  # nobody has died
    ranks.all_held(host, names)
    host.play(names)


def two_of_three(host: Host) -> list[int]:
    """Three ranks of two slots were there, and rank 1 is killed: the only copies of experts 2 and 3
    are lost.
    """
    return ranks.lose(host, host.begin(ranks.moving(3, 2, seats=4)), 1)


def test_lost_experts_are_loaded_and_the_last_rank_gets_more_slots(host):
    alive = two_of_three(host)
    host.form(alive)
    # By hand there is no way on: experts are lost.
    for error in host.do(alive, ranks.resume):
        assert error.startswith(
            "ValueError: logical expert(s) [2, 3] of layer 0 have no copy left, and 2 layer(s)"
        )
    # `recover` loads the lost experts on the two that are left.
    assert host.succeed(alive, ranks.go_on, host.folder) == [[(1, 2), (2, 2)], [(1, 3), (2, 3)]]
    ranks.all_held(host, alive)
    host.play(alive)
    # The last rank loads what it lacks, and has slots for all.
    (last,) = ranks.lose(host, alive, 0)
    assert host.succeed([last], ranks.go_on, host.folder) == [[(1, 1), (1, 2), (2, 1), (2, 2)]]
    assert len(ranks.all_held(host, [last])[0]) == ranks.E
    host.play([last])


def test_a_failed_attempt_loads_nothing(host):
    """Rank 2 opens the group and rank 0 does not: what rank 2 would have loaded is loaded in the
    next attempt.
    """
    alive = two_of_three(host)
    # Rank 0 believes that the first attempt has failed.
    host.do([0], lose_the_last_word)
    assert host.succeed(alive, ranks.go_on, host.folder) == [[(1, 2), (2, 2)], [(1, 3), (2, 3)]]
    host.play(alive)


@pytest.mark.parametrize("name", ["load_weights", "load_slots"])
def test_the_page_shows_it(host, name):
    """Functions of docs/recovery.md, word by word."""
    alive = ranks.lose(host, ranks.serve(host), 0) if name == "load_weights" else two_of_three(host)
    host.succeed(alive, follow_the_page, host.folder, name)
    host.play(alive)


def follow_the_page(state, folder: Path, name: str) -> None:
    (function,) = re.findall(
        rf"```python\n(def {name}.*?)```", (ROOT / "docs/recovery.md").read_text(), re.DOTALL
    )
    fixed = name == "load_weights"
    names = {"ep": state.ep, "w": state.rows[0] if fixed else state.rows}
    names["read"] = partial(ranks.read, state.ep.config, *[0] * fixed)
    exec(function, names)
    epmoe.recover(state.ep, folder, names[name], last_call_s=10.0)
    state.rows = names["w"][None] if fixed else names["w"]


def die_behind_the_word(state, folder: Path, number: int) -> None:
    """This rank is killed behind so many of its words in the store of the new process group."""
    write = OutlivingStore.set
    words = list[str]()

    def dies(self: OutlivingStore, key: str, value: str) -> None:
        write(self, key, value)
        if "/group" in key:
            words.append(key)
        # It has said so many words, and says no more.
        if len(words) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    OutlivingStore.set = dies
    ranks.go_on(state, folder, last_call_s=20.0)


def seconds_to_go_on(state, folder: Path) -> float:
    began = time.monotonic()
    ranks.go_on(state, folder, last_call_s=20.0)
    return time.monotonic() - began


@ON_THE_CPU
@pytest.mark.parametrize("number", [slow(1), slow(2)])
def test_a_death_while_the_others_connect(host, number):
    """The others see it long before the last call: gloo takes several of its timeouts for it."""
    names = ranks.serve(host, copies=1)
    host.start([3], die_behind_the_word, host.folder, number)
    host.start(names[:3], seconds_to_go_on, host.folder)
    assert max(host.answers(names[:3])) < 10.0
    host.play(names[:3])


def recover_alone(
    ep: epmoe.ExpertParallel, folder: Path, load_weights: Callable, **options
) -> None:
    epmoe.recover(ep, folder, load_weights, last_call_s=1.0, **options)


def test_a_rank_is_there_until_its_weights_are(folder_of_mine):
    """Others that look for it in the next meeting find signs of life while it loads."""
    words = list[str]()
    with epmoe.ExpertParallel(alone()) as ep:

        def load_weights(_: object) -> None:
            # As another rank looks: three different words mean that it lives.
            board = Board(OutlivingStore(folder_of_mine), "epmoe")
            key = key_of_rank(f"{ep.origin}/{ep.generation}", ep.rank)
            until = time.monotonic() + 20.0
            while len(words) < 3 and time.monotonic() < until:
                word = board.read(key)
                if word and word not in words:
                    words.append(word)

        recover_alone(ep, folder_of_mine, load_weights)
    assert len(words) == 3


def test_the_last_error_is_the_cause(folder_of_mine, monkeypatch, caplog):
    """Each attempt leaves a line in the log."""

    def fails(*_: object) -> None:
        raise RuntimeError("too many open files")

    with epmoe.ExpertParallel(alone()) as ep:
        monkeypatch.setattr(ep.life, "go_on", fails)
        with pytest.raises(TimeoutError, match="too many open files$") as caught:
            recover_alone(ep, folder_of_mine, lambda moves: None, timeout_s=1.0)
    assert str(caught.value.__cause__) == "too many open files"
    assert "too many open files" in caplog.text


@pytest.fixture
def folder_of_mine(tmp_path: Path) -> Iterator[Path]:
    """A folder for the board of a group of one rank, whose process group ends with the test."""
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()
