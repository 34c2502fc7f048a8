"""The interface of exchanges. `NodeExchange` has one node, and `HierarchicalExchange` (epmoe/rail)
several.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import Deadlines
from epmoe.config.placement import is_int
from epmoe.exchange.call import Call
from epmoe.exchange.handles import Dispatched, Layout, Sent
from epmoe.exchange.health import STAGES, Health
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.processor import Processor
from epmoe.exchange.round_state import CLOSED, RETURNING, RoundState
from epmoe.exchange.templates import Templates
from epmoe.group.errors import EPMismatchError, EPTimeoutError

ANOTHER_THREAD = (
    "another thread is in a call of this ExpertParallel: one thread at a time, so order their calls"
)
_GLANCE_S = 1e-5
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def takes_turn(call: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Decorate a method of an exchange, whose arguments come by position: no other thread is in a
    call meanwhile.

    It costs a call 0.07 µs. A context manager of Python would leave a gap, in which a signal
    handler may raise and nobody ends the turn.
    """

    # The exchange is the first argument, `self`.
    @wraps(call)
    def entered(*args: Any) -> Any:
        exchange = args[0]
        outer = exchange.enter()
        try:
            return call(*args)  # type: ignore[call-arg]
        finally:
            exchange.thread = outer

    return cast(Callable[_P, _Result], entered)


def takes_turn_of_exchange(
    call: Callable[Concatenate[Any, _P], _Result],
) -> Callable[Concatenate[Any, _P], _Result]:
    """Decorate a method of an object that has an `exchange`: no other thread is in a call of it
    meanwhile.
    """

    @wraps(call)
    def entered(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        result: _Result = self.exchange.run(partial(call, self, *args, **kwargs))
        return result

    return entered


class Exchange(ABC):
    """One rank's part of the exchange of a group, whose rounds follow one another."""

    config: EPConfig
    plan: MemoryPlan
    views: dict[str, Tensor]  # every buffer of the plan
    device: torch.device
    processor: Processor  # of the device
    rank: int  # in the group
    global_ranks: list[int]  # [R]
    rounds: RoundState
    deadlines: Deadlines
    # What CUDA graphs of its rounds rest on; None: on more than can be compared.
    layout: object = None
    templates: Templates
    thread: int = 0  # that is in a call, or 0

    @abstractmethod
    def dispatch(self, call: Call) -> Dispatched:
        """Both phases of a round's way out: `ExpertParallel.dispatch`."""

    @abstractmethod
    def dispatch_send(self, call: Call) -> Sent:
        """The send phase: `ExpertParallel.dispatch_send`. It waits for no rank, except after an
        abort.
        """

    def skip(self, call: Call) -> None:
        """Take part in a round by a call without tokens, and abort it: `ExpertParallel.skip`."""
        sent = self.dispatch_send(call)
        self.abort(sent)

    @abstractmethod
    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """The receive phase: `ExpertParallel.dispatch_recv`."""

    @abstractmethod
    def combine(
        self, layout: Layout, rows: Tensor, dispatched: Dispatched, out: Tensor | None
    ) -> Tensor:
        """Both phases of the way back: `ExpertParallel.combine`, or by `layout`
        `ExpertParallel.combine_partial`.
        """

    @abstractmethod
    def combine_send(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        """The send phase: `ExpertParallel.combine_send`. It waits for no rank."""

    @abstractmethod
    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        """The receive phase: `ExpertParallel.combine_recv`."""

    @abstractmethod
    def abort_open_round(self) -> None:
        """Close the open round, whatever its state, without this rank's rows. Waits for no rank."""

    @abstractmethod
    def drop_reports(self) -> None:
        """Drop what was reported of an aborted round, so that it does not hit the next round."""

    @abstractmethod
    def check(self) -> None:
        """Raise EPTimeoutError, EPMismatchError or EPOrderError if one was reported so far."""

    @abstractmethod
    def check_rounds(self) -> None:
        """Raise EPOverflowError or EPAbortedError for a round that has ended, unless the config
        only counts them.
        """

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether a wait, or on a GPU a round, has failed, as far as the host knows: `resume` and
        `close` are left.
        """

    @abstractmethod
    def missing(self) -> int:
        """Ranks of the group that this rank misses, or that another has reported, as a mask. Waits
        for no kernel.
        """

    @abstractmethod
    def dead(self) -> int:
        """Ranks of the group, on this machine, whose process has ended, as a mask."""

    @abstractmethod
    def end_waits(self) -> None:
        """End the waits of all other ranks at once, with an EPTimeoutError that names this rank.
        Waits for no rank.
        """

    @abstractmethod
    def health(self, wait: bool) -> Health:
        """The counts; with `wait`, once the current stream has done what was launched on it."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory and the network back, once no kernel can use them."""

    def largest(self, number: int) -> Callable[[], int] | None:
        """A number of each rank. Collective, between rounds and in the same order on all ranks; it
        sends nothing yet.

        What it returns tells all ranks this number, waits for theirs within the deadline of a
        round, and returns the largest; after an exception another call takes it up again. None on
        one node, whose rounds themselves carry whether a rank has more: see `sending`.
        """
        return None

    @contextmanager
    def at_most(self, tokens: int | None) -> Iterator[None]:
        """`ExpertParallel.at_most`."""
        if tokens is not None and (not is_int(tokens) or tokens < 0):
            raise ValueError(f"`tokens` must be an int of at least 0, got {tokens!r}")
        # Rounds that open within it take the number from here.
        before = self.rounds.most_tokens
        try:
            self.rounds.most_tokens = tokens
            yield
        finally:
            self.rounds.most_tokens = before

    def has_more_rounds(self) -> bool:
        """Whether any rank has more rounds after the last one, in which all sent it. On one node:
        see `largest`.

        On GPUs it waits for the kernel of dispatch, up to `exchange.warmup_timeout_s`. On the CPU
        it waits only for ranks that have not closed a round that was aborted before. Raises what
        `check` does.
        """
        raise NotImplementedError

    @takes_turn
    def run(self, call: Callable[[], _Result]) -> _Result:
        return call()

    @takes_turn
    def sending(self, has_more: bool, call: Callable[[], _Result]) -> _Result:
        """The result of `call`, whose one dispatch also sends whether this rank has more rounds: on
        all ranks, or on none.
        """
        rounds = self.rounds
        try:
            # The epoch of the next round, and in the lowest bit whether there are more.
            rounds.progress.more_rounds = 2 * (rounds.count + 1) + has_more
            return call()
        finally:
            rounds.progress.more_rounds = 0

    def enter(self) -> int:
        """Enter a call. At its end, also by an exception, `thread` is set to the result: 0, or the
        caller if a signal handler calls in the middle of another call.

        Raises RuntimeError during a call of another thread: both would write the same window. A
        thread that has a round open waits for the end of that call instead: a call that is about to
        be refused must not cost it its round.
        """
        caller = get_ident()
        # CPython switches threads at calls and jumps back only. There is none between comparing and
        # storing.
        while (holder := self.thread) and holder != caller:
            self._wait_or_refuse(caller)
        self.thread = caller
        return holder

    def _wait_or_refuse(self, caller: int) -> None:
        """Return once no other thread is in a call. Raises RuntimeError if this one has no open
        round, or the deadline of a wait has passed.
        """
        rounds = self.rounds
        deadline = time.monotonic() + self.deadlines.wait_s()
        while self.thread not in (0, caller):
            has_round = rounds.opener == caller and rounds.state != CLOSED
            if not has_round or time.monotonic() > deadline:
                rounds.turn_away(caller)
                raise RuntimeError(ANOTHER_THREAD)
            time.sleep(_GLANCE_S)

    def wait_for_device(self, timeout_s: float | None = None) -> None:
        """On a GPU, wait for everything that has been launched on it, but no longer than until a
        failure is reported.

        Raises what `check` does, and EPTimeoutError also if the device does not end in time: then
        what was launched was perhaps never scheduled.
        """
        if self.processor.ends(timeout_s, self.check):
            return
        # What did not end is the stage that was launched last: of a closed round, combine.
        why = (
            f"did not end on this rank's own GPU within {timeout_s} s: its own kernel was not "
            "scheduled, since others hold the GPU, or it waits for ranks"
        )
        is_combine = self.rounds.state in (CLOSED, RETURNING)
        stage = STAGES[is_combine]
        global_rank = self.global_ranks[self.rank]
        raise EPTimeoutError(stage, self.rounds.count, [self.rank], [global_rank], why)

    def poll(self) -> None:
        """Raise what was reported so far: `check` and `check_rounds`."""
        self.check()
        self.check_rounds()

    def abort(self, handle: Sent | Dispatched | None) -> None:
        """`ExpertParallel.abort`: any state → CLOSED, without rows. Collective: every rank aborts
        or combines.

        Without a handle it raises nothing that was reported: the caller has an exception already.
        After a timeout the round stays open, and so does a round for which this thread was refused,
        since another thread has it.
        """
        if handle is not None or not self.rounds.is_of_another():
            self._abort(handle)

    @takes_turn
    def _abort(self, handle: Sent | Dispatched | None) -> None:
        # The caller has an exception already: nothing is raised in its place.
        if handle is None:
            if self.rounds.state != CLOSED and not self.failed:
                self.abort_open_round()
                self.drop_reports()
            return

        # That of the open round, and nothing was reported.
        self.check_open(handle)
        if self.rounds.handle is not handle or self.rounds.state == CLOSED:
            self.rounds.refuse(handle, "abort", "dispatched")
        self.abort_open_round()
        self.poll()

    @contextmanager
    def giving_up(self, skip: Callable[[], None] | None = None) -> Iterator[None]:
        """Run a round within this context. An exception aborts the round, if this thread has opened
        it.

        `skip` takes part in the round where the exception comes earlier. Nothing is raised in place
        of the exception.
        """
        before = self.rounds.count
        try:
            yield
        except BaseException:
            self.give_up(before, skip)
            raise

    def give_up(self, before: int, skip: Callable[[], None] | None = None) -> None:
        """Give a round up after an exception, as `giving_up` does, for callers whose every call
        counts: a context manager costs the host 2 µs. `before` is the count of rounds where the
        block began.
        """
        rounds = self.rounds
        if rounds.opened_after(before):
            self.abort(None)
            return
        # The others may come to the round, and then wait for this rank in it.
        is_to_come = rounds.count == before and not self.failed and not rounds.is_of_another()
        if skip is not None and is_to_come:
            # The reason for the second context is in `refuse_tangents`.
            with suppress(RuntimeError), temporarily_clear_interpreter_stack():
                skip()

    def check_open(self, handle: Sent | Dispatched) -> None:
        """`check`, in an open round. On the CPU every rank sees a mismatch in the same round, and
        closes this round.
        """
        try:
            self.check()
        except EPMismatchError:
            is_open = self.rounds.handle is handle and self.rounds.state != CLOSED
            if is_open and not self.failed:
                self.abort_open_round()
            raise
