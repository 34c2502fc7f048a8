"""After a death, or to take new ranks in: the ranks that live meet in a store, agree on a group, and go on in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import LAST_CALL_S
from epmoe.config.placement import Move, Placement
from epmoe.group.deaths import has_ended, name_of_process
from epmoe.group.errors import EPStateError
from epmoe.group.member import Member
from epmoe.group.peers import Peers
from epmoe.group.roll_call import RollCall

Store = dist.Store | str | os.PathLike[str]
_POLL_S = 0.02
_ANSWER_S = 0.5  # a new rank that waits reads the store every _POLL_S
_DOOR_S = 1.0  # between the decision and the group
_CONNECT_S = 0.5  # in the first attempt, twice as long in each further one
_ARRIVALS = "epmoe/arrivals"  # how many times a new rank has come
_HERE, _LEAVES = "here", "leaves"  # what a new rank says in a meeting, and a former one instead of its process
_DOOR, _OUTCOME = "door", "outcome"  # whether all ranks have come, and whether they have got into the group
_FORMED, _FAILED = "formed", "failed"
_Member = TypeVar("_Member", bound=Member)


@dataclass(frozen=True)
class _Decision:
    """What one rank has written for all.

    members: who is in the group, in rank order: former ranks, and behind them new ones as `-1 - arrival`.
    processes: the names of theirs.
    connect_s: how long torch may take to connect them.
    config: JSON, of the group to be.
    arrivals: those up to here have had their turn.
    keeps: former ranks keep their slots, with `placement.live`.
    left: former ranks that have left in this attempt or before it.
    """

    members: list[int]
    processes: list[str]
    connect_s: float
    config: str
    arrivals: int
    keeps: bool
    left: list[int]

    def config_of(self) -> EPConfig:
        """The config of the group to be."""
        return EPConfig(**json.loads(self.config))

    def ended(self) -> list[int]:
        """Members whose processes are known to have ended."""
        return [member for member, name in zip(self.members, self.processes, strict=True) if has_ended(name)]


@dataclass(frozen=True)
class _Meeting:
    """One attempt of ranks to form a group. They meet in the store under a name that all of them know."""

    store: dist.Store
    name: str

    def decision(self) -> _Decision:
        """What was decided here."""
        return _Decision(**json.loads(self.store.get(f"{self.name}/decision")))

    def decide(
        self,
        ep: Member,
        min_ranks: int,
        max_ranks: int,
        placement: Callable[[Placement, list[int | None]], Placement] | None,
        wait_s: float,
        deadline: float,
        grow_s: float,
        leaves: bool,
        before: _Decision | None,
    ) -> _Decision:
        """Meet the other ranks. The first to see that all are there, or late, decides; the rest reads.

        `before` is what was decided in the last attempt, whose group did not form.
        """
        store, newest, start = self.store, f"epmoe/{ep.origin}/newest", time.monotonic()
        asked: dict[int, float] = {}  # by arrival: when this rank has asked whether it is still there
        left, connect_s = ([], _CONNECT_S) if before is None else (before.left, 2 * before.connect_s)
        store.set(f"{self.name}/{ep.rank}", _LEAVES if leaves else name_of_process())
        while not store.check([f"{self.name}/decision"]):
            if store.check([newest]) and int(store.get(newest)) > ep.generation:
                raise EPStateError("the others have gone on without this rank: a new one may join")
            words = {rank: word for rank in range(ep.size) if (word := _word(store, f"{self.name}/{rank}"))}
            gone = {*left, *(rank for rank, word in words.items() if word == _LEAVES)}
            ended = {*([] if before is None else before.ended()), *(r for r, word in words.items() if has_ended(word))}
            came = [rank for rank in words if rank not in gone | ended]
            used = int(store.get(f"{_ARRIVALS}/used")) if store.check([f"{_ARRIVALS}/used"]) else 0
            arrivals = store.add(_ARRIVALS, 0)
            for arrival in range(used + 1, arrivals + 1):
                if arrival not in asked:
                    store.set(f"{_ARRIVALS}/{arrival}/asked", self.name)
                    asked[arrival] = time.monotonic()
            new = {a: name for a in asked if not has_ended(name := _word(store, f"{_ARRIVALS}/{a}/process"))}
            there = [arrival for arrival in sorted(new) if store.check([f"{self.name}/new/{arrival}"])]
            there = there[: max(0, max_ranks - len(came))]
            members = [*came, *(-1 - arrival for arrival in there)]
            processes = [words[rank] for rank in came] + [new[arrival] for arrival in there]
            now = time.monotonic()
            may_answer = any(now < asked[arrival] + _ANSWER_S for arrival in new if arrival not in there)
            wanted = max_ranks if before is None else len(before.members) - len(before.ended())
            may_come = may_answer or len(members) < wanted and now < start + grow_s
            all_came = set(ep.survivors()) <= {*came, *gone, *ended} and not may_come
            if (all_came or now > start + wait_s) and len(members) >= min_ranks:
                keeps = ep.config.placement.live and placement is None
                if keeps:
                    config = ep.config.of_size(len(members))
                else:
                    config = ep.config.with_placement(_place(ep.placement, members, placement))
                text = config.model_dump_json()
                mine = asdict(_Decision(members, processes, connect_s, text, arrivals, keeps, sorted(gone)))
                store.compare_set(f"{self.name}/decision", "", json.dumps(mine))  # whoever was first has decided
            elif now > deadline:
                raise TimeoutError(f"{len(members)} ranks have come, and `min_ranks` is {min_ranks}")
            else:
                time.sleep(_POLL_S)
        decision = self.decision()
        store.set(f"{_ARRIVALS}/used", str(decision.arrivals))
        for arrival in range(1, decision.arrivals + 1):
            if not store.check([f"{_ARRIVALS}/{arrival}"]):
                store.set(f"{_ARRIVALS}/{arrival}", self.name)
        return decision

    def form(
        self, decision: _Decision, rank: int, timeout_s: float, backend: str, missing: Callable[[], object]
    ) -> None:
        """Make the default process group anew. Nobody begins where one of the ranks is gone: torch would wait for it.

        Raises RuntimeError where it cannot be made.
        """
        size = len(decision.members)
        if not self.confirm(rank, size, min(timeout_s, _DOOR_S), missing, _DOOR):
            raise RuntimeError("a rank has not come")
        _leave_group()
        _world.group_count = 0  # torch also counts groups that failed, and their number must be the same on all ranks
        store = dist.PrefixStore(f"{self.name}/group", self.store)
        timeout = connect = timedelta(seconds=timeout_s)
        if dist.get_debug_level() != dist.DebugLevel.DETAIL:  # there a group keeps the timeout of its connecting
            connect = min(timeout, timedelta(seconds=decision.connect_s))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=connect)
        _set_pg_timeout(timeout)
        RollCall.of(Peers.of(dist.group.WORLD), "opening").arrive()  # some time may pass before it opens

    def confirm(
        self, rank: int, size: int, timeout_s: float, missing: Callable[[], object], outcome: str = _OUTCOME
    ) -> bool:
        """Whether all ranks have got into the group; what `missing` returns is true once some of them are missing.

        The last gather of its opening may end well on some ranks only, so the first rank that knows the outcome writes
        it into the store, and all follow. With another name of an `outcome`, the same for a step before that.
        """
        store, last_call = self.store, time.monotonic() + timeout_s
        store.set(f"{self.name}/{outcome}/{rank}", "in")
        while not store.check([f"{self.name}/{outcome}"]):
            if store.check([f"{self.name}/{outcome}/{other}" for other in range(size)]):
                store.compare_set(f"{self.name}/{outcome}", "", _FORMED)
            elif missing() or time.monotonic() > last_call:
                self.fail(outcome)
            else:
                time.sleep(_POLL_S)
        return store.get(f"{self.name}/{outcome}") == _FORMED.encode()

    def fail(self, outcome: str = _OUTCOME) -> None:
        """The attempt has failed, unless its outcome is known already."""
        self.store.compare_set(f"{self.name}/{outcome}", "", _FAILED)

    def outcome(self) -> str:
        """What has become of the attempt; "" until it is known."""
        return _word(self.store, f"{self.name}/{_OUTCOME}")

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Within it this rank gets into the group. Whatever it raises, a signal handler's error too, fails it for all.

        The other ranks must not wait for this one: it leaves the process group, which ends with the exception at last.
        """
        try:
            yield
        except BaseException:
            self.fail()
            _leave_group()
            raise


def recover(
    ep: Member,
    store: Store,
    load_weights: Callable[[tuple[Move, ...]], object],
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    placement: Callable[[Placement, list[int | None]], Placement] | None = None,
    last_call_s: float | None = None,
    timeout_s: float = 300.0,
    backend: str = "gloo",
) -> None:
    """Go on with the ranks that live: agree on a group, `resume` in it, and load what moved.

    Every rank calls it after an EPTimeoutError, once it has left the `except` block; or all ranks between two rounds,
    to take in new ones, which call `join_group`. A rank that does not come within `last_call_s`, or that dies
    meanwhile, is left out. Ranks cannot split into two groups: the first that decides writes its decision into the
    store, in one step, and all others follow it, or raise because they are left out. The default process group is
    destroyed and made anew; it holds the ranks of `ep`.

    Args:
        ep: the ExpertParallel that is to go on.
        store: outlives each of the ranks: a folder that all see, or a `TCPStore` that the launcher hosts. It serves
            one ExpertParallel.
        load_weights: gets the moves of this rank, as `ExpertParallel.resume` returns them.
        min_ranks: with fewer the ranks wait for new ones.
        max_ranks: new ranks are taken in up to this number; by default to the size so far, or `min_ranks`.
        placement: from the placement so far, and the former rank (None: new) of each rank of the group to be, to that
            of the group to be. By default each expert stays, and lost ones go to the ranks with the fewest; with new
            ranks all experts are spread anew, except with `placement.live`, where slots of new ranks are empty.
        last_call_s: how long a rank waits for others, in seconds; by default 5 more than `exchange.timeout_s`.
        timeout_s: of the whole call, in seconds; it is looked at before each attempt.
        backend: of the process group.

    Raises:
        EPStateError: the others go on without this rank.
        ValueError: on all ranks, if the placement does not fit.
        TimeoutError: no group of `min_ranks` has formed in time.
        MemoryError: the windows do not fit.
    """
    wait_s = ep.config.exchange.timeout_s + LAST_CALL_S if last_call_s is None else last_call_s
    most = max_ranks or max(ep.size, min_ranks)
    ep.alone(lambda: regroup(ep, store, load_weights, min_ranks, most, placement, wait_s, timeout_s, backend))


def regroup(
    ep: Member,
    store: Store,
    load_weights: Callable[[tuple[Move, ...]], object],
    min_ranks: int,
    max_ranks: int,
    placement: Callable[[Placement, list[int | None]], Placement] | None,
    wait_s: float,
    timeout_s: float,
    backend: str,
    grow_s: float = 0.0,
    leaves: bool = False,
) -> bool:
    """What `recover` does; see there. Returns whether this rank is in the group.

    `grow_s`: wait so long for new ranks up to `max_ranks`. `leaves`: the others are to go on without this rank, which
    closes `ep`.
    """
    form_s, deadline = ep.config.exchange.warmup_timeout_s, time.monotonic() + timeout_s
    shared, attempt, before = _open(store), 0, None
    while time.monotonic() < deadline:
        meeting = _Meeting(shared, f"epmoe/{ep.origin}/{ep.generation}/{attempt}")
        if (outcome := meeting.outcome()) == _FORMED:
            raise EPStateError("the others have gone on without this rank: a new one may join")
        if outcome == _FAILED:  # here, or in an earlier call
            before, attempt = meeting.decision(), attempt + 1
            continue
        decision = meeting.decide(ep, min_ranks, max_ranks, placement, wait_s, deadline, grow_s, leaves, before)
        if leaves:
            ep.close()
            return False
        if ep.rank not in decision.members:
            raise EPStateError("the others go on without this rank, which they have given up: a new one may join")
        config, rank, size = decision.config_of(), decision.members.index(ep.rank), len(decision.members)
        former = [member for member in decision.members if member >= 0]
        try:
            with meeting.attempt():
                meeting.form(decision, rank, form_s, backend, partial(_missing, ep, former, decision))
                moves = ep.go_on(
                    None,
                    None if decision.keeps else config.place_experts(),
                    True,
                    partial(meeting.confirm, rank, size, form_s),
                )
        except EPStateError:
            raise
        except RuntimeError:  # EPResumeError, or torch's: another rank has died meanwhile
            continue
        shared.set(f"epmoe/{ep.origin}/newest", str(ep.generation))
        try:
            load_weights(moves)
        except BaseException:
            ep.lose_weights()
            raise
        return True
    raise TimeoutError(f"no group has formed within {timeout_s:g} s")


def take_in(store: Store, make: Callable[[EPConfig], _Member], timeout_s: float, backend: str) -> _Member:
    """Wait until a group takes this new rank in; see `epmoe.join_group`. `make` is called in its process group."""
    deadline, shared = time.monotonic() + timeout_s, _open(store)
    while time.monotonic() < deadline:
        arrival = shared.add(_ARRIVALS, 1)
        answer, told = f"{_ARRIVALS}/{arrival}", ""
        shared.set(f"{answer}/process", name_of_process())
        while not shared.check([answer]) and time.monotonic() < deadline:
            if shared.check([f"{answer}/asked"]) and (asked := shared.get(f"{answer}/asked").decode()) != told:
                shared.set(f"{asked}/new/{arrival}", _HERE)
                told = asked
            time.sleep(_POLL_S)
        if not shared.check([answer]):
            break
        meeting = _Meeting(shared, shared.get(answer).decode())
        decision = meeting.decision()
        if -1 - arrival not in decision.members:
            continue  # the group had no place left: this rank queues again
        config, rank, size = decision.config_of(), decision.members.index(-1 - arrival), len(decision.members)
        wait_s = config.exchange.warmup_timeout_s
        try:
            with meeting.attempt():
                meeting.form(decision, rank, wait_s, backend, decision.ended)
                ep = make(config)
                try:
                    if meeting.confirm(rank, size, wait_s, partial(_missing, ep, range(size), decision)):
                        return ep
                    raise RuntimeError("the group was not confirmed")
                except BaseException:
                    ep.close()
                    raise
        except RuntimeError:  # another rank has died meanwhile
            continue
    raise TimeoutError(f"nobody has taken this rank in within {timeout_s:g} s")


def _open(store: Store) -> dist.Store:
    if isinstance(store, dist.Store):
        return store
    folder = Path(store)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(0o700, exist_ok=True)  # who can write here decides which ranks go on
    return dist.FileStore(str(folder / "epmoe-store"))


def _place(
    old: Placement, members: list[int], chosen: Callable[[Placement, list[int | None]], Placement] | None
) -> Placement:
    former = [member if member >= 0 else None for member in members]
    if chosen is not None:
        return chosen(old, former)
    if None not in former:
        return old.without(set(range(old.ep_size)).difference(members), spread_lost=True)
    E, R = old.num_experts, len(members)
    owners = [
        (p + p // E) % R for p in range(old.num_physical_experts)
    ]  # a copy on the rank of its original is of no use
    return Placement.build(E, R, "explicit", owners, old.num_physical_experts - E)


def _leave_group() -> None:
    """Close the connections of the default process group, so that no other rank waits in it for this one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _word(store: dist.Store, key: str) -> str:
    """What stands in a store; "" if nothing does."""
    return store.get(key).decode() if store.check([key]) else ""


def _missing(ep: Member, ranks: Collection[int], decision: _Decision) -> bool:
    """Whether one of the ranks of the present group, or of the members of the next one, is."""
    return bool(set(ranks).difference(ep.survivors()) or decision.ended())
