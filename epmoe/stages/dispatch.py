"""Dispatch: each token once to each distinct rank that holds one of its experts, one-sided."""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from epmoe import ops
from epmoe.exchange import Exchange
from epmoe.handles import Dispatched, Form, Layout, Received, Sent
from epmoe.memory import SCALE_BLOCK
from epmoe.stages.checks import (
    FLOATS,
    INTS,
    aligned_rows,
    check_forward_only,
    check_tensor,
    contiguous_rows,
    describe,
    token_count,
)

FP8 = torch.float8_e4m3fn


def open_round(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: int | Tensor | None,
    layout: Layout,
    weight_rows: bool,
) -> Sent:
    """Checks the arguments of `ExpertParallel.dispatch` and gives them a round; then `dispatch` or `dispatch_send`."""
    exchange.check()
    form = _checked_form(exchange, x, ids, weights, layout, weight_rows)
    T = x.shape[0]
    scalar, rows = (None, T) if num_tokens is None else token_count(num_tokens, T, exchange.device)
    words = form.words[bisect_left(form.steps, T)]
    inputs = aligned_rows(x), contiguous_rows(ids), contiguous_rows(weights)
    arguments = *inputs, scalar, rows, *exchange.memory, words
    return Sent(form, T, exchange.next_epoch(), words, arguments)


def dispatch(exchange: Exchange, sent: Sent) -> Dispatched:
    """Send this rank's tokens and receive what its experts must compute; collective. See `ExpertParallel.dispatch`."""
    ops.dispatch(*sent.arguments)
    return _received(exchange, sent)


def dispatch_send(exchange: Exchange, sent: Sent) -> Sent:
    """The first half of `dispatch`, which waits for nobody."""
    ops.dispatch_send(*sent.arguments)
    exchange.open_round = sent
    return sent


def dispatch_recv(exchange: Exchange, sent: Sent) -> Dispatched:
    """The second half of `dispatch`."""
    exchange.expect(sent, "dispatch_recv", "sent")
    ops.dispatch_recv(*sent.arguments)
    return _received(exchange, sent)


def _received(exchange: Exchange, sent: Sent) -> Dispatched:
    sent.arguments = ()  # the round needs their memory no longer
    exchange.open_round = dispatched = Dispatched(sent)
    return dispatched


def _checked_form(
    exchange: Exchange, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout, weight_rows: bool
) -> Form:
    """Raises what `_check_inputs` does, but of a form that has passed before looks only at what may differ."""
    try:
        T, D = x.shape
        shape = rows, K = ids.shape
        key = (D, K, x.dtype, ids.dtype, weights.dtype, layout, weight_rows)
        form = exchange.forms.get(key)
        device = exchange.device
        if (
            form is not None
            and rows == T <= exchange.max_tokens
            and weights.shape == shape
            and x.device == device
            and ids.device == device
            and weights.device == device
            and exchange.open_round is None
            and not (torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad))
        ):
            return form
    except (AttributeError, TypeError, ValueError):
        pass  # not even tensors: the checks say so
    _check_inputs(exchange, x, ids, weights, layout, weight_rows)
    exchange.forms[key] = form = _new_form(exchange, x, ids.shape[1], layout, weight_rows)
    return form


def _new_form(exchange: Exchange, x: Tensor, K: int, layout: Layout, weight_rows: bool) -> Form:
    views, wire_fp8 = exchange.views, bool(exchange.plan.sizes["payload_fp8"])
    wire, D = FP8 if wire_fp8 else x.dtype, x.shape[1]
    blocks = -(-D // SCALE_BLOCK)
    fields: dict[str, Tensor | None] = dict.fromkeys(("rows", "scales", "expert_offsets", "tokens_per_expert"))
    received: dict[str, Tensor | None] = dict.fromkeys(("x", "scales", "ids", "weights"))
    received["counts"] = views["counts"]
    if layout == "expert":
        fields["rows"] = exchange.rows_as("rows", wire, D)
        fields["scales"] = exchange.rows_as("row_scales", torch.float32, blocks) if wire_fp8 else None
        fields["expert_offsets"] = views["expert_offsets"]
        fields["tokens_per_expert"] = views["tokens_per_expert"]
    else:
        received["x"] = exchange.slabs("recv.x", wire, D)
        received["scales"] = exchange.slabs("recv.scales", torch.float32, blocks) if wire_fp8 else None
        received["ids"] = exchange.slabs("recv.ids", torch.int32, K)
        received["weights"] = exchange.slabs("recv.weights", torch.float32, K)
    recv = Received(Received.attributes("recv", layout, received))
    attributes = Dispatched.attributes("dispatched", layout, fields)
    attributes |= {"recv": recv, "layout": layout, "dtype": x.dtype, "hidden_size": D}
    like = torch.empty(0, dtype=x.dtype, device=exchange.device)
    return Form(*exchange.words_for(D, layout == "expert", weight_rows), attributes, like)


def _check_inputs(exchange: Exchange, x: Tensor, ids: Tensor, weights: Tensor, layout: str, weight_rows: bool) -> None:
    model, capacity = exchange.config.model, exchange.config.capacity
    if exchange.open_round is not None:
        raise RuntimeError(
            f"round {exchange.open_round.epoch} is still open: call combine, or abort on all ranks, before dispatch"
        )
    if layout not in ("expert", "rank"):
        raise ValueError(f"`layout` must be 'expert' or 'rank', got {layout!r}")
    if not isinstance(weight_rows, bool):
        raise TypeError(f"`apply_router_weight_on_input` must be a bool, got {describe(weight_rows)}")
    if weight_rows and layout == "rank":
        raise ValueError("`apply_router_weight_on_input` needs expert-major rows: it must be False with layout='rank'")
    D, K, M = model.hidden_size, model.num_experts_per_tok, capacity.max_num_tokens_per_rank
    dtypes = [model.torch_dtype, *(d for d in FLOATS if d.itemsize < model.torch_dtype.itemsize)]
    check_tensor("x", x, dtypes, ("T", "D"), exchange.device)
    T, hidden = x.shape
    wires = exchange.config.exchange.payload, exchange.config.exchange.combine_payload
    step, whole = (SCALE_BLOCK, "blocks of 128") if "fp8" in wires else (16 // x.dtype.itemsize, "16 bytes")
    if hidden > D or hidden < 1 or hidden % step:
        raise ValueError(f"`x` must be {model.dtype} [T, {D}], or a smaller D of whole {whole}, got {describe(x)}")
    if T > M:
        raise ValueError(
            f"`x` has {T} tokens, but capacity.max_num_tokens_per_rank is {M}: set it to at least {T} on all ranks"
        )
    check_tensor("ids", ids, INTS, (T, "K"), exchange.device)
    if not 1 <= ids.shape[1] <= K:
        raise ValueError(f"`ids` must be int32 or int64 [{T}, 1..{K}], got {describe(ids)}")
    check_tensor("weights", weights, FLOATS, tuple(ids.shape), exchange.device)
    check_forward_only(x, weights)
