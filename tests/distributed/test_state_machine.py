"""Sequences of calls that hypothesis draws: each rank goes through its rounds as it likes, also by aborts and refused
calls, until all have caught up, or one leaves by `close` or by an exception.

Every rank draws the same sequence for all ranks (`derandomize`) and takes its own steps of it. In some sequences no
barrier lies between the steps, and the ranks interleave as they may. Others run in the order drawn, of which a rank may
only take a step that does not wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, make_config, make_tokens, run_experts, run_fused_experts
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from test_exceptions import without_rank
from test_phases import given

from epmoe import EPTimeoutError, ExpertParallel
from epmoe.exchange.round_state import CLOSED, DISPATCHED, RETURNING, SENT

SIZE = int(os.environ.get("WORLD_SIZE", "1"))
MOST_TOKENS = 5
PERMITTING = {
    "dispatch_send": (CLOSED,),
    "dispatch": (CLOSED,),
    "dispatch_recv": (SENT,),
    "combine_send": (DISPATCHED,),
    "combine": (DISPATCHED,),
    "combine_recv": (RETURNING,),
    "abort": (SENT, DISPATCHED, RETURNING),
}
"""By call, the states of a rank that permit it."""
RANKS, TOKENS, FIRST_WRONGLY = st.integers(0, 63), st.integers(0, MOST_TOKENS), st.booleans()
CONFIG = make_config(SIZE, experts=7, top_k=2, hidden=16, max_tokens=MOST_TOKENS, timeout_s=30.0)


class Ranks(RuleBasedStateMachine):
    """What each rank has done, in the same way on all; and on this rank the exchange itself.

    states, rounds: of each rank, as in epmoe/exchange/round_state.py.
    gave_up: (rank, round) without sums from this rank.
    in_order: whether a barrier follows each step.
    leaver: the rank that leaves after its last step, if any; between rounds always by an exception.
    ys: what this rank got: round, tokens, y. Others may give that round up later, so teardown compares.
    failure: what ended this rank's rounds, because another has left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.ep = dist.get_rank(), ExpertParallel(CONFIG)
        self.states, self.rounds = [CLOSED] * SIZE, [0] * SIZE
        self.gave_up: set[tuple[int, int]] = set()
        self.ys: list[tuple] = []
        self.failure: EPTimeoutError | None = None
        self.steps: list[str] = []

    @initialize(leaver=st.none() | RANKS, by_exception=st.booleans(), in_order=st.booleans())
    def choose(self, leaver: int | None, by_exception: bool, in_order: bool) -> None:
        self.leaver, self.by_exception = None if leaver is None else leaver % SIZE, by_exception
        self.in_order = in_order

    def able(self, call: str) -> list[int]:
        """The ranks that may make a call; in order, only those that do not wait in it."""
        ranks = [rank for rank, state in enumerate(self.states) if state in PERMITTING[call]]
        return [rank for rank in ranks if not self.waits(rank, call)] if self.in_order else ranks

    def waits(self, rank: int, call: str) -> bool:
        """Whether the call has to wait for a step that another rank has yet to take."""
        n, others = self.rounds[rank], set(range(SIZE)) - {rank}
        opened = min(self.rounds[r] for r in others)
        returned = min(self.rounds[r] - (self.states[r] in (SENT, DISPATCHED)) for r in others)
        if call.startswith("dispatch"):
            return {"dispatch_send": returned < n, "dispatch": opened < n + 1, "dispatch_recv": opened < n}[call]
        return call in ("combine", "combine_recv") and returned < n

    def step(self, who: int, call: Callable, *arguments: object, state: int, wrongly: bool = False) -> None:
        """Rank `who` makes a call, if it is this rank and still can; its state is then `state`. `wrongly`: calls that
        are refused come first."""
        if who == self.rank and self.failure is None:
            self.steps.append(f"{call.__name__}{arguments}")
            try:
                if wrongly:
                    self.call_wrongly()
                call(*arguments)
            except EPTimeoutError as error:
                self.failure = error
            except BaseException as error:
                error.add_note(f"after {', '.join(self.steps)}")
                raise
        self.rounds[who] += self.states[who] == CLOSED and state != CLOSED
        self.states[who] = state
        if self.in_order:
            dist.barrier()

    @precondition(lambda self: self.able("dispatch_send"))
    @rule(n=RANKS, tokens=TOKENS, wrongly=FIRST_WRONGLY)
    def dispatch_send(self, n: int, tokens: int, wrongly: bool) -> None:
        self.step(
            pick(self.able("dispatch_send"), n), self.send_tokens, tokens, "dispatch_send", state=SENT, wrongly=wrongly
        )

    @precondition(lambda self: self.able("dispatch"))
    @rule(n=RANKS, tokens=TOKENS, wrongly=FIRST_WRONGLY)
    def dispatch(self, n: int, tokens: int, wrongly: bool) -> None:
        self.step(
            pick(self.able("dispatch"), n), self.send_tokens, tokens, "dispatch", state=DISPATCHED, wrongly=wrongly
        )

    @precondition(lambda self: self.able("dispatch_recv"))
    @rule(n=RANKS, wrongly=FIRST_WRONGLY)
    def dispatch_recv(self, n: int, wrongly: bool) -> None:
        self.step(pick(self.able("dispatch_recv"), n), self.receive_tokens, state=DISPATCHED, wrongly=wrongly)

    @precondition(lambda self: self.able("combine_send"))
    @rule(n=RANKS, wrongly=FIRST_WRONGLY)
    def combine_send(self, n: int, wrongly: bool) -> None:
        self.step(pick(self.able("combine_send"), n), self.send_sums, state=RETURNING, wrongly=wrongly)

    @precondition(lambda self: self.able("combine"))
    @rule(n=RANKS, wrongly=FIRST_WRONGLY)
    def combine(self, n: int, wrongly: bool) -> None:
        self.step(pick(self.able("combine"), n), self.combine_at_once, state=CLOSED, wrongly=wrongly)

    @precondition(lambda self: self.able("combine_recv"))
    @rule(n=RANKS, wrongly=FIRST_WRONGLY)
    def combine_recv(self, n: int, wrongly: bool) -> None:
        self.step(pick(self.able("combine_recv"), n), self.receive_sums, state=CLOSED, wrongly=wrongly)

    @precondition(lambda self: self.able("abort"))
    @rule(n=RANKS, wrongly=FIRST_WRONGLY)
    def abort(self, n: int, wrongly: bool) -> None:
        who = pick(self.able("abort"), n)
        if self.states[who] != RETURNING:
            self.gave_up.add((who, self.rounds[who]))
        self.step(who, self.ep.abort, state=CLOSED, wrongly=wrongly)

    # What this rank does.

    def send_tokens(self, count: int, call: str) -> None:
        n = self.rounds[self.rank] + 1
        self.tokens = make_tokens(CONFIG, self.rank, count, seed=n)
        self.layout = "rank" if n % 3 == 0 else "expert"  # the same on all ranks
        self.handle = getattr(self.ep, call)(*given(self.ep, self.tokens), layout=self.layout)

    def receive_tokens(self) -> None:
        self.handle = self.ep.dispatch_recv(self.handle)

    def rows(self) -> torch.Tensor:
        return (run_fused_experts if self.layout == "rank" else run_experts)(self.ep, self.handle)

    def send_sums(self) -> None:
        self.ep.combine_send(self.rows(), self.handle)

    def receive_sums(self) -> None:
        self.keep(self.ep.combine_recv(self.handle))

    def combine_at_once(self) -> None:
        combine = self.ep.combine_partial if self.layout == "rank" else self.ep.combine
        self.keep(combine(self.rows(), self.handle))

    def keep(self, y: torch.Tensor) -> None:
        self.ys.append((self.rounds[self.rank], self.tokens, y))

    def call_wrongly(self) -> None:
        """Each call is refused before anything is sent."""
        state = self.states[self.rank]
        x, ids, weights = given(self.ep, make_tokens(CONFIG, self.rank, 2))
        with pytest.raises(RuntimeError if state != CLOSED else TypeError):
            self.ep.dispatch(x.double(), ids, weights)
        with pytest.raises(RuntimeError if state != CLOSED else ValueError):
            self.ep.dispatch_send(x, ids[:1], weights)
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
        """One rank leaves, or none. The others end their rounds and catch up, or fail because of it. Then each rank
        compares what it got."""
        self.in_order = False
        if self.leaver is not None:
            self.step(self.leaver, self.leave, state=self.states[self.leaver])
        self.catch_up()
        for n, tokens, y in self.ys:
            for rank, given_up in self.gave_up:
                if given_up == n:
                    tokens = without_rank(self.ep, tokens, rank)
            assert_y(y, CONFIG, tokens)
        if self.leaver in (None, self.rank):
            assert self.failure is None
        else:
            assert self.failure is not None and self.failure.missing_ranks == [self.leaver]
            with pytest.raises(EPTimeoutError, match="left the group"):
                self.send_tokens(1, "dispatch")
        self.ep.close()

    def catch_up(self) -> None:
        """Where a rank has left, the others begin a round that it does not."""
        target = max(self.rounds) + (self.leaver is not None)
        advance = {
            CLOSED: lambda who: self.step(who, self.send_tokens, 3, "dispatch", state=DISPATCHED),
            SENT: lambda who: self.step(who, self.receive_tokens, state=DISPATCHED),
            DISPATCHED: lambda who: self.step(who, self.combine_at_once, state=CLOSED),
            RETURNING: lambda who: self.step(who, self.receive_sums, state=CLOSED),
        }
        for who in set(range(SIZE)) - {self.leaver}:
            while self.rounds[who] < target or self.states[who] != CLOSED:
                advance[self.states[who]](who)


def pick(ranks: list[int], n: int) -> int:
    return ranks[n % len(ranks)]


@pytest.mark.parametrize("device", [torch.device("cpu")])
def test_any_sequence_of_calls(device):
    examples = settings(
        max_examples=30,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Ranks, settings=examples)
