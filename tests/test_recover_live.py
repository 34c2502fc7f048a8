"""`epmoe.recover` and `join_group` where experts move: also in the middle of a move; and starts from saved slots."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import ROOT, randn, slow
from host import Host, lose
from test_moves_death import (
    RANKS,
    REACHED,
    D,
    E,
    L,
    S,
    balance,
    begin,
    config_of,
    create,
    finish,
    gain,
    play,
    poll,
    start,
)
from test_recover import lose_the_last_word
from typer.testing import CliRunner

import epmoe
from epmoe.cli import app
from epmoe.live.layout import EMPTY


def load_slots(state, loaded: list[tuple[int, int]], moves) -> None:
    """Fills `loaded` with (tag, expert) of what had to be loaded. What no slot holds is poisoned."""
    ep = state.ep
    rows = torch.full((L, ep.num_local_experts, D), torch.nan, device=ep.device)
    rows[:, : state.rows.shape[1]] = state.rows
    for move in moves:
        assert move.source is None and ep.logical_experts(move.tag)[move.local_index] == move.logical
        rows[move.tag - 1, move.local_index] = gain(move.tag - 1, move.logical)
        loaded.append((move.tag, move.logical))
    for layer in range(L):
        for slot, expert in enumerate(ep.logical_experts(layer + 1)):
            if expert == EMPTY:
                rows[layer, slot] = torch.nan
    state.rows = rows


def go_on(state, folder: Path, min_ranks: int = 1) -> list[tuple[int, int]]:
    """Recovers; returns (tag, expert) of what had to be loaded."""
    loaded = list[tuple[int, int]]()
    last_call_s = 3.0 if state.device.type == "cpu" else 10.0
    load = partial(load_slots, state, loaded)
    epmoe.recover(state.ep, folder, load, min_ranks=min_ranks, max_ranks=4, last_call_s=last_call_s)
    return loaded


def come(state, folder: Path) -> list[list[int]]:
    """A new rank: which experts it is to load."""
    start(state, epmoe.join_group(folder, device=state.device, timeout_s=60))
    return [state.ep.logical_experts(layer + 1) for layer in range(L)]


def spread(state) -> None:
    """To all ranks alike."""
    P = state.ep.slots.shape[1]
    state.moves = state.ep.replace((torch.arange(P) % E).expand(L, -1), lambda tag, slot: [state.rows[tag - 1, slot]])
    state.ep.apply()


def table(state) -> list[list[int]]:
    return state.ep.slots.tolist()


def expect_all_held(host: Host, names: list[int]) -> list[list[int]]:
    tables = host.succeed(names, table)
    assert all(one == tables[0] for one in tables)
    assert all(set(range(E)) <= set(layer) for layer in tables[0])
    return tables[0]


@pytest.mark.parametrize("stage", [slow("drop"), "copy", slow("add")])
def test_recover_and_join_while_experts_move(host, stage):
    """One is killed in the middle of a move, three go on; a new rank comes, and gets experts from the others."""
    names, victim = list(range(RANKS)), 1
    host.begin(names, create)
    host.succeed(names, begin)
    deadline = time.monotonic() + 30
    while not REACHED[stage](*host.succeed(names, poll)[victim]):
        assert time.monotonic() < deadline
    host.signal(victim, signal.SIGKILL)
    alive = [name for name in names if name != victim]
    assert all("EPTimeoutError" in error for error in host.do(alive, finish))
    assert host.succeed(alive, go_on, host.folder) == [[]] * 3  # survivors have copies of all
    expect_all_held(host, alive)
    assert host.succeed(alive, play) == ["played"] * 3
    host.spawn(4)
    host.start([4], come, host.folder)
    assert host.succeed(alive, go_on, host.folder, 4) == [[]] * 3
    assert host.answers([4]) == [[[EMPTY] * S] * L]
    all_names = [*alive, 4]
    assert host.succeed(all_names, play) == ["played"] * 4
    plans = host.succeed(all_names, balance)
    assert plans[0] and plans == plans[:1] * 4
    slots = expect_all_held(host, all_names)
    assert all(set(layer[3 * S :]) != {EMPTY} for layer in slots)  # the balancer has filled the new rank's
    host.succeed(all_names, spread)
    assert EMPTY not in [expert for layer in expect_all_held(host, all_names) for expert in layer]
    assert host.succeed(all_names, play) == ["played"] * 4
    host.succeed(all_names, begin)
    deadline = time.monotonic() + 30
    while not REACHED[stage](*host.succeed(all_names, poll)[0]):
        assert time.monotonic() < deadline
    assert host.succeed(all_names, go_on, host.folder) == [[]] * 4  # nobody has died
    expect_all_held(host, all_names)
    assert host.succeed(all_names, play) == ["played"] * 4


def two_of_three(host: Host) -> list[int]:
    """Three ranks of two slots were there, and rank 1 is killed."""
    names = [0, 1, 2]
    host.begin(names, create, 3, 2)
    return lose(host, names, 1, play=play)


def test_lost_experts_are_loaded_and_the_last_rank_gets_more_slots(host):
    """Three ranks of two slots: with rank 1 the only copies of experts 2 and 3 die."""
    alive = two_of_three(host)
    host.form(alive)
    for error in host.do(alive, resume):
        assert error.startswith("ValueError: logical expert(s) [2, 3] of layer 0 have no copy left, and 2 layer(s)")
    loaded = host.succeed(alive, go_on, host.folder)
    assert loaded == [[(1, 2), (2, 2)], [(1, 3), (2, 3)]]
    expect_all_held(host, alive)
    assert host.succeed(alive, play) == ["played"] * 2
    (last,) = lose(host, alive, 0, play=play)
    assert host.succeed([last], go_on, host.folder) == [[(1, 1), (1, 2), (2, 1), (2, 2)]]
    assert len(expect_all_held(host, [last])[0]) == E
    assert host.succeed([last], play) == ["played"]


def test_a_failed_attempt_loads_nothing(host):
    """Rank 2 opens the group and rank 0 does not: what rank 2 would have loaded is loaded in the next attempt."""
    alive = two_of_three(host)
    host.do([0], lose_the_last_word)
    assert host.succeed(alive, go_on, host.folder) == [[(1, 2), (2, 2)], [(1, 3), (2, 3)]]
    assert host.succeed(alive, play) == ["played"] * 2


def resume(state, spread_lost: bool = False) -> None:
    state.ep.resume(spread_lost=spread_lost)


def test_slots_begin_again_with_a_placement(host):
    names = [0, 1]
    host.begin(names, create, 2, S)
    host.succeed(names, begin)
    host.succeed(names, finish)
    host.form(names)
    assert host.succeed(names, begin_again) == [L * S] * 2
    assert expect_all_held(host, names) == [[p % E for p in range(2 * S)]] * L
    assert host.succeed(names, play) == ["played"] * 2


def begin_again(state) -> int:
    moves = state.ep.resume(placement=state.ep.config.of_size(2).place_experts())
    for move in moves:
        state.rows[move.tag - 1, move.local_index] = gain(move.tag - 1, move.logical)
    return len(moves)


def test_a_job_starts_with_saved_slots(host):
    """Experts have moved; a new job begins where they were. Ranks that read other files all raise."""
    names = [0, 1]
    host.begin(names, create, 2, S)
    host.succeed(names, begin)
    host.succeed(names, finish)
    saved = host.succeed(names, save, host.folder)[0]
    first = [[p % E for p in range(2 * S)]] * L
    assert saved != first
    host.succeed(names, create, 2, S, host.folder / "slots.json")
    assert host.succeed(names, table) == [saved] * 2
    assert host.succeed(names, play) == ["played"] * 2
    (alive,) = lose(host, names, 0, play=play)
    host.succeed([alive], go_on, host.folder)
    assert host.succeed([alive], play) == ["played"]


def save(state, folder: Path) -> list[list[int]]:
    if state.ep.rank == 0:
        state.ep.save_slots(folder / "slots.json")
    return table(state)


def create_from_own_file(state, folder: Path) -> None:
    path = folder / f"{state.name}" / "slots.json"
    path.parent.mkdir()
    layer = [0, 1, 2, 3, EMPTY, EMPTY] if state.name else [0, 1, 2, 3, 0, EMPTY]
    path.write_text(json.dumps({"slots": [layer] * L}))
    os.chdir(path.parent)
    create(state, 2, S, Path("slots.json"))


def test_ranks_that_read_other_files_all_hear_of_it(host):
    host.spawn(0, 1)
    host.form_at([0, 1])
    for error in host.do([0, 1], create_from_own_file, host.folder):
        assert "the file of `placement.slots` on rank" in error, error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"slots": [[0, 1, 2, 3], [3, 2, 1, 0]]}', None),
        ('{"slots": [[0, 1, 2, 3]]}', r"`slots` must be 2 layers \(`placement.layers`\) of 4 slots .* got \[1, 4\]"),
        ('{"slots": [[0, 1, 2], [3, 2, 1]]}', r"must be 2 layers .* got \[2, 3\]"),
        ('{"slots": [[0, 1, 2, 3], [3, 2, 1, 1]]}', "layer 1 has no expert 0"),
        ('{"slots": [[0, 1, 2, 3], [3, 2, 1, 4]]}', "must hold experts from 0 to 3, or −1"),
        ('{"slots": [[0, 1, 2, 3], [3, 2, 1]]}', "must be lists of integers"),
        ('{"slots": [[0, 1, 2, 3], [3, 2, 1, 0.5]]}', "must be int32 or int64"),
        ('{"slots": "x"}', "must be lists of integers"),
        ('{"slot": []}', "must hold `slots` and nothing else, got slot"),
        ("[1]", "must hold a list `slots:` of layers"),
        ("{", "is not valid JSON"),
        (None, "no such configuration file"),
    ],
)
def test_the_file_of_slots_is_checked(tmp_path, content, message):
    path = tmp_path / "slots.json"
    if content is not None:
        path.write_text(content)
    if message is None:
        with epmoe.ExpertParallel(config_of(torch.device("cpu"), 1, E, path)) as ep:
            assert ep.logical_experts(2) == [3, 2, 1, 0]
        return
    with pytest.raises(epmoe.ConfigError, match=f"{re.escape(str(path))}: .*{message}"):
        epmoe.ExpertParallel(config_of(torch.device("cpu"), 1, E, path))


def test_slots_are_written_in_one_step(tmp_path, monkeypatch):
    """A save that fails leaves the file that was there, and no other."""
    config = config_of(torch.device("cpu"), 1, E)
    with epmoe.ExpertParallel(config) as ep:
        ep.save_slots(tmp_path / "slots.json")
        before = (tmp_path / "slots.json").read_text()
        monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ep.save_slots(tmp_path / "slots.json")
    assert (tmp_path / "slots.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["slots.json"]


def test_a_layer_loads_what_its_slots_hold(tmp_path):
    """Each layer has its own; an empty slot gets any weights."""
    path, F = tmp_path / "slots.json", 8
    path.write_text('{"slots": [[3, 1, 2, 0], [1, 0, 3, 2]]}')
    with epmoe.ExpertParallel(config_of(torch.device("cpu"), 1, E, path)) as ep:
        w_gate_up, w_down = randn(E, 2 * F, D, seed=1), randn(E, D, F, seed=2)
        layers = [epmoe.MoELayer.from_full(ep, randn(E, D), w_gate_up, w_down).requires_grad_(False) for _ in range(L)]
        for layer, held in zip(layers, ([3, 1, 2, 0], [1, 0, 3, 2]), strict=True):
            assert torch.equal(layer.experts.w_down, w_down[held])
        x = randn(5, D, seed=3)
        torch.testing.assert_close(layers[0](x), layers[1](x))


def test_the_page_shows_it(host):
    """`load_slots` of docs/recovery.md, word by word."""
    alive = two_of_three(host)
    assert host.succeed(alive, follow_the_page, host.folder) == ["played"] * 2


def follow_the_page(state, folder: Path) -> str:
    page = (ROOT / "docs" / "recovery.md").read_text()
    (load_slots,) = re.findall(r"```python\n(def load_slots.*?)```", page, re.DOTALL)
    names = {"ep": state.ep, "w": state.rows, "read": lambda tag, logical: gain(tag - 1, logical)}
    exec(load_slots, names)
    epmoe.recover(state.ep, folder, names["load_slots"], last_call_s=3.0 if state.device.type == "cpu" else 10.0)
    state.rows = names["w"]
    return play(state)


def test_a_group_grows_by_hand(host):
    """Slots stay, and the new rank's are empty; ranks that disagree on lost experts all raise."""
    host.spawn(0, 1, 2)
    host.form_at([0, 1])
    host.succeed([0, 1], create, 2, S)
    before = host.succeed([0, 1], table)[0]
    names = [2, 0, 1]
    for spread_lost in (True, False):
        host.form(names)
        host.start([2], create, 3, S)
        host.start([0], resume, spread_lost)
        host.start([1], resume)
        results = host.results(names)
        assert spread_lost == all("the `spread_lost` of rank" in str(result) for result in results), results
    assert host.succeed(names, table) == [[[EMPTY] * S + layer for layer in before]] * 3
    assert host.succeed(names, play) == ["played"] * 3


def test_the_commands_know_of_the_file(tmp_path):
    """The demonstration computes with what its slots hold; the benchmarks refuse."""
    slots, path = tmp_path / "slots.json", tmp_path / "config.json"
    slots.write_text('{"slots": [[3, 1, 2, 0], [1, 0, 3, 2]]}')
    config = config_of(torch.device("cpu"), 1, E, slots)
    path.write_text(config.model_dump_json())
    assert CliRunner().invoke(app, ["run", str(path), "--steps", "2", "--tokens", "8"]).exit_code == 0
    result = CliRunner().invoke(app, ["bench", str(path)])
    assert result.exit_code == 2 and "`placement.slots` must be unset" in result.output
