"""Service goes on after a death: `ExpertParallel.resume` on the ranks that remain, and with more
ranks.

This process is the host: it starts the ranks, kills or stops them, and has the others go on.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time

import host as ranks
import pytest
import torch.distributed as dist
from exchanges import assert_y, given, make_config, make_tokens
from helpers import slow
from slot_tables import times_slots
from waits import AT_ONCE_S, LONG_S, SOON_S, within

import epmoe


def expect_no_windows() -> None:
    """When new windows are opened, the old ones are gone: both might not fit."""
    assert ranks.mapped_windows() == 0


def window_starts(state) -> list[int]:
    return [region.data_ptr() for region in state.ep.exchange.window.regions]


def miss(state, mask: int) -> None:
    """Puts in the report of a rank that misses these ranks."""
    state.ep.exchange.views["signal.error"][0] |= mask


def keep_and_create(state) -> None:
    """A second object of the same group; it is the present one."""
    state.other = state.ep
    config = state.ep.config
    ranks.create(state, config)


def exchange_objects(state) -> None:
    state.ep, state.other = state.other, state.ep


@pytest.mark.parametrize("dead", [0, slow(2)])
def test_the_rest_goes_on_after_a_death(host, dead):
    """Rank 0 has hosted the store of the first group."""
    names = ranks.serve(host)
    starts = host.do(names, window_starts)
    # The old windows have gone when new ones open, at the same addresses.
    alive = ranks.lose(host, names, dead)
    host.form(alive)
    host.do(alive, ranks.fail_in, "opens its window", expect_no_windows)
    moves = host.do(alive, ranks.resume)
    assert host.do(alive, window_starts) == [starts[name][: len(alive)] for name in alive]
    assert all(source is not None for of_rank in moves for _, _, source in of_rank), (
        "weights of copies need no load"
    )
    host.play(alive)
    for rank, (text, generation, windows) in enumerate(host.do(alive, ranks.describe)):
        assert f"rank {rank} of 3, generation 1, E=8" in text and generation == 1
        assert windows == (3 if host.device.type == "cpu" else 0)


@pytest.mark.slow
def test_two_deaths_one_after_the_other(host):
    alive = ranks.serve(host, copies=3)
    for dead in (3, 0):
        alive = ranks.lose(host, alive, dead)
        ranks.resume_all(host, alive)


def test_the_last_rank_needs_no_group(host):
    alive = ranks.lose(host, ranks.serve(host, ranks=2), 0)
    host.do(alive, leave_groups)
    host.do(alive, ranks.resume)
    host.play(alive)


def leave_groups(state) -> None:
    dist.destroy_process_group()


# So many tokens of each rank two ranks send by the LL protocol, and a few more than three ranks.
@pytest.mark.parametrize("tokens", [1025, 2048])
@pytest.mark.parametrize("moment", ["in dispatch", "before combine", "in combine", "at any"])
def test_a_death_in_a_round_of_many_tokens(host, moment, tokens):
    """The other one of two ranks names it at once, and goes on alone."""
    config = make_config(1, experts=ranks.EXPERTS, max_tokens=2048, timeout_s=LONG_S)
    names = host.begin(config.with_placement(ranks.spread(2, 2)))
    host.succeed(names, play_many, tokens)
    host.start(names[:1], play_until_a_death, tokens)
    host.start(names[1:], play_many, tokens, 10**6, moment)
    if moment == "at any":
        time.sleep(random.Random(tokens).uniform(0.05, 0.3))
        host.signal(1, signal.SIGKILL)
    assert host.results(names[:1]) == [[1]]
    host.form(names[:1])
    host.succeed(names[:1], ranks.resume)
    host.succeed(names[:1], play_many, tokens)


def play_many(state, tokens: int, rounds: int = 3, dies: str = "") -> None:
    """Rounds of so many tokens, of which one is right. In the third this rank may die."""
    ep = state.ep
    mine = make_tokens(ep.config, ep.rank, tokens)
    arguments = given(ep, mine)
    for number in range(rounds):
        dying = dies if number == 2 else ""
        d = ep.dispatch(*arguments) if dying != "in dispatch" else ep.dispatch_send(*arguments)
        if dying in ("in dispatch", "before combine"):
            os.kill(os.getpid(), signal.SIGKILL)
        rows = times_slots(d, state.rows[0])
        if dying == "in combine":
            ep.combine_send(rows, d)
            os.kill(os.getpid(), signal.SIGKILL)
        y = ep.combine(rows, d)
        ranks.check_stream(ep)
        if number == 1:
            assert_y(y, ep.config, mine)


def play_until_a_death(state, tokens: int) -> list[int]:
    """The missing ranks."""
    with pytest.raises(epmoe.EPTimeoutError) as caught:
        play_many(state, tokens, 10**6)
    with within(AT_ONCE_S), pytest.raises(epmoe.EPTimeoutError):
        play_many(state, tokens)
    return caught.value.missing_ranks


@pytest.mark.parametrize("how", ["killed", slow("stopped"), slow("in the windows")])
def test_a_second_death_during_resume(host, how):
    resume_s = 4.0 if how == "stopped" else LONG_S
    alive = ranks.lose(host, ranks.serve(host, copies=3, resume_s=resume_s), 3)
    host.form(alive)
    rest = alive[:2]
    started = time.monotonic()
    # Rank 2 has formed the group, and dies or stops. The others name it.
    if how == "in the windows":
        host.do([2], ranks.fail_in, "opens its window", ranks.die)
        host.start([2], ranks.resume)
    else:
        host.signal(2, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    for error in host.do(rest, ranks.resume):
        assert error.startswith("EPResumeError: the new group did not form"), error
        assert "rank(s) [2] of the group" in error
    assert time.monotonic() - started < SOON_S
    # They go on without it.
    ranks.resume_all(host, rest)


def test_ranks_that_disagree_all_hear_of_it(host):
    alive = ranks.lose(host, ranks.serve(host, copies=3), 3)
    host.form(alive)
    # The placement of four ranks, and the one without the dead one.
    old = ranks.spread(4, 3)
    new = ranks.spread(4, 3).without([3])
    # What each rank passes, and what all of them hear.
    for placements, message in [
        ((new, new, ranks.spread(3, 1)), "the config of rank [012] differs from that of rank"),
        ((None, new, None), "the `placement` of rank [012] differs from that of rank"),
        ((old, old, old), "topology.ep_size must equal the size of the group, 3, got 4"),
    ]:
        for name, placement in zip(alive, placements, strict=True):
            host.start([name], ranks.resume, placement)
        # All of them raise.
        for error in host.results(alive):
            assert re.match(f"ValueError: {message}", error), error
    host.do(alive, ranks.resume)
    host.play(alive)


def test_survivors_with_different_views(host):
    """Each forms the group that it believes in. No group forms, all raise, and they agree once all
    have the report.
    """
    alive = ranks.lose(host, ranks.serve(host, copies=3), 3)
    # Rank 1 alone has heard that rank 2 is missing.
    host.do([1], miss, 1 << 2)
    views = [set(view) for view in host.do(alive, ranks.survivors)]
    assert views == [{0, 1, 2}, {0, 1}, {0, 1, 2}]
    for name, view in zip(alive, views, strict=True):
        if name in view:
            host.start([name], ranks.form, host.folder / f"views-{sorted(view)}", sorted(view), 1.0)
    assert all("timeout" in str(error).lower() for error in host.results(alive))
    # All have heard it.
    host.do([0, 2], miss, 1 << 2)
    assert host.do(alive, ranks.survivors) == [[0, 1]] * 3
    ranks.resume_all(host, [0, 1])


def test_a_stopped_rank_that_comes_back(host):
    """It sees the latch and has no way into the new windows; later it may come back by the same
    call.
    """
    names = ranks.serve(host, timeout_s=3.0)
    host.start([3], ranks.play_until_timeout)
    alive = ranks.lose(host, names, 3, signal.SIGSTOP)
    host.form(alive)
    host.do(alive, ranks.resume)
    # It continues while the others play, and learns what they have found.
    host.start(alive, ranks.play, 60)
    host.signal(3, signal.SIGCONT)
    (missing,) = host.results([3])
    assert missing == [3] and host.do([3], ranks.survivors) == [[0, 1, 2]]
    assert host.results(alive) == ["played"] * 3
    # It comes back as a new rank does.
    host.form(names)
    assert all("`placement` must be given" in error for error in host.do(names, ranks.resume)), (
        "it counts as new"
    )
    host.do(names, ranks.resume, ranks.spread(4, 2))
    host.play(names)


def test_a_group_grows(host):
    """First without a placement for the new rank: all raise, and the old group's windows still
    work.
    """
    names = [*ranks.serve(host, ranks=2, copies=1), 2]
    new = ranks.spread(3, 2)
    host.spawn(2)
    host.form(names)
    # Nothing says where experts go.
    host.start([2], ranks.create, ranks.staying(new, host.device))
    host.start([0, 1], ranks.resume)
    assert all("`placement` must be given" in error for error in host.results(names))
    host.play([0, 1])
    # The placement says it: each rank loads what it has not had.
    host.start([2], ranks.create, ranks.staying(new, host.device))
    host.start([0, 1], ranks.resume, new)
    moves = host.results(names)[:2]
    for rank, of_rank in enumerate(moves):
        before = {p for p in range(ranks.EXPERTS) if p % 2 == rank}
        after = {new.logical(p) for p in new.local_experts(rank)}
        assert {logical for _, logical, source in of_rank if source is None} == after - before
    host.play(names)
    assert [generation for _, generation, _ in host.do(names, ranks.describe)] == [1] * 3


@pytest.mark.parametrize(
    "arguments", [(ranks.spread(4, 1).without([1], spread_lost=True),), slow((None, True))]
)
def test_lost_experts_are_named(host, arguments):
    alive = ranks.lose(host, ranks.serve(host, copies=1), 1)
    host.form(alive)
    for error in host.do(alive, ranks.resume):
        assert error.startswith(
            "ValueError: logical expert(s) [1, 5] have no copy outside rank(s) [1]"
        )
    moves = host.do(alive, ranks.resume, *arguments)
    assert sorted(
        logical for of_rank in moves for _, logical, source in of_rank if source is None
    ) == [1, 5]
    host.play(alive)


def test_a_group_grows_whose_experts_move(host):
    """Slots stay, and the new rank's are empty; ranks that disagree on lost experts all raise."""
    host.begin(ranks.moving(2))
    before = host.succeed([0, 1], ranks.table)[0]
    host.spawn(2)
    # The new rank is rank 0. At first the former ones do not agree on lost experts.
    names = [2, 0, 1]
    for spread_lost in (True, False):
        host.form(names)
        host.start([2], ranks.create, ranks.moving(3))
        host.start([0], ranks.resume, None, spread_lost)
        host.start([1], ranks.resume)
        results = host.results(names)
        assert spread_lost == all(
            "the `spread_lost` of rank" in str(result) for result in results
        ), results
    assert (
        host.succeed(names, ranks.table)
        == [[[ranks.EMPTY] * ranks.S + layer for layer in before]] * 3
    )
    host.play(names)


def test_slots_begin_again_with_a_placement(host):
    names = host.begin(ranks.moving(2))
    host.succeed(names, ranks.rotate)
    host.succeed(names, ranks.finish)
    host.form(names)
    assert (
        list(map(len, host.succeed(names, ranks.resume, ranks.moving(2).place_experts())))
        == [ranks.L * ranks.S] * 2
    )
    assert ranks.all_held(host, names) == [[p % ranks.E for p in range(2 * ranks.S)]] * ranks.L
    host.play(names)


def test_ranks_that_resume_different_objects_hear_of_it(host):
    """Two ExpertParallels of one group, resumed in another order by one rank."""
    names = ranks.serve(host, ranks=2)
    host.do(names, keep_and_create)
    host.do([0], exchange_objects)
    host.form(names)
    assert all(
        "resume different ExpertParallels" in error for error in host.do(names, ranks.resume)
    )
    host.do([0], exchange_objects)
    host.do(names, ranks.resume)
    host.play(names)
