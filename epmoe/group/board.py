"""The board: what ranks tell one another in a store, which needs no rank to answer.
docs/protocol.md has its states.

Every key has one writer, or keeps the word of the first one: `write_once`. So a rank may end
between any two words.
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

# From one sign of life to the next.
_BEAT_S = 0.05
# The longest wait for a process that computes and has not come is so many last calls.
_CALLS = 4
# For a sign of a new rank.
ANSWER_OF_NEW_S = 1.0
# The longest silence from one look to the next that counts: a rank that looks late knows no more.
_LOOK_S = 0.2
# gloo's timeout in the first attempt.
_CONNECT_S = 0.25
# It takes up to so many of them for a rank that has ended.
MOST_TIMEOUTS = 5
# To write a word into the store, where it can be reached.
_SEND_S = 0.1
# Characters of a reason that another rank reads.
_MOST_CHARACTERS = 500
_GONE = "a rank is gone"
_Group = TypeVar("_Group", bound=dist.ProcessGroup | None)
FORMED = "formed"
FAILED = "failed"


@dataclass(frozen=True)
class Board:
    """Words under a name in a store."""

    store: dist.Store
    name: str

    def write(self, key: object, word: str) -> None:
        self.store.set(f"{self.name}/{key}", word)

    def read(self, key: object) -> str:
        """The word; "" if there is none."""
        # A look at a word that is not there would wait for it.
        name = f"{self.name}/{key}"
        if not self.store.check([name]):
            return ""
        return self.store.get(name).decode(errors="replace")

    def write_once(self, key: object, word: str) -> str:
        """Write a word, unless another rank has written one already. Returns the word that stays:
        that of the first rank.
        """
        return self.store.compare_set(f"{self.name}/{key}", "", word).decode(errors="replace")


class Presence:
    """Shows on a thread that this process is there, by a word that changes, until it is ended or
    collected.
    """

    def __init__(self, board: Board, key: object) -> None:
        self.ended = False
        # The thread must not keep this object alive.
        shown = (weakref.ref(self), board, key)
        start_thread(Thread(target=_show, args=shown, name="epmoe-presence", daemon=True))


def sign_of_life() -> str:
    """A word that no other process has written, nor this one before."""
    return f"{name_of_process()} {time.monotonic_ns()}"


def _show(presence: weakref.ref[Presence], board: Board, key: object) -> None:
    while (shown := presence()) is not None and not shown.ended:
        del shown
        # Where the store is gone, this rank's own calls raise.
        with suppress(RuntimeError, OSError):
            board.write(key, sign_of_life())
        time.sleep(_BEAT_S)


@dataclass
class Sign:
    """The sign of life that this rank has seen of another one. Silence is counted in looks of this
    rank, not by the clock: a machine that is busy or stands still delays both.
    """

    word: str
    looked: float
    silent_s: float = 0.0
    waited_s: float = 0.0  # since the first look
    fresh: bool = False  # it has changed meanwhile
    ended: bool = False  # the process is known to have

    def look(self, word: str, process: str) -> None:
        """Count the time since the last look. `word` is what the rank shows now, and `process` the
        name of its process.
        """
        now = time.monotonic()
        step_s = min(now - self.looked, _LOOK_S)
        self.looked = now
        self.silent_s += step_s
        self.waited_s += step_s
        if word != self.word:
            self.word = word
            self.silent_s = 0.0
            self.fresh = True
        self.ended = has_ended(process)


class Decision(BaseModel):
    """What one rank has decided for all."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    members: list[int]  # in rank order: former ranks, and behind them new ones as `-1 - arrival`
    config: EPConfig  # of the group to be
    last_call_s: float  # a member that is silent for so long is given up
    arrivals: int  # new ranks up to here have their answer
    left: list[int]  # former ranks that have left in this attempt or before it


@dataclass(frozen=True)
class Meeting:
    """One attempt of the ranks of a group, and of new ones, to form the next group."""

    root: Board
    name: str  # <origin>/<generation>/<attempt>
    processes: Sequence[str] = ()  # [R], of the group so far
    signs: dict[int, Sign] = field(default_factory=dict)  # by member, through all attempts

    @property
    def board(self) -> Board:
        return Board(self.root.store, f"{self.root.name}/{self.name}")

    def following(self) -> Meeting:
        """The next attempt, with the signs that this rank has seen so far."""
        group, _, attempt = self.name.rpartition("/")
        return Meeting(self.root, f"{group}/{int(attempt) + 1}", self.processes, self.signs)

    def key_of(self, member: int) -> str:
        """Where it shows that it is there, see `Presence`."""
        if member < 0:
            return f"arrivals/{-1 - member}"
        group, _, _ = self.name.rpartition("/")
        return key_of_rank(group, member)

    def sign_of(self, member: int) -> Sign:
        """Look for the sign of life of a member. Of a member that has not come yet, look whether
        its process computes.
        """
        # A sign begins with the name of the process, which is known of ranks of the group so far.
        word = self.root.read(self.key_of(member))
        process, _, _ = word.partition(" ")
        if not process and 0 <= member < len(self.processes):
            process = self.processes[member]
        shown = word or processor_time(process)
        sign = self.signs.setdefault(member, Sign(shown, time.monotonic()))
        sign.look(shown, process)
        return sign

    def lost(self, member: int, last_call_s: float) -> bool:
        """Whether a member is given up: its process has ended, or it has been silent for too long,
        or computes for several times as long and does not come. A new one that lives queues again.
        """
        sign = self.sign_of(member)
        if sign.ended:
            return True
        if sign.waited_s > _CALLS * last_call_s and not self.root.read(self.key_of(member)):
            return True
        silence_s = last_call_s if member >= 0 else ANSWER_OF_NEW_S
        return sign.silent_s > silence_s

    def anybody_lost(self, decision: Decision) -> bool:
        """Whether any member is given up."""
        return any(self.lost(member, decision.last_call_s) for member in decision.members)

    def decision(self) -> Decision | None:
        """Read the decision, if there is one. Raises ValueError, which names the key, for any other
        word.
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
        """What has become of the attempt; "" until a rank has decided it."""
        return self.board.read("outcome")

    def connect(self, decision: Decision, rank: int, timeout_s: float, backend: str) -> None:
        """Make the default process group anew. Raises RuntimeError once the attempt fails, or a
        member is lost.
        """
        size = len(decision.members)
        look = partial(self._check_attempt, decision, time.monotonic() + timeout_s)
        leave_group()
        # Nobody connects before all members are about to: each connects at once then.
        board = self.board
        board.write(f"ready/{rank}", "ready")
        while not all(board.read(f"ready/{other}") for other in range(size)):
            look()
            time.sleep(POLL_S)

        # torch also counts groups that failed, and their number must be the same on all ranks.
        _world.group_count = 0
        # While torch waits in the store, `look` sees deaths.
        store = self.root.store
        assert isinstance(store, OutlivingStore)
        _kept[:] = [store]
        store.look = look

        # While gloo connects it notices no death, and waits several of its timeouts for a member
        # that has ended. So the first attempts are short, and the next ones give slow members time.
        attempt = int(self.name.rpartition("/")[2])
        connect_s = min(timeout_s, decision.last_call_s, _CONNECT_S * 2**attempt)
        group = dist.PrefixStore(f"{self.board.name}/group", store)
        make = partial(dist.init_process_group, backend, store=group, rank=rank, world_size=size)
        # torch keeps half a group that a signal handler has interrupted, and makes no other then.
        to_its_end(as_on_this_thread(partial(connected, make, connect_s, timeout_s)))
        store.look = None

    def _check_attempt(self, decision: Decision, deadline: float) -> None:
        """Raise RuntimeError if the attempt has failed, a member is lost or time is over."""
        if self.outcome() == FAILED:
            raise RuntimeError(self.why_failed(len(decision.members)))
        if self.anybody_lost(decision) or time.monotonic() > deadline:
            raise RuntimeError(_GONE)

    def confirm(
        self, decision: Decision, rank: int, timeout_s: float, missing: Callable[[], object]
    ) -> bool:
        """Confirm that this rank is in the group, and wait for the others. Returns whether all have
        got in. `missing` returns something true once some are missing.

        The last gather of its opening may end well on some ranks only, so the first rank that knows
        the outcome writes it, and all follow.
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
        """End the attempt. A rank that could not do its part says why before."""
        if error is not None:
            why = f"{type(error).__name__}: {error}"
            self.board.write(f"why/{rank}", why[:_MOST_CHARACTERS])
        self.board.write_once("outcome", FAILED)

    def why_failed(self, size: int) -> str:
        """What the first rank has said that could not do its part."""
        for rank in range(size):
            why = self.board.read(f"why/{rank}")
            if why:
                return f"rank {rank}: {why[:_MOST_CHARACTERS]}"
        return _GONE


def key_of_rank(group: str, rank: int) -> str:
    """Where a rank shows that it is there, in the meetings for the group behind this one: `group`
    is <origin>/<generation>.
    """
    return f"{group}/there/{rank}"


def arrive(root: Board) -> int:
    """The number of this new rank, from 1. Its key holds its sign of life."""
    word = sign_of_life()
    # The first number that nobody has, and that nobody takes at the same time.
    number = 1
    while True:
        key = f"arrivals/{number}"
        if not root.read(key) and root.write_once(key, word) == word:
            return number
        number += 1


def connected(make: Callable[..., _Group], connect_s: float, timeout_s: float) -> _Group:
    """The group that `make` returns for a timeout, None for the default one: it is `connect_s`
    while ranks connect, and `timeout_s` then.
    """
    connect = timedelta(seconds=connect_s)
    timeout = timedelta(seconds=timeout_s)
    # With details a group keeps the timeout of its connecting.
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        connect = timeout
    group = make(timeout=connect)
    _set_pg_timeout(timeout, group)
    return group


def leave_group() -> None:
    """Close the connections of the default process group, so that no other rank waits in it for
    this one.
    """
    if dist.is_initialized():
        to_its_end(as_on_this_thread(dist.destroy_process_group))


# The store of the default group, which does not keep one of Python.
_kept = list[dist.Store]()


@dataclass(frozen=True)
class RollCall:
    """Ranks of a group that report to one another after a failure. They are numbered in
    the group.
    """

    ranks: list[int]
    rank: int
    size: int
    """of the whole group"""
    name: str
    """the same on all ranks of the group, and of no other group"""
    attempt: str = ""
    """the name of this attempt, once this rank knows it"""

    def arrive(self) -> None:
        """Leave the name of this process: others then need not wait for the answer of a rank that
        has ended.
        """
        self._send(f"process/{self.rank}", name_of_process())

    def succeed(self) -> None:
        """Report that the attempt has succeeded here: where it fails elsewhere, this rank is not
        missing.
        """
        self._send(f"{self.attempt}/{self.rank}", "in")

    def missing(self, found: Sequence[int], answer_s: float = ANSWER_S) -> list[int]:
        """Find who is missing after a failure: at least one rank, and all others of this roll call
        if the store is silent.

        A rank that notices a failure reports it, and what it has `found`; one that does not within
        `answer_s` seconds is missing, and one whose process has ended is so at once.
        """
        # Ask the others, on a thread that may outlast this call.
        others = [rank for rank in self.ranks if rank != self.rank]
        reports: dict[int, set[int]] = {}
        # ValueError: the default group is destroyed.
        with suppress(RuntimeError, ValueError):
            ask = partial(self._ask, self._board(), found, others, reports, answer_s)
            interruptible(ask, answer_s)
        reports = dict(reports)

        # Knowledge of this rank counts before words of others, and these before silence.
        named = set().union(*reports.values())
        silent = set(others) - set(reports)
        missing = sorted(set(found) or named or silent or others)
        # For ranks that come too late.
        self._send(self.rank, _report(missing))
        return missing

    @classmethod
    def of(cls, peers: Peers, what: str, attempt: str = "") -> RollCall:
        """The roll call of all ranks of a group, about `what`."""
        assert peers.group is not None
        name = f"{what}/{peers.group.group_name}"
        return cls(list(range(peers.size)), peers.rank, peers.size, name, attempt)

    def _send(self, key: object, word: str) -> None:
        """Write a word for the others, if the store can be reached at once."""
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
        """Report the ranks that this rank has `found`, and fill `reports` with those of the others.
        It may never end.

        Ranks that know of an end wait for no further report: others may learn of it by their
        leaving only.
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
                # The attempt has succeeded there, or the process has ended.
                elif self.attempt and board.read(f"{self.attempt}/{rank}"):
                    reports[rank] = set()
                elif has_ended(board.read(f"process/{rank}")):
                    ended.add(rank)
                    reports[rank] = {rank}
            silent.difference_update(reports)
            time.sleep(POLL_S)


def _report(ranks: Sequence[int]) -> str:
    """Ranks as a word of the board, which "" would not be."""
    return ",".join(map(str, ranks)) or "none"


def _ranks_in(report: str, size: int) -> set[int]:
    """The ranks of a group of `size` in a report. Other words in it do not count."""
    ranks = set()
    for word in report.split(","):
        # A long number would take a long time.
        is_number = word.isascii() and word.isdigit() and len(word) < 10
        if is_number and int(word) < size:
            ranks.add(int(word))
    return ranks
