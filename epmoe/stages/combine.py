"""Combine: expert outputs back to their tokens' ranks, one-sided, and summed there in rank order."""

from __future__ import annotations

from torch import Tensor
from torch._ops import OpOverload

from epmoe import ops
from epmoe.exchange import Exchange
from epmoe.handles import Dispatched, Sent
from epmoe.health import EPMismatchError
from epmoe.stages.checks import aligned_rows, check_forward_only, check_tensor
from epmoe.stages.dispatch import dispatch_recv


def combine(exchange: Exchange, expert_rows: Tensor, dispatched: Dispatched) -> Tensor:
    """Finalize expert-major outputs [N, D] and bring them back: y [T, D]; collective. See `ExpertParallel.combine`."""
    _check_round(exchange, dispatched, "combine")
    if dispatched.layout != "expert":
        raise ValueError("`combine` takes expert-major rows; a round of layout='rank' ends with combine_partial")
    rows = _expert_rows(exchange, expert_rows, dispatched)
    return _closed(exchange, _launch(ops.combine, exchange, rows, dispatched))


def combine_partial(exchange: Exchange, partial: Tensor, dispatched: Dispatched) -> Tensor:
    """Bring rank-major rows [R, M, D], already weighted and summed over this rank's experts, back: y [T, D]."""
    _check_round(exchange, dispatched, "combine_partial")
    if dispatched.layout != "rank":
        raise ValueError("`combine_partial` takes rank-major rows; a round of layout='expert' ends with combine")
    rows = _partial_rows(exchange, partial, dispatched)
    return _closed(exchange, _launch(ops.combine, exchange, rows, dispatched))


def combine_send(exchange: Exchange, rows: Tensor, dispatched: Dispatched) -> None:
    """The first half of `combine`, or of `combine_partial` with layout="rank"; waits for nobody."""
    _check_round(exchange, dispatched, "combine_send")
    checked = (_expert_rows if dispatched.layout == "expert" else _partial_rows)(exchange, rows, dispatched)
    dispatched.y = _launch(ops.combine_send, exchange, checked, dispatched)
    dispatched.awaits = ("combine_recv",)


def combine_recv(exchange: Exchange, dispatched: Dispatched) -> Tensor:
    """The second half of `combine`: y [T, D]."""
    exchange.expect(dispatched, "combine_recv", "dispatched")
    return _receive(exchange, dispatched)


def abort(exchange: Exchange, handle: Sent | Dispatched) -> None:
    """Close a round that an exception left open, without rows; all ranks combine or abort."""
    _check_round(exchange, handle, None)
    _give_up(exchange, handle)


def _check_round(exchange: Exchange, handle: Sent | Dispatched, call: str | None) -> None:
    try:
        exchange.check()
    except EPMismatchError:  # everyone sees it, so everyone closes the round
        if handle is exchange.open_round:
            _give_up(exchange, handle)
        raise
    exchange.expect(handle, call, "dispatched")


def _give_up(exchange: Exchange, handle: Sent | Dispatched) -> None:
    if isinstance(handle, Sent):  # combine's flags say that dispatch has seen everyone's
        handle = dispatch_recv(exchange, handle)
    if handle.y is None:
        _closed(exchange, _launch(ops.combine, exchange, None, handle))
    else:
        _receive(exchange, handle)


def _expert_rows(exchange: Exchange, rows: Tensor, dispatched: Dispatched) -> Tensor:
    # The long check only where something differs.
    D = dispatched.hidden_size
    shape: tuple[int, ...] = getattr(rows, "shape", ())
    if len(shape) != 2 or shape[1] != D or rows.dtype != dispatched.dtype or rows.device != exchange.device:
        check_tensor("expert_rows", rows, (dispatched.dtype,), ("N", D), exchange.device)
    check_forward_only(rows)
    if exchange.device.type == "cpu" and rows.shape[0] < exchange.plan.sizes["max_rows"]:  # a GPU skips such rows
        needed = int(exchange.views["expert_offsets"][-1])
        if rows.shape[0] < needed:
            raise ValueError(f"`expert_rows` must hold at least {needed} rows, got {rows.shape[0]}")
    return aligned_rows(rows)


def _partial_rows(exchange: Exchange, partial: Tensor, dispatched: Dispatched) -> Tensor:
    sizes = exchange.plan.sizes
    shape = (sizes["R"], sizes["M"], dispatched.hidden_size)
    check_tensor("partial", partial, (dispatched.dtype,), shape, exchange.device)
    check_forward_only(partial)
    return aligned_rows(partial.flatten(0, 1))


def _launch(operator: OpOverload, exchange: Exchange, rows: Tensor | None, dispatched: Dispatched) -> Tensor:
    y = dispatched.sent.form.like.new_empty(dispatched.num_tokens, dispatched.hidden_size)
    operator(y, rows, *exchange.memory, dispatched.sent.words)
    return y


def _receive(exchange: Exchange, dispatched: Dispatched) -> Tensor:
    y = dispatched.y
    assert y is not None
    ops.combine_recv(y, None, *exchange.memory, dispatched.sent.words)
    dispatched.y = None
    return _closed(exchange, y)


def _closed(exchange: Exchange, y: Tensor) -> Tensor:
    exchange.open_round = None
    exchange.check()
    exchange.check_overflow()
    return y
