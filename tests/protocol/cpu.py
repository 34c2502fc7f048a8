"""The CPU's protocol: payload, then a released header for each stage. csrc/cpu/dispatch.cpp,
combine.cpp, signal.h.
"""

from __future__ import annotations

from protocol.rank import COMBINE, DISPATCH, Look, Rank, Row

COUNTS = ("dispatch count", "combine count")
HEADERS = ("dispatch header", "combine header")


class CpuRank(Rank):
    """Its nodes: closed, sent, dispatched and returning, the states of
    epmoe/exchange/round_state.py.
    """

    def write_round(self, n: int) -> None:
        before = dict.fromkeys(("row", "sum", *COUNTS), n - 1)
        self.node("sent", n, before)
        self.node("dispatched", n, before | {"dispatch count": n})
        self.node("returning", n, before | {"dispatch count": n, "row": n})
        self.node("closed", n, dict.fromkeys(before, n))
        self.write_dispatch(n)
        self.write_combine(n)
        if self.aborts:
            self.write_aborts(n)

    def write_dispatch(self, n: int) -> None:
        # In an ordinary round combine has seen these headers.
        ended = self.headers(COMBINE, n - 1) if self.has("abort-waits") and n > 1 else None
        stores = self.issue("row", self.receivers, n, DISPATCH) | self.signal(n, DISPATCH)
        self.edge("closed", n - 1, "dispatch send of round", ("sent", n), stores=stores, wait=ended)
        arrived = self.headers(
            DISPATCH, n, self.slabs(n), self.mine("dispatch count", self.awaited(DISPATCH), n)
        )
        self.edge("sent", n, "dispatch recv of round", ("dispatched", n), wait=arrived)

    def write_combine(self, n: int) -> None:
        # Send the sums, for which the rank reads the weights in its slabs, and say so.
        last_read = Look(n, rows=self.slabs(n))
        stores = self.issue(self.sums, self.sources, n, COMBINE) | self.signal(n, COMBINE)
        if self.has("finish-first"):
            self.edge(
                "dispatched",
                n,
                "combine send of round",
                ("returning", n),
                stores=stores,
                read=last_read,
            )
        else:
            self.node("opened early", n, self.nodes["dispatched", n].read_through)
            self.edge("dispatched", n, "combine send of round", ("opened early", n), stores=stores)
            self.edge("opened early", n, "last read of round", ("returning", n), read=last_read)
        # Wait for the signals of all, and read the rows that they announce.
        awaited = self.awaited(COMBINE)
        counts = self.mine("combine count", awaited, n)
        count_of = dict(zip(awaited, counts, strict=True))
        places = zip(self.receivers, self.mine(self.sums, self.receivers, n), strict=True)
        rows = tuple(Row(place, announced_by=count_of[rank]) for rank, place in places)
        returned = self.headers(COMBINE, n, rows, counts)
        self.edge("returning", n, "combine recv of round", ("closed", n), wait=returned)

    def write_aborts(self, n: int) -> None:
        no_rows = (
            self.signal(n, COMBINE, rows=not self.has("no-rows")) if self.has("abort-opens") else 0
        )
        for state, stores in (("sent", no_rows), ("dispatched", no_rows), ("returning", 0)):
            self.edge(state, n, "abort of round", ("closed", n), stores=stores)

    def slabs(self, n: int) -> tuple[Row, ...]:
        return tuple(Row(place) for place in self.mine("row", self.sources, n))

    def signal(self, n: int, stage: int, rows: bool = True) -> int:
        counts = self.issue(COUNTS[stage], self.informed(stage), n, stage, rows=rows)
        return counts | self.issue(
            HEADERS[stage], self.informed(stage), n, stage, last=True, released=self.has("release")
        )

    def headers(
        self, stage: int, n: int, rows: tuple[Row, ...] = (), counts: tuple[int, ...] = ()
    ) -> Look:
        signals = self.mine(HEADERS[stage], self.awaited(stage), n)
        return Look(
            n,
            signals,
            counts,
            rows,
            exact=not self.has("later-epoch"),
            any_epoch=not self.has("epoch"),
        )

    def which(self, kind: str, writer: int, n: int) -> tuple[int, ...]:
        return (writer, n % 2) if kind in COUNTS and self.has("two-counts") else (writer,)
