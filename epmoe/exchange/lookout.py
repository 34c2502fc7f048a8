"""Looks of a host whether its kernels begin: unscheduled.py tells how it sees them."""

from __future__ import annotations

from ctypes import Structure
from threading import get_ident
from time import monotonic

from epmoe.config.deadlines import Deadlines
from epmoe.exchange.round_state import RoundState
from epmoe.exchange.unscheduled import LOOK_S, LateStage, NextWork, Watch
from epmoe.native.layouts import constant


class Lookout:
    """Reports a kernel of this rank that does not begin, in `words`, a `Status` of csrc/plan.h, as
    the kernel itself would.

    `look_at` has the times of the next looks, for each kind of work that may come next: polls take
    no look of a launch away.
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
        """Once in a while: if a kernel does not begin, report it.

        `launches`: a kernel comes next, on the current stream.
        """
        # What comes next on the current stream. Another thread than the opener's is on another one.
        next_work: NextWork = None
        if launches:
            next_work = "launch"
        elif self._rounds.opener == get_ident():
            next_work = "replay"

        # Once in a while, and until a failure is known.
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

        # A kernel does not begin. Ranks that another one has reported missing are the cause.
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
        # Last: it says that the others are written.
        words.code = code

    def _late(self, next_work: NextWork) -> LateStage | None:
        """See `Watch.late`."""
        return self._watch.late(self._rounds, self._deadlines.wait_s(), next_work)
