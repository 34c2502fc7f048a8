"""Ranks that hold experts, and wait for tokens of others: deaths, signals and new ranks, while idle
and under load.

Ranks 0 and 1 bring tokens, ranks 2 and 3 hold experts. Tests within one group:
tests/distributed/test_idle.py.
"""

from __future__ import annotations

import signal
import sys
import time

import pytest
import torch
from exchanges import assert_y, gains, given, make_config, make_tokens
from helpers import slow
from host import EXPERTS, Host
from waits import AT_ONCE_S, LONG_S, SHORT_S, SOON_S, stalls, until_it_sleeps

import epmoe

ASKING = [0, 1]
HOLDING = [2, 3]
RANKS = ASKING + HOLDING


def serve(host: Host, timeout_s: float = LONG_S) -> None:
    """A group that has played."""
    owners = [HOLDING[expert % 2] for expert in range(EXPERTS)]
    config = make_config(
        len(RANKS),
        experts=EXPERTS,
        timeout_s=timeout_s,
        placement={"strategy": "explicit", "assignment": owners},
        exchange={"idle": "wait"},
    )
    host.spawn(*RANKS)
    host.form_at(RANKS)
    host.succeed(RANKS, open_group, config)
    host.succeed(RANKS, play, 3)


def open_group(state, config: epmoe.EPConfig) -> None:
    state.ep = epmoe.ExpertParallel(config, device=state.device)
    state.asks = state.name in ASKING


def experts(ep: epmoe.ExpertParallel, d: epmoe.Dispatched) -> torch.Tensor:
    gain = gains(ep.config, d.hidden_size).to(ep.device)
    held = torch.tensor(ep.logical_experts(), dtype=torch.int64, device=ep.device)
    of_rows = held.repeat_interleave(d.tokens_per_expert)
    return d.rows[: len(of_rows)] * gain[of_rows]


def play(state, rounds: int) -> int:
    """Rounds of the role of this rank, whose y agree with the dense layer. Returns the experts that
    it holds.
    """
    ep = state.ep
    for seed in range(rounds):
        tokens = make_tokens(ep.config, ep.rank, 5 + ep.rank if state.asks else 0, seed=seed)
        d = ep.dispatch(*given(ep, tokens))
        y = ep.combine(experts(ep, d), d)
        ep.check()
        assert_y(y, ep.config, tokens)
    return ep.num_local_experts


def play_until_an_error(state) -> tuple[list[int], str, float]:
    """The ranks that the error names, its text, and when this process heard of it."""
    with stalls() as stalled_s:
        try:
            play(state, 10**9)
        except epmoe.EPTimeoutError as error:
            return error.missing_ranks, str(error), time.monotonic() - stalled_s()
    raise AssertionError("nothing ended")


def leave_by_a_signal(state) -> str:
    """By which exception it leaves the `with` of its ExpertParallel."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with state.ep:
            play(state, 10**9)
    except BaseException as error:
        return f"left by {type(error).__name__}"
    raise AssertionError("no signal came")


def wait_until_idle(host: Host, names: list[int]) -> None:
    for name in names:
        until_it_sleeps(host.processes[name].pid, looks=20)


def test_a_killed_rank_is_named_at_once_while_idle(host):
    """By idle ranks, and by those that come later."""
    serve(host)
    waiting = [1, 2]
    host.succeed([1], be_idle)
    host.start([*waiting, 3], play_until_an_error)
    wait_until_idle(host, [*waiting, 3])
    # One that waits is killed, and all others that wait hear of it.
    host.signal(3, signal.SIGKILL)
    killed = time.monotonic()
    for missing, text, at in host.answers(waiting):
        assert missing == [3] and "process has ended" in text
        assert at - killed < AT_ONCE_S
    # So does one that brings tokens only now.
    ((missing, text, _),) = host.succeed([0], play_until_an_error)
    assert missing == [3]


def be_idle(state) -> None:
    """From now on this rank brings no tokens."""
    state.asks = False


@pytest.mark.parametrize("handles", [True, False])
def test_sigterm_while_idle(host, handles):
    """A rank that leaves, or that ends, is named at once."""
    serve(host)
    host.start([2], play_until_an_error)
    host.start([3], leave_by_a_signal if handles else play_until_an_error)
    wait_until_idle(host, HOLDING)
    # A rank that handles the signal leaves the group. One that does not ends.
    host.signal(3, signal.SIGTERM)
    if handles:
        assert host.results([3]) == ["left by SystemExit"]
    else:
        host.processes[3].join(SOON_S)
    ((missing, text, _),) = host.answers([2])
    assert missing == [3]
    assert ("left the group" if handles else "process has ended") in text


def test_a_rank_that_is_stopped_while_idle_is_named_with_the_first_tokens(host):
    """Nobody waits for it before."""
    serve(host, timeout_s=SHORT_S)
    host.start(HOLDING, play_until_an_error)
    wait_until_idle(host, HOLDING)
    host.signal(3, signal.SIGSTOP)
    time.sleep(2 * SHORT_S)
    assert not host.pipes[2].poll(0), "a rank did not wait"
    host.start(ASKING, play_until_an_error)
    for missing, text, _ in host.answers([*ASKING, 2]):
        assert missing == [3] and "timed out" in text
    host.signal(3, signal.SIGKILL)


@pytest.mark.parametrize("victim", [3, slow(2), slow(0)])
def test_one_dies_and_one_joins_under_load(host, victim):
    """No y is wrong. The experts stay off the ranks that ask."""
    serve(host)
    host.start(RANKS, play_until_an_error)
    time.sleep(0.3)
    host.signal(victim, signal.SIGKILL)
    others = [name for name in RANKS if name != victim]
    for missing, _, _ in host.answers(others):
        assert missing == [victim]

    # They go on: who has held experts holds those of the victim.
    assert host.succeed(others, go_on, host.folder, 1) == [None] * 3
    held = host.succeed(others, play, 5)
    holders = [name for name in HOLDING if name != victim]
    share = EXPERTS // len(holders)
    assert held == [share if name in holders else 0 for name in others]

    # A new rank joins, and holds experts, too. Then nobody asks for a while.
    host.spawn(4)
    host.start([4], come, host.folder)
    host.wait_for_arrivals(1)
    host.start(others, go_on, host.folder, 4)
    host.answers([*others, 4])
    ranks = [*others, 4]
    host.start([name for name in ranks if name in (*HOLDING, 4)], play, 20)
    wait_until_idle(host, [4])
    asking = [name for name in ranks if name in ASKING]
    host.succeed(asking, play, 20)
    counts = host.answers([name for name in ranks if name in (*HOLDING, 4)])
    assert sum(counts) == EXPERTS and min(counts) > 0


def go_on(state, folder, ranks: int) -> None:
    epmoe.recover(state.ep, folder, lambda moves: None, min_ranks=ranks, last_call_s=10.0)


def come(state, folder) -> None:
    state.asks = False
    state.ep = epmoe.join_group(folder, device=state.device, timeout_s=60)
