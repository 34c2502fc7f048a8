"""Dispatch: each token once to each distinct rank that holds one of its experts, one-sided."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from epmoe import ops
from epmoe.exchange import Exchange
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

Layout = Literal["expert", "rank"]
FP8 = torch.float8_e4m3fn


class _Fields:
    """Named tensors, some of which a layout has not. Rounds of one form share them: the buffers never move."""

    def __init__(self, attributes: dict[str, Any]):
        self.__dict__.update(attributes)

    @staticmethod
    def attributes(owner: str, layout: str, fields: dict[str, Tensor | None]) -> dict[str, Any]:
        """What an object with these fields is made of; None is a field that it has not."""
        present = {name: value for name, value in fields.items() if value is not None}
        return present | {"_owner": owner, "_layout": layout, "_names": tuple(fields)}

    def __getattr__(self, name: str) -> Tensor:
        if name in self.__dict__.get("_names", ()):
            raise AttributeError(f"`{self._owner}.{name}` does not exist with layout={self._layout!r} and this payload")
        raise AttributeError(name)


class Received(_Fields):
    """What came, by source: counts int32 [R]; with layout="rank" also x [R,M,D], ids int32 [R,M,K] (physical),
    weights fp32 [R,M,K] and, with an fp8 payload, scales fp32 [R,M,D/128].

    Source r fills slots [0, counts[r]) in its own token order; the rest carry the sentinel and 0, and their x is never
    read. In a used slot, pairs of other ranks keep their ids; pairs without an expert carry the sentinel and 0.
    """


@dataclass(slots=True)
class Form:
    """What all rounds share whose calls agree in D, K, dtypes, layout and where the weights apply."""

    expert_major: bool
    weight_rows: bool
    steps: list[int]  # plans[bisect_left(steps, T)] is that for T tokens
    plans: list[Tensor]
    attributes: dict[str, Any]  # of `Dispatched`


@dataclass(slots=True, eq=False)
class Sent:
    """A round whose tokens are on their way: `ep.dispatch_recv` makes a `Dispatched` of it."""

    form: Form
    num_tokens: int
    epoch: int
    plan_words: Tensor
    inputs: tuple[Any, ...]  # of the operator, for both halves
    awaits: ClassVar[tuple[str, ...]] = ("dispatch_recv",)


class Dispatched(_Fields):
    """One open round, valid until `combine` or `combine_send` is called.

    rows [N_cap, D], expert_offsets int32 [e+1], tokens_per_expert int32 [e] and, with an fp8 payload, scales fp32
    [N_cap, D/128] with layout="expert"; `recv` in both layouts. Rows past `expert_offsets[e]` must not be read.
    """

    recv: Received
    num_tokens: int
    epoch: int
    layout: Layout
    dtype: torch.dtype
    hidden_size: int
    awaits: tuple[str, ...] = ("combine", "combine_partial", "combine_send")  # the calls that may come next
    y: Tensor | None = None  # from combine_send to combine_recv

    def __init__(self, sent: Sent):
        super().__init__(sent.form.attributes)
        self.sent, self.num_tokens, self.epoch = sent, sent.num_tokens, sent.epoch


def dispatch(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    num_tokens: int | Tensor | None = None,
    layout: Layout = "expert",
    apply_router_weight_on_input: bool = False,
) -> Dispatched:
    """Send this rank's tokens and receive what its experts must compute; collective. See `ExpertParallel.dispatch`."""
    sent = _open_round(exchange, x, ids, weights, num_tokens, layout, apply_router_weight_on_input)
    return _run(exchange, sent, send=True)


def dispatch_send(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    num_tokens: int | Tensor | None = None,
    layout: Layout = "expert",
    apply_router_weight_on_input: bool = False,
) -> Sent:
    """The first half of `dispatch`, which waits for nobody."""
    sent = _open_round(exchange, x, ids, weights, num_tokens, layout, apply_router_weight_on_input)
    _launch(exchange, sent, send=True, receive=False)
    exchange.open_round = sent
    return sent


def dispatch_recv(exchange: Exchange, sent: Sent) -> Dispatched:
    """The second half of `dispatch`."""
    exchange.expect(sent, "dispatch_recv", "sent")
    return _run(exchange, sent, send=False)


def _open_round(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_tokens: int | Tensor | None,
    layout: Layout,
    weight_rows: bool,
) -> Sent:
    exchange.check()
    form = _checked_form(exchange, x, ids, weights, layout, weight_rows)
    T = x.shape[0]
    scalar, rows = (None, T) if num_tokens is None else token_count(num_tokens, T, exchange.device)
    exchange.rounds += 1
    inputs = aligned_rows(x), contiguous_rows(ids), contiguous_rows(weights), scalar, rows
    return Sent(form, T, exchange.rounds, form.plans[bisect_left(form.steps, T)], inputs)


def _launch(exchange: Exchange, sent: Sent, *, send: bool, receive: bool) -> None:
    ops.dispatch(
        *sent.inputs, *exchange.memory, sent.plan_words, sent.form.expert_major, sent.form.weight_rows, send, receive,
        exchange.timeout_s,
    )  # fmt: skip


def _run(exchange: Exchange, sent: Sent, *, send: bool) -> Dispatched:
    _launch(exchange, sent, send=send, receive=True)
    sent.inputs = ()  # the round needs their memory no longer
    exchange.open_round = dispatched = Dispatched(sent)
    return dispatched


def _checked_form(
    exchange: Exchange, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout, weight_rows: bool
) -> Form:
    """Raises what `_check_inputs` does, but of a form that has passed before looks only at what may differ."""
    try:
        (T, D), (rows, K) = x.shape, ids.shape
        key = (D, K, x.dtype, ids.dtype, weights.dtype, layout, weight_rows)
        form = exchange.forms.get(key)
        device = exchange.device
        if (
            form is not None
            and rows == T <= exchange.max_tokens
            and weights.shape == ids.shape
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
    return Form(layout == "expert", weight_rows, *exchange.plans_for(D), attributes)


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
