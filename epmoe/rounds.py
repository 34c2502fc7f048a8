"""A round from its opening to its end: the states, the calls that each state permits, and the end after a failure.

    state       handle      permitted calls and the state after them
    CLOSED      none        dispatch_send → SENT; dispatch → DISPATCHED
    SENT        Sent        dispatch_recv → DISPATCHED
    DISPATCHED  Dispatched  combine_send → RETURNING; combine, combine_partial → CLOSED
    RETURNING   Dispatched  combine_recv → CLOSED

`abort` leads from every open state to CLOSED. An exchange has at most one open round, because all its rounds use the
same window. After an `EPTimeoutError` the round stays where it is: the exchange can only be closed.

The stages call these functions in every round, where each microsecond of the host counts. The functions therefore look
at Python attributes and at the status words only, never at a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from epmoe import ops
from epmoe.handles import Dispatched, RoundTemplate, Sent
from epmoe.health import EPMismatchError

if TYPE_CHECKING:
    from epmoe.exchange import Exchange

# A state is the tuple of the calls that it permits.
CLOSED = ("dispatch", "dispatch_send")
SENT = ("dispatch_recv",)
DISPATCHED = ("combine", "combine_partial", "combine_send")
RETURNING = ("combine_recv",)


@dataclass(slots=True)
class Rounds:
    """The rounds of one exchange, of which the last may be open. Only the functions of this module change it."""

    count: int = 0  # rounds opened so far: the epoch of the last one
    state: tuple[str, ...] = CLOSED
    handle: Sent | Dispatched | None = None  # of the open round, as its last call returned it
    y: Tensor | None = None  # of the open round, from combine_send to combine_recv


def check_closed(exchange: Exchange) -> None:
    """Before a call that opens a round.

    Raises RuntimeError if a round is open, and EPTimeoutError or EPMismatchError if an earlier round has failed.
    """
    exchange.check()
    if exchange.rounds.handle is not None:
        raise RuntimeError(
            f"round {exchange.rounds.handle.epoch} is still open: call combine, or abort on all ranks, before dispatch"
        )


def opened(
    exchange: Exchange, template: RoundTemplate, num_tokens: int, descriptor: Tensor, arguments: tuple[Any, ...]
) -> Sent:
    """A new round, whose tokens have not left yet: its epoch, and from the second round on the ordinary deadline."""
    rounds = exchange.rounds
    rounds.count += 1
    if rounds.count == 2:
        exchange.set_timeout(exchange.config.exchange.timeout_s)
    return Sent(template, num_tokens, rounds.count, descriptor, arguments)


def sent(exchange: Exchange, handle: Sent) -> Sent:
    """CLOSED → SENT, after the operator."""
    exchange.rounds.state, exchange.rounds.handle = SENT, handle
    return handle


def dispatched(exchange: Exchange, handle: Sent) -> Dispatched:
    """CLOSED or SENT → DISPATCHED, after the operator.

    Raises EPMismatchError if the calls of the ranks do not match, and closes the round. Raises EPTimeoutError if ranks
    did not arrive in time.
    """
    handle.arguments = ()  # the caller's tensors need not live any longer
    rounds = exchange.rounds
    rounds.state, rounds.handle = DISPATCHED, Dispatched(handle)
    _look(exchange, rounds.handle)
    return rounds.handle


def returning(exchange: Exchange, y: Tensor) -> None:
    """DISPATCHED → RETURNING, after the operator, which writes `y` in combine_recv."""
    exchange.rounds.state, exchange.rounds.y = RETURNING, y


def closed(exchange: Exchange, y: Tensor) -> Tensor:
    """DISPATCHED or RETURNING → CLOSED, after the operator; returns `y`.

    Raises EPTimeoutError, EPMismatchError or EPOverflowError if the round, or on a GPU an earlier one, has failed.
    """
    rounds = exchange.rounds
    rounds.state, rounds.handle, rounds.y = CLOSED, None, None
    exchange.check()
    exchange.check_overflow()
    return y


def permit(exchange: Exchange, handle: Sent | Dispatched, call: str) -> None:
    """Before a call that sends in an open round.

    Raises EPMismatchError if the calls of the ranks do not match, and closes the round. Raises EPTimeoutError if an
    earlier call has timed out, and ValueError as `expect` does.
    """
    _look(exchange, handle)
    rounds = exchange.rounds
    if rounds.handle is not handle or call not in rounds.state:  # as `expect`, without the cost of another call
        _refuse(rounds, handle, call, "dispatched")


def expect(exchange: Exchange, handle: Sent | Dispatched, call: str, name: str = "dispatched") -> None:
    """Before a call that only receives. Raises ValueError unless `handle`, the caller's argument `name`, is that of the
    open round and the round permits `call`."""
    rounds = exchange.rounds
    if rounds.handle is not handle or call not in rounds.state:
        _refuse(rounds, handle, call, name)


def abort(exchange: Exchange, handle: Sent | Dispatched) -> None:
    """Any open state → CLOSED, without rows. Collective: every rank aborts or combines.

    Raises ValueError if `handle` is not that of the open round. Raises EPMismatchError if the calls of the ranks do not
    match, and closes the round. Raises EPTimeoutError and EPOverflowError as `closed` does; after an earlier timeout,
    the round stays open.
    """
    _look(exchange, handle)
    if exchange.rounds.handle is not handle:
        _refuse(exchange.rounds, handle, "abort", "dispatched")
    _close_without_rows(exchange, handle)


def _look(exchange: Exchange, handle: Sent | Dispatched) -> None:
    """Raises what the kernels have reported so far. Every rank sees a mismatch, so every rank closes its round."""
    try:
        exchange.check()
    except EPMismatchError:
        if exchange.rounds.handle is handle:
            _close_without_rows(exchange, handle)
        raise


def _close_without_rows(exchange: Exchange, handle: Sent | Dispatched) -> None:
    rounds = exchange.rounds
    round_sent = handle.sent if isinstance(handle, Dispatched) else handle
    if rounds.state is SENT:  # a combine signal promises that its rank has received all dispatch signals
        ops.dispatch_recv(*round_sent.arguments)
        round_sent.arguments = ()
        rounds.state = DISPATCHED
    if (y := rounds.y) is None:
        y = round_sent.new_y()
        ops.combine(y, None, *exchange.memory, round_sent.descriptor)
    else:
        ops.combine_recv(y, None, *exchange.memory, round_sent.descriptor)
    closed(exchange, y)


def _refuse(rounds: Rounds, handle: Sent | Dispatched, call: str, name: str) -> NoReturn:
    current = rounds.handle
    if current is None:
        first, second = ("dispatch_send", call) if call == "dispatch_recv" else ("dispatch", "combine")
        raise ValueError(f"round {handle.epoch} is closed: {first} comes before {second}")
    if handle is current or isinstance(current, Dispatched) and handle is current.sent:
        raise ValueError(f"round {current.epoch} awaits {' or '.join(rounds.state)}, got {call}")
    raise ValueError(
        f"`{name}` must be the handle of the open round {current.epoch}, got another's, of round {handle.epoch}"
    )
