"""`epmoe run --watch`: rates, late ranks and hot experts, while the ranks run.

A thread of each rank reads its health, which stops nothing, and puts it into a store on rank 0. There the thread also
draws all ranks: in a terminal as a table in place, elsewhere as lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread

import torch.distributed as dist
from rich.console import Group
from rich.live import Live
from rich.table import Table

from epmoe.cli.console import console, human_bytes, plain_table, sparkline
from epmoe.cli.result import by_rank, bytes_back, bytes_out
from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.exchange.health import Health
from epmoe.group.peers import Peers
from epmoe.service import ExpertParallel

INTERVAL_S = 0.5  # between two looks
LINES_S = 2.0  # between two lines, outside a terminal
_HOST = "127.0.0.1"  # all ranks are on one machine
_TIMEOUT = timedelta(seconds=60)  # of each call of the store; the ranks are there already


@dataclass(frozen=True)
class Sample:
    """A rank's health at `time`, in seconds of that rank's monotonic clock."""

    time: float
    health: Health

    def dumps(self) -> str:
        return json.dumps([self.time, self.health.as_dict()])

    @classmethod
    def loads(cls, text: bytes | str) -> Sample:
        seconds, health = json.loads(text)
        return cls(seconds, Health(**health))


@dataclass(frozen=True)
class View:
    """What happened between two samples of each rank, per second."""

    rounds: int
    """since the watch began, on the slowest rank"""
    rounds_per_s: float
    pairs: Sequence[float]
    """[P] pairs of each physical expert"""
    rows: Sequence[float]
    """[R] rows that each rank sent to others"""
    waited: Sequence[float]
    """[R] seconds that the mean other rank waited for each rank: 0.3 is 30% of its time"""

    @classmethod
    def between(
        cls, before: Sequence[Sample], after: Sequence[Sample], placement: Placement, first_round: int = 0
    ) -> View:
        """From samples by rank; rounds count from `first_round` on."""
        R, pairs = placement.ep_size, [0.0] * placement.num_physical_experts
        rows, waited, rounds_per_s = [0.0] * R, [0.0] * R, [0.0] * R
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            seconds = new.time - old.time
            if seconds <= 0:  # this rank has not been heard of since
                continue
            rounds_per_s[rank] = (new.health.rounds - old.health.rounds) / seconds
            counts = zip(new.health.tokens_per_expert, old.health.tokens_per_expert, strict=True)
            for expert, (count, less) in zip(placement.local_experts(rank), counts, strict=True):
                pairs[expert] = (count - less) / seconds
            for other in set(range(R)) - {rank}:
                rows[rank] += (new.health.rows_sent[other] - old.health.rows_sent[other]) / seconds
                waited[other] += (new.health.waited_s[other] - old.health.waited_s[other]) / seconds / (R - 1)
        rounds = min(one.health.rounds for one in after) - first_round
        return cls(rounds, max(rounds_per_s), pairs, rows, waited)

    def line(self, config: EPConfig) -> str:
        """All in one line."""
        rows = sum(self.rows)
        size = human_bytes(rows * (bytes_out(config) + bytes_back(config)))
        words = [
            f"{self.rounds_per_s:,.0f} rounds/s",
            f"{sum(self.pairs) / config.model.num_experts_per_tok:,.0f} tokens/s",
            f"{rows:,.0f} rows/s between ranks ({size}/s)",
        ]
        if any(self.waited):
            late = max(range(len(self.waited)), key=self.waited.__getitem__)
            words.append(f"{self.waited[late]:.0%} of the time waiting for rank {late}")
        if hot := self.hot(range(len(self.pairs)), most=3):
            words.append(f"hot experts {hot}")
        return f"round {self.rounds:,}: {', '.join(words)}"

    def table(self, placement: Placement) -> Table:
        """A line for each rank."""
        table = plain_table(
            ("rank", "rows/s sent", "pairs/s", "others wait", "hot expert", "load per expert"),
            words=("hot expert", "load per expert"),
        )
        for rank, loads in enumerate(by_rank(placement, self.pairs)):
            cells = f"{rank}", f"{self.rows[rank]:,.0f}", f"{sum(loads):,.0f}", f"{self.waited[rank]:.0%}"
            table.add_row(*cells, self.hot(placement.local_experts(rank), most=1), sparkline(loads))
        return table

    def hot(self, experts: Sequence[int], most: int) -> str:
        """The `most` busiest of `experts`, with their loads over the mean of all experts."""
        mean = sum(self.pairs) / len(self.pairs)
        busiest = sorted(experts, key=lambda expert: -self.pairs[expert])[:most]
        return ", ".join(f"#{one} {self.pairs[one] / mean:.1f}×" for one in busiest if self.pairs[one])


@contextmanager
def watching(ep: ExpertParallel) -> Iterator[None]:
    """Shows on rank 0 what all ranks do inside the `with`. Collective."""
    server = None if ep.rank else dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    greetings = Peers.of(ep.group).all_gather((server.port if server else 0, _sample(ep).dumps()))
    store = server or dist.TCPStore(_HOST, greetings[0][0], is_master=False, timeout=_TIMEOUT)
    screen = _Screen(ep, [Sample.loads(first) for _, first in greetings]) if server else None
    stop = Event()
    thread = Thread(target=_work, args=(ep, store, screen, stop), daemon=True)
    with screen.live if screen and screen.live else nullcontext():
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        last = Peers.of(ep.group).all_gather(_sample(ep).dumps())  # of ranks that have all ended
        if screen:
            screen.show([Sample.loads(text) for text in last], always=True)  # the last round, which stays


class _Screen:
    """What rank 0 shows: a table in place in a terminal, otherwise a line now and then."""

    def __init__(self, ep: ExpertParallel, first: list[Sample]) -> None:
        self.config, self.placement, self.before = ep.config, ep.placement, first
        self.first_round = min(one.health.rounds for one in first)
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def show(self, samples: list[Sample], always: bool = False) -> None:
        if not self.live and not always and samples[0].time - self.before[0].time < LINES_S:
            return
        view = View.between(self.before, samples, self.placement, self.first_round)
        self.before = samples
        if self.live:
            self.live.update(Group(view.line(self.config), view.table(self.placement)), refresh=True)
        else:
            console.print(view.line(self.config), soft_wrap=True)


def _work(ep: ExpertParallel, store: dist.Store, screen: _Screen | None, stop: Event) -> None:
    """Publishes this rank's samples, and on rank 0 shows those of all, until `stop` is set."""
    ranks = [str(rank) for rank in range(ep.size)]
    with suppress(dist.DistError):  # the store ends with rank 0
        while not stop.wait(INTERVAL_S):
            store.set(ranks[ep.rank], _sample(ep).dumps())
            if screen and store.check(ranks):
                screen.show([Sample.loads(text) for text in store.multi_get(ranks)])


def _sample(ep: ExpertParallel) -> Sample:
    return Sample(time.monotonic(), ep.health(wait=False))
