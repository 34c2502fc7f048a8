"""What the programs of all protocols share: a rank's stores to its peers, and its
waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.machine import Edge, Machine, Memory, Node, round_of, value_of

DISPATCH = 0
COMBINE = 1


@dataclass(frozen=True)
class Row:
    """A row to be read in a round."""

    place: int
    shown_by: int | None = None  # the place that shows its arrival; None: the signals do
    announced_by: int | None = None  # the signal that says whether it comes; None: it surely does

    def comes(self, memory: Memory) -> bool:
        return self.announced_by is None or bool(memory[self.announced_by] & 1)


@dataclass(frozen=True)
class Look:
    """What a step of round `n` awaits and reads."""

    n: int
    signals: tuple[int, ...] = ()  # each must be there
    counts: tuple[int, ...] = ()  # read with the rows, and of this round
    rows: tuple[Row, ...] = ()  # as they come
    exact: bool = True  # signals are of this round, otherwise also of a later one
    any_epoch: bool = False  # they are of any round
    lines: bool = False  # rows show their own arrival, by not being empty
    unread: bool = False  # rows are awaited only

    def is_here(self, value: int) -> bool:
        seen = round_of(value)
        return seen > 0 if self.any_epoch else seen == self.n if self.exact else seen >= self.n

    def ready(self, memory: Memory) -> bool:
        return all(self.is_here(memory[signal]) for signal in self.signals) and all(
            memory[row.shown_by] if self.lines else self.is_here(memory[row.shown_by])
            for row in self.rows
            if row.shown_by is not None and row.comes(memory)
        )

    def read(self, memory: Memory) -> tuple[int, int] | None:
        rows = () if self.unread else (row.place for row in self.rows if row.comes(memory))
        for place in (*self.counts, *rows):
            if round_of(memory[place]) != self.n:
                return place, self.n
        return None


@dataclass
class Rank:
    """A rank whose program goes into a machine. A protocol's subclass writes a round. `build`
    explains the options.
    """

    machine: Machine
    rank: int
    protocol: str
    rounds: int
    one_way: bool
    aborts: bool
    without: str

    def __post_init__(self) -> None:
        self.peers = [p for p in range(self.machine.ranks) if p != self.rank]
        self.sources = [p for p in self.peers if p < self.rank or not self.one_way]
        self.receivers = [p for p in self.peers if p > self.rank or not self.one_way]
        self.sums = "sum" if self.has("own-slab") else self.rows
        self.nodes: dict[tuple[str, int], Node] = {}
        self.edges: list[tuple[Node, Edge]] = []

    @property
    def rows(self) -> str:
        """The kind of place where the rows of dispatch arrive."""
        return "row"

    def write_round(self, n: int) -> None:
        """From node ("closed", n − 1) to node ("closed", n)."""
        raise NotImplementedError

    def which(self, kind: str, writer: int, n: int) -> tuple[int, ...]:
        """The place, among those of a kind in a window, that `writer` uses in round n."""
        raise NotImplementedError

    def write(self) -> None:
        """Writes the program and hands it over. Its last node is the end."""
        end = ("closed", self.rounds)
        self.node("closed", 0, {})
        for n in range(1, self.rounds + 1):
            self.write_round(n)
        self.nodes[end] = self.nodes.pop(end)
        number = {key: i for i, key in enumerate(self.nodes)}
        for node, edge in self.edges:
            node.edges.append(edge._replace(target=number[edge.target]))
        self.machine.programs.append(list(self.nodes.values()))

    def has(self, rule: str) -> bool:
        return rule != self.without

    def awaited(self, stage: int) -> list[int]:
        """The peers for whose opening this rank waits."""
        if stage == DISPATCH:
            return self.peers if self.has("dispatch-awaits-all") else self.sources
        return self.peers if self.has("combine-awaits-all") else self.receivers

    def informed(self, stage: int) -> list[int]:
        """The peers to which this rank signals that it opens the stage."""
        return (
            self.peers
            if self.has("open-all")
            else self.receivers
            if stage == DISPATCH
            else self.sources
        )

    def mine(self, kind: str, writers: list[int], n: int) -> tuple[int, ...]:
        """The places in this rank's window that `writers` use in round n."""
        return tuple(
            self.machine.place(kind, self.rank, *self.which(kind, writer, n)) for writer in writers
        )

    def issue(
        self,
        kind: str,
        to: list[int],
        n: int,
        stage: int,
        *,
        rows: bool = True,
        last: bool = False,
        released: bool = False,
    ) -> int:
        """Stores for round n, one for each rank of `to`, as a mask. `last`: after the payload of
        the stage.
        """
        places = [self.machine.place(kind, peer, *self.which(kind, self.rank, n)) for peer in to]
        return sum(
            self.store(place, value_of(n, rows), n, stage, last, released) for place in places
        )

    def store(
        self, place: int, value: int, n: int, stage: int, part: int, released: bool = False
    ) -> int:
        """A store in a part of a stage, as a mask of its number."""
        return self.machine.store(
            self.rank, place, value, 4 * (2 * n + stage) + part, released=released
        )

    def node(self, name: str, n: int, read_through: dict) -> None:
        """Where the rank may stand in round n, with `Node.read_through`."""
        self.nodes[name, n] = Node(f"{name} {n}", read_through)

    def edge(
        self,
        start: str,
        n: int,
        name: str,
        target: tuple[str, int],
        *,
        stores: int = 0,
        wait: Look | None = None,
        read: Look | None = None,
        drains: bool = False,
    ) -> None:
        """A step from node `start` of round n to `target`. It awaits and reads `wait`, or only
        reads `read`.
        """
        look = wait or read
        edge = Edge(
            f"{name} {target[1]}", target, stores, wait and wait.ready, look and look.read, drains
        )
        self.edges.append((self.nodes[start, n], edge))
