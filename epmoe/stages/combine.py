"""Combine: expert outputs back to their tokens' ranks, one-sided, and summed there in rank order."""

from __future__ import annotations

import torch
from torch import Tensor

from epmoe import ops
from epmoe.exchange import Exchange
from epmoe.health import EPMismatchError, raise_on_overflow
from epmoe.stages.checks import aligned_rows, check_forward_only, check_tensor
from epmoe.stages.dispatch import Dispatched


def combine(exchange: Exchange, expert_rows: Tensor, dispatched: Dispatched) -> Tensor:
    """Finalize expert-major outputs [N, D] and bring them back: y [T, D]; collective. See `ExpertParallel.combine`."""
    _check_round(exchange, dispatched)
    if dispatched.layout != "expert":
        raise ValueError("`combine` takes expert-major rows; a round of layout='rank' ends with combine_partial")
    shape = ("N", dispatched.hidden_size)
    check_tensor("expert_rows", expert_rows, (dispatched.dtype,), shape, exchange.device)
    return _close_round(exchange, dispatched, aligned_rows(expert_rows))


def combine_partial(exchange: Exchange, partial: Tensor, dispatched: Dispatched) -> Tensor:
    """Bring rank-major rows [R, M, D], already weighted and summed over this rank's experts, back: y [T, D]."""
    _check_round(exchange, dispatched)
    sizes = exchange.plan.sizes
    shape = (sizes["R"], sizes["M"], dispatched.hidden_size)
    check_tensor("partial", partial, (dispatched.dtype,), shape, exchange.device)
    return _close_round(exchange, dispatched, aligned_rows(partial.flatten(0, 1)), expert_major=False)


def abort(exchange: Exchange, dispatched: Dispatched) -> None:
    """Close a round that an exception left open, without rows; all ranks combine or abort."""
    _check_round(exchange, dispatched)
    _close_round(exchange, dispatched, None)


def _check_round(exchange: Exchange, dispatched: Dispatched) -> None:
    try:
        exchange.check()
    except EPMismatchError:  # everyone sees it, so everyone closes the round
        if dispatched is exchange.open_round:
            _close_round(exchange, dispatched, None)
        raise
    if exchange.open_round is None:
        raise ValueError(f"round {dispatched.epoch} is closed: dispatch comes before combine")
    if dispatched is not exchange.open_round:
        raise ValueError(
            f"`dispatched` must be the handle of the open round {exchange.open_round.epoch}, got another's, of round "
            f"{dispatched.epoch}"
        )


def _close_round(
    exchange: Exchange, dispatched: Dispatched, rows: Tensor | None, *, expert_major: bool = True
) -> Tensor:
    if rows is not None:
        check_forward_only(rows)
    y = torch.empty(dispatched.num_tokens, dispatched.hidden_size, dtype=dispatched.dtype, device=exchange.device)
    ops.combine(
        y, rows, expert_major, exchange.window.addresses, exchange.window.local, exchange.scratch, exchange.status,
        exchange.plan_words, True, True, exchange.timeout_s,
    )  # fmt: skip
    exchange.open_round = None
    exchange.check()
    if exchange.config.capacity.on_overflow == "raise":
        raise_on_overflow(exchange.status, exchange.plan.sizes["max_rows"])
    return y
