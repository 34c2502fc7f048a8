"""The interface of exchanges, and what all exchanges have in common.

`NodeExchange` (node.py) exchanges rows between the ranks of one node. `HierarchicalExchange`
(epmoe/rail) does so between several nodes.
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
from epmoe.exchange.call import Call, Layout
from epmoe.exchange.handles import Dispatched, Sent
from epmoe.exchange.health import STAGES, Health
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.processor import Processor
from epmoe.exchange.round_state import CLOSED, RETURNING, RoundState
from epmoe.exchange.templates import Templates
from epmoe.group.errors import EPMismatchError, EPTimeoutError

ANOTHER_THREAD = (
    "another thread is in a call of this ExpertParallel: one thread at a time, so order their calls"
)
_POLL_INTERVAL_S = 1e-5  # between two looks whether another thread's call has ended
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


def takes_turn(call: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Decorate a method of an exchange, so that only one thread at a time is in such a method.

    Callers pass all arguments by position. The decorator costs a call 0.07 µs. It is no context
    manager: between entering and the `try` of one, a signal handler may raise, and then nobody
    would end the turn.
    """

    # The exchange is the first argument, `self`.
    @wraps(call)
    def entered(*args: Any) -> Any:
        exchange = args[0]
        # Not 0 if a signal handler makes this call in the middle of another call of this thread.
        outer_thread = exchange.enter()
        try:
            return call(*args)  # type: ignore[call-arg]
        finally:
            exchange.thread = outer_thread

    return cast(Callable[_P, _Result], entered)


def takes_turn_of_exchange(
    call: Callable[Concatenate[Any, _P], _Result],
) -> Callable[Concatenate[Any, _P], _Result]:
    """Decorate a method of an object that has an attribute `exchange`. While a thread is in the
    method, no other thread is in a call of this exchange.
    """

    @wraps(call)
    def entered(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        result: _Result = self.exchange.run(partial(call, self, *args, **kwargs))
        return result

    return entered


class Exchange(ABC):
    """One rank's part in the rounds of a group. An exchange has at most one open round."""

    config: EPConfig
    plan: MemoryPlan
    views: dict[str, Tensor]  # every buffer of the plan
    device: torch.device
    processor: Processor  # of the device
    rank: int  # in the group
    global_ranks: list[int]  # [R]
    rounds: RoundState
    deadlines: Deadlines
    # The sizes and addresses on which captured CUDA graphs rest. Exchanges with equal layouts may
    # replay each other's graphs. None: graphs rest on more, so no other exchange may replay them.
    layout: object = None
    templates: Templates
    thread: int = 0  # the identifier of the thread that is in a call; 0 if none is

    @abstractmethod
    def dispatch(self, call: Call) -> Dispatched:
        """Run both phases of dispatch: `ExpertParallel.dispatch`."""

    @abstractmethod
    def dispatch_send(self, call: Call) -> Sent:
        """Run the send phase of dispatch: `ExpertParallel.dispatch_send`.

        It waits for no rank, except after a round that this rank has aborted.
        """

    def skip(self, call: Call) -> None:
        """Take part in a round by a call without tokens, and abort it: `ExpertParallel.skip`."""
        sent = self.dispatch_send(call)
        self.abort(sent)

    @abstractmethod
    def dispatch_recv(self, sent: Sent) -> Dispatched:
        """Run the receive phase of dispatch: `ExpertParallel.dispatch_recv`."""

    @abstractmethod
    def combine(
        self, layout: Layout, rows: Tensor, dispatched: Dispatched, out: Tensor | None
    ) -> Tensor:
        """Run both phases of combine.

        It is `ExpertParallel.combine` with the layout "expert", and
        `ExpertParallel.combine_partial` with "rank".
        """

    @abstractmethod
    def combine_send(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None) -> None:
        """Run the send phase of combine: `ExpertParallel.combine_send`. It waits for no rank."""

    @abstractmethod
    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        """Run the receive phase of combine: `ExpertParallel.combine_recv`."""

    @abstractmethod
    def abort_open_round(self) -> None:
        """Close the open round in any of its states. This rank sends no rows, and waits for no
        rank.
        """

    @abstractmethod
    def drop_reports(self) -> None:
        """Forget the errors that kernels have reported of an aborted round. Otherwise the next
        round would raise them.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise EPTimeoutError, EPMismatchError or EPOrderError if a kernel or another rank has
        reported such a failure.
        """

    @abstractmethod
    def check_rounds(self) -> None:
        """Raise EPOverflowError or EPAbortedError for a round that has ended.

        It raises neither where the config (`capacity.on_overflow`, `exchange.on_abort`) says that
        such rounds are only counted.
        """

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether this exchange can run no more rounds, as far as the host knows.

        It has failed after a timeout, and on GPUs after any failure of a round. Its owner can only
        call `resume` or `close`.
        """

    @abstractmethod
    def missing(self) -> int:
        """The ranks of the group that this rank or another rank has waited for in vain, as a mask
        with a bit for each rank. It waits for no kernel.
        """

    @abstractmethod
    def dead(self) -> int:
        """The ranks of the group whose process on this machine has ended, as a mask with a bit for
        each rank.
        """

    @abstractmethod
    def end_waits(self) -> None:
        """Make all other ranks end their waits at once. They raise an EPTimeoutError that names
        this rank. It waits for no rank.
        """

    @abstractmethod
    def health(self, wait: bool) -> Health:
        """Read the health counters. With `wait`, wait first until the current stream has done all
        work that was launched on it.
        """

    @abstractmethod
    def release(self) -> None:
        """Give the memory and the network connections back, once no kernel can use them."""

    def largest(self, number: int) -> Callable[[], int] | None:
        """Prepare to find the largest of the `number` that each rank passes.

        Every rank calls it between rounds and in the same order. The call itself sends nothing. It
        returns a function that sends this rank's number to all ranks, waits for the numbers of the
        other ranks within the deadline of a round, and returns the largest number. If the function
        ends by an exception, the caller may call it again, and it continues where it was.

        Exchanges of one node return None. Their rounds carry whether a rank has more rounds: see
        `sending`.
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
        """Whether any rank has more rounds after the last one.

        In the last round every rank must have said whether it has more, by `sending`. Only
        exchanges of one node have this method; those of several nodes use `largest`.

        On GPUs it waits for the kernel of dispatch, up to `exchange.warmup_timeout_s`. On the CPU
        the answer has usually come with dispatch. Only where this rank has aborted an earlier
        round, it waits for ranks that have not closed that round yet. Raises the errors of `check`.
        """
        raise NotImplementedError

    @takes_turn
    def run(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of `call`, during which no other thread is in a call."""
        return call()

    @takes_turn
    def sending(self, has_more: bool, call: Callable[[], _Result]) -> _Result:
        """Return the result of `call`, which dispatches once.

        This dispatch also tells the other ranks whether this rank has more rounds (`has_more`).
        Either all ranks of a round dispatch by `sending`, or none does.
        """
        rounds = self.rounds
        try:
            # One word has both: the epoch of the round that `call` opens, and in the lowest bit
            # whether there are more rounds.
            rounds.progress.more_rounds = 2 * (rounds.count + 1) + has_more
            return call()
        finally:
            rounds.progress.more_rounds = 0

    def enter(self) -> int:
        """Begin a call of the current thread. Returns the value that the caller must give `thread`
        at the end of the call, also after an exception.

        The value is 0, or the identifier of this thread where a signal handler calls in the middle
        of another call of the same thread.

        Raises RuntimeError while another thread is in a call, since both would write the same
        window. A thread that has a round open waits for the end of the other call instead. The
        other thread's call will be refused, and this thread must not lose its round because of it.
        """
        caller = get_ident()
        # CPython switches threads only at calls and at jumps back. Neither stands between the last
        # comparison and the assignment behind the loop, so no other thread can enter in between.
        while (holder := self.thread) and holder != caller:
            self._wait_or_refuse(caller)
        self.thread = caller
        return holder

    def _wait_or_refuse(self, caller: int) -> None:
        """Wait until no other thread is in a call.

        Raises RuntimeError at once if the caller has no open round, and later if the other call
        has not ended within the deadline of a wait.
        """
        rounds = self.rounds
        deadline = time.monotonic() + self.deadlines.wait_s()
        while self.thread not in (0, caller):
            has_round = rounds.opener == caller and rounds.state != CLOSED
            if not has_round or time.monotonic() > deadline:
                rounds.turn_away(caller)
                raise RuntimeError(ANOTHER_THREAD)
            time.sleep(_POLL_INTERVAL_S)

    def wait_for_device(self, timeout_s: float | None = None) -> None:
        """Wait until the device has done all work that was launched on it, or until a failure is
        reported.

        Raises the errors of `check`. Raises EPTimeoutError, too, if the device has not ended after
        `timeout_s` seconds: a kernel that was launched may never have been scheduled.
        """
        if self.processor.ends(timeout_s, self.check):
            return
        # The error names the stage that was launched last. For a closed round that is combine.
        why = (
            f"did not end on this rank's own GPU within {timeout_s} s: its own kernel was not "
            "scheduled, since others hold the GPU, or it waits for ranks"
        )
        is_combine = self.rounds.state in (CLOSED, RETURNING)
        stage = STAGES[is_combine]
        global_rank = self.global_ranks[self.rank]
        raise EPTimeoutError(stage, self.rounds.count, [self.rank], [global_rank], why)

    def poll(self) -> None:
        """Raise any error that was reported so far, by `check` and `check_rounds`."""
        self.check()
        self.check_rounds()

    def abort(self, handle: Sent | Dispatched | None) -> None:
        """Close the open round in any of its states, without rows: `ExpertParallel.abort`.

        Every rank either aborts the round or combines in it.

        A caller that handles an exception passes no handle. Then the errors that kernels have
        reported are dropped, so that nothing replaces the exception. Two kinds of rounds stay open:
        the round of an exchange that has failed, and a round of another thread because of which a
        call of this thread was refused.
        """
        if handle is not None or not self.rounds.is_of_another():
            self._abort(handle)

    @takes_turn
    def _abort(self, handle: Sent | Dispatched | None) -> None:
        # Without a handle the caller has an exception already, and nothing may replace it.
        if handle is None:
            if self.rounds.state != CLOSED and not self.failed:
                self.abort_open_round()
                self.drop_reports()
            return

        # The handle must be that of the open round. Failures that were reported come first.
        self.check_open(handle)
        if self.rounds.handle is not handle or self.rounds.state == CLOSED:
            self.rounds.refuse(handle, "abort", "dispatched")
        self.abort_open_round()
        self.poll()

    @contextmanager
    def giving_up(self, skip: Callable[[], None] | None = None) -> Iterator[None]:
        """A context for one round. If an exception leaves the context, this rank gives the round
        up, so that the other ranks do not wait for it.

        If this thread has opened the round by then, it aborts the round. Otherwise it calls `skip`,
        if given, which takes part in the round without tokens. The exception is then raised
        further, and no later error replaces it.
        """
        before = self.rounds.count
        try:
            yield
        except BaseException:
            self.give_up(before, skip)
            raise

    def give_up(self, before: int, skip: Callable[[], None] | None = None) -> None:
        """Give a round up after an exception, as the context `giving_up` does.

        Callers on the hot path call it in an `except` block, since a context manager costs the host
        2 µs. `before` is the number of rounds (`RoundState.count`) before the caller began its own.
        """
        rounds = self.rounds
        if rounds.opened_after(before):
            self.abort(None)
            return
        # This thread has opened no round. The other ranks may come to it all the same, and would
        # wait for this rank.
        is_to_come = rounds.count == before and not self.failed and not rounds.is_of_another()
        if skip is not None and is_to_come:
            # The reason for the second context is in `refuse_tangents`.
            with suppress(RuntimeError), temporarily_clear_interpreter_stack():
                skip()

    def check_open(self, handle: Sent | Dispatched) -> None:
        """Raise failures as `check` does, and close the round of `handle` after a mismatch.

        On the CPU every rank sees the mismatch in this round. So each of them closes it, and the
        next round can begin. On GPUs the exchange has failed, and the round stays open.
        """
        try:
            self.check()
        except EPMismatchError:
            is_open = self.rounds.handle is handle and self.rounds.state != CLOSED
            if is_open and not self.failed:
                self.abort_open_round()
            raise
