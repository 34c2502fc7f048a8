"""Experts that move while the group serves: who holds which, the shares of copies, and the load of
each.

Tables of quotas (epmoe/live/tables.py) say which copy of an expert a source sends to. They change
between rounds, by one copy on the stream of the rounds.
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

# Between two looks of a wait for moves.
_LOOK_S = 1e-4


class _Totals(NamedTuple):
    """What moves have done."""

    experts: int = 0
    nbytes: int = 0
    stalls: int = 0


class LiveExperts:
    """The experts of one rank's exchange, with `placement.live`. Callers have entered the exchange.

    A signal handler may raise in any call, and may call what its main thread is in the middle of.
    So the state changes by assignments with no call between them, and each step does what is left
    to do.

    Args:
        config: of the group.
        exchange: of this rank.
        slots: [layers][P] that ranks have kept; None in a new group.
        weights: by tag, those of a layer's slots, where `replace` is given none. Layers add theirs.

    Attributes:
        slots: int32 [layers, P], on the CPU: the logical expert in each slot, or −1, as far as all
            ranks have come.
        held: int32 [layers, S]: the expert whose weights each slot of this rank has, or −1 while
            they are overwritten.
        moves: of the last call of `replace` that was not refused here, or None.
        sharing: the tables of new shares, from the call of `share` until they are in use; otherwise
            None.
        calls: calls of `replace`, also refused ones: the number of the last one, which is the same
            on all ranks.
        refused_plans: calls of `replace` that a rank has refused.
        ticks: calls of `Balancer.tick` in this group, of one balancer after another: words hold
            their numbers.
        finishes: calls of `Balancer.finish`, which ranks tell apart by the ticks between them.
        has_ticked: whether there was a tick since the last of them.
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
        # Tensors of inference mode could not be written outside it.
        with torch.inference_mode(False):
            first = self._first_slots() if slots is None else torch.tensor(slots, dtype=torch.int32)
            # Ranks may have kept more copies than the configuration allows.
            self.slots = at_most(self._most_copies, first)
            self.held = self._mine(self.slots).clone()
            self._shared_loads = torch.ones(self._L, self._E, dtype=torch.float64)
            self._own_loads = torch.zeros(self._L, self._E, dtype=torch.float64)
            self._counted = torch.zeros(self._L, self._S, dtype=torch.int64)
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
        self._earlier = _Totals()
        # The last moves whose end `_note_end_of_moves` has seen.
        self._finished_moves: Moves | None = None
        # The number of a refused call of which the other ranks have not heard.
        self._untold: int | None = None
        self._is_in_step = False
        # Tables of many layers take milliseconds.
        self._worker = Worker("epmoe-quotas")
        # Of `moves`: slots, and tables once they are made.
        self._versions = list[tuple[Tensor, Promise[Tensor]]]()
        # The first tables share by equal loads.
        self.sharing: Promise[Tensor] | None = None
        self._tables_loads = self._shared_loads
        self._put_into_use(self._upload(self.slots, self._shared_loads))
        # Rounds may come on another stream, and need the tables.
        exchange.buffers.let_rounds_begin()
        exchange.processor.finish_stream()

    def _first_slots(self) -> Tensor:
        """int32 [layers, P]: experts one after another, then from the first one again."""
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
            # Where they have begun the call is not refused: an exception came behind that.
            if self.calls < number:
                self.calls = number
                self._untold = number
                self.refused_plans += 1
                self._tell_refusal()
            raise
        moves.tell()
        return moves

    def _begin(
        self, number: int, slots: Tensor, weights: SlotWeights | None, loads: Tensor | None
    ) -> Moves:
        """Check the arguments, plan the waves and begin. Until the last lines nothing changes."""
        if not isinstance(slots, Tensor) or slots.shape != self.slots.shape:
            raise ValueError(
                f"`slots` must be integers {list(self.slots.shape)}, got {describe(slots)}"
            )
        loads = self._shared_loads if loads is None else self._checked(loads)
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
            holds=self._hold,
        )
        # Tables of each version, which the thread makes meanwhile.
        slots_of_versions = [self.slots, *(wave.slots for wave in waves)]
        next_waves = [*waves, None]
        versions = []
        for version_slots, next_wave in zip(slots_of_versions, next_waves, strict=True):
            promise = self._submit(version_slots, loads, next_wave)
            versions.append((version_slots, promise))
        earlier = _Totals(self.moved, self.moved_bytes, self.stalls)
        # Begin, without a call between these lines, in which a signal handler could raise. Tables
        # under way name slots of before.
        self._earlier = earlier
        self.moves = moves
        self._versions = versions
        self.sharing = None
        self._shared_loads = loads
        self._tables_loads = loads
        self.calls = number
        self._untold = None
        return moves

    def _check_registered(self, waves: list[Wave]) -> None:
        """Raise ValueError if experts of a layer move that has not said where its weights
        are.
        """
        tags = {move.layer + 1 for wave in waves for move in wave.moves}
        lacking = tags.difference(self.weights)
        if lacking:
            raise ValueError(
                f"`weights` must be given, since no layer with tag {min(lacking)} has said where "
                "its are"
            )

    def share(self, loads: Tensor) -> None:
        """See `ExpertParallel.share`. During moves, the tables of new shares come behind them."""
        self._shared_loads = self._checked(loads)
        if self.moves is None or self.moves.done:
            self._share()

    def step(self) -> None:
        """Do what can be done at once, between two rounds. It waits for no rank and
        for no kernel.
        """
        if self.is_idle or self._is_in_step or self._is_captured():
            return
        stream = self._exchange.processor.stream()
        try:
            self._is_in_step = True
            self._step()
        finally:
            self._is_in_step = False
            # A signal handler may have raised where another stream is the current one.
            if stream is not None:
                torch.cuda.set_stream(stream)

    @property
    def is_idle(self) -> bool:
        """Whether a step has nothing to do: moves have ended, and the last shares are in use."""
        in_use = self.sharing is None and self._tables_loads is self._shared_loads
        return in_use and self.moves is self._finished_moves and self._untold is None

    def _is_captured(self) -> bool:
        """Whether a graph would repeat what this rank does now."""
        return self._exchange.processor.captures(self._exchange.streams())

    def _step(self) -> None:
        """Take moves further, then put new shares into use."""
        self._tell_refusal()
        # Moves go first. What they have changed is seen to, even where they raise.
        try:
            if self.moves is not None:
                self.moves.step()
        finally:
            self._note_end_of_moves()
        # New shares come between moves, and between rounds.
        if self.moves is not self._finished_moves or self._exchange.rounds.state != CLOSED:
            return
        if self._tables_loads is not self._shared_loads:
            self._share()
        sharing = self.sharing
        if sharing is not None and sharing.done:
            if sharing.error is None:
                self._put_into_use(sharing.get())
            # A signal handler may have begun to share anew.
            if self.sharing is sharing:
                self.sharing = None
            # Raises what the thread has raised.
            sharing.get()

    def _note_end_of_moves(self) -> None:
        """Take over the slots of moves that have ended. Each moves are taken over once."""
        moves = self.moves
        if moves is self._finished_moves or moves is None or not moves.done:
            return
        # Tensors of inference mode could not be written outside it.
        with torch.inference_mode(False):
            held = self._mine(self.slots).clone()
        if moves.cancelled:
            # Slots that were to be overwritten are in use again.
            self._share()
        refused_plans = self.refused_plans + bool(moves.refused_by)
        # No call between these lines: a signal handler could raise in it.
        self.held = held
        self._versions = []
        self._finished_moves = moves
        self.refused_plans = refused_plans

    def _tell_refusal(self) -> None:
        if self._untold is not None:
            self.mail.post(Word.PLAN, self._untold << 32 | REFUSED, range(self._R))
            self._untold = None

    def finish(self, timeout_s: float | None) -> None:
        """Step until the moves are done; see `wait`."""
        if self._exchange.rounds.state != CLOSED:
            raise EPStateError("a round is open: experts move between rounds")
        self._refuse_within_a_step("apply")

        def done() -> bool:
            self.step()
            return self.is_idle

        def late() -> list[int]:
            return [] if self.moves is None else self.moves.waits_for()

        self.wait(done, late, timeout_s)

    def wait(
        self, done: Callable[[], bool], late: Callable[[], list[int]], timeout_s: float | None
    ) -> None:
        """Wait until `done`. Raises EPTimeoutError once a rank has ended, or for `late` after
        `timeout_s`, by default the deadline of a round.
        """
        if timeout_s is None:
            timeout_s = self._exchange.deadlines.wait_s()
        deadline = time.monotonic() + timeout_s
        while not done():
            dead_ranks = self._exchange.dead()
            ended = [rank for rank in range(self._R) if dead_ranks >> rank & 1]
            if ended or time.monotonic() > deadline:
                self._exchange.check()
                self._raise_timeout(ended, late)
            time.sleep(_LOOK_S)

    def _raise_timeout(self, ended: list[int], late: Callable[[], list[int]]) -> NoReturn:
        missing = ended or late()
        names = [self._exchange.global_ranks[rank] for rank in missing]
        stage = "the move of experts, after dispatch"
        count = self._exchange.rounds.count
        why = f"waited for rank(s) {missing} of the group (global rank(s) {names})"
        # By default the error says that the group has failed.
        if ended:
            raise EPTimeoutError(stage, count, missing, names, why)
        then = "the moves and rounds go on: call `apply` again on all ranks"
        raise EPTimeoutError(stage, count, missing, names, why, then)

    def send_loads(self) -> None:
        """Send the rows that this rank's experts have received so far, by layer and expert, to all
        ranks.
        """
        self._count()
        self.mail.share("moves.loads", self._own_loads, 8 * self._L * self._E * self._exchange.seat)

    def loads(self) -> Tensor:
        """float64 [layers, E]: the sum of what has arrived from all ranks."""
        return self.mail.fetch(self._exchange.views["moves.loads"]).sum(0)

    @property
    def moved(self) -> int:
        """Experts that moves have brought to this rank."""
        now = 0 if self.moves is None else self.moves.copied_experts
        return self._earlier.experts + now

    @property
    def moved_bytes(self) -> int:
        now = 0 if self.moves is None else self.moves.copied_bytes
        return self._earlier.nbytes + now

    @property
    def stalls(self) -> int:
        """How often moves got no further within the deadline of a round."""
        now = 0 if self.moves is None else self.moves.stalls
        return self._earlier.stalls + now

    def experts(self, tag: int) -> list[int]:
        """The experts in this rank's slots of a layer, −1 for an empty slot. Raises EPStateError
        during moves.
        """
        return self._slots_of(tag).view(self._R, self._S)[self._rank].tolist()

    def holder(self, tag: int, expert: int) -> tuple[int, int]:
        """Rank and local slot of the first copy of an expert. Raises EPStateError during moves."""
        slot = int((self._slots_of(tag) == expert).nonzero()[0])
        return divmod(slot, self._S)

    def _slots_of(self, tag: int) -> Tensor:
        """int32 [P], of a layer."""
        self._refuse_while_moving("a look at the experts of a rank")
        if not 1 <= tag <= self._L:
            raise ValueError(
                f"`tag` must be from 1 to {self._L}, a layer of `placement.layers`, got {tag}"
            )
        return self.slots[tag - 1]

    def register(self, tag: int, weights: SlotWeights) -> None:
        """A layer says where the weights of its slots are."""
        self.weights[tag] = weights

    def moving(self) -> Self:
        """This object, for calls that only experts that move take."""
        return self

    def held_by_layer(self) -> Table:
        """The experts whose weights this rank has in its slots, by layer."""
        return self.held.tolist()

    def kept(self, config: EPConfig, size: int, has_weights: bool) -> tuple[EPConfig, Table]:
        """The configuration of a group of another size in which this rank keeps its experts, and
        its slots. They are empty where the weights have gone.
        """
        held = self.held
        if not has_weights:
            held = torch.full_like(held, EMPTY)
        return config.of_size(size), held.tolist()

    def to_load(
        self, held: Table | None, before: Placement, ranks_before: list[int | None]
    ) -> tuple[Move, ...]:
        """The experts that this rank has to load after a change of the group: those of its slots
        that were not in its `held` ones.
        """
        wanted = self.held_by_layer()
        return lacking(wanted, held or [[] for _ in wanted])

    def disown(self, why: str) -> None:
        """In a forked child: send nothing any more."""
        self.mail.close(why)

    def close(self) -> None:
        """End the thread, and the moves before their windows go."""
        if self.moves is not None:
            self.moves.end()
        self.mail.close()
        self._worker.close()

    def _refuse_within_a_step(self, what: str) -> None:
        if self._is_in_step:
            raise EPStateError(
                f"a signal handler called {what} in the middle of another call: call it afterwards"
            )

    def _refuse_while_moving(self, what: str) -> None:
        if self.moves is not None and not self.moves.done:
            raise EPStateError(
                f"experts are moving: {what} comes after the end of the moves, which `apply` awaits"
            )

    def _mine(self, slots: Tensor) -> Tensor:
        """[layers, S]: those of this rank."""
        return slots[:, self._rank * self._S : (self._rank + 1) * self._S]

    def _checked(self, loads: Tensor) -> Tensor:
        """float64 on the CPU."""
        shape = (self._L, self._E)
        is_table = isinstance(loads, Tensor) and loads.shape == shape
        if not is_table or not (loads.isfinite() & (loads >= 0)).all():
            raise ValueError(
                f"`loads` must be {list(shape)}, finite and at least 0, got {describe(loads)}"
            )
        return loads.detach().to("cpu", torch.float64).contiguous()

    def _registered(self, tag: int, local: int) -> Sequence[Tensor]:
        return self.weights[tag](tag, local)

    def _hold(self, layer: int, local: int, expert: int) -> None:
        """See `Moves.holds`."""
        # Rows so far were those of the expert that goes.
        if expert == EMPTY:
            self._count()
        self.held[layer, local] = expert

    def _count(self) -> None:
        """Add the rows that slots have received since the last time to the loads of the experts in
        them.
        """
        counted = self.mail.fetch(self._exchange.views["health.tokens_per_expert"])
        rows = (counted - self._counted).double() * (self.held != EMPTY)
        loads = self._own_loads.scatter_add(1, self.held.clamp(min=0).long(), rows)
        counted = counted.clone()
        # No call between these lines: rows would count twice.
        self._own_loads = loads
        self._counted = counted

    def _switch(self, version: int) -> bool:
        """Use the tables of a version, if they are made and no round is open."""
        slots, made = self._versions[version]
        if not made.done or self._exchange.rounds.state != CLOSED:
            return False
        self._put_into_use(made.get())
        self.slots = slots
        return True

    def _share(self) -> None:
        """Begin to make tables of the shares that the caller wants."""
        loads = self._shared_loads
        sharing = self._submit(self.slots, loads)
        # Of these loads: a signal handler may want others by now, which the next step sees.
        self.sharing = sharing
        self._tables_loads = loads

    def _submit(self, slots: Tensor, loads: Tensor, wave: Wave | None = None) -> Promise[Tensor]:
        return self._worker.submit(partial(self._upload, slots, loads, wave))

    def _upload(self, slots: Tensor, loads: Tensor, wave: Wave | None = None) -> Tensor:
        """Tables on the device, on any thread. They name no slot that `wave`, the next one,
        overwrites.
        """
        if wave is not None:
            slots = slots.clone()
            for move in wave.moves:
                slots[move.layer, move.slot] = EMPTY
        width = self._table.shape[-1]
        by_rank = tables(slots, loads, self._rank, self._R, self._most_copies, width)
        return self.mail.upload(in_seats(by_rank, self._exchange.seats.of_ranks, self._S))

    def _put_into_use(self, table: Tensor) -> None:
        """Copy tables behind all rounds so far and before those to come, whichever stream this is
        called on.
        """
        streams = self._exchange.streams()
        # The first stream waits for the others, copies, and they wait for it.
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
        with torch.inference_mode(False):
            self._table.copy_(table)
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        if streams:
            table.record_stream(streams[0])


RankExperts = LiveExperts | FixedExperts
"""The experts of a rank, which move or stay. Callers need not know which."""


def experts_on(
    exchange: Exchange,
    config: EPConfig,
    placement: Placement,
    slots: Table | None,
    weights: dict[int, SlotWeights],
) -> RankExperts:
    """The experts of this rank of a group; `slots` and `weights` are those of `LiveExperts`."""
    if not config.placement.live:
        return FixedExperts(placement, exchange.rank)
    assert isinstance(exchange, NodeExchange), "experts move within one node"
    return LiveExperts(config, exchange, slots, weights)
