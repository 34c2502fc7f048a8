"""The exchange of one node: each rank writes into the windows of the others.

dispatch: each token goes one-sided, and once, to each distinct rank that holds one of its experts.
combine: expert outputs go back one-sided to the ranks of their tokens and are summed there in rank
order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from epmoe.config.config import EPConfig
from epmoe.config.deadlines import Deadlines
from epmoe.config.placement import Placement
from epmoe.config.seats import Seats
from epmoe.exchange.addresses import Addresses
from epmoe.exchange.buffers import Buffers
from epmoe.exchange.call import Call
from epmoe.exchange.descriptors import Descriptors
from epmoe.exchange.exchange import Exchange, takes_turn
from epmoe.exchange.handles import Dispatched, Layout, Sent
from epmoe.exchange.health import Health, Totals, raise_incomplete, raise_on_failure
from epmoe.exchange.lobby import Lobby
from epmoe.exchange.lookout import Lookout
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.mismatch import Traits, calls_of
from epmoe.exchange.outputs import output_rows, refuse_layout, y_of
from epmoe.exchange.peek import LONG_S
from epmoe.exchange.round_state import CLOSED, DISPATCHED, RETURNING, SENT, RoundState
from epmoe.exchange.templates import Templates
from epmoe.exchange.window import Window
from epmoe.group.errors import EPAbortedError, EPOverflowError, EPStateError, EPTimeoutError
from epmoe.native import ops
from epmoe.native.layouts import constant, place, struct

# What kernels that had not ended at a release may still write.
_written_to: list[object] = []
# Seconds in which a host asks for a word without a pause. Later the wait may take milliseconds
# longer, and notices a GPU that has failed.
_SPIN_S = 1.0
_Result = TypeVar("_Result")


class OwedSkip(NamedTuple):
    """A round that this rank gives up, and that had not begun by then."""

    epoch: int
    call: Call
    """without tokens"""


class NodeExchange(Exchange):
    """An `Exchange` of the ranks of one node, whose config it takes. Its scratch lies at
    `addresses`, as its window.

    `plan` and `placement` have a rank in each of the `seats`, of which some may be empty.

    `memory` is window and scratch, as the operators take them, and `rows_key` what limits the
    expert-major rows of a round, as errors name it. Exchanges of one process with equal `layout`
    take the same CUDA graphs. With a `lobby`, ranks wait there for a round to begin.
    """

    _released = False  # another exchange may have these addresses

    def __init__(
        self,
        config: EPConfig,
        plan: MemoryPlan,
        placement: Placement,
        window: Window,
        global_ranks: list[int],
        addresses: Addresses,
        seats: Seats,
        lobby: Lobby | None = None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.window = window
        self._addresses = addresses
        self.processor = addresses.processor
        self.device = self.processor.device
        self.global_ranks = global_ranks
        self.seats = seats
        self.seat = plan.sizes["rank"]
        self.rank = seats.rank_in(self.seat)
        self._raises_overflow = config.capacity.on_overflow == "raise"
        self._raises_abort = config.exchange.on_abort == "raise"
        self.rows_key = "capacity.max_expert_rows"

        # The buffers, in the window and in scratch.
        self.buffers = Buffers(plan, placement, window, addresses, seats)
        self.memory = self.buffers.memory
        self.views = self.buffers.views
        # Rows that autograd may keep: each round tells it that they are others now.
        self._rows: Tensor | None = self.views["rows"]
        if self._rows.is_inference():
            self._rows = None
        # An abort allocates nothing, so the memory of its y is there already.
        y_bytes = plan.sizes["M"] * plan.sizes["D"] * config.model.torch_dtype.itemsize
        self._unread = self.processor.memory_of_unread_y(self.views["rows"], y_bytes)

        # Where experts move `LiveExperts` writes their tables first.
        if not config.placement.live:
            self.buffers.write_copies(placement)
            self.buffers.let_rounds_begin()

        # Words in host memory that the kernels write. Every call reads them, at a hundredth of the
        # host time that reading a tensor's element takes.
        self._words = addresses.words()  # keeps them
        words = self._words.data_ptr()
        self.status = struct("Status").from_address(words)
        progress = self.processor.progress_at(words, self.views)
        self.layout = *self.buffers.layout, words

        # The state of rounds.
        rounds = RoundState(struct("Progress").from_address(progress))
        self.rounds = rounds
        times = config.exchange
        self.deadlines = Deadlines(times.warmup_timeout_s, times.timeout_s, lambda: rounds.count)

        # What calls of one shape share.
        zero_gaps = plan.sizes["alignment"] > 1 and config.capacity.gap_rows == "zero"
        self.descriptors = Descriptors(
            plan, words, self.buffers.window_starts, self.deadlines, zero_gaps
        )
        self.templates = Templates(
            config, self.device, self.views, rounds, self.rank, plan.sizes, self.descriptors
        )

        # Where ranks wait for a round to begin, and a round that this rank gives up once it has.
        self._lobby = lobby
        self._owed: OwedSkip | None = None
        self._skips_late = self.processor.runs_ahead

        # What the host reads of a device at any time.
        self._totals = Totals(self.views, self.processor)
        self._errors = self.processor.peek(self.views["signal.error"])
        self._counts = self.processor.peek(self.views["recv.counts"])

        # Kernels that do not begin.
        watch = self.processor.watch(self.views)
        self.lookout = Lookout(watch, self.status, self.seat, rounds, self.deadlines)
        self._look_at = self.lookout.look_at

    @takes_turn
    def dispatch(self, call: Call) -> Dispatched:
        lobby = self._lobby
        if lobby is not None:
            self._settle_skip(lobby)
        sent = self.opened(call)
        if lobby is not None:
            self._await_begin(lobby, sent)
        self.launch(ops.dispatch, sent.arguments, DISPATCHED)
        return self.received(sent)

    @takes_turn
    def dispatch_send(self, call: Call) -> Sent:
        if self._lobby is not None:
            raise ValueError(
                "`exchange.idle` must be timeout for phases of their own: with wait, a rank "
                "without tokens waits before it sends, so call `dispatch`"
            )
        return self._sent(call)

    def _sent(self, call: Call) -> Sent:
        """The send phase."""
        sent = self.opened(call)
        self.launch(ops.dispatch_send, sent.arguments, SENT)
        return sent

    @takes_turn
    def dispatch_recv(self, sent: Sent) -> Dispatched:
        self.rounds.permit(sent, "dispatch_recv", "sent")
        self.launch(ops.dispatch_recv, sent.arguments, DISPATCHED)
        return self.received(sent)

    @takes_turn
    def combine(
        self, layout: Layout, rows: Tensor, dispatched: Dispatched, out: Tensor | None
    ) -> Tensor:
        # Asked here first, since `check_open` alone would cost each round two calls more.
        if self.status.code:
            self.check_open(dispatched)
        call = "combine" if layout == "expert" else "combine_partial"
        self.rounds.permit(dispatched, call)
        if dispatched.layout != layout:
            refuse_layout(dispatched)
        y = self._send_back(ops.combine, rows, dispatched, out, CLOSED)
        return self._closed(y)

    @takes_turn
    def combine_send(self, rows: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> None:
        if self.status.code:
            self.check_open(dispatched)
        self.rounds.permit(dispatched, "combine_send")
        self._send_back(ops.combine_send, rows, dispatched, out, RETURNING)

    @takes_turn
    def combine_recv(self, dispatched: Dispatched) -> Tensor:
        self.rounds.permit(dispatched, "combine_recv")
        y = self.rounds.y
        assert y is not None
        self.launch(ops.combine_recv, (y, None, *self.memory, dispatched.sent.descriptor), CLOSED)
        return self._closed(y)

    @takes_turn
    def skip(self, call: Call) -> None:
        """With a lobby, this rank comes to a round that has not begun, and waits for it before its
        next one. Where the host runs ahead, it gives the round up then, since kernels of an abort
        wait for other ranks.
        """
        lobby = self._lobby
        if lobby is None:
            self.abort(self._sent(call))
            return
        # One round at a time: until it begins, nobody has missed this rank in the next one.
        owed = self._owed
        if owed is not None and not lobby.has_begun(owed.epoch):
            return
        epoch = self.rounds.next_epoch()
        owes = not lobby.has_begun(epoch) or self.processor.captures()
        if owes:
            lobby.come(epoch, brings_tokens=False)
            self._owed = OwedSkip(epoch, call)
        if not owes or not self._skips_late:
            self.abort(self._sent(call))

    def _settle_skip(self, lobby: Lobby) -> None:
        """Wait until the round that this rank owes, if any, has begun, and give it up if this rank
        has not.
        """
        owed = self._owed
        if owed is None:
            return
        self._wait_in(lobby, owed.epoch)
        # A signal handler may have ended an earlier call of this behind the opening.
        if self.rounds.next_epoch() == owed.epoch:
            self._sent(owed.call)
            self._abort(None)
        self._owed = None

    def _await_begin(self, lobby: Lobby, sent: Sent) -> None:
        """Come to a round with tokens, which it begins, or wait until it has begun."""
        _, _, _, _, num_tokens, num_rows, *_ = sent.arguments
        brings_tokens = num_tokens is not None or num_rows > 0
        lobby.come(sent.epoch, brings_tokens)
        if not brings_tokens:
            self._wait_in(lobby, sent.epoch)

    def _wait_in(self, lobby: Lobby, epoch: int) -> None:
        """Wait until a round has begun, or cannot begin. Then its own waits find out why at once.

        Python runs signal handlers meanwhile. If these raise, the round has not been opened.
        """
        while True:
            has_begun = lobby.wait(epoch)
            if self._released:
                raise EPStateError(
                    f"this rank has left the group while it waited for round {epoch}"
                )
            # What this rank's kernels have reported, then other ranks.
            if not has_begun and self.status.code:
                self.check()
            if has_begun or self.dead() or self.missing():
                return
            left = self.seats.ranks_in(lobby.left())
            if left:
                self._raise_left(epoch, left)

    def _raise_left(self, epoch: int, ranks: list[int]) -> NoReturn:
        """Raise for a round that cannot begin. Nothing was sent."""
        global_ranks = [self.global_ranks[rank] for rank in ranks]
        why = (
            f"cannot begin: rank(s) {ranks} of the group (global rank(s) {global_ranks}) left the "
            "group"
        )
        then = "close this ExpertParallel, or follow them by `sleep`, `resume` or `recover`"
        raise EPTimeoutError("dispatch", epoch, ranks, global_ranks, why, then)

    def abort_open_round(self) -> None:
        """It allocates nothing, so it works after any error."""
        self.processor.abort(self.rounds, self.memory, self._unread)
        self.rounds.close()

    def drop_reports(self) -> None:
        if not self.failed:
            self.status.code = 0
        self.status.needed_rows = 0
        self.status.aborted = 0

    def check(self) -> None:
        """Raise the failure that kernels or other ranks have reported, if there is one."""
        self.lookout.look()
        if not self.status.code:
            return
        if self.status.code == constant("kOutdated"):
            # A replay has found the state of a group that this rank has left.
            number = self.status.epoch
            self.status.code = 0
            self._addresses.left.refuse_replay(number, self.plan.sizes)
        raise_on_failure(
            self.status,
            self.global_ranks,
            self.seats,
            self.rank,
            latched=self.processor.runs_ahead,
            dead=self.dead(),
            calls=self._calls,
        )

    def _calls(self) -> list[Traits]:
        """What the ranks called in the last round. Nobody can tell while a graph is captured."""
        calls = []
        if not self.processor.captures():
            may_have_extra = self.config.capacity.extra_bytes > 0
            calls = calls_of(self.views, self._counts, may_have_extra)
        return self.seats.by_rank(calls)

    def poll(self) -> None:
        self.lookout.look()
        words = self.status
        if words.code or words.needed_rows or words.aborted:
            super().poll()

    def check_rounds(self) -> None:
        """Raise overflows and aborts of rounds. Those that it does not raise stay, for an exchange
        over several nodes.
        """
        overflow = None
        if self._raises_overflow:
            overflow = self.take_overflow()
        aborted = None
        if self._raises_abort:
            mask, epoch = self.take_aborted()
            ranks = [rank for rank in range(len(self.global_ranks)) if mask >> rank & 1]
            if ranks:
                aborted = EPAbortedError(epoch, ranks)
        raise_incomplete(overflow, aborted)

    def take_overflow(self) -> EPOverflowError | None:
        """The error of a round, ended since the last call, that needed more expert-major rows than
        there are.
        """
        needed = self.status.needed_rows
        self.status.needed_rows = 0
        if not needed:
            return None
        return EPOverflowError(needed, self.plan.sizes["max_rows"], key=self.rows_key)

    def take_aborted(self) -> tuple[int, int]:
        """Ranks that have aborted rounds that ended since the last call, as a mask, and the last
        such round.
        """
        mask = self.status.aborted
        self.status.aborted = 0
        return self.seats.mask_of_ranks(mask), self.status.aborted_epoch

    @property
    def failed(self) -> bool:
        code = self.status.code
        if not code or code == constant("kOutdated"):
            return False
        return self.processor.runs_ahead or code == constant("kTimeout")

    def missing(self) -> int:
        mask = 0
        if self.status.code == constant("kTimeout"):
            mask = self.status.missing
        # What other ranks have reported. A GPU that has failed tells nothing.
        with suppress(RuntimeError):
            for errors in self._errors.read_within(LONG_S) or ():
                for reported in errors.tolist():
                    mask |= reported
        return self.seats.mask_of_ranks(mask)

    def dead(self) -> int:
        return self.seats.mask_of_ranks(self.window.deaths.mask())

    def end_waits(self) -> None:
        if len(self.global_ranks) == 1 or self.failed:
            return
        # Where the GPU has failed, the other ranks run into their deadline.
        with suppress(RuntimeError):
            self.report("signal.error", 1 << self.seat)

    def streams(self) -> list[torch.cuda.Stream]:
        """Those of the rounds so far, the current one first; none where there are no streams."""
        return self.processor.streams(self.rounds.last_stream)

    @property
    def latched(self) -> Tensor:
        """int32 [1] on the device, not 0 once a wait, on GPUs a round, has failed."""
        at = place("RoundState", "latched")
        return self.views["state"][at : at + 1]

    def report(self, buffer: str, value: int) -> None:
        """Store a word into this rank's place in a buffer of every window. Waits for no rank."""
        self.window.store(self.plan[buffer].offset + 8 * self.seat, value)

    def health(self, wait: bool) -> Health:
        if wait:
            self.processor.finish_stream()
        counts = self._totals.read()
        # The kernels count by seat.
        by_rank = self.seats.by_rank
        return replace(
            counts,
            rows_sent=by_rank(counts.rows_sent),
            waited_s=by_rank(counts.waited_s),
            aborted_rounds=by_rank(counts.aborted_rounds),
        )

    def release(self, close: Callable[[], None] = lambda: None) -> None:
        """Release windows and scratch. `close` ends everything besides kernels that may write into
        windows, before they are unmapped.

        What kernels may still write lives as long as the process, together with `close` and what it
        belongs to. Windows that another thread's call may still use stay mapped until that has
        ended.
        """
        # Nobody writes any more: no watch, no kernel, and nothing that `close` ends.
        self._released = True
        if self._lobby is not None:
            self._lobby.leave()
        self.window.deaths.close()
        ended = False
        # Where the GPU or a round has failed, its kernels end by themselves.
        with suppress(RuntimeError):
            ended = self.processor.ends(self.deadlines.wait_s())
        close()

        with suppress(RuntimeError):
            if ended:
                # A call of another thread may still use the windows: they stay mapped.
                caller = get_ident()
                if self.thread not in (0, caller):
                    self._addresses.abandon()
                    return
                self.thread = caller  # no other one gets in any more
                number = self._addresses.left.add(self.plan.sizes)
                self.processor.turn_replays_away(self.views["state"], number)
                self.window.places.unmap()
                return
        # Kernels may still write, for as long as this process lives.
        _written_to.append((self, close))
        self._addresses.abandon()

    def has_more_rounds(self) -> bool:
        if self.processor.runs_ahead:
            self._await_word_of_kernel()
        elif self.rounds.has_more_rounds is None:
            # Wait until every rank has closed the last round.
            arguments = torch.empty(0, 0, device="cpu"), None, *self.memory, self.descriptors.any()
            ops.combine_recv(*arguments)
            self._wait_on(ops.combine_recv, arguments, CLOSED)
            self.check()
        return bool(self.rounds.has_more_rounds)

    def _await_word_of_kernel(self) -> None:
        """Wait until the kernel of dispatch has written whether ranks have more rounds."""
        # The word usually comes at once.
        spin_until = monotonic() + _SPIN_S
        while self.rounds.has_more_rounds is None and monotonic() < spin_until:
            self.check()
            time.sleep(0)  # lets other threads run
        if self.rounds.has_more_rounds is None:
            self.wait_for_device(self.deadlines.first_s)
            self.check()

    def opened(self, call: Call) -> Sent:
        """Check a call and give it a round, whose first operator opens it."""
        if self.status.code:
            self.check()
        if self._lobby is not None and self.processor.captures():
            raise EPStateError(
                "`exchange.idle` must be timeout for CUDA graphs: with wait, ranks meet on the "
                "host before each round, which a replay does not do"
            )
        rounds = self.rounds
        epoch = rounds.next_epoch()

        # The checks of the call, which are few where an earlier one had its shape.
        template, T = self.templates.of(call)
        if template.shape.extra is not None:
            call = self.templates.with_extra(call, template.shape.extra)

        # What the operators of dispatch take.
        arguments = *call.operands(T, self.device), *self.memory, template.descriptor
        sent = Sent(template, T, epoch, template.descriptor, arguments, rounds.most_tokens)
        return rounds.open(sent, call.tag)

    @takes_turn
    def sending(self, has_more: bool, call: Callable[[], _Result]) -> _Result:
        if self._lobby is not None:
            raise ValueError(
                "`exchange.idle` must be timeout for calls of several rounds: ranks without tokens "
                "must learn at once whether others have more"
            )
        return super().sending(has_more, call)

    def received(self, sent: Sent) -> Dispatched:
        """The handle in state DISPATCHED. Raises EPTimeoutError, or EPMismatchError as
        `check_open`.
        """
        dispatched = self.rounds.receive(sent)
        if self._rows is not None and torch.is_grad_enabled():
            # A backward pass that needs rows of an earlier round raises then.
            increment_version(self._rows)
        if self.status.code:
            self.check_open(dispatched)
        return dispatched

    def _send_back(
        self,
        operator: OpOverload,
        rows: Tensor,
        dispatched: Dispatched,
        out: Tensor | None,
        state: int,
    ) -> Tensor:
        """Call an operator that sends rows back and leads to `state`. Returns y, which combine_send
        leaves unwritten.
        """
        y = y_of(dispatched, out, self.device)
        checked = output_rows(rows, dispatched, self.plan, self.processor)
        self.rounds.y = y
        self.launch(operator, (y, checked, *self.memory, dispatched.sent.descriptor), state)
        return y

    def _closed(self, y: Tensor) -> Tensor:
        """In state CLOSED, after the operator; returns y. Raises what `poll` does."""
        self.rounds.close()
        # Asked here first, since `poll` alone would cost each round a call more.
        words = self.status
        if words.code or words.needed_rows or words.aborted:
            self.poll()
        return y

    def launch(
        self,
        operator: OpOverload,
        arguments: tuple[Any, ...],
        state: int,
        again: Callable[[Any], tuple[OpOverload, tuple[Any, ...]]] | None = None,
    ) -> Any:
        """Call an operator that leads the round to `state`. If a signal has interrupted it, wait
        for the rest. Returns what the operator returns; `again` makes of that the operator and
        arguments of the wait, by default the same ones.
        """
        if monotonic() >= self._look_at["launch"]:
            self.lookout.look(launches=True)
            if self.status.code:
                self.check()
        found = operator(*arguments)
        if self.rounds.state != state:
            if again is not None:
                operator, arguments = again(found)
            self._wait_on(operator, arguments, state)
        return found

    def _wait_on(self, operator: OpOverload, arguments: tuple[Any, ...], state: int) -> None:
        """Wait for the rest of an operator that should have led the round to `state` and has not.

        On the CPU an operator interrupts its wait when a signal arrives, and at least every 100 ms,
        so that Python can run its signal handlers. If these raise, the round stays where it is.
        Otherwise it waits further, until the same deadline.

        Raises EPTimeoutError if dispatch waited in vain for ranks to end a round that this rank has
        aborted.
        """
        rounds = self.rounds
        progress = rounds.progress
        receive = ops.dispatch_recv if state == DISPATCHED else ops.combine_recv
        try:
            # The operator has returned so that Python can run signal handlers.
            while progress.deadline_ns and not self._released:
                # In an odd phase it has sent already, and only receives.
                has_sent = progress.phases & 1
                if has_sent:
                    receive(*arguments)
                else:
                    operator(*arguments)
        finally:
            # The next wait has a deadline of its own.
            progress.deadline_ns = 0
        if self._released:
            raise EPStateError(
                f"this rank has left the group of round {rounds.epoch} while this call waited"
            )
        if rounds.state != state:
            self.check()
            raise RuntimeError(f"round {rounds.epoch} was aborted while this call waited")
