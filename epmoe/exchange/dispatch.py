"""Dispatch: each token goes one-sided, and once, to each distinct rank that holds one of its experts."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from epmoe.exchange import round_state as rounds
from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import Dispatched, Layout, Received, RoundTemplate, Sent
from epmoe.exchange.round_state import DISPATCHED, MAX_TAG, PHASES, SENT
from epmoe.native import ops
from epmoe.native.arguments import (
    FLOATS,
    FP8,
    INTS,
    aligned_rows,
    check_forward_only,
    check_tensor,
    contiguous_rows,
    describe,
    dtype_name,
    token_count,
)
from epmoe.native.formats import SCALE_BLOCK, WIRE_FORMATS


def dispatch(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    num_tokens: int | Tensor | None,
    layout: Layout,
    weight_rows: bool,
    padded_tokens: int | None = None,
    tag: int = 0,
) -> Dispatched:
    """Send this rank's tokens and receive those of its experts. Collective; see `ExpertParallel.dispatch`.

    `padded_tokens` is for a network between nodes, of which there is one here.
    """
    exchange.enter()
    try:
        sent = _opened(exchange, x, ids, weights, scales, num_tokens, layout, weight_rows, tag)
        ops.dispatch(*sent.arguments)
        if exchange.rounds.progress[PHASES] & 3 != DISPATCHED:
            rounds.wait_on(exchange, ops.dispatch, sent.arguments, DISPATCHED)
        return rounds.dispatched(exchange, sent)
    finally:
        exchange.thread = 0


def dispatch_send(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    num_tokens: int | Tensor | None,
    layout: Layout,
    weight_rows: bool,
    padded_tokens: int | None = None,
    tag: int = 0,
) -> Sent:
    """The send phase of `dispatch`; waits for no rank, except after an abort."""
    exchange.enter()
    try:
        sent = _opened(exchange, x, ids, weights, scales, num_tokens, layout, weight_rows, tag)
        ops.dispatch_send(*sent.arguments)
        if exchange.rounds.progress[PHASES] & 3 != SENT:
            rounds.wait_on(exchange, ops.dispatch_send, sent.arguments, SENT)
        return sent
    finally:
        exchange.thread = 0


def dispatch_recv(exchange: Exchange, sent: Sent) -> Dispatched:
    """The receive phase of `dispatch`."""
    exchange.enter()
    try:
        rounds.expect(exchange, sent, "dispatch_recv", "sent")
        ops.dispatch_recv(*sent.arguments)
        if exchange.rounds.progress[PHASES] & 3 != DISPATCHED:
            rounds.wait_on(exchange, ops.dispatch_recv, sent.arguments, DISPATCHED)
        return rounds.dispatched(exchange, sent)
    finally:
        exchange.thread = 0


def no_tokens(
    exchange: Exchange,
    hidden_size: int | None,
    top_k: int | None,
    dtype: torch.dtype | None,
    layout: Layout | None,
    weight_rows: bool | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Layout, bool]:
    """x [0, D], ids, weights, scales, layout and `weight_rows` of a call without tokens, for `ExpertParallel.skip`.

    What is None is as in the last round, and as in the config before the first.
    """
    model, template = exchange.config.model, exchange.rounds.template
    first = model.hidden_size, model.num_experts_per_tok, model.torch_dtype, torch.int32, torch.float32, "expert", False
    D, K, x_dtype, _, _, last_layout, last_weight_rows = first if template is None else template.shape
    D, K, x_dtype = hidden_size or D, top_k or K, dtype or x_dtype
    x = torch.empty(0, D, dtype=x_dtype, device=exchange.device)
    scales = x.new_empty(0, D // SCALE_BLOCK, dtype=torch.float32) if x_dtype is FP8 else None
    ids, weights = x.new_empty(0, K, dtype=torch.int32), x.new_empty(0, K, dtype=torch.float32)
    return x, ids, weights, scales, layout or last_layout, last_weight_rows if weight_rows is None else weight_rows


def refuse_tag(tag: object) -> NoReturn:
    """Raises TypeError or ValueError for what is no tag."""
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise TypeError(f"`tag` must be an int, got {describe(tag)}")
    raise ValueError(f"`tag` must be from 0 to {MAX_TAG}, got {tag}")


def _opened(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    num_tokens: int | Tensor | None,
    layout: Layout,
    weight_rows: bool,
    tag: int,
) -> Sent:
    """Check the arguments of `ExpertParallel.dispatch` and give them a round."""
    epoch = rounds.check_closed(exchange)
    if tag.__class__ is not int or not 0 <= tag <= MAX_TAG:
        refuse_tag(tag)
    template = checked_template(exchange, x, ids, weights, scales, layout, weight_rows)
    T = x.shape[0]
    scalar, rows = (None, T) if num_tokens is None else token_count(num_tokens, T, exchange.device)
    descriptor = template.descriptors[bisect_left(template.steps, T)]
    inputs = aligned_rows(x), contiguous_rows(ids), contiguous_rows(weights)
    arguments = *inputs, scales, scalar, rows, *exchange.memory, descriptor
    return rounds.opened(exchange, template, T, epoch, tag, descriptor, arguments)


def checked_template(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    layout: Layout,
    weight_rows: bool,
) -> RoundTemplate:
    """The template of a call. Raises what `_check_inputs` does.

    Once a call has passed, calls with the same template need only the checks of what may still differ.
    """
    try:
        T, D = x.shape
        shape = rows, K = ids.shape
        key = (D, K, x.dtype, ids.dtype, weights.dtype, layout, weight_rows)
        template = exchange.templates.get(key)
        device = exchange.device
        if (
            template is not None
            and rows == T <= exchange.max_tokens
            and weights.shape == shape
            and x.device == device
            and ids.device == device
            and weights.device == device
            and (scales is None) == (x.dtype is not FP8)
            and (scales is None or _fits(scales, T, D, device))
            and not (torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad))
        ):
            return template
    except (AttributeError, TypeError, ValueError):
        pass  # not even tensors of two dimensions: `_check_inputs` says so
    _check_inputs(exchange, x, ids, weights, scales, layout, weight_rows)
    exchange.templates[key] = template = _new_template(exchange, x, key)
    return template


def _fits(scales: Tensor, T: int, D: int, device: torch.device) -> bool:
    """Whether `scales` needs no copy and no error: fp32 [T, D / 128] with contiguous rows."""
    return (
        scales.shape == (T, D // SCALE_BLOCK)
        and scales.dtype is torch.float32
        and scales.device == device
        and (scales.stride()[1] == 1 or D <= SCALE_BLOCK)
        and not (scales.requires_grad and torch.is_grad_enabled())
    )


def _new_template(exchange: Exchange, x: Tensor, shape: tuple[Any, ...]) -> RoundTemplate:
    _, K, _, _, _, layout, weight_rows = shape
    views, payload = exchange.views, WIRE_FORMATS[exchange.config.exchange.payload]
    wire, D = payload.dtype_of(x.dtype), x.shape[1]
    y_dtype = exchange.config.model.torch_dtype if x.dtype is FP8 else x.dtype
    blocks = payload.num_scales(D)
    recv_fields: dict[str, Tensor | None]
    if layout == "expert":
        fields = {
            "rows": exchange.rows_as("rows", wire, D),
            "scales": exchange.rows_as("row_scales", torch.float32, blocks) if blocks else None,
            "expert_offsets": views["expert_offsets"],
            "tokens_per_expert": views["tokens_per_expert"],
        }
        attributes = Dispatched.attributes("dispatched", layout, fields)
        recv_fields = {"counts": views["counts"]}
        received = Received.attributes("recv", layout, recv_fields, absent=("x", "scales", "ids", "weights"))
    else:
        absent = ("rows", "scales", "expert_offsets", "tokens_per_expert")
        attributes = Dispatched.attributes("dispatched", layout, {}, absent)
        recv_fields = {
            "counts": views["counts"],
            "x": exchange.slabs("recv.x", wire, D),
            "scales": exchange.slabs("recv.scales", torch.float32, blocks) if blocks else None,
            "ids": exchange.slabs("recv.ids", torch.int32, K),
            "weights": exchange.slabs("recv.weights", torch.float32, K),
        }
        received = Received.attributes("recv", layout, recv_fields)
    attributes |= {"recv": Received(received), "layout": layout, "dtype": y_dtype, "hidden_size": D}
    attributes |= {"_rounds": ref(exchange.rounds), "_rank": exchange.rank}
    steps, descriptors = exchange.descriptors_for(D, layout == "expert", weight_rows)
    like = torch.empty(0, D, dtype=y_dtype, device=exchange.device)
    return RoundTemplate(shape, steps, descriptors, attributes, D, like)


def _check_inputs(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    scales: Tensor | None,
    layout: str,
    weight_rows: bool,
) -> None:
    model, capacity = exchange.config.model, exchange.config.capacity
    if layout not in ("expert", "rank"):
        raise ValueError(f"`layout` must be 'expert' or 'rank', got {layout!r}")
    if not isinstance(weight_rows, bool):
        raise TypeError(f"`apply_router_weight_on_input` must be a bool, got {describe(weight_rows)}")
    if weight_rows and layout == "rank":
        raise ValueError("`apply_router_weight_on_input` needs expert-major rows: it must be False with layout='rank'")
    D, K, M = model.hidden_size, model.num_experts_per_tok, capacity.max_num_tokens_per_rank
    dtypes = [model.torch_dtype, *(d for d in FLOATS if d.itemsize < model.torch_dtype.itemsize)]
    if scales is not None:
        if exchange.config.exchange.payload != "fp8":
            raise ValueError("`scales` need `exchange.payload: fp8`, the format in which their rows travel")
        dtypes = [FP8]
    elif getattr(x, "dtype", None) is FP8:
        raise ValueError(f"`scales` must be float32 [T, D/128] where `x` is float8_e4m3fn, got {describe(scales)}")
    check_tensor("x", x, dtypes, ("T", "D"), exchange.device)
    T, hidden = x.shape
    wires = exchange.config.exchange.payload, exchange.config.exchange.combine_payload
    step, whole = (SCALE_BLOCK, "blocks of 128") if "fp8" in wires else (16 // x.dtype.itemsize, "16 bytes")
    if hidden > D or hidden < 1 or hidden % step:
        raise ValueError(
            f"`x` must be {dtype_name(dtypes[0])} [T, {D}], or a smaller D of whole {whole}, got {describe(x)}"
        )
    if T > M:
        raise ValueError(
            f"`x` has {T} tokens, but capacity.max_num_tokens_per_rank is {M}: set it to at least {T} on all ranks"
        )
    check_tensor("ids", ids, INTS, (T, "K"), exchange.device)
    if not 1 <= ids.shape[1] <= K:
        raise ValueError(f"`ids` must be int32 or int64 [{T}, 1..{K}], got {describe(ids)}")
    check_tensor("weights", weights, FLOATS, tuple(ids.shape), exchange.device)
    check_forward_only(x, weights)
    if scales is not None:
        check_tensor("scales", scales, (torch.float32,), (T, hidden // SCALE_BLOCK), exchange.device)
        if scales.stride(1) != 1 and hidden > SCALE_BLOCK:
            raise ValueError(f"`scales` must have contiguous rows, got strides {scales.stride()}: use `.contiguous()`")
        check_forward_only(scales)
