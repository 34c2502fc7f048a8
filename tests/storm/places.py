"""Steps of storms with a signal at every place of one rank's call in turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType

from storm.acts import Act
from storm.calls import Place


class Placed:
    """Signals into the calls `what` of one rank, behind so many `steps` of modules."""

    def __init__(self, what: str, rank: int, modules: list[ModuleType]) -> None:
        self.steps = 0
        self._what = what
        self._rank = rank
        self._files = frozenset(str(module.__file__) for module in modules)

    def victim(self, what: str, names: list[int]) -> int | None:
        return names[self._rank] if what == self._what else None

    def moment(self, usual_s: float) -> Place:
        return Place(self.steps, self._files, exits=self.steps % 2 == 1)


def at_every_place(act: Act, signals: Placed, step: Callable[[], object], stride: int) -> int:
    """The step, and rounds, until a signal comes too late. Returns how many have come before."""
    act.signals = signals
    act.begin()
    for steps in itertools.count(0, stride):
        signals.steps = steps
        hits = act.totals.counts["hits"]
        step()
        act.play()
        if act.totals.counts["hits"] == hits:
            break
    return steps // stride
