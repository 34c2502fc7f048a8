"""The checks of what combine is given: the experts' outputs, and y."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from epmoe.exchange.handles import Dispatched
from epmoe.exchange.memory import MemoryPlan
from epmoe.exchange.processor import Processor
from epmoe.native.arguments import (
    FP8,
    aligned_rows,
    check_forward_only,
    check_tensor,
    describe,
    dtype_name,
)


def refuse_layout(dispatched: Dispatched) -> NoReturn:
    """Raise ValueError for the call that ends rounds of the other layout."""
    if dispatched.layout == "rank":
        raise ValueError(
            "`combine` takes expert-major rows; a round of layout='rank' ends with combine_partial"
        )
    raise ValueError(
        "`combine_partial` takes rank-major rows; a round of layout='expert' ends with combine"
    )


def y_of(dispatched: Dispatched, out: Tensor | None, device: torch.device) -> Tensor:
    """Take the round's y [T, D]: `out`, or a new tensor. Raises TypeError or ValueError if `out`
    does not fit.
    """
    if out is None:
        return dispatched.sent.template.like.new_empty(
            dispatched.num_tokens, dispatched.hidden_size
        )
    # `check_tensor` words the errors, as in `output_rows`.
    shape = (dispatched.sent.num_tokens, dispatched.hidden_size)
    if not _is(out, dispatched.dtype, shape, device):
        check_tensor("out", out, (dispatched.dtype,), shape, device)
    # Kernels write whole lines of 16 bytes.
    if not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(
            "`out` must be contiguous and begin at a multiple of 16 bytes, got strides "
            f"{out.stride()}"
        )
    if out.requires_grad:
        check_forward_only(out)
    return out


def _is(value: object, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether a value is a plain tensor of this dtype, shape and device."""
    if value.__class__ is not Tensor:
        return False
    assert isinstance(value, Tensor)
    return value.dtype is dtype and value.shape == shape and value.device == device


def output_rows(
    rows: Tensor, dispatched: Dispatched, plan: MemoryPlan, processor: Processor
) -> Tensor:
    """Check the rows of combine. Returns them as [n, D], each at a multiple of 16 bytes. Raises
    TypeError, ValueError or RuntimeError.
    """
    device = processor.device
    if dispatched.layout == "rank":
        return _partial_rows(rows, dispatched, plan, device)

    # `check_tensor` words the errors. It takes longer than these comparisons and runs only if one
    # of them fails.
    D = dispatched.hidden_size
    shape: tuple[int, ...] = getattr(rows, "shape", ())
    if len(shape) != 2 or shape[1] != D or rows.dtype != dispatched.dtype or rows.device != device:
        _refuse_fp8("expert_rows", rows, dispatched)
        check_tensor("expert_rows", rows, (dispatched.dtype,), ("N", D), device)
    if rows.requires_grad:
        check_forward_only(rows)

    # As many rows as arrived, where the host knows. Otherwise rows that are missing are skipped.
    if not processor.runs_ahead and rows.shape[0] < plan.sizes["max_rows"]:
        needed = int(dispatched.expert_offsets[-1])
        if rows.shape[0] < needed:
            raise ValueError(f"`expert_rows` must hold at least {needed} rows, got {rows.shape[0]}")
    return aligned_rows(rows)


def _partial_rows(
    partial: Tensor, dispatched: Dispatched, plan: MemoryPlan, device: torch.device
) -> Tensor:
    """`output_rows` of rank-major rows [R, M, D]."""
    shape = (plan.sizes["R"], plan.sizes["M"], dispatched.hidden_size)
    if not _is(partial, dispatched.dtype, shape, device):
        _refuse_fp8("partial", partial, dispatched)
        check_tensor("partial", partial, (dispatched.dtype,), shape, device)
    if partial.requires_grad:
        check_forward_only(partial)
    return aligned_rows(partial.flatten(0, 1))


def _refuse_fp8(name: str, rows: object, dispatched: Dispatched) -> None:
    """Raise TypeError for rows of fp8: somebody gives the rows that arrived back as they are."""
    if isinstance(rows, Tensor) and rows.dtype is FP8:
        raise TypeError(
            f"`{name}` must be {dtype_name(dispatched.dtype)}, got {describe(rows)}: rows of fp8 "
            "are the experts' inputs, which count with their `scales`; combine takes outputs"
        )
