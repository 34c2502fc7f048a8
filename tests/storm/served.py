"""A server of a model whose weights come from a trainer as versions: its ranks die, leave, come and
sleep, adapters come and go, and checkpoints are written and read. What each token gives is known.
"""

from __future__ import annotations

import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import adapter_models
import torch
from exchanges import make_config
from helpers import randn
from host import Host
from storm.acts import WHOLE, Act, GroupCalls, Totals, WrongError, all_whole, ended
from storm.calls import Outcome, of_none, of_regroup
from torch import Tensor, nn

import epmoe
from epmoe import checkpoint
from epmoe.live.versions import newest_version
from epmoe.local.spread import local_view

E = 6
K = 2
D = 32
F = 32
M = 8
TOKENS = 5
LAYERS = 2
NUMBERS = 3
"""Adapters that there is room for."""
ROUND_S = 5.0
STEP_S = 10.0
"""The deadlines of a round, and of a step of all ranks: no rank that lives runs into one."""
LAST_CALL_S = 6.0
FIRST = -1
TRAINERS = 2
SMALL_BYTES = 20_000
"""Less than a part of a version: a disk that is full."""


@cache
def weights(version: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the router, gate and up, and down."""
    seed = 1000 + 10 * version + 5 * layer
    sizes = (E, D), (E, 2 * F, D), (E, D, F)
    router, gate_up, down = (
        randn(*shape, seed=seed + i) / shape[-1] ** 0.5 for i, shape in enumerate(sizes)
    )
    return router, gate_up, down


@cache
def factors(seed: int) -> adapter_models.Factors:
    return adapter_models.draw(E, D, F, 2, seed)


class Model(nn.Module):
    def __init__(self, ep: epmoe.ExpertParallel, version: int, **options: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            epmoe.MoELayer.from_full(ep, *weights(version, i), **options) for i in range(LAYERS)
        )
        self.requires_grad_(False)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, adapter_ids=numbers)
        return x

    def take_routers(self, dense: dict[str, Tensor]) -> None:
        for i, layer in enumerate(self.layers):
            layer.router_weight.copy_(dense[f"router.{i}"])


def wanted(
    ep: epmoe.ExpertParallel, version: int, x: Tensor, numbers: Tensor, adapters: dict[int, int]
) -> Tensor:
    """What the model gives with the weights of a version, and with adapters by number and seed."""
    held = {number: (factors(seed), 1.0) for number, seed in adapters.items()}
    y = x.double()
    for i in range(LAYERS):
        router, *experts = weights(version, i)
        logits = y.float() @ router.T
        routing = ep.route(logits)
        y = y + adapter_models.merged_reference(
            y, routing.ids, routing.weights, tuple(experts), held, numbers
        )
    return y


# What a rank of the server does.


def create(state, folder: Path, ranks: int) -> None:
    config = make_config(
        ranks,
        experts=E,
        top_k=K,
        hidden=D,
        max_tokens=M,
        timeout_s=ROUND_S,
        capacity={"extra_bytes": 4},
        exchange={"warmup_timeout_s": STEP_S, "on_abort": "raise"},
    )
    start(state, folder, epmoe.ExpertParallel(config, device=state.device))


@torch.no_grad()
def start(state, folder: Path, ep: epmoe.ExpertParallel) -> None:
    """This rank has the weights of `FIRST`, its checkpoint."""
    state.ep = ep
    state.folder = folder
    state.version = FIRST
    state.receiver = None
    state.unsure = False
    state.model = Model(ep, FIRST, adapters=NUMBERS, adapter_rank=2)
    state.memory = epmoe.SleepingWeights(state.model)


@torch.no_grad()
def take(state, moves: tuple[epmoe.Move, ...], everything: bool = False) -> None:
    """Weights of a new group: experts that this rank has had stay, others come from its disk."""
    state.memory.restore()
    ep = state.ep
    held = ep.logical_experts()
    # Without any former weights, all experts come from the disk.
    if everything:
        moves = [epmoe.Move(local, expert, None, 0) for local, expert in enumerate(held)]
    for i, layer in enumerate(state.model.layers):
        made = []
        full = weights(state.version, i)[1:]
        for former, every in zip(
            (layer.experts.w_gate_up, layer.experts.w_down), full, strict=True
        ):
            # What stays keeps its place. Whatever nobody writes is NaN.
            new = former.new_full((len(held), *former.shape[1:]), torch.nan)
            stays = min(len(new), len(former))
            new[:stays] = former[:stays]
            for move in moves:
                new[move.local_index] = (
                    every[move.logical] if move.source is None else former[move.source]
                )
            made.append(new)
        layer.experts = epmoe.GroupedExperts(*made).requires_grad_(False)
    state.memory = epmoe.SleepingWeights(state.model)


def recover(state, board: Path) -> None:
    epmoe.recover(
        state.ep,
        board,
        lambda moves: take(state, moves),
        max_ranks=state.ep.size,
        last_call_s=LAST_CALL_S,
        timeout_s=60,
    )


def resize(state, board: Path, size: int) -> bool:
    """Returns whether this rank stays."""
    return epmoe.resize(
        state.ep,
        board,
        size,
        lambda moves: take(state, moves),
        wait_s=3.0,
        timeout_s=60,
    )


def join(state, board: Path) -> None:
    start(state, board.parent, epmoe.join_group(board, device=state.device, timeout_s=60))


def resume(state) -> None:
    """Where a signal has come behind it, nobody knows what was to be loaded: all is."""
    everything = state.unsure
    state.unsure = True
    take(state, state.ep.resume(), everything)
    state.unsure = False


@torch.no_grad()
def receive(state, version: int | None = None) -> int:
    """A new receiver, which says what this rank serves."""
    state.receiver = epmoe.WeightReceiver(
        state.ep,
        state.model,
        state.folder / "versions",
        dense=state.model.take_routers,
        version=version,
    )
    state.version = state.receiver.version
    return state.version


def renew(state) -> int:
    state.receiver.close()
    return receive(state)


@torch.no_grad()
def load_version(state, version: int) -> int:
    state.receiver.load(version, timeout_s=STEP_S / 2)
    state.version = state.receiver.version
    return state.version


@torch.no_grad()
def load_own(state, version: int) -> None:
    """The host loads weights by itself."""
    held = state.ep.logical_experts()
    for i, layer in enumerate(state.model.layers):
        router, gate_up, down = weights(version, i)
        layer.router_weight.copy_(router)
        layer.experts.w_gate_up.copy_(gate_up[held])
        layer.experts.w_down.copy_(down[held])
    state.version = version


@torch.no_grad()
def save(state) -> int:
    checkpoint.save(state.model, state.folder / "checkpoint")
    return state.version


@torch.no_grad()
def load(state, versions: list[int]) -> int:
    """A checkpoint, which has one of these versions. Returns it."""
    checkpoint.load(state.model, state.folder / "checkpoint")
    router = state.model.layers[0].router_weight
    [state.version] = [one for one in versions if torch.equal(router, weights(one, 0)[0])]
    return state.version


@torch.no_grad()
def put(state, layer: int, number: int, seed: int | None) -> None:
    adapter = None
    if seed is not None:
        adapter = adapter_models.adapter_of(factors(seed), E, list(range(E)), 1.0)
    state.model.layers[layer].put_adapter(number, adapter)


def sleep(state, offloads: bool) -> None:
    if offloads:
        state.ep.sleep(state.memory.offload)
    else:
        state.ep.sleep()


def wake(state) -> None:
    state.ep.wake(state.memory.restore)


def lost_adapters(state) -> list[int]:
    return sorted(set().union(*(layer.adapters.lost for layer in state.model.layers)))


@torch.no_grad()
def play(state, rounds: int, ticks: bool, adapters: dict[int, int], seed: int) -> tuple[int, int]:
    """Rounds that give what the oracle says. Returns the last version, and how many have come."""
    flips = 0
    rank = state.ep.rank
    for n in range(rounds):
        if ticks:
            flips += state.receiver.tick()
            state.version = state.receiver.version
        # Tokens take the numbers of adapters in turn, from −1 on, which means none.
        x = randn(TOKENS, D, seed=1000 * seed + 10 * n + rank)
        numbers = torch.arange(TOKENS).roll(n + rank) % (NUMBERS + 2) - 1
        y = state.model(x, numbers)
        want = wanted(state.ep, state.version, x, numbers, adapters)
        error = (y - want).abs().max().item() / max(1.0, want.abs().max().item())
        if not error < 1e-3:
            raise WrongError(
                f"rank {rank} of {state.ep.size} serves {state.version}, off by {error:.1e}"
            )
    return state.version, flips


# What a rank of the trainer does.


def create_trainer(state, folder: Path, keep: int) -> None:
    config = make_config(TRAINERS, experts=E, top_k=K, hidden=D, max_tokens=M, timeout_s=ROUND_S)
    state.ep = epmoe.ExpertParallel(config, device=state.device)
    state.model = Model(state.ep, FIRST)
    state.sender = epmoe.WeightSender(state.model, folder / "versions", keep=keep)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@torch.no_grad()
def send(state, version: int, full: bool) -> str:
    """Send a version, or try to where the disk is full. Returns the error."""
    # A step of the trainer, whose weights become those of the version.
    held = state.ep.logical_experts()
    dense = {}
    for i, layer in enumerate(state.model.layers):
        router, gate_up, down = weights(version, i)
        local_view(layer.experts.w_gate_up).copy_(gate_up[held])
        local_view(layer.experts.w_down).copy_(down[held])
        dense[f"router.{i}"] = router
    # A limit on the size of files stands for a full disk.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, limits[1]))
    try:
        state.sender.send(version, dense if state.ep.rank == 0 else None)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


class Served(Act):
    """A server of up to `ranks` ranks and a trainer of two."""

    kind = "served"
    calls = GroupCalls(recover, resize, join, wake)

    def __init__(self, host: Host, seed: str, totals: Totals, ranks: int) -> None:
        super().__init__(host, seed, totals, ranks)
        self.folder = host.folder
        self.adapters = dict[int, int]()
        self.version = FIRST
        self.last = 0
        """of the versions that a trainer has begun to send"""
        self.whole = FIRST
        """the newest whole one in the folder"""
        self.saved = list[int]()
        """the versions that the checkpoint may have: several where a rank has died in `save`"""
        self.trainers = list[int]()

    def begin(self) -> None:
        ranks = self.ranks
        self.names = self.new_names(ranks)
        self.host.spawn(*self.names)
        self.form(self.names)
        self.host.succeed(self.names, create, self.folder, ranks)
        self.begin_trainer()
        self.receive()
        self.play()

    # The trainer.

    def begin_trainer(self) -> None:
        for name in self.trainers:
            if name not in self.dead:
                self.kill(name)
        self.trainers = self.new_names(TRAINERS)
        self.keep = self.draw.randint(2, 3)
        self.untold = dict.fromkeys(self.trainers, 0)
        self.host.spawn(*self.trainers)
        self.form(self.trainers)
        self.host.succeed(self.trainers, create_trainer, self.folder, self.keep)

    def send(self) -> None:
        """A version, perhaps one that a rank cannot send. The others hear of that in their next."""
        self.last += 1
        full = self.draw.choice(self.trainers) if self.draw.random() < 0.3 else None
        self.totals.counts["sends"] += 1
        sent = True
        for name in self.trainers:
            told = self.host.do([name], send, self.last, name == full)[0]
            # It may hear first that another rank could not send an earlier version.
            if "could not send" in told:
                assert self.untold[name], f"{told}, of which it has heard"
                self.untold[name] -= 1
                told = self.host.do([name], send, self.last, name == full)[0]
            # On a full disk it says so, and the others will hear of it.
            if name == full:
                assert "does not fit" in told, told
                sent = False
                for other in self.trainers:
                    self.untold[other] += other != name
            else:
                assert told == "", told
        self.totals.counts["incomplete"] += not sent
        self.whole = self.last if sent else self.whole
        assert newest_version(self.folder / "versions") == self.whole, "a whole version has gone"

    def send_signalled(self) -> None:
        """A version in which a signal comes, which may be whole, and a larger one then."""
        self.last += 1
        self.all_call(send, self.last, False, again=of_none, names=self.trainers)
        # The version is whole, or the one before is still there.
        newest = newest_version(self.folder / "versions")
        assert newest in (self.whole, self.last), f"of {self.whole} there is {newest}"
        self.whole = newest
        # The next one is whole, once all have heard of those that are not.
        self.last += 1
        for name in self.trainers:
            told = self.host.do([name], send, self.last, False)[0]
            while "could not send" in told:
                told = self.host.do([name], send, self.last, False)[0]
            assert told == "", told
        self.untold = dict.fromkeys(self.trainers, 0)
        self.whole = newest_version(self.folder / "versions")
        assert self.whole == self.last, f"{self.last} is not whole"

    def kill_trainer(self) -> None:
        """In the middle of a version, perhaps. Another one begins."""
        self.last += 1
        self.host.start(self.trainers, send, self.last, False)
        time.sleep(self.draw.uniform(0.0, 0.02))
        # One of the ranks dies, or both.
        victims = self.draw.sample(self.trainers, self.draw.randint(1, TRAINERS))
        for name in victims:
            self.kill(name)
        alive = [name for name in self.trainers if name not in victims]
        # Another trainer takes the folder, with what is whole in it.
        self.host.results(alive)
        self.begin_trainer()
        newest = newest_version(self.folder / "versions")
        assert newest in (self.whole, self.last), f"of {self.whole} there is {newest}"
        self.whole = newest

    def lose_folder(self) -> None:
        """Whoever ends the job of the trainer removes its folder. A server goes on."""
        for name in self.trainers:
            self.kill(name)
        shutil.rmtree(self.folder / "versions")
        self.whole = FIRST
        self.after_folder()

    def after_folder(self) -> None:
        """A step of the server without a folder, and then another trainer."""
        step = self.draw.choice([Served.play, Served.play, Served.die, Served.resize])
        step(self)
        self.begin_trainer()

    # The server.

    def play(self) -> None:
        rounds = self.draw.randint(2, 10)
        self.played(self.rounds(rounds, signalled=False))

    def rounds(self, rounds: int, **options: Any) -> dict[int, Outcome]:
        seed = self.draw.randrange(1000)
        return self.all_call(play, rounds, True, self.adapters, seed, **options)

    def played(self, outcomes: dict[int, Outcome]) -> None:
        assert all_whole(outcomes), f"rounds: {ended(outcomes)}"
        [(version, flips)] = {outcome.value for outcome in outcomes.values()}
        assert version >= self.version, f"version {version} behind {self.version}"
        self.version = version
        self.totals.counts["rounds"] += len(outcomes)
        self.totals.counts["flips"] += flips

    def receive(self) -> None:
        """A new receiver on all ranks, which serve one version then, or are told."""
        # Where a signal has come, all call once more.
        outcomes = self.all_call(receive)
        if any(outcome.hit for outcome in outcomes.values()) and not all_whole(outcomes):
            outcomes = self.all_call(receive, signalled=False)
        # Ranks whose weights differ are all told, and only where no version is whole.
        if not all_whole(outcomes):
            errors = [outcome.ended for outcome in outcomes.values()]
            told = all("ranks serve different weights" in error for error in errors)
            assert told and self.whole == FIRST, f"receiver: {errors}"
            self.totals.counts["told to differ"] += 1
            self._make_equal()
            return
        versions = {outcome.value for outcome in outcomes.values()}
        assert len(versions) == 1, f"ranks serve {versions}, silently"
        self.version = versions.pop()
        newest = self.whole == FIRST or self.version == self.whole
        assert newest, f"ranks serve {self.version}, and {self.whole} is whole"

    def _make_equal(self) -> None:
        """What the error asks for."""
        if self.draw.random() < 0.5:
            version = max(self.version, FIRST)
            self.together(load_own, version, signalled=False)
            [self.version] = set(self.together(receive, version, signalled=False))
            return
        self.begin_trainer()
        while self.whole == FIRST:
            self.send()
        [self.version] = set(self.together(receive, signalled=False))

    def load_version(self) -> None:
        """The newest whole version, which is above that which serves."""
        if self.whole > self.version:
            versions = set(self.together(load_version, self.whole))
            assert versions == {self.whole}, f"load of {self.whole} gives {versions}"
            self.version = self.whole

    def put(self) -> None:
        number = self.draw.randrange(NUMBERS)
        seed = None if self.draw.random() < 0.3 else self.draw.randrange(20)
        self._put(number, seed)
        self.adapters.pop(number, None)
        if seed is not None:
            self.adapters[number] = seed

    def sleep(self) -> None:
        self.fall_asleep(sleep, self.draw.random() < 0.7)
        step = self.draw.choices([Served.wake, Served.die, Served.resize], [6, 1, 1])[0]
        step(self)

    def resume(self) -> None:
        outcomes = self.all_call(resume)
        if not all_whole(outcomes):
            assert any(outcome.hit for outcome in outcomes.values()), ended(outcomes)
            again = self.all_call(resume, signalled=False)
            assert all_whole(again), f"resume: {ended(outcomes)}, then {ended(again)}"
        self.regrouped()

    def die(self) -> None:
        """A rank is killed while rounds go on, or in a step of all ranks."""
        if len(self.names) == 1:
            return self.resize()
        victim = self.draw.choice(self.names)
        kill = self.in_a_while(lambda: self.kill(victim))
        calls = [
            lambda: self.rounds(10, signalled=False, meanwhile=kill),
            lambda: self.all_call(put, 0, 0, 7, signalled=False, meanwhile=kill),
            lambda: self.all_call(
                recover, self.board, again=of_regroup, signalled=False, meanwhile=kill
            ),
            lambda: self.all_call(receive, signalled=False, meanwhile=kill),
            lambda: self._die_in_save(kill),
        ]
        self.draw.choices(calls, [5, 1, 1, 1, 1])[0]()
        self.recover()
        self.joined()

    def regrouped(self) -> None:
        """Ranks in a new group: each says what it has lost, and they get a new receiver."""
        lost = [outcome.value for outcome in self.all_call(lost_adapters, signalled=False).values()]
        self.in_order()
        self.receive()
        if any(lost):
            self.joined()

    def joined(self) -> None:
        """A rank that joins has no adapters, and others may have lost theirs."""
        for number in range(NUMBERS):
            self._put(number, None, signalled=False)
            seed = self.adapters.get(number)
            if seed is not None:
                self._put(number, seed, signalled=False)

    def _put(self, number: int, seed: int | None, signalled: bool = True) -> None:
        for layer in range(LAYERS):
            self.together(put, layer, number, seed, signalled=signalled)

    def save(self) -> None:
        self.saved = self.together(save)[:1]

    def _die_in_save(self, kill: Callable[[float], None]) -> None:
        """Survivors that have succeeded know that there is a new checkpoint; others do not."""
        outcomes = self.all_call(save, signalled=False, meanwhile=kill)
        values = [outcome.value for outcome in outcomes.values() if outcome.ended == WHOLE]
        if values:
            self.saved = values[:1]
        elif self.saved:
            self.saved = sorted({*self.saved, self.version})

    def load(self) -> None:
        """The host loads a checkpoint, and says so."""
        if not self.saved:
            return
        versions = set(self.together(load, self.saved))
        assert len(versions) == 1, f"ranks load {versions}"
        [version] = versions
        self.saved = [version]
        outcomes = self.all_call(play, 1, False, self.adapters, 5, signalled=False)
        assert all_whole(outcomes), f"behind a checkpoint: {ended(outcomes)}"
        self.version = version
        [self.version] = set(self.together(receive, version, signalled=False))


Served.steps = {
    Served.play: 3,
    Served.send: 7,
    Served.send_signalled: 2,
    Served.load_version: 3,
    Served.put: 3,
    Served.sleep: 3,
    Served.resume: 2,
    Served.die: 3,
    Served.resize: 4,
    Served.save: 2,
    Served.load: 2,
    Served.kill_trainer: 1,
    Served.lose_folder: 1,
    Served.receive: 1,
}
