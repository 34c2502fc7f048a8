"""Ranks that stay away from a checkpoint, or die in it: the others raise an error that
names them.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import storm.calls
import torch
import torch.distributed.checkpoint as dcp
from exchanges import make_config
from helpers import long, randn, slow
from host import Host, create
from waits import SHORT_S, SOON_S

import epmoe
from epmoe import checkpoint
from epmoe.checkpoint import state_dicts
from epmoe.group.collective import all_ranks, together
from epmoe.group.store import OutlivingStore
from epmoe.training.models import expert_parallels

E = 6
D = 32
F = 16
WAIT_S = SHORT_S


def create_layer(state, wait_s: float = WAIT_S) -> None:
    ep = state.ep
    # The start may take longer.
    shorter = ep.config.exchange.model_copy(update={"warmup_timeout_s": wait_s})
    config = ep.config.model_copy(update={"exchange": shorter})
    ep.life.member = dataclasses.replace(ep.life.member, config=config)
    state.layer = epmoe.MoELayer.from_full(
        ep, randn(E, D), randn(E, 2 * F, D), randn(E, D, F)
    ).requires_grad_(False)


def run(state, what: str, folder: Path) -> tuple[float, list[int], str] | str:
    """Seconds, the missing ranks and the message of the error."""
    calls: dict[str, Any] = {
        "full": state.layer.full_state_dict,
        "offload": lambda: state.layer.full_state_dict(cpu_offload=True),
        "save": lambda: checkpoint.save(state.layer, folder / "saved"),
        "load": lambda: checkpoint.load(state.layer, folder / "saved"),
    }
    begin = time.monotonic()
    try:
        calls[what]()
    except epmoe.EPTimeoutError as error:
        return time.monotonic() - begin, error.missing_ranks, str(error)
    return f"{what} has ended"


def agree(state, what: str) -> None:
    """The first part of the call, after which this rank stays away."""
    eps = expert_parallels(state.layer)
    if what in ("full", "offload"):
        with together(eps):
            pass
        return
    with all_ranks(eps) as peers:
        with peers.together():
            pass
        time.sleep(2 * WAIT_S)  # in its group


def die_in_it(state, what: str, folder: Path) -> None:
    def die(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGKILL)

    state_dicts.gather = dcp.save = dcp.load = die
    run(state, what, folder)


def die_behind_its_address(state, folder: Path) -> None:
    """This rank is killed once others may connect to it."""
    write = OutlivingStore.set

    def dies(self: OutlivingStore, key: str, value: str) -> None:
        write(self, key, value)
        if "//cpu//" in key:  # a word of gloo
            signal.raise_signal(signal.SIGKILL)

    OutlivingStore.set = dies
    run(state, "save", folder)


FAST = [("full", "dead"), ("offload", "away")]
IN_CI = [("save", "away"), ("load", "dead")]
CASES = [
    (what, how) for what in ("full", "offload", "save", "load") for how in ("late", "away", "dead")
]


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *FAST,
        *(slow(*case) for case in IN_CI),
        *(long(*case) for case in CASES if case not in FAST + IN_CI),
    ],
)
def test_a_rank_that_stays_away_is_named(tmp_path, what, how):
    """late: from the beginning; away: once all have agreed to begin."""
    with Host(tmp_path, torch.device("cpu")) as host:
        host.begin(
            make_config(3, experts=E, hidden=D, placement={"live": True, "slots_per_rank": 2})
        )
        host.succeed([0, 1, 2], create_layer)
        if what == "load":
            assert host.do([0, 1, 2], run, "save", tmp_path) == ["save has ended"] * 3
        if how == "away":
            host.start([2], agree, what)
        elif how == "dead":
            host.start([2], die_in_it, what, tmp_path)
        results = host.do([0, 1], run, what, tmp_path)
        for rank in (0, 1):
            assert not isinstance(results[rank], str), results
            took_s, missing, message = results[rank]
            assert missing == [2] and "waited for rank(s) [2] of the group" in message, message
            assert ("give their `group`" in message) == (what in ("save", "load")), message
            assert took_s < SOON_S


@pytest.mark.slow
def test_a_death_while_the_others_connect(tmp_path):
    """They wait for no more than `warmup_timeout_s`: gloo takes several of its timeouts for it."""
    wait_s = 4.0
    names = [0, 1, 2]
    with Host(tmp_path, torch.device("cpu")) as host:
        host.spawn(*names)
        host.succeed(names, storm.calls.form, tmp_path / "group", names)
        host.succeed(names, create, make_config(3, experts=E, hidden=D))
        host.succeed(names, create_layer, wait_s)
        host.start([2], die_behind_its_address, tmp_path)
        for took_s, missing, _ in host.do([0, 1], run, "save", tmp_path):
            assert missing == [2] and took_s < 2 * wait_s
