"""Sequences of calls that hypothesis draws: each rank goes through its rounds as it likes, also by
aborts and refused calls, until all have caught up, or one leaves by `close` or by an exception.

Every rank draws the same sequence for all ranks (`derandomize`) and takes its own steps of it. In
some sequences no barrier lies between the steps, and the ranks interleave as they may. Others run
in the order drawn, of which a rank may only take a step that does not wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanges import (
    assert_y,
    given,
    make_config,
    make_tokens,
    run_experts,
    run_fused_experts,
    without_rank,
)
from helpers import ON_THE_CPU, slow
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from epmoe import EPTimeoutError, ExpertParallel
from epmoe.exchange.round_state import CLOSED, DISPATCHED, RETURNING, SENT

SIZE = int(os.environ.get("WORLD_SIZE", "1"))
MOST_TOKENS = 5
CALLS = {
    "dispatch_send": ((CLOSED,), SENT),
    "dispatch": ((CLOSED,), DISPATCHED),
    "dispatch_recv": ((SENT,), DISPATCHED),
    "combine_send": ((DISPATCHED,), RETURNING),
    "combine": ((DISPATCHED,), CLOSED),
    "combine_recv": ((RETURNING,), CLOSED),
    "abort": ((SENT, DISPATCHED, RETURNING), CLOSED),
}
"""By call, the states of a rank that permit it, and the state behind it."""
RANKS = st.integers(0, 63)
TOKENS = st.integers(0, MOST_TOKENS)
CONFIG = make_config(SIZE, experts=7, top_k=2, hidden=16, max_tokens=MOST_TOKENS, timeout_s=30.0)


class Ranks(RuleBasedStateMachine):
    """What each rank has done, in the same way on all; and on this rank the exchange itself.

    states, rounds: of each rank, as in epmoe/exchange/round_state.py.
    gave_up: (rank, round) without sums from this rank.
    in_order: whether a barrier follows each step.
    leaver: the rank that leaves after its last step, if any; between rounds always by an exception.
    ys: what this rank got: round, tokens, y. Others may give that round up later, so teardown
    compares. failure: what ended this rank's rounds, because another has left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = dist.get_rank()
        self.ep = ExpertParallel(CONFIG)
        self.states = [CLOSED] * SIZE
        self.rounds = [0] * SIZE
        self.gave_up: set[tuple[int, int]] = set()
        self.ys: list[tuple] = []
        self.failure: EPTimeoutError | None = None
        self.steps: list[str] = []

    @initialize(leaver=st.none() | RANKS, by_exception=st.booleans(), in_order=st.booleans())
    def choose(self, leaver: int | None, by_exception: bool, in_order: bool) -> None:
        self.leaver = None if leaver is None else leaver % SIZE
        self.by_exception = by_exception
        self.in_order = in_order

    def able(self, call: str) -> list[int]:
        """The ranks that may make a call; in order, only those that do not wait in it."""
        ranks = [rank for rank, state in enumerate(self.states) if state in CALLS[call][0]]
        return [rank for rank in ranks if not self.waits(rank, call)] if self.in_order else ranks

    def waits(self, rank: int, call: str) -> bool:
        """Whether the call has to wait for a step that another rank has yet to take."""
        n = self.rounds[rank]
        others = set(range(SIZE)) - {rank}
        opened = min(self.rounds[r] for r in others)
        returned = min(self.rounds[r] - (self.states[r] in (SENT, DISPATCHED)) for r in others)
        if call.startswith("dispatch"):
            return {
                "dispatch_send": returned < n,
                "dispatch": opened < n + 1,
                "dispatch_recv": opened < n,
            }[call]
        return call in ("combine", "combine_recv") and returned < n

    def step(self, who: int, call: str, *arguments: int, wrongly: bool = False) -> None:
        """Rank `who` makes a call, if it is this rank and still can. `wrongly`: calls that are
        refused come first.
        """
        if who == self.rank and self.failure is None:
            self.steps.append(f"{call}{arguments}")
            try:
                if wrongly:
                    self.call_wrongly()
                getattr(self, call)(*arguments)
            except EPTimeoutError as error:
                self.failure = error
            except BaseException as error:
                error.add_note(f"after {', '.join(self.steps)}")
                raise
        if call in CALLS:
            before = self.states[who]
            self.states[who] = CALLS[call][1]
            self.rounds[who] += before == CLOSED
        if self.in_order:
            dist.barrier()

    @rule(call=RANKS, who=RANKS, tokens=TOKENS, wrongly=st.booleans())
    def advance(self, call: int, who: int, tokens: int, wrongly: bool) -> None:
        """A rank that is drawn makes a call that is drawn from those that some rank may make."""
        name = pick([name for name in CALLS if self.able(name)], call)
        rank = pick(self.able(name), who)
        if name == "abort" and self.states[rank] != RETURNING:
            self.gave_up.add((rank, self.rounds[rank]))
        self.step(rank, name, *([tokens] if CLOSED in CALLS[name][0] else []), wrongly=wrongly)

    # The calls of this rank, by their names in `CALLS`.

    def dispatch_send(self, count: int) -> None:
        self.send_tokens(self.ep.dispatch_send, count)

    def dispatch(self, count: int) -> None:
        self.send_tokens(self.ep.dispatch, count)

    def send_tokens(self, send: Callable, count: int) -> None:
        n = self.rounds[self.rank] + 1
        self.tokens = make_tokens(CONFIG, self.rank, count, seed=n)
        self.layout = "rank" if n % 3 == 0 else "expert"  # the same on all ranks
        self.handle = send(*given(self.ep, self.tokens), layout=self.layout)

    def dispatch_recv(self) -> None:
        self.handle = self.ep.dispatch_recv(self.handle)

    def combine_send(self) -> None:
        self.ep.combine_send(self.rows(), self.handle)

    def combine(self) -> None:
        combine = self.ep.combine_partial if self.layout == "rank" else self.ep.combine
        self.keep(combine(self.rows(), self.handle))

    def combine_recv(self) -> None:
        self.keep(self.ep.combine_recv(self.handle))

    def abort(self) -> None:
        self.ep.abort()

    def rows(self) -> torch.Tensor:
        return (run_fused_experts if self.layout == "rank" else run_experts)(self.ep, self.handle)

    def keep(self, y: torch.Tensor) -> None:
        self.ys.append((self.rounds[self.rank], self.tokens, y))

    def call_wrongly(self) -> None:
        """Each call is refused before anything is sent."""
        state = self.states[self.rank]
        x, ids, weights = given(self.ep, make_tokens(CONFIG, self.rank, 2))
        # Wrong inputs, also where the call itself is out of turn.
        with pytest.raises(RuntimeError if state != CLOSED else TypeError):
            self.ep.dispatch(x.double(), ids, weights)
        with pytest.raises(RuntimeError if state != CLOSED else ValueError):
            self.ep.dispatch_send(x, ids[:1], weights)
        # Calls of another state, or with wrong rows.
        wrong = {
            SENT: lambda: self.ep.combine_recv(self.handle),
            DISPATCHED: lambda: self.ep.combine_send(self.rows()[..., :-1], self.handle),
            RETURNING: lambda: self.ep.combine_send(torch.zeros(1), self.handle),
        }
        if state in wrong:
            with pytest.raises((TypeError, ValueError)):
                wrong[state]()

    def leave(self) -> None:
        if self.states[self.rank] != CLOSED and not self.by_exception:
            return self.ep.close()
        with pytest.raises(LookupError), self.ep:
            raise LookupError

    def teardown(self) -> None:
        """One rank leaves, or none. The others end their rounds and catch up, or fail because of
        it. Then each rank compares what it got.
        """
        self.in_order = False
        # One may leave, and the others catch up.
        if self.leaver is not None:
            self.step(self.leaver, "leave")
        self.catch_up()
        # What each round has given, without the ranks that gave it up.
        for n, tokens, y in self.ys:
            for rank, given_up in self.gave_up:
                if given_up == n:
                    tokens = without_rank(self.ep, tokens, rank)
            assert_y(y, CONFIG, tokens)
        # A rank that left is named.
        if self.leaver in (None, self.rank):
            assert self.failure is None
        else:
            assert self.failure is not None and self.failure.missing_ranks == [self.leaver]
            with pytest.raises(EPTimeoutError, match="left the group"):
                self.dispatch(1)
        self.ep.close()

    def catch_up(self) -> None:
        """Where a rank has left, the others begin a round that it does not."""
        target = max(self.rounds) + (self.leaver is not None)
        following = {
            CLOSED: "dispatch",
            SENT: "dispatch_recv",
            DISPATCHED: "combine",
            RETURNING: "combine_recv",
        }
        for who in set(range(SIZE)) - {self.leaver}:
            while self.rounds[who] < target or self.states[who] != CLOSED:
                call = following[self.states[who]]
                self.step(who, call, *([3] if call == "dispatch" else []))


def pick(choices: list, n: int) -> Any:
    return choices[n % len(choices)]


@ON_THE_CPU
@pytest.mark.parametrize("sequences", [15, slow(60)])
def test_any_sequence_of_calls(device, sequences):
    examples = settings(
        max_examples=sequences,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Ranks, settings=examples)
