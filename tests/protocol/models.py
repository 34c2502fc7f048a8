"""The model of a protocol: its ranks, its rules, and what may go wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protocol.board import BoardModel
from protocol.cpu import CpuRank
from protocol.cuda import CudaRank
from protocol.explorer import System
from protocol.lobby import LobbyModel
from protocol.machine import Machine
from protocol.mail import MailRank
from protocol.replays import ReplayModel
from protocol.rules import CPU, HOLDS, LOBBY, MAIL, MEETINGS, REPLAYS, SENDS
from protocol.versions import HoldModel, SendModel

OF_HOSTS = {
    MEETINGS: BoardModel,
    SENDS: SendModel,
    HOLDS: HoldModel,
    REPLAYS: ReplayModel,
    LOBBY: LobbyModel,
}


def model(protocol: str, *, without: str = "", **options: Any) -> System:
    """The model of any protocol of `RULES`, with a scenario's options. Windows of a protocol of
    rounds are lazy.
    """
    if protocol in OF_HOSTS:
        return OF_HOSTS[protocol](without=without, **options)
    return build(protocol, without=without, lazy=True, **options)


def build(
    protocol: str,
    ranks: int,
    *,
    rounds: int = 3,
    one_way: bool = False,
    aborts: bool = False,
    late: Iterable[int] = (),
    dying: Iterable[int] = (),
    without: str = "",
    lazy: bool = False,
) -> Machine:
    """A model for `explore`.

    Args:
        protocol: of `PROTOCOLS`, or MAIL, which neither aborts nor has a deadline.
        ranks: of the group.
        rounds: that each rank runs.
        one_way: whether rows go only from lower ranks to higher ones, otherwise between all.
        aborts: whether each rank may abort in each open state.
        late: ranks whose waits may run into their deadline at any time.
        dying: ranks that may die at any time. All waits have a deadline then.
        without: the rule of `RULES` that is taken out.
        lazy: whether all stores arrive at any time, which takes more states and finds no more.

    Returns:
        The machine, with a program for each rank.
    """
    # What ranks may do, but for the rule that is taken out.
    dying = frozenset(dying)
    deadlines = frozenset(range(ranks) if dying else late)
    machine = Machine(
        ranks,
        deadlines if without != "deadline" else frozenset(),
        dying,
        reports=without != "report",
        latches=without != "latch",
        lazy=lazy,
    )

    # Each rank writes its program.
    writer = {CPU: CpuRank, MAIL: MailRank}.get(protocol, CudaRank)
    for rank in range(ranks):
        writer(machine, rank, protocol, rounds, one_way, aborts, without).write()
    machine.finish()
    return machine
