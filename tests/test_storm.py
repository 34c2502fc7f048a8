"""Ranks in seats die, stop, leave, come and sleep while experts move, as a seed draws it. After
each step every rank replays the rounds that it has captured in whichever group: they agree with the
dense layer, or do nothing and are told.

EPMOE_FUZZ_FIRST=<seed> repeats a storm. EPMOE_STORM_STEPS and EPMOE_STORM_RANKS make it longer or
smaller. In a storm with signals, a handler raises on one rank at a drawn moment of a call of all
ranks, which is whole on all or on none then.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial

import pytest
from helpers import long, slow
from host import E, Host, L, S, captures, go_on, lose, moving, replay, resize, sleep, weights
from slot_tables import draw_slots

import epmoe

FIRST = int(os.environ.get("EPMOE_FUZZ_FIRST", 0))
STEPS = int(os.environ.get("EPMOE_STORM_STEPS", 6))
SEATS = int(os.environ.get("EPMOE_STORM_RANKS", 4))
DEADLINE_S = 5.0
LAST_CALL_S = 3.0


def move(state, seed: int, polls: int) -> None:
    """Experts begin to move, and get no further until a later step."""
    ep = state.ep
    ep.apply()
    ep.replace(draw_slots(seed, L, E, ep.size, ep.num_local_experts), partial(weights, state))
    for _ in range(polls):
        ep.poll()


def wake(state) -> None:
    state.ep.wake()


class SignalledError(Exception):
    """What the signal handler raises."""


def generation(state) -> int:
    return state.ep.generation


def is_awake(state) -> bool:
    return not state.ep.asleep


def whole(state, after_s: float, measure: Callable[..., object], function: Callable, *rest) -> bool:
    """Call a function of all ranks, while a signal handler raises after `after_s`.

    Where the call is not whole by then, as what `measure` returns says, call again: that is what
    the pages on recovery and sleep say. Returns whether the signal came in the call.
    """

    def interrupt(*_: object) -> None:
        raise SignalledError

    before = measure(state)
    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        function(state, *rest)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except SignalledError:
        if measure(state) == before:
            function(state, *rest)
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return False


def all_or_none(state, measure: Callable[..., object], function: Callable, *rest) -> None:
    """The same call on the other ranks: a step that another rank has left fails here, too, and all
    call again.
    """
    before = measure(state)
    try:
        function(state, *rest)
    except epmoe.EPError:
        assert measure(state) == before
        function(state, *rest)


class Storm:
    """A group through all that happens to it. `captured` has (process, slots of a rank) of each
    capture.
    """

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.draw, self.slots, self.captured = (
            host,
            random.Random(seed),
            S,
            set[tuple[int, int]](),
        )
        self.names = host.begin(moving(min(3, SEATS), seats=SEATS, timeout_s=DEADLINE_S))
        self.play()

    def play(self) -> None:
        """Whoever stays captures again only where a rank gets more slots, since one is to hold all
        experts.
        """
        if len(self.names) == 1:
            self.slots = E
        self.names = self.host.in_order(self.names)
        self.host.play(self.names)
        self.captured |= {(name, self.slots) for name in self.names}
        made = self.host.do(self.names, captures)
        assert [*map(len, made)] == [
            sum(name == one for one, _ in self.captured) for name in self.names
        ]

    def lose(self, number: int) -> int:
        """A rank falls out, and the others go on."""
        victim = self.draw.choice(self.names)
        self.names = lose(self.host, self.names, victim, number)
        self.host.succeed(self.names, go_on, self.host.folder, 1, LAST_CALL_S)
        return victim

    def die(self) -> None:
        self.lose(signal.SIGKILL)

    def stop(self) -> None:
        """It comes back too late: its replay does nothing, and harms nobody."""
        victim = self.lose(signal.SIGSTOP)
        self.host.signal(victim, signal.SIGCONT)
        assert "EPTimeoutError" in self.host.do([victim], replay)[0]
        self.host.signal(victim, signal.SIGKILL)

    def resize(self) -> None:
        size = self.draw.choice([size for size in range(1, SEATS + 1) if size != len(self.names)])
        last = max(self.host.processes)
        new = list(range(last + 1, last + 1 + size - len(self.names)))
        if new:
            self.host.take_in(self.names, new, resize)
            self.names += new
        else:
            stay = self.host.succeed(self.names, resize, self.host.folder, size)
            for name in [
                name for name, loaded in zip(self.names, stay, strict=True) if loaded is False
            ]:
                self.names.remove(name)
                self.host.signal(name, signal.SIGKILL)

    def sleep(self) -> None:
        self.host.do(self.names, sleep)
        self.host.succeed(self.names, wake)

    def signalled_wake(self) -> None:
        self.host.do(self.names, sleep)
        self.signalled(is_awake, wake)

    def signalled_recovery(self) -> None:
        """Nobody has died: all ranks stay."""
        size = len(self.names)
        self.signalled(generation, go_on, self.host.folder, size, LAST_CALL_S)

    def signalled(self, measure: Callable[..., object], function: Callable, *rest: object) -> None:
        """A handler raises on one rank in a call of all ranks. No living rank is given up."""
        one = self.draw.choice(self.names)
        others = [name for name in self.names if name != one]
        after_s = 10 ** self.draw.uniform(-4, -0.5)
        self.host.start([one], whole, after_s, measure, function, *rest)
        self.host.start(others, all_or_none, measure, function, *rest)
        self.host.answers(self.names)

    def move(self) -> None:
        self.host.succeed(self.names, move, self.draw.randrange(1000), self.draw.randrange(8))


CALM = Storm.die, Storm.resize, Storm.sleep, Storm.move
"""Steps that wait for no deadline."""
ALL = *CALM, Storm.resize, Storm.stop
SIGNALLED = *ALL, Storm.signalled_wake, Storm.signalled_recovery


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (FIRST, CALM),
        slow(FIRST + 1, ALL),
        *(long(FIRST + n, ALL) for n in (2, 3)),
        long(FIRST + 4, SIGNALLED),
    ],
)
def test_a_storm(host: Host, seed: int, steps: tuple[Callable[[Storm], None], ...]) -> None:
    storm = Storm(host, seed)
    coming = []
    happened = []
    try:
        for _ in range(STEPS):
            coming = coming or storm.draw.sample(steps, len(steps))
            step = coming.pop() if len(storm.names) > 1 else Storm.resize
            happened.append(f"{step.__name__} at {len(storm.names)}")
            step(storm)
            storm.play()
    except AssertionError as error:
        raise AssertionError(f"EPMOE_FUZZ_FIRST={seed}: {', '.join(happened)}") from error
