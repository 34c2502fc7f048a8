"""What outlives a group: addresses, and with them CUDA graphs; and an `ExpertParallel` that sleeps."""

from __future__ import annotations

import signal
import time
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from exchanges import Tokens, assert_y, given, make_tokens
from helpers import refuse_another_thread
from host import (
    EXPERTS,
    E,
    Host,
    L,
    check_stream,
    create,
    die,
    fail_in,
    lose,
    mapped_windows,
    moving,
    play,
    play_round,
    play_until_timeout,
    resume,
    serve,
    spread,
    staying,
    tags,
    weights,
)
from waits import SOON_S

import epmoe
from epmoe import EPResumeError, EPStateError
from epmoe.exchange.round_state import CLOSED, DISPATCHED
from epmoe.native import ops


class Round(NamedTuple):
    """A round in a graph, which holds the addresses of the group that captured it."""

    tokens: Tokens
    tag: int
    inputs: list[torch.Tensor]
    gain_eD: torch.Tensor
    y: torch.Tensor
    graph: torch.cuda.CUDAGraph | None
    """on the CPU the operators are called again, with the same arguments:"""
    dispatch: tuple[Any, ...]
    rows: torch.Tensor
    expert_offsets: torch.Tensor

    def experts(self) -> torch.Tensor:
        row = torch.arange(len(self.rows), device=self.rows.device)
        expert = torch.searchsorted(self.expert_offsets[1:], row, right=True).clamp(max=len(self.gain_eD) - 1)
        return self.rows * self.gain_eD[expert].to(self.rows.dtype)

    def replay(self, ep: epmoe.ExpertParallel) -> None:
        if self.graph is not None:
            return self.graph.replay()
        exchange, memory = ep.exchange, self.dispatch[-3:]
        exchange.rounds.progress.tag = self.tag
        exchange.launch(ops.dispatch, self.dispatch, DISPATCHED)
        exchange.launch(ops.combine, (self.y, self.experts(), *memory), CLOSED)


def capture(state) -> None:
    """A round in a graph; also a round for the other ranks."""
    ep, graph = state.ep, None
    tag = min(tags(ep))
    tokens = make_tokens(ep.config, ep.rank, 5 + ep.rank, seed=11)
    inputs, gain_eD = given(ep, tokens), state.rows[0].clone()

    def play() -> Round:
        d = ep.dispatch(*inputs, tag=tag)
        dispatch = *inputs, None, None, len(tokens.x), *ep.exchange.memory, d.sent.descriptor
        captured = Round(tokens, tag, inputs, gain_eD, torch.empty(0), graph, dispatch, d.rows, d.expert_offsets)
        return captured._replace(y=ep.combine(captured.experts(), d))

    if state.device.type == "cuda":
        play_round(state, 8)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = play()
    else:
        captured = play()
    state.graphs = getattr(state, "graphs", {}) | {ep.generation: captured}


def replay(state, generation: int, times: int = 3) -> None:
    """The graph of a generation agrees with the dense layer, by the weights that this rank holds now."""
    captured = state.graphs[generation]
    captured.gain_eD.copy_(state.rows[0])
    for _ in range(times):
        captured.y.fill_(float("nan"))
        captured.replay(state.ep)
        check_stream(state.ep)
        assert_y(captured.y / 2.0**captured.tag, state.ep.config, captured.tokens)


def replay_outdated(state, generation: int) -> str:
    """What `poll` raises after it. The next rounds are unharmed."""
    if state.device.type == "cpu":
        return "captured in an earlier group"
    graph, y = state.graphs[generation].graph, state.graphs[generation].y
    graph.replay()
    torch.cuda.synchronize()
    assert not y.any()
    with pytest.raises(EPStateError) as caught:
        state.ep.poll()
    state.ep.poll()
    return str(caught.value)


def is_valid(state, generation: int) -> bool:
    return state.ep.capture_is_valid(generation)


def sleep(state) -> int:
    """Returns the bytes that the plan says."""
    planned = state.ep.memory_plan().total_bytes
    state.ep.sleep()
    return planned


def wake(state) -> str:
    try:
        state.ep.wake()
    except EPResumeError:
        return "EPResumeError"
    return "awake"


def lose_memory(state) -> None:
    """Weights lose their memory, as those in a pool of the host."""
    state.kept, state.rows = state.rows, torch.full_like(state.rows, torch.nan)


def sleep_with_weights(state) -> None:
    state.ep.sleep(partial(lose_memory, state))


def wake_with_weights(state, failing: int | None = None) -> str:
    """Weights come back before any other thread has its turn. Rank `failing` cannot restore them."""

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
    return torch.cuda.mem_get_info(state.device)[0] if state.device.type == "cuda" else -mapped_windows()


def refusals(state) -> list[str]:
    said = []
    for call in (state.ep.poll, state.ep.sleep, state.ep.memory_plan, lambda: play_round(state, 0)):
        with pytest.raises(EPStateError) as caught:
            call()
        said.append(str(caught.value))
    state.ep.abort()
    return said


def test_graphs_go_on_when_the_group_is_as_it_was(host: Host):
    """3 → 2 → 3 ranks. A graph of other ranks does nothing, and `poll` tells it."""
    names = serve(host, ranks=3)
    host.succeed(names, capture)
    alive = lose(host, names, 2)
    host.form(alive)
    host.do(alive, resume)
    assert host.do(alive, is_valid, 0) == [False] * 2 and host.do(alive, is_valid, 1) == [True] * 2
    assert all("captured in an earlier group" in said for said in host.do(alive, replay_outdated, 0))
    host.succeed(alive, capture)
    host.succeed(alive, replay, 1)
    host.spawn(3)
    host.form([*alive, 3])
    placement = spread(3, 2)
    host.start(alive, resume, placement)
    host.start([3], create, staying(placement, host.device))
    host.answers([*alive, 3])
    assert host.do(alive, is_valid, 0) == [True] * 2 and host.do(alive, is_valid, 1) == [False] * 2
    host.start(alive, play, 1)
    host.start([3], capture)
    host.results([*alive, 3])
    host.start(alive, replay, 0)
    host.start([3], replay, 2)
    assert host.results([*alive, 3]) == [None] * 3
    assert host.do([*alive, 3], play) == ["played"] * 3


def fill(state) -> None:
    """Every slot gets an expert, on ranks that have come, too."""
    P = state.ep.slots.shape[1]
    state.ep.replace((torch.arange(P) % E).expand(L, -1), partial(weights, state))
    state.ep.apply()


@pytest.mark.parametrize("victim", [0, 2])
def test_graphs_go_on_while_ranks_come_and_go(host: Host, victim: int):
    """3 → 2 → 4 ranks in 4 seats: whoever stays captures once."""
    names = host.begin(moving(3, seats=4))
    host.succeed(names, capture)
    alive = lose(host, names, victim)
    host.form(alive)
    host.succeed(alive, resume, None, True)
    assert host.do(alive, is_valid, 0) == [True] * 2
    host.succeed(alive, replay, 0)
    host.play(alive)
    host.spawn(3, 4)
    host.form([*alive, 3, 4])
    host.start(alive, resume)
    host.start([3, 4], create, moving(4, seats=4))
    host.results([*alive, 3, 4])
    assert host.do(alive, is_valid, 0) == [True] * 2
    host.succeed([*alive, 3, 4], fill)
    host.start(alive, replay, 0, 1)
    host.start([3, 4], capture)
    host.answers([*alive, 3, 4])
    host.start(alive, replay, 0)
    host.start([3, 4], replay, 2)
    assert host.results([*alive, 3, 4]) == [None] * 4
    host.play([*alive, 3, 4])
    lose(host, [*alive, 3, 4], 3)  # errors name ranks of the group, not seats


def test_sleep_frees_all_and_graphs_go_on_after_wake(host: Host):
    names = serve(host, ranks=2)
    host.succeed(names, capture)
    before = host.do(names, free_bytes)
    planned = host.do(names, sleep)
    after = host.do(names, free_bytes)
    if host.device.type == "cpu":
        planned = [2, 2]  # windows
    assert all(late - early >= nbytes for early, late, nbytes in zip(before, after, planned, strict=True))
    assert host.do(names, refusals) == [["this ExpertParallel sleeps: call `wake`"] * 4] * 2
    for _ in range(2):
        assert host.do(names, wake) == ["awake"] * 2
        assert host.do(names, is_valid, 0) == [True] * 2
        assert host.do(names, replay, 0) == [None] * 2 and host.do(names, play) == ["played"] * 2
        host.do(names, sleep)
    host.form(names)
    host.do(names, resume)
    assert host.do(names, replay, 0) == [None] * 2


def test_weights_go_and_come_with_the_windows(host: Host):
    names = serve(host, ranks=2)
    host.succeed(names, capture)
    host.succeed(names, sleep_with_weights)
    assert host.do(names, wake_with_weights) == ["awake"] * 2
    assert host.do(names, replay, 0) == [None] * 2 and host.do(names, play) == ["played"] * 2


def test_a_rank_that_cannot_restore_its_weights(host: Host):
    """Rounds of the others end at once. It takes part again with all its experts loaded."""
    names = serve(host, ranks=2)
    host.succeed(names, sleep_with_weights)
    closed, awake = host.do(names, wake_with_weights, 0)
    assert "closed" in closed and awake == "awake"
    begin = time.monotonic()
    assert host.do([1], play_until_timeout) == [[0]] and time.monotonic() - begin < SOON_S
    host.form(names)
    loaded, kept = host.do(names, resume)
    assert sorted(move[1] for move in loaded) == [*range(EXPERTS)] and kept == []
    assert host.do(names, play) == ["played"] * 2


@pytest.mark.parametrize("step", ["asleep", "checks", "maps", "has windows"])
def test_a_death_during_sleep_and_wake(host: Host, step: str):
    names = serve(host, ranks=3)
    host.do(names, sleep)
    if step == "asleep":
        host.signal(1, signal.SIGKILL)
        host.processes[1].join()
    else:
        host.succeed([1], fail_in, step, die)
        host.start([1], wake)
    begin = time.monotonic()
    assert host.do([0, 2], wake) == ["EPResumeError"] * 2
    assert time.monotonic() - begin < SOON_S
    host.form([0, 2])
    host.do([0, 2], resume)
    assert host.do([0, 2], play) == ["played"] * 2


def raise_interrupted() -> None:
    """As a signal handler does between two steps."""
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError("by a signal")))
    signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("step", ["checks", "maps", "has windows"])
def test_a_signal_during_wake(host: Host, step: str):
    """All ranks are asleep then, and wake later. Graphs go on."""
    names = serve(host, ranks=2)
    host.succeed(names, capture)
    host.do(names, sleep)
    asleep = host.do(names, free_bytes)
    host.succeed([1], fail_in, step, raise_interrupted)
    assert host.do(names, wake) == ["EPResumeError"] * 2
    assert host.do(names, free_bytes) == asleep
    assert host.do(names, refusals) == [["this ExpertParallel sleeps: call `wake`"] * 4] * 2
    assert host.do(names, wake) == ["awake"] * 2
    assert host.do(names, replay, 0) == [None] * 2 and host.do(names, play) == ["played"] * 2


@pytest.mark.parametrize("step", ["checks", "maps", "has windows"])
def test_no_other_thread_joins_while_one_wakes(step: str):
    with epmoe.ExpertParallel(staying(spread(1, 1), torch.device("cpu"))) as ep:
        ep.sleep(lambda: refuse_another_thread(ep.poll))
        fail_in(None, step, lambda: [refuse_another_thread(call) for call in (ep.wake, ep.resume)])
        ep.wake()
        assert ep.generation == 1


def test_what_cannot_sleep_or_wake():
    config = staying(spread(1, 1), torch.device("cpu"))
    with epmoe.ExpertParallel(config) as ep:
        with pytest.raises(EPStateError, match="does not sleep"):
            ep.wake()
        tokens = make_tokens(config, 0, 3)
        d = ep.dispatch(tokens.x, tokens.ids, tokens.weights)
        with pytest.raises(EPStateError, match="a round is open"):
            ep.sleep()
        ep.combine(d.rows, d)
        with pytest.raises(ZeroDivisionError):
            ep.sleep(lambda: 1 / 0)
        assert ep.capture_is_valid(0), "it is awake"
        ep.sleep()
        assert "asleep" in repr(ep) and not ep.capture_is_valid(0)
        ep.wake()
        assert ep.capture_is_valid(0) and ep.generation == 1
        ep.sleep()
    with pytest.raises(EPStateError, match="does not sleep"):  # it is closed
        ep.wake()
