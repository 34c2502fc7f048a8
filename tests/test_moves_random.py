"""Drawn steps of ranks whose experts move: other threads call, signal handlers raise, children are
forked, plans are refused and cancelled, rounds are aborted and overflow, ranks die, and the group
changes its size. Every whole round has the right sums, and each row its own `extra`.

A failure names its seed: EPMOE_FUZZ_FIRST=<seed> repeats the draws, though not the times at which
ranks run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import assert_close, generator, long, randn, slow
from host import FORM_S, Host
from slot_tables import Slots, draw_slots

import epmoe

SEED = int(os.environ.get("EPMOE_FUZZ_FIRST", 0))
E = 6
D = 16
L = 2
S = 4
RANKS = 4
M = 16
SECONDS, NUMBERS = 20, 150_000  # of drawn steps; of an expert, more than half of the staging
# That `poll` raises once, on any thread.
REPORTS = (
    epmoe.EPAbortedError,
    epmoe.EPOverflowError,
    epmoe.EPRefusedError,
)
BUSY = "another thread is in a call"
CLOSED = "this ExpertParallel is closed"


class Interrupt(BaseException):
    """What a signal handler raises."""


class WeightsError(Exception):
    """What `weights` raises."""


def create(state, ranks: int = RANKS) -> None:
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": 2, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": ranks},
        placement={"live": True, "slots_per_rank": S, "layers": L, "staging_mb": 1},
        capacity={"max_num_tokens_per_rank": M, "max_expert_rows": 32, "extra_bytes": 8},
        exchange={"timeout_s": FORM_S, "warmup_timeout_s": FORM_S},
    )
    begin(state, epmoe.ExpertParallel(config))


def begin(state, ep: epmoe.ExpertParallel) -> None:
    state.ep = ep
    state.slots = Slots(ep, D, NUMBERS)
    state.fails = state.armed = False
    state.balancer = epmoe.Balancer(
        ep, every=2, weights=lambda tag, slot: weights(state, tag, slot)
    )
    signal.signal(signal.SIGALRM, lambda number, frame: interrupt(state))


def interrupt(state) -> None:
    if state.armed:
        state.armed = False
        raise Interrupt


def weights(state, tag: int, slot: int) -> list[torch.Tensor]:
    if state.fails:
        state.fails = False
        raise WeightsError
    return state.slots.of(tag, slot)


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
def another_thread(state, draw: random.Random, permitted: str = BUSY) -> Iterator[None]:
    """It calls whatever does not begin a round. What it gets is at most a RuntimeError with
    `permitted` words.
    """
    ep = state.ep
    stop = threading.Event()
    loads = torch.rand(L, E, generator=generator(draw.randrange(1000)))
    # What it may call, or nothing in a fifth of the runs.
    calls = [
        ep.poll,
        ep.check,
        ep.loads,
        ep.health,
        lambda: repr(ep),
        lambda: ep.share(loads),
        ep.abort,
    ]
    calls = [*calls, lambda: ep.combine(state.slots.rows, None), ep.poll, ep.poll][
        : 10 if draw.random() < 0.8 else 0
    ]

    def run() -> None:
        while calls and not stop.wait(draw.uniform(0, 2e-3)):
            call = draw.choice(calls)
            try:
                if call != ep.abort or ep.exchange.rounds.is_of_another():
                    call()
            except (*REPORTS, TypeError, epmoe.EPTimeoutError):
                pass
            except RuntimeError as error:
                if BUSY not in str(error) and permitted not in str(error):
                    raise

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        try:
            yield
        finally:
            stop.set()
    future.result()


def fork(state) -> None:
    """A child that does with moves and the balancer what it must not."""
    child = os.fork()
    if child == 0:
        live = state.ep.live
        for call in (
            live.step,
            state.balancer.tick,
            state.balancer.finish,
            live.send_loads,
            state.ep.close,
            live.step,
        ):
            try:
                if live.moves is not None:
                    live.moves.cancel()
                    live.moves.step()
                call()
            except BaseException:
                pass
        os._exit(0)
    # It may wait for a lock for ever, and is killed then.
    deadline = time.monotonic() + 5
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:  # it waits for a lock that another thread had
            os.kill(child, signal.SIGKILL)
        time.sleep(1e-3)


def play(state, number: int, kind: str, giver: int) -> None:
    """A round of few tokens, or of so many that rows overflow, which `giver` may abort."""
    ep = state.ep
    layer = number % L
    T = M if kind == "many" else 2
    draw = generator(100 * number + ep.rank)
    # Ids of any experts, or all of the first two.
    ids = (
        torch.rand(T, E, generator=draw).argsort(1)[:, :2]
        if kind != "many"
        else torch.tensor([[0, 1]]).expand(T, 2)
    )
    x = randn(T, D, seed=number + 7 * ep.rank)
    share = torch.full((T, 2), 0.5)
    extra = extra_of(number, ep.rank, T)
    d = again(lambda: ep.dispatch(x, ids.contiguous(), share, tag=layer + 1, extra=extra))
    # One rank gives the round up.
    if kind == "aborted" and ep.rank == giver % ep.size:
        ep.abort()
        return
    # Rows that arrive are those whose number they carry.
    if kind == "whole" and extra is not None:
        for row, said in zip(
            d.rows, d.extra[: int(d.expert_offsets[-1])].view(-1).tolist(), strict=False
        ):
            assert torch.equal(row, randn(T, D, seed=number + 7 * (said // M))[said % M])
    # The sums are right, unless rows had no room or a rank gave up.
    try:
        y = ep.combine(state.slots.run(d, layer), d)
    except REPORTS:
        assert kind != "whole"
        return
    if kind == "whole":
        assert_close(y, state.slots.want(x, ids, share, layer), slack=4)


def extra_of(number: int, rank: int, T: int) -> torch.Tensor | None:
    """What says which token of which rank a row is, in a dtype and shape of this round; every third
    has none.
    """
    tokens = M * rank + torch.arange(T)
    return (None, tokens.view(T, 1).to(torch.int16), tokens)[number % 3]


def serve(state, seed: int) -> tuple:
    """Moves of one plan, or what the balancer plans, with rounds between polls; then until all have
    ended.
    """
    ep = state.ep
    common = random.Random(seed)
    draw = random.Random(1000 * seed + state.ep.rank)
    by_hand = common.random() < 0.7
    rounds = common.randrange(1, 8)
    target = draw_slots(common, L, E, ep.size, S, least=2 if ep.size * S >= 2 * E else 1, most=2)

    # Everyone's plan is drawn in common; interrupts, forks and failures are a rank's own.
    def replace() -> None:
        again(lambda: ep.replace(target, lambda *slot: weights(state, *slot)))

    state.fails = draw.random() < 0.1
    if draw.random() < 0.2:
        fork(state)
    with another_thread(state, draw):
        # Begin the moves, again after each interrupt.
        calls = ep.live.calls
        while by_hand and ep.live.calls == calls:
            with suppress(WeightsError):
                interrupted(state, draw, replace, 0.2)

        # Rounds with some polls or ticks between them, as many as this rank draws.
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
            play(
                state,
                10 * seed + number,
                common.choice(["whole"] * 4 + ["aborted", "many"]),
                common.randrange(RANKS),
            )

        # Bring all moves to their end.
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
    ep = state.ep
    slots = state.ep.slots
    mine = slots.view(L, ep.size, S)[:, ep.rank]
    assert torch.equal(ep.live.held, mine) and (ep.live.moves is None or ep.live.moves.done)
    state.slots.check()
    return slots.tolist(), ep.live.calls, ep.exchange.rounds.count


def resize(state, folder: Path, seed: int, size: int) -> int | None:
    """In the middle of moves, while another thread calls: this rank in the group; None if it has
    left.
    """
    ep = state.ep
    common = random.Random(seed)
    draw = random.Random(1000 * seed + state.ep.rank)
    target = draw_slots(common, L, E, ep.size, S, most=2)
    state.fails = False
    slot_weights = partial(weights, state)
    options = {
        "weights": slot_weights,
        "balancer": common.choice([None, state.balancer]),
        "wait_s": 20.0,
    }
    # Moves begin, and have come somewhere.
    ep.replace(target, slot_weights)
    for _ in range(draw.randrange(20)):
        interrupted(state, draw, ep.poll)
    # The group changes in their middle.
    stays = ep.rank < size
    with another_thread(state, draw, CLOSED) if stays else nullcontext():
        assert (
            again(
                partial(epmoe.resize, ep, folder, size, lambda moves: state.slots.load(), **options)
            )
            == stays
        )
    return ep.rank if stays else None


def recover(state, folder: Path) -> int:
    epmoe.recover(state.ep, folder, lambda moves: state.slots.load())
    return state.ep.rank


def come(state, folder: Path) -> int:
    begin(state, epmoe.join_group(folder, timeout_s=60.0))
    return state.ep.rank


@pytest.mark.parametrize("seed", [slow(SEED), long(SEED + 1), long(SEED + 2)])
def test_drawn_sizes(tmp_path, seed):
    """Two to four ranks: between drawn steps some leave or new ones come, and one dies there or in
    a step.
    """
    draw = random.Random(seed)
    names = [0, 1]
    steps = 0
    began = time.monotonic()
    with Host(tmp_path, torch.device("cpu")) as host:
        host.spawn(*names)
        host.form_at(names)
        host.succeed(names, create, len(names))
        while time.monotonic() - began < SECONDS or steps <= 5:
            step = 100 * seed + steps
            steps += 1
            # A rank dies, idle or in a step, and the others recover.
            if len(names) > 2 and draw.random() < 0.3:
                victim = names.pop(draw.randrange(len(names)))
                serving = draw.random() < 0.5
                if serving:
                    host.start([*names, victim], serve, step)
                    time.sleep(draw.uniform(0, 0.2))
                host.signal(victim, signal.SIGKILL)
                host.processes[victim].join()
                for result in host.results(names) if serving else []:
                    assert not isinstance(result, str) or "rank(s)" in result, (seed, step, result)
                ranks = host.succeed(names, recover, tmp_path)
            # Or the group gets another size: new ranks come, or the last ones leave.
            else:
                size = draw.randint(2, RANKS)
                new = list(
                    range(max(host.processes) + 1, max(host.processes) + 1 + size - len(names))
                )
                host.spawn(*new)
                host.start(new, come, tmp_path)
                host.start(names, resize, tmp_path, step, size)
                names += new
                ranks = host.answers(names)
                for name in [name for name, rank in zip(names, ranks, strict=True) if rank is None]:
                    host.signal(name, signal.SIGKILL)

            # Hosts in the order of their ranks now, all of which see the same table in a step.
            here = [
                (rank, name) for name, rank in zip(names, ranks, strict=True) if rank is not None
            ]
            names = [name for _, name in sorted(here)]
            results = host.succeed(names, serve, step)
            assert results == results[:1] * len(names), (
                f"EPMOE_FUZZ_FIRST={seed}, step {step}: {results}"
            )
