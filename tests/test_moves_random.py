"""Drawn steps of four ranks whose experts move: other threads call, signal handlers raise, children are forked, plans
are refused and cancelled, rounds are aborted and overflow, and a rank dies. Every whole round has the right sums.

A failure names its seed: EPMOE_FUZZ_FIRST=<seed> repeats the draws, though not the times at which ranks run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from helpers import assert_close, generator, randn
from host import FORM_S, Host
from slot_tables import draw_slots, times_slots, weighted_sum

import epmoe
from epmoe.live.layout import EMPTY

SEED = int(os.environ.get("EPMOE_FUZZ_FIRST", 0))
E, D, L, S, RANKS, M = 6, 16, 2, 4, 4, 16
SECONDS, BYTES = 20, 600_000  # of drawn steps; of an expert, more than half of the staging
REPORTS = epmoe.EPAbortedError, epmoe.EPOverflowError, epmoe.EPRefusedError  # that `poll` raises once, on any thread
BUSY = "another thread is in a call"


class Interrupt(BaseException):
    """What a signal handler raises."""


class WeightsError(Exception):
    """What `weights` raises."""


def create(state) -> None:
    state.ep = ep = epmoe.ExpertParallel(
        epmoe.EPConfig(
            model={"num_experts": E, "num_experts_per_tok": 2, "hidden_size": D, "dtype": "float32"},
            topology={"ep_size": RANKS},
            placement={"live": True, "slots_per_rank": S, "layers": L, "staging_mb": 1},
            capacity={"max_num_tokens_per_rank": M, "max_expert_rows": 32},
            exchange={"timeout_s": 20.0, "warmup_timeout_s": FORM_S},
        )
    )
    state.rows, state.data = torch.full((L, S, D), torch.nan), torch.zeros(L, S, BYTES, dtype=torch.uint8)
    state.fails = state.armed = False
    load(state)
    state.balancer = epmoe.Balancer(ep, every=2, weights=lambda tag, slot: weights(state, tag, slot))
    signal.signal(signal.SIGALRM, lambda number, frame: interrupt(state))


def interrupt(state) -> None:
    if state.armed:
        state.armed = False
        raise Interrupt


def load(state) -> None:
    for layer in range(L):
        for slot, expert in enumerate(state.ep.logical_experts(layer + 1)):
            if expert != EMPTY:
                state.rows[layer, slot], state.data[layer, slot] = gain(layer, expert), 1 + expert


def gain(layer: int, expert: int) -> torch.Tensor:
    return 1 + randn(D, seed=10 * layer + expert).abs()


def weights(state, tag: int, slot: int) -> list[torch.Tensor]:
    if state.fails:
        state.fails = False
        raise WeightsError
    return [state.rows[tag - 1, slot], state.data[tag - 1, slot]]


def again(call: Callable, *arguments: object) -> object:
    """Until no other thread is in a call."""
    while True:
        try:
            return call(*arguments)
        except RuntimeError as error:
            if BUSY not in str(error):
                raise
            time.sleep(1e-5)


def interrupted(state, draw: random.Random, call: Callable, within_s: float = 2e-3) -> bool:
    """Call it; whether a signal handler has ended it."""
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, within_s))
        try:
            state.armed = True
            call()
        finally:
            state.armed = False
    except Interrupt:
        return True
    return False


@contextmanager
def another_thread(state, draw: random.Random) -> Iterator[None]:
    """It calls whatever does not begin a round."""
    ep, stop, wrong = state.ep, threading.Event(), list[BaseException]()
    loads = torch.rand(L, E, generator=generator(draw.randrange(1000)))
    calls = [ep.poll, ep.check, ep.loads, ep.health, lambda: repr(ep), lambda: ep.share(loads), ep.abort]
    calls = [*calls, lambda: ep.combine(state.rows, None), ep.poll, ep.poll][: 10 if draw.random() < 0.8 else 0]

    def run() -> None:
        while calls and not stop.wait(draw.uniform(0, 2e-3)):
            call = draw.choice(calls)
            try:
                if call != ep.abort or ep.exchange.rounds.is_of_another():
                    call()
            except (*REPORTS, TypeError, epmoe.EPTimeoutError):
                pass
            except RuntimeError as error:
                if BUSY not in str(error):
                    wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if wrong:
        raise wrong[0]


def fork(state) -> None:
    """A child that does with moves and the balancer what it must not."""
    if (child := os.fork()) == 0:
        live = state.ep.live
        for call in (live.step, state.balancer.tick, state.balancer.finish, live.send_loads, state.ep.close, live.step):
            try:
                if live.moves is not None:
                    live.moves.cancel()
                    live.moves.step()
                call()
            except BaseException:
                pass
        os._exit(0)
    deadline = time.monotonic() + 5
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:  # it waits for a lock that another thread had
            os.kill(child, signal.SIGKILL)
        time.sleep(1e-3)


def play(state, number: int, kind: str, giver: int) -> None:
    """A round of few tokens, or of so many that rows overflow, which `giver` may abort."""
    ep, layer, T = state.ep, number % L, M if kind == "many" else 2
    draw = generator(100 * number + ep.rank)
    ids = torch.rand(T, E, generator=draw).argsort(1)[:, :2] if kind != "many" else torch.tensor([[0, 1]]).expand(T, 2)
    x, share = randn(T, D, seed=number + 7 * ep.rank), torch.full((T, 2), 0.5)
    d = again(lambda: ep.dispatch(x, ids.contiguous(), share, tag=layer + 1))
    if kind == "aborted" and ep.rank == giver % ep.size:
        ep.abort()
        return
    try:
        y = ep.combine(times_slots(d, state.rows[layer]), d)
    except REPORTS:
        assert kind != "whole"
        return
    if kind == "whole":
        gains = torch.stack([gain(layer, expert) for expert in range(E)])
        assert_close(y, weighted_sum(x, ids, share, gains), slack=4)


def serve(state, seed: int) -> tuple:
    """Moves of one plan, or what the balancer plans, with rounds between polls; then until all have ended."""
    ep, common, draw = state.ep, random.Random(seed), random.Random(1000 * seed + state.ep.rank)
    by_hand, rounds = common.random() < 0.7, common.randrange(1, 8)
    target = draw_slots(common, L, E, ep.size, S, least=2, most=2)

    def replace() -> None:
        again(lambda: ep.replace(target, lambda *slot: weights(state, *slot)))

    state.fails = draw.random() < 0.1
    if draw.random() < 0.2:
        fork(state)
    with another_thread(state, draw):
        calls = ep.live.calls
        while by_hand and ep.live.calls == calls:
            with suppress(WeightsError):
                interrupted(state, draw, replace, 0.2)
        step = ep.poll if by_hand else state.balancer.tick
        for number in range(rounds):
            for _ in range(draw.randrange(6)):
                try:
                    interrupted(state, draw, step)
                except (*REPORTS, WeightsError):
                    pass
                except RuntimeError as error:
                    if BUSY not in str(error):
                        raise
            if by_hand and draw.random() < 0.02:
                ep.live.moves and ep.live.moves.cancel()
            if draw.random() < 0.05:
                fork(state)
            play(state, 10 * seed + number, common.choice(["whole"] * 4 + ["aborted", "many"]), common.randrange(RANKS))
        if not by_hand:
            with suppress(WeightsError):
                again(state.balancer.finish)
        while True:
            try:
                if not interrupted(state, draw, lambda: again(ep.apply)):
                    break
            except epmoe.EPRefusedError:
                pass
    return whole(state)


def whole(state) -> tuple:
    """The table, once experts are where it says."""
    ep, slots = state.ep, state.ep.slots
    mine = slots.view(L, ep.size, S)[:, ep.rank]
    assert torch.equal(ep.live.held, mine) and (ep.live.moves is None or ep.live.moves.done)
    for layer, slot in (mine != EMPTY).nonzero().tolist():
        expert = int(mine[layer, slot])
        assert torch.equal(state.rows[layer, slot], gain(layer, expert)), (layer, slot, expert)
        assert (state.data[layer, slot] == 1 + expert).all(), (layer, slot, expert)
    state.rows[mine == EMPTY] = torch.nan
    return slots.tolist(), ep.live.calls, ep.exchange.rounds.count


def resume(state) -> tuple:
    """Without the dead. Where the last copy of an expert is lost, all begin again."""
    ep = state.ep
    try:
        ep.resume()
    except ValueError as error:
        assert "have no copy left" in str(error)
        ep.resume(placement=ep.placement.without(set(range(ep.size)) - set(ep.survivors()), spread_lost=True))
        load(state)
    return whole(state)


@pytest.mark.slow
def test_drawn_steps(tmp_path):
    draw, names, steps, started = random.Random(SEED), list(range(RANKS)), 0, time.monotonic()
    victim = draw.randrange(RANKS)
    with Host(tmp_path, torch.device("cpu")) as host:
        host.spawn(*names)
        host.form_at(names)
        host.succeed(names, create)
        began = time.monotonic()
        while (spent := time.monotonic() - began) < SECONDS and time.monotonic() - started < SECONDS + 10:
            seed, steps = SEED + steps, steps + 1
            host.start(names, serve, seed)
            if victim in names and spent > SECONDS / 2:
                time.sleep(draw.uniform(0, 0.2))
                host.signal(victim, signal.SIGKILL)
                names.remove(victim)
                for result in host.results(names):
                    assert not isinstance(result, str) or f"rank(s) [{victim}]" in result, (SEED, result)
                host.form(names)
                host.start(names, resume)
            results = host.results(names)
            assert not [r for r in results if isinstance(r, str)] and results == results[:1] * len(names), (
                f"EPMOE_FUZZ_FIRST={SEED}, step {seed}: {results}"
            )
    assert victim not in names and steps > 10
