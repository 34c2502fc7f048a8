"""Dispatch: each token once to each distinct rank that holds one of its experts, one-sided."""

from __future__ import annotations

from typing import Literal

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
    """Named tensors, some of which a layout has not."""

    def __init__(self, owner: str, layout: str, fields: dict[str, Tensor | None]):
        self.__dict__.update({name: value for name, value in fields.items() if value is not None})
        self._owner, self._layout, self._names = owner, layout, tuple(fields)

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


class Dispatched(_Fields):
    """One open round, valid until `combine` is called.

    rows [N_cap, D], expert_offsets int32 [e+1], tokens_per_expert int32 [e] and, with an fp8 payload, scales fp32
    [N_cap, D/128] with layout="expert"; `recv` in both layouts. Rows past `expert_offsets[e]` must not be read.
    """

    recv: Received
    num_tokens: int
    epoch: int
    layout: Layout
    dtype: torch.dtype
    hidden_size: int

    def __init__(
        self,
        exchange: Exchange,
        layout: Layout,
        x: Tensor,
        fields: dict[str, Tensor | None],
        received: dict[str, Tensor | None],
    ):
        super().__init__("dispatched", layout, fields)
        self.layout, self.epoch, self.dtype = layout, exchange.rounds, x.dtype
        self.num_tokens, self.hidden_size = x.shape
        self.recv = Received("recv", layout, received)


def dispatch(
    exchange: Exchange,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    num_tokens: int | Tensor | None = None,
    layout: Layout = "expert",
) -> Dispatched:
    """Send this rank's tokens and receive what its experts must compute; collective. See `ExpertParallel.dispatch`."""
    exchange.check()
    _check_inputs(exchange, x, ids, weights, layout)
    scalar, rows = token_count(num_tokens, x.shape[0], exchange.device)
    exchange.rounds += 1
    ops.dispatch(
        aligned_rows(x), contiguous_rows(ids), contiguous_rows(weights), scalar, rows, exchange.window.addresses,
        exchange.window.local, exchange.scratch, exchange.status, exchange.plan_words, layout == "expert",
        False, True, True, exchange.timeout_s,
    )  # fmt: skip
    dispatched = Dispatched(exchange, layout, x, *_outputs(exchange, layout, x, ids.shape[1]))
    exchange.open_round = dispatched
    return dispatched


def _outputs(
    exchange: Exchange, layout: Layout, x: Tensor, K: int
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The buffers as this shape of call sees them: fields of `Dispatched`, and of its `recv`. They never move, so each
    shape makes them once."""
    key = (layout, x.dtype, x.shape[1], K)
    if key in exchange.outputs:
        return exchange.outputs[key]
    views, wire_fp8 = exchange.views, bool(exchange.plan.sizes["payload_fp8"])
    wire = FP8 if wire_fp8 else x.dtype
    fields: dict[str, Tensor | None] = dict.fromkeys(("rows", "scales", "expert_offsets", "tokens_per_expert"))
    received: dict[str, Tensor | None] = dict.fromkeys(("x", "scales", "ids", "weights"))
    received["counts"] = views["counts"]
    if layout == "expert":
        fields["rows"] = exchange.rows_as("rows", wire, x.shape[1])
        fields["scales"] = exchange.rows_as("row_scales", torch.float32, _blocks(x)) if wire_fp8 else None
        fields["expert_offsets"] = views["expert_offsets"]
        fields["tokens_per_expert"] = views["tokens_per_expert"]
    else:
        received["x"] = exchange.slabs("recv.x", wire, x.shape[1])
        received["scales"] = exchange.slabs("recv.scales", torch.float32, _blocks(x)) if wire_fp8 else None
        received["ids"] = exchange.slabs("recv.ids", torch.int32, K)
        received["weights"] = exchange.slabs("recv.weights", torch.float32, K)
    exchange.outputs[key] = fields, received
    return fields, received


def _blocks(x: Tensor) -> int:
    return -(-x.shape[1] // SCALE_BLOCK)


def _check_inputs(exchange: Exchange, x: Tensor, ids: Tensor, weights: Tensor, layout: str) -> None:
    model, capacity = exchange.config.model, exchange.config.capacity
    if exchange.open_round is not None:
        raise RuntimeError(
            f"round {exchange.open_round.epoch} is still open: call combine, or abort on all ranks, before dispatch"
        )
    if layout not in ("expert", "rank"):
        raise ValueError(f"`layout` must be 'expert' or 'rank', got {layout!r}")
    D, K, M = model.hidden_size, model.num_experts_per_tok, capacity.max_num_tokens_per_rank
    dtypes = [model.torch_dtype, *(d for d in FLOATS if d.itemsize < model.torch_dtype.itemsize)]
    check_tensor("x", x, dtypes, ("T", "D"), exchange.device)
    T, hidden = x.shape
    if hidden > D or hidden < 1 or hidden * x.dtype.itemsize % 16:
        raise ValueError(
            f"`x` must be {model.dtype} [T, {D}], or a smaller hidden size of whole 16 bytes, got {describe(x)}"
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
