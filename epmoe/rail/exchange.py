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
from epmoe.exchange.call import Call, Layout
from epmoe.exchange.exchange import Exchange, takes_turn
from epmoe.exchange.handles import Dispatched, Sent
from epmoe.exchange.health import COUNTERS, Health, raise_incomplete
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.outputs import refuse_layout, y_of
from epmoe.exchange.round_state import SENT
from epmoe.exchange.templates import Templates
from epmoe.group.errors import EPAbortedError, EPMismatchError, EPOverflowError, EPTimeoutError
from epmoe.rail.memory import RailMemory
from epmoe.rail.network import Network
from epmoe.rail.slabs import Mismatch, Slabs

# The source rank counts these before rows leave for other nodes. The exchange inside a node counts
# the same pairs again, so `health` takes the numbers of the source.
_AT_SOURCE = ("out_of_range_ids", "duplicate_ids", "nonfinite_weights")


class HierarchicalExchange(Exchange):
    """An `Exchange` over the nodes of a group.

    `config` is that of the whole group. `node` is the exchange between the ranks of this node, and
    its config is `config.of_node()`. The attribute `rank` and all errors number ranks in the whole
    group. `check_weights` is that of `Templates`.
    """

    slabs: Slabs  # those of the last round

    def __init__(
        self,
        config: EPConfig,
        node: NodeExchange,
        memory: RailMemory,
        network: Network,
        check_weights: Callable[[], object],
    ) -> None:
        self.config = config
        self.node = node
        self.memory = memory
        self.network = network
        # An `Exchange` has these attributes. Take each from the node or from the network.
        self.plan = node.plan
        self.device = node.device
        self.processor = node.processor
        self.views = network.views
        self.rank = network.rank
        self.global_ranks = network.global_ranks
        self.rounds = network.rounds
        self.deadlines = network.deadlines
        self.templates = Templates(
            config,
            self.device,
            node.views,
            self.rounds,
            self.rank,
            self.plan.sizes,
            None,
            check_weights,
        )
        self._raises_overflow = config.capacity.on_overflow == "raise"
        self._raises_abort = config.exchange.on_abort == "raise"
        # The ranks of the group that aborted the last round.
        self._aborted: list[int] = []
        # [R] how many rounds each rank has aborted. Ranks of this node are counted by the node.
        self._aborted_rounds = [0] * len(self.global_ranks)

    def dispatch(self, call: Call) -> Dispatched:
        sent = self.dispatch_send(call)
        return self.dispatch_recv(sent)

    @takes_turn
    def dispatch_send(self, call: Call) -> Sent:
        """Send rows to the other nodes. `dispatch_recv` then opens the round inside the node."""
        self.check()
        epoch = self.rounds.next_epoch()
        template, T = self.templates.of(call)
        # Slabs of rounds that this rank has aborted may still be on their way.
        self.network.wait_for_pending()

        # Note in `rounds` what this rank sends, before anything leaves.
        if call.extra is not None:
            call = self.templates.with_extra(call, template.shape.extra)
        operands = call.operands(T, self.device)
        sent = Sent(template, T, epoch, None, operands, self.rounds.most_tokens)
        self.rounds.open(sent, call.tag)

        # Copy the tokens into a slab for each node.
        node_epoch = self.node.rounds.count + 1
        slabs = Slabs(self.memory, template.shape, call, epoch, node_epoch, sent.most_tokens)
        self.slabs = slabs
        slabs.pack(operands)

        # Open the round before its first row leaves. If an exception comes between the two, the
        # abort of the open round starts the transfer that the other nodes wait for.
        self.rounds.advance()
        self.network.start(slabs.out)
        return sent

    @takes_turn
    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """Wait for the slabs of the other nodes, and dispatch their rows inside this node."""
        self.check()
        self.rounds.permit(sent, "dispatch_recv", "sent")
        slabs = self.slabs

        # Wait for the slabs of the other nodes. A signal handler may have raised before the
        # transfer was started in `dispatch_send`, so start it here in this case.
        self.network.start(slabs.out)
        self.network.wait(slabs.last)
        mismatch = slabs.mismatch()

        # Take their rows to the experts, in a round inside this node.
        try:
            slabs.node_dispatched = self._dispatch_in_node(
                slabs, tells_mismatch=bool(mismatch.ranks)
            )
        except EPMismatchError as error:
            ranks = mismatch.ranks or self.memory.group_ranks(error.differing_ranks)
            tags = mismatch.tags or self.network.tags_of_group(error.tags)
            self._raise_mismatch(ranks, mismatch._replace(tags=tags))
        except EPTimeoutError:
            # A rank of another node may be the cause. Then `check` raises an error that names it.
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
        """With layout="rank", `rows` are G slabs of N·S rows each: G ranks of this node, N nodes,
        and S rows that a slab for one node can have.
        """
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
        """Abort the open round. The other nodes get zeros from this rank, and the ranks of this
        node get no rows from it.

        It waits for no transfer; the next dispatch waits for those that are still on their way.
        Where the rail fails, the round stays open, and the next call raises the failure.
        """
        slabs = self.slabs
        try:
            if self.rounds.state == SENT:
                # The other nodes wait for the slabs of dispatch. Start them if an exception came
                # before.
                self.network.start(slabs.out)
                if not slabs.returning:
                    self.network.pending.append(slabs.last)
                # The other ranks of this node wait for this rank's dispatch inside the node.
                if self.node.rounds.count < slabs.node_epoch:
                    self.node.dispatch_send(slabs.call_without_tokens())
            self.node.abort(None)
            this_rank = 1 << self.memory.local
            self._send_zeros_back(slabs, aborted=this_rank, mismatch=0, differing=[])
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
        """Raise the errors of rounds that were closed but incomplete: rows had no room, or ranks
        have aborted. Reports of both are taken, so that the next call raises nothing.
        """
        # Find rows that had no room, on the way to another node or on a rank of this node.
        needed = self._take_needed()
        overflow = self.node.take_overflow()
        if needed:
            overflow = EPOverflowError(
                needed,
                max_rows=self.slabs.slab_rows,
                rows="rows for one node",
                key=self.slabs.limit,
            )
        if not self._raises_overflow:
            overflow = None

        # Find the ranks that have aborted the round, on any node.
        mask, _ = self.node.take_aborted()
        ranks = sorted({*self._aborted, *self.memory.group_ranks_of_mask(mask)})
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
        return sum(1 << rank for rank in self.memory.group_ranks_of_mask(self.node.dead()))

    def end_waits(self) -> None:
        """End the waits of the ranks of this node. Ranks of other nodes learn from their rail that
        this rank has left.

        After a failure it does nothing: the ranks of this node were told then which ranks are
        missing, and must not be told that this rank is missing.
        """
        with self.network.recording:
            if self.network.failure is None:
                self.node.end_waits()

    def largest(self, number: int) -> Callable[[], int]:
        """The hosts of all ranks exchange their numbers, because a slab for another node must have
        the same length on all ranks.
        """
        return self.network.largest(number)

    def health(self, wait: bool) -> Health:
        """Add the counts of the rail to those of the exchange inside the node.

        `rows_sent` counts rows to the ranks of this node, and rows to the ranks of this rail on the
        other nodes. Pairs are counted on the rank that brings their token. `waited_s` lacks the
        time of waits for the network.
        """
        health = self.node.health(wait)
        peek = self.network.peek
        counted = dict(zip(COUNTERS, peek("rail.total.counters"), strict=True))

        # Make the lists by rank of the group, from those of this rail and of this node.
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

        # Take the numbers that the rail alone counts, and add those that the node counts, too.
        numbers = {name: counted[name] for name in _AT_SOURCE}
        numbers["timeouts"] = max(health.timeouts, self.network.failure is not None)
        for name in ("dropped_pairs", "clamped_num_tokens"):
            numbers[name] = getattr(health, name) + counted[name]
        return dataclasses.replace(
            health, rows_sent=sent, waited_s=waited, aborted_rounds=aborted, **numbers
        )

    def release(self) -> None:
        self.node.thread = self.thread
        # A thread of the rail may be writing a failure into the windows of the node. So the node
        # closes the network, and unmaps its windows after that.
        self.node.release(self.network.close)
        # Drop the slabs of the last round, since their transfers keep connections open.
        vars(self).pop("slabs", None)

    def _dispatch_in_node(self, slabs: Slabs, *, tells_mismatch: bool) -> Dispatched:
        """Dispatch the rows of all slabs inside the node, and return the round there.

        With `tells_mismatch` it brings no rows, in a shape that differs from that of the other
        ranks of the node, so that they notice that the calls of the ranks do not match.
        """
        node = self.node
        # Where a Ctrl-C has ended the wait in an earlier call, go on in the round that is open.
        opened = node.rounds.handle
        if isinstance(opened, Sent) and node.rounds.state == SENT:
            return node.dispatch_recv(opened)
        if tells_mismatch:
            call = slabs.smallest_call()
        else:
            call = slabs.call()
        return node.dispatch(call)

    def _send_back(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        """Run the send phase of combine inside the node, which sends the experts' outputs to the
        ranks of the node.
        """
        y = y_of(dispatched.sent, out, self.device)
        self.node.combine_send(rows, self.slabs.node_dispatched)
        self.rounds.y = y
        self.rounds.advance()

    def _sum(self, dispatched: Dispatched) -> Tensor:
        """Finish combine: send partial rows to the nodes of their tokens, receive those of this
        rank's tokens, and return their sums y [T, D]. Raises the errors that `poll` raises.
        """
        slabs = self.slabs
        y = self.rounds.y
        assert y is not None

        # Get the sums over the ranks of this node, and start them on their way to the other nodes.
        # Where a Ctrl-C has ended the wait below in an earlier call, they are on their way already.
        if not slabs.returning:
            try:
                partial_rows = self.node.combine_recv(slabs.node_dispatched)
            except (EPMismatchError, EPTimeoutError):
                # A rank of another node may be the cause. Then `check` raises an error with its
                # number.
                self.check()
                raise
            self.network.start(slabs.back(partial_rows, self._take_aborted()))

        # Wait for the partial rows of the other nodes, and for the reports behind them.
        self.network.wait(slabs.last)
        reports = slabs.reports()
        if reports.differing:
            self.rounds.close()
            raise EPMismatchError(dispatched.epoch, reports.differing, latched=False)

        slabs.sum(y, self.network.failed_words)
        for rank in reports.aborted:
            self._aborted_rounds[rank] += 1
        self._aborted = sorted({*self._aborted, *reports.aborted})
        self.rounds.close()
        self.poll()
        return y

    def _raise_mismatch(self, ranks: list[int], found: Mismatch) -> NoReturn:
        """Close the round, and raise the EPMismatchError that names `ranks`, which are not empty.

        `found` is what the slabs say about the calls of these ranks; its tags and its differences
        go into the error. The other ranks of this node have learned of the mismatch by a call of
        another shape, so their errors do not say what differs. On CPUs this rank still sends zeros
        back over the rail: ranks that do not know of the mismatch have begun their transfer back.
        """
        epoch = self.rounds.count
        runs_ahead = self.processor.runs_ahead
        self.network.note_mismatch(ranks[0])
        self.node.abort(None)
        if not runs_ahead:
            self._send_zeros_back(
                self.slabs, aborted=0, mismatch=ranks[0] + 1, differing=found.ranks
            )
        self.rounds.close()
        raise EPMismatchError(
            epoch, ranks, latched=runs_ahead, tags=found.tags, differences=found.differences
        )

    def _send_zeros_back(
        self, slabs: Slabs, *, aborted: int, mismatch: int, differing: list[int]
    ) -> None:
        """Send the zeros of `Slabs.zeros_back`, unless partial rows are on their way already. The
        next round first waits for the end of this transfer.
        """
        if not slabs.returning:
            like = self.rounds.sent.template.like
            self.network.start(slabs.zeros_back(like, aborted, mismatch, differing))
        self.network.pending.append(slabs.last)

    def _take_needed(self) -> int:
        """Read how many rows a slab would have needed, and set the word to 0. It is 0 if all rows
        have had room since the last call.
        """
        needed = int(self.views["rail.total.needed"])
        self.views["rail.total.needed"][0] = 0
        return needed

    def _take_aborted(self) -> int:
        """Take from the node which of its ranks have aborted the round, as a mask. It also becomes
        the attribute `_aborted`, which `check_rounds` reads.

        On GPUs the mask is 0: the host does not wait for the round, and `check_rounds` asks later.
        """
        if self.processor.runs_ahead:
            return 0
        mask, _ = self.node.take_aborted()
        self._aborted = self.memory.group_ranks_of_mask(mask)
        return mask
