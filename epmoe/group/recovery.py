"""How a group changes: after a death, to take new ranks in, or to let ranks leave. The ranks that
live meet at a board, agree on the members of the next group, and go on in it.
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

# The word of a former rank that leaves. Other former ranks write which ranks have ended.
_LEAVES = "leaves"
_Entered = TypeVar("_Entered")
Confirm = Callable[[Callable[[], object]], bool]
"""Asks all ranks whether the group has formed, and returns the answer. Its argument is a function
that returns something true once ranks are missing.
"""


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

    Every rank calls it after an EPTimeoutError, once it has left the `except` block. Or all ranks
    call it between two rounds, to take in new ranks, which call `join_group`.

    A rank is left out only if its process has ended, or if it has shown no sign of life for
    `last_call_s`. Within this call a rank shows signs of life all the time. Before its call, and on
    the same machine, a process that computes is waited for four times as long.

    Ranks cannot split into two groups. The first rank that decides writes its decision into the
    store, in one step. All other ranks follow this decision, or raise because they are left out.
    The default process group is destroyed and made anew; it holds the ranks of `ep`. No other
    thread can use `ep` before the weights are loaded.

    Each expert stays on its rank, and lost experts go to the ranks with the fewest experts. With
    new ranks all experts are spread anew, except with `placement.live`, where the slots of new
    ranks are empty. Ranks without experts stay without, as long as another rank has some.

    Args:
        ep: the ExpertParallel that is to go on.
        store: a store that outlives each of the ranks. It is a folder that all ranks see and nobody
            else can write into, or a `TCPStore` that the launcher hosts. A store serves one
            ExpertParallel.
        load_weights: gets the moves of this rank, as `ExpertParallel.resume` returns them. If it
            raises, `ep` is closed, and this rank may call `recover` again, and then loads all its
            experts. This rank shows signs of life until `load_weights` has returned, whatever
            `load_weights` waits for.
        min_ranks: with fewer ranks than this the ranks wait for new ones.
        max_ranks: new ranks are taken in up to this number of ranks; by default up to the size so
            far, or `min_ranks` if that is more. If it is more than `topology.max_ranks`, the number
            of seats, the group gets as many seats as it has ranks.
        last_call_s: how long a rank waits for the sign of another rank, in seconds; by default 5
            more than `exchange.timeout_s`.
        timeout_s: the limit of the whole call, in seconds. It is checked before each attempt.
        backend: the backend of the process group.

    Raises:
        EPStateError: the other ranks go on without this rank.
        ValueError: the store is a FileStore, or holds a decision that no rank has written.
        TimeoutError: no group of `min_ranks` has formed in time. Its cause is the error of the last
            attempt.
        MemoryError: the windows do not fit.
        PermissionError: other users can write into the folder.
    """
    if last_call_s is None:
        last_call_s = ep.config.exchange.timeout_s + LAST_CALL_S
    wanted = Wanted(
        min_ranks=min_ranks,
        max_ranks=max_ranks or max(ep.size, min_ranks),
        last_call_s=last_call_s,
        timeout_s=timeout_s,
        backend=backend,
    )
    ep.life.alone(lambda: regroup(ep, store, load_weights, wanted))


class _AttemptError(Exception):
    """An attempt to form a group has failed, because a rank has died or could not do its part.
    Another attempt may succeed.
    """

    def __init__(self, error: BaseException):
        super().__init__(str(error))
        self.error = _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """Remove from an error what would keep the process group of a failed attempt alive, and return
    it. The other ranks wait until this rank's group has ended.

    The frames of the error hold the group, and so does a MissingRankError, which has `peers`.
    """
    cause = error.__cause__
    error.__traceback__ = None
    error.__context__ = None
    error.__cause__ = None
    if cause is not None and not hasattr(cause, "peers"):
        error.__cause__ = _without_frames(cause)
    return error


@dataclass(frozen=True)
class Wanted:
    """What this rank wants of the next group. `recover` explains the first five fields."""

    min_ranks: int
    max_ranks: int
    last_call_s: float
    timeout_s: float
    backend: str
    grow_s: float = 0.0  # how long to wait for new ranks, until there are `max_ranks`
    leaves: bool = False  # whether the others are to go on without this rank


def regroup(
    ep: Member, store: Store, load_weights: Callable[[tuple[Move, ...]], object], wanted: Wanted
) -> bool:
    """Form the next group as `recover` describes it, and load the weights that moved. `recover` and
    `resize` call it within `ep.life.alone`.

    Returns whether this rank is in the group. It is False for a rank that leaves (`wanted.leaves`),
    whose `ep` is then closed.
    """
    deadline = time.monotonic() + wanted.timeout_s
    meeting = Meeting(
        root=Board(OutlivingStore(store), "epmoe"),
        name=f"{ep.origin}/{ep.generation}/0",
        processes=ep.processes,
    )
    presence = Presence(meeting.root, meeting.key_of(ep.rank))
    # The decision of the last attempt, if that attempt has failed after its decision.
    failed_decision: Decision | None = None
    # The error of the last attempt that has failed on this rank.
    cause: BaseException | None = None
    moves = None
    try:
        # Make one attempt after another, until a group has formed.
        while moves is None:
            if time.monotonic() > deadline:
                message = f"no group has formed within {wanted.timeout_s:g} s"
                raise _timeout(message, cause) from cause
            outcome = meeting.outcome()
            # The others have formed a group without this rank. A rank that leaves has asked for
            # that in an earlier call, which was interrupted.
            if outcome == FORMED and wanted.leaves:
                ep.close()
                return False
            if outcome == FORMED:
                raise EPStateError("the others have gone on without this rank: a new one may join")
            # The attempt has failed, in this call or before it: go on to the next one.
            if outcome == FAILED:
                failed_decision = meeting.decision()
                meeting = meeting.following()
                continue
            # The attempt is open: agree on the members.
            try:
                decision = _meet(meeting, ep, wanted, deadline, failed_decision)
            except TimeoutError as error:
                raise _timeout(str(error), cause) from cause
            # There is no decision if this rank leaves and no other rank stays.
            if decision is None or wanted.leaves:
                ep.close()
                return False
            if ep.rank not in decision.members:
                raise EPStateError(
                    "the others go on without this rank, which they have given up: a new one may "
                    "join"
                )
            # Join the group of the members. Experts that move keep their slots, so their placement
            # is not given.
            placement = None
            if not decision.config.placement.live:
                placement = decision.config.place_experts()
            group = None  # the default process group, which `_enter` makes
            spread_lost = True
            go_on = partial(ep.life.go_on, group, placement, spread_lost)
            try:
                moves = _enter(meeting, decision, ep.rank, wanted.backend, go_on)
            except _AttemptError as failed:
                cause = failed.error
                _log.warning("recover: attempt %s has failed: %s", meeting.name, cause)
        # If a rank dies now, the others look for this rank in the meeting of the next group. Show
        # signs of life there while this rank loads its weights, however long that takes.
        presence_before = presence
        presence = Presence(meeting.root, key_of_rank(f"{ep.origin}/{ep.generation}", ep.rank))
        presence_before.ended = True
        load_weights(moves)
    finally:
        presence.ended = True
    return True


def _timeout(message: str, cause: BaseException | None) -> TimeoutError:
    """Make a TimeoutError that also says why the last attempt has failed, if one has."""
    if cause is not None:
        message = f"{message}; the last attempt: {cause}"
    return TimeoutError(message)


class Seen(NamedTuple):
    """The state of a meeting as this rank has seen it. A former rank has its number in the group so
    far, and a new rank has `-1 - arrival`, as in a Decision.
    """

    came: list[int]
    """former ranks that have come and stay, in rank order"""
    gone: set[int]
    """former ranks that leave, in this attempt or in an earlier one"""
    lost: set[int]
    """former ranks that are given up"""
    new: list[int]
    """new ranks that have shown that they live"""
    arrivals: int
    """the last arrival number of a new rank, whether the rank lives or not"""
    may_answer: bool
    """whether a new rank that has shown no sign of life so far may still show one"""
    expected: int
    """how many members there may be at most; with fewer, the ranks wait for `Wanted.grow_s`"""

    def members(self, max_ranks: int) -> list[int]:
        """The members of a group of at most `max_ranks`. All former ranks that came have a place,
        and new ranks get the places that are left.
        """
        free_places = max(0, max_ranks - len(self.came))
        return [*self.came, *self.new[:free_places]]

    def knows_all(self, size: int) -> bool:
        """Whether it is known of every rank of the former group, which had `size` ranks, that it
        has come, leaves or is given up.
        """
        return set(range(size)) <= {*self.came, *self.gone, *self.lost}

    def nobody_stays(self, size: int) -> bool:
        """Whether no rank stays and none may still come, so that a rank that leaves need not wait
        for a decision. `size` is that of the former group.
        """
        may_come = bool(self.came or self.new or self.may_answer)
        return self.knows_all(size) and not may_come


def decide(seen: Seen, size: int, wanted: Wanted, waited_s: float) -> list[int] | None:
    """Decide on the members of the next group; None while there are ranks to wait for.

    `size` is the number of ranks of the former group, and `waited_s` the time since this rank has
    come.
    """
    members = seen.members(wanted.max_ranks)
    may_grow = len(members) < seen.expected and waited_s < wanted.grow_s
    too_few = len(members) < wanted.min_ranks
    if not seen.knows_all(size) or seen.may_answer or may_grow or too_few:
        return None
    return members


def _meet(
    meeting: Meeting,
    ep: Member,
    wanted: Wanted,
    deadline: float,
    failed_decision: Decision | None,
) -> Decision | None:
    """Meet the other ranks and return the decision on the next group. The first rank that sees
    that all others have come or are lost decides, and the other ranks read its decision.

    `failed_decision` is the decision of the last attempt, whose group did not form. Returns None if
    this rank leaves and no rank stays who could decide. Raises TimeoutError if there are fewer than
    `wanted.min_ranks` at `deadline`, a time of `time.monotonic`.
    """
    root = meeting.root
    board = meeting.board
    start = time.monotonic()
    # New ranks with smaller numbers have had their answer in earlier meetings.
    first_arrival = next(n for n in count(1) if not root.read(f"arrivals/{n}/answer"))

    # Say that this rank has come, and which ranks it knows to have ended; or that it leaves.
    word = f"ended {' '.join(map(str, ep.ended()))}"
    if wanted.leaves:
        word = _LEAVES
    board.write(f"came/{ep.rank}", word)

    # Look at the other ranks until one of all has decided.
    while (decision := meeting.decision()) is None:
        seen = _look_around(meeting, ep, wanted, failed_decision, first_arrival)
        now = time.monotonic()
        members = decide(seen, ep.size, wanted, now - start)
        if members is not None:
            own_decision = Decision(
                members=members,
                config=_config_of(ep, members),
                last_call_s=wanted.last_call_s,
                arrivals=seen.arrivals,
                left=sorted(seen.gone),
            )
            # If another rank has written a decision meanwhile, that one stays.
            board.write_once("decision", own_decision.model_dump_json())
        elif wanted.leaves and seen.nobody_stays(ep.size):
            return None
        elif now > deadline:
            came = len(seen.members(wanted.max_ranks))
            raise TimeoutError(f"{came} ranks have come, and `min_ranks` is {wanted.min_ranks}")
        else:
            time.sleep(POLL_S)

    # Tell the new ranks in which meeting they find the decision.
    for arrival in range(first_arrival, decision.arrivals + 1):
        root.write_once(f"arrivals/{arrival}/answer", meeting.name)
    return decision


def _look_around(
    meeting: Meeting,
    ep: Member,
    wanted: Wanted,
    failed_decision: Decision | None,
    first_arrival: int,
) -> Seen:
    """Read the words and signs of all ranks on the board. `_meet` calls it until there is a
    decision.

    `failed_decision` is the decision of the last attempt, if its group did not form. New ranks
    count from the arrival number `first_arrival` on.
    """
    ranks = range(ep.size)
    # Read what the former ranks that came have written.
    words = dict[int, str]()
    for rank in ranks:
        word = meeting.board.read(f"came/{rank}")
        if word:
            words[rank] = word

    # Find the former ranks that leave.
    gone = {rank for rank, word in words.items() if word == _LEAVES}
    if failed_decision is not None:
        gone.update(failed_decision.left)

    # Find those that are given up: any rank knows that they have ended, or they were silent for too
    # long. Each word lists numbers of ended ranks behind "ended"; the other strings are no numbers.
    ended = {str(rank) for rank in ep.ended()}
    for word in words.values():
        ended.update(word.split())
    lost = set[int]()
    for rank in ranks:
        if str(rank) in ended or meeting.lost(rank, wanted.last_call_s):
            lost.add(rank)
    lost -= gone
    came = [rank for rank in words if rank not in gone and rank not in lost]

    # Find the new ranks that live, by their signs.
    new = list[int]()
    may_answer = False
    arrival = first_arrival
    while meeting.root.read(f"arrivals/{arrival}"):
        member = -1 - arrival
        sign = meeting.sign_of(member)
        if sign.fresh and not meeting.lost(member, wanted.last_call_s):
            new.append(member)
        # A rank that has queued may have died, so one sign is not enough: its sign must change.
        is_silent = sign.silent_s >= ANSWER_OF_NEW_S
        if not sign.fresh and not sign.ended and not is_silent:
            may_answer = True
        arrival += 1

    # Wait for as many members as may be. After an attempt that has failed, do not wait for further
    # new ranks: its members that live are enough.
    expected = wanted.max_ranks
    if failed_decision is not None:
        expected = 0
        for member in failed_decision.members:
            if not meeting.lost(member, wanted.last_call_s):
                expected += 1
    return Seen(
        came=came,
        gone=gone,
        lost=lost,
        new=new,
        arrivals=arrival - 1,
        may_answer=may_answer,
        expected=expected,
    )


def _config_of(ep: Member, members: list[int]) -> EPConfig:
    """Make the config of a group of these members. Its experts move (`placement.live`), or have a
    placement that keeps experts on their ranks as far as that is possible.
    """
    if ep.config.placement.live:
        return ep.config.of_size(len(members))
    return ep.config.with_placement(_place_experts(ep.placement, members))


def take_in(
    store: Store, make: Callable[[EPConfig, Confirm], _Entered], timeout_s: float, backend: str
) -> _Entered:
    """Wait until a group takes this new rank in, see `epmoe.join_group`.

    `make` is called once the process group is there, with the config of the group and a function
    that confirms the group. Returns what `make` returns.
    """
    deadline = time.monotonic() + timeout_s
    root = Board(OutlivingStore(store), "epmoe")
    # The error of the last attempt that has failed on this rank.
    cause: BaseException | None = None
    while time.monotonic() < deadline:
        arrival = arrive(root)
        presence = Presence(root, f"arrivals/{arrival}")
        try:
            # Wait for the answer of the ranks of the group, which is the name of their meeting.
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
                # The group had no place left for this rank. Queue again.
                continue
            return _enter(meeting, decision, member, backend, partial(make, decision.config))
        except _AttemptError as failed:
            cause = failed.error
            _log.warning("join_group: attempt %s has failed: %s", meeting.name, cause)
        finally:
            presence.ended = True
    raise _timeout(f"nobody has taken this rank in within {timeout_s:g} s", cause) from cause


def _enter(
    meeting: Meeting,
    decision: Decision,
    member: int,
    backend: str,
    open_exchange: Callable[[Confirm], _Entered],
) -> _Entered:
    """Become a member of the next group: make its process group, and call `open_exchange` in it.
    Former ranks and new ranks call it with the decision.

    `open_exchange` gets the function that confirms the group, and its result is returned. Raises
    _AttemptError, with its cause, if this attempt has failed and another may succeed.

    Any exception, also that of a signal handler, fails the attempt for all members. This rank then
    leaves the process group, so that no other member waits for it there. The group itself ends once
    nobody keeps the exception any more.
    """
    rank = decision.members.index(member)
    timeout_s = decision.config.exchange.warmup_timeout_s
    try:
        meeting.connect(decision, rank, timeout_s, backend)
        return open_exchange(partial(meeting.confirm, decision, rank, timeout_s))
    except BaseException as error:
        meeting.fail(rank, error)
        leave_group()
        # Try again after an EPResumeError or a RuntimeError of torch. All other errors are for the
        # caller.
        if not isinstance(error, RuntimeError) or isinstance(error, EPStateError):
            raise
        failure = error
    raise _AttemptError(failure)


def _place_experts(old: Placement, members: list[int]) -> Placement:
    """Place the experts on these members. Without new ranks, experts stay on their ranks, and those
    of lost ranks are spread. With new ranks, all experts are spread anew.

    A former rank without experts gets none in either case.
    """
    # New ranks have negative numbers.
    has_new_ranks = min(members) < 0
    if not has_new_ranks:
        lost = set(range(old.ep_size)).difference(members)
        return old.without(lost, spread_lost=True)

    holders = []
    for rank, member in enumerate(members):
        if member < 0 or member in old.owners:
            holders.append(rank)

    # Give the experts to the holders in turn. Behind the E experts come blocks of their copies.
    # Shift each block by one more holder: a copy on the rank of its original is of no use.
    E = old.num_experts
    owners = []
    for expert in range(old.num_physical_experts):
        block = expert // E
        owners.append(holders[(expert + block) % len(holders)])
    redundant = old.num_physical_experts - E
    return Placement.build(E, len(members), "explicit", owners, redundant)
