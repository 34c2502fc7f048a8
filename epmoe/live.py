"""Experts that move while the group serves: who holds which, how sources choose among copies, and the load of each.

A source chooses among the copies of an expert by quotas, which `epmoe.balance.choices` computes from loads. Each layer
has two tables of them: for calls of few tokens, where all sources choose the same copy of an expert, since its weights
take as long to read for one row as for many; and for calls of many, where copies share the load. Tables change between
rounds, by one copy on the stream of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.balance import check_slots, choices, shares_of
from epmoe.config.config import EPConfig
from epmoe.exchange.mail import MailOnCPU, MailOnGPU
from epmoe.exchange.moves import MOST_CALLS, PLAN, REFUSED, Moves, Weights
from epmoe.exchange.moves_plan import EMPTY, Wave, in_place, plan_waves
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import CLOSED
from epmoe.exchange.window import SharedMemoryWindow
from epmoe.group.errors import EPStateError, EPTimeoutError
from epmoe.group.waiting import Result, Worker
from epmoe.native.arguments import describe

_NUMBERS = 2**16  # that the copies of an expert share: `copy_by_quota` in csrc/copies.h


class LiveExperts:
    """The experts of one rank's exchange, with `placement.live`. Whoever calls has entered the exchange.

    A signal handler may raise anywhere, and may call what its main thread is in the middle of. So state changes in one
    assignment for each event, and each step does what is left to do.

    Args:
        config: of the group.
        exchange: of this rank.
        slots: [layers][P], what ranks have kept, or None: as in a new group.
        weights: by tag, the weights of a layer's slots, where `replace` is given none; layers add theirs.

    Attributes:
        slots: int32 [layers, P], on the CPU: the logical expert in each slot, or −1, as far as all ranks have come.
        held: int32 [layers, S]: the expert whose weights each slot of this rank has, or −1 while they are overwritten.
        weights: as above.
        moves: of the last call of `replace` that was not refused here, or None.
        calls: of `replace`, also refused ones: the number of the last one, which is the same on all ranks.
        refused_plans: as of `Health`.
    """

    def __init__(
        self, config: EPConfig, exchange: NodeExchange, slots: list[list[int]] | None, weights: dict[int, Weights]
    ) -> None:
        section, self._exchange, self._table = config.placement, exchange, exchange.views["table.copies"]
        sizes, views = exchange.plan.sizes, exchange.views
        self._R, self._E, self._rank, self._most_copies = sizes["R"], sizes["E"], sizes["rank"], section.most_copies
        self._S, self._L = sizes["num_local_experts"], section.layers
        with torch.inference_mode(False):  # otherwise they could not be written outside inference mode
            first = (torch.arange(self._R * self._S, dtype=torch.int32) % self._E).expand(self._L, -1)
            self.slots = first.clone() if slots is None else torch.tensor(slots, dtype=torch.int32)
            self.slots = _at_most(self._most_copies, self.slots)  # ranks may have kept more
            self.held = self._mine(self.slots).clone()
            self._shared_loads = torch.ones(self._L, self._E, dtype=torch.float64)
            self._own_loads = torch.zeros(self._L, self._E, dtype=torch.float64)
            self._counted = torch.zeros(self._L, self._S, dtype=torch.int64)
            window, plan = exchange.window, exchange.plan
            if isinstance(window, SharedMemoryWindow):
                self.mail: MailOnCPU | MailOnGPU = MailOnCPU(window, plan, views)
            else:
                self.mail = MailOnGPU(window, plan, views, exchange.streams)
        self.weights = weights
        self.moves: Moves | None = None
        self._settled: Moves | None = None  # the last moves whose end has been seen to
        self._steps = False
        self.calls = self.refused_plans = self._stalls = self._moved_bytes = self._moved = 0
        self._untold: int | None = None  # number of a refused call of which the others have not heard
        self._before, self._waves = self.slots, list[Wave]()
        self._worker = Worker("epmoe-quotas")  # tables of many layers take milliseconds
        self._made: tuple[int, Result[Tensor]] | None = None  # of a version
        self._sharing: Result[Tensor] | None = None
        self._tables_loads = self._shared_loads
        self._put_into_use(self._tables(self.slots, self._shared_loads))
        if exchange.device.type == "cuda":  # rounds may come on another stream
            torch.cuda.current_stream(exchange.device).synchronize()

    def replace(
        self, slots: Tensor, weights: Weights | None = None, loads: Tensor | None = None, number: int = 0
    ) -> Moves:
        """See `ExpertParallel.replace`. `number` is that of the call, by default the next one."""
        self._refuse_within_a_step("replace")
        self._refuse_while_moving("replace")
        self._settle()
        number = number or self.calls + 1
        if number > MOST_CALLS:
            raise EPStateError(f"`replace` was called {MOST_CALLS} times, which words can count: `resume` begins anew")
        try:
            moves = self._begin(number, slots, weights, loads)
        except BaseException:
            if self.calls < number:  # otherwise they have begun
                self.calls, self._untold, self.refused_plans = number, number, self.refused_plans + 1
                self._tell_refusal()
            raise
        moves.tell()
        self._make(0)
        return moves

    def _begin(self, number: int, slots: Tensor, weights: Weights | None, loads: Tensor | None) -> Moves:
        if not isinstance(slots, Tensor) or slots.shape != self.slots.shape:
            raise ValueError(f"`slots` must be integers {list(self.slots.shape)}, got {describe(slots)}")
        loads = self._shared_loads if loads is None else self._checked(loads)
        target = in_place(self.slots, check_slots(slots, loads, self._R, self._most_copies), self._S)
        waves = plan_waves(self.slots, target, self._S)
        lacking = {move.layer + 1 for wave in waves for move in wave.moves}.difference(self.weights)
        if weights is None and lacking:
            raise ValueError(f"`weights` must be given, since no layer with tag {min(lacking)} has said where its are")
        staging = self._exchange.plan["moves.staging"], self._exchange.views["moves.staging"]
        timeout_s = self._exchange.config.exchange.timeout_s
        moves = Moves(
            self.mail, number, self._rank, self._R, self._S, waves, weights or self._registered, staging,
            timeout_s, self._switch, self._hold,
        )  # fmt: skip
        # Without a call between them, in which a signal handler could raise. Tables under way name slots of before.
        self._stalls, self._moved_bytes, self._moved, self.moves = self.stalls, self.moved_bytes, self.moved, moves
        self._shared_loads, self._before, self._waves, self._made, self._sharing = loads, self.slots, waves, None, None
        self.calls, self._untold = number, None
        return moves

    def share(self, loads: Tensor) -> None:
        """See `ExpertParallel.share`."""
        self._shared_loads = self._checked(loads)
        if self.moves is None or self.moves.done:
            self._share()

    def step(self) -> None:
        """What can be done now, between two rounds: it waits for no rank and for no kernel."""
        if self._is_idle or self._steps or self._is_captured():
            return
        stream = torch.cuda.current_stream(self._table.device) if self._table.is_cuda else None
        try:
            self._steps = True
            self._step()
        finally:
            self._steps = False
            if stream is not None:
                torch.cuda.set_stream(stream)  # a signal handler may have raised where it is another one

    @property
    def _is_idle(self) -> bool:
        in_use = self._sharing is None and self._tables_loads is self._shared_loads
        return in_use and self.moves is self._settled and self._untold is None

    def _is_captured(self) -> bool:
        """Whether a graph would repeat what this rank does now."""
        if self._exchange.device.type == "cuda":
            for stream in self._exchange.streams():
                with torch.cuda.stream(stream):
                    if torch.cuda.is_current_stream_capturing():
                        return True
        return False

    def _step(self) -> None:
        self._tell_refusal()
        try:
            if self.moves is not None:
                self.moves.step()
        finally:
            self._settle()
        if self.moves is not self._settled or self._exchange.rounds.state != CLOSED:
            return
        if self._tables_loads is not self._shared_loads:
            self._share()
        if (sharing := self._sharing) is not None and sharing.done:
            if sharing.error is None:
                self._put_into_use(sharing.get())
            if self._sharing is sharing:
                self._sharing = None
            sharing.get()

    def _settle(self) -> None:
        """Once, after the end of moves."""
        moves = self.moves
        if moves is self._settled or moves is None or not moves.done:
            return
        held = self._mine(self.slots).clone()
        if moves.cancelled:
            self._share()  # slots that were to be overwritten are in use again
        refused = self.refused_plans + bool(moves.refused_by)
        self.held, self._settled, self.refused_plans = held, moves, refused

    def _tell_refusal(self) -> None:
        if self._untold is not None:
            self.mail.post(PLAN, self._untold << 32 | REFUSED, range(self._R))
            self._untold = None

    def finish(self, timeout_s: float) -> None:
        """Step until the moves are done. Raises EPTimeoutError once a rank has ended, or after `timeout_s` seconds."""
        if self._exchange.rounds.state != CLOSED:
            raise EPStateError("a round is open: experts move between rounds")
        self._refuse_within_a_step("apply")

        def done() -> bool:
            self.step()
            return self._is_idle

        self.wait(done, lambda: [] if self.moves is None else self.moves.waits_for(), timeout_s)

    def wait(self, done: Callable[[], bool], late: Callable[[], list[int]], timeout_s: float) -> None:
        """Until `done`. Raises EPTimeoutError once a rank has ended, or after `timeout_s` seconds, for ranks `late`."""
        deadline = time.monotonic() + timeout_s
        while not done():
            ended = [rank for rank in range(self._R) if self._exchange.dead() >> rank & 1]
            if ended or time.monotonic() > deadline:
                self._exchange.check()
                missing = ended or late()
                names = [self._exchange.global_ranks[rank] for rank in missing]
                why = f"waited for rank(s) {missing} of the group (global rank(s) {names})"
                failed = partial(EPTimeoutError, "the move of experts, after dispatch", self._exchange.rounds.count)
                go_on = "the moves and rounds go on: call `apply` again on all ranks"
                raise failed(missing, names, why) if ended else failed(missing, names, why, go_on)
            time.sleep(1e-4)

    def send_loads(self) -> None:
        """Send the rows that this rank's experts have received so far, by layer and expert, to all ranks."""
        self._count()
        gathered, E = self._exchange.plan["moves.loads"], self._E
        offset = gathered.offset + 8 * self._L * E * self._rank
        mine = self._own_loads.clone().view(-1)
        if self._exchange.device.type == "cuda":
            mine = mine.pin_memory()
        for rank in range(self._R):
            self.mail.put(rank, offset, mine)

    def loads(self) -> Tensor:
        """float64 [layers, E]: the sum of what has arrived from all ranks."""
        return self.mail.fetch(self._exchange.views["moves.loads"]).sum(0)

    @property
    def moved(self) -> int:
        """Experts that have moved to this rank."""
        return self._moved + (0 if self.moves is None else self.moves.copied_experts)

    @property
    def stalls(self) -> int:
        """How often moves got no further within `exchange.timeout_s`."""
        return self._stalls + (0 if self.moves is None else self.moves.stalls)

    @property
    def moved_bytes(self) -> int:
        """Of weights that have come to this rank."""
        return self._moved_bytes + (0 if self.moves is None else self.moves.copied_bytes)

    def experts(self, tag: int) -> list[int]:
        """The experts in this rank's slots of a layer, −1 for an empty slot. Raises EPStateError during moves."""
        self._refuse_while_moving("a look at the experts of a rank")
        return self._mine(self.slots)[self._layer(tag)].tolist()

    def holder(self, tag: int, expert: int) -> tuple[int, int]:
        """Rank and local slot of the first copy of an expert. Raises EPStateError during moves."""
        self._refuse_while_moving("a look at the experts of a rank")
        return divmod(int((self.slots[self._layer(tag)] == expert).nonzero()[0]), self._S)

    def close(self) -> None:
        """End the thread, and the moves before their windows go."""
        if self.moves is not None:
            self.moves.end()
        self.mail.close()
        self._worker.close()

    def _layer(self, tag: int) -> int:
        if not 1 <= tag <= self._L:
            raise ValueError(f"`tag` must be from 1 to {self._L}, a layer of `placement.layers`, got {tag}")
        return tag - 1

    def _refuse_within_a_step(self, what: str) -> None:
        if self._steps:
            raise EPStateError(f"a signal handler called {what} in the middle of another call: call it afterwards")

    def _refuse_while_moving(self, what: str) -> None:
        if self.moves is not None and not self.moves.done:
            raise EPStateError(f"experts are moving: {what} comes after the end of the moves, which `apply` awaits")

    def _mine(self, slots: Tensor) -> Tensor:
        return slots[:, self._rank * self._S : (self._rank + 1) * self._S]

    def _checked(self, loads: Tensor) -> Tensor:
        shape = (self._L, self._E)
        if not isinstance(loads, Tensor) or loads.shape != shape or not (loads.isfinite() & (loads >= 0)).all():
            raise ValueError(f"`loads` must be {list(shape)}, finite and at least 0, got {describe(loads)}")
        return loads.detach().to("cpu", torch.float64)

    def _registered(self, tag: int, local: int) -> Sequence[Tensor]:
        return self.weights[tag](tag, local)

    def _hold(self, layer: int, local: int, expert: int) -> None:
        if expert == EMPTY:
            self._count()  # rows so far were those of the expert that goes
        self.held[layer, local] = expert

    def _count(self) -> None:
        """Add the rows that slots have received since the last time to the loads of the experts in them."""
        counted = self.mail.fetch(self._exchange.views["health.tokens_per_expert"])
        rows = (counted - self._counted).double() * (self.held != EMPTY)
        loads = self._own_loads.scatter_add(1, self.held.clamp(min=0).long(), rows)
        self._own_loads, self._counted = loads, counted.clone()

    def _after(self, version: int) -> Tensor:
        return self._before if version == 0 else self._waves[version - 1].slots

    def _in_use(self, version: int) -> Tensor:
        slots = self._after(version).clone()
        if version < len(self._waves):
            for move in self._waves[version].moves:
                slots[move.layer, move.slot] = EMPTY
        return slots

    def _make(self, version: int) -> None:
        made = version, self._submit(self._in_use(version))
        self._made, self._tables_loads = made, self._shared_loads

    def _switch(self, version: int) -> bool:
        """Use the tables of a version, if they are made and no round is open."""
        if self._made is None or self._made[0] != version:
            self._make(version)
        assert self._made is not None
        if not self._made[1].done or self._exchange.rounds.state != CLOSED:
            return False
        made, self._made = self._made[1], None
        self._put_into_use(made.get())
        self.slots = self._after(version)
        if version < len(self._waves):
            self._make(version + 1)
        return True

    def _share(self) -> None:
        self._sharing, self._tables_loads = self._submit(self.slots), self._shared_loads

    def _submit(self, slots: Tensor) -> Result[Tensor]:
        return self._worker.submit(partial(self._tables, slots, self._shared_loads))

    def _tables(self, slots: Tensor, loads: Tensor) -> Tensor:
        """int32 [layers, 2, E, copies], for few tokens and for many."""
        slots = _at_most(self._most_copies, slots)  # an expert that moves has more between two waves
        shares = shares_of(loads, slots, self._R)
        choose = partial(
            choices, slots, shares, self._rank, ep_size=self._R, num_experts=self._E, most_copies=self._most_copies
        )
        table = torch.stack([quotas(*choose(one_copy=one_copy)) for one_copy in (True, False)], dim=1)
        table = F.pad(table, (0, self._table.shape[-1] - table.shape[-1]), value=-1)  # whole lines
        return self.mail.upload(table)

    def _put_into_use(self, table: Tensor) -> None:
        """Behind all rounds so far and before those to come, whichever of their streams this is called on."""
        streams = self._exchange.streams() if table.is_cuda else []
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
        with torch.inference_mode(False):
            self._table.copy_(table)
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        if streams:
            table.record_stream(streams[0])


def _at_most(copies: int, slots: Tensor) -> Tensor:
    """`slots` [L, P] with the first so many copies of each expert; slots of others are empty."""
    if slots.shape[1] <= copies:
        return slots
    experts, order = slots.sort(dim=1, stable=True)
    surplus = F.pad(experts[:, copies:] == experts[:, :-copies], (copies, 0))
    return slots.masked_fill(torch.zeros_like(surplus).scatter(1, order, surplus), EMPTY)


def quotas(slots: Tensor, thresholds: Tensor) -> Tensor:
    """What `copy_by_quota` in csrc/copies.h reads.

    Args:
        slots: int32 [..., C], of `Choices`.
        thresholds: int64 [..., C], likewise.

    Returns:
        int32 [..., C]: in the high 16 bits the last number that a copy takes, in the low ones its slot. Copies that get
        no number stand at the end.
    """
    ends = (thresholds * _NUMBERS + 2**31 >> 32).clamp(0, _NUMBERS)
    starts = torch.cat([torch.zeros_like(ends[..., :1]), ends[..., :-1]], dim=-1)
    order = (ends <= starts).to(torch.int8).sort(dim=-1, stable=True).indices
    last = torch.where(ends > starts, ends - 1, _NUMBERS - 1).gather(-1, order)
    entries = last << 16 | slots.long().clamp(min=0).gather(-1, order)
    return torch.where(entries >= 2**31, entries - 2**32, entries).int()
