"""Ranks that run programs side by side over windows in which stores arrive late.

A state is where each rank is in its program, what each place of the windows holds, and which stores
are on their way. A program is a graph: a rank stands at a `Node` and takes one of its edges.

**Stores.** A store is on its way from the step that issues it until it arrives, at any later time
and in any order, with two exceptions. Stores of one rank to one place stay in order, as in every
memory model. A store that is `released` arrives only after all stores of its rank from before. A
step that `drains` waits until its rank's stores have arrived.

**Reads.** Each node says up to which round its rank has read the places of each kind. A store that
arrives where a later round lies has overwritten what is still to be read. A step that reads names
the round that it must find.

**Failures.** A wait of some ranks may run into its deadline at any time. The rank then latches and
reports, and a report ends the waits of the others. A rank that dies takes no step any more, and may
die between two stores of a step.

**Fewer interleavings.** Three reductions, of which none loses a violation:

1. A step that awaits several places is possible once all have arrived. A place keeps what has
   arrived until it is read, or a violation is found. The order of looking at the places thus makes
   no difference.
2. A step reads all its places at once, before its stores leave. If one of several reads came too
   early, so does the step at that time. If a store overwrote what the last of them reads, it does
   so before a step that is taken later. Where a store may leave before the last read, there are
   several steps.
3. Stores into other windows arrive as soon as they may (`eager`). What depends on such an arrival?
   A step of the reader awaits it, so it comes later anyway, and a wait may fail before or after. A
   later store to the same place comes later too. Whether the store overwrites something depends on
   how far the reader is: the earlier, the more is unread. A store into the own window (re-arming)
   does more harm when it is late, so it arrives at any time.

`lazy=True` leaves out the third reduction, whose argument takes the rules for granted. Models
without a rule are therefore lazy, and `tests/test_protocol_model.py` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.explorer import Broken

Memory = tuple[int, ...]
FOREVER = 1 << 30  # later than any round


class State(NamedTuple):
    nodes: tuple[int, ...]
    memory: Memory
    pending: int
    """The stores on their way, as a mask of their numbers."""


class Store(NamedTuple):
    name: str
    writer: int
    place: int
    value: int
    time: int
    """Stores of a rank are issued in this order, as far as order matters."""
    released: bool


class Edge(NamedTuple):
    name: str
    target: int
    stores: int = 0
    ready: Callable[[Memory], bool] | None = None
    """The wait of the step, if it waits for others."""
    read: Callable[[Memory], tuple[int, int] | None] | None = None
    """What the step reads. Returns the first place that does not hold what it must, and the round
    that it must hold.
    """
    drains: bool = False


@dataclass
class Node:
    name: str
    read_through: dict[str | int, int]
    """By the kind of place, or by the place, the last round of which the rank will read nothing
    more.
    """
    edges: list[Edge] = field(default_factory=list)


def value_of(n: int, rows: bool = True) -> int:
    """The content of a place: a round, and for a signal whether rows come with it."""
    return n << 1 | rows


def round_of(value: int) -> int:
    return value >> 1


@dataclass
class Machine:
    """The programs of `ranks` ranks. The last node of each program is its end.

    Args:
        deadlines: ranks whose waits may run into their deadline.
        dying: ranks that may die at any node.
        reports, latches: whether a rank whose wait fails says so to all, and whether it stops then.
        lazy: whether all stores arrive late.
    """

    ranks: int
    deadlines: frozenset[int] = frozenset()
    dying: frozenset[int] = frozenset()
    reports: bool = True
    latches: bool = True
    lazy: bool = False
    places: dict[tuple, int] = field(default_factory=dict)
    stores: list[Store] = field(default_factory=list)
    programs: list[list[Node]] = field(default_factory=list)

    def place(self, kind: str, reader: int, writer: int, *which: int) -> int:
        """The number of a place in the window of `reader`, into which `writer` stores."""
        return self.places.setdefault((kind, reader, writer, *which), len(self.places))

    def store(
        self, writer: int, place: int, value: int, time: int, *, released: bool = False
    ) -> int:
        """A new store, as a mask of its number."""
        kind, reader, *_ = list(self.places)[place]
        name = (
            f"{writer}'s {kind} of round {round_of(value)} for {reader}"
            if value
            else f"{reader}'s re-armed {kind}"
        )
        self.stores.append(Store(name, writer, place, value, time, released))
        return 1 << len(self.stores) - 1

    def finish(self) -> None:
        """After all programs are there: adds the ends by failure, and looks up what
        `steps` needs.
        """
        # The error words that each rank writes when it fails, and those that it reads.
        self.reports_of = [
            sum(
                self.store(r, self.place("error", p, r), value_of(1), FOREVER)
                for p in range(self.ranks)
                if p != r
            )
            if self.reports
            else 0
            for r in range(self.ranks)
        ]
        self.errors_of = [
            [self.place("error", r, p) for p in range(self.ranks)] for r in range(self.ranks)
        ]
        # Each program gets two more ends: latched and dead. Whatever the rank has not read by then,
        # it reads no more.
        everything = dict.fromkeys({kind for kind, *_ in self.places}, FOREVER)
        self.ends = []
        for program in self.programs:
            self.ends.append(len(program) - 1)
            program += [Node("latched", everything), Node("dead", everything)]
        self.names = list(self.places)
        # Of each store: how its arrival is called, who issued it, and which others arrive before.
        self.arrivals = [f"{store.name} arrives" for store in self.stores]
        self.limits = [[self._limits(node) for node in program] for program in self.programs]
        self.issued_by = [self._mask(lambda s, r=r: s.writer == r) for r in range(self.ranks)]
        self.blockers = [
            self._mask(
                lambda s, store=store: (
                    s.writer == store.writer
                    and s.time < store.time
                    and (store.released or s.place == store.place)
                )
            )
            for store in self.stores
        ]
        # Unless `lazy`, stores into the windows of other ranks arrive as soon as they may.
        late = (lambda s: True) if self.lazy else (lambda s: s.writer == self.names[s.place][1])
        self.eager = ~self._mask(late)
        self.start = State((0,) * self.ranks, (0,) * len(self.places), 0)

    def _limits(self, node: Node) -> list[int]:
        """By place, the last round that may be overwritten while the reader stands at `node`."""
        read = node.read_through
        return [
            read.get(place, read.get(kind, FOREVER)) for place, (kind, *_) in enumerate(self.names)
        ]

    def _mask(self, holds: Callable[[Store], bool]) -> int:
        return sum(1 << n for n, store in enumerate(self.stores) if holds(store))

    def has_ended(self, state: State) -> bool:
        return all(node >= end for node, end in zip(state.nodes, self.ends, strict=True))

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        nodes, memory, pending = state
        # A store arrives, once those that it must not overtake have arrived.
        for n in self._numbers(pending):
            if not pending & self.blockers[n]:
                step = self.arrivals[n]
                yield (
                    step,
                    self._settle(
                        step, State(nodes, self._arrive(step, state, n), pending & ~(1 << n))
                    ),
                )
        # Or a rank takes a step of its program.
        for rank, at in enumerate(nodes):
            if at >= self.ends[rank]:
                continue
            for edge in self.programs[rank][at].edges:
                if edge.drains and pending & self.issued_by[rank]:
                    continue
                # A wait ends when all is there, or by a failure.
                step = f"rank {rank}: {edge.name}"
                if edge.ready is not None:
                    if self.deadlines:
                        yield from self._failures(state, rank, edge)
                    if not edge.ready(memory):
                        continue
                # A read must find the bytes of its round.
                failed = memory[self.errors_of[rank][rank]]  # what it reads means nothing any more
                if edge.read is not None and not failed and (wrong := edge.read(memory)):
                    place, n = wrong
                    kind, _, writer, *_ = self.names[place]
                    found = f"round {round_of(memory[place])}" if memory[place] else "nothing"
                    raise Broken(
                        step, f"rank {rank} reads {writer}'s {kind} of round {n} and finds {found}"
                    )
                yield step, self._move(step, state, rank, edge.target, edge.stores)
                if rank in self.dying:
                    yield from self._deaths(step, state, rank, edge)
            if rank in self.dying:
                step = f"rank {rank} dies"
                yield step, self._move(step, state, rank, self.ends[rank] + 2)

    def _deaths(
        self, step: str, state: State, rank: int, edge: Edge
    ) -> Iterator[tuple[str, State]]:
        """The rank may die in the middle of a step, after any of its stores."""
        issued = 0
        for n in self._numbers(edge.stores):
            issued |= 1 << n
            yield (
                f"{step}, and dies",
                self._move(f"{step}, and dies", state, rank, self.ends[rank] + 2, issued),
            )

    def _failures(self, state: State, rank: int, edge: Edge) -> Iterator[tuple[str, State]]:
        """The wait of `edge` may run into its deadline, or find a report."""
        reported = any(state.memory[place] for place in self.errors_of[rank])
        if rank in self.deadlines or reported:
            step = f"rank {rank}: {edge.name} fails, by " + (
                "a report" if reported else "its deadline"
            )
            target = self.ends[rank] + 1 if self.latches else edge.target
            own = self.errors_of[rank][rank]
            memory = (*state.memory[:own], value_of(1), *state.memory[own + 1 :])
            yield (
                step,
                self._move(
                    step, state._replace(memory=memory), rank, target, self.reports_of[rank]
                ),
            )

    def _move(self, step: str, state: State, rank: int, target: int, stores: int = 0) -> State:
        nodes = (*state.nodes[:rank], target, *state.nodes[rank + 1 :])
        return self._settle(step, State(nodes, state.memory, state.pending | stores))

    def _settle(self, step: str, state: State) -> State:
        """After `step`: lets all stores arrive that arrive as soon as they may."""
        while eager := state.pending & self.eager:
            ready = [n for n in self._numbers(eager) if not state.pending & self.blockers[n]]
            if not ready:
                break
            for n in ready:
                state = State(state.nodes, self._arrive(step, state, n), state.pending & ~(1 << n))
        return state

    def _arrive(self, step: str, state: State, n: int) -> Memory:
        name, _, place, value, *_ = self.stores[n]
        memory = state.memory
        reader = self.names[place][1]
        old = round_of(memory[place])
        if (
            old > self.limits[reader][state.nodes[reader]][place]
            and not memory[self.errors_of[reader][reader]]
        ):
            raise Broken(
                step, f"{name} overwrites round {old}, which rank {reader} has yet to read"
            )
        return (*memory[:place], value, *memory[place + 1 :])

    @staticmethod
    def _numbers(mask: int) -> Iterator[int]:
        while mask:
            lowest = mask & -mask
            yield lowest.bit_length() - 1
            mask ^= lowest
