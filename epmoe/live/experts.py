"""Experts that move while the group serves: which rank has which expert, how the copies of an
expert share its tokens, and how many tokens each expert gets.

Tables of quotas (epmoe/live/tables.py) say to which copy of an expert a source rank sends a token.
A table changes between two rounds, by one copy on the stream of the rounds.

Letters of shapes: L layers, R ranks, E experts of a layer, S slots of a rank for each layer, and
P = R·S slots of a layer on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.config.placement import Move, Placement
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import CLOSED
from epmoe.group.errors import EPStateError, EPTimeoutError
from epmoe.group.waiting import Promise, Worker
from epmoe.live.balance import check_slots
from epmoe.live.fixed import FixedExperts
from epmoe.live.layout import EMPTY, Word
from epmoe.live.mail import Mail
from epmoe.live.moves import MOST_CALLS, REFUSED, Moves, SlotWeights
from epmoe.live.slots import Table, lacking
from epmoe.live.tables import at_most, in_seats, tables
from epmoe.live.waves import Wave, in_place, plan_waves
from epmoe.native.arguments import describe

# Seconds between two steps of a caller that waits for moves.
_LOOK_S = 1e-4


class _Totals(NamedTuple):
    """What the moves of several calls of `replace` have done on this rank together."""

    experts: int = 0
    """experts that have come to this rank"""
    nbytes: int = 0
    """bytes of their weights"""
    stalls: int = 0


class LiveExperts:
    """The experts of one rank, with `placement.live`. An `ExpertParallel` makes one for each group,
    and calls it while it holds the turn of its exchange.

    A signal handler may raise in any method, and may itself call the method that it has
    interrupted. So values that belong together are assigned with no call between them, and each
    step does whatever is still to be done.

    Args:
        config: the configuration of the group.
        exchange: the exchange of this rank.
        slots: [L][P], the table of slots that ranks have kept from a former group or read from a
            file; None for the usual slots.
        weights: by the tag of a layer, the function that returns the weights of a slot. It is used
            if `replace` is given none. Layers add theirs by `register`.

    Attributes:
        slots: int32 [L, P], on the CPU: the logical expert in each slot, or −1. It belongs to the
            version of the tables that this rank uses.
        held: int32 [L, S]: the expert whose weights each slot of this rank has, or −1 while they
            are overwritten.
        moves: the moves of the last call of `replace` that was not refused on this rank, or None.
        sharing: the tables of new shares, from the call of `share` until they are in use; otherwise
            None.
        calls: how often `replace` was called, refused calls included. It is the number of the last
            call, which is the same on all ranks.
        refused_plans: how many calls of `replace` were refused by a rank.
        ticks: how often `Balancer.tick` was called in this group. If one balancer follows another,
            the count goes on, since ranks compare these numbers.
        finishes: how often `Balancer.finish` was called, repetitions after an exception not
            counted.
        has_ticked: whether `Balancer.tick` was called since the last `Balancer.finish`.
        stalled_plans: how often a rank has sent no loads in time, as `Balancer` counts.
    """

    can_move: ClassVar[bool] = True

    def __init__(
        self,
        config: EPConfig,
        exchange: NodeExchange,
        slots: list[list[int]] | None,
        weights: dict[int, SlotWeights],
    ) -> None:
        sizes = exchange.plan.sizes
        self._exchange = exchange
        self._table = exchange.views["table.copies"]
        self._most_copies = config.placement.most_copies
        self._L = config.placement.layers
        self._R = len(exchange.global_ranks)
        self._E = sizes["E"]
        self._S = sizes["num_local_experts"]
        self._rank = exchange.rank
        # Make normal tensors, also if the caller is in torch's inference mode: tensors of inference
        # mode could not be written outside it.
        with torch.inference_mode(False):
            if slots is None:
                first_slots = self._first_slots()
            else:
                first_slots = torch.tensor(slots, dtype=torch.int32)
            # Ranks may have kept more copies of an expert than the configuration allows.
            self.slots = at_most(self._most_copies, first_slots)
            self.held = self._on_this_rank(self.slots).clone()
            # The loads by which copies share: the last ones that a caller wants.
            self._shared_loads = torch.ones(self._L, self._E, dtype=torch.float64)
            # The rows that experts on this rank have received, and the rows of each slot that are
            # in them already.
            self._own_loads = torch.zeros(self._L, self._E, dtype=torch.float64)
            self._counted_rows = torch.zeros(self._L, self._S, dtype=torch.int64)
            self.mail = Mail(exchange)
        self.weights = weights
        self.moves: Moves | None = None
        self.calls = 0
        self.refused_plans = 0
        self.ticks = 0
        self.finishes = 0
        self.has_ticked = True
        self.stalled_plans = 0
        # What all moves before `moves` have done.
        self._earlier_totals = _Totals()
        # The last moves whose end `_note_end_of_moves` has taken over.
        self._finished_moves: Moves | None = None
        # The number of a call that was refused here, until the other ranks are told.
        self._refused_call: int | None = None
        self._is_in_step = False
        # A thread makes the tables, since those of many layers take milliseconds.
        self._worker = Worker("epmoe-quotas")
        # The versions of `moves`: for each one the slots, and the tables once they are made.
        self._versions = list[tuple[Tensor, Promise[Tensor]]]()
        # The first tables share by equal loads. `_tables_loads` are the loads of the last tables
        # that were begun.
        self.sharing: Promise[Tensor] | None = None
        self._tables_loads = self._shared_loads
        self._put_into_use(self._make_tables(self.slots, self._shared_loads))
        # Rounds need the tables, and may run on another stream: so wait until the tables are there.
        exchange.buffers.let_rounds_begin()
        exchange.processor.finish_stream()

    def _first_slots(self) -> Tensor:
        """The usual table of a new group, int32 [L, P]: slot p has expert p mod E."""
        first = torch.arange(self._R * self._S, dtype=torch.int32) % self._E
        return first.repeat(self._L, 1)

    def replace(
        self, slots: Tensor, weights: SlotWeights | None = None, loads: Tensor | None = None
    ) -> Moves:
        """See `ExpertParallel.replace`."""
        self._refuse_within_a_step("replace")
        self._refuse_while_moving("replace")
        self._note_end_of_moves()
        number = self.calls + 1
        if number > MOST_CALLS:
            raise EPStateError(
                f"`replace` was called {MOST_CALLS} times, which words can count: `resume` begins "
                "anew"
            )
        try:
            moves = self._begin(number, slots, weights, loads)
        except BaseException:
            # `calls` has this number if the moves have begun. Then a signal handler has raised
            # after that, and the call is not refused.
            if self.calls < number:
                self.calls = number
                self._refused_call = number
                self.refused_plans += 1
                self._tell_refusal()
            raise
        # Tell the other ranks that this one has begun.
        moves.tell()
        return moves

    def _begin(
        self, number: int, slots: Tensor, weights: SlotWeights | None, loads: Tensor | None
    ) -> Moves:
        """Check the arguments of `replace`, plan the waves, and begin the moves.

        The state of this object changes in the last lines only. So if it raises, nothing has begun.
        """
        if not isinstance(slots, Tensor) or slots.shape != self.slots.shape:
            raise ValueError(
                f"`slots` must be integers {list(self.slots.shape)}, got {describe(slots)}"
            )
        loads = self._shared_loads if loads is None else self._check_loads(loads)
        # Plan: which experts move, in which waves.
        wanted = check_slots(slots, loads, self._R, self._most_copies)
        target = in_place(self.slots, wanted, self._S)
        waves = plan_waves(self.slots, target, self._S)
        if weights is None:
            self._check_registered(waves)
        moves = Moves(
            mail=self.mail,
            number=number,
            slots_per_rank=self._S,
            waves=waves,
            weights=weights or self._registered,
            staging=self._exchange.views["moves.staging"],
            deadlines=self._exchange.deadlines,
            switch=self._switch,
            holds=self._note_held,
        )
        # Let the thread make the tables of each version. Version 0 has the present slots, and each
        # wave leads to the slots of the next version. The tables of a version do not use the slots
        # that the next wave overwrites.
        slots_of_versions = [self.slots, *(wave.slots for wave in waves)]
        next_waves = [*waves, None]
        versions = []
        for version_slots, next_wave in zip(slots_of_versions, next_waves, strict=True):
            promise = self._submit_tables(version_slots, loads, next_wave)
            versions.append((version_slots, promise))
        earlier_totals = _Totals(
            experts=self.moved,
            nbytes=self.moved_bytes,
            stalls=self.stalls,
        )
        # Begin. There is no call between these lines, in which a signal handler could raise.
        # `sharing` ends here, since its tables may use slots that a wave overwrites.
        self._earlier_totals = earlier_totals
        self.moves = moves
        self._versions = versions
        self.sharing = None
        self._shared_loads = loads
        self._tables_loads = loads
        self.calls = number
        self._refused_call = None
        return moves

    def _check_registered(self, waves: list[Wave]) -> None:
        """Raise ValueError if experts of a layer move whose weights are unknown, because the layer
        has not called `register`.
        """
        # Tags of layers begin at 1.
        tags = {move.layer + 1 for wave in waves for move in wave.moves}
        unregistered = tags.difference(self.weights)
        if unregistered:
            raise ValueError(
                f"`weights` must be given, since no layer with tag {min(unregistered)} has said "
                "where its are"
            )

    def share(self, loads: Tensor) -> None:
        """See `ExpertParallel.share`. While experts move, the new shares wait for the end of the
        moves.
        """
        self._shared_loads = self._check_loads(loads)
        if self.moves is None or self.moves.done:
            self._begin_sharing()

    def step(self) -> None:
        """Take moves and new shares as far as they get at once. `ExpertParallel.poll` calls it
        between two rounds. It waits for no rank and for no kernel.
        """
        if self.is_idle or self._is_in_step or self._is_captured():
            return
        stream = self._exchange.processor.stream()
        try:
            self._is_in_step = True
            self._step()
        finally:
            self._is_in_step = False
            # Copies run on another stream, and a signal handler may have raised while that was
            # the current one.
            if stream is not None:
                torch.cuda.set_stream(stream)

    @property
    def is_idle(self) -> bool:
        """Whether a step has nothing to do: moves have ended, and the last shares are in use."""
        in_use = self.sharing is None and self._tables_loads is self._shared_loads
        have_moves_ended = self.moves is self._finished_moves
        return in_use and have_moves_ended and self._refused_call is None

    def _is_captured(self) -> bool:
        """Whether a CUDA graph is being captured, which would repeat what a step does now."""
        return self._exchange.processor.captures(self._exchange.streams())

    def _step(self) -> None:
        """Take moves further, then put new shares into use."""
        self._tell_refusal()
        # Moves go first. If they raise, their end is taken over all the same.
        try:
            if self.moves is not None:
                self.moves.step()
        finally:
            self._note_end_of_moves()
        # New shares come into use while no expert moves and no round is open.
        if self.moves is not self._finished_moves or self._exchange.rounds.state != CLOSED:
            return
        if self._tables_loads is not self._shared_loads:
            self._begin_sharing()
        sharing = self.sharing
        if sharing is not None and sharing.done:
            if sharing.error is None:
                self._put_into_use(sharing.get())
            # A signal handler may have called `share` meanwhile: leave its tables alone.
            if self.sharing is sharing:
                self.sharing = None
            # If the thread has raised while it made the tables, this raises the same.
            sharing.get()

    def _note_end_of_moves(self) -> None:
        """If the moves have ended, take over what they have changed, once for each call of
        `replace`.
        """
        moves = self.moves
        if moves is self._finished_moves or moves is None or not moves.done:
            return
        # A normal tensor: one of inference mode could not be written outside it.
        with torch.inference_mode(False):
            held = self._on_this_rank(self.slots).clone()
        if moves.cancelled:
            # The tables in use avoid slots that the next wave was to overwrite. As there will be no
            # next wave, make tables that use these slots again.
            self._begin_sharing()
        refused_plans = self.refused_plans + bool(moves.refused_by)
        # No call between these lines: a signal handler could raise in it.
        self.held = held
        self._versions = []
        self._finished_moves = moves
        self.refused_plans = refused_plans

    def _tell_refusal(self) -> None:
        """Tell the other ranks of a call of `replace` that was refused here, unless they know."""
        if self._refused_call is not None:
            self.mail.post(Word.PLAN, (self._refused_call << 32) | REFUSED, range(self._R))
            self._refused_call = None

    def finish(self, timeout_s: float | None) -> None:
        """Step until the moves have ended on all ranks and new shares are in use.

        `ExpertParallel.apply` calls it. `wait` says what it raises.
        """
        if self._exchange.rounds.state != CLOSED:
            raise EPStateError("a round is open: experts move between rounds")
        self._refuse_within_a_step("apply")

        def is_done() -> bool:
            self.step()
            return self.is_idle

        def late_ranks() -> list[int]:
            return [] if self.moves is None else self.moves.waits_for()

        self.wait(is_done, late_ranks, timeout_s)

    def wait(
        self,
        is_done: Callable[[], bool],
        late_ranks: Callable[[], list[int]],
        timeout_s: float | None,
    ) -> None:
        """Call `is_done` again and again until it returns True.

        Raises EPTimeoutError once a rank has ended, and after `timeout_s` seconds, by default the
        deadline of a round. In the second case the error names the ranks that `late_ranks` returns.
        """
        if timeout_s is None:
            timeout_s = self._exchange.deadlines.wait_s()
        deadline = time.monotonic() + timeout_s
        while not is_done():
            # Bit r says that rank r has ended.
            dead_ranks = self._exchange.dead()
            ended = [rank for rank in range(self._R) if (dead_ranks >> rank) & 1]
            if ended or time.monotonic() > deadline:
                # If the exchange has failed, this raises its error, which says more.
                self._exchange.check()
                self._raise_timeout(ended, late_ranks)
            time.sleep(_LOOK_S)

    def _raise_timeout(self, ended: list[int], late_ranks: Callable[[], list[int]]) -> NoReturn:
        """Raise EPTimeoutError, which names the ranks that have ended, or else the late ones."""
        missing = ended or late_ranks()
        names = [self._exchange.global_ranks[rank] for rank in missing]
        stage = "the move of experts, after dispatch"
        count = self._exchange.rounds.count
        why = f"waited for rank(s) {missing} of the group (global rank(s) {names})"
        # Without a remedy of its own the error says that the group has failed.
        if ended:
            raise EPTimeoutError(stage, count, missing, names, why)
        remedy = "the moves and rounds go on: call `apply` again on all ranks"
        raise EPTimeoutError(stage, count, missing, names, why, remedy)

    def send_loads(self) -> None:
        """Send the number of rows that each expert has received on this rank so far to all ranks,
        by layer and expert.
        """
        self._count_rows()
        # Each window has a part for each rank, in the order of seats: float64 [L, E].
        nbytes = 8 * self._L * self._E
        self.mail.share("moves.loads", self._own_loads, begin=nbytes * self._exchange.seat)

    def loads(self) -> Tensor:
        """The rows that each expert has received on all ranks, as far as their loads have arrived
        here: float64 [L, E].
        """
        return self.mail.fetch(self._exchange.views["moves.loads"]).sum(0)

    @property
    def moved(self) -> int:
        """How many experts moves have brought to this rank."""
        by_last_moves = 0 if self.moves is None else self.moves.copied_experts
        return self._earlier_totals.experts + by_last_moves

    @property
    def moved_bytes(self) -> int:
        """How many bytes of weights moves have brought to this rank."""
        by_last_moves = 0 if self.moves is None else self.moves.copied_bytes
        return self._earlier_totals.nbytes + by_last_moves

    @property
    def stalls(self) -> int:
        """How often moves got no further within the deadline of a round."""
        of_last_moves = 0 if self.moves is None else self.moves.stalls
        return self._earlier_totals.stalls + of_last_moves

    def experts(self, tag: int) -> list[int]:
        """The experts in this rank's slots of a layer, with −1 for an empty slot.

        Raises EPStateError while experts move.
        """
        return self._slots_of(tag).view(self._R, self._S)[self._rank].tolist()

    def holder(self, tag: int, expert: int) -> tuple[int, int]:
        """The rank and the local slot of an expert's first copy.

        Raises EPStateError while experts move.
        """
        slot = int((self._slots_of(tag) == expert).nonzero()[0])
        return divmod(slot, self._S)

    def _slots_of(self, tag: int) -> Tensor:
        """The table of one layer, int32 [P].

        Raises EPStateError while experts move, and ValueError if there is no such layer.
        """
        self._refuse_while_moving("a look at the experts of a rank")
        if not 1 <= tag <= self._L:
            raise ValueError(
                f"`tag` must be from 1 to {self._L}, a layer of `placement.layers`, got {tag}"
            )
        return self.slots[tag - 1]

    def register(self, tag: int, weights: SlotWeights) -> None:
        """Take the function by which a layer returns the weights of its slots."""
        self.weights[tag] = weights

    def moving(self) -> Self:
        """This object. Callers get methods of it that `FixedExperts` does not have, which raises
        EPStateError here.
        """
        return self

    def held_by_layer(self) -> Table:
        """The experts whose weights this rank has in its slots, by layer."""
        return self.held.tolist()

    def kept(self, config: EPConfig, size: int, has_weights: bool) -> tuple[EPConfig, Table]:
        """What this rank brings into a group of another size: the configuration of the new group,
        and the experts in the slots of this rank. If the weights have gone, its slots are empty.
        """
        held = self.held
        if not has_weights:
            held = torch.full_like(held, EMPTY)
        return config.of_size(size), held.tolist()

    def to_load(
        self, held: Table | None, before: Placement, ranks_before: list[int | None]
    ) -> tuple[Move, ...]:
        """The experts that this rank has to load after a change of the group.

        `held` is the table of this rank before the change, or None if the rank is new. An expert
        must be loaded if its slot did not hold it before. `before` and `ranks_before` are for
        `FixedExperts`, whose method has the same arguments.
        """
        wanted = self.held_by_layer()
        nothing: Table = [[] for _ in wanted]
        return lacking(wanted, held or nothing)

    def disown(self, why: str) -> None:
        """In a forked child: let whatever would send raise EPStateError, which says `why`."""
        self.mail.close(why)

    def close(self) -> None:
        """End the thread and the moves. The caller does this before it closes the windows."""
        if self.moves is not None:
            self.moves.end()
        self.mail.close()
        self._worker.close()

    def _refuse_within_a_step(self, what: str) -> None:
        """Raise EPStateError if a signal handler has called `what` in the middle of `step`."""
        if self._is_in_step:
            raise EPStateError(
                f"a signal handler called {what} in the middle of another call: call it afterwards"
            )

    def _refuse_while_moving(self, what: str) -> None:
        """Raise EPStateError if experts are moving, since `what` needs a table that stays."""
        if self.moves is not None and not self.moves.done:
            raise EPStateError(
                f"experts are moving: {what} comes after the end of the moves, which `apply` awaits"
            )

    def _on_this_rank(self, slots: Tensor) -> Tensor:
        """The part of a table [L, P] that has the slots of this rank: [L, S]."""
        return slots[:, self._rank * self._S : (self._rank + 1) * self._S]

    def _check_loads(self, loads: Tensor) -> Tensor:
        """Check loads that a caller has given, and return them as float64 [L, E] on the CPU.

        Raises ValueError if they have another shape, or a value is negative, Inf or NaN.
        """
        shape = (self._L, self._E)
        is_table = isinstance(loads, Tensor) and loads.shape == shape
        if not is_table or not (loads.isfinite() & (loads >= 0)).all():
            raise ValueError(
                f"`loads` must be {list(shape)}, finite and at least 0, got {describe(loads)}"
            )
        return loads.detach().to("cpu", torch.float64).contiguous()

    def _registered(self, tag: int, local: int) -> Sequence[Tensor]:
        """The weights of a local slot, by the function that its layer has registered."""
        return self.weights[tag](tag, local)

    def _note_held(self, layer: int, local: int, expert: int) -> None:
        """Note whose weights a local slot has from now on. `Moves.holds` is this method."""
        # Before the slot is overwritten: its rows so far belong to the expert that leaves it.
        if expert == EMPTY:
            self._count_rows()
        self.held[layer, local] = expert

    def _count_rows(self) -> None:
        """Add the rows that slots have received since the last call to the loads of the experts in
        these slots.
        """
        # Kernels count the rows of each slot. A slot without an expert gets none that count.
        counted_rows = self.mail.fetch(self._exchange.views["health.tokens_per_expert"])
        has_expert = self.held != EMPTY
        new_rows = (counted_rows - self._counted_rows).double() * has_expert
        # Column 0 stands in for the missing expert, and gets 0 rows of it.
        experts = self.held.clamp(min=0).long()
        loads = self._own_loads.scatter_add(1, experts, new_rows)
        counted_rows = counted_rows.clone()
        # No call between these lines: if a signal handler raised in it, rows would count twice.
        self._own_loads = loads
        self._counted_rows = counted_rows

    def _switch(self, version: int) -> bool:
        """Put the tables of a version into use; `Moves.switch` is this method.

        Returns False, and changes nothing, if the tables are not made yet or a round is open.
        """
        slots, promise = self._versions[version]
        if not promise.done or self._exchange.rounds.state != CLOSED:
            return False
        self._put_into_use(promise.get())
        self.slots = slots
        return True

    def _begin_sharing(self) -> None:
        """Let the thread make tables for the loads that the caller of `share` wants."""
        loads = self._shared_loads
        sharing = self._submit_tables(self.slots, loads)
        # A signal handler may have called `share` by now. Then `_shared_loads` are other loads
        # than these, so the next step begins again.
        self.sharing = sharing
        self._tables_loads = loads

    def _submit_tables(
        self, slots: Tensor, loads: Tensor, next_wave: Wave | None = None
    ) -> Promise[Tensor]:
        """Let the thread call `_make_tables`."""
        return self._worker.submit(partial(self._make_tables, slots, loads, next_wave))

    def _make_tables(self, slots: Tensor, loads: Tensor, wave: Wave | None = None) -> Tensor:
        """Make tables of quotas, and bring them to the device of the rounds. Any thread may call
        it.

        If `wave` is given, the tables use no slot that this wave is going to overwrite.
        """
        if wave is not None:
            slots = slots.clone()
            for move in wave.moves:
                slots[move.layer, move.slot] = EMPTY
        width = self._table.shape[-1]
        by_rank = tables(slots, loads, self._rank, self._R, self._most_copies, width)
        return self.mail.upload(in_seats(by_rank, self._exchange.seats.of_ranks, self._S))

    def _put_into_use(self, table: Tensor) -> None:
        """Copy new tables into the place where rounds read them: after all rounds so far, and
        before the next one. The current stream may be any.
        """
        streams = self._exchange.streams()
        # On GPUs: the first stream waits for the other streams and copies. The other streams then
        # wait for the first one.
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
        with torch.inference_mode(False):
            self._table.copy_(table)
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        if streams:
            # torch may give the memory of `table` out again only after this copy.
            table.record_stream(streams[0])


RankExperts = LiveExperts | FixedExperts
"""The experts of a rank, which can move or stay. Both classes have the methods of a round."""


def experts_on(
    exchange: Exchange,
    config: EPConfig,
    placement: Placement,
    slots: Table | None,
    weights: dict[int, SlotWeights],
) -> RankExperts:
    """Make the experts of this rank for a group that has just formed.

    `placement` says where experts are that stay. `slots` and `weights` are the arguments of
    `LiveExperts`, for experts that can move.
    """
    if not config.placement.live:
        return FixedExperts(placement, exchange.rank)
    assert isinstance(exchange, NodeExchange), "experts move within one node"
    return LiveExperts(config, exchange, slots, weights)
