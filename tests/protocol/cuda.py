"""The CUDA protocols of csrc/cuda/exchange: words open a stage early in its kernel, and each row
shows its own arrival.

A kernel begins when the one before it has completed, and then all stores of that kernel have
arrived (`drains`).
"""

from __future__ import annotations

from dataclasses import replace

from protocol.rank import COMBINE, DISPATCH, Look, Rank, Row
from protocol.rules import FINAL_ROWS, LL, RANK_MAJOR

OPENINGS = ("count word", "combine word")
FINAL_ROW = "final row"
KINDS = (*OPENINGS, "row", "row flag", "sum", "sum flag", FINAL_ROW, f"{FINAL_ROW} flag")


class CudaRank(Rank):
    """Its nodes: the states of round_state.py, and where a kernel has opened its stage and has yet
    to send.
    """

    @property
    def rows(self) -> str:
        return FINAL_ROW if self.protocol == FINAL_ROWS else "row"

    def write_round(self, n: int) -> None:
        before = dict.fromkeys(KINDS, n - 1)
        received = before | {"count word": n, f"{self.rows} flag": n}
        # Combine then reads the rows only after it has opened.
        late = self.protocol in (FINAL_ROWS, RANK_MAJOR)
        if not late:
            received |= {self.rows: n}
        self.node("opened", n, before)
        self.node("sent", n, before)
        self.node("dispatched", n, received)
        self.node("combining", n, received)
        self.node("returning", n, received | {self.rows: n})
        self.node("closed", n, dict.fromkeys(KINDS, n))

        arrived = replace(self.look(self.rows, self.sources, n, DISPATCH), unread=late)
        self.write_dispatch(n, arrived)
        stores = self.words(n, COMBINE) if self.has("finish-first") else 0
        self.edge(
            "dispatched",
            n,
            "combine of round",
            ("combining", n),
            stores=stores,
            drains=self.has("drain"),
        )
        if late:
            self.write_sums(n, arrived.rows)
        else:
            stores = self.payload(self.sums, self.sources, n, COMBINE)
            self.edge("combining", n, "sums of round", ("returning", n), stores=stores)
        returned = self.look(self.sums, self.receivers, n, COMBINE)
        stores = self.re_arm(self.sums, self.receivers, n, COMBINE)
        self.edge(
            "returning", n, "combine recv of round", ("closed", n), stores=stores, wait=returned
        )
        if self.aborts:
            self.write_aborts(n, arrived)

    def write_dispatch(self, n: int, arrived: Look) -> None:
        # A rank says with its first words that it has opened the round, and sends its rows.
        opens = self.words(n, DISPATCH) | (
            0 if self.has("finish-first") else self.words(n, COMBINE)
        )
        rows = self.payload(self.rows, self.receivers, n, DISPATCH)
        # Rows that go to their last place have to wait for all counts.
        if self.protocol == FINAL_ROWS and self.has("final-rows"):
            counts = Look(n, arrived.signals)
            self.edge(
                "closed",
                n - 1,
                "counts of round",
                ("opened", n),
                stores=opens,
                drains=self.has("drain"),
            )
            self.edge("opened", n, "final rows of round", ("sent", n), stores=rows, wait=counts)
        else:
            send = "dispatch send of round"
            self.edge(
                "closed", n - 1, send, ("sent", n), stores=opens | rows, drains=self.has("drain")
            )
        # It receives, and arms the lines for the next round.
        armed = self.re_arm(self.rows, self.sources, n, DISPATCH)
        self.edge(
            "sent", n, "dispatch recv of round", ("dispatched", n), stores=armed, wait=arrived
        )

    def write_sums(self, n: int, rows: tuple[Row, ...]) -> None:
        """Combine reads a row and sends its sum, while other rows lie unread. In any order."""
        every = (1 << len(rows)) - 1
        names = {done: f"sums {done:b}" for done in range(every)} | {
            0: "combining",
            every: "returning",
        }
        for done in range(1, every):
            read = {row.place: n for i, row in enumerate(rows) if done >> i & 1}
            self.node(names[done], n, self.nodes["combining", n].read_through | read)
        for i, (source, row) in enumerate(zip(self.sources, rows, strict=True)):
            stores = self.payload(self.sums, [source], n, COMBINE)
            read = Look(n, rows=(row,))
            for done in range(every):
                if not done >> i & 1:
                    target = (names[done | 1 << i], n)
                    step = f"sum for {source} of round"
                    self.edge(names[done], n, step, target, stores=stores, read=read)
        if not rows:
            self.edge("combining", n, "no sums of round", ("returning", n))

    def write_aborts(self, n: int, arrived: Look) -> None:
        """An abort launches the phases that are left, with a combine without rows: the same program
        in every state.
        """
        no_rows = (
            self.words(n, COMBINE, rows=not self.has("no-rows")) if self.has("abort-opens") else 0
        )
        combine = {"stores": no_rows, "drains": self.has("drain")}
        self.edge("dispatched", n, "abort of round", ("returning", n), **combine)
        if not self.has("abort-receives"):
            self.node("given up", n, self.nodes["returning", n].read_through)
            self.edge("sent", n, "abort of round", ("given up", n), wait=replace(arrived, rows=()))
            self.edge("given up", n, "combine without rows of round", ("returning", n), **combine)

    def words(self, n: int, stage: int, rows: bool = True) -> int:
        return self.issue(OPENINGS[stage], self.informed(stage), n, stage, rows=rows)

    def flag(self, kind: str) -> str:
        """The kind of place that shows the arrival of a row: a flag, or the line itself."""
        return kind if self.protocol == LL and self.has("one-access") else f"{kind} flag"

    def payload(self, kind: str, to: list[int], n: int, stage: int) -> int:
        rows = self.issue(kind, to, n, stage)
        flag = self.flag(kind)
        if flag == kind:
            return rows
        released = self.protocol != LL and self.has("release")
        return rows | self.issue(flag, to, n, stage, last=True, released=released)

    def look(self, kind: str, writers: list[int], n: int, stage: int) -> Look:
        awaited = self.awaited(stage)
        signals = self.mine(OPENINGS[stage], awaited, n)
        word_of = dict(zip(awaited, signals, strict=True)) if stage == COMBINE else {}
        places = zip(
            writers,
            self.mine(kind, writers, n),
            self.mine(self.flag(kind), writers, n),
            strict=True,
        )
        rows = tuple(Row(place, flag, word_of.get(writer)) for writer, place, flag in places)
        any_epoch = not self.has("epoch")
        lines = self.protocol == LL
        return Look(n, signals, counts=signals, rows=rows, any_epoch=any_epoch, lines=lines)

    def re_arm(self, kind: str, writers: list[int], n: int, stage: int) -> int:
        """This rank's stores that empty its own lines of a stage, as a mask."""
        if self.protocol != LL or not self.has("re-arm"):
            return 0
        return sum(
            self.store(place, 0, n, stage, 2) for place in self.mine(self.flag(kind), writers, n)
        )

    def which(self, kind: str, writer: int, n: int) -> tuple[int, ...]:
        """Final rows lie further on in each round, as if the counts of the sources changed."""
        return ((writer + n) % self.machine.ranks,) if kind == FINAL_ROW else (writer,)
