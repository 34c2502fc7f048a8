"""The states of a round from its opening to its end, and the calls that each state permits.

    state       handle      permitted calls and the state after them
    CLOSED      none        dispatch_send → SENT; dispatch → DISPATCHED
    SENT        Sent        dispatch_recv → DISPATCHED
    DISPATCHED  Dispatched  combine_send → RETURNING; combine, combine_partial → CLOSED
    RETURNING   Dispatched  combine_recv → CLOSED

`abort` leads from every open state to CLOSED. An exchange has at most one open round, because all
its rounds use the same window. After an `EPTimeoutError`, on GPUs also after an `EPMismatchError`
or `EPOrderError`, the round stays where it is: the exchange can only be resumed or closed.

A round has four phases, and the state is the number of phases that have ended, modulo four. The
operators themselves count the phases. A call may end by an exception anywhere, and a signal handler
may raise right behind an operator. The count is right in these cases, too. An operator that raises
before it sends leaves the round unopened, so the call may be repeated.

Every round calls these methods. To be fast they read only Python attributes and words of host
memory, never a tensor.
"""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass, field
from threading import enumerate as all_threads
from threading import get_ident
from typing import NoReturn

from torch import Tensor

from epmoe.exchange.handles import Dispatched, RoundTemplate, Sent
from epmoe.group.errors import EPStateError
from epmoe.native.arguments import describe

_PHASES = 4
CLOSED, SENT, DISPATCHED, RETURNING = range(_PHASES)
# The calls that each state permits.
PERMITTED = (
    ("dispatch", "dispatch_send"),
    ("dispatch_recv",),
    ("combine", "combine_partial", "combine_send"),
    ("combine_recv",),
)


@dataclass(slots=True, weakref_slot=True)
class RoundState:
    """The state of an exchange's rounds, of which the last one may be open.

    Only exchanges and operators change it.
    """

    progress: Structure  # `Progress` of csrc/plan.h in host memory, which the operators write, too
    # What the last call of the open round has returned; None if no round is open.
    handle: Sent | Dispatched | None = None
    # The output of the open round, between combine_send and combine_recv.
    y: Tensor | None = None
    opener: int = 0  # the identifier of the thread that has opened the last round
    # The epoch of the last round. It stays right if a signal handler has ended the round, or has
    # unmapped the window.
    epoch: int = 0
    template: RoundTemplate | None = None  # the template of the last round, for `skip`
    # No rank brings more tokens than this to rounds that open now; None: `at_most` was not called.
    most_tokens: int | None = None
    trained: int = 0  # how many forward rounds of training have their backward rounds here
    # By thread, the last round for which a call of this thread was refused, since another thread
    # had the round.
    refused: dict[int, int] = field(default_factory=dict)

    @property
    def state(self) -> int:
        """The state of the last round: CLOSED, or how far the open round has come."""
        return self.progress.phases & 3

    @property
    def count(self) -> int:
        """How many rounds were opened so far. That is also the epoch of the last round."""
        # Rounded up, so that an open round counts.
        return -(-self.progress.phases // _PHASES)

    @property
    def phases(self) -> int:
        """How many phases have ended, in all rounds so far."""
        return self.progress.phases

    @property
    def sent(self) -> Sent:
        """The handle that dispatch has made for the open round."""
        handle = self.handle
        assert handle is not None
        return _sent_of(handle)

    def next_epoch(self) -> int:
        """The epoch of the round that a call is about to open. Raises EPStateError if a round is
        still open.
        """
        phases = self.progress.phases
        epoch: int = phases // _PHASES + 1
        if phases & 3:
            self.turn_away(get_ident())
            raise EPStateError(
                f"round {epoch} is still open: call combine, or abort on all ranks, before dispatch"
            )
        return epoch

    def open(self, sent: Sent, tag: int) -> Sent:
        """Note a new round, and return its handle `sent`.

        The round is open only once its first operator, or `advance`, has counted a phase. If no
        operator runs, the next call simply notes another round in its place.
        """
        self.y = None
        self.opener = get_ident()
        self.epoch = sent.epoch
        self.template = sent.template
        self.progress.tag = tag
        self.handle = sent
        return sent

    def advance(self) -> None:
        """Count a phase that has ended. Only exchanges whose operators do not count call it."""
        self.progress.phases += 1

    def receive(self, sent: Sent) -> Dispatched:
        """Make the handle that the round has from state DISPATCHED on."""
        # Let go of the caller's tensors, which need not live any longer.
        del sent.operands
        self.handle = dispatched = Dispatched(sent)
        return dispatched

    def close(self) -> None:
        """Close the round, in any state. The round drops its handle and its output.

        After the last operator of a round no phase is left, and only the rest is done.
        """
        # The phases that are left until the next multiple of four.
        due = -self.progress.phases & 3
        if due:
            self.progress.phases += due
        self.handle = self.y = None

    def permit(self, handle: Sent | Dispatched, call: str, name: str = "dispatched") -> None:
        """Check that a call may come now: `handle` is that of the open round, and the state of the
        round permits the call.

        `name` is what the caller names the argument with the handle. Raises EPStateError, or
        TypeError for a value that is no handle.
        """
        if self.handle is not handle or call not in PERMITTED[self.progress.phases & 3]:
            self.refuse(handle, call, name)

    def opened_after(self, epoch: int) -> int:
        """How many rounds were opened after `epoch`. It is 0 if another thread has opened the last
        one.
        """
        if self.opener != get_ident():
            return 0
        return self.count - epoch

    def turn_away(self, thread: int) -> None:
        """Note that a call of this thread is refused, because another thread has the round that is
        open or is about to open one.
        """
        last = self.count
        if self.state == CLOSED:
            last += 1
        self.refused[thread] = last

    def is_of_another(self) -> bool:
        """Whether the last round belongs to another thread, as far as the current one is concerned.

        That is so if a call of the current thread was refused because of the round, and the thread
        that has opened the round still lives. The current thread must not abort such a round.
        """
        caller = get_ident()
        was_refused = self.refused.get(caller, -1) >= self.count
        if not was_refused or self.opener in (0, caller):
            return False
        # If the opener has ended, the round belongs to the next thread that calls.
        return any(thread.ident == self.opener for thread in all_threads())

    @property
    def last_stream(self) -> int | None:
        """The handle of the GPU's stream on which a kernel was last launched, or captured into a
        graph. None before the first launch.
        """
        # The word is 1 + the handle, since the default stream has the handle 0.
        number = self.progress.last_stream
        if not number:
            return None
        return number - 1

    @property
    def has_more_rounds(self) -> bool | None:
        """Whether any rank has more rounds after the last one; None if this is not known yet.

        It becomes known only if all ranks have said it in that round (`Exchange.sending`).
        """
        # One word has both: the epoch of a round, and in the lowest bit the answer.
        epoch, has_more = divmod(self.progress.has_more_rounds, 2)
        if epoch != self.count:
            return None
        return bool(has_more)

    def describe(self, epoch: int) -> str:
        """Say which call a round of this exchange awaits, for `repr`."""
        if self.state == CLOSED or epoch != self.count:
            return f"round {epoch} closed"
        return f"round {epoch} awaits {self._permitted()}"

    def _permitted(self) -> str:
        return " or ".join(PERMITTED[self.state])

    def refuse(self, handle: Sent | Dispatched, call: str, name: str) -> NoReturn:
        """Raise the error that tells the user why `permit` does not permit a call."""
        opening = "dispatch_send" if call == "dispatch_recv" else "dispatch"

        # No handle at all.
        if not isinstance(handle, (Sent, Dispatched)):
            hint = ""
            if isinstance(handle, Tensor) and call in PERMITTED[DISPATCHED]:
                hint = f": {call} takes the rows first"
            raise TypeError(
                f"`{name}` must be what {opening} returned, got {describe(handle)}{hint}"
            )

        # The handle of another exchange.
        if _sent_of(handle).template.rounds() is not self:
            raise EPStateError(
                f"`{name}` belongs to another ExpertParallel, or to this one before `resume`: "
                f"{call} takes the handle that its own dispatch returned"
            )

        # The handle of a round that is closed.
        current = self.handle
        if self.state == CLOSED or current is None:
            closing = call if call == "dispatch_recv" else "combine"
            raise EPStateError(f"round {handle.epoch} is closed: {opening} comes before {closing}")

        # The call of another state, or a handle of another round.
        if handle in (current, _sent_of(current)):
            raise EPStateError(f"round {current.epoch} awaits {self._permitted()}, got {call}")
        raise EPStateError(
            f"`{name}` must be the handle of the open round {current.epoch}, got another's, of "
            f"round {handle.epoch}"
        )


def _sent_of(handle: Sent | Dispatched) -> Sent:
    """The handle that dispatch has made for the round of `handle`."""
    if isinstance(handle, Dispatched):
        return handle.sent
    return handle
