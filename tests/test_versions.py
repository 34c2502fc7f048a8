"""Versions of weights in a folder: what a trainer may hand over, where memory is full, and where
the folder goes.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import alone, full_layer, randn
from torch import nn

from epmoe import EPStateError, ExpertParallel, WeightReceiver, WeightSender
from epmoe.live import receiver, versions
from epmoe.live.versions import newest_version

A = torch.zeros(2)


@pytest.fixture
def ep() -> Iterator[ExpertParallel]:
    with ExpertParallel(alone()) as ep:
        yield ep


@pytest.fixture
def layer(ep) -> nn.Module:
    return full_layer(ep)[0]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "versions"


@pytest.mark.parametrize(
    "odd", [{"a": 1}, {"a": None}, {1: A}, {"a": np.zeros(2)}, {"a": A.to_sparse()}]
)
def test_dense_weights_that_are_no_plain_tensors(layer, folder, odd):
    sender = WeightSender(layer, folder)
    with pytest.raises(TypeError, match=r"`dense\[.*\]` must be a plain tensor"):
        sender.send(1, odd)
    assert os.listdir(folder) == [".trainer"]


@pytest.mark.parametrize("keep", [1, 254])
def test_how_many_versions_stay(layer, folder, keep):
    with pytest.raises(ValueError, match=f"`keep` must be an integer from 2 to 253, got {keep}"):
        WeightSender(layer, folder, keep=keep)


def test_a_version_that_does_not_fit_leaves_nothing(layer, folder):
    sender = WeightSender(layer, folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sender.send(1)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="version 2 does not fit into"):
            sender.send(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert len(os.listdir(folder)) == 2, "a version, and the trainer"
    sender.send(2)
    assert newest_version(folder) == 2


@pytest.mark.parametrize("incomplete", [1, 3, 8])
def test_incomplete_versions_push_no_whole_one_out(layer, folder, incomplete):
    """Another rank's disk is full: of these versions its part never comes."""
    keep = 3
    sender = WeightSender(layer, folder, keep=keep)
    sender.send(1)
    for version in range(2, 2 + incomplete):
        sender.send(version)
        [part] = folder.glob(f"v{version:013}.*")
        part.rename(part.with_name(part.name.replace("0-of-1", "0-of-2")))
        assert newest_version(folder) == 1
        assert len([*folder.glob("v*")]) <= 2 * keep
    for version in range(20, 20 + keep):
        sender.send(version)
    assert len([*folder.glob("v*")]) == keep


@pytest.mark.parametrize("experts", [4, 16])
def test_a_trainer_of_other_experts_is_refused(ep, folder, experts):
    with ExpertParallel(alone(experts)) as other:
        WeightSender(full_layer(other)[0], folder).send(1)
    with pytest.raises(ValueError, match=f"version 1 must have 8 experts of '', got {experts}"):
        WeightReceiver(ep, full_layer(ep)[0], folder)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_trainer_of_other_layers_is_refused(layer, folder, layers):
    WeightSender(nn.ModuleList([deepcopy(layer) for _ in range(layers)]), folder).send(1)
    with pytest.raises(
        ValueError,
        match=f"`model` and version 1 must have the same layers: one .* '{min(layers, 2)}'",
    ):
        WeightReceiver(layer.ep, nn.ModuleList([layer, deepcopy(layer)]), folder)


def test_two_trainers_in_one_folder_are_named(ep, layer, folder):
    WeightSender(layer, folder).send(1)
    [whole] = folder.glob("v*")
    shutil.copy(whole, folder / whole.name.replace(ep.origin, "another"))
    with pytest.raises(
        ValueError, match="several trainers have sent version 1 into .*: each needs"
    ):
        WeightReceiver(ep, layer, folder)


def test_a_draft_of_a_former_generation_goes(ep, layer, folder):
    """A rank has died while it wrote, and the sender goes on after `recover`."""
    sender = WeightSender(layer, folder)
    (folder / f".v0000000000001.{ep.origin}.7.0-of-2").touch()
    sender.send(1)
    assert sorted(path.name[:2] for path in folder.iterdir()) == [".t", "v0"]


def test_a_trainer_that_begins_takes_the_folder(layer, folder, monkeypatch):
    """The former one still lives, and learns it at its next version, also while one of
    them writes.
    """
    former = WeightSender(layer, folder)
    senders = []
    save = torch.save

    def saved(meanwhile: Callable[[], None], *arguments: object) -> None:
        monkeypatch.setattr(torch, "save", save)
        save(*arguments)
        meanwhile()

    def refused() -> None:
        with pytest.raises(EPStateError, match="another trainer has begun to send into .*versions"):
            former.send(5)

    def begin() -> None:
        senders.append(WeightSender(full_layer(other)[0], folder))
        senders[0].send(2)

    former.send(1)
    with ExpertParallel(alone()) as other:
        for sends, meanwhile in ((refused, begin), (lambda: senders[0].send(3), refused)):
            monkeypatch.setattr(torch, "save", partial(saved, meanwhile))
            sends()
    assert newest_version(folder) == 3 and len([*folder.glob("*v*")]) == 3


def test_a_file_that_goes_between_two_looks_of_torch(ep, layer, folder, monkeypatch):
    from_file = torch.UntypedStorage.from_file

    def overtaken(*arguments: object, **options: object) -> torch.UntypedStorage:
        for whole in folder.glob("v*"):
            whole.unlink()
        return from_file(*arguments, **options)

    WeightSender(layer, folder).send(1)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", overtaken)
    receiver = WeightReceiver(ep, layer, folder)
    receiver.close()
    assert receiver.version == 1 and newest_version(folder) == -1


@torch.inference_mode()
def test_no_weights_change_in_an_open_round_or_by_a_closed_receiver(ep, layer, folder):
    receiver = WeightReceiver(ep, layer, folder)
    sender = WeightSender(layer, folder)
    calls = receiver.tick, partial(receiver.load, 1), partial(WeightReceiver, ep, layer, folder)
    sender.send(1)
    ep.dispatch_send(
        randn(1, ep.config.model.hidden_size), torch.arange(2).int()[None], torch.ones(1, 2)
    )
    for call in calls:
        with pytest.raises(EPStateError, match="round 1 is open: weights change between rounds"):
            call()
    ep.abort()
    receiver.load(1)
    receiver.close()
    for call in calls[:2]:
        with pytest.raises(
            EPStateError, match="it is closed, or the group has changed: make a new WeightReceiver"
        ):
            call()


@torch.inference_mode()
def test_a_server_goes_on_without_the_folder(ep, layer, folder):
    WeightSender(layer, folder).send(1)
    receiver = WeightReceiver(ep, layer, folder)
    shutil.rmtree(folder)
    for _ in range(3):
        receiver._looked = 0.0
        receiver.tick()
        layer(randn(1, ep.config.model.hidden_size))
    assert receiver.version == 1
    with pytest.raises(
        TimeoutError,
        match="version 2 .* did not come into .*versions within 0.01 s: the newest .* -1",
    ):
        receiver.load(2, timeout_s=0.01)
    receiver.close()


def test_a_version_that_one_rank_has_sent_is_named(tmp_path: Path) -> None:
    """A trainer in which `send` runs on one rank only."""
    assert versions.what_is_there(tmp_path) == "no version is whole"
    (tmp_path / "v0000000000003.group.0.1-of-3").touch()
    assert versions.what_is_there(tmp_path) == (
        "no version is whole; of version 3 rank(s) [0, 2] of the trainer have sent no part"
    )
    for rank in (0, 2):
        (tmp_path / f"v0000000000003.group.0.{rank}-of-3").touch()
    assert versions.what_is_there(tmp_path) == "the newest whole version is 3"


@pytest.mark.parametrize("gather", [1, 2])
def test_words_of_a_receiver_that_is_not_made_leave_no_file(tmp_path: Path, gather: int) -> None:
    """Another rank fails in whichever of its steps."""
    calls = count(1)

    def all_gather(value: object) -> list[object]:
        if next(calls) == gather:
            raise RuntimeError("another rank has failed")
        return [value]

    peers = SimpleNamespace(rank=0, all_gather=all_gather)
    with pytest.raises(RuntimeError, match="another rank has failed"):
        receiver._shared_words(tmp_path, peers, 4)
    assert not list(tmp_path.iterdir())
