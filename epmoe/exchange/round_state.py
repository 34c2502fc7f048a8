"""A round from its opening to its end: the states, the calls that each state permits, and the end after a failure.

    state       handle      permitted calls and the state after them
    CLOSED      none        dispatch_send → SENT; dispatch → DISPATCHED
    SENT        Sent        dispatch_recv → DISPATCHED
    DISPATCHED  Dispatched  combine_send → RETURNING; combine, combine_partial → CLOSED
    RETURNING   Dispatched  combine_recv → CLOSED

`abort` leads from every open state to CLOSED. An exchange has at most one open round, because all its rounds use the
same window. After an `EPTimeoutError`, on GPUs also after an `EPMismatchError` or `EPOrderError`, the round stays where
it is: the exchange can only be resumed or closed.

The operators count the phases that have ended, four a round, and the state is that count modulo four. A call may end by
an exception anywhere, also by one that a signal handler raises right behind the operator. The count is right then, too:
an operator that raises before it sends leaves the round unopened, and the call may be repeated.

The stages call these functions in every round, where each microsecond of the host counts. The functions therefore look
at Python attributes, status words and progress words only, never at a tensor.
"""

from __future__ import annotations

from ctypes import Array, c_int64
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch._ops import OpOverload

from epmoe.exchange.handles import Dispatched, RoundTemplate, Sent
from epmoe.exchange.health import EPMismatchError, EPStateError
from epmoe.native import ops
from epmoe.native.arguments import describe

if TYPE_CHECKING:
    from epmoe.exchange.exchange import Exchange

CLOSED, SENT, DISPATCHED, RETURNING = range(4)
# By state, the calls that it permits.
PERMITTED = (
    ("dispatch", "dispatch_send"),
    ("dispatch_recv",),
    ("combine", "combine_partial", "combine_send"),
    ("combine_recv",),
)
# Places in `Rounds.progress`, in the order of `Progress` in csrc/plan.h.
PROGRESS = ("phases", "deadline_ns", "missing", "counted_ns", "last_stream", "asked", "answer", "tag")
PHASES, _DEADLINE, ASKED, ANSWER, TAG = map(PROGRESS.index, ("phases", "deadline_ns", "asked", "answer", "tag"))

MAX_TAG = 65535  # `kMaxTag` in csrc/plan.h


@dataclass(slots=True, weakref_slot=True)
class Rounds:
    """The rounds of one exchange, of which the last may be open. Only the functions of this module change it.

    progress: `PROGRESS`, int64 in host memory. The operators write it, except `tag` and `asked` (more_rounds.py).
    handle: of the open round, as its last call returned it. It means nothing while no round is open.
    y: of the open round, from combine_send to combine_recv.
    opener: the thread that opened the last round.
    template: of the last round, for `skip`.
    """

    progress: Array[c_int64]
    handle: Sent | Dispatched | None = None
    y: Tensor | None = None
    opener: int = 0
    template: RoundTemplate | None = None

    @property
    def state(self) -> int:
        """CLOSED if no round is open, otherwise how far the open round has come."""
        return self.progress[PHASES] & 3

    @property
    def count(self) -> int:
        """Rounds opened so far: the epoch of the last one."""
        return self.progress[PHASES] + 3 >> 2

    def describe(self, epoch: int) -> str:
        """The state of round `epoch`, for `repr`."""
        is_open = self.state != CLOSED and epoch == self.count
        return f"round {epoch} " + (f"awaits {' or '.join(PERMITTED[self.state])}" if is_open else "closed")


def check_closed(exchange: Exchange) -> int:
    """Before a call that opens a round: returns the epoch that it will have.

    Raises RuntimeError if a round is open, and what `Exchange.check` does if an earlier round has failed.
    """
    exchange.check()
    phases = exchange.rounds.progress[PHASES]
    epoch = (phases >> 2) + 1
    if phases & 3:
        raise EPStateError(f"round {epoch} is still open: call combine, or abort on all ranks, before dispatch")
    return epoch


def opened(
    exchange: Exchange,
    template: RoundTemplate,
    num_tokens: int,
    epoch: int,
    tag: int,
    descriptor: Tensor,
    arguments: tuple[Any, ...],
) -> Sent:
    """A new round, whose tokens have not left yet: from the second round on with the ordinary deadline.

    The operator opens it. Until then no round is open, and another call may take its place.
    """
    rounds = exchange.rounds
    if epoch == 2:
        exchange.set_timeout(exchange.config.exchange.timeout_s)
    rounds.y, rounds.opener, rounds.template = None, exchange.thread, template
    rounds.progress[TAG] = tag
    rounds.handle = sent = Sent(template, num_tokens, epoch, descriptor, arguments)
    return sent


def wait_on(exchange: Exchange, operator: OpOverload, arguments: tuple[Any, ...], state: int) -> None:
    """After an operator that should have led the round to `state` and has not.

    On the CPU an operator interrupts its wait when a signal arrives, and at least every 100 ms, so that Python can run
    its signal handlers. If these raise, the round stays where it is. Otherwise the wait goes on with the same deadline.

    Raises EPTimeoutError if dispatch waited in vain for ranks to end a round that this rank has given up.
    """
    progress = exchange.rounds.progress
    receive = ops.dispatch_recv if state == DISPATCHED else ops.combine_recv
    epoch = (progress[PHASES] >> 2) + 1
    try:
        while progress[_DEADLINE]:
            (receive if progress[PHASES] & 1 else operator)(*arguments)
    finally:
        progress[_DEADLINE] = 0
    if exchange.rounds.state != state:
        exchange.check()
        raise RuntimeError(f"round {epoch} was aborted while this call waited")


def dispatched(exchange: Exchange, handle: Sent) -> Dispatched:
    """In state DISPATCHED, after the operator.

    Raises EPMismatchError if the calls of the ranks do not match, and on the CPU closes the round. Raises
    EPTimeoutError if ranks did not arrive in time.
    """
    handle.arguments = ()  # the caller's tensors need not live any longer
    rounds = exchange.rounds
    rounds.handle = Dispatched(handle)
    _look(exchange, rounds.handle)
    return rounds.handle


def closed(exchange: Exchange, y: Tensor) -> Tensor:
    """In state CLOSED, after the operator; returns `y`.

    Raises EPTimeoutError, EPMismatchError, EPOverflowError or EPAbortedError if the round, or on a GPU an earlier one,
    has failed.
    """
    rounds = exchange.rounds
    rounds.handle = rounds.y = None
    exchange.check()
    exchange.check_rounds()
    return y


def permit(exchange: Exchange, handle: Sent | Dispatched, call: str) -> None:
    """Before a call that sends in an open round.

    Raises EPMismatchError if the calls of the ranks do not match, and on the CPU closes the round. Raises
    EPTimeoutError if an earlier call has timed out, and ValueError as `expect` does.
    """
    _look(exchange, handle)
    rounds = exchange.rounds
    if rounds.handle is not handle or call not in PERMITTED[rounds.progress[PHASES] & 3]:  # `expect` costs a call more
        _refuse(rounds, handle, call, "dispatched")


def expect(exchange: Exchange, handle: Sent | Dispatched, call: str, name: str = "dispatched") -> None:
    """Before a call that only receives. Raises ValueError unless `handle`, the caller's argument `name`, is that of the
    open round and the round permits `call`."""
    rounds = exchange.rounds
    if rounds.handle is not handle or call not in PERMITTED[rounds.state]:
        _refuse(rounds, handle, call, name)


def abort(exchange: Exchange, handle: Sent | Dispatched | None) -> None:
    """Any state → CLOSED, without rows. Collective: every rank aborts or combines.

    Without a handle it closes whatever round is open, and raises nothing that kernels have reported: the caller has an
    exception already. After a timeout the round stays open.

    With a handle it raises ValueError if that is not the open round's. It raises EPMismatchError if the calls of the
    ranks do not match, and on the CPU closes the round. It raises EPTimeoutError and EPOverflowError as `closed` does.
    """
    rounds = exchange.rounds
    exchange.enter()
    try:
        if handle is None:
            if rounds.state != CLOSED and not exchange.failed:
                exchange.give_up()
                exchange.forget()
            return
        _look(exchange, handle)
        if rounds.handle is not handle or rounds.state == CLOSED:
            _refuse(rounds, handle, "abort", "dispatched")
        exchange.give_up()
        exchange.check()
        exchange.check_rounds()
    finally:
        exchange.thread = 0


def abort_after(exchange: Exchange, epoch: int) -> None:
    """`abort` of a round after `epoch`, if this thread has opened one: for a caller that passes an exception on."""
    if opened_after(exchange, epoch):
        abort(exchange, None)


def opened_after(exchange: Exchange, epoch: int) -> int:
    """Rounds after `epoch`, if this thread has opened the last one, else 0."""
    return exchange.rounds.count - epoch if exchange.rounds.opener == get_ident() else 0


def _look(exchange: Exchange, handle: Sent | Dispatched) -> None:
    """Raises what the kernels have reported so far. On the CPU every rank sees a mismatch in the same round, and every
    rank closes this round."""
    try:
        exchange.check()
    except EPMismatchError:
        if exchange.rounds.handle is handle and exchange.rounds.state != CLOSED and not exchange.failed:
            exchange.give_up()
        raise


def give_up(exchange: Exchange) -> None:
    """Any open state → CLOSED. It allocates nothing and waits for nobody, so it works in any distress."""
    rounds = exchange.rounds
    sent = rounds.handle.sent if isinstance(rounds.handle, Dispatched) else rounds.handle
    assert sent is not None
    memory = (*exchange.memory, sent.descriptor)
    if exchange.device.type == "cpu":
        ops.combine(sent.template.like, None, *memory)
    else:  # a launch waits for nobody; it receives what others send, since LL lines must be re-armed
        if rounds.state == SENT:
            ops.dispatch_recv(*sent.arguments)
        if rounds.state == DISPATCHED:
            ops.combine(exchange.unread_y(sent), None, *memory)
        elif rounds.state == RETURNING:
            ops.combine_recv(rounds.y, None, *memory)
    rounds.handle = rounds.y = None


def _refuse(rounds: Rounds, handle: Sent | Dispatched, call: str, name: str) -> NoReturn:
    current = rounds.handle if rounds.state != CLOSED else None
    if not isinstance(handle, (Sent, Dispatched)):
        before = "dispatch_send" if call == "dispatch_recv" else "dispatch"
        order = f": {call} takes the rows first" if isinstance(handle, Tensor) and call in PERMITTED[DISPATCHED] else ""
        raise TypeError(f"`{name}` must be what {before} returned, got {describe(handle)}{order}")
    sent = handle.sent if isinstance(handle, Dispatched) else handle
    if sent.template.attributes["_rounds"]() is not rounds:
        raise EPStateError(
            f"`{name}` belongs to another ExpertParallel, or to this one before `resume`: {call} takes the handle that "
            "its own dispatch returned"
        )
    if current is None:
        first, second = ("dispatch_send", call) if call == "dispatch_recv" else ("dispatch", "combine")
        raise EPStateError(f"round {handle.epoch} is closed: {first} comes before {second}")
    if handle is current or isinstance(current, Dispatched) and handle is current.sent:
        raise EPStateError(f"round {current.epoch} awaits {' or '.join(PERMITTED[rounds.state])}, got {call}")
    raise EPStateError(
        f"`{name}` must be the handle of the open round {current.epoch}, got another's, of round {handle.epoch}"
    )
