"""A signal handler raises on one rank at every place of a step, in turn; storms draw the moment.

The steps, and what must hold behind each, are those of storms (tests/storm): y is right, all ranks
have the same version, no rank that lives is given up, and who calls again is what the pages say.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from helpers import ON_THE_CPU, long, slow
from host import Host
from storm.acts import Totals
from storm.moving import Moving
from storm.places import Placed, at_every_place
from storm.served import Served, renew, sleep

from epmoe import resizing, service
from epmoe.exchange import addresses
from epmoe.group import board, join, peers, recovery, waiting
from epmoe.life import life, membership
from epmoe.live import (
    balancer,
    experts,
    held,
    moves,
    receiver,
    shared_words,
    sleeping,
    versions,
)

RANKS = 2


def renew_receivers(act: Served) -> None:
    """A receiver is closed, and another one made."""
    versions_served = set(act.together(renew))
    assert len(versions_served) == 1, f"ranks serve {versions_served}"
    [act.version] = versions_served


def fall_asleep_and_wake(act: Served) -> None:
    act.fall_asleep(sleep, True)
    act.wake()


def shrink_and_grow(act: Served | Moving) -> None:
    act.shrink(RANKS - 1)
    act.play()
    act.grow(RANKS)


def resize_asleep(act: Served) -> None:
    act.fall_asleep(sleep, True)
    shrink_and_grow(act)


def resize_while_experts_move(act: Moving) -> None:
    act.move()
    shrink_and_grow(act)


class Step(NamedTuple):
    act: type[Served] | type[Moving]
    what: str
    """the call into which signals come"""
    modules: list[ModuleType]
    step: Callable[[Any], object]


LIFE = [life, membership, service]
REGROUPING = [*LIFE, board, join, peers, recovery, resizing, waiting]
STEPS = {
    "recover": Step(Served, "recover", REGROUPING, Served.recover),
    "resume": Step(Served, "resume", [*LIFE, join, peers, waiting], Served.resume),
    "receiver": Step(Served, "receive", [held, peers, receiver, shared_words], Served.receive),
    "close": Step(Served, "renew", [receiver, shared_words], renew_receivers),
    "sleep": Step(Served, "sleep", [*LIFE, addresses, sleeping], fall_asleep_and_wake),
    "wake": Step(Served, "wake", [*LIFE, addresses, peers, sleeping], fall_asleep_and_wake),
    "resize asleep": Step(Served, "resize", [*REGROUPING, sleeping], resize_asleep),
    "send": Step(Served, "send", [versions], Served.send_signalled),
    "replace": Step(Moving, "move", [experts, moves, service], Moving.move),
    "tick": Step(Moving, "tick", [balancer, experts, moves], Moving.tick),
    "resize": Step(
        Moving, "resize", [*REGROUPING, balancer, experts, moves], resize_while_experts_move
    ),
}
QUICK = [("receiver", 1, 97), ("send", 1, 23)]
"""Steps that need no new process, ranks and strides."""


@ON_THE_CPU
@pytest.mark.parametrize(
    ("name", "rank", "stride"),
    [
        *QUICK,
        *(slow(name, rank, 31) for name in STEPS for rank in range(RANKS)),
        *(long(name, rank, 5) for name in STEPS for rank in range(RANKS)),
    ],
)
def test_a_step(host: Host, name: str, rank: int, stride: int):
    step = STEPS[name]
    totals = Totals()
    act = step.act(host, f"{name} {rank}", totals, RANKS)
    signals = Placed(step.what, rank, step.modules)
    places = at_every_place(act, signals, lambda: step.step(act), stride)
    print(f"{places} places, {totals}")
    assert places
