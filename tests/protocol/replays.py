"""A rank that leaves a group and opens the next one, while another thread replays graphs. epmoe/exchange/node.py.

A kernel looks at the state when it starts, then uses windows, then ends. Hosts wait for kernels that have started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.explorer import Broken

REPLAY_RULES = ("latch-first", "ends-again", "begins-anew", "clear-last", "scratch-of-its-own")
STAGES = ("dispatch", "combine")
KERNELS = 6


class State(NamedTuple):
    host: int = 0  # steps done
    mapped: int | None = 0  # the generation whose windows are mapped
    latched: bool = False  # the state where graphs of generation 0 find it, like the next two
    due: int = 0  # the stage
    dispatched: int = 0  # in which generation
    kernel: tuple[bool, bool] | None = None  # that runs: whether it takes part, and whether it has used windows
    ended: int = 0  # kernels
    told: bool = False  # the host


class ReplayModel:
    """For `explore`. `alike`: the next group has the same ranks and sizes, and so the same addresses."""

    def __init__(self, alike: bool, without: str = "") -> None:
        self.alike, self.without, self.start = alike, without, State()
        steps = ["ends", "latches", "ends", "unmaps", "maps", "clears"]
        if without == "latch-first":
            steps.remove("latches")
        elif without == "ends-again":
            del steps[2]
        elif without == "clear-last":
            steps[4:] = steps[:3:-1]
        self.program = steps

    def has_ended(self, state: State) -> bool:
        return state.host == len(self.program) and state.ended == KERNELS

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.host < len(self.program):
            step = self.program[state.host]
            if step != "ends" or state.kernel is None:
                yield f"the host {step}", self._after(step, state)._replace(host=state.host + 1)
        if state.kernel is None and state.ended < KERNELS:
            stage = state.ended % 2
            yield f"{STAGES[stage]} starts", state._replace(kernel=(not state.latched and state.due == stage, False))
        elif state.kernel == (True, False):
            yield f"{STAGES[state.ended % 2]} uses windows", self._used(state)
        elif state.kernel is not None:
            yield f"{STAGES[state.ended % 2]} ends", self._ended(state)

    def _after(self, step: str, state: State) -> State:
        if step == "latches":
            return state._replace(latched=True)
        if step in ("unmaps", "maps"):
            return state._replace(mapped=None if step == "unmaps" else 1)
        if step == "clears" and (self.alike or self.without == "scratch-of-its-own"):
            return state._replace(latched=False, due=state.due if self.without == "begins-anew" else 0)
        return state

    def _used(self, state: State) -> State:
        stage = STAGES[state.ended % 2]
        if state.mapped is None or state.mapped and not self.alike:
            raise Broken(f"{stage} uses windows", "they are not those of its graph")
        if stage == "combine" and state.dispatched != state.mapped:
            raise Broken(f"{stage} uses windows", "a round begins in one group and ends in another")
        return state._replace(kernel=(True, True), dispatched=state.mapped)

    def _ended(self, state: State) -> State:
        takes_part, _ = state.kernel or (False, False)
        due = 1 - state.ended % 2 if takes_part else state.due
        return state._replace(kernel=None, ended=state.ended + 1, due=due, told=state.told or not takes_part)
