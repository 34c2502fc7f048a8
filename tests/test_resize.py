"""`epmoe.resize` over processes of this machine, also in the middle of a move."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import host as ranks
import pytest
import torch
import torch.distributed as dist
from helpers import is_right_in_a_fork, slow
from test_outlive import is_valid
from waits import LONG_S, SOON_S

import epmoe
import epmoe.group.recovery
from epmoe.group.board import Meeting


@pytest.mark.parametrize(("stage", "seats"), [("copy", 3), slow("drop", None), slow("add", 4)])
def test_two_four_three_while_experts_move(host, stage, seats):
    """Sums are right at every size, nothing is loaded anew, and ranks that leave hand their experts
    over. Four ranks of three seats get a fourth: earlier graphs are lost, and later ones stay good.
    """
    # Two ranks take in two more, which get experts from the balancer.
    ranks.begin_to_move(host, host.begin(ranks.moving(2, seats=seats)), stage, 0)
    assert host.take_in([0, 1], [2, 3], ranks.resize) == [
        [[]] * 2,
        [[[ranks.EMPTY] * ranks.S] * ranks.L] * 2,
    ]
    names = host.in_order([0, 1, 2, 3])
    host.play(names)
    assert host.succeed(names, ranks.balance)[0]
    # One of the four leaves in the middle of moves.
    ranks.begin_to_move(host, names, stage, 0)
    assert host.succeed(names, ranks.resize, host.folder, 3) == [[], [], [], False]
    ranks.all_held(host, names[:3])
    host.play(names[:3])
    # Another one leaves while the balancer has planned.
    assert host.succeed(names[:3], ranks.balance)[0]
    expected = [[], [], False]  # what the balancer has planned ends
    assert host.succeed(names[:3], ranks.resize, host.folder, 2, 20.0, True) == expected
    ranks.all_held(host, names[:2])
    host.play(names[:2])
    # Which graphs of the first ranks are still good.
    assert [host.succeed(names[:2], is_valid, n) for n in (0, 1)] == [
        [seats == 4] * 2,
        [seats is not None] * 2,
    ]


@pytest.mark.slow
def test_a_rank_that_has_too_few_slots_loads(host):
    """Two ranks of two slots become one of four: what the other held is loaded."""
    host.begin(ranks.moving(2, 2))
    assert host.succeed([0, 1], ranks.resize, host.folder, 1) == [
        [(1, 2), (1, 3), (2, 2), (2, 3)],
        False,
    ]
    host.play([0])


@pytest.mark.slow
def test_experts_that_stay(host):
    """Without `placement.live` the experts of ranks that leave are loaded, and all are spread anew
    over new ranks.
    """
    names = ranks.serve(host, ranks=2, copies=1)
    assert all(host.take_in(names, [2], ranks.resize)[0])
    host.play([0, 1, 2])
    *loaded, left = host.succeed([0, 1, 2], ranks.resize, host.folder, 2)
    assert left is False and ranks.EXPERTS // 3 <= sum(map(len, loaded)) <= -(-ranks.EXPERTS // 3)
    host.play([0, 1])


@pytest.mark.slow
def test_fewer_come_than_were_asked_for(host):
    names = ranks.serve(host, ranks=2)
    assert host.succeed(names, ranks.resize, host.folder, 3, 0.1) == [[], []]
    assert host.succeed(names, ranks.survivors) == [[0, 1]] * 2
    host.play(names)


def import_this(state) -> None:
    """Which takes seconds on a machine with other load."""


def recover_late(state, folder: Path) -> None:
    epmoe.recover(state.ep, folder, partial(ranks.take, state), last_call_s=LONG_S)


@pytest.mark.parametrize("where", [slow("connects"), slow("opens"), "maps", slow("confirms")])
def test_another_rank_dies_as_the_group_forms(host, where):
    """The others see the end of its process, and wait for no deadline."""
    ranks.lose(host, ranks.serve(host), 3)
    host.do([0, 1, 2], import_this)
    host.do([2], ranks.fail_in, where, ranks.die)
    host.start([2], recover_late, host.folder)
    begin = time.monotonic()
    assert host.do([0, 1], recover_late, host.folder) == [None] * 2
    assert time.monotonic() - begin < SOON_S
    host.play([0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["connects", "opens", "maps", "confirms"])
def test_a_new_rank_dies_as_the_group_forms(host, where):
    """The others wait for no other new rank in its place."""
    names = ranks.serve(host, ranks=2)
    host.spawn(2)
    host.do([*names, 2], import_this)
    host.do([2], ranks.fail_in, where, ranks.die)
    host.start([2], ranks.come, host.folder)
    begin = time.monotonic()
    host.succeed(names, ranks.resize, host.folder, 3)
    assert time.monotonic() - begin < SOON_S
    host.play(names)


def fail_to_form(state) -> None:
    """torch numbers process groups, also those that fail."""
    dist.destroy_process_group()
    with pytest.raises(RuntimeError):
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.1)
        )


@pytest.mark.slow
def test_a_process_in_which_a_group_has_failed(host):
    alive = ranks.lose(host, ranks.serve(host, ranks=3), 2)
    assert host.do([1], fail_to_form) == [None]
    assert host.do(alive, recover_late, host.folder) == [None] * 2


def is_refused_in_a_child(state, folder: Path) -> bool:
    def resize() -> None:
        with pytest.raises(epmoe.EPStateError, match="this ExpertParallel belongs to process"):
            epmoe.resize(state.ep, folder, 1, print)

    return is_right_in_a_fork(resize)


def resize_during_a_call(state, folder: Path) -> str:
    """What a thread gets while another one is in a call."""
    with ThreadPoolExecutor(1) as other:
        error = state.ep.life.alone(
            lambda: other.submit(epmoe.resize, state.ep, folder, 1, print).exception()
        )
    return f"{type(error).__name__}: {error}"


def resize_on_a_thread(state, folder: Path, size: int) -> list | bool:
    with ThreadPoolExecutor(1) as other:
        return other.submit(ranks.resize, state, folder, size).result()


def test_from_a_fork_and_from_other_threads(host):
    """What is refused leaves no word in the store. Then all threads of a rank may call in turn."""
    names = ranks.serve(host, ranks=2)
    assert host.do([1], is_refused_in_a_child, host.folder) == [True]
    (error,) = host.do([1], resize_during_a_call, host.folder)
    assert error.startswith("RuntimeError: another thread is in a call"), error
    assert not list(host.folder.glob("epmoe-board"))
    assert host.do(names, resize_on_a_thread, host.folder, 1)[1] is False
    host.play([0])


class Interrupted(BaseException):
    """What a signal handler raises."""


def resize_twice(state, folder: Path, where: str) -> list | bool:
    """A signal handler raises in the first call."""

    def handler(*_: object) -> None:
        (folder / "interrupted").touch()
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    now = partial(signal.raise_signal, signal.SIGALRM)
    soon = partial(signal.setitimer, signal.ITIMER_REAL, 0.2)
    ranks.fail_in(state, where, soon if where == "decides" else now)  # it waits there
    with pytest.raises(Interrupted):
        ranks.resize(state, folder, 2)
    return ranks.resize(state, folder, 2)


@pytest.mark.parametrize(
    ("where", "moves"),
    [
        slow("decides", False),
        slow("has half a group", False),
        ("maps", False),
        ("has windows", True),
    ],
)
def test_a_signal_handler_raises(host, where, moves):
    """The attempt ends for all, and all get into the next one once this rank calls again."""
    names = host.begin(ranks.moving(3)) if moves else ranks.serve(host, ranks=3)
    host.do(names, import_this)
    host.start([1], resize_twice, host.folder, where)
    while where == "decides" and not (host.folder / "interrupted").exists():
        time.sleep(0.01)
    begin = time.monotonic()
    host.start([0, 2], ranks.resize, host.folder, 2)
    assert [one is False for one in host.answers(names)] == [False, False, True]
    assert time.monotonic() - begin < SOON_S
    host.play(names[:2])


def put_on_the_last_rank(state) -> None:
    """The last expert of each layer is there only."""
    slots = state.ep.slots
    first = torch.arange(ranks.S).repeat(state.ep.size)
    first[-ranks.S :] = torch.tensor([ranks.E - 1, *[ranks.EMPTY] * (ranks.S - 1)])
    slots[:] = first
    state.ep.replace(slots, partial(ranks.weights, state))
    state.ep.apply()


@pytest.mark.parametrize("leaves", [False, slow(True)])
def test_a_signal_handler_raises_in_a_hand_over(host, leaves):
    """The call of `replace` is refused on all ranks, and done again once this rank calls again."""
    names = host.begin(ranks.moving(3))
    host.succeed(names, put_on_the_last_rank)
    rank = 2 if leaves else 1
    host.start([rank], resize_twice, host.folder, "hands over")
    host.start([name for name in names if name != rank], ranks.resize, host.folder, 2)
    assert host.answers(names) == [[], [], False]
    host.play(names[:2])


class LeftError(Exception):
    """What a signal handler raises."""


def interrupt() -> None:
    raise LeftError


def test_a_rank_that_was_interrupted_while_it_left(host):
    """It has left, also where it calls again once the others have gone on."""
    names = ranks.serve(host, ranks=3)
    host.do([2], ranks.fail_in, "leaves", interrupt)
    results = host.do(names, ranks.resize, host.folder, 2)
    assert results[2] == "LeftError: "
    assert host.do([2], ranks.resize, host.folder, 2) == [False]
    host.play(names[:2])


def test_a_rank_that_leaves_when_nobody_stays(host):
    """It waits for no decision, which nobody would make."""
    ranks.serve(host, ranks=2)
    host.signal(0, signal.SIGKILL)
    host.processes[0].join()
    begin = time.monotonic()
    assert host.do([1], ranks.resize, host.folder, 1) == [False]
    assert time.monotonic() - begin < SOON_S


def go_on_counted(state, folder: Path) -> int:
    """How many attempts it takes to recover."""
    attempts = []
    form = Meeting.connect

    def counted(*arguments) -> None:
        attempts.append(None)
        form(*arguments)

    Meeting.connect = counted
    ranks.go_on(state, folder)
    return len(attempts)


def test_a_new_rank_that_died_while_it_waited(host):
    """The others ask it whether it is still there: an attempt with it would last until
    `warmup_timeout_s`.
    """
    names = ranks.lose(host, ranks.serve(host), 2)
    host.spawn(4)
    host.start([4], ranks.come, host.folder)
    host.wait_for_arrivals(1)
    host.signal(4, signal.SIGKILL)
    assert host.do(names, go_on_counted, host.folder) == [1] * 3
    host.play(names)


def test_ranks_that_sleep_shrink(host):
    """They hand nothing over: who stays loads what only the others have held, if anything."""
    names = host.begin(ranks.moving(3))
    host.do(names, ranks.sleep)
    *_, left = host.succeed(names, ranks.resize, host.folder, 2)
    assert left is False
    ranks.all_held(host, names[:2])
    host.play(names[:2])
