"""The native operators: their schemas and fakes, and the library that implements them.

Schemas live here, implementations in ``csrc``; the dispatcher picks the device. ``EPMOE_LIBRARY`` names a library to
load in place of the built one.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from epmoe import build
from epmoe.memory import SCALE_BLOCK

_library = torch.library.Library("epmoe", "DEF")
_library.define(
    "route(Tensor logits, int top_k, Tensor? bias, Tensor? num_tokens, int num_rows, bool sigmoid, bool renormalize, "
    "int num_expert_groups, int top_groups, float routed_scaling_factor, bool int64_ids, Tensor(a!)? counters) "
    "-> (Tensor ids, Tensor weights)"
)
_library.define(
    "permute(Tensor x, Tensor ids, Tensor expert_map, int num_local_experts, Tensor? counts, int alignment, "
    "int max_rows, Tensor(a!)? counters) "
    "-> (Tensor rows, Tensor expert_offsets, Tensor tokens_per_expert, Tensor row_of_pair)"
)
_library.define("finalize(Tensor rows, Tensor row_of_pair, Tensor weights, Tensor? counts) -> Tensor")
_library.define("zero_padding_rows_(Tensor(a!) x, Tensor? num_tokens, int num_rows) -> ()")
_library.define(
    "quantize_fp8(Tensor x, Tensor? num_tokens, int num_rows, bool per_tensor) -> (Tensor q, Tensor scales)"
)
for _half in ("", "_send", "_recv"):
    _library.define(
        f"dispatch{_half}(Tensor x, Tensor ids, Tensor weights, Tensor? num_tokens, int num_rows, Tensor(a!) window, "
        "Tensor(b!) scratch, Tensor exchange) -> ()"
    )
    _library.define(
        f"combine{_half}(Tensor(c!) y, Tensor? rows, Tensor(a!) window, Tensor(b!) scratch, Tensor exchange) -> ()"
    )


@torch.library.register_fake("epmoe::route")
def _(logits, top_k, bias, num_tokens, num_rows, sigmoid, renormalize, groups, top_groups, scale, int64_ids, counters):
    shape = (logits.shape[0], top_k)
    ids = logits.new_empty(shape, dtype=torch.int64 if int64_ids else torch.int32)
    return ids, logits.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("epmoe::permute")
def _(x, ids, expert_map, num_local_experts, counts, alignment, max_rows, counters):
    def new_int32(*shape: int) -> Tensor:
        return ids.new_empty(shape, dtype=torch.int32)

    rows = x.new_empty((max_rows, x.shape[1]))
    return rows, new_int32(num_local_experts + 1), new_int32(num_local_experts), new_int32(*ids.shape)


@torch.library.register_fake("epmoe::finalize")
def _(rows, row_of_pair, weights, counts):
    return rows.new_empty((row_of_pair.shape[0], rows.shape[1]))


@torch.library.register_fake("epmoe::zero_padding_rows_")
def _(x, num_tokens, num_rows):
    return None


@torch.library.register_fake("epmoe::quantize_fp8")
def _(x, num_tokens, num_rows, per_tensor):
    T, D = x.shape
    scales = (1,) if per_tensor else (T, -(-D // SCALE_BLOCK))
    return x.new_empty((T, D), dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


@torch.library.register_fake("epmoe::dispatch")
@torch.library.register_fake("epmoe::dispatch_send")
@torch.library.register_fake("epmoe::dispatch_recv")
def _(x, ids, weights, num_tokens, num_rows, window, scratch, exchange):
    return None


@torch.library.register_fake("epmoe::combine")
@torch.library.register_fake("epmoe::combine_send")
@torch.library.register_fake("epmoe::combine_recv")
def _(y, rows, window, scratch, exchange):
    return None


_OPERATORS = (
    "route", "permute", "finalize", "zero_padding_rows_", "quantize_fp8",
    "dispatch", "dispatch_send", "dispatch_recv", "combine", "combine_send", "combine_recv",
)  # fmt: skip


def __getattr__(name: str) -> torch._ops.OpOverload:
    """An operator. The first loads the library: configs, plans and the doctor need neither it nor a compiler."""
    if name not in _OPERATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    globals().update({operator: getattr(torch.ops.epmoe, operator).default for operator in _OPERATORS})
    return globals()[name]


def _load() -> None:
    named = os.environ.get("EPMOE_LIBRARY")
    if named:
        path = Path(named)
    elif build.AHEAD_OF_TIME.exists():
        path = build.AHEAD_OF_TIME
    else:
        path = build.build()
    torch.ops.load_library(str(path))
