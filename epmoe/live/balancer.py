"""`Balancer`: watches the loads of experts that can move, then shares and moves them so that ranks
have equal work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from epmoe.config.placement import is_int
from epmoe.exchange.exchange import Exchange, takes_turn_of_exchange
from epmoe.group.errors import EPRefusedError, EPStateError
from epmoe.group.member import Member
from epmoe.group.waiting import Promise, Worker
from epmoe.live.balance import GOAL, MAX_MOVES, Plan, check_limits, check_slots
from epmoe.live.experts import LiveExperts
from epmoe.live.layout import Word
from epmoe.live.moves import SlotWeights
from epmoe.live.policy import Policy, few_moves

LEAST_GAIN = 0.002
_LOOKS = 20  # for a plan, between two gatherings of loads
_CALLS = 1 << 31  # numbers of calls of `finish`, which then begin again


class Serving(Member, Protocol):
    """What a `Balancer` uses of an `ExpertParallel`."""

    live: LiveExperts | None

    def poll(self) -> None: ...

    def apply(self, timeout_s: float | None = None) -> None: ...


class Step(NamedTuple):
    """What a plan has changed."""

    tick: int
    """of the group"""
    moves: int
    total_bytes: int
    """of weights that come to this rank"""
    before: list[float]
    """[layers] load of the busiest rank over the mean, on rank 0; [] on the others"""
    after: list[float]
    """[layers] the same after the moves, as the plan expects it"""


class Balancer:
    """Moves experts of an `ExpertParallel` with `placement.live`. All ranks make one and call
    `tick` at every step.

    Every `every` ticks ranks send their loads, and rank 0 plans, on a thread of its own: how copies
    share what has come since the last plan, and few moves where sharing alone does not do. It sends
    the plan to all ranks, which take it up at their own next ticks. No rank waits for another.

    Where `weights` raises on a rank, `tick` raises there. All ranks drop this plan then, `health`
    counts it, and the balancer goes on with the next one. Where `policy` raises, or its plan does
    not fit, `tick` raises on rank 0.

    Args:
        ep: an `ExpertParallel` with `placement.live`.
        every: ticks from plan to plan.
        goal: of a layer: the load of the busiest rank over the mean. Below it nothing moves.
        max_moves: most moves of a layer, in a plan.
        least_gain: what each move takes off that ratio, in a plan or on the whole way that several
            plans go; a layer that would gain less keeps its experts where they are. See
            `few_moves`.
        policy: makes the plans, from loads, slots and the limits above; see `epmoe.live.policy`.
        weights: takes a tag and a local slot, and returns its weights; see
            `ExpertParallel.replace`.

    Attributes:
        plan: the last one, on rank 0; None on the others. With the default policy, layers whose
            moves do not pay keep their slots.
        history: what plans have changed, in order.

    Raises:
        EPStateError: `placement.live` is not set.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        ep: Serving,
        every: int = 1000,
        *,
        goal: float = GOAL,
        max_moves: int = MAX_MOVES,
        least_gain: float = LEAST_GAIN,
        policy: Policy = few_moves,
        weights: SlotWeights | None = None,
    ) -> None:
        if not is_int(every) or every < 1:
            raise ValueError(f"`every` must be an integer of at least 1, got {every!r}")
        if not isinstance(least_gain, int | float) or not least_gain >= 0:
            raise ValueError(f"`least_gain` must be a number of at least 0, got {least_gain!r}")
        check_limits(max_moves, goal)
        if ep.live is None:
            raise EPStateError("experts stay where they are: `placement.live` is not set")
        self._ep = ep
        self._every = every
        self._policy = policy
        self._weights = weights
        self._limits = {"goal": goal, "max_moves": max_moves, "least_gain": least_gain}
        self.plan: Plan | None = None
        self.history: list[Step] = []
        self._worker = Worker("epmoe-balance")
        self._ticking = False
        self._begin()

    def _begin(self) -> None:
        self._generation = self._ep.generation
        self._counted = self._planned = (
            0  # of rank 0: the tick of the last plan, and its call of `replace`
        )
        self._taken = self._recorded = (
            0  # calls of `replace`: the last one here, and that of the last `Step`
        )
        self._planning: Promise[Plan] | None = None
        self._recent = self._last_loads = torch.zeros(1, 1, dtype=torch.float64)

    @takes_turn_of_exchange
    def tick(self) -> None:
        """One step, between two rounds, on their stream. It polls, and waits for no rank and for no
        kernel.

        Raises what `ExpertParallel.poll` does, except EPRefusedError, and what `weights` and
        `policy` raise.
        """
        if self._ticking:  # this is a signal handler
            return
        try:
            self._ticking = True
            self._tick()
        finally:
            self._ticking = False

    def _tick(self) -> None:
        if self._ep.generation != self._generation:
            self._begin()
        self._going_on(self._ep.poll)
        live = self._live
        live.ticks += 1
        if live.ticks % self._every == 0:
            live.send_loads()
            live.mail.post(Word.COUNTED, live.ticks, [0])
        if live.ticks % max(1, self._every // _LOOKS) == 0 and self._is_idle:
            self._look()

    @takes_turn_of_exchange
    def finish(self, timeout_s: float | None = None) -> None:
        """Carry out what rank 0 has planned so far. Collective: all ranks call it between the same
        rounds.

        It is like `ExpertParallel.apply`, which does not wait for ranks that have not taken up a
        plan yet, and raises what that does.
        """
        ep = self._ep
        live = self._live
        if ep.generation != self._generation:
            self._begin()
        live.finishes += 1
        if ep.rank == 0:
            self._planning = None
            live.mail.post(
                Word.LAST_PLAN, live.finishes % _CALLS << 32 | self._planned, range(ep.size)
            )
        last = 0

        def told() -> bool:
            nonlocal last
            words = live.mail.words()
            if words is None:  # not here yet
                return False
            finishes, last = divmod(words[0][Word.LAST_PLAN], 1 << 32)
            return (finishes - live.finishes) % _CALLS < _CALLS // 2

        live.wait(told, lambda: [0], timeout_s)
        if live.calls < last:
            self._going_on(
                ep.apply, timeout_s
            )  # rank 0 has seen the end of the moves before, this rank may not have
            self._take()
        self._going_on(ep.apply, timeout_s)

    def close(self) -> None:
        """End the thread. Moves that are under way go on with `ep.poll`."""
        self._worker.close()

    @property
    def exchange(self) -> Exchange:
        """The exchange of `ep`."""
        return self._ep.exchange

    @property
    def _live(self) -> LiveExperts:
        live = self._ep.live
        assert live is not None
        return live

    @property
    def _is_idle(self) -> bool:
        moves = self._live.moves
        return moves is None or moves.done

    def _going_on(self, call: Callable[..., None], *arguments: float | None) -> None:
        """Call `poll` or `apply`, of which a plan that another rank has refused is no error."""
        try:
            call(*arguments)
        except EPRefusedError:
            if self._taken != self._live.calls:  # the caller's own
                raise
            if self._recorded == self._taken:
                self.history.pop()

    def _look(self) -> None:
        """Take up a plan that has arrived. On rank 0: plan once the loads of all ranks are here,
        then publish.
        """
        words = self._live.mail.words()
        live = self._live
        if words is None:
            return
        if words[0][Word.PLANNED] > live.calls:
            self._take()
        elif self._ep.rank != 0:
            return
        elif (planning := self._planning) is None:
            counted = min(row[Word.COUNTED] for row in words)
            if counted > self._counted:
                self._counted = counted
                self._plan()
        elif planning.error is not None:
            self._planning = None
            raise planning.error
        elif planning.done and all(row[Word.PLAN] >> 32 >= live.calls for row in words):
            self._publish(planning.get())  # nobody still reads the last one

    def _plan(self) -> None:
        loads = self._live.loads()
        recent = (loads - self._last_loads).clamp(min=0)
        if not recent.any():
            return
        self._last_loads = loads
        self._recent, self._planning = (
            recent,
            self._worker.submit(partial(self._plan_for, recent, self._live.slots)),
        )

    def _plan_for(self, loads: Tensor, slots: Tensor) -> Plan:
        """Ask the policy. The table of its plan goes into the windows of all ranks, so it must fit
        there.
        """
        R = self._ep.size
        most_copies = self._ep.config.placement.most_copies
        plan = self._policy(
            loads, slots.clone(), ep_size=R, most_copies=most_copies, **self._limits
        )
        table = check_slots(plan.slots, loads, R, most_copies)
        if table.shape != slots.shape:
            raise ValueError(
                f"`policy` must plan slots {list(slots.shape)}, got {list(table.shape)}"
            )
        return replace(plan, slots=table)

    def _publish(self, plan: Plan) -> None:
        """Put the plan and its loads into all windows, then the number that its call of `replace`
        has on all ranks.
        """
        live = self._live
        number = self._live.calls + 1
        live.mail.share("moves.planned_loads", self._recent)
        live.mail.share("moves.planned_slots", plan.slots)
        self.plan, self._planning, self._planned = (
            plan,
            None,
            number,
        )  # before a signal handler raises behind the word
        live.mail.post(Word.PLANNED, number, range(self._ep.size))

    def _take(self) -> None:
        live = self._live
        views = self._ep.exchange.views
        loads = live.mail.fetch(views["moves.planned_loads"])
        slots = live.mail.fetch(
            views["moves.planned_slots"].flatten()[: live.slots.numel()]
        ).view_as(live.slots)
        self._taken = number = live.calls + 1
        moves = live.replace(slots, self._weights, loads)
        before, after = (
            ([], []) if self.plan is None else (self.plan.balance_before, self.plan.balance_after)
        )
        self.history.append(Step(live.ticks, moves.count, moves.total_bytes, before, after))
        self._recorded = number
