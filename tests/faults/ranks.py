"""What the ranks of a group run while one of them fails, and what they saw of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from busy import Holder
from exchanges import make_config, node_of, without_rank
from host import create, play_round, replay

import epmoe
from epmoe import Placement

EXPERTS = 8
ROUNDS = 6  # of a fault that rounds survive
NAMED_S = 10.0
"""A failure is named within the deadline and these seconds."""
HOLD_S = 3.5  # longer than some rounds on one multiprocessor and a deadline


@dataclass(frozen=True)
class Seen:
    """What a rank has seen of a fault.

    missing: ranks that an EPTimeoutError has named; None: there was none.
    seconds: of the round that failed, or of the longest round.
    alive: whether the device works.
    """

    missing: list[int] | None
    seconds: float
    alive: bool


def assert_seen(seen: list[Seen], expected: bool, within_s: float) -> None:
    """Ranks have reported what they should, in time, and all devices work."""
    assert expected and all(one.alive and one.seconds < within_s for one in seen), seen


def begin(
    state, placement: Placement, deadline_s: float, ranks_per_node: int | None = None
) -> None:
    """Joins the group, and loads what is needed on a busy GPU."""
    state.deadline_s = deadline_s
    exchange = {"warmup_timeout_s": 15.0}
    config = make_config(
        1, experts=EXPERTS, timeout_s=deadline_s, ranks_per_node=ranks_per_node, exchange=exchange
    )
    create(state, config.with_placement(placement))
    works(state.device)
    if state.device.type == "cuda":
        state.hold = Holder()


def works(device: torch.device) -> bool:
    eye = torch.eye(64, device=device)
    return bool(torch.equal(eye @ eye, eye))


def by_turns(state, seed: int) -> None:
    """Rounds by calls, and rounds that this rank has captured in an earlier group."""
    replay(state) if seed % 2 else play_round(state, seed)


def watch(
    state, victim: int, seed: int, rounds: int | None = None, play: Callable = by_turns
) -> Seen:
    """Plays rounds until one times out."""
    longest = 0.0
    n = 0
    while n != rounds:
        # The longest round counts, and the one that fails.
        started = time.monotonic()
        try:
            play(state, n % 3)
        except epmoe.EPTimeoutError as error:
            return Seen(error.missing_ranks, time.monotonic() - started, works(state.device))
        longest = max(longest, time.monotonic() - started)
        n = n + 1
    return Seen(None, longest, works(state.device))


through = partial(watch, rounds=ROUNDS)
"""Rounds that nothing harms."""


def at(rounds: dict[int, Callable]) -> Callable:
    """Plays these rounds, counted from 0, by functions of their own."""
    number = count()
    return lambda state, seed: rounds.get(next(number), by_turns)(state, seed)


def late(state, victim: int, seed: int) -> Seen:
    """Slow by half the deadline, before dispatch or before combine."""
    wait = partial(time.sleep, state.deadline_s / 2)

    def late_for_dispatch(state, seed: int) -> None:
        wait()
        play_round(state, seed)

    return through(
        state,
        victim,
        seed,
        play=at({2: late_for_dispatch, 4: partial(play_round, before_combine=wait)}),
    )


def without(state, victim: int, seed: int) -> Seen:
    """Rounds of which the third lacks the experts of the victim, which gives it up."""
    lacking = partial(play_round, but=lambda tokens: without_rank(state.ep, tokens, victim))
    return through(state, victim, seed, play=at({2: lacking}))


def no_memory(state) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=state.device)


def error(state) -> None:
    raise LookupError


def giving_up(state, victim: int, seed: int, fail: Callable, kind: type[Exception]) -> Seen:
    """An expert fails in the third round, and this rank gives that round up."""

    def failing(state, seed: int) -> None:
        try:
            play_round(state, seed, before_combine=lambda: fail(state))
        except epmoe.EPError:
            raise
        except kind:
            return state.ep.abort()
        raise AssertionError("the expert did not raise")

    return through(state, victim, seed, play=at({2: failing}))


raising = partial(giving_up, fail=error, kind=LookupError)
full = partial(giving_up, fail=no_memory, kind=RuntimeError)


def quitting(state, victim: int, seed: int) -> Seen:
    """An exception between dispatch and combine that nobody catches ends this rank's `with
    ExpertParallel(…)`.
    """
    state.gone = state.ep.generation
    with suppress(LookupError), state.ep:
        play_round(state, 0)
        play_round(state, 1, before_combine=lambda: error(state))
    return Seen(None, 0.0, works(state.device))


def mad(state, victim: int, seed: int) -> Seen:
    """Writes random bits into the windows of all other ranks, between its own rounds and during
    those of the others.
    """
    bits = torch.Generator().manual_seed(seed)
    window = node_of(state.ep).window

    def scribble(share: float) -> None:
        for other in (rank for rank in range(state.ep.size) if rank != victim):
            # A part of the window, anywhere in it.
            length = max(1, int(window.local.nbytes * share))
            start = int(torch.randint(0, window.local.nbytes - length + 1, (1,), generator=bits))
            scrawl = torch.randint(0, 256, (length,), generator=bits, dtype=torch.uint8)
            window.put(other, start, scrawl.to(state.device))

    def play(state, n: int) -> None:
        scribble((1.0, 0.1, 0.01, 0.001)[seed % 4])
        endure(state, n, before_combine=lambda: scribble(0.01))

    return through(state, victim, seed, play=play)


def endure(state, seed: int, **options: Callable) -> None:
    """A round on a corrupted window: errors and wrong rows may follow."""
    try:
        play_round(state, seed, **options)
    except epmoe.EPTimeoutError:
        raise
    except (epmoe.EPError, RuntimeError, AssertionError):
        with suppress(epmoe.EPError):
            state.ep.abort()


def busy(state, multiprocessors: int) -> None:
    """Rounds go on while another kernel holds so many multiprocessors, or all but one if there are
    no more.
    """
    ended = state.hold(min(multiprocessors, state.hold.multiprocessors - 1), HOLD_S)
    for n in range(3):
        play_round(state, n)
    assert not ended.query(), "the other kernel ended first"


def busy_on(state, victim: int, seed: int, multiprocessors: int) -> Seen:
    """Then the victim stays away."""
    busy(state, multiprocessors)
    return watch(state, victim, seed)


def busy_away(state, victim: int, seed: int, multiprocessors: int) -> Seen:
    busy(state, multiprocessors)
    return Seen(None, 0.0, works(state.device))
