"""Ranks in seats die, stop, leave, come and sleep while experts move. After each step every rank
replays the rounds that it has captured in whichever group: they agree with the dense layer, or do
nothing and are told.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import host as ranks
from host import E, L, S
from slot_tables import draw_slots
from storm.acts import Act, GroupCalls, all_whole, ended
from storm.calls import Outcome, of_regroup

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
    return ranks.resize(state, board, size, wait_s=3.0) is not False


def join(state, board: Path) -> None:
    ranks.come(state, board)


def wake(state) -> None:
    state.ep.wake()


def play(state) -> str:
    return ranks.play(state)


def sleep(state) -> None:
    ranks.sleep(state)


def move(state, seed: int, polls: int) -> None:
    """Experts begin to move, and get no further until a later step."""
    ep = state.ep
    ep.apply()
    ep.replace(draw_slots(seed, L, E, ep.size, ep.num_local_experts), partial(ranks.weights, state))
    for _ in range(polls):
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
        outcomes = self.all_call(play, signalled=False)
        assert all_whole(outcomes), f"rounds: {ended(outcomes)}"
        self.totals.counts["rounds"] += len(outcomes)
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
        self.together(sleep, signalled=False)
        awakes = [Moving.wake, Moving.die_asleep, Moving.resize]
        self.draw.choices(awakes, [6, 1, 1])[0](self)

    def die_asleep(self) -> None:
        if len(self.names) > 1:
            self.kill(self.draw.choice(self.names))
        self.recover()

    def move(self) -> None:
        arguments: list[Any] = [self.draw.randrange(1000), self.draw.randrange(8)]
        self.together(move, *arguments, signalled=False)


Moving.steps = {
    Moving.die: 4,
    Moving.resize: 6,
    Moving.recover: 3,
    Moving.sleep: 4,
    Moving.move: 6,
    Moving.stop: 0.2,
}
