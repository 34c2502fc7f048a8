"""Ranks in seats die, stop, leave, come and sleep while experts move. After each step every rank
replays the rounds that it has captured in whichever group: they agree with the dense layer, or do
nothing and are told.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import host as ranks
from host import E, L, S
from slot_tables import draw_slots
from storm.acts import Act, GroupCalls, all_whole, ended
from storm.calls import Outcome, of_own, of_regroup

import epmoe

ROUND_S = 3.0
STEP_S = 10.0
"""The deadlines of a round, and of a group that opens. Ranks that wait for one that has stopped run
into the first.
"""
LAST_CALL_S = 2.0


# What a rank does.


def recover(state, board: Path) -> None:
    ranks.go_on(state, board, 1, LAST_CALL_S)


def resize(state, board: Path, size: int) -> bool:
    """Returns whether this rank stays."""
    return ranks.resize(state, board, size, wait_s=3.0, balanced=True) is not False


def join(state, board: Path) -> None:
    ranks.come(state, board)


def wake(state) -> None:
    state.ep.wake()


def play(state) -> str:
    return ranks.play(state)


def sleep(state) -> None:
    ranks.sleep(state)


def tick(state, ticks: int) -> None:
    """The balancer looks, and may plan and move, also while other moves are under way."""
    for _ in range(ticks):
        with suppress(epmoe.EPRefusedError):
            state.balancer.tick()


def finish(state) -> tuple[int, list[list[int]]]:
    """All moves end. Returns how often `replace` was called in this group, and the table."""
    with suppress(epmoe.EPRefusedError):
        state.balancer.finish()
    state.ep.apply()
    return state.ep.live.calls, state.ep.slots.tolist()


def move(state, number: int, seed: int, polls: int) -> None:
    """Experts begin to move by call `number` of `replace`, and get no further until a later step.

    A call that a signal has ended may count: the plan is dropped by all ranks then.
    """
    ep = state.ep
    if ep.live.calls < number:
        slots = draw_slots(seed, L, E, ep.size, ep.num_local_experts)
        ep.replace(slots, partial(ranks.weights, state))
    for _ in range(polls):
        with suppress(epmoe.EPRefusedError):
            ep.poll()


def play_on(state) -> None:
    """Until a rank falls out."""
    while True:
        ranks.play(state)


class Moving(Act):
    """Up to `ranks` ranks in as many seats. `captured` has (process, slots of a rank) of each
    capture.
    """

    kind = "moving"
    calls = GroupCalls(recover, resize, join, wake)
    wrong = "AssertionError"

    def begin(self) -> None:
        self.slots = S
        self.captured = set[tuple[int, int]]()
        self.names = self.new_names(min(3, self.ranks))
        self.host.spawn(*self.names)
        self.form(self.names)
        config = ranks.moving(len(self.names), seats=self.ranks, timeout_s=ROUND_S, form_s=STEP_S)
        self.host.succeed(self.names, ranks.create, config)
        self.play()

    def play(self) -> None:
        """Whoever stays captures again only where a rank gets more slots, since one is to hold all
        experts.
        """
        if len(self.names) == 1:
            self.slots = E
        self.in_order()
        # Rounds of all, which are right.
        outcomes = self.all_call(play, signalled=False)
        assert all_whole(outcomes), f"rounds: {ended(outcomes)}"
        self.totals.counts["rounds"] += len(outcomes)
        # Each process has captured once for each number of slots that it has had.
        self.captured |= {(name, self.slots) for name in self.names}
        made = [len(one) for one in self.host.do(self.names, ranks.captures)]
        want = [sum(name == one for one, _ in self.captured) for name in self.names]
        assert made == want, f"captures {made}, and not {want}"

    def regrouped(self) -> None:
        self.in_order()

    def die(self) -> None:
        """A rank is killed while rounds go on, or while all meet."""
        if len(self.names) == 1:
            return self.resize()
        victim = self.draw.choice(self.names)
        kill = self.in_a_while(lambda: self.kill(victim))
        if self.draw.random() < 0.7:
            self._named(victim, self.all_call(play_on, signalled=False, meanwhile=kill))
        else:
            self.all_call(recover, self.board, again=of_regroup, signalled=False, meanwhile=kill)
        self.recover()

    def stop(self) -> None:
        """A rank stops, and comes back too late: its replay does nothing, and harms nobody."""
        if len(self.names) == 1:
            return self.resize()
        victim = self.draw.choice(self.names)
        self.totals.counts["stops"] += 1

        def stop() -> None:
            self.end(victim, signal.SIGSTOP)

        stopping = self.in_a_while(stop)
        self._named(victim, self.all_call(play_on, signalled=False, meanwhile=stopping))
        self.recover()
        # It comes back, is told that its round has failed, and ends.
        self.host.signal(victim, signal.SIGCONT)
        told = self.host.results([victim])[0]
        assert "EPTimeoutError" in told.ended, f"the rank that had stopped: {told.ended}"
        self.end(victim)

    def _named(self, victim: int, outcomes: dict[int, Outcome]) -> None:
        """Each rank has an error that says who is missing."""
        assert victim not in outcomes
        ends = [outcome.ended for outcome in outcomes.values()]
        assert all(end.startswith("EPTimeoutError") for end in ends), f"behind a death: {ends}"

    def sleep(self) -> None:
        self.fall_asleep(sleep)
        awakes = [Moving.wake, Moving.die_asleep, Moving.resize]
        self.draw.choices(awakes, [6, 1, 1])[0](self)

    def die_asleep(self) -> None:
        if len(self.names) > 1:
            self.kill(self.draw.choice(self.names))
        self.recover()

    def tick(self) -> None:
        self.by_each(tick, self.draw.randint(1, 12), again=of_own)

    def move(self) -> None:
        outcomes = self.all_call(finish, again=of_own)
        assert all_whole(outcomes), f"moves do not end: {ended(outcomes)}"
        (calls, table), *others = [outcome.value for outcome in outcomes.values()]
        assert all(other == (calls, table) for other in others), f"{others} beside {calls, table}"
        assert all(set(range(E)) <= set(layer) for layer in table), f"an expert is lost: {table}"
        seed = self.draw.randrange(1000)
        self.by_each(move, calls + 1, seed, self.draw.randrange(8), again=of_own)


Moving.steps = {
    Moving.die: 4,
    Moving.resize: 6,
    Moving.recover: 3,
    Moving.sleep: 4,
    Moving.move: 6,
    Moving.tick: 6,
    Moving.stop: 0.2,
}
