"""Kernels of this rank that never begin, as its host sees them on a GPU.

A kernel that waits for ranks has a deadline on the device. A kernel for which other kernels leave
no place tells nothing. So the host looks once in a while at a copy of the round's state. Copy
engines make it, which need no multiprocessor. Every kernel of the exchange changes the state as
soon as it begins.

- **Calls.** A call that looks copies the state on its stream, directly before it launches. Once
  this copy is here, everything in front of the kernel has ended. While the state is still the same,
  the kernel has not begun.
- **Replays** are no calls, and nothing can stand directly before their kernels. `poll` copies the
  state on its stream, behind what was launched so far. While this copy does not come and the state
  stays the same, no kernel of a replay begins.
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
"""The least time between two looks before launches, and between two of polls. A look takes tens of
microseconds.
"""
NextWork = Literal["launch", "replay", None]
"""What a caller that looks does next on its current stream: it launches a kernel, in front of which
only this stream has work, or it may replay a graph. None: nothing, and another thread may be in a
launch.
"""
# A buffer holds this value until its copy comes: no word of the state has it.
_UNWRITTEN = b"\x7f" * 4
# How long to wait for a copy that nothing stands in front of.
_ANSWER_S = 1e-3
# Hardware queues by default: see CUDA_DEVICE_MAX_CONNECTIONS.
_QUEUES = 8


@cache
def _streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    """One in each hardware queue, for all copies of now. Their priority is that of `Peek`.

    The driver gives the streams of a priority their queues by turns, in the order in which they are
    made.
    """
    return [own_stream(device, HIGH) for _ in range(_QUEUES)]


class CopyInStream:
    """Copies a buffer of a GPU to the host, behind work that was launched on a stream; None: on the
    current stream.
    """

    def __init__(self, buffer: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        # `start` must be able to write it outside inference mode.
        with torch.inference_mode(False):
            self._copied = torch.zeros_like(buffer, device="cpu", pin_memory=True)
        self._buffer = buffer
        self._stream = stream
        self._bytes = (ctypes.c_char * buffer.nbytes).from_address(self._copied.data_ptr())

    def start(self) -> None:
        """Begin. The copy before must have come."""
        ctypes.memset(self._bytes, _UNWRITTEN[0], len(self._bytes))
        with torch.cuda.stream(self._stream):
            self._copied.copy_(self._buffer, non_blocking=True)

    def read(self) -> bytes | None:
        """None while it is on its way; zeros before the first one."""
        copied = self._bytes.raw
        if _UNWRITTEN in copied:
            return None
        return copied


class CopyOfNow:
    """Copies a buffer of a GPU to the host without waiting for other streams.

    Streams share the hardware queues of the driver. A copy does not come while a kernel without a
    place stands in front of it in its queue. So there are copies in several queues, and one that is
    on its way is left alone: when it comes, it is old.

    It is not a `Peek`, which knows by an event that a copy has come: an event may wait behind a
    kernel that finds no place.
    """

    def __init__(self, copies: Sequence[CopyInStream]) -> None:
        self._copies = copies

    @classmethod
    def of(cls, buffer: Tensor) -> CopyOfNow:
        """A copy in each hardware queue of the buffer's GPU."""
        return cls([CopyInStream(buffer, stream) for stream in _streams_of(buffer.device)])

    def read(self) -> bytes | None:
        """What the buffer holds now. It waits for a millisecond at most; None: nobody can tell."""
        for copy in self._copies:
            is_on_its_way = copy.read() is None
            if not is_on_its_way:
                copy.start()
                return first_answer(copy.read, time.monotonic() + _ANSWER_S)
        return None


@dataclass
class _Mark:
    """A copy of the state that was put into a stream."""

    copy: CopyInStream
    set: bool = False  # it is on its way, or has come and is still of use
    phases: int = 0  # that the host had launched when it was set
    set_s: float = 0.0
    came_s: float = math.inf  # when a look has found it

    def put(self, time_s: float, phases: int) -> None:
        """Set it, behind what was launched so far."""
        self.copy.start()
        self.phases = phases
        self.set_s = time_s
        self.came_s = math.inf
        self.set = True

    def read(self, time_s: float) -> bytes | None:
        """The state where its stream has reached it, else None."""
        if not self.set:
            return None
        copied = self.copy.read()
        if copied:
            self.came_s = min(self.came_s, time_s)
        return copied

    @property
    def is_free(self) -> bool:
        return not self.set and self.copy.read() is not None


class LateStage(NamedTuple):
    """The stage that is due and has not begun, by its index.

    Without `reports` it could have begun for the whole deadline. Otherwise other ranks have given
    the round up: a mask of missing ranks from each rank.
    """

    stage: int  # 0 is dispatch, and 1 combine: see `STAGES`
    epoch: int
    reports: tuple[int, ...] = ()


class Watch(Protocol):
    """Watches whether the kernels of an exchange begin, on its processor."""

    first_look_s: float
    """the time of the first look"""

    def late(self, rounds: RoundState, timeout_s: float, next_work: NextWork) -> LateStage | None:
        """The stage that is due and whose kernel has not begun. None also where nobody can tell."""


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
        # Where the GPU has failed, nothing is late.
        with suppress(RuntimeError), torch.cuda.device(self._device):
            # Only one thread looks at a time, and none while it captures.
            if torch.cuda.is_current_stream_capturing():
                return None
            if not self._looking.acquire(blocking=False):
                return None
            try:
                this_stream = torch.cuda.current_stream().cuda_stream
                # On another stream, it also waits for what the stream of the last launch has.
                if next_work == "launch" and rounds.last_stream not in (None, this_stream):
                    next_work = None
                return self._marks.look(time.monotonic(), timeout_s, rounds.phases, next_work)
            finally:
                self._looking.release()
        return None


class Marks:
    """Marks in streams, by which a host sees whether kernels begin. They are copies of the state on
    streams and past them. It waits for none.

    `before_launch` are two: the second one is for a look that does not see whether the first one's
    kernel has begun.
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
        # The state at the last look, and when it was first seen.
        self._state = b""
        self._moved_s = 0.0
        # The phases of the last mark of a poll that the stream has reached.
        self._reached = -1

    def look(
        self, time_s: float, timeout_s: float, phases: int, next_work: NextWork
    ) -> LateStage | None:
        """Look at the marks, and set one. Returns the stage that is late; None if none is, or if
        nobody can tell.

        The host has launched so many `phases` by `time_s`.
        """
        # Read the marks before the state: a state that differs from a mark's is then a later one.
        launched = self._read_launches(time_s, phases, next_work is not None)
        if self._poll.read(time_s):
            self._poll.set = False
            self._reached = self._poll.phases

        # Compare the state of now with theirs. Without one, nobody can tell.
        state = self._now.read()
        late = None
        if state:
            if state != self._state:
                self._state = state
                self._moved_s = time_s
            due_s = min(self._launch_due_s(launched), self._replay_due_s(phases))
            late = self._late(time_s, timeout_s, due_s)

        # Set a mark in front of what comes next.
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
        """The stage that comes next, if its kernel could have begun since `due_s`, or if others
        have given the round up.
        """
        now = _parsed(self._state)
        # Dispatch of the next round, or combine of the open one.
        late = LateStage(0, now.combine_epoch + 1)
        if now.phases > 1:
            late = LateStage(1, now.dispatch_epoch)
        if time_s - due_s >= timeout_s:
            return late
        # Other ranks may have given the round up: int64 words, a mask of each rank.
        if time_s - self._moved_s >= timeout_s:
            reports = self._errors.read() or b""
            if any(reports):
                masks = struct.unpack(f"<{len(reports) // 8}q", reports)
                return late._replace(reports=masks)
        return None

    def _read_launches(
        self, time_s: float, phases: int, returned: bool
    ) -> list[tuple[_Mark, bytes]]:
        """Read the marks that kernels follow and streams have reached, with the copied values.

        `returned`: no other thread is in the launch that follows the last mark.
        """
        for mark in self._launches:
            # The call has launched nothing: other work may come behind the mark.
            if returned and phases == mark.phases:
                mark.set = False
        reached = []
        for mark in self._launches:
            # Nothing has been launched behind this one yet.
            if phases == mark.phases:
                continue
            copied = mark.read(time_s)
            if copied:
                reached.append((mark, copied))
        return reached

    def _launch_due_s(self, launched: list[tuple[_Mark, bytes]]) -> float:
        """The time from which a kernel that a call has launched could have begun, and has not."""
        due_s = math.inf
        for mark, copied in launched:
            # Otherwise the kernel has begun, and has a deadline.
            mark.set = copied == self._state
            if mark.set:
                due_s = min(due_s, mark.came_s)
        return due_s

    def _replay_due_s(self, phases: int) -> float:
        """The time from which no kernel of a replay has begun, although the stream has not come to
        an end.
        """
        mark = self._poll
        # No call has launched anything since the stream reached an earlier mark: what calls have
        # launched has run. Where the device has run something else than this, there are graphs.
        state = _parsed(self._state)
        has_run = 4 * state.combine_epoch + state.phases
        has_graphs = mark.set and phases == mark.phases == self._reached and has_run != phases
        is_receiving = list(state.receiving) != list(state.done)
        if not has_graphs or is_receiving:
            return math.inf
        return max(self._moved_s, mark.set_s)


def _parsed(state: bytes) -> ctypes.Structure:
    """`RoundState` of csrc/plan.h, of a copy."""
    return layouts.struct("RoundState").from_buffer_copy(state)
