"""Collective calls between rounds, for checkpoints: all ranks go on, or all raise and name who is
missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from epmoe.config.config import ExchangeConfig
from epmoe.config.deadlines import ANSWER_S, OPENING_ANSWER_S
from epmoe.group.board import MOST_TIMEOUTS, Board, RollCall, connected
from epmoe.group.deaths import has_ended, name_of_process
from epmoe.group.errors import EPTimeoutError
from epmoe.group.member import Member
from epmoe.group.peers import MissingRankError, Peers
from epmoe.group.store import POLL_S
from epmoe.group.waiting import Uninterrupted


def peers_of(ep: Member) -> Peers:
    """The ranks of an `ExpertParallel`, whose collectives have `warmup_timeout_s`; alone if it is
    closed.
    """
    return Peers.of(ep.group, ep.config.exchange.warmup_timeout_s)


@contextmanager
def together(eps: Sequence[Member]) -> Iterator[list[Peers]]:
    """A step of `Peers.together` over the ranks of each, for `run_uninterrupted`."""
    steps = [peers_of(ep) for ep in eps]
    with _nested(steps):
        yield steps


@contextmanager
def _nested(steps: Sequence[Peers]) -> Iterator[None]:
    """The steps, each within the one before.

    Without an ExitStack, whose frame keeps an exception, and that its frames: a step that a signal
    handler has kept from its last word reports when it is collected.
    """
    if not steps:
        yield
        return
    with steps[0].together(), _nested(steps[1:]):
        yield


@contextmanager
def all_ranks(eps: Sequence[Member], group: dist.ProcessGroup | None = None) -> Iterator[Peers]:
    """Yield the ranks of `group`. By default they are all, in a gloo group of its own: a failure
    there harms no other group. Collective.
    """
    if not dist.is_initialized():
        yield Peers.of(None)
        return
    timeouts = [ep.config.exchange.warmup_timeout_s for ep in eps]
    timeout_s = max(timeouts, default=ExchangeConfig().warmup_timeout_s)
    if group is not None:
        yield Peers.of(group, timeout_s)
        return
    made = list[dist.ProcessGroup]()
    # Made on all ranks or on none, whatever a signal handler raises: others connect to this one.
    making = Uninterrupted(lambda: made.append(_new_group(eps, timeout_s)))
    is_given = False
    try:
        making.run()
        peers = Peers.of(made[0], timeout_s)
        is_given = True
        yield peers
    except BaseException:
        making.finish_or_cancel()
        if made and not is_given:
            # The others wait in their first step.
            with Peers.of(made[0], timeout_s).substep():
                raise
        raise
    finally:
        if made:
            dist.destroy_process_group(made[0])


def _new_group(eps: Sequence[Member], timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of all ranks. Collective. Raises MissingRankError.

    gloo looks at no death while it connects, and takes several of its timeouts for a rank that has
    ended. So nobody connects before all are about to, and the timeouts are short then.
    """
    peers = Peers.of(dist.group.WORLD)
    # torch numbers groups, and all ranks have made as many.
    board = Board(_get_default_store(), f"epmoe/ready/{_world.group_count}")
    board.write(peers.rank, name_of_process())
    deadline = time.monotonic() + timeout_s
    opened = [ep for ep in eps if ep.group is not None]
    processes = [""] * peers.size
    while not all(processes):
        processes = [board.read(rank) for rank in range(peers.size)]
        ended = [rank for rank, process in enumerate(processes) if has_ended(process)]
        missing = ended or _ended(peers, opened)
        if not missing and time.monotonic() > deadline:
            missing = [rank for rank, process in enumerate(processes) if not process]
        if missing:
            error = RuntimeError("ranks have not come to a group of all")
            raise MissingRankError(peers, error, missing)
        time.sleep(POLL_S)

    make = partial(dist.new_group, backend="gloo")
    with peers.waiting():
        return connected(make, timeout_s / MOST_TIMEOUTS, timeout_s)


@contextmanager
def naming(what: str, eps: Sequence[Member], *, remedy: str = "") -> Iterator[None]:
    """Raise EPTimeoutError, which names the ranks, in place of MissingRankError. `what` is the
    call, and `remedy` says at the end what a caller may have to do.
    """
    try:
        yield
    except MissingRankError as error:
        # Wait a little for the windows to say which processes have ended: gloo may see it first.
        peers = error.peers
        opened = [ep for ep in eps if ep.group is not None]
        deadline = time.monotonic() + ANSWER_S
        found = error.ranks
        while not found and time.monotonic() < deadline:
            found = _ended(peers, opened)
            time.sleep(POLL_S)
        # Ask all ranks who is there.
        missing = RollCall.of(peers, what).missing(found, OPENING_ANSWER_S)
        names = [peers.global_ranks[rank] for rank in missing]
        why = (
            f"waited for rank(s) {missing} of the group (global rank(s) {names}), which ended or "
            f"did not come within exchange.warmup_timeout_s: {error}"
        )
        if remedy:
            why += f"; {remedy}"
        rounds = max([ep.exchange.rounds.count for ep in opened], default=0)
        then = "rounds go on, but the process group can do nothing more"
        raise EPTimeoutError(f"{what}, after dispatch", rounds, missing, names, why, then) from None


def _ended(peers: Peers, eps: Sequence[Member]) -> list[int]:
    """Find other ranks of `peers` whose processes have ended, as any of these `ExpertParallel`s
    knows.
    """
    ended = set[int]()
    for ep in eps:
        global_ranks = peers_of(ep).global_ranks
        gone = set(range(ep.size)).difference(ep.survivors())
        ended |= {global_ranks[rank] for rank in gone}
    found = []
    for rank, global_rank in enumerate(peers.global_ranks):
        if global_rank in ended and rank != peers.rank:
            found.append(rank)
    return found
