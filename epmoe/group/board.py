"""The board: ranks tell one another something by words in a store, where no other rank has to
answer. docs/protocol.md, "A meeting after a death", has the states of the protocol.

Either only one rank writes a key, or the key keeps the word of the first rank that writes it
(`write_once`). So a rank may die between any two of its words, and the board is still consistent.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TypeVar

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout, _world

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import ANSWER_S
from epmoe.group.deaths import has_ended, name_of_process, processor_time
from epmoe.group.peers import Peers
from epmoe.group.store import POLL_S, OutlivingStore
from epmoe.group.waiting import as_on_this_thread, interruptible, start_thread, to_its_end

# A rank writes a new sign of life at this interval.
_BEAT_S = 0.05
# A process that computes but has not called `recover` is waited for as long as so many last calls.
_LAST_CALLS_OF_BUSY_PROCESS = 4
# A new rank that shows no sign of life for so long is given up.
ANSWER_OF_NEW_S = 1.0
# Between two looks at a sign, at most so much silence counts. A rank that looks late does not know
# whether the sign has changed meanwhile.
_MOST_SILENCE_OF_A_LOOK_S = 0.2
# gloo's timeout while ranks connect in the first attempt.
_CONNECT_S = 0.25
# gloo waits for a rank that has ended up to so many times its timeout.
MOST_TIMEOUTS = 5
# Writing a word into a store that can be reached takes no longer.
_SEND_S = 0.1
# Another rank reads at most so many characters of the reason why an attempt has failed.
_MOST_CHARACTERS = 500
_RANK_IS_GONE = "a rank is gone"
_Group = TypeVar("_Group", bound=dist.ProcessGroup | None)
FORMED = "formed"
FAILED = "failed"


@dataclass(frozen=True)
class Board:
    """Keys in a store, all under one name. The value of a key is a word: a string."""

    store: dist.Store
    name: str

    def write(self, key: object, word: str) -> None:
        """Write a word. Only one rank may write this key."""
        self.store.set(f"{self.name}/{key}", word)

    def read(self, key: object) -> str:
        """Read a word; "" if nobody has written it."""
        # Ask first whether the word is there, since `get` would wait for it.
        name = f"{self.name}/{key}"
        if not self.store.check([name]):
            return ""
        return self.store.get(name).decode(errors="replace")

    def write_once(self, key: object, word: str) -> str:
        """Write a word, unless another rank has written this key already. Returns the word that
        stays, which is the word of the first rank.
        """
        return self.store.compare_set(f"{self.name}/{key}", "", word).decode(errors="replace")


class Presence:
    """Shows other ranks that this process lives: a thread writes a new sign of life under `key`
    again and again. The thread ends when `ended` is set to True or this object is collected.
    """

    def __init__(self, board: Board, key: object) -> None:
        self.ended = False
        # The thread gets a weak reference, so that it does not keep this object alive.
        arguments = (weakref.ref(self), board, key)
        thread = Thread(target=_show_signs, args=arguments, name="epmoe-presence", daemon=True)
        start_thread(thread)


def sign_of_life() -> str:
    """Make a sign of life: a word that differs from those of all other processes and from every
    earlier word of this process. It begins with the name of the process.
    """
    return f"{name_of_process()} {time.monotonic_ns()}"


def _show_signs(presence: weakref.ref[Presence], board: Board, key: object) -> None:
    """Write signs of life until the presence has ended. It is the work of a thread."""
    while (living := presence()) is not None and not living.ended:
        # Drop the reference, so that the presence can be collected during the sleep.
        del living
        # An error of the store is no matter of this thread: the calls of the rank itself raise it.
        with suppress(RuntimeError, OSError):
            board.write(key, sign_of_life())
        time.sleep(_BEAT_S)


@dataclass
class Sign:
    """The sign of life of another rank, as this rank has seen it so far.

    Silence is the time between looks of this rank, and not the time on the clock: each look adds a
    limited time. A machine that is busy or stands still delays the looks as well as the signs, so
    it makes no rank seem dead.
    """

    word: str  # the sign at the last look
    looked: float  # the time of the last look, by `time.monotonic`
    silent_s: float = 0.0  # the silence since the sign has last changed
    waited_s: float = 0.0  # the time since the first look
    fresh: bool = False  # whether the sign has changed since the first look
    ended: bool = False  # whether the process is known to have ended

    def look(self, word: str, process: str) -> None:
        """Take note of the present sign, and add the time since the last look.

        `word` is the word that the other rank shows now, and `process` the name of its process.
        """
        now = time.monotonic()
        step_s = min(now - self.looked, _MOST_SILENCE_OF_A_LOOK_S)
        self.looked = now
        self.silent_s += step_s
        self.waited_s += step_s
        if word != self.word:
            self.word = word
            self.silent_s = 0.0
            self.fresh = True
        self.ended = has_ended(process)


class Decision(BaseModel):
    """Who forms the next group. One rank decides it for all ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    # The members in their rank order in the next group: first former ranks by their numbers in the
    # group so far, then new ranks as `-1 - arrival`.
    members: list[int]
    # The config of the next group.
    config: EPConfig
    # A member that is silent for so long is given up.
    last_call_s: float
    # New ranks with an arrival number up to this one have their answer: a place or none.
    arrivals: int
    # Former ranks that have left, in this attempt or in an earlier one.
    left: list[int]


@dataclass(frozen=True)
class Meeting:
    """One attempt of the ranks of a group, and of new ranks, to form the next group.

    A member is a rank that may belong to the next group. A former rank has its number in the group
    so far, and a new rank has `-1 - arrival`.
    """

    root: Board  # the board of all meetings in this store
    name: str  # <origin>/<generation>/<attempt>
    processes: Sequence[str] = ()  # [R] names of the processes of the group so far
    signs: dict[int, Sign] = field(default_factory=dict)  # by member; all attempts share it

    @property
    def board(self) -> Board:
        """The board of this attempt alone."""
        return Board(self.root.store, f"{self.root.name}/{self.name}")

    def following(self) -> Meeting:
        """Make the meeting of the next attempt, which keeps the signs seen so far."""
        group, _, attempt = self.name.rpartition("/")
        return Meeting(
            root=self.root,
            name=f"{group}/{int(attempt) + 1}",
            processes=self.processes,
            signs=self.signs,
        )

    def key_of(self, member: int) -> str:
        """The key on the board `root` under which a member shows its sign of life."""
        if member < 0:
            return f"arrivals/{-1 - member}"
        group, _, _ = self.name.rpartition("/")
        return key_of_rank(group, member)

    def sign_of(self, member: int) -> Sign:
        """Look at the sign of life of a member, and return what is known of it.

        A former rank that has not called `recover` yet shows no sign. Where its process is on this
        machine, the processor time of the process takes the place of the sign.
        """
        # A sign begins with the name of the process. The names of former ranks are also known from
        # the group so far.
        word = self.root.read(self.key_of(member))
        process, _, _ = word.partition(" ")
        if not process and 0 <= member < len(self.processes):
            process = self.processes[member]
        shown = word or processor_time(process)
        sign = self.signs.setdefault(member, Sign(shown, time.monotonic()))
        sign.look(shown, process)
        return sign

    def lost(self, member: int, last_call_s: float) -> bool:
        """Whether a member is given up. There are three reasons: its process has ended; it was
        silent for too long; or it computes, but has not come within several times `last_call_s`.

        A new rank that is given up and yet lives queues again with another arrival number.
        """
        sign = self.sign_of(member)
        if sign.ended:
            return True
        waited_too_long = sign.waited_s > _LAST_CALLS_OF_BUSY_PROCESS * last_call_s
        if waited_too_long and not self.root.read(self.key_of(member)):
            return True
        silence_s = last_call_s if member >= 0 else ANSWER_OF_NEW_S
        return sign.silent_s > silence_s

    def anybody_lost(self, decision: Decision) -> bool:
        """Whether any member of the next group is given up."""
        return any(self.lost(member, decision.last_call_s) for member in decision.members)

    def decision(self) -> Decision | None:
        """Read the decision; None if no rank has decided yet. Raises ValueError, which names the
        key, if the key holds anything that is no decision.
        """
        word = self.board.read("decision")
        if not word:
            return None
        try:
            return Decision.model_validate_json(word)
        except ValidationError as error:
            raise ValueError(
                f"{self.board.name}/decision in the store holds no decision: {error}"
            ) from None

    def outcome(self) -> str:
        """Read the outcome of the attempt: FORMED, FAILED, or "" while it is open."""
        return self.board.read("outcome")

    def connect(self, decision: Decision, rank: int, timeout_s: float, backend: str) -> None:
        """Make the default process group of torch.distributed anew, of the members. Collective.

        `rank` is the number of this rank in the next group. Raises RuntimeError if the attempt
        fails, a member is lost, or the group has not formed within `timeout_s` seconds.
        """
        size = len(decision.members)
        look = partial(self._check_attempt, decision, time.monotonic() + timeout_s)
        leave_group()
        # Wait until all members are about to connect, so that connecting itself takes little time.
        board = self.board
        board.write(f"ready/{rank}", "ready")
        while not all(board.read(f"ready/{other}") for other in range(size)):
            look()
            time.sleep(POLL_S)

        # torch names groups by a count that must be the same on all ranks. It also counts groups
        # that have failed, and new ranks have made none, so let all ranks count from 0.
        _world.group_count = 0
        # torch waits in the store for the other ranks. Let these waits call `look`, which raises
        # after a death.
        store = self.root.store
        assert isinstance(store, OutlivingStore)
        _kept[:] = [store]
        store.look = look

        # While gloo connects, it notices no death, and waits several times its timeout for a member
        # that has ended. So the timeout is short in the first attempt, and twice as long in each
        # further one, which gives slow members time.
        attempt = int(self.name.rpartition("/")[2])
        connect_s = min(timeout_s, decision.last_call_s, _CONNECT_S * 2**attempt)
        group = dist.PrefixStore(f"{self.board.name}/group", store)
        make = partial(dist.init_process_group, backend, store=group, rank=rank, world_size=size)
        # Let no signal handler interrupt torch here: it would keep an incomplete group, and would
        # refuse to make another one.
        to_its_end(as_on_this_thread(partial(connected, make, connect_s, timeout_s)))
        store.look = None

    def _check_attempt(self, decision: Decision, deadline: float) -> None:
        """Raise RuntimeError if the attempt has failed, a member is lost, or `deadline`, a time of
        `time.monotonic`, has passed.
        """
        if self.outcome() == FAILED:
            raise RuntimeError(self.why_failed(len(decision.members)))
        if self.anybody_lost(decision) or time.monotonic() > deadline:
            raise RuntimeError(_RANK_IS_GONE)

    def confirm(
        self, decision: Decision, rank: int, timeout_s: float, missing: Callable[[], object]
    ) -> bool:
        """Report that this rank is in the group, wait for the reports of the others, and return
        whether the group has formed. `missing` returns something true once ranks are missing.

        This vote is needed because the last gather while the group opens may succeed on some ranks
        and fail on others. The first rank that knows the outcome writes it, and all ranks follow.
        """
        board = self.board
        deadline = time.monotonic() + timeout_s
        board.write(f"in/{rank}", "in")
        while not self.outcome():
            if all(board.read(f"in/{other}") for other in range(len(decision.members))):
                board.write_once("outcome", FORMED)
            elif missing() or self.anybody_lost(decision) or time.monotonic() > deadline:
                self.fail()
            else:
                time.sleep(POLL_S)
        return self.outcome() == FORMED

    def fail(self, rank: int | None = None, error: BaseException | None = None) -> None:
        """End the attempt for all ranks, unless the group has formed. If this rank has failed, it
        first writes its `error`, which others then name.
        """
        if error is not None:
            why = f"{type(error).__name__}: {error}"
            self.board.write(f"why/{rank}", why[:_MOST_CHARACTERS])
        self.board.write_once("outcome", FAILED)

    def why_failed(self, size: int) -> str:
        """Say why the attempt has failed: the error of the lowest rank that has written one. `size`
        is the number of members.
        """
        for rank in range(size):
            why = self.board.read(f"why/{rank}")
            if why:
                return f"rank {rank}: {why[:_MOST_CHARACTERS]}"
        return _RANK_IS_GONE


def key_of_rank(group: str, rank: int) -> str:
    """The key under which a former rank shows its sign of life while the ranks of `group` meet to
    form the next group. `group` is <origin>/<generation>.
    """
    return f"{group}/there/{rank}"


def arrive(root: Board) -> int:
    """Queue as a new rank, and return the arrival number of this rank, from 1. The key of the
    number holds the sign of life of this rank.
    """
    word = sign_of_life()
    # Take the first number that no rank has. If another rank takes it at the same time, the word of
    # that rank stays, and this rank tries the next number.
    number = 1
    while True:
        key = f"arrivals/{number}"
        if not root.read(key) and root.write_once(key, word) == word:
            return number
        number += 1


def connected(make: Callable[..., _Group], connect_s: float, timeout_s: float) -> _Group:
    """Make a process group whose timeout is `connect_s` while ranks connect, and `timeout_s` later.

    `make` takes the timeout and returns the group, or None if it makes the default group.
    """
    connect = timedelta(seconds=connect_s)
    timeout = timedelta(seconds=timeout_s)
    # With torch's debug level DETAIL a group keeps the timeout with which it has connected. So take
    # the long one from the start.
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        connect = timeout
    group = make(timeout=connect)
    _set_pg_timeout(timeout, group)
    return group


def leave_group() -> None:
    """Destroy the default process group, if there is one. That closes its connections, so that no
    other rank waits in it for this rank.
    """
    if dist.is_initialized():
        to_its_end(as_on_this_thread(dist.destroy_process_group))


# The store of the default group. torch does not keep a store of Python alive, so this list does.
_kept = list[dist.Store]()


@dataclass(frozen=True)
class RollCall:
    """Some or all ranks of a group, which report to one another after a failure which ranks are
    missing. All numbers are those of the group.
    """

    ranks: list[int]
    """the ranks that take part"""
    rank: int
    """this rank"""
    size: int
    """the number of ranks of the whole group"""
    name: str
    """a name that is the same on all ranks of the group, and that no other group has"""
    attempt: str = ""
    """the name of this attempt to open a group, once this rank knows it"""

    def arrive(self) -> None:
        """Write the name of this process. If this process ends, the other ranks see it by the name,
        and need not wait for an answer.
        """
        self._send(f"process/{self.rank}", name_of_process())

    def succeed(self) -> None:
        """Report that the attempt has succeeded on this rank. If it fails on another rank, the
        other rank then knows that this one is not missing.
        """
        self._send(f"{self.attempt}/{self.rank}", "in")

    def missing(self, found: Sequence[int], answer_s: float = ANSWER_S) -> list[int]:
        """Find out which ranks are missing after a failure. The list is never empty; if the store
        does not answer, it has all other ranks of this roll call.

        Every rank that notices the failure calls this method, and so reports which missing ranks it
        has `found`. A rank that does not report within `answer_s` seconds is missing. A rank whose
        process has ended is missing at once.
        """
        # Ask the others on a thread: the store may not answer, and the thread then goes on after
        # this call.
        others = [rank for rank in self.ranks if rank != self.rank]
        reports: dict[int, set[int]] = {}
        # Without a default group there is no store, and `_board` raises ValueError.
        with suppress(RuntimeError, ValueError):
            ask = partial(self._ask, self._board(), found, others, reports, answer_s)
            interruptible(ask, answer_s)
        reports = dict(reports)

        # Believe first what this rank itself has found, then what others report, then silence.
        named = set().union(*reports.values())
        silent = set(others) - set(reports)
        missing = sorted(set(found) or named or silent or others)
        # Leave the result for ranks that notice the failure later.
        self._send(self.rank, _report(missing))
        return missing

    @classmethod
    def of(cls, peers: Peers, what: str, attempt: str = "") -> RollCall:
        """Make the roll call of all ranks of the group of `peers`. `what` names the call that may
        fail, and `attempt` the attempt to open a group.
        """
        assert peers.group is not None
        name = f"{what}/{peers.group.group_name}"
        return cls(
            ranks=list(range(peers.size)),
            rank=peers.rank,
            size=peers.size,
            name=name,
            attempt=attempt,
        )

    def _send(self, key: object, word: str) -> None:
        """Write a word for the other ranks, unless the store cannot be reached at once."""
        with suppress(RuntimeError, ValueError):
            interruptible(partial(self._board().write, key, word), _SEND_S)

    def _board(self) -> Board:
        return Board(_get_default_store(), f"epmoe/{self.name}/missing")

    def _ask(
        self,
        board: Board,
        found: Sequence[int],
        others: list[int],
        reports: dict[int, set[int]],
        answer_s: float,
    ) -> None:
        """Report the ranks that this rank has `found`, and read the reports of the `others` into
        `reports`. It may never end if the store does not answer.

        Once this rank knows of a missing rank, it waits for no further report. Other ranks may be
        waiting for this rank in a collective, and report only after this rank has left it.
        """
        board.write(self.rank, _report(found))
        deadline = time.monotonic() + answer_s
        silent = set(others)
        ended = set[int]()
        while silent and not found and not ended and time.monotonic() < deadline:
            for rank in sorted(silent):
                report = board.read(rank)
                if report:
                    reports[rank] = _ranks_in(report, self.size)
                # That rank has succeeded, so it misses nobody.
                elif self.attempt and board.read(f"{self.attempt}/{rank}"):
                    reports[rank] = set()
                # The process of that rank has ended, which is as good as its own report.
                elif has_ended(board.read(f"process/{rank}")):
                    ended.add(rank)
                    reports[rank] = {rank}
            silent.difference_update(reports)
            time.sleep(POLL_S)


def _report(ranks: Sequence[int]) -> str:
    """Write ranks as a word of the board. It is never "", which stands for no word."""
    return ",".join(map(str, ranks)) or "none"


def _ranks_in(report: str, size: int) -> set[int]:
    """Read the ranks of a report. Whatever is no rank of a group of `size` ranks is left out."""
    ranks = set()
    for word in report.split(","):
        # The report comes from another process. Reading a very long number would take long.
        is_number = word.isascii() and word.isdigit() and len(word) < 10
        if is_number and int(word) < size:
            ranks.add(int(word))
    return ranks
