"""A storm is a row of acts. In an act a group of processes goes through steps that a seed draws;
the next one begins with new processes.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from host import Host
from storm.calls import (
    RAISED,
    WHOLE,
    Moment,
    Outcome,
    Place,
    call,
    form,
    of_regroup,
    of_resize,
    of_sleep,
    of_step,
    of_wake,
)

from epmoe.group.board import Board
from epmoe.group.store import OutlivingStore

SIGNALLED = 0.4
"""So often a signal comes into a call that may have one."""
COMES_S = 2.0
"""Behind the others, a new rank that is in their group has its weights."""
LATEST = 1.2
"""Of the usual time of a call: the last moment of a signal, which comes too late then."""


class Totals:
    """What has happened in a storm, and what was wrong."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.longest_s = 0.0
        self.longest = ""
        self.faults = list[str]()

    def waited(self, what: str, seconds: float) -> None:
        if seconds > self.longest_s:
            self.longest_s = seconds
            self.longest = what

    def __str__(self) -> str:
        of = self.counts
        return (
            f"{of['steps']} steps, {of['kills']} kills, {of['stops']} stops, "
            f"{of['signals']} signals ({of['hits']} in a call), {of['recoveries']} recoveries, "
            f"{of['sends']} sends ({of['incomplete']} incomplete), {of['flips']} versions taken, "
            f"{of['rounds']} rounds, {of['wrong']} wrong y, "
            f"longest wait {self.longest_s:.1f} s ({self.longest}), {len(self.faults)} faults"
        )


class WrongError(AssertionError):
    """A y that the oracle does not have."""


class Signals(Protocol):
    """Which calls a signal comes into."""

    def victim(self, what: str, names: list[int]) -> int | None:
        """The process into whose part of a call `what` it comes; None: it comes into none."""

    def moment(self, usual_s: float) -> Moment | Place:
        """When it comes, in a call that usually takes so long."""


class Drawn(NamedTuple):
    """Signals at any moment of any call."""

    draw: random.Random

    def victim(self, what: str, names: list[int]) -> int | None:
        return self.draw.choice(names) if self.draw.random() < SIGNALLED else None

    def moment(self, usual_s: float) -> Moment:
        """Between the begin of the call and a little behind its usual end."""
        after_s = usual_s * self.draw.uniform(0.0, LATEST) + 1e-4
        return Moment(after_s, self.draw.random() < 0.3)


class GroupCalls(NamedTuple):
    """What a rank does where its group changes. Each takes the rank's state first."""

    recover: Callable
    """with the folder of the board"""
    resize: Callable
    """with this folder and a size"""
    join: Callable
    """with this folder"""
    wake: Callable


class Act:
    """A group through what happens to it. `names` are its processes in the order of ranks.

    Args:
        host: of the processes.
        seed: of all that is drawn.
        totals: where it counts.
        ranks: the most that the group has.
    """

    kind = ""
    calls: GroupCalls
    steps: dict[Callable[[Self], None], float]
    """by step, how often it comes"""
    limit_s = 15.0
    """No call takes longer, where no rank hangs: the pages name no deadline but for that."""
    wrong = "WrongError"
    """the name of a rank's error for a y that is wrong"""

    def __init__(self, host: Host, seed: str, totals: Totals, ranks: int) -> None:
        self.host = host
        self.board = host.folder / "board"
        self.draw = random.Random(seed)
        self.signals: Signals = Drawn(self.draw)
        self.totals = totals
        self.ranks = ranks
        self.names = list[int]()
        self.dead = set[int]()
        self.happened = list[str]()
        self._usual_s = dict[str, float]()
        self._newest = 0
        self._arrivals = 0

    def run(self, steps: int) -> None:
        """Raises AssertionError, which says what has happened so far."""
        frequent = [kind for kind, often in self.steps.items() if often >= 1]
        self.coming = self.draw.sample(frequent, len(frequent))
        try:
            self.begin()
            for _ in range(steps):
                self._step()
        except AssertionError as error:
            raise AssertionError(f"{error}; behind {', '.join(self.happened[-12:])}") from error

    def _step(self) -> None:
        """Each frequent kind comes once before any comes again."""
        if not self.coming:
            kinds = list(self.steps)
            self.coming = self.draw.choices(kinds, [self.steps[kind] for kind in kinds])
        step = self.coming.pop()
        self.happened.append(f"{step.__name__} at {len(self.names)}")
        self.totals.counts["steps"] += 1
        step(self)
        self.play()

    def begin(self) -> None:
        raise NotImplementedError

    def play(self) -> None:
        raise NotImplementedError

    def regrouped(self) -> None:
        """The ranks are in a new group, or in new windows."""
        raise NotImplementedError

    def joined(self) -> None:
        """New ranks are there, or a rank has gone."""

    def new_names(self, count: int) -> list[int]:
        first = self._newest
        self._newest += count
        return list(range(first, self._newest))

    def usual_s(self, what: str) -> float:
        """How long a call has taken so far."""
        return self._usual_s.get(what, 0.05)

    def all_call(
        self,
        function: Callable,
        *rest: object,
        again: Callable = of_step,
        signalled: bool = True,
        names: list[int] | None = None,
        meanwhile: Callable[[float], None] | None = None,
    ) -> dict[int, Outcome]:
        """All ranks call a function. A signal may come on one of them, if `signalled`.

        `meanwhile` is called with the usual time of the call, while it runs.
        """
        names = self.names if names is None else names
        # A signal may hit one of them, at a moment within the usual time of the call.
        what = function.__name__
        one = self.signals.victim(what, names) if signalled else None
        for name in names:
            moment = self.signals.moment(self.usual_s(what)) if name == one else None
            self.host.start([name], call, moment, again, function, *rest)
        self.totals.counts["signals"] += one is not None
        if meanwhile is not None:
            meanwhile(self.usual_s(what))
        # Those that have died meanwhile do not answer.
        living = [name for name in names if name not in self.dead]
        return self.outcomes(what, living)

    def outcomes(self, what: str, names: list[int]) -> dict[int, Outcome]:
        outcomes = dict(zip(names, self.host.results(names), strict=True))
        for name, outcome in outcomes.items():
            assert isinstance(outcome, Outcome), f"{what} on rank {name}: {outcome}"
            self._look_at(what, name, outcome)
        return outcomes

    def _look_at(self, what: str, name: int, outcome: Outcome) -> None:
        self.totals.counts["hits"] += outcome.hit
        self.totals.waited(what, outcome.seconds)
        if outcome.ended.startswith(self.wrong):
            self.totals.counts["wrong"] += 1
        # Wrong outputs and errors that nobody raises on purpose.
        bad = outcome.ended.startswith((self.wrong, "AssertionError", "KeyError", "AttributeError"))
        assert not bad, f"{what} of process {name}: {outcome.ended}"
        # A rank that lives must not be given up, nor wait for long.
        given_up = "without this rank" in outcome.ended
        assert not given_up, f"{what}: process {name} lives and was given up: {outcome.ended}"
        late = outcome.seconds > self.limit_s
        assert not late, f"{what} of process {name} took {outcome.seconds:.1f} s: {outcome.ended}"
        # A call that nothing has disturbed says how long such calls take.
        if not outcome.hit and outcome.ended == WHOLE:
            usual_s = self._usual_s.get(what, outcome.seconds)
            self._usual_s[what] = 0.8 * usual_s + 0.2 * outcome.seconds

    def fall_asleep(self, sleep: Callable, *rest: object) -> None:
        """All ranks sleep, also where a signal comes."""
        self.by_each(sleep, *rest, again=of_sleep)

    def wake(self) -> None:
        outcomes = self.all_call(self.calls.wake, again=of_wake)
        if any(outcome.closed for outcome in outcomes.values()):
            self.recover(signalled=False)
        else:
            slept = [name for name, one in outcomes.items() if one.ended != WHOLE and not one.hit]
            assert not slept, f"wake: {ended(outcomes)}"
            self.regrouped()

    def recover(self, signalled: bool = True) -> None:
        """All that are there go on."""
        self.totals.counts["recoveries"] += 1
        outcomes = self.all_call(
            self.calls.recover, self.board, again=of_regroup, signalled=signalled
        )
        if any(outcome.closed for outcome in outcomes.values()):
            # A signal while it loaded its weights: the others have gone on.
            assert any(outcome.hit for outcome in outcomes.values()), ended(outcomes)
            outcomes = self.all_call(
                self.calls.recover, self.board, again=of_regroup, signalled=False
            )
        sizes = {outcome.size for outcome in outcomes.values()}
        whole = all_whole(outcomes) and sizes == {len(self.names)}
        assert whole, f"recover: {sizes}, {ended(outcomes)}"
        self.regrouped()

    def resize(self) -> None:
        others = [size for size in range(1, self.ranks + 1) if size != len(self.names)]
        if not others:
            return
        size = self.draw.choice(others)
        if size > len(self.names):
            self.grow(size)
        else:
            self.shrink(size)

    def shrink(self, size: int) -> None:
        stay = self.names[:size]
        outcomes = self.all_call(
            self.calls.resize, self.board, size, again=partial(of_resize, size)
        )
        stays = {name: one for name, one in outcomes.items() if name in stay}
        leaves = {name: one for name, one in outcomes.items() if name not in stay}
        assert all(one.closed and (one.hit or one.ended == WHOLE) for one in leaves.values()), (
            f"resize to {size}: {ended(leaves)}"
        )
        for name in leaves:
            self.end(name)
        if any(one.closed for one in stays.values()):
            # A signal while it loaded its weights: the others have gone on.
            assert any(one.hit for one in stays.values()), ended(stays)
            self.recover(signalled=False)
            return
        sizes = {one.size for one in stays.values()}
        assert sizes == {size}, f"resize to {size}: {sizes}, {ended(stays)}"
        self.regrouped()

    def grow(self, size: int) -> None:
        """New processes join. One that a signal has thrown out of the group is ended."""
        # New processes, which come to the board. A signal may hit one of all ranks.
        new = self.new_names(size - len(self.names))
        self.host.spawn(*new)
        arrivals = self.arrivals()
        one = self.signals.victim("grow", [*self.names, *new])
        for name in new:
            moment = self.signals.moment(self.usual_s("join")) if name == one else None
            self.host.start([name], call, moment, of_regroup, self.calls.join, self.board)
        # The others take them in.
        self.wait_for_arrivals(arrivals + len(new), new)
        for name in self.names:
            moment = self.signals.moment(self.usual_s("resize")) if name == one else None
            self.host.start([name], call, moment, of_regroup, self.calls.resize, self.board, size)
        signalled = one is not None
        self.totals.counts["signals"] += signalled
        outcomes = self.outcomes("resize", self.names)
        # All new processes are in the group, but where a signal has come between.
        sizes = {outcome.size for outcome in outcomes.values() if outcome.ended == WHOLE}
        came = [name for name in new if self.host.pipes[name].poll(COMES_S)]
        absent = set(new) - set(came)
        if absent and not signalled:
            raise self.host.hang(f"new processes {absent} are not in the group of the others")
        for name in absent:
            self.end(name)
        joined = self.outcomes("join", came)
        # End those that are not in the group. The rest plays on, or recovers first.
        whole = all_whole(outcomes) and all_whole(joined) and sizes == {len(self.names) + len(came)}
        for name in came:
            if joined[name].ended != WHOLE:
                self.end(name)
        assert signalled or whole and sizes == {size}, (
            f"resize to {size}: {ended(outcomes)}, {ended(joined)}"
        )
        self.names += [name for name in came if name not in self.dead]
        if whole:
            self.regrouped()
        else:
            self.recover(signalled=False)
        self.joined()

    def in_order(self) -> None:
        """Put the names in the order of ranks."""
        self.names = self.host.in_order(self.names)

    def together(self, function: Callable, *rest: object, signalled: bool = True) -> list:
        """A step that is whole on all ranks or fails on all: then all call again, without a signal.
        Returns the values.
        """
        outcomes = self.all_call(function, *rest, signalled=signalled)
        if any(outcome.ended != WHOLE for outcome in outcomes.values()):
            hit = any(outcome.hit for outcome in outcomes.values())
            assert hit, f"{function.__name__} has failed: {ended(outcomes)}"
            outcomes = self.all_call(function, *rest, signalled=False)
            assert all_whole(outcomes), f"{function.__name__} again: {ended(outcomes)}"
        return [outcome.value for outcome in outcomes.values()]

    def by_each(self, function: Callable, *rest: object, again: Callable) -> None:
        """A step that each rank does by itself: a rank into which a signal comes calls again until
        it has done it.
        """
        outcomes = self.all_call(function, *rest, again=again)
        bad = [one.ended for one in outcomes.values() if one.ended != WHOLE and not one.hit]
        assert not bad, f"{function.__name__}: {ended(outcomes)}"

    def form(self, names: list[int]) -> None:
        """A process group over a folder, which outlives each of its ranks."""
        self.host.succeed(names, form, self.host.folder / f"group-{names[0]}", names)

    def arrivals(self) -> int:
        """How often `join_group` has been called."""
        root = Board(OutlivingStore(self.board), "epmoe")
        while root.read(f"arrivals/{self._arrivals + 1}"):
            self._arrivals += 1
        return self._arrivals

    def wait_for_arrivals(self, count: int, new: list[int]) -> None:
        deadline = time.monotonic() + self.limit_s
        while self.arrivals() < count:
            gone = [name for name in new if self.host.pipes[name].poll(0)]
            assert not gone, f"new ranks do not wait: {self.host.results(gone)}"
            if time.monotonic() > deadline:
                raise self.host.hang(f"one of the new processes {new} does not arrive")
            time.sleep(0.005)

    def kill(self, name: int, number: int = signal.SIGKILL) -> None:
        self.totals.counts["kills"] += 1
        self.end(name, number)

    def end(self, name: int, number: int = signal.SIGKILL) -> None:
        """A process that is no rank any more."""
        self.host.signal(name, number)
        self.dead.add(name)
        if name in self.names:
            self.names.remove(name)

    def in_a_while(self, what: Callable[[], None]) -> Callable[[float], None]:
        """For `meanwhile`: at a drawn moment of the call."""
        share = self.draw.uniform(0.0, 1.0)

        def wait(usual_s: float) -> None:
            time.sleep(share * usual_s)
            what()

        return wait


def all_whole(outcomes: dict[int, Outcome]) -> bool:
    return all(outcome.ended == WHOLE for outcome in outcomes.values())


def ended(outcomes: dict[int, Outcome]) -> dict[int, Any]:
    return {name: outcome.ended for name, outcome in outcomes.items()}


__all__ = ["RAISED", "WHOLE", "Act", "Outcome", "Totals", "WrongError", "all_whole", "ended"]
