"""Explicit-state exploration: visits every state that a system can reach, and shows the way to a
forbidden one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Protocol

LAST_STEPS = 25


class Broken(Exception):
    """A step that breaks what the system promises: `step` names it, `why` says what it breaks."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(step, why)
        self.step = step
        self.why = why


class System(Protocol):
    """What `explore` explores. States are hashable, and equal states behave alike."""

    start: Hashable

    def steps(self, state: Hashable) -> Iterable[tuple[str, Hashable]]:
        """Each step that may come next: its name, and the state after it. Raises Broken for one
        that must not be.
        """

    def has_ended(self, state: Hashable) -> bool:
        """Whether nothing need follow."""


class Violation(AssertionError):
    """Something that must not happen, with the last steps of a shortest way to it."""

    def __init__(self, why: str, trace: list[str], states: int) -> None:
        shown = trace[-LAST_STEPS:]
        left_out = (
            [f"  ({len(trace) - len(shown)} steps before)"] if len(trace) > len(shown) else []
        )
        super().__init__(
            "\n".join(
                [f"{why}, after {states} states:", *left_out, *(f"  {step}" for step in shown)]
            )
        )
        self.why = why
        self.trace = trace


def explore(system: System) -> set[Hashable]:
    """Every state that can be reached, breadth first. Raises Violation for a broken step, and for a
    state from which nothing follows although the system has not ended.
    """
    came_from: dict[Hashable, tuple[Hashable, str] | None] = {system.start: None}
    queue = deque([system.start])
    while queue:
        state = queue.popleft()
        stuck = True
        try:
            for step, following in system.steps(state):
                stuck = False
                if following not in came_from:
                    came_from[following] = state, step
                    queue.append(following)
        except Broken as broken:
            raise Violation(
                broken.why, [*_trace(came_from, state), broken.step], len(came_from)
            ) from None
        if stuck and not system.has_ended(state):
            raise Violation("nobody can go on", _trace(came_from, state), len(came_from))
    return set(came_from)


def _trace(came_from: dict[Hashable, tuple[Hashable, str] | None], state: Hashable) -> list[str]:
    steps = []
    while (before := came_from[state]) is not None:
        state, step = before
        steps.append(step)
    return steps[::-1]
