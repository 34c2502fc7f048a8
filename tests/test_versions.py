"""Versions of weights in a folder: what a trainer may hand over, where memory is full, and where
the folder goes.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import alone, fork, full_layer, randn, stopped_at
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from epmoe import EPStateError, ExpertParallel, WeightReceiver, WeightSender
from epmoe.live import receiver as receiver_module
from epmoe.live import versions
from epmoe.live.held import Held, HeldVersions
from epmoe.live.shared_words import shared_words
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
    # Files can hold version 1, but not version 2.
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="version 2 does not fit into"):
            sender.send(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    # Nothing of it is left, and it may be sent again.
    assert len(os.listdir(folder)) == 2, "a version, and the trainer"
    sender.send(2)
    assert newest_version(folder) == 2


@pytest.mark.parametrize("incomplete", [1, 3, 8])
def test_incomplete_versions_push_no_whole_one_out(layer, folder, incomplete):
    """Another rank's disk is full: of these versions its part never comes."""
    keep = 3
    sender = WeightSender(layer, folder, keep=keep)
    sender.send(1)
    # Versions that lack the part of another rank: the whole one stays.
    for version in range(2, 2 + incomplete):
        sender.send(version)
        [part] = folder.glob(f"v{version:013}.*")
        part.rename(part.with_name(part.name.replace("0-of-1", "0-of-2")))
        assert newest_version(folder) == 1
        assert len([*folder.glob("v*")]) <= 2 * keep
    # Whole ones push all of them out.
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

    # A trainer begins while the former one writes; then the former one sends while it writes.
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
    # All that changes weights,
    calls = receiver.tick, partial(receiver.load, 1), partial(WeightReceiver, ep, layer, folder)
    sender.send(1)
    # in an open round,
    ep.dispatch_send(
        randn(1, ep.config.model.hidden_size), torch.arange(2).int()[None], torch.ones(1, 2)
    )
    for call in calls:
        with pytest.raises(EPStateError, match="round 1 is open: weights change between rounds"):
            call()
    # and by a receiver that is closed.
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
    # Rounds go on, and `load` says what is absent.
    shutil.rmtree(folder)
    for _ in range(3):
        receiver._looked = 0.0
        receiver.tick()
        layer(randn(1, ep.config.model.hidden_size))
    assert receiver.version == 1
    with pytest.raises(
        TimeoutError,
        match="version 2 .* did not come into .*versions within 0.01 s: no version is whole",
    ):
        receiver.load(2, timeout_s=0.01)
    receiver.close()


@pytest.mark.parametrize("closes", [True, False])
@torch.inference_mode()
def test_a_former_receiver_writes_into_no_memory_that_serves(
    ep, layer, folder, monkeypatch, closes
):
    """Its thread is held up, until the next receiver of the same layers serves from the memory that
    was free. `close`, or making that receiver, ends it.
    """
    served = full_layer(ep)[0]
    sender = WeightSender(layer, folder)
    made = threading.Event()
    loaded = threading.Event()
    threads: list[threading.Thread] = []
    maps = receiver_module.map_version
    copies = WeightReceiver._copy

    def held_up_behind_a_map(*arguments: object) -> object:
        found = maps(*arguments)
        if threading.current_thread().name == "epmoe-weights":
            threads.append(threading.current_thread())
            made.wait(10)
        return found

    def held_up_before_a_copy(*arguments: object) -> None:
        if threading.current_thread().name == "epmoe-weights":
            loaded.wait(10)
        copies(*arguments)

    # The first receiver's thread has mapped version 1, and is held up there.
    monkeypatch.setattr(receiver_module, "map_version", held_up_behind_a_map)
    monkeypatch.setattr(WeightReceiver, "_copy", held_up_before_a_copy)
    former = WeightReceiver(ep, served, folder)
    _fill(layer, 1)
    sender.send(1)
    while not threads:
        former._looked = 0.0
        former.tick()

    # The next one is made, and only then does the thread look for free memory.
    if closes:
        former.close()
    later = WeightReceiver(ep, served, folder)
    made.set()
    threads[0].join(0.2)

    # The next one serves version 2 from that memory before the thread would copy.
    _fill(layer, 2)
    sender.send(2)
    later.load(2)
    loaded.set()
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert all(weight.eq(2).all() for weight in served.experts.parameters())
    with pytest.raises(EPStateError, match="it is closed"):
        former.tick()
    later.close()


@torch.inference_mode()
def test_close_waits_for_a_copy(ep, layer, folder, monkeypatch):
    sender = WeightSender(layer, folder)
    begun = threading.Event()
    ended = threading.Event()
    copies = WeightReceiver._copy

    def slowly(*arguments: object) -> None:
        begun.set()
        ended.wait(0.05)
        try:
            copies(*arguments)
        finally:
            ended.set()

    # The thread has begun to copy, and takes a while.
    receiver = WeightReceiver(ep, full_layer(ep)[0], folder)
    monkeypatch.setattr(WeightReceiver, "_copy", slowly)
    sender.send(1)
    while not begun.is_set():
        receiver._looked = 0.0
        receiver.tick()
    # `close` returns behind the copy.
    receiver.close()
    assert ended.is_set()


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize(
    "spoil, where",
    [
        (lambda sent, _: sent.experts.w_down[3, 1, 2].fill_(torch.nan), "`w_down` of expert 3"),
        (lambda sent, _: sent.experts.w_gate_up[5, 0].fill_(-torch.inf), "`w_gate_up` of expert 5"),
        (lambda sent, _: sent.experts.w_gate_up[0, 1].fill_(1e30), "`w_gate_up` of expert 0"),
        (lambda _, dense: dense["a"].fill_(torch.nan), r"`dense\['a'\]`"),
        (lambda _, dense: dense["b"].fill_(torch.inf), r"`dense\['b'\]`"),
    ],
)
@torch.inference_mode()
def test_a_version_that_is_not_finite_is_passed_over(layer, ep, folder, spoil, where, spare):
    """By rounds, by `load` and by a receiver that begins; also where a value fits into the
    trainer's dtype only.
    """
    served = deepcopy(layer).half()
    sender = WeightSender(layer, folder)
    options = {"spare": spare, "dense": lambda _: None}
    receiver = WeightReceiver(ep, served, folder, **options)
    dense = {"a": torch.zeros(2), "b": torch.zeros(()), "c": torch.zeros(0), "d": torch.arange(2)}
    # A good version, and a spoiled one behind it.
    sender.send(1, dense)
    receiver.load(1)
    good = deepcopy(layer.experts.state_dict())
    spoiled = {name: value.clone() for name, value in dense.items()}
    spoil(layer, spoiled)
    sender.send(2, spoiled)
    # Rounds pass it over,
    while receiver.problem is None:
        receiver._looked = 0.0
        receiver.tick()
    wanted = f"version 2 has values that are not finite in .*: {where}"
    assert receiver.version == 1 and re.search(wanted, str(receiver.problem))
    # so does `load`,
    with pytest.raises(TimeoutError, match=wanted):
        receiver.load(2, timeout_s=0.01)
    assert receiver.version == 1
    # and a receiver that begins. The next version is taken.
    later = WeightReceiver(ep, served, folder, **options)
    assert later.version < 2 and re.search(wanted, str(later.problem))
    layer.experts.load_state_dict(good)
    sender.send(3, dense)
    later.load(3)
    assert later.version == 3 and later.problem is None
    later.close()
    assert all(parameter.isfinite().all() for parameter in served.experts.parameters())


@torch.inference_mode()
def test_values_that_are_not_finite_may_be_let_in(ep, layer, folder):
    WeightSender(layer, folder).send(1, {"a": torch.tensor(torch.inf)})
    taken = []
    options = {"dense": taken.append, "check_finite": False}
    receiver = WeightReceiver(ep, layer, folder, **options)
    assert receiver.version == 1 and taken[0]["a"].isinf()
    receiver.close()


def test_a_send_that_failed_on_one_rank_is_told_to_all(ep, layer, folder, monkeypatch):
    """By their next `send`, once. That rank may send its part again, or all a larger version."""
    # Two ranks of a trainer, in one process.
    two = SimpleNamespace(size=2, mesh=None, origin=ep.origin, generation=0, device=ep.device)
    senders = [WeightSender(layer, folder) for _ in range(2)]
    for rank, sender in enumerate(senders):
        sender._ep = SimpleNamespace(**vars(two), rank=rank)
    # Rank 1 has no room for its part.
    senders[0].send(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", Mock(side_effect=RuntimeError("no space left")))
        with pytest.raises(OSError, match="version 1 does not fit"):
            senders[1].send(1)
    # Rank 0 hears of it when it sends next.
    with pytest.raises(OSError, match=r"rank 1 could not send version 1: .*no space left"):
        senders[0].send(2)
    # Rank 1 sends its part again, and versions go on.
    senders[1].send(1)
    assert newest_version(folder) == 1 and len(os.listdir(folder)) == 3
    for version in (2, 3):
        for sender in senders:
            sender.send(version)
    assert newest_version(folder) == 3


@torch.inference_mode()
def test_what_a_rank_holds_outlives_its_receiver(ep, layer, folder):
    """A receiver that finds no version knows the one that serves, unless a flip was interrupted or
    experts were loaded from elsewhere.
    """
    served = full_layer(ep)[0]

    def make(**options: object) -> WeightReceiver:
        return WeightReceiver(ep, served, folder, **options)

    # The version is known without its folder, after a sleep, and in the group's next form.
    WeightSender(layer, folder).send(1)
    assert make().version == 1
    shutil.rmtree(folder)
    assert make().version == 1
    ep.sleep()
    ep.wake()
    assert make().version == 1
    assert ep.resume() == ()
    receiver = make()
    assert receiver.version == 1
    with pytest.raises(TimeoutError):
        receiver.load(2, timeout_s=0.0)

    # Experts that were loaded from elsewhere have no version, unless the caller says which.
    ep.sleep(lambda: None)
    assert len(ep.resume()) == ep.num_local_experts
    with pytest.raises(EPStateError, match="rank 0 has weights of several or unknown versions: l"):
        make()
    assert make(version=7).version == 7

    # Nor have experts after a flip that was interrupted, until the next version.
    sender = WeightSender(layer, folder)
    sender.send(8, {"a": A})

    def interrupted(_: object) -> None:
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        make(dense=interrupted)
    shutil.rmtree(folder)
    with pytest.raises(EPStateError, match="rank 0 has weights of several or unknown versions"):
        make()
    sender = WeightSender(layer, folder)
    sender.send(9)
    assert make().version == 9


@torch.inference_mode()
def test_first_weights_of_experts_that_move_elsewhere(ep, layer, folder):
    """No receiver has brought them, so there is nothing to compare."""
    ep.sleep(lambda: None)
    ep.resume()
    assert WeightReceiver(ep, layer, folder).version == -1


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm = nn.Linear(3, 3)


def wrapped(kind: str, block: nn.Module) -> nn.Module:
    match kind:
        case "compile":
            return torch.compile(block)
        case "checkpoint_wrapper":
            block.norm = checkpoint_wrapper(block.norm)
            return checkpoint_wrapper(block)
        case "DDP":  # whose name for it is the same
            return nn.DataParallel(block)
    return block


WRAPPERS = ["", "compile", "checkpoint_wrapper", "DDP"]


@pytest.mark.parametrize("server", WRAPPERS)
@pytest.mark.parametrize("trainer", WRAPPERS)
@torch.no_grad()
def test_dense_names_have_no_wrappers(ep, folder, trainer, server):
    """`load_state_dict` takes all, whichever side is wrapped."""
    sent = wrapped(trainer, Block(full_layer(ep)[0]))
    served = wrapped(server, Block(full_layer(ep)[0]))
    dense = {name: value for name, value in sent.named_parameters() if "norm" in name}
    WeightSender(sent, folder).send(1, dense)
    # The server takes what the trainer names.
    taken = []
    receiver = WeightReceiver(
        ep,
        served,
        folder,
        dense=lambda dense: taken.append(served.load_state_dict(dense, strict=False)),
    )
    assert len(dense) == 2 and taken[0].unexpected_keys == []
    for got, want in zip(served.parameters(), sent.parameters(), strict=True):
        assert torch.equal(got, want)
    receiver.close()


def test_dense_weights_that_nobody_takes(ep, layer, folder):
    sender = WeightSender(layer, folder)
    receiver = WeightReceiver(ep, layer, folder)
    load = partial(layer.load_state_dict, strict=False)
    sender.send(1, {"odd": A})
    # Nobody to take them, or no weight of that name.
    with pytest.raises(ValueError, match="version 1 has dense weights, such as 'odd': `dense` m"):
        receiver.load(1)
    with pytest.raises(ValueError, match=r"taken no weight, .* no such names: \['odd'\]"):
        WeightReceiver(ep, layer, folder, dense=load)
    # One name of two is enough.
    sender.send(2, {"odd": A, "router_weight": layer.router_weight.detach() + 1})
    receiver = WeightReceiver(ep, layer, folder, dense=load)
    assert receiver.version == 2
    receiver.close()


def test_a_dense_weight_that_is_there_twice(ep, layer, folder):
    senders = [WeightSender(layer, folder) for _ in range(2)]
    with pytest.raises(ValueError, match="`dense` must have each weight once, got 'a'"):
        senders[0].send(1, {"a": A, "_orig_mod.a": A})
    two = SimpleNamespace(size=2, mesh=None, origin=ep.origin, generation=0, device=ep.device)
    for rank, sender in enumerate(senders):
        sender._ep = SimpleNamespace(**vars(two), rank=rank)
        sender.send(1, {"a": A, f"b{rank}": A})
    with pytest.raises(ValueError, match=r"`dense\['a'\]` of version 1 comes from several ranks"):
        WeightReceiver(ep, layer, folder, dense=lambda _: None)


def _fill(layer: nn.Module, value: float) -> None:
    for weight in layer.experts.parameters():
        weight.fill_(value)


def test_a_version_that_one_rank_has_sent_is_named(tmp_path):
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
def test_words_of_a_receiver_that_is_not_made_leave_no_file(tmp_path, gather):
    """Another rank fails in whichever of its steps."""
    calls = count(1)

    def all_gather(value: object) -> list[object]:
        if next(calls) == gather:
            raise RuntimeError("another rank has failed")
        return [value]

    peers = SimpleNamespace(rank=0, all_gather=all_gather)
    with pytest.raises(RuntimeError, match="another rank has failed"):
        shared_words(tmp_path, peers, 4, -1)
    assert not list(tmp_path.iterdir())


def test_words_of_a_process_that_was_killed_go_with_the_next_owner(tmp_path):
    """At whichever of its calls. Those of one that lives stay."""

    def is_looked_at(value: object) -> list[object]:
        if value:  # the path, which others are about to map
            versions.own_folder(tmp_path)
            assert Path(str(value)).exists()
        return [value]

    def make_words(step: int) -> None:
        """It is killed at a step, if so many come."""
        files = {shared_words.__code__.co_filename, tempfile.__file__}
        with stopped_at(step, files, partial(signal.raise_signal, signal.SIGKILL)):
            shared_words(tmp_path, peers, 4, -1)

    # A child is killed at its first step, its second one, and so on to its end.
    peers = SimpleNamespace(rank=0, all_gather=is_looked_at)
    left = 0
    for number in count():
        status = os.waitpid(fork(partial(make_words, number)), 0)[1]
        left += len(list(tmp_path.iterdir()))
        versions.own_folder(tmp_path)
        assert not list(tmp_path.iterdir())
        if os.WIFEXITED(status):
            assert status == 0
            break
    assert left > 3


ONE = [1, "a"]
TWO = [2, "a"]
OWN = [-1, ""]


@pytest.mark.parametrize(
    ("of_ranks", "whole", "said"),
    [
        ([[OWN], [OWN]], True, ""),
        ([[OWN], [OWN]], False, ""),  # no receiver has ever brought a version
        ([[ONE], [ONE]], True, ""),
        ([[ONE, TWO], [ONE, TWO]], True, ""),  # two models
        ([[ONE], [TWO]], True, "rank 0 has version 1 of trainer a, rank 1 has version 2"),
        ([[ONE], [OWN]], True, "rank 1 has the weights that it began with"),  # it has joined
        ([[ONE], [None]], True, "rank 1 has weights of several or unknown versions"),
        ([[ONE, TWO], [TWO, ONE]], True, "rank 0 has weights of several"),
        ([[ONE], [ONE]], False, "some of them have come from elsewhere"),
    ],
)
def test_a_group_that_forms_has_one_version_or_opens_no_round(layer, of_ranks, whole, said):
    held = HeldVersions()
    held.put([layer], Held(1, "a"))
    held.compare(of_ranks, whole)
    assert held.rounds_may_begin == (not said)
    if said:
        with pytest.raises(EPStateError, match=f"{said}.*: make a new WeightReceiver"):
            held.check()
        held.mark_received([layer])
    held.check()


def test_layers_that_nobody_has_any_more_need_no_version(layer):
    held = HeldVersions()
    former = nn.Linear(1, 1)
    held.put([former, layer], Held(1, "a"))
    held.compare([[ONE], [TWO]], True)
    held.mark_received([layer])
    assert not held.rounds_may_begin
    del former
    assert held.rounds_may_begin


def test_a_rank_without_layers_waits_for_a_receiver(layer):
    """It has joined, or its model has gone."""
    held = HeldVersions()
    held.compare([[OWN], [TWO]], True)
    assert not held.rounds_may_begin
    held.mark_received([layer])
    assert held.rounds_may_begin
