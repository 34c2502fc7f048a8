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

# By default a move must take this off the ratio of the busiest rank's load to the mean.
LEAST_GAIN = 0.002
# Ranks look for a plan this often between two ticks at which they send loads.
_LOOKS = 20
# Calls of `finish` are numbered up to this, then from 0 again: a word has 31 bits for the number.
_FINISH_NUMBERS = 1 << 31

_log = logging.getLogger("epmoe")


class Serving(Member, Protocol):
    """The part of an `ExpertParallel` that a `Balancer` uses."""

    @property
    def live(self) -> RankExperts: ...

    def poll(self) -> None: ...

    def apply(self, timeout_s: float | None = None) -> None: ...


class _Missing(NamedTuple):
    """A rank whose last loads are older than those of other ranks."""

    tick: int
    """the tick at which the rank has sent its last loads"""
    since: float
    """since when nothing has come from the rank, in seconds of `time.monotonic`"""


class Step(NamedTuple):
    """The change that a plan has made."""

    tick: int
    """the tick of the group in which this rank has taken the plan up"""
    moves: int
    """the number of moves on all ranks"""
    total_bytes: int
    """the bytes of weights that come to this rank"""
    before: list[float]
    """[layers] the load of the busiest rank over the mean, on rank 0; [] on the other ranks"""
    after: list[float]
    """[layers] the same ratio after the moves, as the plan expects it"""


class Balancer:
    """Moves experts of an `ExpertParallel` with `placement.live`. All ranks make one and call
    `tick` at every step.

    Every `every` ticks all ranks send their loads. Rank 0 then plans on a thread of its own, for
    the tokens that have come since the last plan. A plan says how the copies of an expert share its
    tokens. If sharing alone does not make ranks even, it also has a few moves. Rank 0 sends the
    plan to all ranks, and each rank takes it up at its next tick. No rank waits for another.

    If `weights` raises on a rank, `tick` raises there. All ranks then drop this plan, `health`
    counts it, and the balancer goes on with the next plan. If `policy` raises, or its plan does not
    fit, `tick` raises on rank 0.

    Args:
        ep: an `ExpertParallel` with `placement.live`.
        every: the number of ticks from one plan to the next.
        goal: the load of the busiest rank over the mean. Experts of a layer below it do not move.
        max_moves: most moves of a layer in one plan.
        least_gain: how much each move must take off that ratio, in one plan or in several plans
            together. A layer that would gain less keeps its experts where they are. See
            `few_moves`.
        policy: makes the plans, from loads, slots and the limits above; see `epmoe.live.policy`.
        weights: takes a tag and a local slot, and returns the weights of the slot; see
            `ExpertParallel.replace`.

    Attributes:
        plan: the last plan, on rank 0; None on the other ranks. With the default policy, layers
            whose moves do not pay keep their slots.
        history: what plans have changed, in order.
        stalls: how often some ranks have sent no loads for the deadline of a round, although other
            ranks have. There is no plan then. The reason is that they do not call `tick`. Each
            stall is also a warning of the logger `epmoe`.

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
        # This raises EPStateError unless `placement.live` is set.
        ep.live.moving()
        self._ep = ep
        self._every = every
        self._policy = policy
        self._weights = weights
        # What the policy gets with each call.
        self._limits = {"goal": goal, "max_moves": max_moves, "least_gain": least_gain}
        self.plan: Plan | None = None
        self.history: list[Step] = []
        self._worker = Worker("epmoe-balance")
        self._is_ticking = False
        self._reset()

    def _reset(self) -> None:
        """Forget the former group. The constructor and the first tick in a new group call it."""
        self._generation = self._ep.generation
        # On rank 0: the tick whose loads were planned for last, and the number of the call of
        # `replace` that carries the last published plan out.
        self._planned_tick = 0
        self._published_call = 0
        # The number of the last call of `replace` that this balancer has made, and the number of
        # the call to which the last `Step` of `history` belongs.
        self._own_call = 0
        self._recorded_call = 0
        # On rank 0: the plan that the thread is making.
        self._planning: Promise[Plan] | None = None
        # By rank: the tick at which the rank has sent its last loads.
        self._last_sent_ticks: list[int] = []
        # By rank: the ranks whose loads are older than the newest ones.
        self._missing: dict[int, _Missing] = {}
        # On rank 0, float64 [layers, E]: the rows for which the last plan was made, and all rows
        # that each expert had received when that plan began. At first both are 0.
        self._recent_loads = torch.zeros(1, 1, dtype=torch.float64)
        self._planned_loads = self._recent_loads

    @takes_turn_of_exchange
    def tick(self) -> None:
        """Take one step of the balancer. The caller makes it between two rounds, on the stream of
        the rounds. It calls `ExpertParallel.poll`, and waits for no rank and for no kernel.

        Raises what `ExpertParallel.poll` does, except EPRefusedError, and what `weights` and
        `policy` raise.
        """
        # A signal handler may call it in the middle of a tick: then it does nothing.
        if self._is_ticking:
            return
        try:
            self._is_ticking = True
            self._tick()
        finally:
            self._is_ticking = False

    def _tick(self) -> None:
        """Take moves further, send loads if they are due, and look for a plan."""
        if self._ep.generation != self._generation:
            self._reset()
        live = self._live
        # The next call of `finish` is a new one.
        live.has_ticked = True
        # First take moves further that an earlier plan has begun.
        self._call_unless_refused(self._ep.poll)
        live.ticks += 1
        # Every `every` ticks send loads, and then the tick to which they belong.
        if live.ticks % self._every == 0:
            live.send_loads()
            live.mail.post(Word.COUNTED, live.ticks, range(self._ep.size))
        # Look for a plan more often, since it may arrive at any tick between two of these.
        is_look_due = live.ticks % max(1, self._every // _LOOKS) == 0
        if is_look_due and self._is_idle:
            self._look_for_plan()

    @takes_turn_of_exchange
    def finish(self, timeout_s: float | None = None) -> None:
        """Carry out what rank 0 has planned so far. Collective: all ranks call it between the same
        two rounds.

        It also waits for ranks that have not taken up the last plan yet, which
        `ExpertParallel.apply` does not. It raises what `apply` raises.
        """
        ep = self._ep
        live = self._live
        if ep.generation != self._generation:
            self._reset()
        # Number the call, so that ranks can tell the words of two calls apart. If a signal handler
        # has raised in `finish`, the caller calls it again without a tick in between: that is
        # still the same call.
        if live.has_ticked:
            live.finishes += 1
            live.has_ticked = False
        # Rank 0 drops the plan that its thread is making, and tells all ranks which one was last.
        if ep.rank == 0:
            self._planning = None
            finish_number = live.finishes % _FINISH_NUMBERS
            word = (finish_number << 32) | self._published_call
            live.mail.post(Word.LAST_PLAN, word, range(ep.size))
        last_call = 0

        def has_last_call() -> bool:
            """Whether rank 0 has written the word of this call of `finish`, or of a later one."""
            nonlocal last_call
            words = live.mail.words()
            # A GPU still reads the words.
            if words is None:
                return False
            finish_number, last_call = divmod(words[0][Word.LAST_PLAN], 1 << 32)
            # Numbers begin again at 0, so compare how far this one is ahead.
            return (finish_number - live.finishes) % _FINISH_NUMBERS < _FINISH_NUMBERS // 2

        live.wait(has_last_call, lambda: [0], timeout_s)
        # If this rank has not taken the last plan up yet, end earlier moves, and take it up.
        if live.calls < last_call:
            self._call_unless_refused(ep.apply, timeout_s)
            self._take_up_plan()
        # End the moves of the last plan.
        self._call_unless_refused(ep.apply, timeout_s)

    def waits_for(self) -> list[int]:
        """The other ranks that this balancer waits for, as far as this rank knows.

        While experts move, these are the ranks of `Moves.waits_for`. Before a plan, these are the
        ranks whose loads are older than the newest ones: they call `tick` later than other ranks,
        or not at all. Any thread may call it.
        """
        moves = self._live.moves
        if moves is not None and not moves.done:
            return moves.waits_for()
        behind = _ranks_behind(self._last_sent_ticks)
        return [rank for rank in behind if rank != self._ep.rank]

    @property
    def stalls(self) -> int:
        """How often ranks have sent no loads in time, although other ranks have."""
        return self._live.stalled_plans

    def close(self) -> None:
        """End the thread of the balancer. `ep.poll` takes moves that have begun to their end."""
        self._worker.close()

    @property
    def exchange(self) -> Exchange:
        """The exchange of `ep`."""
        return self._ep.exchange

    @property
    def _live(self) -> LiveExperts:
        """The experts of the present group."""
        return self._ep.live.moving()

    @property
    def _is_idle(self) -> bool:
        """Whether no moves are under way."""
        moves = self._live.moves
        return moves is None or moves.done

    def _call_unless_refused(self, call: Callable[..., None], *arguments: float | None) -> None:
        """Call `poll` or `apply`. If these raise since another rank has refused a plan of this
        balancer, drop the plan: its `Step` is removed from `history`.
        """
        try:
            call(*arguments)
        except EPRefusedError:
            # If the host has called `replace` itself, the error is the host's.
            is_own_plan = self._own_call == self._live.calls
            if not is_own_plan:
                raise
            # A signal handler may have raised before the `Step` was recorded.
            if self._recorded_call == self._own_call:
                self.history.pop()

    def _look_for_plan(self) -> None:
        """Take up a plan that has arrived. On rank 0 also begin a plan, once the loads of all ranks
        are here, and publish it once it is made.
        """
        live = self._live
        words = live.mail.words()
        # A GPU still reads the words.
        if words is None:
            return
        self._last_sent_ticks = [row[Word.COUNTED] for row in words]
        self._count_stalls()
        if words[0][Word.PLANNED] > live.calls:
            self._take_up_plan()
            return
        if self._ep.rank != 0:
            return
        # Rank 0: begin a plan, raise what the policy has raised, or publish the plan.
        planning = self._planning
        if planning is None:
            self._plan_if_loads_are_new()
        elif planning.error is not None:
            self._planning = None
            raise planning.error
        elif planning.done:
            # The new plan overwrites the last one in all windows. So all ranks must have called
            # `replace` for the last plan; the upper half of PLAN is the number of that call.
            have_all_taken = all(row[Word.PLAN] >> 32 >= live.calls for row in words)
            if have_all_taken:
                self._publish(planning.get())

    def _plan_if_loads_are_new(self) -> None:
        """Begin to plan, if every rank has sent loads since the last plan."""
        tick = min(self._last_sent_ticks)
        if tick > self._planned_tick:
            self._planned_tick = tick
            self._plan()

    def _count_stalls(self) -> None:
        """Count and log a stall if a rank that is behind has sent nothing for the deadline of a
        round.
        """
        now = time.monotonic()
        # The time of a rank runs from its last loads: if it has sent newer ones, or has just
        # fallen behind, the time begins now.
        missing: dict[int, _Missing] = {}
        for rank in _ranks_behind(self._last_sent_ticks):
            tick = self._last_sent_ticks[rank]
            missing[rank] = _Missing(tick=tick, since=now)
            before = self._missing.get(rank)
            if before is not None and before.tick == tick:
                missing[rank] = before
        self._missing = missing
        # Find the ranks whose deadline has passed, and begin their time again, so that each
        # deadline counts once.
        wait_s = self._ep.exchange.deadlines.wait_s()
        late_ranks = []
        for rank, missing_rank in missing.items():
            if now - missing_rank.since > wait_s:
                late_ranks.append(rank)
        if not late_ranks:
            return
        for rank in late_ranks:
            missing[rank] = missing[rank]._replace(since=now)
        self._live.stalled_plans += 1
        _log.warning(
            "rank %d: no experts move, since rank(s) %s have sent no loads at tick %d, which other "
            "ranks have: do they call `Balancer.tick` at every step?",
            self._ep.rank,
            late_ranks,
            max(self._last_sent_ticks),
        )

    def _plan(self) -> None:
        """On rank 0: let the thread plan for the rows that have come since the last plan. If none
        have come, do nothing.
        """
        loads = self._live.loads()
        # Loads count from the beginning of the group, so the difference is what is new.
        recent_loads = (loads - self._planned_loads).clamp(min=0)
        if not recent_loads.any():
            return
        self._planned_loads = loads
        self._recent_loads = recent_loads
        make_plan = partial(self._make_plan, recent_loads, self._live.slots)
        self._planning = self._worker.submit(make_plan)

    def _make_plan(self, loads: Tensor, slots: Tensor) -> Plan:
        """Ask the policy for a plan, and check it. The thread of rank 0 runs this.

        Raises ValueError if the table of slots does not fit: it is about to be written into the
        windows of all ranks.
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
        """On rank 0: write the plan and its loads into all windows, and then PLANNED.

        PLANNED is the number that the call of `replace` for this plan will have on all ranks.
        """
        live = self._live
        number = live.calls + 1
        live.mail.share("moves.planned_loads", self._recent_loads)
        live.mail.share("moves.planned_slots", plan.slots)
        # Change the state first, then post the word: if a signal handler raised in between in the
        # other order, rank 0 would publish the plan a second time.
        self.plan = plan
        self._planning = None
        self._published_call = number
        live.mail.post(Word.PLANNED, number, range(self._ep.size))

    def _take_up_plan(self) -> None:
        """Begin the moves of the plan in this rank's window, and record them as a `Step`.

        If another rank refuses the plan later, `_call_unless_refused` removes the `Step`.
        """
        live = self._live
        views = self._ep.exchange.views
        loads = live.mail.fetch(views["moves.planned_loads"])
        # The buffer has room for the slots of all seats, of which the group may fill only some.
        planned = views["moves.planned_slots"].flatten()[: live.slots.numel()]
        slots = live.mail.fetch(planned).view_as(live.slots)
        number = live.calls + 1
        # Set this first: the call may be refused on this rank, too.
        self._own_call = number
        moves = live.replace(slots, self._weights, loads)
        before: list[float] = []
        after: list[float] = []
        if self.plan is not None:
            before = self.plan.balance_before
            after = self.plan.balance_after
        step = Step(
            tick=live.ticks,
            moves=moves.count,
            total_bytes=moves.total_bytes,
            before=before,
            after=after,
        )
        self.history.append(step)
        self._recorded_call = number


def _ranks_behind(last_sent_ticks: list[int]) -> list[int]:
    """The ranks whose last loads are older than the newest loads of any rank."""
    newest = max(last_sent_ticks, default=0)
    return [rank for rank, tick in enumerate(last_sent_ticks) if tick < newest]
