"""The exchange over several nodes: a rail to the other nodes, and inside each node the exchange of one node.

    source rank ─ pack ─▶ slabs ─ rail ─▶ rank of the same local index on each node ─ dispatch of the node ─▶ experts
    y ◀─ sum in node order ─ partial rows ◀─ rail ─ partial rows of each node ◀─ combine of the node ──────────┘

The calls of a round are in epmoe/rail/stages.py. This file has what they keep, and what happens when they fail.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import c_int64
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.config.tuning import Tuning
from epmoe.exchange import round_state as rounds
from epmoe.exchange.dispatch import dispatch_send
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import Dispatched
from epmoe.exchange.health import (
    COUNTERS,
    MISMATCH,
    STAGES,
    STATUS,
    EPAbortedError,
    EPMismatchError,
    EPOverflowError,
    EPTimeoutError,
    Health,
    tags_of,
)
from epmoe.exchange.memory import MemoryPlan, RailSlot
from epmoe.exchange.peers import Peers
from epmoe.exchange.round_state import PHASES, PROGRESS, Rounds
from epmoe.group import open_window
from epmoe.rail.gloo import CollectiveRail, Rail, RailError, Transfer, connect_within, gloo_group, no_answer
from epmoe.rail.nccl import NcclRail
from epmoe.rail.slabs import Slabs, fill_tables

_CODE, _ABORTED = STATUS.index("code"), STATUS.index("aborted")
# Counted at the source, before rows leave for other nodes; a node that counts them again is not heard.
_AT_SOURCE = ("out_of_range_ids", "duplicate_ids", "nonfinite_weights")
# The way back waits for waits inside other nodes, which end first: their ranks know who is missing.
RETURN_S = 1.1


@dataclass(kw_only=True)
class TwoLevels(Exchange):
    """An `Exchange` over the nodes of a group, in the window of its node's own. `rank` and errors are of the group."""

    inside: Exchange  # of the node
    rail: Rail
    everyone: CollectiveRail  # a rail of all ranks of the group, for numbers of the hosts
    node: int
    travelling: Slabs | None = None  # of the open round
    # Of rounds that were given up, with what must live until they have ended.
    pending: list[tuple[Transfer, Slabs]] = field(default_factory=list)
    failure: tuple[str, int, list[int], list[int], str] | None = None  # arguments of an EPTimeoutError
    limit: str = "capacity.max_rows_per_node"  # what says how many slots the slabs of the last call have
    differing: Tensor | None = None  # on GPUs the word of `rail_tags`, in memory of the host
    failed_on_device: tuple[Tensor | None, Tensor | None] = (None, None)  # on GPUs what makes the sums zeros
    rail_tables: list[Tensor] = field(init=False)  # see `fill_tables`
    rail_descriptor: Tensor = field(init=False)  # `RailDescriptor` in csrc/ops_rail.cpp

    def __post_init__(self) -> None:
        super().__post_init__()
        topology = self.config.topology
        self.ranks_per_node, self.num_nodes = topology.ranks_here, topology.num_nodes
        self.others = [node for node in range(self.num_nodes) if node != self.node]
        self.rank += self.node * self.ranks_per_node
        self.slots = self.config.rows_per_node  # of the slabs of the last call
        self.slot = RailSlot.of(self.config)
        self.aborted: list[int] = []  # ranks of the group that gave the last round up
        self.aborted_rounds = [0] * len(self.global_ranks)  # of other nodes
        self.sends_fp8 = self.config.exchange.payload == "fp8"
        self.exact = self.config.exchange.network_splits == "exact"
        self.rounds = Rounds((c_int64 * len(PROGRESS))())
        memory = torch.zeros(self.plan.rail_bytes, dtype=torch.uint8, device=self.device)
        self.views |= {buffer.name: buffer.view(memory) for buffer in self.plan.buffers if buffer.region == "rail"}
        self.inside.raises_overflow = self.inside.raises_abort = False  # the sources come first: see `check_rounds`

    @classmethod
    def open(cls, config: EPConfig, placement: Placement, peers: Peers, device: torch.device, name: str) -> Self:
        """This rank's part. Collective over the group.

        Args:
            config: of the whole group, with more than one node.
            placement: likewise.
            peers: of the whole group.
            device: this rank's.
            name: the same on all ranks, and of no other attempt to open a group.

        Returns:
            The exchange, whose window the ranks of the node map.

        Raises:
            MemoryError: the windows do not fit.
            RuntimeError: the ranks of a node are on several machines, or do not reach one another.
        """
        G, N = config.topology.ranks_here, config.topology.num_nodes
        node, local = divmod(peers.rank, G)
        here = peers.global_ranks[node * G : (node + 1) * G]
        plan = MemoryPlan.build(config, peers.rank, placement, nvlink=device.type == "cuda")
        connect = connect_within(peers.timeout_s)
        peers.all_gather(None)  # all are about to connect
        group = gloo_group(f"{name}/node/{node}", local, G, connect) if G > 1 else None
        mates = Peers(group, local, G, here, connect.total_seconds(), first=node * G)
        where = [m * G + local for m in range(N)], peers.rank, peers.size, name
        rail = CollectiveRail(*where, connect) if device.type == "cpu" else NcclRail(*where, device, connect)
        with ExitStack() as undo:
            undo.callback(rail.close)
            everyone = CollectiveRail(list(range(peers.size)), peers.rank, peers.size, f"{name}/everyone", connect)
            undo.callback(everyone.close)
            with mates.part():
                window = open_window(plan, mates, device)
            inside = Exchange.create(config.of_node(), plan, placement.of_node(node, G), window, local, here, device)
            exchange = cls(
                config, plan, window, inside.scratch, inside.status, peers.global_ranks, device,
                inside=inside, rail=rail, everyone=everyone, node=node,
            )  # fmt: skip
            fill_tables(exchange, placement)
            undo.pop_all()
        return exchange

    def start(
        self,
        sent: Tensor,
        received: Tensor,
        sent_rows: list[int],
        received_rows: list[int],
        started: list[Transfer],
        returning: bool = False,
    ) -> None:
        """Start a transfer on the rail; see `Rail.start`."""
        try:
            self.rail.start(sent, received, sent_rows, received_rows, self.timeout_ns / 1e9, started, returning)
        except RailError:
            self.fail([])

    def wait(self, transfer: Transfer, later_s: float = 0.0) -> None:
        """Wait for a transfer, `later_s` longer than `exchange.timeout_s`.

        Raises EPTimeoutError, which names the missing ranks; the node hears of it. Raises RuntimeError if a signal
        handler gives the round up meanwhile.
        """
        look = partial(self._look, self.rounds.state)
        try:
            self.rail.wait(transfer, time.monotonic() + self.timeout_ns / 1e9 + later_s, look)
        except RailError:
            self.fail(self._reported())
        look()

    def largest(self, number: int) -> Callable[[], int]:
        """A number of each rank. Collective, between rounds and in the same order on all ranks; it sends nothing yet.

        Args:
            number: of this rank.

        Returns:
            What tells all ranks this number, waits for theirs, and returns the largest. Where an exception such as a
            Ctrl-C has ended it, another call takes it up again. It raises EPTimeoutError, which names the missing
            ranks, after the deadline of a round, or as soon as a rank has ended.

        Raises:
            EPTimeoutError: an earlier call has timed out.
            EPMismatchError: an earlier call of the ranks did not match.
        """
        self.check()
        rows = [int(rank != self.rank) for rank in range(len(self.global_ranks))]
        sent = torch.full((sum(rows),), number, device="cpu")
        received, started, timeout_s = torch.zeros_like(sent), list[Transfer](), self.timeout_ns / 1e9
        deadline = time.monotonic() + timeout_s

        def wait() -> int:
            try:
                if not started:
                    self.everyone.start(sent, received, rows, rows, timeout_s, started)
                self.everyone.wait(started[0], deadline, self._look_at_node)
            except RailError:
                self.fail(self.everyone.missing([]))
            except EPTimeoutError as error:  # the node knows more, and so do the others then
                self.everyone.missing(error.missing_ranks)
                raise
            return max(number, int(received.max()))

        return wait

    def wait_for_given_up(self) -> None:
        """Before a round: wait for the transfers of rounds that this rank has given up."""
        while self.pending:
            self.wait(self.pending[0][0])
            self.pending.pop(0)

    def fail(self, found: list[int]) -> NoReturn:
        """Record a failure of the rail, and name the missing ranks to the node and to the rail.

        Args:
            found: the missing ranks, if they are known.

        Raises:
            EPTimeoutError: always.
        """
        self.lose(found)
        self.check()
        raise AssertionError("check raises what was recorded")

    def lose(self, found: list[int]) -> None:
        """As `fail`, without the exception."""
        missing = self.rail.missing(found)
        self._record(missing, "over the network")
        self.warn_node(missing[0])

    def warn_node(self, missing: int) -> None:
        """Name a missing rank to the ranks of this node, and end their waits."""
        self.window.store(self.plan["rail.missed"].offset + 8 * self.inside.rank, missing + 1)
        self.inside.leave()

    def to_host(self, *tensors: Tensor) -> list[list[Any]]:
        """The values of tensors of the device."""
        return [tensor.tolist() for tensor in tensors]

    def peek(self, name: str) -> list[Any]:
        """The values of a buffer of the plan now, whatever is under way."""
        return self.views[name].tolist()

    def check(self) -> None:
        """Raise EPTimeoutError, EPMismatchError or EPOrderError if the rail or the node's exchange has failed."""
        if self.failure is None and self.status_words[_CODE]:
            self._take_failure_of_node()
        if self.failure is not None:
            raise EPTimeoutError(*self.failure)

    def check_rounds(self) -> None:
        """Raise EPOverflowError if a slab or the expert-major rows of the node had too little room."""
        needed, self.views["rail.total.needed"][0] = int(self.views["rail.total.needed"]), 0
        if needed and self.raises_overflow:
            raise EPOverflowError(needed, self.slots, "rows for one node", self.limit)
        super().check_rounds()
        if self.aborted and self.raises_abort:
            ranks, self.aborted = self.aborted, []
            raise EPAbortedError(self.rounds.count, ranks)

    def tags_of_group(self, tags: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        """`tags` of an EPMismatchError of the node's exchange, with the rank numbered in the group."""
        return tags and (tags[0], self.node * self.ranks_per_node + tags[1], tags[2])

    def take_aborted(self) -> int:
        """The ranks of this node that have given its round up, as a mask. On GPUs `check_rounds` tells of them."""
        if self.device.type == "cuda":
            return 0
        mask, self.status_words[_ABORTED] = self.status_words[_ABORTED], 0
        self.aborted = self.of_group(mask)
        return mask

    def mismatch(self, ranks: list[int], on_rail: list[int], tags: tuple[int, int, int] | None) -> NoReturn:
        """Close the round, and raise EPMismatchError for these ranks, of which `on_rail` are on this rail.

        On CPUs the rail's way back is as in any round: ranks that do not know of the mismatch have begun theirs.
        """
        epoch, slabs = self.rounds.count, self.travelling
        assert slabs is not None
        rounds.abort(self.inside, None)
        if self.device.type == "cpu":
            self._send_nothing_back(slabs, 0, ranks[0] + 1, on_rail)
        self.close_round()
        raise EPMismatchError(epoch, ranks, self.device.type == "cuda", tags)

    def close_round(self) -> None:
        """Any state → CLOSED."""
        progress = self.rounds.progress
        progress[PHASES] += -progress[PHASES] & 3
        self.rounds.handle = self.rounds.y = None

    def give_up(self) -> None:
        """As `Exchange.give_up`: the other nodes get zeros, and the own node no rows.

        The next dispatch waits for what is still on its way. With exact splits this call waits for the rail once; where
        that fails, the round stays open, and the next call raises the failure.
        """
        slabs, differing = self.travelling, list[int]()
        assert slabs is not None
        try:
            if self.rounds.state == rounds.SENT:
                slabs.start()  # an exception may have come first
                slabs.finish()
                if not slabs.returning:
                    self.pending.append((slabs.transfer, slabs))
                if self.exact:
                    differing, _ = slabs.differing()
                if self.inside.rounds.count < slabs.inside_epoch:
                    rows, call = slabs.no_rows(), (slabs.layout, slabs.weight_rows)
                    dispatch_send(self.inside, *rows, None, *call, tag=slabs.call_tag)
            rounds.abort(self.inside, None)
            self._send_nothing_back(slabs, 1 << self.inside.rank, 0, differing)
        except EPTimeoutError:
            return
        self.close_round()

    def _send_nothing_back(self, slabs: Slabs, aborted: int, mismatch: int, differing: list[int]) -> None:
        """As `Slabs.send_nothing_back`, unless partial rows are on their way already; the next round waits for them."""
        handle = self.rounds.handle
        assert handle is not None
        sent = handle.sent if isinstance(handle, Dispatched) else handle
        if not slabs.returning:
            slabs.send_nothing_back(sent.template.like, aborted, mismatch, differing)
        self.pending.append((slabs.transfer, slabs))

    @property
    def failed(self) -> bool:
        """Whether a wait has failed: `resume` and `close` are left."""
        return self.failure is not None or super().failed

    def missing(self) -> int:
        """Ranks of the group that this rank misses, or that another has reported to it, as a mask."""
        ranks = self.failure[2] if self.failure else self._reported() or self.of_group(self.inside.missing())
        return sum(1 << rank for rank in ranks)

    def dead(self) -> int:
        """As `Exchange.dead`, in the group."""
        return sum(1 << rank for rank in self.of_group(self.inside.dead()))

    def of_group(self, mask: int) -> list[int]:
        """As `Exchange.of_group`, for a mask of the node's ranks."""
        return [self.node * self.ranks_per_node + rank for rank in range(self.ranks_per_node) if mask >> rank & 1]

    def leave(self) -> None:
        """As `Exchange.leave`; ranks of other nodes hear of it by their rail."""
        if not self.failed:
            self.inside.leave()

    def retune(self, tuning: Tuning) -> None:
        """As `Exchange.retune`."""
        self.inside.retune(tuning)
        super().retune(tuning)

    def health(self, wait: bool) -> Health:
        """As `Exchange.health`: what the node's ranks are sent, and on other nodes the rank of this rail.

        Pairs are counted at their source. Seconds of waits for the network are not counted.
        """
        health = super().health(wait)
        counted = dict(zip(COUNTERS, self.peek("rail.total.counters"), strict=True))
        own = {name: counted[name] for name in _AT_SOURCE}
        sent, waited = [0] * len(self.global_ranks), [0.0] * len(self.global_ranks)
        aborted = list(self.aborted_rounds)
        sent[self.inside.rank :: self.ranks_per_node] = self.peek("rail.total.rows_sent")
        first, end = self.node * self.ranks_per_node, (self.node + 1) * self.ranks_per_node
        sent[first:end], waited[first:end] = health.rows_sent, health.waited_s
        aborted[first:end] = health.aborted_rounds
        own["timeouts"] = max(health.timeouts, self.failure is not None)
        for name in ("dropped_pairs", "clamped_num_tokens"):
            own[name] = getattr(health, name) + counted[name]
        return dataclasses.replace(health, rows_sent=sent, waited_s=waited, aborted_rounds=aborted, **own)

    def release(self) -> None:
        """As `Exchange.release`, and close the rails."""
        super().release()
        self.rail.close()
        self.everyone.close()
        self.travelling = None  # transfers keep connections open
        self.pending.clear()

    def _look(self, state: int) -> None:
        """During a wait for the rail, in a round in `state`: raise what the ranks of the node have reported."""
        if self.rounds.state != state:
            raise RuntimeError(f"round {self.rounds.count} was aborted while this call waited")
        self._look_at_node()

    def _look_at_node(self) -> None:
        """Raise what the ranks of the node have reported."""
        if missing := self.inside.missing():
            self.fail(self._reported() or self.of_group(missing))

    def _take_failure_of_node(self) -> None:
        """Record what the node's exchange has reported. Raises EPMismatchError, which leaves it usable on CPUs."""
        code, _, epoch, mask, _, _, _, tag, other = self.status[:9].tolist()
        if code == MISMATCH:
            latched = self.device.type == "cuda"
            self.status[_CODE] = code * latched
            raise EPMismatchError(epoch, self.of_group(mask), latched, self.tags_of_group(tags_of(tag, other)))
        missing = self.rail.missing((reported := self._reported()) or self.of_group(mask))
        self._record(missing, "over the network, as a rank of this node says" if reported else "within the node")

    def _reported(self) -> list[int]:
        """Ranks of other nodes that a rank of this node misses."""
        return [word - 1 for word in self.peek("rail.missed") if 0 < word <= len(self.global_ranks)]

    def _record(self, missing: list[int], where: str) -> None:
        """Keep the failure for every later call."""
        stage = STAGES[self.rounds.state in (rounds.DISPATCHED, rounds.RETURNING) or bool(self.pending)]
        global_ranks = [self.global_ranks[rank] for rank in missing]
        why = no_answer(missing, global_ranks, self.ranks_per_node, where, self.rank)
        self.failure = stage, self.rounds.count, missing, global_ranks, why
