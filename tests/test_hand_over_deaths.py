"""A rank of a trainer, or of a server, is killed while weights are handed over: the others keep
whole versions.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exchanges import make_config
from helpers import NO_CUDA, randn, slow
from host import Host
from test_hand_over import LAYERS, TOKENS, D, E, K, M, Model, send, weights
from test_hand_over_gpus import share_host_memory
from waits import LONG_S, SOON_S

import epmoe
from epmoe import WeightReceiver, WeightSender
from epmoe.live import receiver, versions
from epmoe.live.flip_words import FlipWords
from epmoe.local.spread import local_view

TRAINERS = [0, 1]
SERVERS = [2, 3]
LAST = 3

# Where a rank ends: an object, its function, and which call of it, before or after it has run.
TRAINER_STATES = {
    "writes": (torch, "save", lambda *_: True, False),
    "has written a draft": (torch, "save", lambda *_: True, True),
    "has named it": (Path, "replace", lambda path, _: path.name.startswith(".v"), True),
    "removes an old one": (Path, "unlink", lambda path, **_: path.name.startswith("v"), True),
    "offers": (versions.Handout, "keep", lambda *_: True, True),
}
LAST_LAYER = str(LAYERS - 1)
SERVER_STATES = {
    "maps": (receiver, "map_version", lambda *_: True, False),
    "has fetched": (versions, "fetch_descriptor", lambda *_: True, True),
    "has mapped": (receiver, "map_version", lambda *_: True, True),
    "copies": (WeightReceiver, "_held_experts", lambda _, layer: layer.endswith(LAST_LAYER), True),
    "has staged": (FlipWords, "report", lambda *_, **__: True, True),
    "flips": (WeightReceiver, "_flip", lambda *_: True, False),
    "has flipped": (WeightReceiver, "_flip", lambda *_: True, True),
}


def end(state, kind: str, what: str) -> None:
    """Let this process be killed in a state of its next version."""
    owner, name, which, after = (TRAINER_STATES if kind == "trainer" else SERVER_STATES)[what]
    before: Callable = getattr(owner, name)

    def ends(*arguments: object, **options: object) -> object:
        if which(*arguments, **options):
            if after:
                before(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*arguments, **options)

    setattr(owner, name, ends)


def create_ep(state, ranks: int, shared: bool) -> None:
    """With `shared`, versions go by memory that processes share, on GPUs theirs."""
    if shared and state.device.type == "cpu":
        share_host_memory()
    dtype = "float32" if state.device.type == "cpu" else "bfloat16"
    config = make_config(
        ranks, experts=E, top_k=K, hidden=D, max_tokens=M, timeout_s=LONG_S, dtype=dtype
    )
    state.ep = epmoe.ExpertParallel(config, device=state.device)


def create_trainer(state, folder: str, shared: bool) -> None:
    create_ep(state, 2, shared)
    state.model = Model(state.ep, 0)
    state.sender = WeightSender(state.model, folder, keep=2)


def sends(state, version: int) -> float:
    start = time.monotonic()
    with torch.no_grad():
        send(state.model, state.sender, version)
    return time.monotonic() - start


@torch.no_grad()
def create_server(state, folder: str, shared: bool, ranks: int = 2) -> int:
    if ranks == 1:
        torch.distributed.destroy_process_group()
    create_ep(state, ranks, shared)
    state.tokens = randn(TOKENS, D, seed=9)[:M].to(state.device, state.ep.config.model.torch_dtype)
    state.wanted = [Model(state.ep, version)(state.tokens) for version in range(LAST + 3)]
    state.model = Model(state.ep, 0)
    state.receiver = WeightReceiver(state.ep, state.model, folder, dense=state.model.take_routers)
    return state.receiver.version


@torch.no_grad()
def serves(state, until: int, seconds: float = 1.0) -> int:
    """Serve until a version, or so long if it does not come. Each output is that of the version
    that serves.
    """
    deadline = time.monotonic() + (SOON_S if until >= 0 else seconds)
    while state.receiver.version < until or until < 0:
        # The first rank says for all when time is up.
        stop = torch.tensor([time.monotonic() > deadline], dtype=torch.int32)
        if state.ep.size > 1:
            torch.distributed.broadcast(stop, 0)
        if stop:
            break
        # Each output is that of the version that serves.
        state.receiver.tick()
        y = state.model(state.tokens)
        state.ep.check()  # on GPUs a round tells of a death here
        assert torch.equal(y, state.wanted[max(state.receiver.version, 0)])
    return state.receiver.version


@torch.no_grad()
def holds(state) -> list[int]:
    """The versions whose weights this rank has whole."""
    state.receiver.close()
    found = []
    for version in range(LAST + 3):
        layers = zip(state.model.layers, (weights(version, i) for i in range(LAYERS)), strict=True)
        held = state.ep.placement.logical_experts(state.ep.rank)
        # Each weight of this rank, and what it is in the version.
        pairs = [
            pair
            for layer, (router, gate_up, down) in layers
            for pair in (
                (layer.router_weight, router),
                (local_view(layer.experts.w_gate_up), gate_up[held]),
                (local_view(layer.experts.w_down), down[held]),
            )
        ]
        if all(torch.equal(got.cpu(), want.to(got.dtype)) for got, want in pairs):
            found.append(version)
    return found


def begin(host: Host, names: list[int], function: Callable, *arguments: object) -> None:
    host.spawn(*names)
    host.form_at(names)
    host.succeed(names, function, *arguments)


def ends(host: Host, name: int) -> None:
    host.processes[name].join(SOON_S)
    assert host.processes[name].exitcode == -signal.SIGKILL


@pytest.fixture
def host(tmp_path, by):
    device = torch.device("cuda" if by == "GPUs" else "cpu")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, Host(tmp_path, device) as host:
        host.weights = folder, by != "files"
        begin(host, TRAINERS, create_trainer, *host.weights)
        begin(host, SERVERS, create_server, *host.weights)
        host.succeed(TRAINERS, sends, 1)
        assert host.succeed(SERVERS, serves, 1) == [1, 1]
        host.succeed(TRAINERS, sends, 2)
        assert host.succeed(SERVERS, serves, 2) == [2, 2]
        yield host


OF_SHARED = {"offers", "has fetched"}  # states that versions in files do not have
OFTEN = {("trainer", "has written a draft", 1), ("server", "copies", 3), ("trainer", "offers", 1)}
CASES = [
    pytest.param(by, *case, marks=[*([] if case in OFTEN else [pytest.mark.slow]), *marks])
    for by, marks in (("files", []), ("shared memory", []), ("GPUs", [pytest.mark.gpu, NO_CUDA]))
    for case in (
        *(("trainer", what, rank) for what in TRAINER_STATES for rank in TRAINERS),
        *(("server", what, rank) for what in SERVER_STATES for rank in SERVERS),
    )
    if by != "files" or case[1] not in OF_SHARED
]


@pytest.mark.parametrize("by, kind, what, rank", CASES)
def test_a_rank_is_killed(host, by, kind, what, rank):
    host.succeed([rank], end, kind, what)
    if kind == "trainer":
        other = 1 - rank
        order = [rank, other]
        if what == "removes an old one":  # which only the rank does that completes a version
            order.reverse()
        # One trainer dies, and the other one sends its part without waiting.
        for name in order:
            if name == rank:
                host.start([rank], sends, LAST)
                ends(host, rank)  # before the other one removes what this one would
            else:
                assert host.succeed([other], sends, LAST)[0] < SOON_S, "nobody waits"
        # The version is taken if all of it is there.
        complete = what in ("has named it", "removes an old one")
        stays = by == "files"  # what is shared may go before it is mapped
        [served] = set(host.succeed(SERVERS, serves, LAST if complete and stays else -1))
        assert served == LAST if complete and stays else served in (2, LAST if complete else 2)
        # Another trainer goes on.
        host.processes[other].kill()
        begin(host, [4, 5], create_trainer, *host.weights)  # a trainer that begins again
        host.succeed([4, 5], sends, LAST + 1)
        assert host.succeed(SERVERS, serves, LAST + 1) == [LAST + 1] * 2
    else:
        other = 5 - rank
        # One server dies, and nobody waits for it.
        host.start(SERVERS, serves, LAST)
        assert all(seconds < SOON_S for seconds in host.succeed(TRAINERS, sends, LAST)), (
            "nobody waits"
        )
        ends(host, rank)
        [error] = host.results([other])
        assert isinstance(error, str) and ("EP" in error or "RuntimeError" in error)
        # The other one has a whole version, and serves on alone.
        [found] = host.do([other], holds)
        assert found in ([2], [LAST]), "the version that served, or the next one, is whole"
        assert host.do([other], create_server, *host.weights, 1) == [LAST]
        host.succeed(TRAINERS, sends, LAST + 1)
        assert host.succeed([other], serves, LAST + 1) == [LAST + 1]


THREE = [2, 3, 4]


def does_not_flip(state) -> None:
    """As where a signal handler raises first."""

    def fails(*_: object) -> None:
        raise RuntimeError("interrupted")

    state.flip = WeightReceiver._flip
    WeightReceiver._flip = fails


@torch.no_grad()
def recovers(state, store: Path) -> str:
    """What a round says behind `recover`, where this rank makes no new receiver."""
    WeightReceiver._flip = getattr(state, "flip", WeightReceiver._flip)
    epmoe.recover(state.ep, store, lambda moves: None, last_call_s=SOON_S)
    assert not state.ep.capture_is_valid(state.ep.generation)
    with pytest.raises(epmoe.EPStateError) as refused:
        state.model(state.tokens)
    return str(refused.value)


@torch.no_grad()
def receives_again(state, folder: str, version: int | None) -> int:
    state.model = Model(state.ep, 0)
    state.receiver = WeightReceiver(
        state.ep, state.model, folder, dense=state.model.take_routers, version=version
    )
    assert state.ep.capture_is_valid(state.ep.generation)
    state.model(state.tokens)
    return state.receiver.version


@pytest.mark.parametrize("mixed", [True, slow(False)])
@pytest.mark.parametrize("by", ["files"])
def test_survivors_do_not_serve_until_they_have_one_version(host, tmp_path, by, mixed):
    """One has flipped and one has not, a third one dies, and the version has gone; or all have the
    same one, and lost experts come from elsewhere.
    """
    folder = host.weights[0]
    for name in SERVERS:
        host.processes[name].kill()
        host.processes[name].join(SOON_S)
    begin(host, THREE, create_server, *host.weights, 3)
    assert host.succeed(THREE, serves, 2) == [2] * 3
    if mixed:
        host.succeed([3], does_not_flip)
        host.succeed([4], end, "server", "flips")
        host.start(THREE, serves, LAST)
        host.succeed(TRAINERS, sends, LAST)
        ends(host, 4)
        assert all("Error" in error for error in host.results([2, 3]))
    else:
        host.processes[4].kill()
    for part in Path(folder).glob("v*"):
        part.unlink()
    said = host.do([2, 3], recovers, tmp_path / "store")
    for each in said:
        if mixed:
            assert "rank 0 has version 3 of trainer" in each and "rank 1 has version 2 of" in each
        else:
            assert "some of them have come from elsewhere" in each
        assert "make a new WeightReceiver on all ranks" in each, each
    # The host gives all of them the same, or the trainer does.
    assert host.do([2, 3], receives_again, folder, 7) == [7, 7]
    host.succeed(TRAINERS, sends, LAST + 5)
    assert host.succeed([2, 3], receives_again, folder, None) == [LAST + 5] * 2
