"""Combine: expert outputs go back one-sided to the ranks of their tokens and are summed there in rank order."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from torch._ops import OpOverload

from epmoe.exchange import round_state as rounds
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import Dispatched
from epmoe.exchange.round_state import CLOSED, PHASES, RETURNING
from epmoe.native import ops
from epmoe.native.arguments import FP8, aligned_rows, check_forward_only, check_tensor, describe, dtype_name


def combine(exchange: Exchange, expert_rows: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> Tensor:
    """Finalize expert-major outputs [N, D] and bring them back: y [T, D]. Collective; see `ExpertParallel.combine`."""
    exchange.enter()
    try:
        rounds.permit(exchange, dispatched, "combine")
        if dispatched.layout != "expert":
            refuse_layout(dispatched)
        y, rows = y_of(exchange, dispatched, out), _expert_rows(exchange, expert_rows, dispatched)
        return rounds.closed(exchange, _run(exchange, ops.combine, y, rows, dispatched, CLOSED))
    finally:
        exchange.thread = 0


def combine_partial(exchange: Exchange, partial: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> Tensor:
    """Bring rank-major rows [R, M, D], already weighted and summed over this rank's experts, back: y [T, D]."""
    exchange.enter()
    try:
        rounds.permit(exchange, dispatched, "combine_partial")
        if dispatched.layout != "rank":
            refuse_layout(dispatched)
        y, rows = y_of(exchange, dispatched, out), _partial_rows(exchange, partial, dispatched)
        return rounds.closed(exchange, _run(exchange, ops.combine, y, rows, dispatched, CLOSED))
    finally:
        exchange.thread = 0


def combine_send(exchange: Exchange, rows: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> None:
    """The send phase of `combine`, or of `combine_partial` with layout="rank"; waits for no rank."""
    exchange.enter()
    try:
        rounds.permit(exchange, dispatched, "combine_send")
        checked = (_expert_rows if dispatched.layout == "expert" else _partial_rows)(exchange, rows, dispatched)
        _run(exchange, ops.combine_send, y_of(exchange, dispatched, out), checked, dispatched, RETURNING)
    finally:
        exchange.thread = 0


def combine_recv(exchange: Exchange, dispatched: Dispatched) -> Tensor:
    """The receive phase of `combine`: y [T, D]."""
    exchange.enter()
    try:
        rounds.expect(exchange, dispatched, "combine_recv")
        y = exchange.rounds.y
        assert y is not None
        arguments = y, None, *exchange.memory, dispatched.sent.descriptor
        ops.combine_recv(*arguments)
        if exchange.rounds.progress[PHASES] & 3 != CLOSED:
            rounds.wait_on(exchange, ops.combine_recv, arguments, CLOSED)
        return rounds.closed(exchange, y)
    finally:
        exchange.thread = 0


def refuse_layout(dispatched: Dispatched) -> NoReturn:
    """Raises ValueError for the call that ends rounds of the other layout."""
    if dispatched.layout == "rank":
        raise ValueError("`combine` takes expert-major rows; a round of layout='rank' ends with combine_partial")
    raise ValueError("`combine_partial` takes rank-major rows; a round of layout='expert' ends with combine")


def y_of(exchange: Exchange, dispatched: Dispatched, out: Tensor | None) -> Tensor:
    """The round's y [T, D]: `out`, or a new one. Raises TypeError or ValueError for an `out` that cannot be one."""
    if out is None:
        return dispatched.sent.new_y()
    shape = dispatched.sent.num_tokens, dispatched.hidden_size
    check_tensor("out", out, (dispatched.dtype,), shape, exchange.device)
    if not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(f"`out` must be contiguous and begin at a multiple of 16 bytes, got strides {out.stride()}")
    check_forward_only(out)
    return out


def _refuse_fp8(name: str, rows: object, dispatched: Dispatched) -> None:
    """Raises TypeError for the rows of fp8 that dispatch has returned, where combine wants the experts' outputs."""
    if isinstance(rows, Tensor) and rows.dtype is FP8:
        raise TypeError(
            f"`{name}` must be {dtype_name(dispatched.dtype)}, got {describe(rows)}: rows of fp8 are the experts' "
            "inputs, which count with their `scales`; combine takes outputs"
        )


def _expert_rows(exchange: Exchange, rows: Tensor, dispatched: Dispatched) -> Tensor:
    # `check_tensor` words the errors. It takes longer than these comparisons and runs only if one of them fails.
    D = dispatched.hidden_size
    shape: tuple[int, ...] = getattr(rows, "shape", ())
    if len(shape) != 2 or shape[1] != D or rows.dtype != dispatched.dtype or rows.device != exchange.device:
        _refuse_fp8("expert_rows", rows, dispatched)
        check_tensor("expert_rows", rows, (dispatched.dtype,), ("N", D), exchange.device)
    check_forward_only(rows)
    if exchange.device.type == "cpu" and rows.shape[0] < exchange.plan.sizes["max_rows"]:  # a GPU skips missing rows
        needed = int(exchange.views["expert_offsets"][-1])
        if rows.shape[0] < needed:
            raise ValueError(f"`expert_rows` must hold at least {needed} rows, got {rows.shape[0]}")
    return aligned_rows(rows)


def _partial_rows(exchange: Exchange, partial: Tensor, dispatched: Dispatched) -> Tensor:
    sizes = exchange.plan.sizes
    shape = (sizes["R"], sizes["M"], dispatched.hidden_size)
    if partial.__class__ is Tensor and partial.dtype is not dispatched.dtype:
        _refuse_fp8("partial", partial, dispatched)
    check_tensor("partial", partial, (dispatched.dtype,), shape, exchange.device)
    check_forward_only(partial)
    return aligned_rows(partial.flatten(0, 1))


def _run(
    exchange: Exchange, operator: OpOverload, y: Tensor, rows: Tensor, dispatched: Dispatched, state: int
) -> Tensor:
    """Calls an operator that sends `rows` and leads to `state`. Returns y, which combine_send leaves unwritten."""
    opened = exchange.rounds
    opened.y = y
    arguments = y, rows, *exchange.memory, dispatched.sent.descriptor
    operator(*arguments)
    if opened.progress[PHASES] & 3 != state:
        rounds.wait_on(exchange, operator, arguments, state)
    return y
