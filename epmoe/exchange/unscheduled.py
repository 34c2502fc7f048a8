"""How the host sees that a kernel of this rank does not begin on its GPU.

A kernel that runs and waits for ranks checks its deadline itself. But if other kernels hold all
multiprocessors, a kernel never begins, and so it cannot report anything. Therefore the host reads
the round's state on the device once in a while. Copy engines do so, which need no multiprocessor.
Every kernel of the exchange changes the state as soon as it begins.

- **Calls.** Directly before a call launches its kernel, it puts a copy of the state into the same
  stream. Such a copy is called a mark. When the copy has arrived on the host, all work in front of
  the kernel has ended. If the state on the device still equals the copy, the kernel has not begun.
- **Replays** of CUDA graphs are not calls, so no copy can stand directly before their kernels.
  Instead `poll` puts a copy into the stream, behind all work that was launched so far. If this copy
  does not arrive and the state does not change, no kernel of a replay begins.
"""

from __future__ import annotations

import ctypes
import math
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from epmoe.exchange.round_state import RoundState
from epmoe.group.waiting import first_answer
from epmoe.native import layouts
from epmoe.native.streams import HIGH, own_stream

LOOK_S = 0.05
"""The shortest time between two checks before launches, and between two checks of `poll`, in
seconds. A check takes tens of microseconds.
"""
NextWork = Literal["launch", "replay", None]
"""What the caller does next on its current stream.

"launch": it launches a kernel, which waits for no other stream than this one. "replay": it may
replay a graph. None: neither, and another thread may be launching a kernel at this moment.
"""
# The host buffer of a copy holds this value until the copy arrives. No word of the state has it.
_UNWRITTEN = b"\x7f" * 4
# How long to wait for a copy that has no work in front of it.
_ANSWER_S = 1e-3
# The number of hardware queues by default: see CUDA_DEVICE_MAX_CONNECTIONS.
_QUEUES = 8


@cache
def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    """Streams of a device, one in each hardware queue, for the copies of `CopyOfNow`.

    The driver assigns the queues of a priority by turns, in the order in which streams are made. So
    as many streams as there are queues get one queue each. Their priority is that of `GpuPeek`.
    """
    return [own_stream(device, HIGH) for _ in range(_QUEUES)]


class CopyInStream:
    """Copies a buffer of a GPU to the host, in the order of a stream: behind all work that was
    launched on the stream before. Without a `stream` it is the current one.
    """

    def __init__(self, buffer: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        # It must not be an inference tensor: `start` also writes it outside of inference mode.
        with torch.inference_mode(False):
            self._copied = torch.zeros_like(buffer, device="cpu", pin_memory=True)
        self._buffer = buffer
        self._stream = stream
        self._bytes = (ctypes.c_char * buffer.nbytes).from_address(self._copied.data_ptr())

    def start(self) -> None:
        """Launch the copy. An earlier copy must have arrived."""
        ctypes.memset(self._bytes, _UNWRITTEN[0], len(self._bytes))
        with torch.cuda.stream(self._stream):
            self._copied.copy_(self._buffer, non_blocking=True)

    def read(self) -> bytes | None:
        """The copied bytes. None while the copy is on its way; zeros before the first copy."""
        copied = self._bytes.raw
        if _UNWRITTEN in copied:
            return None
        return copied


class CopyOfNow:
    """Copies a buffer of a GPU to the host without waiting for other streams.

    Streams share the hardware queues of the driver. If a kernel that cannot begin stands at the
    front of a queue, a copy behind it does not run. So there is a copy in each of several queues. A
    copy that is stuck is left alone: what it brings will be old.

    A `Peek` cannot serve here. It learns by an event that its copy has arrived, and the event
    itself may wait behind a kernel that cannot begin.
    """

    def __init__(self, copies: Sequence[CopyInStream]) -> None:
        self._copies = copies

    @classmethod
    def of(cls, buffer: Tensor) -> CopyOfNow:
        """A copy in each hardware queue of the buffer's GPU."""
        return cls([CopyInStream(buffer, stream) for stream in _streams_of(buffer.device)])

    def read(self) -> bytes | None:
        """The bytes that the buffer holds now. It waits at most `_ANSWER_S`. None if no copy gets
        through, so that nobody can tell.
        """
        for copy in self._copies:
            is_on_its_way = copy.read() is None
            if not is_on_its_way:
                copy.start()
                return first_answer(copy.read, time.monotonic() + _ANSWER_S)
        return None


@dataclass
class _Mark:
    """A copy of the state that is put into a stream, to see when the stream reaches this point.

    Times are those of `time.monotonic`, in seconds.
    """

    copy: CopyInStream
    set: bool = False  # whether the copy is on its way, or has arrived and is still of use
    phases: int = 0  # how many phases the host had launched when the mark was set
    set_s: float = 0.0  # when the mark was set
    came_s: float = math.inf  # when a check has first found that the copy has arrived

    def put(self, time_s: float, phases: int) -> None:
        """Set the mark, behind all work that was launched so far."""
        self.copy.start()
        self.phases = phases
        self.set_s = time_s
        self.came_s = math.inf
        self.set = True

    def read(self, time_s: float) -> bytes | None:
        """The copied state, once the stream has reached the mark; None before, and if no mark is
        set.
        """
        if not self.set:
            return None
        copied = self.copy.read()
        if copied:
            self.came_s = min(self.came_s, time_s)
        return copied

    @property
    def is_free(self) -> bool:
        """Whether the mark can be set: it is not in use, and its last copy has arrived."""
        return not self.set and self.copy.read() is not None


class LateStage(NamedTuple):
    """A stage whose kernel should have begun, and has not."""

    stage: int
    """an index of `STAGES`: 0 is dispatch, and 1 combine"""
    epoch: int
    """the number of the round"""
    reports: tuple[int, ...] = ()
    """If other ranks have given the round up: from each rank, a mask of the ranks that it misses.
    Empty if the stage is late by itself: its kernel could have begun for the whole deadline.
    """


class Watch(Protocol):
    """Watches whether the kernels of an exchange begin, on its processor."""

    first_look_s: float
    """the time of the first check, as of `time.monotonic`; infinite if checks are never needed"""

    def late(self, rounds: RoundState, timeout_s: float, next_work: NextWork) -> LateStage | None:
        """Return the stage whose kernel should have begun and has not. None if there is none, or if
        nobody can tell.

        Args:
            rounds: the state of the exchange's rounds on the host.
            timeout_s: how long a kernel may take to begin, once it could.
            next_work: what the caller does next on its current stream.

        Returns:
            The stage that is late, or None.
        """


class NoWatch:
    """The `Watch` of a processor whose calls run where they are made: nothing is late."""

    first_look_s = math.inf

    def late(self, rounds: RoundState, timeout_s: float, next_work: NextWork) -> None: ...


class WatchOfGpu:
    """The `Watch` over the kernels of an exchange, whose buffers are `views` by name."""

    first_look_s = 0.0

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        state = views["state"]
        self._device = state.device
        self._marks = Marks(
            before_launch=(CopyInStream(state), CopyInStream(state)),
            at_poll=CopyInStream(state),
            now=CopyOfNow.of(state),
            errors=CopyOfNow.of(views["signal.error"]),
        )
        self._looking = Lock()

    def late(self, rounds: RoundState, timeout_s: float, next_work: NextWork) -> LateStage | None:
        # RuntimeError: the GPU has failed. Then nothing is late, and others report the failure.
        with suppress(RuntimeError), torch.cuda.device(self._device):
            # A copy must not get into a graph. And only one thread may use the marks at a time.
            if torch.cuda.is_current_stream_capturing():
                return None
            if not self._looking.acquire(blocking=False):
                return None
            try:
                this_stream = torch.cuda.current_stream().cuda_stream
                # After a change of streams the kernel also waits for work on the stream before. A
                # mark on the current stream would then say nothing about the kernel.
                if next_work == "launch" and rounds.last_stream not in (None, this_stream):
                    next_work = None
                return self._marks.look(time.monotonic(), timeout_s, rounds.phases, next_work)
            finally:
                self._looking.release()
        return None


class Marks:
    """Decides from marks in streams, and from the state of now, whether kernels begin.

    It never waits for a mark.

    Args:
        before_launch: two copies of the state for marks directly before launches. The second mark
            is set if it cannot be seen yet whether the kernel behind the first one has begun.
        at_poll: the copy of the state for the mark that `poll` sets.
        now: reads the state without waiting for streams.
        errors: reads the buffer "signal.error" without waiting for streams.
    """

    def __init__(
        self,
        before_launch: Sequence[CopyInStream],
        at_poll: CopyInStream,
        now: CopyOfNow,
        errors: CopyOfNow,
    ) -> None:
        self._launches = [_Mark(copy) for copy in before_launch]
        self._poll = _Mark(at_poll)
        self._now = now
        self._errors = errors
        # The state at the last check, and the time at which a check has first seen this state.
        self._state = b""
        self._changed_s = 0.0
        # How many phases were launched when `poll` set the last mark that its stream has reached.
        self._reached_phases = -1

    def look(
        self, time_s: float, timeout_s: float, phases: int, next_work: NextWork
    ) -> LateStage | None:
        """Check the marks, and set the next one. Returns the stage that is late; None if none is,
        or if nobody can tell.

        `time_s` is the time now, `timeout_s` the deadline of a wait, and `phases` how many phases
        the host has launched so far.
        """
        # Read the marks first and the state afterwards. A state that differs from the copy of a
        # mark is then a later state.
        launched = self._read_launches(time_s, phases, next_work is not None)
        if self._poll.read(time_s):
            self._poll.set = False
            self._reached_phases = self._poll.phases

        # Compare the state of now with the copies. If it cannot be read, nobody can tell.
        state = self._now.read()
        late = None
        if state:
            if state != self._state:
                self._state = state
                self._changed_s = time_s
            due_s = min(self._launch_due_s(launched), self._replay_due_s(phases))
            late = self._late(time_s, timeout_s, due_s)

        # Set a mark in front of the work that comes next.
        marks = []
        if next_work == "launch":
            marks = self._launches
        elif next_work == "replay":
            marks = [self._poll]
        for mark in marks:
            if mark.is_free:
                mark.put(time_s, phases)
                break
        return late

    def _late(self, time_s: float, timeout_s: float, due_s: float) -> LateStage | None:
        """The stage that comes next, if it is late; otherwise None.

        It is late if its kernel could have begun at `due_s`, and the deadline has passed since. It
        is also late if the state has not changed for as long, and other ranks have given the round
        up.
        """
        now = _parsed(self._state)
        # The next stage is dispatch of the next round, or combine of the open one.
        late = LateStage(0, now.combine_epoch + 1)
        if now.phases > 1:
            late = LateStage(1, now.dispatch_epoch)
        if time_s - due_s >= timeout_s:
            return late
        # "signal.error" has an int64 word from each rank: a mask of the ranks that it misses.
        if time_s - self._changed_s >= timeout_s:
            reports = self._errors.read() or b""
            if any(reports):
                masks = struct.unpack(f"<{len(reports) // 8}q", reports)
                return late._replace(reports=masks)
        return None

    def _read_launches(
        self, time_s: float, phases: int, returned: bool
    ) -> list[tuple[_Mark, bytes]]:
        """Read the marks before launches. Returns those that their stream has reached and behind
        which a kernel was launched, each with the copied state.

        `returned` says that the call which has set the last mark has ended: no other thread is
        still about to launch the kernel behind it.
        """
        for mark in self._launches:
            # The call has launched no kernel, so any other work may follow the mark: it is of no
            # use.
            if returned and phases == mark.phases:
                mark.set = False
        reached = []
        for mark in self._launches:
            # The kernel behind this mark was not launched yet.
            if phases == mark.phases:
                continue
            copied = mark.read(time_s)
            if copied:
                reached.append((mark, copied))
        return reached

    def _launch_due_s(self, launched: list[tuple[_Mark, bytes]]) -> float:
        """The time since which a kernel that a call has launched could have begun and has not.
        Infinite if there is no such kernel.
        """
        due_s = math.inf
        for mark, copied in launched:
            # If the state has changed, the kernel has begun. It checks its deadline itself from
            # then on, and the mark is free.
            mark.set = copied == self._state
            if mark.set:
                due_s = min(due_s, mark.came_s)
        return due_s

    def _replay_due_s(self, phases: int) -> float:
        """The time since which no kernel of a replay has begun, although the stream has work left.
        Infinite if that is not so.
        """
        mark = self._poll
        # The stream has reached an earlier mark, and no call has launched a kernel since. So all
        # that calls have launched has run. If the device has run another number of phases than
        # calls have launched, it has replayed graphs.
        state = _parsed(self._state)
        phases_run = 4 * state.combine_epoch + state.phases
        no_launch_since = phases == mark.phases == self._reached_phases
        has_graphs = mark.set and no_launch_since and phases_run != phases
        # A kernel that is receiving has begun.
        is_receiving = list(state.receiving) != list(state.done)
        if not has_graphs or is_receiving:
            return math.inf
        return max(self._changed_s, mark.set_s)


def _parsed(state: bytes) -> ctypes.Structure:
    """Read the bytes of a copied state as the struct `RoundState` of csrc/plan.h."""
    return layouts.struct("RoundState").from_buffer_copy(state)
