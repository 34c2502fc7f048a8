"""Checks once in a while whether the kernels that this rank has launched begin, and reports a
kernel that does not. unscheduled.py explains how the host can see that.
"""

from __future__ import annotations

from ctypes import Structure
from threading import get_ident
from time import monotonic

from epmoe.config.deadlines import Deadlines
from epmoe.exchange.round_state import RoundState
from epmoe.exchange.unscheduled import LOOK_S, LateStage, NextWork, Watch
from epmoe.native.layouts import constant


class Lookout:
    """Reports kernels of this rank that do not begin within the deadline of a wait.

    A report goes into `words`, the status words (`Status` of csrc/plan.h), as if the kernel itself
    had reported a failure. `Exchange.check` then raises it.

    `look_at` has the time of the next check for each kind of work that the caller may do next. The
    times are separate, so that frequent polls do not postpone the check before a launch.
    """

    def __init__(
        self,
        watch: Watch,
        words: Structure,
        seat: int,
        rounds: RoundState,
        deadlines: Deadlines,
    ) -> None:
        self._watch = watch
        self._words = words
        self._seat = seat
        self._rounds = rounds
        self._deadlines = deadlines
        first_s = watch.first_look_s
        self.look_at: dict[NextWork, float] = {"launch": first_s, "replay": first_s, None: first_s}

    def look(self, launches: bool = False) -> None:
        """If a check is due, check whether a kernel does not begin, and report it.

        `launches` says that the caller launches a kernel next, on the current stream.
        """
        # Find out what the caller does next on its current stream. Only the thread that has opened
        # the round may replay graphs of it there: other threads use other streams.
        next_work: NextWork = None
        if launches:
            next_work = "launch"
        elif self._rounds.opener == get_ident():
            next_work = "replay"

        # Check at most every `LOOK_S` seconds, and only until a failure is known.
        time_s = monotonic()
        if time_s < self.look_at[next_work]:
            return
        self.look_at[next_work] = time_s + LOOK_S
        words = self._words
        if words.code:
            return
        late = self._late(next_work)
        if late is None:
            return

        # A kernel does not begin. If another rank has given the round up, the error is the timeout
        # that this rank has reported. Otherwise this rank misses itself.
        code = constant("kUnscheduled")
        originator = self._seat
        missing = 1 << self._seat
        if late.reports:
            code = constant("kTimeout")
            reports = enumerate(late.reports)
            originator, missing = next((seat, mask) for seat, mask in reports if mask)
        words.stage = late.stage
        words.epoch = late.epoch
        words.missing = missing
        words.originator = originator
        # The code comes last: a reader that sees it finds the other words written.
        words.code = code

    def _late(self, next_work: NextWork) -> LateStage | None:
        """Return the stage whose kernel does not begin, as `Watch.late` finds it."""
        return self._watch.late(self._rounds, self._deadlines.wait_s(), next_work)
