"""`Balancer`: watches the loads of experts that can move, then shares and moves them so that ranks
have equal work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from epmoe.config.placement import is_int
from epmoe.exchange.exchange import Exchange, takes_turn_of_exchange
from epmoe.group.errors import EPRefusedError
from epmoe.group.member import Member
from epmoe.group.waiting import Promise, Worker
from epmoe.live.balance import GOAL, MAX_MOVES, Plan, check_limits, check_slots
from epmoe.live.experts import LiveExperts, RankExperts
from epmoe.live.layout import Word
from epmoe.live.moves import SlotWeights
from epmoe.live.policy import Policy, few_moves

LEAST_GAIN = 0.002
# Looks for a plan between two gatherings of loads.
_LOOKS = 20
# Numbers of calls of `finish`, which then begin again.
_CALLS = 1 << 31

_log = logging.getLogger("epmoe")


class Serving(Member, Protocol):
    """What a `Balancer` uses of an `ExpertParallel`."""

    live: RankExperts

    def poll(self) -> None: ...

    def apply(self, timeout_s: float | None = None) -> None: ...


class _Missing(NamedTuple):
    """A rank whose loads are behind."""

    tick: int
    """of its last loads"""
    since: float
    """the time from which on nothing has come from it, in seconds of `time.monotonic`"""


class Step(NamedTuple):
    """The change that a plan has made."""

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
        stalls: how often ranks have sent no loads for the deadline of a round while others have, so
            that there is no plan: they leave `tick` out. Each is also a warning of the logger
            `epmoe`.

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
        ep.live.moving()  # raises where experts stay
        self._ep = ep
        self._every = every
        self._policy = policy
        self._weights = weights
        # What the policy gets with each call.
        self._limits = {"goal": goal, "max_moves": max_moves, "least_gain": least_gain}
        self.plan: Plan | None = None
        self.history: list[Step] = []
        self._worker = Worker("epmoe-balance")
        self._ticking = False
        self._begin()

    def _begin(self) -> None:
        """Begin to watch loads, in a group that has just formed."""
        self._generation = self._ep.generation
        # Of rank 0: the tick of the last plan, and the call of `replace` that carries it out.
        self._counted = 0
        self._planned = 0
        # Calls of `replace`: the last one here, and that of the last `Step`.
        self._taken = 0
        self._recorded = 0
        self._planning: Promise[Plan] | None = None
        # By rank: the tick at which it has sent its loads last.
        self._sent_at: list[int] = []
        # Ranks that are behind.
        self._missing: dict[int, _Missing] = {}
        # Rows of experts since the plan before the last, and until the last one.
        self._recent = torch.zeros(1, 1, dtype=torch.float64)
        self._last_loads = self._recent

    @takes_turn_of_exchange
    def tick(self) -> None:
        """Take one step, between two rounds, on their stream. It polls, and waits for no rank and
        for no kernel.

        Raises what `ExpertParallel.poll` does, except EPRefusedError, and what `weights` and
        `policy` raise.
        """
        # A signal handler has called it in the middle of a tick.
        if self._ticking:
            return
        try:
            self._ticking = True
            self._tick()
        finally:
            self._ticking = False

    def _tick(self) -> None:
        if self._ep.generation != self._generation:
            self._begin()
        live = self._live
        live.has_ticked = True
        # Moves that are under way go first.
        self._going_on(self._ep.poll)
        live.ticks += 1
        # Send loads from time to time, and say so.
        if live.ticks % self._every == 0:
            live.send_loads()
            live.mail.post(Word.COUNTED, live.ticks, range(self._ep.size))
        # Look for a plan more often, since it comes between two sendings.
        is_look_due = live.ticks % max(1, self._every // _LOOKS) == 0
        if is_look_due and self._is_idle:
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
        # Rank 0 makes no further plan, and tells all which was the last. A rank that calls again,
        # since a signal handler has raised, is still in the same call.
        if live.has_ticked:
            live.finishes += 1
            live.has_ticked = False
        if ep.rank == 0:
            self._planning = None
            said = live.finishes % _CALLS << 32 | self._planned
            live.mail.post(Word.LAST_PLAN, said, range(ep.size))
        last_plan = 0

        def told() -> bool:
            """Whether the word is of this call of `finish`, or of a later one."""
            nonlocal last_plan
            words = live.mail.words()
            if words is None:  # not here yet
                return False
            finishes, last_plan = divmod(words[0][Word.LAST_PLAN], 1 << 32)
            return (finishes - live.finishes) % _CALLS < _CALLS // 2

        live.wait(told, lambda: [0], timeout_s)
        # Take the plan up, behind the moves before, whose end rank 0 has seen.
        if live.calls < last_plan:
            self._going_on(ep.apply, timeout_s)
            self._take()
        self._going_on(ep.apply, timeout_s)

    def waits_for(self) -> list[int]:
        """Other ranks that this balancer needs before it gets further, as far as this rank knows.

        While experts move: those of `Moves.waits_for`. Before a plan: those whose loads are behind
        the newest ones. They call `tick` later than others, or not at all. Any thread may call it.
        """
        moves = self._live.moves
        if moves is not None and not moves.done:
            return moves.waits_for()
        return [rank for rank in _behind(self._sent_at) if rank != self._ep.rank]

    @property
    def stalls(self) -> int:
        return self._live.stalled_plans

    def close(self) -> None:
        """End the thread. `ep.poll` finishes moves that are under way."""
        self._worker.close()

    @property
    def exchange(self) -> Exchange:
        """The exchange of `ep`."""
        return self._ep.exchange

    @property
    def _live(self) -> LiveExperts:
        return self._ep.live.moving()

    @property
    def _is_idle(self) -> bool:
        """Whether no moves are under way."""
        moves = self._live.moves
        return moves is None or moves.done

    def _going_on(self, call: Callable[..., None], *arguments: float | None) -> None:
        """Call `poll` or `apply`. A plan that another rank has refused is no error of the call."""
        try:
            call(*arguments)
        except EPRefusedError:
            # The caller has made this call of `replace` itself.
            if self._taken != self._live.calls:
                raise
            if self._recorded == self._taken:
                self.history.pop()

    def _look(self) -> None:
        """Take up a plan that has arrived. On rank 0: plan once the loads of all ranks are here,
        then publish.
        """
        live = self._live
        words = live.mail.words()
        if words is None:  # not here yet
            return
        self._sent_at = [row[Word.COUNTED] for row in words]
        self._count_stalls()
        if words[0][Word.PLANNED] > live.calls:
            self._take()
            return
        if self._ep.rank != 0:
            return
        planning = self._planning
        if planning is None:
            self._plan_if_counted()
        elif planning.error is not None:
            self._planning = None
            raise planning.error
        elif planning.done:
            # Buffers of the last plan are free once all ranks have taken it up.
            have_all_taken = all(row[Word.PLAN] >> 32 >= live.calls for row in words)
            if have_all_taken:
                self._publish(planning.get())

    def _plan_if_counted(self) -> None:
        """Begin to plan, once loads of all ranks are here that no plan has seen."""
        counted = min(self._sent_at)
        if counted > self._counted:
            self._counted = counted
            self._plan()

    def _count_stalls(self) -> None:
        """Count, and log, that ranks that are behind send nothing."""
        now = time.monotonic()
        # A rank that has sent something, or is not behind any more, begins anew.
        missing: dict[int, _Missing] = {}
        for rank in _behind(self._sent_at):
            tick = self._sent_at[rank]
            missing[rank] = _Missing(tick, now)
            before = self._missing.get(rank)
            if before is not None and before.tick == tick:
                missing[rank] = before
        self._missing = missing
        # Each deadline that passes counts once.
        wait_s = self._ep.exchange.deadlines.wait_s()
        late = [rank for rank, each in missing.items() if now - each.since > wait_s]
        if not late:
            return
        for rank in late:
            missing[rank] = missing[rank]._replace(since=now)
        self._live.stalled_plans += 1
        _log.warning(
            "rank %d: no experts move, since rank(s) %s have sent no loads at tick %d, which other "
            "ranks have: do they call `Balancer.tick` at every step?",
            self._ep.rank,
            late,
            max(self._sent_at),
        )

    def _plan(self) -> None:
        """Begin to plan for what has come since the last plan, on the thread."""
        loads = self._live.loads()
        recent = (loads - self._last_loads).clamp(min=0)
        if not recent.any():
            return
        self._last_loads = loads
        self._recent = recent
        self._planning = self._worker.submit(partial(self._plan_for, recent, self._live.slots))

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
        number = live.calls + 1
        live.mail.share("moves.planned_loads", self._recent)
        live.mail.share("moves.planned_slots", plan.slots)
        # The state goes before the word: a signal handler may raise behind it.
        self.plan = plan
        self._planning = None
        self._planned = number
        live.mail.post(Word.PLANNED, number, range(self._ep.size))

    def _take(self) -> None:
        """Take up the plan in this rank's window. A refusal of another rank drops its `Step`."""
        live = self._live
        views = self._ep.exchange.views
        loads = live.mail.fetch(views["moves.planned_loads"])
        # The buffer has room for the slots of all seats.
        planned = views["moves.planned_slots"].flatten()[: live.slots.numel()]
        slots = live.mail.fetch(planned).view_as(live.slots)
        number = live.calls + 1
        self._taken = number
        moves = live.replace(slots, self._weights, loads)
        before: list[float] = []
        after: list[float] = []
        if self.plan is not None:
            before = self.plan.balance_before
            after = self.plan.balance_after
        self.history.append(Step(live.ticks, moves.count, moves.total_bytes, before, after))
        self._recorded = number


def _behind(sent_at: list[int]) -> list[int]:
    """Ranks whose loads are older than the newest ones."""
    newest = max(sent_at, default=0)
    return [rank for rank, tick in enumerate(sent_at) if tick < newest]
