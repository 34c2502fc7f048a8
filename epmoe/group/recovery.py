"""After a death, or to take new ranks in: the ranks that live meet at a board, agree on a group,
and go on in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import LAST_CALL_S
from epmoe.config.placement import Move, Placement
from epmoe.group.board import (
    ANSWER_OF_NEW_S,
    FAILED,
    FORMED,
    Board,
    Decision,
    Meeting,
    Presence,
    arrive,
    key_of_rank,
    leave_group,
)
from epmoe.group.errors import EPStateError
from epmoe.group.member import Member
from epmoe.group.store import POLL_S, OutlivingStore, Store

_log = logging.getLogger("epmoe")

_LEAVES = "leaves"  # what a former rank says in place of those that it knows to have ended
_Entered = TypeVar("_Entered")
Confirm = Callable[[Callable[[], object]], bool]
"""Whether all ranks have got into a group. It takes what returns true once some are missing."""


def recover(
    ep: Member,
    store: Store,
    load_weights: Callable[[tuple[Move, ...]], object],
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    last_call_s: float | None = None,
    timeout_s: float = 300.0,
    backend: str = "gloo",
) -> None:
    """Continue with the ranks that live: agree on a group, `resume` in it, and load what moved.

    Every rank calls it after an EPTimeoutError, once it has left the `except` block; or all ranks
    between two rounds, to take in new ones, which call `join_group`. A rank is left out only if its
    process has ended, or if it has shown no sign of life for `last_call_s`: within this call it
    shows one all the time, and on this machine a process that computes is waited for four times as
    long before it calls. Ranks cannot split into two groups: the first that decides writes its
    decision into the store, in one step, and all others follow it, or raise because they are left
    out. The default process group is destroyed and made anew; it holds the ranks of `ep`. No other
    thread gets its turn before the weights are loaded.

    Each expert stays, and lost ones go to the ranks with the fewest. With new ranks all experts are
    spread anew, except with `placement.live`, where slots of new ranks are empty. Ranks without
    experts stay without, as long as another rank has some.

    Args:
        ep: the ExpertParallel that is to go on.
        store: outlives each of the ranks: a folder that all see and nobody else can write into, or
            a `TCPStore` that the launcher hosts. It serves one ExpertParallel.
        load_weights: gets the moves of this rank, as `ExpertParallel.resume` returns them. Where it
            raises, `ep` is closed, and this rank may call again: it loads all its experts then.
            This rank shows signs of life until it has returned, whatever it waits for.
        min_ranks: with fewer the ranks wait for new ones.
        max_ranks: new ranks are taken in up to this number; by default to the size so far, or
            `min_ranks`. A group of more ranks than `topology.max_ranks`, its seats, gets as many
            seats.
        last_call_s: how long a rank waits for the sign of another, in seconds; by default 5 more
            than `exchange.timeout_s`.
        timeout_s: of the whole call, in seconds; it is looked at before each attempt.
        backend: of the process group.

    Raises:
        EPStateError: the others go on without this rank.
        ValueError: the store is a FileStore, or holds a decision that no rank has written.
        TimeoutError: no group of `min_ranks` has formed in time. It has the error of the last
            attempt as its cause.
        MemoryError: the windows do not fit.
        PermissionError: other users can write into the folder.
    """
    wait_s = ep.config.exchange.timeout_s + LAST_CALL_S if last_call_s is None else last_call_s
    most = max_ranks or max(ep.size, min_ranks)
    wanted = Wanted(min_ranks, most, wait_s, timeout_s, backend)
    ep.alone(lambda: regroup(ep, store, load_weights, wanted))


class _AttemptError(Exception):
    """An attempt to form a group has failed, since a rank has died or could not do its part."""

    def __init__(self, error: BaseException):
        super().__init__(str(error))
        self.error = _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """The error, which keeps no process group: the others wait until that of a failed attempt ends.

    The frames of an error, and a MissingRankError itself, hold the group.
    """
    cause = error.__cause__
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None if cause is None or hasattr(cause, "peers") else _without_frames(cause)
    return error


@dataclass(frozen=True)
class Wanted:
    """What the ranks of a group want of the next one; see `recover`."""

    min_ranks: int
    max_ranks: int
    last_call_s: float
    timeout_s: float
    backend: str
    grow_s: float = 0.0  # to wait for new ranks up to `max_ranks`
    leaves: bool = False  # the others are to go on without this rank


def regroup(
    ep: Member, store: Store, load_weights: Callable[[tuple[Move, ...]], object], wanted: Wanted
) -> bool:
    """Do what `recover` says. Returns whether this rank is in the group. A rank that `leaves`
    closes `ep`.
    """
    deadline = time.monotonic() + wanted.timeout_s
    before = None
    meeting = Meeting(
        Board(OutlivingStore(store), "epmoe"), f"{ep.origin}/{ep.generation}/0", ep.processes
    )
    here = Presence(meeting.root, meeting.key_of(ep.rank))
    moves = None
    cause: BaseException | None = None  # of the last attempt that failed here
    try:
        # One attempt after another, until a group has formed.
        while moves is None:
            if time.monotonic() > deadline:
                message = f"no group has formed within {wanted.timeout_s:g} s"
                raise _timeout(message, cause) from cause
            outcome = meeting.outcome()
            if outcome == FORMED and wanted.leaves:  # an earlier call has said so
                ep.close()
                return False
            if outcome == FORMED:
                raise EPStateError("the others have gone on without this rank: a new one may join")
            if outcome == FAILED:  # here, or in an earlier call
                before = meeting.decision()
                meeting = meeting.following()
                continue
            try:
                decision = _meet(meeting, ep, wanted, deadline, before)
            except TimeoutError as error:
                raise _timeout(str(error), cause) from cause
            # A rank that leaves is told of no decision where nobody stays.
            if decision is None or wanted.leaves:
                ep.close()
                return False
            if ep.rank not in decision.members:
                raise EPStateError(
                    "the others go on without this rank, which they have given up: a new one may "
                    "join"
                )
            placement = None if decision.config.placement.live else decision.config.place_experts()
            opens = partial(ep.go_on, None, placement, True)
            try:
                moves = _enter(meeting, decision, ep.rank, wanted.backend, opens)
            except _AttemptError as failed:
                cause = failed.error
                _log.warning("recover: attempt %s has failed: %s", meeting.name, cause)
        # Others may look for this rank in the next meeting already: it is there while it loads,
        # whatever it waits for.
        before_loading = here
        here = Presence(meeting.root, key_of_rank(f"{ep.origin}/{ep.generation}", ep.rank))
        before_loading.ended = True
        load_weights(moves)
    finally:
        here.ended = True
    return True


def _timeout(message: str, cause: BaseException | None) -> TimeoutError:
    """An error that also says why the last attempt has failed."""
    return TimeoutError(message if cause is None else f"{message}; the last attempt: {cause}")


class Seen(NamedTuple):
    """The state of a meeting as a rank has seen it. New ranks are `-1 - arrival`, as in a
    Decision.
    """

    came: list[int]
    """former ranks that remain, in rank order"""
    gone: set[int]
    """former ranks that leave, in this attempt or before it"""
    lost: set[int]
    """former ranks that are given up"""
    new: list[int]
    """ranks that show that they live"""
    arrivals: int
    """of new ranks, dead ones too"""
    may_answer: bool
    """Whether a new rank that has shown nothing so far may yet do so."""
    expected: int
    """members for which `Wanted.grow_s` is waited"""

    def members(self, max_ranks: int) -> list[int]:
        """Former ranks have a place before new ones."""
        return [*self.came, *self.new[: max(0, max_ranks - len(self.came))]]

    def knows_all(self, size: int) -> bool:
        """Whether nobody waits for another rank of a group of `size`."""
        return set(range(size)) <= {*self.came, *self.gone, *self.lost}

    def has_nobody(self, size: int) -> bool:
        """Whether no rank remains for which a rank that leaves would wait."""
        may_come = bool(self.came or self.new or self.may_answer)
        return self.knows_all(size) and not may_come


def decide(seen: Seen, size: int, wanted: Wanted, waited_s: float) -> list[int] | None:
    """The members of the next group, of a group of `size`; None while others may come."""
    members = seen.members(wanted.max_ranks)
    may_grow = len(members) < seen.expected and waited_s < wanted.grow_s
    too_few = len(members) < wanted.min_ranks
    if not seen.knows_all(size) or seen.may_answer or may_grow or too_few:
        return None
    return members


def _meet(
    meeting: Meeting, ep: Member, wanted: Wanted, deadline: float, before: Decision | None
) -> Decision | None:
    """Meet the other ranks. The first rank that sees that all are there, or lost, decides; the
    others read its decision.

    `before` is the decision of the last attempt, whose group did not form. Returns None where this
    rank leaves and nobody stays who could decide.
    """
    root = meeting.root
    board = meeting.board
    start = time.monotonic()
    first = next(n for n in count(1) if not root.read(f"arrivals/{n}/answer"))
    # This rank comes.
    ended = f"ended {' '.join(map(str, ep.ended()))}"
    board.write(f"came/{ep.rank}", _LEAVES if wanted.leaves else ended)
    # It looks until a rank has decided.
    while (decision := meeting.decision()) is None:
        seen = _look(meeting, ep, wanted, before, first)
        now = time.monotonic()
        members = decide(seen, ep.size, wanted, now - start)
        if members is not None:
            mine = Decision(
                members=members,
                config=_config_of(ep, members),
                last_call_s=wanted.last_call_s,
                arrivals=seen.arrivals,
                left=sorted(seen.gone),
            )
            board.write_once("decision", mine.model_dump_json())  # whoever was first has decided
        elif wanted.leaves and seen.has_nobody(ep.size):
            return None
        elif now > deadline:
            came = len(seen.members(wanted.max_ranks))
            raise TimeoutError(f"{came} ranks have come, and `min_ranks` is {wanted.min_ranks}")
        else:
            time.sleep(POLL_S)
    # New ranks hear of it.
    for arrival in range(first, decision.arrivals + 1):
        root.write_once(f"arrivals/{arrival}/answer", meeting.name)
    return decision


def _look(
    meeting: Meeting, ep: Member, wanted: Wanted, before: Decision | None, first: int
) -> Seen:
    """Read the words of all ranks. New ones count from the arrival `first` on."""
    ranks = range(ep.size)
    # Former ranks: what they have said, and whom anybody knows to have ended.
    read = {rank: meeting.board.read(f"came/{rank}") for rank in ranks}
    words = {rank: word for rank, word in read.items() if word}
    gone = {rank for rank, word in words.items() if word == _LEAVES}
    if before is not None:
        gone.update(before.left)
    ended = {*map(str, ep.ended()), *" ".join(words.values()).split()}
    lost = {
        rank for rank in ranks if str(rank) in ended or meeting.lost(rank, wanted.last_call_s)
    } - gone
    came = [rank for rank in words if rank not in gone | lost]
    # New ranks, whose signs tell which of them live.
    new = list[int]()
    may_answer = False
    arrival = first
    while meeting.root.read(f"arrivals/{arrival}"):
        member = -1 - arrival
        sign = meeting.sign_of(member)
        if sign.fresh and not meeting.lost(member, wanted.last_call_s):
            new.append(member)
        may_answer |= not sign.fresh and not sign.ended and sign.silent_s < ANSWER_OF_NEW_S
        arrival += 1
    # Behind an attempt that has failed, those of its members that live are enough.
    expected = wanted.max_ranks
    if before is not None:
        expected = sum(not meeting.lost(member, wanted.last_call_s) for member in before.members)
    return Seen(came, gone, lost, new, arrival - 1, may_answer, expected)


def _config_of(ep: Member, members: list[int]) -> EPConfig:
    if ep.config.placement.live:
        return ep.config.of_size(len(members))
    return ep.config.with_placement(_place(ep.placement, members))


def take_in(
    store: Store, make: Callable[[EPConfig, Confirm], _Entered], timeout_s: float, backend: str
) -> _Entered:
    """Wait until a group takes this new rank in; see `epmoe.join_group`. `make` is called in its
    process group.
    """
    deadline = time.monotonic() + timeout_s
    root = Board(OutlivingStore(store), "epmoe")
    cause: BaseException | None = None  # of the last attempt that failed here
    while time.monotonic() < deadline:
        arrival = arrive(root)
        here = Presence(root, f"arrivals/{arrival}")
        try:
            # The ranks of the group answer with the name of their meeting.
            answer = ""
            while not answer and time.monotonic() < deadline:
                time.sleep(POLL_S)
                answer = root.read(f"arrivals/{arrival}/answer")
            if not answer:
                break
            meeting = Meeting(root, answer)
            decision = meeting.decision()
            member = -1 - arrival
            if decision is None or member not in decision.members:
                continue  # the group had no place left
            return _enter(meeting, decision, member, backend, partial(make, decision.config))
        except _AttemptError as failed:
            cause = failed.error
            _log.warning("join_group: attempt %s has failed: %s", meeting.name, cause)
        finally:
            here.ended = True
    raise _timeout(f"nobody has taken this rank in within {timeout_s:g} s", cause) from cause


def _enter(
    meeting: Meeting,
    decision: Decision,
    member: int,
    backend: str,
    open_: Callable[[Confirm], _Entered],
) -> _Entered:
    """Get into the group. Returns what `open_` returns in its process group. Raises _AttemptError,
    with its cause, if this attempt has failed and another may succeed.

    Whatever it raises, a signal handler's error too, fails the attempt for all. They must not wait
    for this rank then: it leaves the process group, which ends with the exception at last.
    """
    rank = decision.members.index(member)
    form_s = decision.config.exchange.warmup_timeout_s
    try:
        meeting.connect(decision, rank, form_s, backend)
        return open_(partial(meeting.confirm, decision, rank, form_s))
    except BaseException as error:
        meeting.fail(rank, error)
        leave_group()
        # EPResumeError, or torch's; all other errors are for the caller.
        if not isinstance(error, RuntimeError) or isinstance(error, EPStateError):
            raise
        failure = error
    raise _AttemptError(failure)


def _place(old: Placement, members: list[int]) -> Placement:
    """Former ranks without experts stay without."""
    if min(members) >= 0:
        return old.without(set(range(old.ep_size)).difference(members), spread_lost=True)
    E = old.num_experts
    R = len(members)
    # New ranks have negative numbers.
    holders = [rank for rank, member in enumerate(members) if member < 0 or member in old.owners]
    # A copy on the rank of its original is of no use.
    owners = [holders[(p + p // E) % len(holders)] for p in range(old.num_physical_experts)]
    return Placement.build(E, R, "explicit", owners, old.num_physical_experts - E)
