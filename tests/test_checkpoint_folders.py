"""A process that dies in any write of a checkpoint leaves the old or the new one. What cannot be
loaded is named.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import alone, fork, randn, slow
from torch import nn

import epmoe
from epmoe import checkpoint

E = 4
D = 32
F = 16
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
"""Audit events around each write: a file is opened before it is written, and again to wait for the
disk.
"""


def make_layer(size: int = 1, experts: int = E, width: int = F) -> epmoe.MoELayer:
    # Beside other tests two ranks may come seconds apart. A rank that dies is noticed at once.
    deadlines = {"timeout_s": 2.0, "warmup_timeout_s": 15.0}
    config = alone(experts, hidden=D, topology={"ep_size": size}, exchange=deadlines)
    ep = epmoe.ExpertParallel(config, device="cpu")
    weights = randn(experts, D), randn(experts, 2 * width, D), randn(experts, D, width)
    return epmoe.MoELayer.from_full(ep, *weights)


def fill(layer: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


def value_of(layer: nn.Module) -> float:
    """The value that all weights have. Raises ValueError for a mixture."""
    (value,) = {value for parameter in layer.parameters() for value in parameter.flatten().tolist()}
    return value


IMPORTS = """
import sys

import torch

import epmoe
from test_checkpoint_folders import fill, make_layer

imported = []


def profile(frame, what, _):
    if what == "call" and frame.f_code.co_name == "_find_and_load":
        imported.append(frame.f_locals["name"])


layer = fill(make_layer(), 2.0)
folder = sys.argv[1]
sys.setprofile(profile)
epmoe.checkpoint.save(layer, folder)
epmoe.checkpoint.load(layer, folder)
epmoe.checkpoint.full_state_dict(layer)
sys.setprofile(None)
assert not imported, imported
"""
"""A signal handler that raises within an import may leave Python's import lock behind, which the
threads of later steps would wait for. So no step imports anything where handlers run.
"""


def test_no_step_imports_where_handlers_run(tmp_path):
    command = [sys.executable, "-c", IMPORTS, str(tmp_path / "saved")]
    paths = [str(Path(__file__).parent), str(Path(__file__).parent / "distributed"), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, check=True, env=environment, timeout=100)


def loaded(layer: nn.Module, folder: Path) -> float:
    """What our reader and torch's find in a folder."""
    checkpoint.load(fill(layer, -1.0), folder)
    ours = value_of(layer)
    dcp.load(checkpoint.sharded_state_dict(fill(layer, -1.0)), checkpoint_id=folder)
    assert value_of(layer) == ours
    return ours


def die_at(number: int) -> None:
    """Kills this process at its change of this number from now on."""
    changes = itertools.count(1)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # The thread that watches other ranks reads from /proc as often as time allows.
        if event not in CHANGES or str(arguments[0]).startswith("/proc/"):
            return
        if next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fork_and_die(call: Callable[[], object], number: int) -> int:
    """A fork that makes a call, and dies at its change of a number."""

    def run() -> None:
        die_at(number)
        call()

    return fork(run)


def died(child: int) -> bool:
    """Whether a fork has died before its end."""
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writes past a size fail, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("before", ["ours", "torch's", "nothing"])
def test_a_death_at_any_write_leaves_the_old_or_the_new_checkpoint(tmp_path, before):
    folder = tmp_path / "link"
    folder.symlink_to(tmp_path / "saved")
    layer = make_layer()
    checkpoint.save(fill(layer, 1.0), tmp_path / "other")  # imports what a save needs
    # What the folder has before.
    if before == "ours":
        (tmp_path / "other").rename(tmp_path / "saved")
    elif before == "torch's":
        dcp.save(checkpoint.sharded_state_dict(layer), checkpoint_id=tmp_path / "saved")
    else:
        (tmp_path / "saved").mkdir()
    found = []
    # A save dies at its first change, its second one, and so on to its end.
    for number in itertools.count(1):
        ended = not died(fork_and_die(lambda: checkpoint.save(fill(layer, 2.0), folder), number))
        if before == "nothing" and not (folder / ".metadata").exists():
            with pytest.raises(ValueError, match=f"{folder}: must be a folder with a checkpoint"):
                checkpoint.load(layer, folder)
            found.append(1.0)
        else:
            found.append(loaded(layer, folder))
        if ended:
            break
    # From some change on it is the new one.
    assert set(found) == {1.0, 2.0} and found == sorted(found) and len(found) > 10
    assert [file.name.partition("-")[0] for file in sorted(folder.iterdir())] == [
        ".metadata",
        "shards",
    ]


def save_with_another(store: Path, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=20), 2, rank)
    checkpoint.save(fill(make_layer(2), 2.0), folder)


@pytest.mark.parametrize("victim", [slow(0), 1])
def test_a_rank_that_dies_at_any_write_leaves_the_old_or_the_new_checkpoint(tmp_path, victim):
    """The other rank hears of it: four pairs of ranks at a time, each with a
    folder of its own.
    """
    layer = make_layer()
    found = []
    ended = False
    checkpoint.save(fill(layer, 1.0), tmp_path / "saved")
    for first in itertools.count(1, 4):
        pairs = []
        # Four pairs save, and one rank of each dies at its change of a number.
        for number in range(first, first + 4):
            folder = tmp_path / f"saved-{number}"
            store = tmp_path / f"store-{number}"
            shutil.copytree(tmp_path / "saved", folder)
            save = partial(save_with_another, store, folder=folder)
            numbers = [number * (rank == victim) for rank in range(2)]
            ranks = [fork_and_die(partial(save, rank), numbers[rank]) for rank in range(2)]
            pairs.append((folder, ranks))
        # Each folder has the old checkpoint or the new one.
        for folder, ranks in pairs:
            ended |= not [died(rank) for rank in ranks][victim]
            found.append(loaded(layer, folder))
        if ended:
            break
    assert set(found) == {1.0, 2.0} and found == sorted(found) and len(found) > 3


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path):
    layer = make_layer()
    checkpoint.save(fill(layer, 1.0), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with (
        largest_file(4096),
        pytest.raises(RuntimeError, match=f"^{tmp_path}: cannot be saved: ") as raised,
    ):
        checkpoint.save(fill(layer, 2.0), tmp_path)
    assert (
        "\n" not in str(raised.value)
        and loaded(layer, tmp_path) == 1.0
        and sorted(tmp_path.rglob("*")) == before
    )


class Wide(nn.Module):
    """Experts of this rank, with a router of the caller's."""

    def __init__(self, layer: epmoe.MoELayer):
        super().__init__()
        self.ep = layer.ep
        self.experts = layer.experts


def test_what_a_folder_cannot_give_is_named(tmp_path):
    layer = make_layer()
    optimizer = torch.optim.AdamW(layer.parameters())
    checkpoint.save(layer, tmp_path / "saved")
    (tmp_path / "file").write_text("")
    checkpoint.save(Wide(layer), tmp_path / "wide")
    # A module, a folder, an optimizer or none, and the message.
    no_checkpoint = "must be a folder with a checkpoint, got"
    lacks = "has no checkpoint of this model and optimizer: Missing key in checkpoint state_dict: "
    cases = [
        (layer, "no", (), f"no: {no_checkpoint} FileNotFoundError"),
        (layer, "file", (), f"file: {no_checkpoint} NotADirectoryError"),
        (layer, "saved", (optimizer,), f"{lacks}optimizer."),
        (make_layer(experts=6), "saved", (), "optimizer: Size mismatch between saved"),
        (make_layer(experts=2), "saved", (), "optimizer: Size mismatch between saved"),
        (Wide(make_layer(experts=2)), "wide", (), "optimizer: Size mismatch between saved"),
        (make_layer(width=8), "saved", (), "optimizer: Size mismatch between saved"),
        (nn.Linear(2, 2), "saved", (), f"{lacks}bias"),
    ]
    for module, name, optimizers, message in cases:
        with pytest.raises(ValueError, match=message) as raised:
            checkpoint.load(module, tmp_path / name, *optimizers)
        # torch's own error has a line for each tensor.
        assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="s3://bucket/saved: must be a path"):
        checkpoint.save(layer, "s3://bucket/saved")


def test_a_handler_right_behind_a_hook_leaves_state_dicts_as_they_are(monkeypatch):
    """The hook that then stays on the layer does nothing."""
    layer = make_layer()
    register = nn.Module.register_state_dict_post_hook

    hooks = []

    def interrupted(module: nn.Module, hook: object) -> None:
        register(module, hook)
        hooks.append(hook)
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.Module, "register_state_dict_post_hook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.sharded_state_dict(layer)
    layer.state_dict()
    [hook] = hooks
    assert not hook.rows and not hook.lists
