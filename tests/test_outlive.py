"""What outlives a group: addresses, and with them CUDA graphs; and an `ExpertParallel` that sleeps."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from exchanges import assert_y, make_tokens
from host import (
    Host,
    check_stream,
    create,
    lose,
    mapped_windows,
    play,
    play_round,
    resume,
    serve,
    spread,
    staying,
)
from waits import SOON_S

import epmoe
from epmoe import EPResumeError, EPStateError


def capture(state) -> None:
    """A round in a graph, on the CPU none; also a round for the other ranks."""
    play_round(state, 7)
    if state.device.type == "cpu":
        return
    ep, graph = state.ep, torch.cuda.CUDAGraph()
    tokens = make_tokens(ep.config, ep.rank, 5 + ep.rank, seed=11)
    inputs = [t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights)]
    gain_eD = state.rows[0].clone()
    with torch.cuda.graph(graph):
        d = ep.dispatch(*inputs)
        row = torch.arange(len(d.rows), device=ep.device)
        expert = torch.searchsorted(d.expert_offsets[1:], row, right=True).clamp(max=len(gain_eD) - 1)
        y = ep.combine(d.rows * gain_eD[expert].to(d.rows.dtype), d)
    state.graphs = getattr(state, "graphs", {}) | {ep.generation: (graph, y, tokens, [*inputs, gain_eD])}


def replay(state, generation: int, times: int = 3) -> None:
    """The graph of a generation agrees with the dense layer; on the CPU ordinary rounds do."""
    for seed in range(times):
        if state.device.type == "cpu":
            play_round(state, seed)
            continue
        graph, y, tokens, _ = state.graphs[generation]
        y.fill_(float("nan"))
        graph.replay()
        check_stream(state.ep)
        assert_y(y, state.ep.config, tokens)


def replay_outdated(state, generation: int) -> str:
    """What `poll` raises after it. The next rounds are unharmed."""
    if state.device.type == "cpu":
        return "captured in an earlier group"
    graph, y, *_ = state.graphs[generation]
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


def test_a_death_during_sleep(host: Host):
    names = serve(host, ranks=3)
    host.do(names, sleep)
    host.signal(1, signal.SIGKILL)
    host.processes[1].join()
    begin = time.monotonic()
    assert host.do([0, 2], wake) == ["EPResumeError"] * 2
    assert time.monotonic() - begin < SOON_S
    host.form([0, 2])
    host.do([0, 2], resume)
    assert host.do([0, 2], play) == ["played"] * 2


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
        ep.sleep()
        assert "asleep" in repr(ep) and not ep.capture_is_valid(0)
        ep.wake()
        assert ep.capture_is_valid(0) and ep.generation == 1
        ep.sleep()
    with pytest.raises(EPStateError, match="does not sleep"):  # it is closed
        ep.wake()
