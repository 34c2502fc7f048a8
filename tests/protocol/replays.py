"""A rank that leaves a group and opens the next one, while another thread replays graphs.
epmoe/exchange/node.py.

A kernel reads the tables when it starts, then looks at the state, then uses windows, then ends.
Hosts wait for kernels that have started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from protocol.explorer import Broken

SEATS = ("stays", "leaves", "comes")
STAGES = ("dispatch", "combine")
KERNELS = 6


class Kernel(NamedTuple):
    tables: int  # of which generation it has read
    looked: bool = False  # at the state
    takes_part: bool = False
    used: bool = False  # windows


class State(NamedTuple):
    host: int = 0  # steps done
    mapped: int | None = 0  # the generation whose windows are mapped
    latched: bool = False  # the state where graphs of generation 0 find it, like the next three
    tables: int = 0  # of a generation
    due: int = 0  # the stage
    dispatched: int = 0  # in which generation
    marked: bool = False  # the own window says that the other seat is empty
    kernel: Kernel | None = None  # that runs
    ended: int = 0  # kernels
    told: bool = False  # the host


class ReplayModel:
    """For `explore`. `alike`: the next group has the same sizes, and so the same addresses.
    `other`: what the other rank does, which leaves its seat, or comes into one that was empty.
    """

    def __init__(self, alike: bool, without: str = "", other: str = "stays") -> None:
        self.alike = alike
        self.without = without
        self.start = State(marked=other == "comes")
        self.empty = {0: other == "comes", 1: other == "leaves"}  # in each generation
        opening = ["maps", "marks", "tables", "ends", "clears"]
        closing = ["ends", "latches", "ends", "unmaps"]
        if without == "latch-first":
            closing.remove("latches")
        elif without == "ends-again":
            del closing[2]
        elif without == "mark-empty":
            opening.remove("marks")
        elif without == "ends-between":
            opening.remove("ends")
        elif without == "tables-first":
            opening = ["maps", "marks", "ends", "clears", "tables"]
        elif without == "clear-last":
            opening = ["tables", "ends", "clears", "maps", "marks"]
        self.program = closing + opening

    def has_ended(self, state: State) -> bool:
        return state.host == len(self.program) and state.ended == KERNELS

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        if state.host < len(self.program):
            step = self.program[state.host]
            if step != "ends" or state.kernel is None:
                yield f"the host {step}", self._after(step, state)._replace(host=state.host + 1)
        stage = state.ended % 2
        kernel = state.kernel
        if kernel is None:
            if state.ended < KERNELS:
                yield f"{STAGES[stage]} starts", state._replace(kernel=Kernel(state.tables))
        elif not kernel.looked:
            takes_part = not state.latched and state.due == stage
            yield (
                f"{STAGES[stage]} looks",
                state._replace(kernel=Kernel(kernel.tables, True, takes_part)),
            )
        elif kernel.takes_part and not kernel.used:
            yield f"{STAGES[stage]} uses windows", self._used(state, kernel)
        else:
            yield f"{STAGES[stage]} ends", self._ended(state, kernel)

    def _after(self, step: str, state: State) -> State:
        # What the next group writes into scratch is found again.
        finds = self.alike or self.without == "scratch-of-its-own"
        if step == "latches":
            return state._replace(latched=True)
        if step == "unmaps":  # the memory goes, and with it what was in the windows
            return state._replace(mapped=None, marked=state.marked and self.without == "marks-go")
        if step == "maps":
            return state._replace(mapped=1)
        if step == "marks":
            return state._replace(marked=state.marked or self.empty[1])
        if step == "tables" and finds:
            return state._replace(tables=1)
        if step == "clears" and finds:
            return state._replace(
                latched=False, due=state.due if self.without == "begins-anew" else 0
            )
        return state

    def _used(self, state: State, kernel: Kernel) -> State:
        stage = STAGES[state.ended % 2]
        if state.mapped is None or state.mapped and not self.alike:
            raise Broken(f"{stage} uses windows", "they are not those of its graph")
        if stage == "dispatch" and kernel.tables != state.mapped:
            raise Broken(f"{stage} uses windows", "its tables are those of another group")
        if state.marked != self.empty[state.mapped]:
            what = (
                "it does not wait for a rank that is there"
                if state.marked
                else "it waits where nobody sits"
            )
            raise Broken(f"{stage} uses windows", what)
        if stage == "combine" and state.dispatched != state.mapped:
            raise Broken(f"{stage} uses windows", "a round begins in one group and ends in another")
        return state._replace(kernel=kernel._replace(used=True), dispatched=state.mapped)

    def _ended(self, state: State, kernel: Kernel) -> State:
        due = 1 - state.ended % 2 if kernel.takes_part else state.due
        told = state.told or not kernel.takes_part
        return state._replace(kernel=None, ended=state.ended + 1, due=due, told=told)
