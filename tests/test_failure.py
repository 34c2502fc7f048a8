"""Ranks that die or stall: the others name a dead rank at once and a stalled one at the deadline. Nothing is left.

The tests start their own processes, since torchrun would end the survivors. They use no fixed ports, and no sleeps to
wait for a state: a rank reports when it has reached the point where it is to be killed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import slow
from launched import context

import epmoe

RANKS = 3
TIMEOUT_S = 0.5
LONG = {"timeout_s": 20.0}
AT_ONCE_S = 0.5  # after a death
SLACK_S = 5.0  # this machine may have fewer cores than ranks
NOTHING_LEFT = ("left behind", set())


class Rank:
    """A process that runs `body(ep, report)` on its own ExpertParallel; `report` sends to this process."""

    def __init__(self, rank: int, topology: dict, store: Path, body: Callable, exchange: dict):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(rank, topology, store, body, exchange, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def next_report(self, timeout_s: float = 60.0):
        assert self.pipe.poll(timeout_s), "a rank does not report"
        return self.pipe.recv()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


def _run(rank: int, topology: dict, store: Path, body: Callable, exchange: dict, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=topology["ep_size"])
    before = open_files()
    config = epmoe.EPConfig(
        model={"num_experts": 7, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"},
        topology=topology,
        capacity={"max_num_tokens_per_rank": 8},
        exchange={"timeout_s": TIMEOUT_S, "warmup_timeout_s": 30.0} | exchange,
    )
    ep = epmoe.ExpertParallel(config)
    body(ep, pipe.send)
    ep.close()
    pipe.send(("left behind", open_files() - before))
    os._exit(0)  # tearing down the group of a killed rank may hang


def open_files() -> set[str]:
    """Mapped windows and open files of this process; a peer's death may close others."""
    held = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "epmoe-" in line}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            held.add(os.readlink(descriptor))
    return held


def play_round(ep: epmoe.ExpertParallel) -> None:
    """One round of 6 tokens with experts that return their input, checked."""
    x = torch.full((6, 64), 1.0 + ep.rank)
    ids = (torch.arange(12).view(6, 2) + ep.rank) % 7
    d = ep.dispatch(x, ids, torch.full((6, 2), 0.5))
    assert torch.equal(ep.combine(d.rows, d), x)


def survive(ep: epmoe.ExpertParallel, report: Callable, rounds: int | None = None) -> None:
    """Plays rounds until one times out, then reports the error and the duration of the failed round."""
    while rounds is None or rounds:
        started = time.monotonic()
        try:
            play_round(ep)
        except epmoe.EPTimeoutError as error:
            named, took = time.monotonic(), time.monotonic() - started
            report(("timeout", error.stage, error.missing_ranks, error.missing_global_ranks, str(error), took, named))
            assert not set(error.missing_ranks) & set(ep.survivors())
            _assert_latched(ep)
            return
        rounds = rounds and rounds - 1


def _assert_latched(ep: epmoe.ExpertParallel) -> None:
    """Only close() ends the state of failure; until then every call raises at once."""
    started = time.monotonic()
    for call in (ep.poll, ep.check, lambda: play_round(ep)):
        with pytest.raises(epmoe.EPTimeoutError):
            call()
    assert time.monotonic() - started < AT_ONCE_S and ep.health().timeouts == 1


@contextmanager
def ranks(tmp_path: Path, bodies: list[Callable], nodes: int = 1, **exchange) -> Iterator[list[Rank]]:
    """One process for each body. At the end all processes have ended, and /dev/shm is unchanged but for semaphores."""
    before = shared_memory_files()
    topology = {"ep_size": len(bodies), "ranks_per_node": len(bodies) // nodes}
    started = [Rank(rank, topology, tmp_path / "store", body, exchange) for rank, body in enumerate(bodies)]
    try:
        yield started
        for rank in started:
            rank.process.join(30)
            assert rank.process.exitcode is not None, "a rank does not end"
    finally:
        for rank in started:
            rank.process.kill()
    assert shared_memory_files() <= before


def shared_memory_files() -> set[str]:
    """Files in /dev/shm. Python's semaphores are among them for a moment, those of other tests too."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def assert_names_the_dead(
    survivors: list[Rank], dead: int, killed: float | None = None, stages: tuple[str, ...] = ("dispatch", "combine")
) -> None:
    """`killed`: when the process was, by the clock `time.monotonic`; None: it lives and is silent."""
    for rank in survivors:
        kind, stage, missing, missing_global, text, took, named = rank.next_report()
        assert kind == "timeout" and stage in stages and missing == missing_global == [dead]
        assert f"rank(s) [{dead}]" in text
        assert ("process has ended" in text) == (killed is not None)
        assert took < TIMEOUT_S + SLACK_S if killed is None else named - killed < AT_ONCE_S
        assert rank.next_report() == NOTHING_LEFT
        rank.process.join(30)
        assert rank.process.exitcode == 0


def stop_after_dispatch(ep: epmoe.ExpertParallel, report: Callable) -> None:
    play_round(ep)
    ep.dispatch(torch.ones(1, 64), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    report("dispatched")
    signal.pause()


def stop_before_dispatch(ep: epmoe.ExpertParallel, report: Callable) -> None:
    play_round(ep)
    report("between rounds")
    signal.pause()


def play_on(ep: epmoe.ExpertParallel, report: Callable) -> None:
    play_round(ep)
    report("playing")
    survive(ep, report)


@pytest.mark.parametrize(
    ("body", "stage", "dead"), [(stop_after_dispatch, "combine", 1), (stop_before_dispatch, "dispatch", 0)]
)
def test_a_killed_rank_is_named(tmp_path, body, stage, dead):
    bodies = [body if rank == dead else survive for rank in range(RANKS)]
    with ranks(tmp_path, bodies, **LONG) as started:
        started[dead].next_report()
        killed = time.monotonic()
        started[dead].send_signal(signal.SIGKILL)
        assert_names_the_dead([rank for rank in started if rank is not started[dead]], dead, killed, (stage,))


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_a_rank_killed_at_any_moment(tmp_path, seed):
    """Between rounds, in dispatch or in combine, by chance."""
    rng = random.Random(seed)
    dead = rng.randrange(RANKS)
    bodies = [play_on if rank == dead else survive for rank in range(RANKS)]
    with ranks(tmp_path, bodies, **LONG) as started:
        started[dead].next_report()
        wait([], timeout=rng.uniform(0, 0.05))
        killed = time.monotonic()
        started[dead].send_signal(signal.SIGKILL)
        assert_names_the_dead([rank for rank in started if rank is not started[dead]], dead, killed)


def test_a_rank_that_exits_after_its_part_hurts_nobody(tmp_path):
    """The others wait for one another, and its process is gone meanwhile. It has not closed anything."""
    with ranks(tmp_path, [give_up_and_exit, play_after_the_exit, play_after_the_exit], on_abort="zeros") as started:
        started[0].process.join(30)
        for rank in started[1:]:
            assert rank.next_report() == ([1, 2], [1, 0, 0])
            assert rank.next_report() == NOTHING_LEFT


def give_up_and_exit(ep: epmoe.ExpertParallel, report: Callable) -> None:
    """Its signals of the whole round are out when it ends."""
    play_round(ep)
    ep.dispatch_send(torch.ones(1, 64), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
    ep.abort()
    os._exit(0)


def play_after_the_exit(ep: epmoe.ExpertParallel, report: Callable) -> None:
    """Rank 2 keeps rank 1 waiting, in dispatch and in combine, until well after the end of rank 0."""
    play_round(ep)
    give_up = time.monotonic() + 30
    while ep.survivors() != [1, 2] and time.monotonic() < give_up:
        time.sleep(0.01)
    x, late_s = torch.ones(1, 64), 0.3 * (ep.rank == 2)
    time.sleep(late_s)
    d = ep.dispatch(x, torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), 0.5))
    time.sleep(late_s)
    ep.combine(d.rows, d)
    report((ep.survivors(), ep.health().aborted_rounds))


def test_a_stopped_rank_is_named_and_raises_too(tmp_path):
    """To the others SIGSTOP looks like death. The stopped rank continues, finds the group latched, and ends cleanly."""
    bodies = [survive, survive, play_on]
    with ranks(tmp_path, bodies) as started:
        started[2].next_report()
        started[2].send_signal(signal.SIGSTOP)
        assert_names_the_dead(started[:2], 2)
        started[2].send_signal(signal.SIGCONT)
        kind, *_ = started[2].next_report()
        assert kind == "timeout"
        assert started[2].next_report() == NOTHING_LEFT


def test_a_slow_rank_is_waited_for(tmp_path):
    """Slower than the ordinary deadline, but in the first round, which has a longer one."""
    with ranks(tmp_path, [play_once, play_once_late, play_once]) as started:
        for rank in started:
            assert rank.next_report() == "played"
            assert rank.next_report() == NOTHING_LEFT


def play_once(ep: epmoe.ExpertParallel, report: Callable) -> None:
    play_round(ep)
    report("played")


def play_once_late(ep: epmoe.ExpertParallel, report: Callable) -> None:
    wait([], timeout=2 * TIMEOUT_S)
    play_once(ep, report)


def test_a_new_group_of_the_survivors_starts_afresh(tmp_path):
    with ranks(tmp_path, [survive_and_regroup, survive_and_regroup, stop_before_dispatch]) as started:
        started[2].next_report()
        started[2].send_signal(signal.SIGKILL)
        for rank in started[:2]:
            assert rank.next_report()[0] == "timeout"
            assert rank.next_report() == "alive"


def survive_and_regroup(ep: epmoe.ExpertParallel, report: Callable) -> None:
    survivors = dist.new_group([0, 1], use_local_synchronization=True)
    survive(ep, report)
    ep.close()
    config = ep.config.model_copy(update={"topology": ep.config.topology.model_copy(update={"ep_size": 2})})
    with epmoe.ExpertParallel(config, group=survivors) as smaller:
        play_round(smaller)
    report("alive")


@pytest.mark.parametrize("fault", ["dies", "dies in a round", "stops"])
def test_every_rank_of_two_nodes_names_the_rank_that_is_gone(tmp_path, fault):
    bodies = [survive_together, survive_together, FAULTS[fault], survive_together]
    with ranks(tmp_path, bodies, nodes=2) as started:
        for rank in (started[0], started[1], started[3]):
            kind, _, missing, missing_global, text, took, _ = rank.next_report()
            assert kind == "timeout" and missing == missing_global == [2], text
            assert took < TIMEOUT_S + 2.0, text
            assert rank.next_report() == [0, 1, 3]
        started[2].process.kill()


def survive_together(ep: epmoe.ExpertParallel, report: Callable) -> None:
    """Ends once all others have timed out, too: a process that has ended is no survivor."""
    survive(ep, report)
    report(ep.survivors())
    store = dist.distributed_c10d._get_default_store()
    store.add("seen", 1)
    while store.add("seen", 0) < ep.size - 1:
        time.sleep(0.02)


def fail_by(number: int, in_a_round: bool, ep: epmoe.ExpertParallel, report: Callable) -> None:
    for _ in range(20):
        play_round(ep)
    if in_a_round:
        ep.dispatch(torch.ones(6, 64), torch.zeros(6, 2, dtype=torch.int64), torch.ones(6, 2))
    os.kill(os.getpid(), number)


FAULTS = {
    "dies": partial(fail_by, signal.SIGKILL, False),
    "dies in a round": partial(fail_by, signal.SIGKILL, True),
    "stops": partial(fail_by, signal.SIGSTOP, False),
}
