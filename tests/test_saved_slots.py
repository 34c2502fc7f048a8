"""Jobs that start with saved slots: the file that `save_slots` writes and
`placement.slots` names.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from helpers import randn
from host import EMPTY, E, L, S, create, finish, go_on, lose, moving, rotate, table

import epmoe


def test_a_job_starts_with_saved_slots(host):
    """Experts have moved; a new job begins where they were. Ranks that read other
    files all raise.
    """
    names = host.begin(moving(2))
    # Experts have moved, and the table is saved.
    host.succeed(names, rotate)
    host.succeed(names, finish)
    saved = host.succeed(names, save, host.folder)[0]
    first = [[p % E for p in range(2 * S)]] * L
    assert saved != first
    # A new job begins with it, and goes on after a death.
    host.succeed(names, create, moving(2, S, host.folder / "slots.json"))
    assert host.succeed(names, table) == [saved] * 2
    host.play(names)
    alive = lose(host, names, 0)
    host.succeed(alive, go_on, host.folder)
    host.play(alive)


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
    create(state, moving(2, S, Path("slots.json")))


def test_ranks_that_read_other_files_all_hear_of_it(host):
    host.spawn(0, 1)
    host.form_at([0, 1])
    for error in host.do([0, 1], create_from_own_file, host.folder):
        assert "the file of `placement.slots` on rank" in error, error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"slots": [[0, 1, 2, 3], [3, 2, 1, 0]]}', None),
        (
            '{"slots": [[0, 1, 2, 3]]}',
            r"`slots` must be 2 layers \(`placement.layers`\) of 4 slots .* got \[1, 4\]",
        ),
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
        with epmoe.ExpertParallel(moving(1, E, path)) as ep:
            assert ep.logical_experts(2) == [3, 2, 1, 0]
        return
    with pytest.raises(epmoe.ConfigError, match=f"{re.escape(str(path))}: .*{message}"):
        epmoe.ExpertParallel(moving(1, E, path))


def test_slots_are_written_in_one_step(tmp_path, monkeypatch):
    """A save that fails leaves the file that was there, and no other."""
    config = moving(1, E)
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
    path = tmp_path / "slots.json"
    D = 64
    F = 8
    path.write_text('{"slots": [[3, 1, 2, 0], [1, 0, 3, 2]]}')
    with epmoe.ExpertParallel(moving(1, E, path)) as ep:
        w_gate_up = randn(E, 2 * F, D, seed=1)
        w_down = randn(E, D, F, seed=2)
        layers = [
            epmoe.MoELayer.from_full(ep, randn(E, D), w_gate_up, w_down).requires_grad_(False)
            for _ in range(L)
        ]
        # Each layer has the experts of its slots.
        for layer, held in zip(layers, ([3, 1, 2, 0], [1, 0, 3, 2]), strict=True):
            assert torch.equal(layer.experts.w_down, w_down[held])
        x = randn(5, D, seed=3)
        torch.testing.assert_close(layers[0](x), layers[1](x))
