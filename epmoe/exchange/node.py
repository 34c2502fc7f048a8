"""The exchange within one node: each rank writes into the windows of the other ranks.

In dispatch, a rank writes each of its tokens once into the window of every rank that holds one of
the token's experts. In combine, the ranks write the outputs of their experts into the windows of
the tokens' ranks, which sum them in rank order.
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
from epmoe.exchange.call import Call, Layout
from epmoe.exchange.descriptors import Descriptors
from epmoe.exchange.exchange import Exchange, takes_turn
from epmoe.exchange.handles import Dispatched, Sent
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

# Exchanges that were released while their kernels had not ended. They are kept for the life of the
# process, since the kernels may still write into their memory.
_still_written: list[object] = []
# For so many seconds the host asks for a word of a kernel without a pause. Afterwards it waits for
# the device: that may take milliseconds longer, but notices a GPU that has failed.
_SPIN_S = 1.0
_Result = TypeVar("_Result")


class OwedSkip(NamedTuple):
    """A round that this rank gives up. It had not begun when this rank did so."""

    epoch: int
    call: Call
    """the call by which this rank takes part, without tokens"""


class NodeExchange(Exchange):
    """The `Exchange` of the ranks of one node.

    Args:
        config: the config of this node's exchange.
        plan: the memory plan of this rank, with a window for each seat.
        placement: which seat has which expert.
        window: the windows of all ranks, mapped in this process.
        global_ranks: the global rank of each rank of the group, for errors.
        addresses: where scratch is reserved, as the window is.
        seats: the seats of the group, of which some may have no rank.
        lobby: where ranks wait for a round to begin; None with `exchange.idle: timeout`.
        check_weights: that of `Templates`. In a node of several it does nothing, since the exchange
            over the nodes checks.

    Attributes:
        memory: the window and the scratch, in the order in which the operators take them.
        rows_key: the key of the config that limits the expert-major rows of a round, for errors.
    """

    # Whether `release` was called: another exchange may have these addresses then.
    _released = False

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
        check_weights: Callable[[], object] = lambda: None,
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

        # Set up the buffers in the window and in the scratch.
        self.buffers = Buffers(plan, placement, window, addresses, seats)
        self.memory = self.buffers.memory
        self.views = self.buffers.views
        # Autograd may have saved these rows for a backward pass. Each round overwrites them, and
        # tells autograd so (`received`). Inference tensors cannot be saved, and have no version to
        # count.
        self._rows: Tensor | None = self.views["rows"]
        if self._rows.is_inference():
            self._rows = None
        # An abort must not allocate. So set memory aside for the y of its combine, which nobody
        # reads.
        y_bytes = plan.sizes["M"] * plan.sizes["D"] * config.model.torch_dtype.itemsize
        self._unread = self.processor.memory_of_unread_y(self.views["rows"], y_bytes)

        # If experts move, `LiveExperts` writes their tables and lets rounds begin afterwards.
        if not config.placement.live:
            self.buffers.write_copies(placement)
            self.buffers.let_rounds_begin()

        # Kernels report in words of host memory. Every call reads them by ctypes, which takes a
        # hundredth of the host time that reading an element of a tensor takes. The attribute keeps
        # the memory alive.
        self._words = addresses.words()
        words = self._words.data_ptr()
        self.status = struct("Status").from_address(words)
        progress = self.processor.progress_at(words, self.views)
        self.layout = *self.buffers.layout, words

        # The state of rounds.
        rounds = RoundState(struct("Progress").from_address(progress))
        self.rounds = rounds
        times = config.exchange
        self.deadlines = Deadlines(times.warmup_timeout_s, times.timeout_s, lambda: rounds.count)

        # Descriptors and templates are what calls of one shape share.
        zero_gaps = plan.sizes["alignment"] > 1 and config.capacity.gap_rows == "zero"
        self.descriptors = Descriptors(
            plan, words, self.buffers.window_starts, self.deadlines, zero_gaps
        )
        self.templates = Templates(
            config,
            self.device,
            self.views,
            rounds,
            self.rank,
            plan.sizes,
            self.descriptors,
            check_weights,
        )

        # With a lobby, this rank may owe the other ranks a round: it has given the round up before
        # the round had begun, and takes part once it has.
        self._lobby = lobby
        self._owed: OwedSkip | None = None
        self._skips_late = self.processor.runs_ahead

        # Buffers of the device that the host can read at any time.
        self._totals = Totals(self.views, self.processor)
        self._errors = self.processor.peek(self.views["signal.error"])
        self._counts = self.processor.peek(self.views["recv.counts"])

        # Checks whether kernels begin.
        watch = self.processor.watch(self.views)
        self.lookout = Lookout(watch, self.status, self.seat, rounds, self.deadlines)
        self._look_at = self.lookout.look_at

    @takes_turn
    def dispatch(self, call: Call) -> Dispatched:
        # With a lobby, first take part in the round that this rank owes, then wait for the new
        # round to begin.
        lobby = self._lobby
        if lobby is not None:
            self._settle_skip(lobby)
        sent = self.opened(call)
        if lobby is not None:
            self._await_begin(lobby, sent)
        self.launch(ops.dispatch, (*sent.operands, *self.memory, sent.descriptor), DISPATCHED)
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
        """Open a round and run the send phase of dispatch. The caller has its turn already."""
        sent = self.opened(call)
        self.launch(ops.dispatch_send, (*sent.operands, *self.memory, sent.descriptor), SENT)
        return sent

    @takes_turn
    def dispatch_recv(self, sent: Sent) -> Dispatched:
        self.rounds.permit(sent, "dispatch_recv", "sent")
        arguments = (*sent.operands, *self.memory, sent.descriptor)
        self.launch(ops.dispatch_recv, arguments, DISPATCHED)
        return self.received(sent)

    @takes_turn
    def combine(
        self, layout: Layout, rows: Tensor, dispatched: Dispatched, out: Tensor | None
    ) -> Tensor:
        # The code is read here first: to call `check_open` each time would cost a round two calls
        # more.
        if self.status.code:
            self.check_open(dispatched)
        call = "combine" if layout == "expert" else "combine_partial"
        self.rounds.permit(dispatched, call)
        if dispatched.sent.template.shape.layout != layout:
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
        """Take part in a round without tokens, and abort it: `ExpertParallel.skip`.

        With a lobby, the round may not have begun. Then this rank says in the lobby that it comes
        to the round, and remembers that it owes it: before its next round it waits until this one
        has begun (`_settle_skip`). On the CPU it aborts the round at once all the same. On GPUs it
        does so only later, since the kernels of an abort wait for the other ranks.
        """
        lobby = self._lobby
        if lobby is None:
            self.abort(self._sent(call))
            return
        # A rank owes at most one round. Until that round has begun, no other rank can come to the
        # next round and miss this one there.
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
        """If this rank owes a round, wait until that round has begun, and take part in it unless
        this rank has done so already.
        """
        owed = self._owed
        if owed is None:
            return
        self._wait_in(lobby, owed.epoch)
        # The epochs differ if this rank has opened the round already: in `skip` on the CPU, or in
        # an earlier call of this method that a signal handler has ended.
        if self.rounds.next_epoch() == owed.epoch:
            self._sent(owed.call)
            self._abort(None)
        self._owed = None

    def _await_begin(self, lobby: Lobby, sent: Sent) -> None:
        """Come to the round in the lobby, and wait until it has begun.

        A rank with tokens begins the round by that, and does not wait.
        """
        brings_tokens = sent.operands.brings_tokens
        lobby.come(sent.epoch, brings_tokens)
        if not brings_tokens:
            self._wait_in(lobby, sent.epoch)

    def _wait_in(self, lobby: Lobby, epoch: int) -> None:
        """Wait in the lobby until a round has begun.

        It also returns if a rank has died or a failure was reported: the waits in the round itself
        then raise the error at once. Signal handlers can run during the wait. If one raises, this
        rank has not opened the round.

        Raises EPStateError if this rank leaves the group meanwhile, and EPTimeoutError if another
        rank has left, so that the round cannot begin.
        """
        while True:
            has_begun = lobby.wait(epoch)
            if self._released:
                raise EPStateError(
                    f"this rank has left the group while it waited for round {epoch}"
                )
            # Find out why the round does not begin: failures that this rank's kernels have
            # reported, then deaths and failures of other ranks, then ranks that have left.
            if not has_begun and self.status.code:
                self.check()
            if has_begun or self.dead() or self.missing():
                return
            left = self.seats.ranks_in(lobby.left())
            if left:
                self._raise_left(epoch, left)

    def _raise_left(self, epoch: int, ranks: list[int]) -> NoReturn:
        """Raise EPTimeoutError for a round that cannot begin, since `ranks` have left the group.
        This rank has sent nothing.
        """
        global_ranks = [self.global_ranks[rank] for rank in ranks]
        why = (
            f"cannot begin: rank(s) {ranks} of the group (global rank(s) {global_ranks}) left the "
            "group"
        )
        then = "close this ExpertParallel, or follow them by `sleep`, `resume` or `recover`"
        raise EPTimeoutError("dispatch", epoch, ranks, global_ranks, why, then)

    def abort_open_round(self) -> None:
        """Close the open round without this rank's rows.

        It allocates nothing, so that it works after any error.
        """
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
        """The calls of all ranks in the last round, by rank. The list is empty if nobody can tell,
        such as while a graph is captured.
        """
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
        """Raise EPOverflowError or EPAbortedError for rounds that have ended.

        Reports that the config says not to raise stay in the status words. An exchange over several
        nodes takes them from there by `take_overflow` and `take_aborted`.
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
        """Take the report of a round that needed more expert-major rows than there are.

        Returns the error to raise, and erases the report. None if no such round has ended since the
        last call.
        """
        needed = self.status.needed_rows
        self.status.needed_rows = 0
        if not needed:
            return None
        return EPOverflowError(needed, self.plan.sizes["max_rows"], key=self.rows_key)

    def take_aborted(self) -> tuple[int, int]:
        """Take the reports of rounds that other ranks have aborted, and erase them.

        Returns the ranks that have aborted a round since the last call, as a mask with a bit for
        each rank, and the epoch of the last such round.
        """
        mask = self.status.aborted
        self.status.aborted = 0
        return self.seats.mask_of_ranks(mask), self.status.aborted_epoch

    @property
    def failed(self) -> bool:
        code = self.status.code
        # A replay of an outdated graph has done nothing, so it does not fail this exchange.
        if not code or code == constant("kOutdated"):
            return False
        return self.processor.runs_ahead or code == constant("kTimeout")

    def missing(self) -> int:
        mask = 0
        if self.status.code == constant("kTimeout"):
            mask = self.status.missing
        # Add what other ranks have reported. A GPU that has failed cannot be read: RuntimeError.
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
        """The streams on which rounds may have been launched, the current stream first. The list is
        empty on a device without streams.
        """
        return self.processor.streams(self.rounds.last_stream)

    @property
    def latched(self) -> Tensor:
        """A flag on the device, int32 [1]. It is not 0 once this exchange has failed: after a wait
        that has failed, and on GPUs after any round that has.
        """
        index = place("RoundState", "latched")
        return self.views["state"][index : index + 1]

    def report(self, buffer: str, value: int) -> None:
        """Store a word into the windows of all ranks, at this rank's place in a buffer. It waits
        for no rank.
        """
        self.window.store(self.plan[buffer].offset + 8 * self.seat, value)

    def health(self, wait: bool) -> Health:
        if wait:
            self.processor.finish_stream()
        counts = self._totals.read()
        # Kernels count by seat. Users know ranks.
        by_rank = self.seats.by_rank
        return replace(
            counts,
            rows_sent=by_rank(counts.rows_sent),
            waited_s=by_rank(counts.waited_s),
            aborted_rounds=by_rank(counts.aborted_rounds),
        )

    def release(self, close: Callable[[], None] = lambda: None) -> None:
        """Release the windows and the scratch.

        `close` is called before they are unmapped. It must end everything, besides kernels, that
        may still write into windows.

        If kernels do not end, the memory stays mapped for the life of the process, and `close` and
        the objects behind it stay alive, too. If another thread is in a call, the memory stays
        mapped as long as that call uses it.
        """
        # End everything that writes into the memory: the watch over processes, kernels, and
        # whatever `close` ends.
        self._released = True
        if self._lobby is not None:
            self._lobby.leave()
        self.window.deaths.close()
        ended = False
        # RuntimeError: the GPU or a round has failed. Kernels then end by themselves, but nobody
        # can tell when.
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
                # No other thread gets into a call from here on, since this one never leaves.
                self.thread = caller
                number = self._addresses.left.add(self.plan.sizes)
                self.processor.turn_replays_away(self.views["state"], number)
                self.window.places.unmap()
                return
        # Kernels may still write, for as long as this process lives.
        _still_written.append((self, close))
        self._addresses.abandon()

    def has_more_rounds(self) -> bool:
        if self.processor.runs_ahead:
            self._await_word_of_kernel()
        elif self.rounds.has_more_rounds is None:
            # The answer is not known yet. It is once every rank has closed the last round, for
            # which the receive phase of combine waits.
            arguments = torch.empty(0, 0, device="cpu"), None, *self.memory, self.descriptors.any()
            ops.combine_recv(*arguments)
            self._wait_on(ops.combine_recv, arguments, CLOSED)
            self.check()
        return bool(self.rounds.has_more_rounds)

    def _await_word_of_kernel(self) -> None:
        """Wait until the kernel of dispatch has told the host whether any rank has more rounds."""
        # The word usually comes at once, so ask for it without a pause first.
        spin_until = monotonic() + _SPIN_S
        while self.rounds.has_more_rounds is None and monotonic() < spin_until:
            self.check()
            time.sleep(0)  # lets other threads run
        if self.rounds.has_more_rounds is None:
            self.wait_for_device(self.deadlines.first_s)
            self.check()

    def opened(self, call: Call) -> Sent:
        """Check a call, and prepare a round for it.

        Returns the handle of the round. The operator that the caller launches next opens the round.
        """
        if self.status.code:
            self.check()
        if self._lobby is not None and self.processor.captures():
            raise EPStateError(
                "`exchange.idle` must be timeout for CUDA graphs: with wait, ranks meet on the "
                "host before each round, which a replay does not do"
            )
        rounds = self.rounds
        epoch = rounds.next_epoch()

        # Check the call. If an earlier call had the same shape, few checks are left.
        template, T = self.templates.of(call)
        if call.extra is not None:
            call = self.templates.with_extra(call, template.shape.extra)

        operands = call.operands(T, self.device)
        sent = Sent(template, T, epoch, template.descriptor, operands, rounds.most_tokens)
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
        """Return the handle of the round once dispatch has received, in state DISPATCHED.

        Raises the failures that were reported so far, as `check_open` does.
        """
        dispatched = self.rounds.receive(sent)
        if self._rows is not None and torch.is_grad_enabled():
            # The rows have new values. A backward pass that needs those of an earlier round now
            # raises.
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
        """Check the rows of the experts, and launch `operator`, which sends them back.

        The operator is that of combine or of combine_send, and leads the round to `state`. Returns
        the output y. After combine_send nothing is written into it yet.
        """
        sent = dispatched.sent
        y = y_of(sent, out, self.device)
        checked = output_rows(rows, dispatched, self.plan, self.processor)
        self.rounds.y = y
        self.launch(operator, (y, checked, *self.memory, sent.descriptor), state)
        return y

    def _closed(self, y: Tensor) -> Tensor:
        """End a round whose last operator has been launched. Returns y.

        Raises the errors of `poll`.
        """
        self.rounds.close()
        # The words are read here first: to call `poll` each time would cost a round one call more.
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
        """Call an operator that leads the round to `state`, and return its result.

        On the CPU a signal may interrupt the operator. Then it is called again until the round is
        in `state`. By default the later calls have the same operator and arguments. With `again`
        they have those that `again` returns for the result of the first call.
        """
        if monotonic() >= self._look_at["launch"]:
            self.lookout.look(launches=True)
            if self.status.code:
                self.check()
        result = operator(*arguments)
        if self.rounds.state != state:
            if again is not None:
                operator, arguments = again(result)
            self._wait_on(operator, arguments, state)
        return result

    def _wait_on(self, operator: OpOverload, arguments: tuple[Any, ...], state: int) -> None:
        """Call an operator again until it has led the round to `state`.

        On the CPU an operator interrupts its wait when a signal arrives, and at least every 100 ms,
        so that Python can run its signal handlers. If a handler raises, the round stays in the
        state that it has. Otherwise the operator is called again, and waits until the same
        deadline.

        Raises EPStateError if this rank has left the group meanwhile. Raises EPTimeoutError if
        dispatch has waited in vain for ranks to end a round that this rank has aborted.
        """
        rounds = self.rounds
        progress = rounds.progress
        receive = ops.dispatch_recv if state == DISPATCHED else ops.combine_recv
        try:
            # A deadline that is not 0 says: the operator has returned only for signal handlers.
            while progress.deadline_ns and not self._released:
                # The number of phases is odd if the send phase has ended. Only receiving is left
                # then.
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
