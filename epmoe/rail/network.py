"""The network of a rank on a CPU: it runs transfers over the rail, waits for them on the host, and
keeps what has failed. network_cuda.py has the network of a rank on a GPU.
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
"""The `tags` of an EPMismatchError: this rank's tag, another rank, and the tag of that rank."""


class Failure(NamedTuple):
    """The arguments of the EPTimeoutError that every call raises after a failure of the network."""

    stage: str
    epoch: int
    missing: list[int]
    missing_global: list[int]
    why: str


@dataclass(eq=False, repr=False)
class Network:
    """The rail from this rank to the other nodes. It keeps the first failure of the rail or of the
    exchange inside this node, in `failure`, and raises it again in every later call.

    `rail` connects this rank with the ranks of the same local index on the other nodes. `control`
    connects the hosts of all ranks; they agree on sizes over it.
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
        self.rank = self.memory.rank_on(self.memory.node)
        self.views = self.node.views | self.memory.views
        self.failure: Failure | None = None
        # A thread holds this lock while it records a failure, until the node was told of it.
        self.recording = RLock()
        # The transfers of aborted rounds. They must end before the next round begins.
        self.pending: list[Transfer] = []
        self.failed_words = FailedWords(missed=None, latched=None, noticed=None)

    def start(self, transfer: Transfer) -> None:
        """Start a transfer, unless it was started before. So a caller may call again after an
        exception, when it does not know whether the transfer was started.
        """
        if transfer.started:
            return
        try:
            self.rail.start(transfer)
        except RailError:
            self.fail([])

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer that was started.

        Raises EPTimeoutError if the transfer fails; the ranks of the node are told before. Raises
        RuntimeError if a signal handler aborts the round meanwhile.
        """
        look = partial(self.look, self.rounds.state)
        try:
            self.rail.wait(transfer, look)
        except RailError:
            self.fail(self.reported())
        look()

    def wait_for_pending(self) -> None:
        """Wait for the transfers of rounds that this rank has aborted. `dispatch_send` calls it
        before a new round.
        """
        while self.pending:
            self.wait(self.pending[0])
            self.pending.pop(0)

    def peek(self, name: str) -> list[Any]:
        """Read the present values of a buffer, without a wait for kernels or transfers."""
        return self.views[name].tolist()

    def largest(self, number: int) -> Callable[[], int]:
        """Find the largest number that a rank of the group has given, see `Exchange.largest`. The
        hosts exchange the numbers over `control`. Returns a function that waits for the result.
        """
        self.check()
        # Each rank sends one number to each other rank.
        rows = [int(rank != self.rank) for rank in range(len(self.global_ranks))]
        sent = torch.full((sum(rows),), number, device="cpu")
        transfer = Transfer(
            sent=sent, received=torch.zeros_like(sent), sent_rows=rows, received_rows=rows
        )
        return partial(self._await_largest, number, transfer)

    def _await_largest(self, number: int, transfer: Transfer) -> int:
        """Run the transfer of `largest`, and return the largest of all numbers. `number` is the one
        that this rank has given.
        """
        try:
            if not transfer.started:
                self.control.start(transfer)
            self.control.wait(transfer, self.look_at_node)
        except RailError:
            self.fail(self.control.missing([]))
        except EPTimeoutError as error:
            # This error names ranks that the hosts of other nodes may not know to be missing.
            # Report them, so that the errors of the other hosts name them, too.
            self.control.missing(error.missing_ranks)
            raise
        return max(number, int(transfer.received.max()))

    def check(self) -> None:
        """Raise the failure of the network or of the node, if one was reported so far."""
        self.node.lookout.look()
        if self.failure is None and self.node.status.code:
            self.take_failure_of_node()
        if self.failure is not None:
            # Another thread may still be telling the node of the failure. Wait for the end of that:
            # the caller may close its windows as soon as it gets the error.
            with self.recording:
                raise EPTimeoutError(*self.failure)

    def look(self, state: int) -> None:
        """Raise what the ranks of the node have reported. It is called now and then while this rank
        waits for the rail.

        `state` is the state of the round when the wait began. Raises RuntimeError if the round has
        left this state, which means that a signal handler has aborted it.
        """
        if self.rounds.state != state:
            raise RuntimeError(f"round {self.rounds.count} was aborted while this call waited")
        self.look_at_node()

    def look_at_node(self) -> None:
        """Raise what the ranks of the node have reported. It is called now and then while this rank
        waits for other nodes.
        """
        missing = self.node.missing()
        if missing:
            self.fail(self.reported() or self.memory.group_ranks_of_mask(missing))

    def fail(self, found: list[int]) -> NoReturn:
        """Record a failure, and raise it as EPTimeoutError. `found` are the ranks that are known to
        be missing.
        """
        self.record_failure(found)
        self.check()
        raise AssertionError("check raises what was recorded")

    def record_failure(self, found: list[int]) -> None:
        """Find out who is missing, keep the failure, and tell the ranks of this node.

        `found` are the ranks that are known to be missing, numbered in the group. If it is empty,
        the ranks of the rail ask one another.
        """
        missing = self.rail.missing(found)
        self.keep_failure(missing, "over the network")
        self.tell_node(missing[0])

    def keep_failure(self, missing: list[int], where: str) -> None:
        """Keep the failure in `failure`, which every later call raises. `where` is a part of the
        text of its error.
        """
        # Pending transfers belong to aborted rounds, and carry rows of combine.
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
        self.failure = Failure(
            stage=stage,
            epoch=self.rounds.count,
            missing=missing,
            missing_global=global_ranks,
            why=why,
        )

    def tell_node(self, missing: int) -> None:
        """Tell the ranks of this node that rank `missing` of the group is missing, and end their
        waits.
        """
        self.node.report("rail.missed", missing + 1)
        self.node.end_waits()

    def reported(self) -> list[int]:
        """Read which ranks of other nodes are missing, as the ranks of this node report it."""
        R = len(self.global_ranks)
        # Each rank of the node has a word: 0, or 1 + the number of a rank of the group.
        return [word - 1 for word in self.peek("rail.missed") if 0 < word <= R]

    def take_failure_of_node(self) -> None:
        """Keep a timeout that the exchange inside the node has reported. Its other errors,
        EPMismatchError and EPOrderError, are raised.
        """
        try:
            self.node.check()
        except EPMismatchError as error:
            ranks = self.memory.group_ranks(error.differing_ranks)
            tags = self.tags_of_group(error.tags)
            latched = self.node.processor.runs_ahead
            raise EPMismatchError(error.epoch, ranks, latched=latched, tags=tags) from None
        except EPTimeoutError as error:
            # Ranks of this node may miss a rank of another node. Then that rank is the cause, and
            # not the rank of this node for which this rank has waited.
            reported = self.reported()
            missing = self.rail.missing(reported or self.memory.group_ranks(error.missing_ranks))
            where = "within the node"
            if reported:
                where = "over the network, as a rank of this node reports"
            self.keep_failure(missing, where)

    def tags_of_group(self, tags: Tags) -> Tags:
        """Renumber the rank in the `tags` of an EPMismatchError: from its number in this node to
        its number in the group.
        """
        if tags is None:
            return None
        mine, rank, theirs = tags
        [rank_of_group] = self.memory.group_ranks([rank])
        return mine, rank_of_group, theirs

    def note_mismatch(self, rank: int) -> None:
        """Note that the call of `rank`, a rank of the group, differs from this rank's.

        On CPUs there is nothing to note: the round is closed, and the next round works. The
        network of GPUs overrides this method.
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
            ranks = self.reported() or self.memory.group_ranks_of_mask(self.node.missing())
        return sum(1 << rank for rank in ranks)

    def close(self) -> None:
        self.rail.close()
        self.control.close()
        self.pending.clear()
