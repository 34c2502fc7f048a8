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
from epmoe.exchange.mismatch import Differences
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.outputs import refuse_layout, y_of
from epmoe.exchange.round_state import SENT
from epmoe.exchange.templates import Templates
from epmoe.group.errors import EPAbortedError, EPMismatchError, EPOverflowError, EPTimeoutError
from epmoe.rail.memory import RailMemory
from epmoe.rail.network import Network, Tags
from epmoe.rail.slabs import Slabs

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
        self.plan = node.plan
        self.device = node.device
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
        self.check()
        epoch = self.rounds.next_epoch()
        template, T = self.templates.of(call)
        self.network.wait_for_pending()
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
        self.check()
        self.rounds.permit(sent, "dispatch_recv", "sent")
        slabs = self.slabs
        node = self.node
        self.network.start(slabs.out)  # a signal handler may have kept it from its start
        self.network.wait(slabs.last)
        differing, tags, differences = slabs.differing()
        try:
            opened = node.rounds.handle
            if isinstance(opened, Sent) and node.rounds.state == SENT:  # after a Ctrl-C
                slabs.inside = node.dispatch_recv(opened)
            else:  # the other ranks of the node notice a mismatch
                rows = slabs.rows()
                extra = slabs.shape.extra
                if differing:
                    rows = slabs.smallest_rows()
                    extra = None
                slabs.inside = node.dispatch(slabs.inside_call(rows, extra))
        except EPMismatchError as error:
            ranks = differing or self.memory.of_node(error.differing_ranks)
            tags = tags or self.network.tags_of_group(error.tags)
            self._mismatch(ranks, differing, tags, differences)
        except EPTimeoutError:
            self.check()
            raise
        if differing:
            self._mismatch(differing, differing, tags, differences)
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
        self.rounds.permit(dispatched, "combine" if layout == "expert" else "combine_partial")
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
        """The other nodes get zeros, and the own node no rows.

        The next dispatch waits for what is still on its way. Where the rail fails, the round stays
        open, and the next call raises the failure.
        """
        slabs = self.slabs
        try:
            if self.rounds.state == SENT:
                self.network.start(slabs.out)  # an exception may have come first
                if not slabs.returning:
                    self.network.pending.append(slabs.last)
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
        needed = self._take_needed()
        overflow = self.node.take_overflow()
        if needed:
            overflow = EPOverflowError(
                needed, self.slabs.slab_rows, "rows for one node", self.slabs.limit
            )
        mask, _ = self.node.take_aborted()
        ranks = sorted({*self._aborted, *self.memory.of_mask(mask)})
        self._aborted = []
        raise_incomplete(
            overflow if self._raises_overflow else None,
            EPAbortedError(self.rounds.count, ranks) if ranks and self._raises_abort else None,
        )

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
        own = {name: counted[name] for name in _AT_SOURCE}
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
        own["timeouts"] = max(health.timeouts, self.network.failure is not None)
        for name in ("dropped_pairs", "clamped_num_tokens"):
            own[name] = getattr(health, name) + counted[name]
        return dataclasses.replace(
            health, rows_sent=sent, waited_s=waited, aborted_rounds=aborted, **own
        )

    def release(self) -> None:
        self.node.thread = self.thread
        self.node.release(self.network.close)  # whose thread may be telling the node of a failure
        vars(self).pop("slabs", None)  # whose transfers keep connections open

    def _send_back(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        y = y_of(dispatched, out, self.device)
        self.node.combine_send(rows, self.slabs.inside)
        self.rounds.y = y
        self.rounds.advance()

    def _sum(self, dispatched: Dispatched) -> Tensor:
        slabs = self.slabs
        y = self.rounds.y
        assert y is not None
        if not slabs.returning:  # otherwise a Ctrl-C has ended the wait below
            try:
                partial_rows = self.node.combine_recv(slabs.inside)
            except (EPMismatchError, EPTimeoutError):
                self.check()
                raise
            self.network.start(slabs.back(partial_rows, self._take_aborted()))
        self.network.wait(slabs.last)
        elsewhere, differing = slabs.reports()
        if differing:
            self.rounds.close()
            raise EPMismatchError(dispatched.epoch, differing, False)
        slabs.sum(y, self.network.failed_words)
        for rank in elsewhere:
            self._aborted_rounds[rank] += 1
        self._aborted = sorted({*self._aborted, *elsewhere})
        self.rounds.close()
        self.poll()
        return y

    def _mismatch(
        self, ranks: list[int], on_rail: list[int], tags: Tags, differences: Differences
    ) -> NoReturn:
        """Close the round, and raise EPMismatchError for these ranks, of which `on_rail` are on
        this rail.

        The node is told by a call of another shape, so its other ranks do not learn what differs.
        On CPUs the rail's way back is as in any round: ranks that do not know of the mismatch have
        begun theirs.
        """
        epoch = self.rounds.count
        self.network.note_mismatch(ranks[0])
        self.node.abort(None)
        if self.device.type == "cpu":
            self._send_nothing_back(self.slabs, 0, ranks[0] + 1, on_rail)
        self.rounds.close()
        raise EPMismatchError(epoch, ranks, self.device.type == "cuda", tags, differences)

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
        needed = int(self.views["rail.total.needed"])
        self.views["rail.total.needed"][0] = 0
        return needed

    def _take_aborted(self) -> int:
        """The ranks of this node that have aborted its round, as a mask. On GPUs `check_rounds`
        reports them.
        """
        if self.device.type == "cuda":
            return 0
        mask, _ = self.node.take_aborted()
        self._aborted = self.memory.of_mask(mask)
        return mask
