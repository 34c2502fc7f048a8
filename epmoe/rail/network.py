"""The network of one rank, whose host waits for every transfer, as on CPUs. network_cuda.py has
that of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, NoReturn

import torch

from epmoe.config.deadlines import Deadlines
from epmoe.exchange.health import STAGES
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import DISPATCHED, RETURNING, RoundState
from epmoe.group.errors import EPMismatchError, EPTimeoutError
from epmoe.rail.memory import FailedWords, RailMemory
from epmoe.rail.rail import Rail, RailError, Transfer

Tags = tuple[int, int, int] | None
"""`tags` of an EPMismatchError."""


class Failure(NamedTuple):
    """A timeout over the network, which every later call raises: the arguments of
    EPTimeoutError.
    """

    stage: str
    epoch: int
    missing: list[int]
    missing_global: list[int]
    why: str


@dataclass(eq=False, repr=False)
class Network:
    """A rail to the other nodes, and what has failed on it or in this node: every later call raises
    the `failure`.

    `control` is a gloo group of all ranks, by which hosts agree on sizes.
    """

    node: NodeExchange
    memory: RailMemory
    rail: Rail
    control: Rail
    global_ranks: list[int]
    rounds: RoundState
    deadlines: Deadlines

    def __post_init__(self) -> None:
        self.device = self.node.device
        self.rank = self.memory.of_rail(self.memory.node)
        self.views = self.node.views | self.memory.views
        self.failure: Failure | None = None
        # Held while a failure is recorded, until the node knows.
        self.recording = RLock()
        # Transfers of aborted rounds, which must end before the next round.
        self.pending: list[Transfer] = []
        self.failed_words = FailedWords(None, None, None)

    def start(self, transfer: Transfer) -> None:
        """Start a transfer, once: a second call starts what an exception has kept from it."""
        if transfer.started:
            return
        try:
            self.rail.start(transfer)
        except RailError:
            self.fail([])

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer that was started. Raises EPTimeoutError, after it has told the node,
        and RuntimeError if a signal handler aborts the round meanwhile.
        """
        look = partial(self.look, self.rounds.state)
        try:
            self.rail.wait(transfer, look)
        except RailError:
            self.fail(self.reported())
        look()

    def wait_for_pending(self) -> None:
        """Before a round: wait for the transfers of rounds that this rank has aborted."""
        while self.pending:
            self.wait(self.pending[0])
            self.pending.pop(0)

    def peek(self, name: str) -> list[Any]:
        """The values of a buffer of the plan now, whatever is under way."""
        return self.views[name].tolist()

    def largest(self, number: int) -> Callable[[], int]:
        """Find the largest number over all nodes, as `Exchange.largest`. Hosts tell one another by
        `control`.
        """
        self.check()
        # One number to each other rank, and one from it.
        rows = [int(rank != self.rank) for rank in range(len(self.global_ranks))]
        sent = torch.full((sum(rows),), number, device="cpu")
        transfer = Transfer(sent, torch.zeros_like(sent), rows, rows)
        return partial(self._await_largest, number, transfer)

    def _await_largest(self, number: int, transfer: Transfer) -> int:
        """Run the transfer of `largest`. Returns the largest number."""
        try:
            if not transfer.started:
                self.control.start(transfer)
            self.control.wait(transfer, self.look_at_node)
        except RailError:
            self.fail(self.control.missing([]))
        except EPTimeoutError as error:
            # It names more ranks: the others are to name them, too.
            self.control.missing(error.missing_ranks)
            raise
        return max(number, int(transfer.received.max()))

    def check(self) -> None:
        """Raise what was reported so far."""
        self.node.lookout.look()
        if self.failure is None and self.node.status.code:
            self.take_failure_of_node()
        if self.failure is not None:
            # The node must know of it first: the caller may leave at once.
            with self.recording:
                raise EPTimeoutError(*self.failure)

    def look(self, state: int) -> None:
        """During a wait for the rail, in a round in `state`: raise what the ranks of the node have
        reported.
        """
        if self.rounds.state != state:
            raise RuntimeError(f"round {self.rounds.count} was aborted while this call waited")
        self.look_at_node()

    def look_at_node(self) -> None:
        """During a wait for other nodes: raise what the ranks of the node have reported."""
        missing = self.node.missing()
        if missing:
            self.fail(self.reported() or self.memory.of_mask(missing))

    def fail(self, found: list[int]) -> NoReturn:
        """`record_failure`, and raise it: EPTimeoutError."""
        self.record_failure(found)
        self.check()
        raise AssertionError("check raises what was recorded")

    def record_failure(self, found: list[int]) -> None:
        """`keep_failure`, and tell the node and the rail which ranks are missing: `found`, if they
        are known.
        """
        missing = self.rail.missing(found)
        self.keep_failure(missing, "over the network")
        self.tell_node(missing[0])

    def keep_failure(self, missing: list[int], where: str) -> None:
        """Keep the failure for every later call. `where` is a part of its text."""
        # Transfers of aborted rounds are on their way back.
        is_combine = self.rounds.state in (DISPATCHED, RETURNING) or bool(self.pending)
        stage = STAGES[is_combine]
        global_ranks = [self.global_ranks[rank] for rank in missing]
        places = ", ".join(str(divmod(rank, self.memory.ranks_per_node)) for rank in missing)
        why = (
            f"got no answer {where} from rank(s) {missing} of the group, (node, local) {places}, "
            f"global rank(s) {global_ranks}: they ended, left the group, or were slower than "
            "exchange.timeout_s"
        )
        if self.rank in missing:
            why += ". This rank came too late, or its own kernel was not scheduled"
        self.failure = Failure(stage, self.rounds.count, missing, global_ranks, why)

    def tell_node(self, missing: int) -> None:
        """Name a missing rank to the ranks of this node, and end their waits."""
        self.node.report("rail.missed", missing + 1)
        self.node.end_waits()

    def reported(self) -> list[int]:
        """Ranks of other nodes that a rank of this node misses."""
        R = len(self.global_ranks)
        # 1 + a rank of the group, from each rank of the node.
        return [word - 1 for word in self.peek("rail.missed") if 0 < word <= R]

    def take_failure_of_node(self) -> None:
        """Keep a timeout that the node's exchange has reported. Raises its EPMismatchError and
        EPOrderError.
        """
        try:
            self.node.check()
        except EPMismatchError as error:
            ranks = self.memory.of_node(error.differing_ranks)
            tags = self.tags_of_group(error.tags)
            latched = self.node.processor.runs_ahead
            raise EPMismatchError(error.epoch, ranks, latched, tags) from None
        except EPTimeoutError as error:
            # A rank that a rank of this node misses on another node is the cause.
            reported = self.reported()
            missing = self.rail.missing(reported or self.memory.of_node(error.missing_ranks))
            where = "within the node"
            if reported:
                where = "over the network, as a rank of this node reports"
            self.keep_failure(missing, where)

    def tags_of_group(self, tags: Tags) -> Tags:
        """`tags` of an EPMismatchError of the node's exchange, with the rank numbered
        in the group.
        """
        if tags is None:
            return None
        mine, rank, theirs = tags
        [rank_of_group] = self.memory.of_node([rank])
        return mine, rank_of_group, theirs

    def note_mismatch(self, rank: int) -> None:
        """A call of this rank of the group does not match. On CPUs the round is closed, and that is
        all.
        """

    @property
    def failed(self) -> bool:
        """Whether a wait has failed on the rail or in the node."""
        return self.failure is not None or self.node.failed

    def missing(self) -> int:
        """Ranks of the group that are missing, as a mask."""
        if self.failure:
            ranks = self.failure.missing
        else:
            ranks = self.reported() or self.memory.of_mask(self.node.missing())
        return sum(1 << rank for rank in ranks)

    def close(self) -> None:
        self.rail.close()
        self.control.close()
        self.pending.clear()
