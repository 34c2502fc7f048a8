"""The exchange over several nodes: a rail to the other nodes, and inside each node the exchange of one node.

source rank ─ pack ─▶ slabs ─ rail ─▶ rank of the same local index on each node ─ dispatch of the node ─▶ experts
y ◀─ sum in node order ─ partial rows ◀─ rail ─ partial rows of each node ◀─ combine of the node ──────────┘
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import Deadlines
from epmoe.config.tuning import Tuning
from epmoe.exchange.call import Call
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import Dispatched, Layout, Sent
from epmoe.exchange.health import (
    COUNTERS,
    STAGES,
    EPAbortedError,
    EPMismatchError,
    EPOverflowError,
    EPTimeoutError,
    Health,
    raise_incomplete,
)
from epmoe.exchange.mismatch import Differences
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.outputs import refuse_layout, y_of
from epmoe.exchange.round_state import DISPATCHED, PROGRESS, RETURNING, SENT, RoundState
from epmoe.exchange.templates import Launches, Templates
from epmoe.native.arguments import describe, dtype_name
from epmoe.rail.memory import RailMemory
from epmoe.rail.rail import Load, Rail, RailError, Transfer
from epmoe.rail.slabs import Slabs

# Counted at the source, before rows leave for other nodes; a node that counts them again does not count.
_AT_SOURCE = ("out_of_range_ids", "duplicate_ids", "nonfinite_weights")

Tags = tuple[int, int, int] | None
"""`tags` of an EPMismatchError."""


class Failure(NamedTuple):
    """A timeout over the network, which every later call raises: the arguments of EPTimeoutError."""

    stage: str
    epoch: int
    missing: list[int]
    missing_global: list[int]
    why: str


@dataclass(eq=False, repr=False)
class HierarchicalExchange(Exchange):
    """An `Exchange` over the nodes of a group. `rank` and errors are of the group.

    Args:
        config: of the whole group, with more than one node.
        node: the exchange of this rank's node, whose config is `config.of_node()`.
        memory: of this rank, for the rail.
        rail: to the ranks of the same local index on the other nodes.
        everyone: a rail of all ranks of the group, for numbers of the hosts.
        global_ranks: [R], of each rank of the group.
        deadlines: of both rails.
    """

    config: EPConfig
    node: NodeExchange
    memory: RailMemory
    rail: Rail
    everyone: Rail
    global_ranks: list[int]
    deadlines: Deadlines

    def __post_init__(self) -> None:
        config, node, memory = self.config, self.node, self.memory
        self.plan, self.device = node.plan, node.device
        self.rank = memory.of_rail(memory.node)
        self.views = node.views | memory.views
        self.rounds = RoundState((c_int64 * len(PROGRESS))())
        self.templates = Templates(
            config, self.device, node.views, self.rounds, self.rank, self.plan.sizes, _no_launches
        )
        self.slabs: Slabs | None = None  # of the open round
        # Of aborted rounds, with what must live until they have ended.
        self.pending: list[tuple[Transfer, Slabs]] = []
        self.failure: Failure | None = None
        self._raises_overflow = config.capacity.on_overflow == "raise"
        self._raises_abort = config.exchange.on_abort == "raise"
        self._aborted: list[int] = []  # ranks of the group that aborted the last round
        self._aborted_rounds = [0] * len(self.global_ranks)  # of other nodes

    def dispatch(self, call: Call) -> Dispatched:
        return self.dispatch_recv(self.dispatch_send(call))

    def dispatch_send(self, call: Call) -> Sent:
        """Pack the slabs and start their transfer."""
        outer = self.enter()
        try:
            self.check()
            epoch = self.rounds.next_epoch()
            template, T = self.templates.of(call)
            self._check_dtype(call.x)
            self._check_padded_tokens(call.padded_tokens)
            self.wait_for_pending()
            if epoch == 2:  # no rank loads or compiles any more
                self.deadlines.first = False
            operands = call.operands(T, self.device)
            sent = self.rounds.open(template, T, epoch, call.tag, None, ())
            self.slabs = slabs = Slabs(self, self.memory, call, epoch, self.node.rounds.count + 1)
            slabs.pack(operands)
            self.rounds.advance()  # before other ranks can know: an abort then starts what is not started
            slabs.start()
            return sent
        finally:
            self.thread = outer

    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """Wait for the slabs of the other nodes, and dispatch their rows in the node."""
        outer = self.enter()
        try:
            self.check()
            self.rounds.permit(sent, "dispatch_recv", "sent")
            slabs, node = self._open_slabs(), self.node
            slabs.finish()
            self.wait(slabs.transfer)
            differing, tags, differences = slabs.differing()
            try:
                if isinstance(opened := node.rounds.handle, Sent) and node.rounds.state == SENT:  # after a Ctrl-C
                    slabs.inside = node.dispatch_recv(opened)
                else:  # the other ranks of the node notice a mismatch
                    rows = slabs.smallest_rows() if differing else slabs.rows()
                    slabs.inside = node.dispatch(slabs.inside_call(rows))
            except EPMismatchError as error:
                ranks = differing or self._of_group(error.differing_ranks)
                self.mismatch(ranks, differing, tags or self._tags_of_group(error.tags), differences)
            except EPTimeoutError:
                self.check()
                raise
            if differing:
                self.mismatch(differing, differing, tags, differences)
            self.rounds.advance()
            dispatched = self.rounds.receive(sent)
            self.check_open(dispatched)
            return dispatched
        finally:
            self.thread = outer

    def combine(self, layout: Layout, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> Tensor:
        """With layout="rank" the rows are G slabs, each of N·S rows."""
        outer = self.enter()
        try:
            self.check_open(dispatched)
            self.rounds.permit(dispatched, "combine" if layout == "expert" else "combine_partial")
            if dispatched.layout != layout:
                refuse_layout(dispatched)
            self._send_back(rows, dispatched, out)
            return self._sum(dispatched)
        finally:
            self.thread = outer

    def combine_send(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        """The send phase of the node's combine."""
        outer = self.enter()
        try:
            self.check_open(dispatched)
            self.rounds.permit(dispatched, "combine_send")
            self._send_back(rows, dispatched, out)
        finally:
            self.thread = outer

    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        """Then the way back to the sources, and their sums."""
        outer = self.enter()
        try:
            self.check()
            self.rounds.permit(dispatched, "combine_recv")
            return self._sum(dispatched)
        finally:
            self.thread = outer

    def abort_open_round(self) -> None:
        """The other nodes get zeros, and the own node no rows.

        The next dispatch waits for what is still on its way. With exact splits this call waits for the rail once; where
        that fails, the round stays open, and the next call raises the failure.
        """
        slabs, differing = self._open_slabs(), list[int]()
        try:
            if self.rounds.state == SENT:
                slabs.start()  # an exception may have come first
                slabs.finish()
                if not slabs.returning:
                    self.pending.append((slabs.transfer, slabs))
                if self.memory.exact:
                    differing, _, _ = slabs.differing()
                if self.node.rounds.count < slabs.inside_epoch:
                    self.node.dispatch_send(slabs.inside_call(slabs.no_rows()))
            self.node.abort(None)
            self._send_nothing_back(slabs, 1 << self.memory.local, 0, differing)
        except EPTimeoutError:
            return
        self.rounds.close()

    def drop_reports(self) -> None:
        self._take_needed()
        self._aborted = []
        self.node.drop_reports()

    def start(self, load: Load, started: list[Transfer]) -> None:
        """Start a transfer on the rail; see `Rail.start`."""
        try:
            self.rail.start(load, started)
        except RailError:
            self._fail([])

    def wait(self, transfer: Transfer, returning: bool = False) -> None:
        """Wait for a transfer.

        Raises EPTimeoutError, which names the missing ranks; the node is told of them. Raises RuntimeError if a signal
        handler aborts the round meanwhile.
        """
        look = partial(self.look, self.rounds.state)
        try:
            self.rail.wait(transfer, look, returning)
        except RailError:
            self._fail(self.reported())
        look()

    def to_host(self, *tensors: Tensor) -> list[list[Any]]:
        """The values of tensors of the device."""
        return [tensor.tolist() for tensor in tensors]

    def peek(self, name: str) -> list[Any]:
        """The values of a buffer of the plan now, whatever is under way."""
        return self.views[name].tolist()

    def largest(self, number: int) -> Callable[[], int]:
        """A slab for another node has the same length on all ranks, so they agree on it."""
        self.check()
        rows = [int(rank != self.rank) for rank in range(len(self.global_ranks))]
        sent = torch.full((sum(rows),), number, device="cpu")
        received, started = torch.zeros_like(sent), list[Transfer]()

        def wait() -> int:
            try:
                if not started:
                    self.everyone.start(Load(sent, received, rows, rows), started)
                self.everyone.wait(started[0], self.look_at_node)
            except RailError:
                self._fail(self.everyone.missing([]))
            except EPTimeoutError as error:  # which names more ranks; the others get their names
                self.everyone.missing(error.missing_ranks)
                raise
            return max(number, int(received.max()))

        return wait

    def has_more_rounds(self) -> bool:
        """As `Exchange.has_more_rounds`, which no caller needs here: see `largest`."""
        raise RuntimeError("over several nodes ranks agree on their rounds before the first one")

    def wait_for_pending(self) -> None:
        """Before a round: wait for the transfers of rounds that this rank has aborted."""
        while self.pending:
            self.wait(self.pending[0][0])
            self.pending.pop(0)

    def record_failure(self, found: list[int]) -> None:
        """Keep a failure of the rail for every later call, and tell the node and the rail which ranks are missing.

        Args:
            found: the missing ranks, if they are known.
        """
        missing = self.rail.missing(found)
        self.keep_failure(missing, "over the network")
        self.tell_node(missing[0])

    def keep_failure(self, missing: list[int], where: str) -> None:
        """Keep the failure for every later call."""
        stage = STAGES[self.rounds.state in (DISPATCHED, RETURNING) or bool(self.pending)]
        global_ranks = [self.global_ranks[rank] for rank in missing]
        why = _no_answer(missing, global_ranks, self.memory.ranks_per_node, where, self.rank)
        self.failure = Failure(stage, self.rounds.count, missing, global_ranks, why)

    def tell_node(self, missing: int) -> None:
        """Name a missing rank to the ranks of this node, and end their waits."""
        self.node.report("rail.missed", missing + 1)
        self.node.end_waits()

    def reported(self) -> list[int]:
        """Ranks of other nodes that a rank of this node misses."""
        return [word - 1 for word in self.peek("rail.missed") if 0 < word <= len(self.global_ranks)]

    def take_failure_of_node(self) -> None:
        """Keep a timeout that the node's exchange has reported. Raises its EPMismatchError and EPOrderError."""
        try:
            self.node.check()
        except EPMismatchError as error:
            ranks, tags = self._of_group(error.differing_ranks), self._tags_of_group(error.tags)
            raise EPMismatchError(error.epoch, ranks, self.device.type == "cuda", tags) from None
        except EPTimeoutError as error:
            missing = self.rail.missing((reported := self.reported()) or self._of_group(error.missing_ranks))
            where = "over the network, as a rank of this node reports" if reported else "within the node"
            self.keep_failure(missing, where)

    def look(self, state: int) -> None:
        """During a wait for the rail, in a round in `state`: raise what the ranks of the node have reported."""
        if self.rounds.state != state:
            raise RuntimeError(f"round {self.rounds.count} was aborted while this call waited")
        self.look_at_node()

    def look_at_node(self) -> None:
        """Raise what the ranks of the node have reported."""
        if missing := self.node.missing():
            self._fail(self.reported() or self._ranks_of(missing))

    def mismatch(self, ranks: list[int], on_rail: list[int], tags: Tags, differences: Differences) -> NoReturn:
        """Close the round, and raise EPMismatchError for these ranks, of which `on_rail` are on this rail.

        Within a node a rank stands for what it has found on its rail by a call of another shape, so what differs there
        is not told.

        On CPUs the rail's way back is as in any round: ranks that do not know of the mismatch have begun theirs.
        """
        epoch = self.rounds.count
        self.node.abort(None)
        if self.device.type == "cpu":
            self._send_nothing_back(self._open_slabs(), 0, ranks[0] + 1, on_rail)
        self.rounds.close()
        raise EPMismatchError(epoch, ranks, self.device.type == "cuda", tags, differences)

    def check(self) -> None:
        self.node.look()
        if self.failure is None and self.node.code:
            self.take_failure_of_node()
        if self.failure is not None:
            raise EPTimeoutError(*self.failure)

    def check_rounds(self) -> None:
        """As `Exchange.check_rounds`, also if a slab had too little room."""
        needed, overflow = self._take_needed(), self.node.take_overflow()
        if needed and self.slabs is not None:
            overflow = EPOverflowError(needed, self.slabs.slab_rows, "rows for one node", self.slabs.limit)
        mask, _ = self.node.take_aborted()
        ranks, self._aborted = sorted({*self._aborted, *self._ranks_of(mask)}), []
        raise_incomplete(
            overflow if self._raises_overflow else None,
            EPAbortedError(self.rounds.count, ranks) if ranks and self._raises_abort else None,
        )

    def _take_needed(self) -> int:
        """Rows that a slab lacked in rounds since the last call."""
        needed, self.views["rail.total.needed"][0] = int(self.views["rail.total.needed"]), 0
        return needed

    @property
    def failed(self) -> bool:
        return self.failure is not None or self.node.failed

    def missing(self) -> int:
        ranks = self.failure.missing if self.failure else self.reported() or self._ranks_of(self.node.missing())
        return sum(1 << rank for rank in ranks)

    def dead(self) -> int:
        return sum(1 << rank for rank in self._ranks_of(self.node.dead()))

    def end_waits(self) -> None:
        """As `Exchange.end_waits`; ranks of other nodes learn it by their rail."""
        if not self.failed:
            self.node.end_waits()

    def retune(self, tuning: Tuning) -> None:
        self.node.retune(tuning)

    def health(self, wait: bool) -> Health:
        """What the node's ranks are sent, and on other nodes the rank of this rail.

        Pairs are counted at their source. Seconds of waits for the network are not counted.
        """
        health = self.node.health(wait)
        counted = dict(zip(COUNTERS, self.peek("rail.total.counters"), strict=True))
        own = {name: counted[name] for name in _AT_SOURCE}
        G, R = self.memory.ranks_per_node, len(self.global_ranks)
        sent, waited, aborted = [0] * R, [0.0] * R, list(self._aborted_rounds)
        sent[self.memory.local :: G] = self.peek("rail.total.rows_sent")
        here = slice(self.memory.node * G, (self.memory.node + 1) * G)
        sent[here], waited[here], aborted[here] = health.rows_sent, health.waited_s, health.aborted_rounds
        own["timeouts"] = max(health.timeouts, self.failure is not None)
        for name in ("dropped_pairs", "clamped_num_tokens"):
            own[name] = getattr(health, name) + counted[name]
        return dataclasses.replace(health, rows_sent=sent, waited_s=waited, aborted_rounds=aborted, **own)

    def release(self) -> None:
        self.node.release(self.memory)
        self.rail.close()
        self.everyone.close()
        self.slabs = None  # transfers keep connections open
        self.pending.clear()

    @property
    def failed_words(self) -> tuple[Tensor | None, Tensor | None]:
        """On GPUs the words that make the sums zeros once the rail or the node's exchange has failed."""
        return None, None

    def _open_slabs(self) -> Slabs:
        assert self.slabs is not None
        return self.slabs

    def _send_back(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        y = y_of(dispatched, out, self.device)
        self.node.combine_send(rows, self._open_slabs().inside)
        self.rounds.give_back(y)
        self.rounds.advance()

    def _sum(self, dispatched: Dispatched) -> Tensor:
        slabs, y = self._open_slabs(), self.rounds.y
        assert y is not None
        if not slabs.returning:  # otherwise a Ctrl-C has ended the wait below
            try:
                partial_rows = self.node.combine_recv(slabs.inside)
            except (EPMismatchError, EPTimeoutError):
                self.check()
                raise
            slabs.send_back(partial_rows, self._take_aborted())
        self.wait(slabs.transfer, returning=True)
        elsewhere, differing = slabs.reports()
        if differing:
            self.rounds.close()
            raise EPMismatchError(dispatched.epoch, differing, False)
        slabs.sum(y, self.failed_words)
        for rank in elsewhere:
            self._aborted_rounds[rank] += 1
        self._aborted = sorted({*self._aborted, *elsewhere})
        self.rounds.close()
        self.poll()
        return y

    def _take_aborted(self) -> int:
        """The ranks of this node that have aborted its round, as a mask. On GPUs `check_rounds` reports them."""
        if self.device.type == "cuda":
            return 0
        mask, _ = self.node.take_aborted()
        self._aborted = self._ranks_of(mask)
        return mask

    def _send_nothing_back(self, slabs: Slabs, aborted: int, mismatch: int, differing: list[int]) -> None:
        """As `Slabs.send_nothing_back`, unless partial rows are on their way already; the next round waits for them."""
        if not slabs.returning:
            slabs.send_nothing_back(self.rounds.sent.template.like, aborted, mismatch, differing)
        self.pending.append((slabs.transfer, slabs))

    def _fail(self, found: list[int]) -> NoReturn:
        """`record_failure`, and raise it: EPTimeoutError."""
        self.record_failure(found)
        self.check()
        raise AssertionError("check raises what was recorded")

    def _ranks_of(self, mask: int) -> list[int]:
        """The ranks of a mask of the node's ranks, numbered in the group."""
        return self._of_group([rank for rank in range(self.memory.ranks_per_node) if mask >> rank & 1])

    def _of_group(self, ranks: list[int]) -> list[int]:
        """Ranks of the node, numbered in the group."""
        return [self.memory.node * self.memory.ranks_per_node + rank for rank in ranks]

    def _tags_of_group(self, tags: Tags) -> Tags:
        """`tags` of an EPMismatchError of the node's exchange, with the rank numbered in the group."""
        return tags and (tags[0], self._of_group([tags[1]])[0], tags[2])

    def _check_padded_tokens(self, padded_tokens: int | None) -> None:
        """Raises TypeError or ValueError for what cannot be the rows of a padded slab."""
        S = self.memory.rows_per_node
        if padded_tokens is None:
            return
        if isinstance(padded_tokens, bool) or not isinstance(padded_tokens, int):
            raise TypeError(f"`padded_tokens` must be an int, got {describe(padded_tokens)}")
        if not 1 <= padded_tokens <= S:
            raise ValueError(f"`padded_tokens` must be from 1 to {S}, the rows of a slab, got {padded_tokens}")

    def _check_dtype(self, x: Tensor) -> None:
        """Raises TypeError for rows that combine would bring back in another dtype: all rows reach a node quantized."""
        dtype, element = self.config.model.torch_dtype, self.memory.payload.element
        if element and x.dtype is not element and x.dtype is not dtype:
            raise TypeError(
                f"`x` must be {dtype} or {dtype_name(element)}, as rows reach the nodes as "
                f"{self.memory.payload.name}, got {describe(x)}"
            )


def _no_launches(hidden_size: int, expert_major: bool, weight_rows: bool, aligned: bool) -> Launches:
    """Calls inside of the nodes have descriptors of their own."""
    return [], []


def _no_answer(missing: list[int], global_ranks: list[int], ranks_per_node: int, where: str, rank: int) -> str:
    """The end of the sentence of an EPTimeoutError that names missing ranks of several nodes to `rank`."""
    places = ", ".join(str(divmod(one, ranks_per_node)) for one in missing)
    why = (
        f"got no answer {where} from rank(s) {missing} of the group, (node, local) {places}, "
        f"global rank(s) {global_ranks}: they ended, left the group, or were slower than exchange.timeout_s"
    )
    return f"{why}. This rank came too late, or its own kernel was not scheduled" if rank in missing else why
