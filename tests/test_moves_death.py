"""A rank dies while experts move: before they are dropped, while weights are copied, and when they are ready."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from helpers import assert_close, randn, slow
from host import FORM_S, Host
from slot_tables import times_slots, weighted_sum

import epmoe
from epmoe.live.layout import EMPTY

E, D, L, S, RANKS = 4, 16, 2, 3, 4


def config_of(device: torch.device, ranks: int = RANKS, slots: int = S, file: Path | None = None) -> epmoe.EPConfig:
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": 2, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": ranks},
        placement={"live": True, "slots_per_rank": slots, "layers": L, "staging_mb": 1, "slots": file and str(file)},
        capacity={"max_num_tokens_per_rank": 8},
        exchange={"timeout_s": 5.0, "warmup_timeout_s": FORM_S},
    )


def gain(layer: int, expert: int) -> torch.Tensor:
    return 1 + randn(D, seed=10 * layer + expert).abs()


def create(state, ranks: int = RANKS, slots: int = S, file: Path | None = None) -> None:
    start(state, epmoe.ExpertParallel(config_of(state.device, ranks, slots, file), device=state.device))


def start(state, ep: epmoe.ExpertParallel) -> None:
    """With the weights that `ep` says are in the slots of this rank."""
    state.ep = ep
    state.rows = torch.full((L, ep.num_local_experts, D), torch.nan, device=ep.device)
    for layer in range(L):
        for slot, expert in enumerate(ep.logical_experts(layer + 1)):
            if expert != EMPTY:
                state.rows[layer, slot] = gain(layer, expert)
    state.balancer = epmoe.Balancer(ep, every=3, weights=lambda tag, slot: [state.rows[tag - 1, slot]])
    state.balancer.tick()


def play(state) -> str:
    """Rounds whose sums are right, with the weights that the slots of this rank have."""
    ep = state.ep
    for seed in range(2 * L):
        layer, T = seed % L, 5
        x, ids = randn(T, D, seed=seed + 7 * ep.rank), torch.stack([torch.arange(T) % E, (torch.arange(T) + 1) % E], 1)
        weights = torch.full((T, 2), 0.5)
        d = ep.dispatch(*(t.to(ep.device) for t in (x, ids, weights)), tag=layer + 1)
        y = ep.combine(times_slots(d, state.rows[layer]), d)
        gains = torch.stack([gain(layer, expert) for expert in range(E)])
        try:
            assert_close(y.cpu(), weighted_sum(x, ids, weights, gains), slack=4)
        except AssertionError:
            ep.check()  # on a GPU y is zeros where another rank has died, and the error comes with the next call
            raise
    return "played"


def begin(state) -> None:
    """Each rank is to hold the experts after those that it holds."""
    ep = state.ep
    slots = torch.where(ep.slots == EMPTY, EMPTY, (ep.slots + 1) % E)
    state.moves = ep.replace(slots, lambda tag, slot: [state.rows[tag - 1, slot]])


def poll(state) -> tuple[int, int]:
    """One step: its version, and bytes that have been copied here."""
    state.ep.poll()
    return state.moves.version, state.moves.copied_bytes


def finish(state) -> None:
    state.ep.apply()


def balance(state) -> int:
    """The balancer of the group before goes on: how often it has planned."""
    for _ in range(30):
        play(state)
        state.balancer.tick()
    state.balancer.finish()
    return len(state.balancer.history)


def resume(state) -> list[list[int]]:
    state.ep.resume()
    return state.ep.slots.tolist()


REACHED = {
    "drop": lambda version, copied: version >= 0,
    "copy": lambda version, copied: copied >= 1,
    "add": lambda version, copied: version >= 1,
}


@pytest.mark.parametrize("stage", ["drop", slow("copy"), "add"])
def test_a_rank_dies_while_experts_move(tmp_path, device, stage):
    with Host(tmp_path, device) as host:
        names, victim = list(range(RANKS)), 2
        host.spawn(*names)
        host.form_at(names)
        host.succeed(names, create)
        host.succeed(names, play)
        host.succeed(names, begin)
        deadline = time.monotonic() + 30
        while not REACHED[stage](*host.succeed(names, poll)[victim]):
            assert time.monotonic() < deadline
            host.succeed(names, play)
        host.signal(victim, signal.SIGKILL)
        alive = [name for name in names if name != victim]
        for error in host.do(alive, finish):
            assert "EPTimeoutError" in error and f"rank(s) [{victim}]" in error, error
        host.form(alive)
        tables = host.succeed(alive, resume)
        assert all(table == tables[0] for table in tables)
        assert all(set(range(E)) <= set(layer) for layer in tables[0])
        assert host.succeed(alive, play) == ["played"] * 3
        host.succeed(alive, begin)
        host.succeed(alive, finish)
        assert host.succeed(alive, play) == ["played"] * 3
        plans = host.succeed(alive, balance)
        assert plans[0] and plans == plans[:1] * 3
        assert host.succeed(alive, play) == ["played"] * 3
