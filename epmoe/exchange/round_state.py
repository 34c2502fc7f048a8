"""A round from its opening to its end: the states, and the calls that each state permits.

    state       handle      permitted calls and the state after them
    CLOSED      none        dispatch_send → SENT; dispatch → DISPATCHED
    SENT        Sent        dispatch_recv → DISPATCHED
    DISPATCHED  Dispatched  combine_send → RETURNING; combine, combine_partial → CLOSED
    RETURNING   Dispatched  combine_recv → CLOSED

`abort` leads from every open state to CLOSED. An exchange has at most one open round, because all
its rounds use the same window. After an `EPTimeoutError`, on GPUs also after an `EPMismatchError`
or `EPOrderError`, the round stays where it is: the exchange can only be resumed or closed.

A round has four phases, and the state is the count of phases that have ended, modulo four. The
operators of a node count by themselves. A call may end by an exception anywhere, also by one that a
signal handler raises right behind the operator. The count is right then, too: an operator that
raises before it sends leaves the round unopened, and the call may be repeated.

Every round calls these methods, so they look at Python attributes and words of the host only, never
at a tensor.
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
    """The rounds of one exchange. The last one may be open. Only exchanges and operators
    change it.
    """

    progress: Structure  # `Progress` of csrc/plan.h in host memory, which the operators write, too
    handle: Sent | Dispatched | None = None  # that the last call of the open round returned
    y: Tensor | None = None  # of the open round, from combine_send to combine_recv
    opener: int = 0  # the thread that opened the last round
    # Of the last round, also where a signal handler has ended it, or unmapped the window.
    epoch: int = 0
    template: RoundTemplate | None = None  # of the last round, for `skip`
    most_tokens: int | None = None  # of `at_most`: no rank brings more to rounds that open now
    trained: int = 0  # forward rounds of training so far whose backward rounds run here
    # By thread, the last round for which a call of it was refused, since another thread had this
    # round.
    refused: dict[int, int] = field(default_factory=dict)

    @property
    def state(self) -> int:
        """CLOSED if no round is open, otherwise how far the open round has come."""
        return self.progress.phases & 3

    @property
    def count(self) -> int:
        """Rounds opened so far: the epoch of the last one."""
        return -(-self.progress.phases // _PHASES)  # an open round counts

    @property
    def phases(self) -> int:
        return self.progress.phases

    @property
    def sent(self) -> Sent:
        """The first handle of the open round."""
        handle = self.handle
        assert handle is not None
        return _sent_of(handle)

    def next_epoch(self) -> int:
        """Find the epoch of a round that a call is about to open. Raises EPStateError if a round is
        open.
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
        """A new round, which the operator, or `advance`, opens. Until then another call may take
        its place.
        """
        self.y = None
        self.opener = get_ident()
        self.epoch = sent.epoch
        self.template = sent.template
        self.progress.tag = tag
        self.handle = sent
        return sent

    def advance(self) -> None:
        """A phase has ended, where no operator counts it."""
        self.progress.phases += 1

    def receive(self, sent: Sent) -> Dispatched:
        """The handle of the round from state DISPATCHED on."""
        sent.arguments = ()  # the caller's tensors need not live any longer
        self.handle = dispatched = Dispatched(sent)
        return dispatched

    def close(self) -> None:
        """Any state → CLOSED; behind an operator that has closed the round, it drops what the round
        kept.
        """
        due = -self.progress.phases & 3
        if due:
            self.progress.phases += due
        self.handle = self.y = None

    def permit(self, handle: Sent | Dispatched, call: str, name: str = "dispatched") -> None:
        """Raise EPStateError, or TypeError for what is no handle, unless `handle`, the caller's
        argument `name`, is that of the open round and the round permits `call`.
        """
        if self.handle is not handle or call not in PERMITTED[self.progress.phases & 3]:
            self.refuse(handle, call, name)

    def opened_after(self, epoch: int) -> int:
        """Rounds after `epoch`, if this thread has opened the last one, else 0."""
        if self.opener != get_ident():
            return 0
        return self.count - epoch

    def turn_away(self, thread: int) -> None:
        """A call of a thread is refused because of the round that is open or about to be opened."""
        last = self.count
        if self.state == CLOSED:
            last += 1
        self.refused[thread] = last

    def is_of_another(self) -> bool:
        """Whether a call of this thread was refused for the last round, which another living thread
        has opened.
        """
        caller = get_ident()
        was_refused = self.refused.get(caller, -1) >= self.count
        if not was_refused or self.opener in (0, caller):
            return False
        # A thread that has ended leaves its round to the next one that calls.
        return any(thread.ident == self.opener for thread in all_threads())

    @property
    def last_stream(self) -> int | None:
        """The handle of the GPU's stream of the last launch, also of one into a graph; None before
        the first.
        """
        # 1 + the handle, since the default stream is 0.
        number = self.progress.last_stream
        if not number:
            return None
        return number - 1

    @property
    def has_more_rounds(self) -> bool | None:
        """Whether any rank has more rounds after the last one, in which all sent it; None: not
        known yet.
        """
        # The epoch of a round, and in the lowest bit the answer of its ranks.
        epoch, has_more = divmod(self.progress.has_more_rounds, 2)
        if epoch != self.count:
            return None
        return bool(has_more)

    def describe(self, epoch: int) -> str:
        """What `repr` says of a round of this exchange."""
        if self.state == CLOSED or epoch != self.count:
            return f"round {epoch} closed"
        return f"round {epoch} awaits {self._permitted()}"

    def _permitted(self) -> str:
        return " or ".join(PERMITTED[self.state])

    def refuse(self, handle: Sent | Dispatched, call: str, name: str) -> NoReturn:
        """Raise the error for a call that `permit` does not permit, in the words of users."""
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
    """The first handle of a round."""
    if isinstance(handle, Dispatched):
        return handle.sent
    return handle
