"""The exchange over several nodes: a rail to the other nodes, and inside each node the exchange of
one node.

    source rank                                    on each node, the rank of the same local index

    x ─ pack ─▶ slabs ─────────── rail ──────────▶ slabs ─ dispatch of the node ─▶ rows
                                                                                    │ experts
                                                                                    ▼
    y ◀─ sum in node order ◀───── rail ─────────── partial rows ◀─ combine of the node ─ outputs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.exchange.call import Call
from epmoe.exchange.exchange import Exchange, takes_turn
from epmoe.exchange.handles import Dispatched, Layout, Sent
from epmoe.exchange.health import COUNTERS, Health, raise_incomplete
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.outputs import refuse_layout, y_of
from epmoe.exchange.round_state import SENT
from epmoe.exchange.templates import Templates
from epmoe.group.errors import EPAbortedError, EPMismatchError, EPOverflowError, EPTimeoutError
from epmoe.rail.memory import RailMemory
from epmoe.rail.network import Network
from epmoe.rail.slabs import Mismatch, Slabs

# Counted at the source, before rows leave for other nodes; a node that counts them again does not
# count.
_AT_SOURCE = ("out_of_range_ids", "duplicate_ids", "nonfinite_weights")


class HierarchicalExchange(Exchange):
    """An `Exchange` over the nodes of a group, whose config it takes. `rank` and errors are of the
    group.

    The config of the exchange of this rank's `node` is `config.of_node()`.
    """

    slabs: Slabs  # of the last round

    def __init__(
        self, config: EPConfig, node: NodeExchange, memory: RailMemory, network: Network
    ) -> None:
        self.config = config
        self.node = node
        self.memory = memory
        self.network = network
        # Attributes of the interface are those of the node or of the network.
        self.plan = node.plan
        self.device = node.device
        self.processor = node.processor
        self.views = network.views
        self.rank = network.rank
        self.global_ranks = network.global_ranks
        self.rounds = network.rounds
        self.deadlines = network.deadlines
        self.templates = Templates(
            config, self.device, node.views, self.rounds, self.rank, self.plan.sizes, None
        )
        self._raises_overflow = config.capacity.on_overflow == "raise"
        self._raises_abort = config.exchange.on_abort == "raise"
        self._aborted: list[int] = []  # ranks of the group that aborted the last round
        self._aborted_rounds = [0] * len(self.global_ranks)  # of other nodes

    def dispatch(self, call: Call) -> Dispatched:
        sent = self.dispatch_send(call)
        return self.dispatch_recv(sent)

    @takes_turn
    def dispatch_send(self, call: Call) -> Sent:
        """Send rows to the other nodes, then open the node's round."""
        self.check()
        epoch = self.rounds.next_epoch()
        template, T = self.templates.of(call)
        # Slabs of rounds that this rank has aborted may still be on their way.
        self.network.wait_for_pending()

        # Open the round.
        if template.shape.extra is not None:
            call = self.templates.with_extra(call, template.shape.extra)
        operands = call.operands(T, self.device)
        sent = Sent(template, T, epoch, None, (), self.rounds.most_tokens)
        self.rounds.open(sent, call.tag)

        # Copy the tokens into a slab for each node.
        inside_epoch = self.node.rounds.count + 1
        slabs = Slabs(self.memory, template.shape, call, epoch, inside_epoch, sent.most_tokens)
        self.slabs = slabs
        slabs.pack(operands)

        # The round is open before other ranks can know: an abort then starts what is not started.
        self.rounds.advance()
        self.network.start(slabs.out)
        return sent

    @takes_turn
    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """Receive the rows of this node's ranks."""
        self.check()
        self.rounds.permit(sent, "dispatch_recv", "sent")
        slabs = self.slabs

        # The slabs of the other nodes. A signal handler may have kept the transfer from its start.
        self.network.start(slabs.out)
        self.network.wait(slabs.last)
        mismatch = slabs.mismatch()

        # Their rows go on to the experts, in a round of this node.
        try:
            slabs.inside = self._dispatch_inside(slabs, tells_mismatch=bool(mismatch.ranks))
        except EPMismatchError as error:
            ranks = mismatch.ranks or self.memory.of_node(error.differing_ranks)
            tags = mismatch.tags or self.network.tags_of_group(error.tags)
            self._raise_mismatch(ranks, mismatch._replace(tags=tags))
        except EPTimeoutError:
            # The rail may know more of it.
            self.check()
            raise
        if mismatch.ranks:
            self._raise_mismatch(mismatch.ranks, mismatch)

        self.rounds.advance()
        dispatched = self.rounds.receive(sent)
        self.check_open(dispatched)
        return dispatched

    @takes_turn
    def combine(
        self, layout: Layout, rows: Tensor, dispatched: Dispatched, out: Tensor | None
    ) -> Tensor:
        """With layout="rank" the rows are G slabs, each of N·S rows."""
        self.check_open(dispatched)
        call = "combine" if layout == "expert" else "combine_partial"
        self.rounds.permit(dispatched, call)
        if dispatched.layout != layout:
            refuse_layout(dispatched)
        self._send_back(rows, dispatched, out)
        return self._sum(dispatched)

    @takes_turn
    def combine_send(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        self.check_open(dispatched)
        self.rounds.permit(dispatched, "combine_send")
        self._send_back(rows, dispatched, out)

    @takes_turn
    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        self.check()
        self.rounds.permit(dispatched, "combine_recv")
        return self._sum(dispatched)

    def abort_open_round(self) -> None:
        """Abort the open round. The other nodes get zeros, and the own node no rows.

        The next dispatch waits for what is still on its way. Where the rail fails, the round stays
        open, and the next call raises the failure.
        """
        slabs = self.slabs
        try:
            if self.rounds.state == SENT:
                # The other nodes wait for the slabs; an exception may have come before their start.
                self.network.start(slabs.out)
                if not slabs.returning:
                    self.network.pending.append(slabs.last)
                # The ranks of this node wait for its dispatch.
                if self.node.rounds.count < slabs.inside_epoch:
                    self.node.dispatch_send(slabs.inside_call(slabs.no_rows(), slabs.shape.extra))
            self.node.abort(None)
            self._send_nothing_back(slabs, 1 << self.memory.local, 0, [])
        except EPTimeoutError:
            return
        self.rounds.close()

    def drop_reports(self) -> None:
        self._take_needed()
        self._aborted = []
        self.node.drop_reports()

    def check(self) -> None:
        self.network.check()

    def check_rounds(self) -> None:
        # Rows that found no room, on the way to another node or on a rank of this one.
        needed = self._take_needed()
        overflow = self.node.take_overflow()
        if needed:
            overflow = EPOverflowError(
                needed, self.slabs.slab_rows, "rows for one node", self.slabs.limit
            )
        if not self._raises_overflow:
            overflow = None

        # Ranks that have aborted the round, on any node.
        mask, _ = self.node.take_aborted()
        ranks = sorted({*self._aborted, *self.memory.of_mask(mask)})
        self._aborted = []
        aborted = None
        if ranks and self._raises_abort:
            aborted = EPAbortedError(self.rounds.count, ranks)
        raise_incomplete(overflow, aborted)

    @property
    def failed(self) -> bool:
        return self.network.failed

    def missing(self) -> int:
        return self.network.missing()

    def dead(self) -> int:
        return sum(1 << rank for rank in self.memory.of_mask(self.node.dead()))

    def end_waits(self) -> None:
        """Ranks of other nodes learn it by their rail. A failure names who is missing, not this
        rank.
        """
        with self.network.recording:
            if self.network.failure is None:
                self.node.end_waits()

    def largest(self, number: int) -> Callable[[], int]:
        """A slab for another node has the same length on all ranks, so they agree on it."""
        return self.network.largest(number)

    def health(self, wait: bool) -> Health:
        """Rows to the node's ranks and, on other nodes, to the rank of this rail. Pairs count at
        their source. Seconds of waits for the network do not count.
        """
        health = self.node.health(wait)
        peek = self.network.peek
        counted = dict(zip(COUNTERS, peek("rail.total.counters"), strict=True))

        # Counts by rank of the group: those of this rail, and of the ranks of this node.
        G = self.memory.ranks_per_node
        R = len(self.global_ranks)
        sent = [0] * R
        waited = [0.0] * R
        aborted = list(self._aborted_rounds)
        sent[self.memory.local :: G] = peek("rail.total.rows_sent")
        here = slice(self.memory.node * G, (self.memory.node + 1) * G)
        sent[here] = health.rows_sent
        waited[here] = health.waited_s
        aborted[here] = health.aborted_rounds

        # Numbers that the rail counts, alone or beside the node.
        numbers = {name: counted[name] for name in _AT_SOURCE}
        numbers["timeouts"] = max(health.timeouts, self.network.failure is not None)
        for name in ("dropped_pairs", "clamped_num_tokens"):
            numbers[name] = getattr(health, name) + counted[name]
        return dataclasses.replace(
            health, rows_sent=sent, waited_s=waited, aborted_rounds=aborted, **numbers
        )

    def release(self) -> None:
        self.node.thread = self.thread
        # The rail's thread may be telling the node of a failure, so the node ends it.
        self.node.release(self.network.close)
        # Transfers of slabs keep connections open.
        vars(self).pop("slabs", None)

    def _dispatch_inside(self, slabs: Slabs, *, tells_mismatch: bool) -> Dispatched:
        """Open the node's round of dispatch, with the rows of all slabs. `tells_mismatch`: it has a
        shape that the other ranks of the node notice.
        """
        node = self.node
        # A Ctrl-C has ended the wait of an earlier call.
        opened = node.rounds.handle
        if isinstance(opened, Sent) and node.rounds.state == SENT:
            return node.dispatch_recv(opened)
        if tells_mismatch:
            call = slabs.inside_call(slabs.smallest_rows(), None)
        else:
            call = slabs.inside_call(slabs.rows(), slabs.shape.extra)
        return node.dispatch(call)

    def _send_back(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        """The phase of combine inside of the node that sends rows back to its ranks."""
        y = y_of(dispatched, out, self.device)
        self.node.combine_send(rows, self.slabs.inside)
        self.rounds.y = y
        self.rounds.advance()

    def _sum(self, dispatched: Dispatched) -> Tensor:
        """Finish combine: send partial rows to the nodes of their tokens, and sum them there.
        Returns y. Raises what `poll` does.
        """
        slabs = self.slabs
        y = self.rounds.y
        assert y is not None

        # This node's sums of rows, unless a Ctrl-C has ended the wait below in an earlier call.
        if not slabs.returning:
            try:
                partial_rows = self.node.combine_recv(slabs.inside)
            except (EPMismatchError, EPTimeoutError):
                # The rail may know more of it.
                self.check()
                raise
            self.network.start(slabs.back(partial_rows, self._take_aborted()))

        # Those of the other nodes, and what their ranks report.
        self.network.wait(slabs.last)
        reports = slabs.reports()
        if reports.differing:
            self.rounds.close()
            raise EPMismatchError(dispatched.epoch, reports.differing, False)

        slabs.sum(y, self.network.failed_words)
        for rank in reports.aborted:
            self._aborted_rounds[rank] += 1
        self._aborted = sorted({*self._aborted, *reports.aborted})
        self.rounds.close()
        self.poll()
        return y

    def _raise_mismatch(self, ranks: list[int], found: Mismatch) -> NoReturn:
        """Close the round, and raise EPMismatchError for these ranks. `found` are the ranks' calls
        by the slabs, with the tags that the error has.

        The node is told by a call of another shape, so its other ranks do not learn what differs.
        On CPUs the rail's way back is as in any round: ranks that do not know of the mismatch have
        begun theirs.
        """
        epoch = self.rounds.count
        runs_ahead = self.processor.runs_ahead
        self.network.note_mismatch(ranks[0])
        self.node.abort(None)
        if not runs_ahead:
            self._send_nothing_back(self.slabs, 0, ranks[0] + 1, found.ranks)
        self.rounds.close()
        raise EPMismatchError(
            epoch, ranks, latched=runs_ahead, tags=found.tags, differences=found.differences
        )

    def _send_nothing_back(
        self, slabs: Slabs, aborted: int, mismatch: int, differing: list[int]
    ) -> None:
        """Send `Slabs.nothing_back`, unless partial rows are on their way already; the next round
        waits for either.
        """
        if not slabs.returning:
            like = self.rounds.sent.template.like
            self.network.start(slabs.nothing_back(like, aborted, mismatch, differing))
        self.network.pending.append(slabs.last)

    def _take_needed(self) -> int:
        """Rows that a slab should have had since the last call, or 0."""
        needed = int(self.views["rail.total.needed"])
        self.views["rail.total.needed"][0] = 0
        return needed

    def _take_aborted(self) -> int:
        """The ranks of this node that have aborted its round, as a mask. On GPUs `check_rounds`
        reports them.
        """
        if self.processor.runs_ahead:
            return 0
        mask, _ = self.node.take_aborted()
        self._aborted = self.memory.of_mask(mask)
        return mask
