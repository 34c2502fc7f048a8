"""The rail between GPUs: an all-to-all by NCCL on a stream of its own, and a thread of the host
that watches the transfers.

The kernels of NCCL have no deadline, and torch's watchdog does not see transfers in a CUDA graph.
So a small kernel before each transfer counts that it starts, and another one behind the transfer
counts that it has ended. Both counts lie in memory of the host, and replays of a graph count, too.
The thread compares the two counts: where they differ for too long, a transfer is late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import Array, Structure, c_int64
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any, ClassVar
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, _get_default_store

from epmoe.config.deadlines import Deadlines
from epmoe.group.board import RollCall
from epmoe.group.waiting import interruptible, start_thread
from epmoe.native import ops
from epmoe.native.layouts import struct
from epmoe.native.streams import HIGH, own_stream
from epmoe.rail.memory import written_by_replays
from epmoe.rail.rail import RailError, Transfer

# The thread reads the counts at this interval.
_WATCH_S = 0.05
# NCCL gets so much time to end. It may wait for CUDA graphs that hold its kernels.
_END_S = 1.0
# While NCCL ends, the caller asks at this interval whether it has ended.
_END_POLL_S = 1e-3
# torch's own deadline must never come, since its error would not name the missing ranks.
_NEVER = timedelta(days=7)
# While this variable of the environment is set, torch makes groups without a watchdog. Once a
# transfer has failed, the watchdog would delay the end of the group for 60 s, and would have torch
# end the processes of all ranks. The variable makes `Work.wait` block, but `start` gets no `Work`.
# The constructor of torch's group reads the variable (2.11 to 2.14). No option does the same.
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
# This value does the same as no variable.
_WITH_WATCHDOG = "0"
# Two threads that make groups must not change the variable at the same time.
_making = Lock()


def words_of(shown: Tensor) -> tuple[Array[c_int64], Structure]:
    """View `shown`, int64 [7] in memory of the host, as the words that the GPU and the host write
    for each other.

    Returns four counts and a `RailStop` of csrc/rail.h. The counts are: transfers out that have
    started, transfers out that have ended, transfers back that have started, and transfers back
    that have ended.
    """
    counts = (c_int64 * 4).from_address(shown.data_ptr())
    return counts, struct("RailStop").from_address(shown[4:].data_ptr())


class NcclRail:
    """A `Rail` that uses NCCL. `start` and `wait` only queue work on streams, so both can be
    captured into a CUDA graph.
    """

    devices: ClassVar[tuple[str, ...]] = ("cuda",) if dist.is_nccl_available() else ()

    def __init__(
        self, roll_call: RollCall, deadlines: Deadlines, device: torch.device, connect: timedelta
    ) -> None:
        ranks = roll_call.ranks
        rank = roll_call.rank
        self._roll_call = roll_call
        self._deadlines = deadlines
        self._device = device
        # [N] 1 for each other rank of the rail, and 0 for this one.
        self._others = [int(other != rank) for other in ranks]
        self._group = nccl_group(f"{roll_call.name}/rail/{ranks[0]}", ranks.index(rank), len(ranks))
        self._stream = own_stream(device, HIGH)

        # The GPU counts transfers in its own memory, and writes each count into memory of the host,
        # see `words_of`.
        counts = torch.zeros(4, dtype=torch.int64, device=device)
        # `_meet` runs on another thread, which may not know the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._shown = shown = torch.zeros(7, dtype=torch.int64).pin_memory()
        written_by_replays.extend((counts, shown))
        self._counts, self._told = words_of(shown)
        # Pair each count of the GPU with its word of the host, for `rail_mark`. The first two pairs
        # count transfers out that start and that end; the other two count transfers back.
        marks = list(zip(counts.split(1), shown[:4].split(1), strict=True))
        self._marks = (marks[:2], marks[2:])
        self._stop = shown[4:]
        self._latched: Tensor | None = None

        # Prepare the two threads: one watches transfers, and one ends NCCL.
        self._closed = Event()
        self._watching: Thread | None = None
        self._ending: Thread | None = None

        # Connect now: no captured transfer can wait for it.
        try:
            if not interruptible(self._meet, connect.total_seconds()):
                raise RuntimeError(
                    f"ranks {ranks} do not reach one another by NCCL: NCCL_DEBUG=INFO says more"
                )
        except BaseException:
            # End the kernel of NCCL that may wait for a dead rank. `resume` waits for the GPU.
            self._end(self._group.abort)
            raise

    def _meet(self) -> None:
        """Run a first transfer and wait for it. NCCL connects during the first transfer, and a
        transfer that is being captured into a graph could not wait for that.
        """
        with torch.cuda.device(self._device):
            sent, received = torch.zeros(2, sum(self._others), device=self._device)
            transfer = Transfer(
                sent=sent,
                received=received,
                sent_rows=self._others,
                received_rows=self._others,
            )
            self.start(transfer)
            self._stream.synchronize()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def start(self, transfer: Transfer) -> None:
        """Queue a transfer, between the kernels that count its start and its end."""
        if self._told.cut or self._ending is not None:
            raise RailError("the rail is closed")
        begin, end = self._marks[transfer.returning]
        # Let the kernel make partial rows zeros once this rank has failed.
        failed: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._latched is not None:
            failed = (self._latched, self._stop)
        partial_rows = transfer.sent if transfer.returning else None

        # Queue all on the stream of the rail. Without `asyncOp` NCCL uses this stream, too, and
        # torch makes no `Work`.
        options = AllToAllOptions()
        options.asyncOp = False
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Each mark gets the pair of a count, what to do after a failure, whether it stands at
            # the end, and the slabs that become zeros after a failure, with their number.
            ops.rail_mark(*begin, *failed, False, partial_rows, sum(self._others))
            try:
                self._group.alltoall_base(
                    transfer.received,
                    transfer.sent,
                    transfer.received_rows,
                    transfer.sent_rows,
                    options,
                )
            except RuntimeError as error:
                raise RailError(str(error)) from error
            ops.rail_mark(*end, *failed, True, None, 0)
            transfer.started.append(self._stream.record_event())

    def wait(self, transfer: Transfer, look: Callable[[], None]) -> None:
        """Make the current stream wait for the transfer. The host does not wait, so `look` is not
        called; the thread of `watch` checks the deadline.
        """
        torch.cuda.current_stream(self._device).wait_event(transfer.started[0])

    def watch(self, on_late: WeakMethod[Callable[[], None]], latched: Tensor) -> None:
        """Watch the transfers on a thread. `on_late` is also called once the exchange inside the
        node has failed.

        Until the first round has ended on the GPU, the longer deadline of the first round holds,
        even if the host has queued more rounds by then.
        """
        self._latched = latched
        arguments = on_late, self._shown, self._deadlines, self._closed
        self._watching = Thread(target=_watch, args=arguments, daemon=True, name="epmoe-rail")
        start_thread(self._watching)

    def missing(self, found: Sequence[int]) -> list[int]:
        return self._roll_call.missing(found)

    def abort(self) -> None:
        """End all transfers, those of CUDA graphs, too. It returns once no transfer is under way.

        NCCL's own abort may go on for longer, since it may wait for graphs. The caller does not
        wait for that, because the ranks of the node wait for the report of this rank.
        """
        self._told.cut = 1
        self._end(self._group.abort, enough=lambda: self._idle)

    def close(self) -> None:
        """End NCCL. If no transfer is under way, NCCL first delivers what this rank has sent.
        Otherwise all transfers are aborted.
        """
        self._closed.set()
        # Wait for the thread, which may be recording a failure.
        if self._watching is not None and self._watching.is_alive():
            self._watching.join(3 * _END_S)
        if not self._idle or self._told.wanted:
            self.abort()
        self._end(self._group.shutdown, self._group.abort)

    @property
    def _idle(self) -> bool:
        """Whether no transfer is under way."""
        out, out_ended, back, back_ended = self._counts
        return (out, back) == (out_ended, back_ended)

    def _end(self, *calls: Callable[[], None], enough: Callable[[], bool] = lambda: False) -> None:
        """End NCCL on a thread of its own: NCCL may wait for CUDA graphs that hold its kernels.

        The thread makes `calls` in their order until one raises nothing. It is started once; a
        further call of this method waits for the same thread. The method returns when the thread
        has ended, when `enough` returns true, or after `_END_S` seconds. The destructor of the
        group, which may run on any thread, then has nothing left to end.
        """
        try:
            until = time.monotonic() + _END_S
            # Starting a thread raises RuntimeError while the interpreter ends.
            with suppress(RuntimeError):
                # A signal handler may have raised in an earlier call before the thread was started.
                # Then the thread has no `ident`.
                if self._ending is None or self._ending.ident is None:
                    self._ending = Thread(
                        target=_first_that_works, args=calls, daemon=True, name="epmoe-rail-end"
                    )
                    start_thread(self._ending)
                while self._ending.is_alive() and not enough() and time.monotonic() < until:
                    self._ending.join(_END_POLL_S)
        finally:
            self._told.done = 1


def _first_that_works(*calls: Callable[[], None]) -> None:
    """Make these calls in their order, until one does not raise RuntimeError. A call raises where
    the GPU has failed.
    """
    for call in calls:
        with suppress(RuntimeError):
            return call()


def nccl_group(name: str, rank: int, size: int) -> Any:
    """Make an NCCL group under a name that no other group has had, see `gloo_group`. The ranks
    connect in the first transfer of the group.

    For some microseconds a variable of the environment has another value. A group that another
    thread of the program makes in this moment has no watchdog. Other variables can be read
    meanwhile: the variable is changed and not removed, because the C library moves other variables
    when it removes one.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    store = dist.PrefixStore(f"epmoe/{name}", _get_default_store())
    with _making:
        before = os.environ.get(_NO_WATCHDOG, _WITH_WATCHDOG)
        try:
            os.environ[_NO_WATCHDOG] = "1"
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            os.environ[_NO_WATCHDOG] = before


@dataclass
class _Progress:
    """The counts of transfers in one direction, as the thread has last read them."""

    started: int = 0
    ended: int = 0
    since: float = 0.0
    """when the thread has last found a change, by `time.monotonic`"""

    def has_changed(self, started: int, ended: int) -> bool:
        """Keep these counts, and return whether they differ from the counts before."""
        is_same = started == self.started and ended == self.ended
        self.started = started
        self.ended = ended
        return not is_same


def _watch(
    on_late: WeakMethod[Callable[[], None]], shown: Tensor, deadlines: Deadlines, closed: Event
) -> None:
    """Watch transfers, and call `on_late` once a transfer is late. It is the work of a thread.

    The thread ends when `closed` is set or the exchange is collected; it must not keep the exchange
    alive. It keeps `shown` alive, since `words_of` returns views of that memory.
    """
    counts, told = words_of(shown)
    # Transfers out come first, then transfers back.
    directions = (_Progress(), _Progress())
    while not closed.wait(_WATCH_S):
        now = time.monotonic()
        is_late = bool(told.wanted)
        for number, progress in enumerate(directions):
            started, ended = counts[2 * number : 2 * number + 2]
            if progress.has_changed(started, ended):
                progress.since = now
            elif started != ended:
                # Until the first transfer back has ended, this is the first round, whose deadline
                # is longer.
                deadline_s = deadlines.wait_s(returning=number == 1, first=not counts[3])
                is_late |= now - progress.since > deadline_s
        # Make the reference to the exchange strong only for the call, so that the exchange can be
        # collected otherwise.
        call = on_late()
        if call is None:
            return
        if is_late:
            return call()
        del call
