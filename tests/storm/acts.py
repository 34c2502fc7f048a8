"""A storm is a row of acts. In an act a group of processes goes through steps that a seed draws;
the next one begins with new processes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from host import Host
from storm.calls import RAISED, WHOLE, Moment, Outcome, call, form, of_step

from epmoe.group.board import Board
from epmoe.group.store import OutlivingStore

SIGNALLED = 0.4
"""So often a signal comes into a call that may have one."""
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


class Act:
    """A group through what happens to it. `names` are its processes in the order of ranks.

    Args:
        host: of the processes.
        seed: of all that is drawn.
        totals: where it counts.
        ranks: the most that the group has.
    """

    kind = ""
    steps: dict[Callable[[Self], None], float]
    """by step, how often it comes"""
    limit_s = 15.0
    """No call takes longer, where no rank hangs: the pages name no deadline but for that."""
    wrong = "WrongError"
    """the name of a rank's error for a y that is wrong"""

    def __init__(self, host: Host, seed: str, totals: Totals, ranks: int) -> None:
        self.host = host
        self.draw = random.Random(seed)
        self.totals = totals
        self.ranks = ranks
        self.names = list[int]()
        self.dead = set[int]()
        self.happened = list[str]()
        self._usual_s = dict[str, float]()
        self._newest = 0
        self.arrivals = 0

    def run(self, steps: int) -> None:
        """Raises AssertionError, which says what has happened so far."""
        try:
            self.begin()
            for _ in range(steps):
                self._step()
        except AssertionError as error:
            raise AssertionError(f"{error}; behind {', '.join(self.happened[-12:])}") from error

    def _step(self) -> None:
        kinds = list(self.steps)
        step = self.draw.choices(kinds, [self.steps[kind] for kind in kinds])[0]
        self.happened.append(f"{step.__name__} at {len(self.names)}")
        self.totals.counts["steps"] += 1
        step(self)
        self.play()

    def begin(self) -> None:
        raise NotImplementedError

    def play(self) -> None:
        raise NotImplementedError

    def new_names(self, count: int) -> list[int]:
        first = self._newest
        self._newest += count
        return list(range(first, self._newest))

    def moment(self, what: str) -> Moment:
        """Drawn between the begin of a call and a little behind its usual end."""
        usual_s = self._usual_s.get(what, 0.05)
        return Moment(usual_s * self.draw.uniform(0.0, LATEST) + 1e-4, self.draw.random() < 0.3)

    def all_call(
        self,
        function: Callable,
        *rest: object,
        again: Callable = of_step,
        signalled: bool | None = None,
        names: list[int] | None = None,
        meanwhile: Callable[[float], None] | None = None,
    ) -> dict[int, Outcome]:
        """All ranks call a function. A signal comes on one of them, if so drawn.

        `meanwhile` is called with the usual time of the call, while it runs.
        """
        names = self.names if names is None else names
        what = function.__name__
        draws = self.draw.random() < SIGNALLED if signalled is None else signalled
        one = self.draw.choice(names) if draws else None
        moment = self.moment(what)
        for name in names:
            self.host.start([name], call, moment if name == one else None, again, function, *rest)
        self.totals.counts["signals"] += one is not None
        if meanwhile is not None:
            meanwhile(self._usual_s.get(what, 0.05))
        living = [name for name in names if name not in self.dead]
        return self.outcomes(what, living)

    def outcomes(self, what: str, names: list[int]) -> dict[int, Outcome]:
        outcomes = dict(zip(names, self.host.results(names, 120.0), strict=True))
        for name, outcome in outcomes.items():
            assert isinstance(outcome, Outcome), f"{what} on rank {name}: {outcome}"
            self._look_at(what, name, outcome)
        return outcomes

    def _look_at(self, what: str, name: int, outcome: Outcome) -> None:
        self.totals.counts["hits"] += outcome.hit
        self.totals.waited(what, outcome.seconds)
        if outcome.ended.startswith(self.wrong):
            self.totals.counts["wrong"] += 1
        bad = outcome.ended.startswith((self.wrong, "AssertionError", "KeyError", "AttributeError"))
        assert not bad, f"{what} of process {name}: {outcome.ended}"
        given_up = "without this rank" in outcome.ended
        assert not given_up, f"{what}: process {name} lives and was given up: {outcome.ended}"
        late = outcome.seconds > self.limit_s
        assert not late, f"{what} of process {name} took {outcome.seconds:.1f} s: {outcome.ended}"
        if not outcome.hit and outcome.ended == WHOLE:
            usual_s = self._usual_s.get(what, outcome.seconds)
            self._usual_s[what] = 0.8 * usual_s + 0.2 * outcome.seconds

    def together(self, function: Callable, *rest: object, signalled: bool | None = None) -> list:
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

    def form(self, names: list[int]) -> None:
        """A process group over a folder, which outlives each of its ranks."""
        self.host.succeed(names, form, self.host.folder / f"group-{names[0]}", names)

    def wait_for_arrivals(self, folder: Path, new: int) -> None:
        """So many more calls of `join_group` have come."""
        root = Board(OutlivingStore(folder), "epmoe")
        while root.read(f"arrivals/{self.arrivals + 1}"):
            self.arrivals += 1
        last = self.arrivals + new
        while not root.read(f"arrivals/{last}"):
            time.sleep(0.005)

    def kill(self, name: int, number: int) -> None:
        self.host.signal(name, number)
        self.dead.add(name)
        self.totals.counts["kills"] += 1
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
