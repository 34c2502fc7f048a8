"""Steps of collective calls between rounds, such as saving a checkpoint: all ranks go on, or all
raise an error that names the missing ranks.
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
    """Make the `Peers` of the group of `ep`. Its collectives have the deadline
    `exchange.warmup_timeout_s`. If `ep` is closed, the rank is alone.
    """
    return Peers.of(ep.group, ep.config.exchange.warmup_timeout_s)


@contextmanager
def together(eps: Sequence[Member]) -> Iterator[list[Peers]]:
    """Make the body of this context a step of `Peers.together` over the ranks of each of `eps`.
    Yields the `Peers`, which `run_uninterrupted` takes.
    """
    steps = [peers_of(ep) for ep in eps]
    with _enter_all(steps):
        yield steps


@contextmanager
def _enter_all(steps: Sequence[Peers]) -> Iterator[None]:
    """Enter `together` of all steps, each within the one before.

    It does not use an ExitStack, since the frame of one keeps an exception alive, which keeps its
    own frames alive. A step whose end was prevented by a signal handler reports that when the frame
    of the step is collected, which would then come too late.
    """
    if not steps:
        yield
        return
    with steps[0].together(), _enter_all(steps[1:]):
        yield


@contextmanager
def all_ranks(eps: Sequence[Member], group: dist.ProcessGroup | None = None) -> Iterator[Peers]:
    """Yield the `Peers` of `group`. By default it makes a new gloo group of all ranks, and destroys
    it at the end: a failure in this group harms no other group. Collective.
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
    # The other ranks connect to this one. So make the group to the end or not at all, even if a
    # signal handler raises meanwhile.
    making = Uninterrupted(lambda: made.append(_new_group(eps, timeout_s)))
    has_yielded = False
    try:
        making.run()
        peers = Peers.of(made[0], timeout_s)
        has_yielded = True
        yield peers
    except BaseException:
        making.finish_or_cancel()
        if made and not has_yielded:
            # A signal handler has raised before the caller got the group. The other ranks wait in
            # their first step, so report the exception there.
            with Peers.of(made[0], timeout_s).substep():
                raise
        raise
    finally:
        if made:
            dist.destroy_process_group(made[0])


def _new_group(eps: Sequence[Member], timeout_s: float) -> dist.ProcessGroup:
    """Make a gloo group of all ranks. Collective. Raises MissingRankError if a rank has ended, or
    has not come within `timeout_s` seconds.

    While gloo connects, it notices no death, and waits several times its timeout for a rank that
    has ended. So ranks first wait on a board until all have come, and only then connect, with a
    short timeout.
    """
    peers = Peers.of(dist.group.WORLD)
    # Name the board by the number of groups that torch has made, which is the same on all ranks.
    board = Board(_get_default_store(), f"epmoe/ready/{_world.group_count}")
    board.write(peers.rank, name_of_process())
    deadline = time.monotonic() + timeout_s
    opened = [ep for ep in eps if ep.group is not None]
    processes = [""] * peers.size
    while not all(processes):
        processes = [board.read(rank) for rank in range(peers.size)]
        ended = [rank for rank, process in enumerate(processes) if has_ended(process)]
        missing = ended or _ended_ranks(peers, opened)
        if not missing and time.monotonic() > deadline:
            missing = [rank for rank, process in enumerate(processes) if not process]
        if missing:
            error = RuntimeError("ranks have not come to a group of all")
            raise MissingRankError(peers, error, missing)
        time.sleep(POLL_S)

    make = partial(dist.new_group, backend="gloo")
    with peers.waiting():
        group = connected(make, timeout_s / MOST_TIMEOUTS, timeout_s)
    # A rank whose own connections stand may leave at once, which would end the attempts of ranks
    # that still connect to one another. So none has the group before all have connected.
    try:
        Peers.of(group, timeout_s).all_gather(None)
    except BaseException:
        dist.destroy_process_group(group)
        raise
    return group


@contextmanager
def naming(what: str, eps: Sequence[Member], *, remedy: str = "") -> Iterator[None]:
    """Turn a MissingRankError of this context into an EPTimeoutError that names the missing ranks.

    The text of the error names the call, `what`, and ends with `remedy`, which says what the caller
    may have to do.
    """
    try:
        yield
    except MissingRankError as error:
        # Wait a little until the windows of `eps` show which processes have ended, since gloo may
        # notice the end of a process first.
        peers = error.peers
        opened = [ep for ep in eps if ep.group is not None]
        deadline = time.monotonic() + ANSWER_S
        found = error.ranks
        while not found and time.monotonic() < deadline:
            found = _ended_ranks(peers, opened)
            time.sleep(POLL_S)
        # Ask all other ranks which ranks are missing.
        missing = RollCall.of(peers, what).missing(found, OPENING_ANSWER_S)
        global_ranks = [peers.global_ranks[rank] for rank in missing]
        why = (
            f"waited for rank(s) {missing} of the group (global rank(s) {global_ranks}), which "
            f"ended or did not come within exchange.warmup_timeout_s: {error}"
        )
        if remedy:
            why += f"; {remedy}"
        rounds = max([ep.exchange.rounds.count for ep in opened], default=0)
        then = "rounds go on, but the process group can do nothing more"
        raise EPTimeoutError(
            stage=f"{what}, after dispatch",
            epoch=rounds,
            missing=missing,
            missing_global=global_ranks,
            why=why,
            then=then,
        ) from None


def _ended_ranks(peers: Peers, eps: Sequence[Member]) -> list[int]:
    """Find the other ranks of `peers` that have left or whose processes have ended, as far as any
    of `eps` knows.
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
