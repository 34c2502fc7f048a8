"""Checks the arguments of combine: the rows that the experts have computed, and `out`."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from epmoe.exchange.handles import Dispatched, Missing, Sent
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
    """Raise ValueError for a round of one layout that is ended by the call of the other layout."""
    if dispatched.layout == "rank":
        raise ValueError(
            "`combine` takes expert-major rows; a round of layout='rank' ends with combine_partial"
        )
    raise ValueError(
        "`combine_partial` takes rank-major rows; a round of layout='expert' ends with combine"
    )


def y_of(sent: Sent, out: Tensor | None, device: torch.device) -> Tensor:
    """Return the tensor for the output y [T, D] of a round: the caller's `out`, or a new tensor.

    `T` is the number of this rank's tokens, and `D` the hidden size of the call. Raises TypeError
    or ValueError if `out` does not fit.
    """
    template = sent.template
    T = sent.num_tokens
    D = template.shape.hidden_size
    if out is None:
        # A tuple of both numbers would cost the host 0.4 µs.
        return template.like.new_empty(T, D)
    # These comparisons are quick. Only if one fails, `check_tensor` finds the error's text.
    if not _is(out, template.dtype, (T, D), device):
        check_tensor("out", out, (template.dtype,), (T, D), device)
    # Kernels write y in whole lines of 16 bytes.
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
    """Check the rows that the experts have computed, for combine.

    Returns the rows as [n, D], each of which begins at a multiple of 16 bytes; they are copied if
    they do not. Raises TypeError for another type or dtype, ValueError for another shape or device,
    and RuntimeError for rows that need a gradient.
    """
    device = processor.device
    arrived = dispatched.arrived
    if type(arrived) is Missing:
        return _partial_rows(rows, dispatched, plan, device)

    # `check_tensor` has the texts of the errors. It takes longer than these comparisons, so it runs
    # only if one of them fails.
    template = dispatched.sent.template
    D = template.shape.hidden_size
    dtype = template.dtype
    shape: tuple[int, ...] = getattr(rows, "shape", ())
    if len(shape) != 2 or shape[1] != D or rows.dtype != dtype or rows.device != device:
        _refuse_fp8("expert_rows", rows, dispatched)
        check_tensor("expert_rows", rows, (dtype,), ("N", D), device)
    if rows.requires_grad:
        check_forward_only(rows)

    # There must be as many rows as have arrived. On a GPU the host does not know that number, and
    # the kernel skips rows that are missing.
    if not processor.runs_ahead and shape[0] < plan.sizes["max_rows"]:
        needed = int(arrived.expert_offsets[-1])
        if shape[0] < needed:
            raise ValueError(f"`expert_rows` must hold at least {needed} rows, got {shape[0]}")
    return aligned_rows(rows)


def _partial_rows(
    partial: Tensor, dispatched: Dispatched, plan: MemoryPlan, device: torch.device
) -> Tensor:
    """Check rank-major rows [ranks, slots of a rank, hidden size], as `output_rows` does."""
    shape = (plan.sizes["R"], plan.sizes["M"], dispatched.hidden_size)
    if not _is(partial, dispatched.dtype, shape, device):
        _refuse_fp8("partial", partial, dispatched)
        check_tensor("partial", partial, (dispatched.dtype,), shape, device)
    if partial.requires_grad:
        check_forward_only(partial)
    return aligned_rows(partial.flatten(0, 1))


def _refuse_fp8(name: str, rows: object, dispatched: Dispatched) -> None:
    """Raise TypeError for rows in fp8. The caller has probably passed the rows that arrived, in
    place of the experts' outputs.
    """
    if isinstance(rows, Tensor) and rows.dtype is FP8:
        raise TypeError(
            f"`{name}` must be {dtype_name(dispatched.dtype)}, got {describe(rows)}: rows of fp8 "
            "are the experts' inputs, which count with their `scales`; combine takes outputs"
        )
