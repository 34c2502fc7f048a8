"""`Balancer`: watches the loads of experts that can move, then shares and moves them so that ranks have equal work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.balance import GOAL, MAX_MOVES, Plan, balance, shares_of
from epmoe.config.placement import is_int
from epmoe.exchange.exchange import Exchange, in_turn
from epmoe.exchange.moves import COUNTED, LAST_PLAN, PLANNED, Moves, Weights
from epmoe.group.errors import EPRefusedError
from epmoe.group.waiting import Result, Worker
from epmoe.live import LiveExperts
from epmoe.service import ExpertParallel

LEAST_GAIN = 0.002
_LOOKS = 20  # for a plan, between two gatherings of loads
_CALLS = 1 << 31  # numbers of calls of `finish`, which then begin again


class Step(NamedTuple):
    """What a plan has changed."""

    tick: int
    moves: int
    total_bytes: int
    """that have reached this rank"""
    before: list[float]
    """[layers] load of the busiest rank over the mean, on rank 0; [] on the others"""
    after: list[float]
    """likewise, as planned"""


class Balancer:
    """Moves experts of an `ExpertParallel` with `placement.live`. All ranks make one and call `tick` at every step.

    Every `every` ticks ranks send their loads, and rank 0 plans, on a thread of its own: how copies share what has come
    since the last plan, and few moves where sharing alone does not do. It sends the plan to all ranks, which take it up
    at their own next ticks. No rank waits for another.

    Where `weights` raises on a rank, `tick` raises there. All ranks drop this plan then, `health` counts it, and the
    balancer goes on with the next one.

    Args:
        ep: with `placement.live`.
        every: ticks from plan to plan.
        goal: of a layer: the load of the busiest rank over the mean. Below it nothing moves.
        max_moves: of a layer, in a plan.
        least_gain: of that ratio, for each move; a layer that would gain less keeps its experts where they are.
        weights: as of `ExpertParallel.replace`.

    Attributes:
        plan: the last one, on rank 0, in which layers whose moves do not pay keep their slots; None on the others.
        history: what plans have changed, in order.

    Raises:
        EPStateError: `placement.live` is not set.
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        ep: ExpertParallel,
        every: int = 1000,
        *,
        goal: float = GOAL,
        max_moves: int = MAX_MOVES,
        least_gain: float = LEAST_GAIN,
        weights: Weights | None = None,
    ) -> None:
        if not is_int(every) or every < 1:
            raise ValueError(f"`every` must be an integer of at least 1, got {every!r}")
        if not isinstance(least_gain, int | float) or not least_gain >= 0:
            raise ValueError(f"`least_gain` must be a number of at least 0, got {least_gain!r}")
        _ = ep.slots  # raises without `placement.live`
        one = torch.zeros(1, dtype=torch.int32)
        balance(one, one, ep_size=1, max_moves=max_moves, goal=goal)  # raises where these do not fit
        self._ep, self._every, self._weights = ep, every, weights
        self._goal, self._max_moves, self._least_gain = goal, max_moves, least_gain
        self.plan: Plan | None = None
        self.history: list[Step] = []
        self._worker = Worker("epmoe-balance")
        self._planning: Result[Plan] | None = None
        # Calls of `replace`: the last one here, and that of the last step of `history`.
        self._taken = self._recorded = 0
        self._ticking = False
        self._generation = self._ticks = self._counted = self._planned = self._finishes = 0
        self._recent = self._last_loads = torch.zeros(1, 1, dtype=torch.float64)
        self._begin()

    @in_turn
    def tick(self) -> None:
        """One step, between two rounds, on their stream. It polls, and waits for no rank and for no kernel.

        Raises what `ExpertParallel.poll` does, except EPRefusedError, and what `weights` raises.
        """
        if self._ticking:  # this is a signal handler
            return
        try:
            self._ticking = True
            self._tick()
        finally:
            self._ticking = False

    def _tick(self) -> None:
        ep = self._ep
        if ep.generation != self._generation:
            self._begin()
        self._going_on(ep.poll)
        self._ticks += 1
        if self._ticks % self._every == 0:
            self._live.send_loads()
            self._live.mail.post(COUNTED, self._ticks, [0])
        if ep.rank == 0 and (planning := self._planning) is not None and planning.done and self._idle:
            if planning.error is not None:
                self._planning = None
            self._publish(planning.get())
        if self._ticks % max(1, self._every // _LOOKS) == 0 and self._idle:
            self._look()

    @in_turn
    def finish(self, timeout_s: float | None = None) -> None:
        """Carry out what rank 0 has planned so far. Collective: all ranks call it between the same rounds.

        As `ExpertParallel.apply`, which alone does not wait for ranks that have not taken up a plan yet. It raises what
        that does.
        """
        ep, live = self._ep, self._live
        if ep.generation != self._generation:
            self._begin()
        self._finishes += 1
        if ep.rank == 0:
            self._planning = None
            live.mail.post(LAST_PLAN, self._finishes % _CALLS << 32 | self._planned, range(ep.size))
        timeout_s = ep.config.exchange.timeout_s if timeout_s is None else timeout_s
        last = 0

        def told() -> bool:
            nonlocal last
            if (words := live.mail.words()) is None:  # not here yet
                return False
            finishes, last = divmod(words[0][LAST_PLAN], 1 << 32)
            return (finishes - self._finishes) % _CALLS < _CALLS // 2

        live.wait(told, lambda: [0], timeout_s)
        if live.calls < last:
            self._going_on(ep.apply, timeout_s)  # rank 0 has seen the end of the moves before, this rank may not have
            self._take(last)
        self._going_on(ep.apply, timeout_s)

    def close(self) -> None:
        """End the thread. Moves that are under way go on with `ep.poll`."""
        self._worker.close()

    @property
    def exchange(self) -> Exchange:
        """That of `ep`."""
        return self._ep.exchange

    @property
    def _live(self) -> LiveExperts:
        live = self._ep.live
        assert live is not None
        return live

    @property
    def _moves(self) -> Moves | None:
        return self._live.moves

    @property
    def _idle(self) -> bool:
        moves = self._moves
        return moves is None or moves.done

    def _going_on(self, call: Callable[..., None], *arguments: float) -> None:
        """Call `poll` or `apply`, of which a plan that another rank has refused is no error."""
        try:
            call(*arguments)
        except EPRefusedError:
            if self._taken != self._live.calls:  # the caller's own
                raise
            if self._recorded == self._taken:
                self.history.pop()

    def _begin(self) -> None:
        """In a group whose words and loads begin again."""
        self._generation, self._planning = self._ep.generation, None
        self._ticks = self._counted = self._planned = self._finishes = self._taken = self._recorded = 0
        self._last_loads = torch.zeros(1, 1, dtype=torch.float64)

    def _look(self) -> None:
        """On rank 0, plan once the loads of all ranks are here; on all ranks, take up a plan that has arrived."""
        words = self._live.mail.words()
        if words is None:
            return
        if words[0][PLANNED] > self._live.calls:
            self._take(words[0][PLANNED])
        elif self._ep.rank == 0 and self._planning is None:
            counted = min(row[COUNTED] for row in words)
            if counted > self._counted:
                self._counted = counted
                self._plan()

    def _plan(self) -> None:
        loads = self._live.loads()
        recent = (loads - self._last_loads).clamp(min=0)
        if not recent.any():
            return
        self._last_loads = loads
        section, slots = self._ep.config.placement, self._ep.slots

        def plan() -> Plan:
            found = balance(
                recent, slots, ep_size=self._ep.size, max_moves=self._max_moves, goal=self._goal,
                most_copies=section.most_copies,
            )  # fmt: skip
            return self._worthwhile(found, recent, slots)

        self._recent, self._planning = recent, self._worker.submit(plan)

    def _worthwhile(self, plan: Plan, loads: Tensor, slots: Tensor) -> Plan:
        """The plan, in layers whose moves pay; the others keep `slots`."""
        counts = torch.bincount(torch.tensor([m.layer for m in plan.moves], dtype=torch.int64), minlength=len(slots))
        before, after = torch.tensor([plan.balance_before, plan.balance_after], dtype=torch.float64)
        pays = (before > self._goal) & (before - after >= self._least_gain * counts)
        kept = torch.where(pays[:, None], plan.slots, slots)
        return Plan(
            slots=kept,
            shares=shares_of(loads, kept, self._ep.size),
            moves=[move for move in plan.moves if pays[move.layer]],
            balance_before=plan.balance_before,
            balance_after=torch.where(pays, after, before).tolist(),
        )

    def _publish(self, planned: Plan) -> None:
        """The plan and its loads into all windows, then the number that its call of `replace` has on all ranks.

        A rank that has not taken up a plan that others have refused takes the next one, by the same number.
        """
        ep, live = self._ep, self._live
        plan, number = ep.exchange.plan, live.calls + 1
        parts = (
            (plan["moves.planned_loads"].offset, self._recent), (plan["moves.planned_slots"].offset, planned.slots),
        )  # fmt: skip
        for offset, part in parts:
            source = part.contiguous().view(-1)
            source = source.pin_memory() if ep.device.type == "cuda" else source
            for rank in range(ep.size):
                live.mail.put(rank, offset, source)
        live.mail.post(PLANNED, number, range(ep.size))
        self.plan, self._planning, self._planned = planned, None, number

    def _take(self, number: int) -> None:
        """The plan of rank 0 with this number, which has arrived."""
        ep, live = self._ep, self._live
        views = ep.exchange.views
        loads = live.mail.fetch(views["moves.planned_loads"])
        slots = live.mail.fetch(views["moves.planned_slots"])
        self._taken = number
        moves = live.replace(slots, self._weights, loads, number)
        before, after = ([], []) if self.plan is None else (self.plan.balance_before, self.plan.balance_after)
        self.history.append(Step(self._ticks, moves.count, moves.total_bytes, before, after))
        self._recorded = number
