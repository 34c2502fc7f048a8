"""The rail between GPUs: all-to-all by NCCL on a stream of its own, and a thread of the host that
watches it.

The kernels of NCCL have no deadline, and torch's watchdog does not see transfers in a CUDA graph.
So a kernel counts each transfer that starts, and one each that ends, in memory of the host, also in
replays. The thread compares the two.
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

_LOOK_S = 0.05  # between two looks at the counts
_END_S = 1.0  # for NCCL to end; it may wait for CUDA graphs that hold its kernels
_GLANCE_S = 1e-3
_NEVER = timedelta(days=7)  # torch's own deadline, which would come without names
# A group made under it has no watchdog, which, once a transfer has failed, would hold up the end of
# the group for 60 s and have torch end the processes of all ranks. Only `Work.wait` blocks, and
# `start` gets no `Work`. The constructor of torch's group reads it (2.11 to 2.14), and no option of
# the group's says the same.
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
_WITH_WATCHDOG = "0"  # as without the variable
_making = Lock()  # another group of ours is not made between the two values


def words_of(shown: Tensor) -> tuple[Array[c_int64], Structure]:
    """View int64 [7] as the words that the GPU and the host write for each other: transfers out
    that have started and that have ended, those back, and a `RailStop` of csrc/rail.h.
    """
    counts = (c_int64 * 4).from_address(shown.data_ptr())
    return counts, struct("RailStop").from_address(shown[4:].data_ptr())


class NcclRail:
    """A `Rail` by NCCL. `start` and `wait` only queue work, so they can be captured into a CUDA
    graph.
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
        self._others = [int(other != rank) for other in ranks]
        self._group = nccl_group(f"{roll_call.name}/rail/{ranks[0]}", ranks.index(rank), len(ranks))
        self._stream = own_stream(device, HIGH)

        # Counts of transfers, on the GPU and as the host sees them: see `words_of`.
        counts = torch.zeros(4, dtype=torch.int64, device=device)
        # `_meet` runs on another thread, which may not know the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._shown = shown = torch.zeros(7, dtype=torch.int64).pin_memory()
        written_by_replays.extend((counts, shown))
        self._counts, self._told = words_of(shown)
        # The words that `rail_mark` counts and shows: of transfers out, then back, the one that
        # starts and the one that ends.
        marks = list(zip(counts.split(1), shown[:4].split(1), strict=True))
        self._marks = (marks[:2], marks[2:])
        self._stop = shown[4:]
        self._latched: Tensor | None = None

        # The threads that watch transfers, and that end NCCL.
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
            # A kernel that waits for a dead rank would keep the GPU from `resume`.
            self._end(self._group.abort)
            raise

    def _meet(self) -> None:
        """A first transfer: NCCL connects at its start, which no captured transfer can wait for."""
        with torch.cuda.device(self._device):
            sent, received = torch.zeros(2, sum(self._others), device=self._device)
            self.start(Transfer(sent, received, self._others, self._others))
            self._stream.synchronize()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def start(self, transfer: Transfer) -> None:
        """Queue a transfer, between two marks."""
        if self._told.cut or self._ending is not None:
            raise RailError("the rail is closed")
        begin, end = self._marks[transfer.returning]
        # Once this rank has failed, its partial rows become zeros.
        failed: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._latched is not None:
            failed = (self._latched, self._stop)
        partial_rows = transfer.sent if transfer.returning else None

        # On the current stream, without a `Work`.
        options = AllToAllOptions()
        options.asyncOp = False
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
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
        """The current stream waits, the host does not, and `watch` has the deadline."""
        torch.cuda.current_stream(self._device).wait_event(transfer.started[0])

    def watch(self, on_late: WeakMethod[Callable[[], None]], latched: Tensor) -> None:
        """`on_late` is also called once the node's exchange has failed.

        Until the first round has ended on the GPU, the deadline is that of the first round, however
        far the host is.
        """
        self._latched = latched
        arguments = on_late, self._shown, self._deadlines, self._closed
        self._watching = Thread(target=_watch, args=arguments, daemon=True, name="epmoe-rail")
        start_thread(self._watching)

    def missing(self, found: Sequence[int]) -> list[int]:
        return self._roll_call.missing(found)

    def abort(self) -> None:
        """The transfers of CUDA graphs end, too. Returns once none is under way: NCCL's own abort
        may wait for graphs, while ranks of the node wait for the report of this one.
        """
        self._told.cut = 1
        self._end(self._group.abort, enough=lambda: self._idle)

    def close(self) -> None:
        """Where no transfer is under way, NCCL first delivers what this rank has sent."""
        self._closed.set()
        # The thread may be recording a failure.
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
        """End NCCL's work, once, on a thread: it waits for CUDA graphs that hold its kernels.
        Returns after `_END_S`, or once that is `enough`. Then the destructor of the group, on any
        thread, ends nothing.
        """
        try:
            until = time.monotonic() + _END_S
            # RuntimeError: no thread can start any more.
            with suppress(RuntimeError):
                # A signal handler may have raised before an earlier call had started it.
                if self._ending is None or self._ending.ident is None:
                    self._ending = Thread(
                        target=_first_that_works, args=calls, daemon=True, name="epmoe-rail-end"
                    )
                    start_thread(self._ending)
                while self._ending.is_alive() and not enough() and time.monotonic() < until:
                    self._ending.join(_GLANCE_S)
        finally:
            self._told.done = 1


def _first_that_works(*calls: Callable[[], None]) -> None:
    """Call until one raises nothing: a GPU may have failed."""
    for call in calls:
        with suppress(RuntimeError):
            return call()


def nccl_group(name: str, rank: int, size: int) -> Any:
    """Make a group of a name that no other group has had; see `gloo_group`. It connects at its
    first transfer.

    What another thread may see of the variable: a group of the program's that it makes in this
    moment, of some microseconds, has no watchdog. It may read any variable meanwhile: this one
    stays, since the C library moves others when it removes one, and changing a value moves none.
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
    """Transfers of one direction at the last look."""

    started: int = 0
    ended: int = 0
    since: float = 0.0
    """when a look has last found a change"""

    def has_changed(self, started: int, ended: int) -> bool:
        """Keep these counts. Returns whether they differ from those of the last look."""
        is_same = started == self.started and ended == self.ended
        self.started = started
        self.ended = ended
        return not is_same


def _watch(
    on_late: WeakMethod[Callable[[], None]], shown: Tensor, deadlines: Deadlines, closed: Event
) -> None:
    """Watch transfers on a thread, and call `on_late` once one is late.

    The thread ends with the exchange, and must not keep it alive. `shown` keeps the words alive.
    """
    counts, told = words_of(shown)
    # Transfers out, then those back.
    directions = (_Progress(), _Progress())
    while not closed.wait(_LOOK_S):
        now = time.monotonic()
        is_late = bool(told.wanted)
        for number, progress in enumerate(directions):
            started, ended = counts[2 * number : 2 * number + 2]
            if progress.has_changed(started, ended):
                progress.since = now
            elif started != ended:
                # Until the first transfer back has ended, this is the first round.
                deadline_s = deadlines.wait_s(returning=number == 1, first=not counts[3])
                is_late |= now - progress.since > deadline_s
        # Held for as short as possible: the exchange must be able to go.
        call = on_late()
        if call is None:
            return
        if is_late:
            return call()
        del call
