"""What outlives a group: addresses, and with them CUDA graphs; and an `ExpertParallel`
that sleeps.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import host as ranks
import pytest
import torch
from exchanges import make_tokens
from helpers import interrupted_at, refuse_another_thread
from waits import SOON_S

import epmoe
from epmoe import EPResumeError, EPStateError, service
from epmoe.exchange.buffers import Buffers
from epmoe.life import life, membership

# Other processes may take and free memory of a GPU while it is measured.
TRIES = 20
JOINING = {module.__file__ for module in (life, membership, service)}


def is_valid(state, generation: int) -> bool:
    return state.ep.capture_is_valid(generation)


def wake(state) -> str:
    try:
        state.ep.wake()
    except EPResumeError:
        return "EPResumeError"
    return "awake"


def lose_memory(state) -> None:
    """Weights lose their memory, as those in a pool of the host."""
    state.kept = state.rows
    state.rows = torch.full_like(state.rows, torch.nan)


def sleep_with_weights(state) -> None:
    ranks.sleep(state, partial(lose_memory, state))


def wake_with_weights(state, failing: int | None = None) -> str:
    """Weights come back before any other thread has its turn. Rank `failing` cannot
    restore them.
    """

    def restore() -> None:
        assert state.ep.capture_is_valid(0)
        refuse_another_thread(state.ep.poll)
        if state.ep.rank == failing:
            raise MemoryError("of the host")
        state.rows = state.kept

    try:
        state.ep.wake(restore)
    except MemoryError:
        return repr(state.ep)
    return "awake"


def free_bytes(state) -> int:
    """Of this rank's GPU, or how many windows this process has less than it may."""
    return (
        torch.cuda.mem_get_info(state.device)[0]
        if state.device.type == "cuda"
        else -ranks.mapped_windows()
    )


def refusals(state) -> list[str]:
    said = []
    for call in (
        state.ep.poll,
        state.ep.sleep,
        state.ep.memory_plan,
        lambda: ranks.play_round(state, 0),
    ):
        with pytest.raises(EPStateError) as caught:
            call()
        said.append(str(caught.value))
    state.ep.abort()
    return said


def test_graphs_go_on_when_the_group_is_as_it_was(host):
    """3 → 2 → 3 ranks. A graph of other ranks does nothing, and `poll` tells it."""
    alive = ranks.lose(host, ranks.serve(host, ranks=3), 2)
    host.form(alive)
    host.do(alive, ranks.resume)
    assert host.do(alive, is_valid, 0) == [False] * 2 and host.do(alive, is_valid, 1) == [True] * 2
    host.play(alive)
    # A new rank makes the group what it was first.
    host.spawn(3)
    host.form([*alive, 3])
    placement = ranks.spread(3, 2)
    host.start(alive, ranks.resume, placement)
    host.start([3], ranks.create, ranks.staying(placement, host.device))
    host.answers([*alive, 3])
    assert host.do(alive, is_valid, 0) == [True] * 2 and host.do(alive, is_valid, 1) == [False] * 2
    host.play([*alive, 3])
    assert host.do([*alive, 3], ranks.captures) == [[0, 1]] * 2 + [[2]]


@pytest.mark.parametrize("victim", [0, 2])
def test_graphs_go_on_while_ranks_come_and_go(host, victim):
    """3 → 2 → 4 ranks in 4 seats: whoever stays captures once."""
    alive = ranks.lose(host, host.begin(ranks.moving(3, seats=4)), victim)
    ranks.resume_all(host, alive, None, True)
    assert host.do(alive, is_valid, 0) == [True] * 2
    # Two new ranks come, and experts fill their slots.
    host.spawn(3, 4)
    host.form([*alive, 3, 4])
    host.start(alive, ranks.resume)
    host.start([3, 4], ranks.create, ranks.moving(4, seats=4))
    host.results([*alive, 3, 4])
    host.succeed([*alive, 3, 4], ranks.fill)
    host.play([*alive, 3, 4])
    assert host.do([*alive, 3, 4], ranks.captures) == [[0]] * 2 + [[2]] * 2
    ranks.lose(host, [*alive, 3, 4], 3)  # errors name ranks of the group, not seats


def test_sleep_frees_all_and_graphs_go_on_after_wake(host):
    names = ranks.serve(host, ranks=2)

    def frees_all() -> bool:
        """Whether the memory of the plan is free while they sleep."""
        before = host.do(names, free_bytes)
        planned = host.do(names, ranks.sleep)
        after = host.do(names, free_bytes)
        if host.device.type == "cpu":
            planned = [2, 2]  # windows
        found = zip(before, after, planned, strict=True)
        return all(late - early >= nbytes for early, late, nbytes in found)

    for _ in range(TRIES):
        if frees_all():
            break
        assert host.do(names, wake) == ["awake"] * 2
    else:
        pytest.fail("their memory is not free")
    assert host.do(names, refusals) == [["this ExpertParallel sleeps: call `wake`"] * 4] * 2
    # Graphs go on behind each wake.
    for _ in range(2):
        assert host.do(names, wake) == ["awake"] * 2
        assert host.do(names, is_valid, 0) == [True] * 2
        host.play(names)
        host.do(names, ranks.sleep)
    # Asleep they resume, too.
    ranks.resume_all(host, names)
    assert host.do(names, ranks.captures) == [[0]] * 2


def test_weights_go_and_come_with_the_windows(host):
    names = ranks.serve(host, ranks=2)
    host.succeed(names, sleep_with_weights)
    assert host.do(names, wake_with_weights) == ["awake"] * 2
    host.play(names)
    assert host.do(names, ranks.captures) == [[0]] * 2


def test_a_rank_that_cannot_restore_its_weights(host):
    """Rounds of the others end at once. It takes part again with all its experts loaded."""
    names = ranks.serve(host, ranks=2)
    host.succeed(names, sleep_with_weights)
    closed, awake = host.do(names, wake_with_weights, 0)
    assert "closed" in closed and awake == "awake"
    begin = time.monotonic()
    assert host.do([1], ranks.play_until_timeout) == [[0]] and time.monotonic() - begin < SOON_S
    host.form(names)
    loaded, kept = host.do(names, ranks.resume)
    assert sorted(move[1] for move in loaded) == [*range(ranks.EXPERTS)] and kept == []
    host.play(names)


@pytest.mark.parametrize("step", ["asleep", "checks", "maps", "has windows"])
def test_a_death_during_sleep_and_wake(host, step):
    names = ranks.serve(host, ranks=3)
    host.do(names, ranks.sleep)
    if step == "asleep":
        host.signal(1, signal.SIGKILL)
        host.processes[1].join()
    else:
        host.succeed([1], ranks.fail_in, step, ranks.die)
        host.start([1], wake)
    begin = time.monotonic()
    assert host.do([0, 2], wake) == ["EPResumeError"] * 2
    assert time.monotonic() - begin < SOON_S
    # The others go on without it.
    ranks.resume_all(host, [0, 2])


@pytest.mark.parametrize("live", [False, True])
def test_a_death_while_weights_sleep(host, live):
    """`recover` restores nothing: the ranks that are left load all experts."""
    names = host.begin(ranks.moving(3)) if live else ranks.serve(host, ranks=3)
    host.succeed(names, sleep_with_weights)
    host.signal(2, signal.SIGKILL)
    loaded = set(itertools.chain(*host.succeed([0, 1], ranks.go_on, host.folder)))
    tags, experts = (range(1, ranks.L + 1), ranks.E) if live else ([0], ranks.EXPERTS)
    assert loaded == set(itertools.product(tags, range(experts)))
    host.play([0, 1])


def raise_interrupted() -> None:
    """As a signal handler does between two steps."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError("by a signal")))
    signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("step", ["checks", "maps", "has windows"])
def test_a_signal_during_wake(host, step):
    """All ranks are asleep then, and wake later. Graphs go on."""
    names = ranks.serve(host, ranks=2)
    host.do(names, ranks.sleep)
    for _ in range(TRIES):
        asleep = host.do(names, free_bytes)
        host.succeed([1], ranks.fail_in, step, raise_interrupted)
        assert host.do(names, wake) == ["EPResumeError"] * 2
        if host.do(names, free_bytes) == asleep:
            break
    else:
        pytest.fail("the memory of a wake that fails is not free")
    assert host.do(names, refusals) == [["this ExpertParallel sleeps: call `wake`"] * 4] * 2
    assert host.do(names, wake) == ["awake"] * 2
    host.play(names)
    assert host.do(names, ranks.captures) == [[0]] * 2


@pytest.fixture
def ep() -> Iterator[epmoe.ExpertParallel]:
    """Of this process alone."""
    config = ranks.staying(ranks.spread(1, 1), torch.device("cpu"))
    with epmoe.ExpertParallel(config) as ep:
        yield ep


@pytest.mark.parametrize("step", ["checks", "maps", "has windows"])
def test_no_other_thread_joins_while_one_wakes(ep, step):
    ep.sleep(lambda: refuse_another_thread(ep.poll))
    ranks.fail_in(
        None, step, lambda: [refuse_another_thread(call) for call in (ep.wake, ep.resume)]
    )
    ep.wake()
    assert ep.generation == 1


@pytest.mark.parametrize("step", ["wake", "resume"])
def test_close_leaves_what_another_thread_has_mapped(ep, monkeypatch, step):
    """On a GPU its kernels would end the process."""
    # Another thread closes while this one has mapped its scratch memory.
    begin = Buffers.let_rounds_begin
    mapped = []

    def closed_meanwhile(buffers: Buffers) -> None:
        begin(buffers)
        with ThreadPoolExecutor(1) as other:
            other.submit(ep.close).result()
        mapped.extend(places.mapped for places in ep.life.addresses._scratch.values())

    # Both steps map it anew, `wake` from a sleep.
    ep.sleep()
    if step == "resume":
        ep.wake()
    monkeypatch.setattr(Buffers, "let_rounds_begin", closed_meanwhile)
    getattr(ep, step)()
    assert mapped == [True] and ep.capture_is_valid(0)


def test_no_thread_joins_after_a_call_within_a_call(ep):
    """Of a signal handler, which wakes the group up in the middle of a failing `resume`."""
    ep.sleep()

    def handler() -> None:
        ranks.fail_in(None, "checks", raise_interrupted)
        with pytest.raises(EPResumeError):
            ep.resume()
        refuse_another_thread(ep.wake)

    ranks.fail_in(None, "checks", handler)
    ep.wake()


def test_a_resume_that_is_interrupted_keeps_no_move_to_itself(ep):
    """A signal handler raises at any step: the next `resume` returns what the caller has not
    learned.
    """
    lost = 0
    for event in itertools.count():
        generation = ep.generation
        with interrupted_at(event, JOINING) as interrupts, suppress(EPResumeError):
            ep.resume()
        if not interrupts.came:
            break
        # If the group had formed, the caller has not learned where the experts are.
        changed = ep.generation != generation
        assert len(ep.resume()) == ranks.EXPERTS * changed
        lost += changed
    assert lost > 0


def test_close_gives_back_what_a_failed_load_has_kept(ep):
    """Replays of graphs of other groups look into scratch."""
    scratch = ep.life.addresses._scratch.values()
    ep.sleep()
    with pytest.raises(ZeroDivisionError):
        ep.wake(lambda: 1 / 0)
    assert [places.mapped for places in scratch] == [True]
    ep.close()
    assert [places.mapped for places in scratch] == [False]


def test_what_cannot_sleep_or_wake(ep):
    with ep:
        with pytest.raises(EPStateError, match="does not sleep"):
            ep.wake()
        # While a round is open,
        tokens = make_tokens(ep.config, 0, 3)
        d = ep.dispatch(tokens.x, tokens.ids, tokens.weights)
        with pytest.raises(EPStateError, match="a round is open"):
            ep.sleep()
        ep.combine(d.rows, d)
        # where the host cannot free its memory,
        with pytest.raises(ZeroDivisionError):
            ep.sleep(lambda: 1 / 0)
        assert ep.capture_is_valid(0), "it is awake"
        ep.sleep()
        assert "asleep" in repr(ep) and not ep.capture_is_valid(0)
        ep.wake()
        assert ep.capture_is_valid(0) and ep.generation == 1
        ep.sleep()
        assert ep.resume() == (), "weights have stayed"
        # and where the group does not form.
        ep.sleep(lambda: None)
        with pytest.raises(EPResumeError):
            ranks.fail_in(None, "checks", raise_interrupted)
            ep.wake()
        assert ep.asleep and len(ep.resume()) == ranks.EXPERTS
        ep.sleep()
    with pytest.raises(EPStateError, match="does not sleep"):  # it is closed
        ep.wake()
