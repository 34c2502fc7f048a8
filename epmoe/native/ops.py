"""The native operators: their schemas and fakes, and the library that implements them.

Schemas live here, implementations in ``csrc``; the dispatcher picks the device. A number that
follows T is a SymInt, so that one compiled graph serves every T. Operators that compilers see have
a fake; the others run within operators of Python. ``EPMOE_LIBRARY`` names a library to load in
place of the built one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from epmoe.native import build
from epmoe.native.formats import WIRE_FORMATS

# In the order of their numbers in csrc/types.h.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)

_ROWS_AT_ONCE = 4096  # whose products are in fp32

_library = torch.library.Library("epmoe", "DEF")
_library.define(
    "route(Tensor logits, int top_k, Tensor? bias, Tensor? num_tokens, SymInt num_rows, bool "
    "sigmoid, bool renormalize, float renormalize_epsilon, int num_expert_groups, int top_groups, "
    "int scores_per_group, float routed_scaling_factor, bool int64_ids, Tensor(a!)? counters) -> "
    "(Tensor ids, Tensor weights)"
)
# Of the weights that route has given for `ids`, the gradients of the logits.
_library.define(
    "route_backward(Tensor grad_weights, Tensor logits, Tensor ids, Tensor weights, bool sigmoid, "
    "bool renormalize, float renormalize_epsilon, float routed_scaling_factor) -> Tensor"
)
# Rows of x [T, D], in the dtype of grad [T, E], where a row of grad has anything but zeros; zeros
# elsewhere, where x may hold anything.
_library.define("reached_rows(Tensor x, Tensor grad) -> Tensor")
_library.define(
    "permute(Tensor x, Tensor ids, Tensor expert_map, int num_local_experts, Tensor? counts, int "
    "alignment, SymInt max_rows, Tensor(a!)? counters) -> (Tensor rows, Tensor expert_offsets, "
    "Tensor tokens_per_expert, Tensor row_of_pair)"
)
_library.define(
    "finalize(Tensor rows, Tensor row_of_pair, Tensor weights, Tensor? counts) -> Tensor"
)
_library.define("zero_padding_rows_(Tensor(a!) x, Tensor? num_tokens, SymInt num_rows) -> ()")
# A scale for each `block` elements of a row, on GPUs 128; 0: one for all real rows.
_library.define(
    "quantize_fp8(Tensor x, Tensor? num_tokens, SymInt num_rows, int block) -> (Tensor q, Tensor "
    "scales)"
)
# Only rows of segments are read and written; without tokens_per_expert these have no gaps. Scales
# lie block by block, [B, N] in rows of a multiple of 16 bytes. Those of gated_activation are empty
# unless the outputs are quantized.
_library.define(
    "gated_activation(Tensor gate_up, Tensor expert_offsets, Tensor? tokens_per_expert, Tensor? "
    "bias, bool interleaved, float limit, float alpha, float up_offset, bool quantize) -> (Tensor "
    "out, Tensor scales)"
)
_library.define(
    "scales_by_block(Tensor scales, Tensor expert_offsets, Tensor? tokens_per_expert) -> Tensor"
)
# On GPUs: weights [e, n, k] in MXFP4, codes [e, n, k/2] and scales [e, n, k/32], as bf16.
_library.define("dequantize_mxfp4(Tensor codes, Tensor scales) -> Tensor")
# The whole experts stage on GPUs, where experts have few rows: rows and weights all fp8 with
# scales, or all bf16; or bf16 rows and weights in MXFP4. Of an expert, 8 · token_tiles rows share a
# reading of its weights: 1, 2 or 4 tiles with MXFP4, else 1, 4 or 8. With 4 or 8, sums of bf16 and
# fp8 have the order of the GEMMs for many rows: that of bf16 below, or DeepGEMM.
_EXPERTS = (
    "Tensor rows, Tensor? row_scales, Tensor gate_up, Tensor? gate_up_scales, Tensor? "
    "gate_up_bias, Tensor down, Tensor? down_scales, Tensor? down_bias, Tensor expert_offsets, "
    "Tensor? tokens_per_expert, bool interleaved, float limit, float alpha, float up_offset"
)
_library.define(f"few_rows({_EXPERTS}, int token_tiles) -> Tensor")
# The same in fp8 on GPUs of compute capability 9.0, as one kernel, with sums in the order of
# DeepGEMM: for at most 1024 experts.
_library.define(f"fused_experts({_EXPERTS}) -> Tensor")
# Grouped GEMMs in bf16 on GPUs of compute capability 9.0, by expert: rows [N, k] · weights [e, n,
# k]ᵀ → [N, n], and grad [N, n]ᵀ · rows [N, k] → [e, n, k]. `ends` are the rows behind the segments.
# Weights may be in MXFP4.
_library.define("hopper_gemm(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
_library.define(
    "hopper_gemm_mxfp4(Tensor rows, Tensor codes, Tensor scales, Tensor ends) -> Tensor"
)
_library.define("hopper_gemm_weights(Tensor grad, Tensor rows, Tensor ends) -> Tensor")
# The experts of training by these GEMMs: what `Gemm.train` and `Gemm.train_backward` say.
_GATING = "bool interleaved, float limit, float alpha, float up_offset"
_library.define(
    "hopper_experts(Tensor rows, Tensor w_gate_up, Tensor w_down, Tensor? bias, Tensor "
    f"expert_offsets, Tensor? tokens_per_expert, {_GATING}) -> (Tensor out, Tensor gate_up)"
)
_library.define(
    "hopper_experts_backward(Tensor grad, Tensor? rows, Tensor gate_up, Tensor? row_weights, "
    f"Tensor? w_gate_up, Tensor w_down, Tensor expert_offsets, Tensor? tokens_per_expert, {_GATING}"
    ", bool needs_down) -> (Tensor grad_gate_up, Tensor grad_weights, Tensor, Tensor, Tensor)"
)
# On GPUs, x [T, k] · weight [n, k]ᵀ → [T, n], in one order of sums for any T.
_library.define("invariant_linear(Tensor x, Tensor weight) -> Tensor")
# For training: the gated activation times the weight of its row, in rows of segments. Gaps become
# zeros.
_GATES = (
    "Tensor gate_up, Tensor? row_weights, Tensor expert_offsets, Tensor? tokens_per_expert, bool "
    "interleaved, float limit, float alpha, float up_offset"
)
_library.define(f"weighted_gates({_GATES}) -> Tensor")
# Gradients of gate_up and of row_weights; and, where `outputs` are asked for, what weighted_gates
# returns, else [0, F].
_library.define(
    f"weighted_gates_backward(Tensor grad, {_GATES}, bool outputs) -> (Tensor, Tensor, Tensor)"
)
# Of rows times their weights, grad becomes the gradient of the rows, and that of the weights
# returns.
_library.define(
    "weighted_rows_backward_(Tensor(a!) grad, Tensor rows, Tensor? row_weights, Tensor "
    "expert_offsets, Tensor? tokens_per_expert) -> Tensor"
)
# Rows [T, D] in the format packed_fp8, [T, bytes of a row]; and back to [N, D], in the dtype of
# `like`.
_library.define("pack_fp8(Tensor x, Tensor? num_tokens, SymInt num_rows) -> Tensor")
_library.define("unpack_fp8(Tensor packed, Tensor like, Tensor expert_offsets) -> Tensor")
for _phase in ("", "_send", "_recv"):
    _library.define(
        f"dispatch{_phase}(Tensor x, Tensor ids, Tensor weights, Tensor? scales, Tensor? "
        "num_tokens, SymInt num_rows, Tensor(a!) window, Tensor(b!) scratch, Tensor descriptor) -> "
        "()"
    )
    _library.define(
        f"combine{_phase}(Tensor(c!) y, Tensor? rows, Tensor(a!) window, Tensor(b!) scratch, "
        "Tensor descriptor) -> ()"
    )
# A dispatch of training: rows, expert_offsets, tokens_per_expert, row weights and the round's
# descriptor, all new.
_library.define(
    "dispatch_to_caller(Tensor x, Tensor ids, Tensor weights, Tensor? num_tokens, SymInt num_real, "
    "Tensor(a!) window, Tensor(b!) scratch, Tensor prepared, Tensor? outputs, Tensor(c!)? "
    "products, SymInt num_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# On the CPU, words that ranks put into one another's windows: a post, at an offset in bytes, is a
# release; a read, in ascending order into a new int64 [n], is an acquire of each.
_library.define("post_word(Tensor(a!) window, int offset, int value) -> ()")
_library.define("read_words(Tensor words) -> Tensor")
# On the CPU, where ranks wait for a round to begin (epmoe/exchange/lobby.py): uint8, a cache line
# of 64 bytes for a futex and one for each seat. A wait ends by a signal, or after `longest_ns`.
_library.define("come(Tensor(a!) lobby, int seat, int value) -> ()")
_library.define("await_round(Tensor lobby, int round, int longest_ns) -> bool")
# Of the hierarchical exchange (epmoe/rail/exchange.py): slabs for each node, and the sum of what
# the nodes send back.
_library.define(
    "rail_pack(Tensor x, Tensor ids, Tensor weights, Tensor? scales, Tensor? num_tokens, SymInt "
    "num_rows, Tensor copies, Tensor num_copies, Tensor node_of, Tensor node_local, Tensor "
    "descriptor, SymInt slab_rows, int epoch, int tag, Tensor(a!) own, Tensor(b!) sent, Tensor(c!) "
    "slots_of, Tensor(d!) counts, Tensor(e!) needed, Tensor(f!) counters, Tensor(g!) rows_sent) -> "
    "()"
)
_library.define(
    "rail_sum(Tensor own, Tensor returned, Tensor slots_of, SymInt slab_rows, int node, Tensor? "
    "missed, Tensor(a!)? latched, Tensor(b!)? noticed, Tensor(c!) y) -> ()"
)
# CUDA only (epmoe/rail/nccl.py): what the host sees of transfers while the GPU runs ahead of it.
_library.define(
    "rail_mark(Tensor(a!) count, Tensor(b!) shown, Tensor(c!)? latched, Tensor(d!)? stop, bool "
    "ends, Tensor(e!)? sent, int slabs) -> ()"
)
_library.define(
    "rail_tags(Tensor received, SymInt slab_rows, Tensor descriptor, int hidden_size, int top_k, "
    "int dtype, int epoch, Tensor(a!) differing) -> ()"
)
_library.define(
    "launch_policy(Tensor plan, int tokens, int hidden_size, int top_k, int dtype, bool "
    "expert_major, bool send, bool receive, int multiprocessors, int major, int shared_bytes) -> "
    "Tensor"
)
_library.define("shared_bytes_needed(Tensor plan) -> int")
# Plans of placements (epmoe/live/balance.py), on the CPU: loads float64 [L, E], slots int32 [L, P].
_library.define("balance_shares(Tensor loads, Tensor slots, int ep_size) -> Tensor")
_library.define(
    "balance_plan(Tensor loads, Tensor slots, int ep_size, int max_moves, float goal, int "
    "most_copies) -> (Tensor slots, Tensor moves, Tensor balance)"
)
_library.define(
    "balance_fresh(Tensor loads, int ep_size, int slots_per_rank, int most_copies, int "
    "ranks_per_node) -> Tensor"
)
_library.define(
    "balance_quotas(Tensor loads, Tensor slots, int ep_size, int source, int width) -> Tensor"
)
_library.define("layouts() -> str")  # see epmoe/native/layouts.py
# Raises RuntimeError, with a sentence for users, if the other operators cannot work on GPUs here.
_library.define("load_cuda() -> ()")
# CUDA only (epmoe/native/streams.py): a stream by its handle, and whether it was idle and has gone.
_library.define("make_stream(int device, int priority) -> int")
_library.define("end_stream(int stream) -> bool")


@torch.library.register_fake("epmoe::route")
def _(logits: Tensor, top_k: int, *rest: object) -> tuple[Tensor, Tensor]:
    *_, int64_ids, _ = rest
    shape = (logits.shape[0], top_k)
    ids = logits.new_empty(shape, dtype=torch.int64 if int64_ids else torch.int32)
    return ids, logits.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("epmoe::route_backward")
def _(grad_weights: Tensor, logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("epmoe::reached_rows")
def _(x: Tensor, grad: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=grad.dtype)


@torch.library.register_fake("epmoe::permute")
def _(
    x: Tensor, ids: Tensor, expert_map: Tensor, num_local_experts: int, *rest: Any
) -> tuple[Tensor, ...]:
    _, _, max_rows, _ = rest
    shapes = (num_local_experts + 1,), (num_local_experts,), ids.shape
    return x.new_empty((max_rows, x.shape[1])), *(
        ids.new_empty(shape, dtype=torch.int32) for shape in shapes
    )


@torch.library.register_fake("epmoe::finalize")
def _(rows: Tensor, row_of_pair: Tensor, weights: Tensor, counts: Tensor | None) -> Tensor:
    return rows.new_empty((row_of_pair.shape[0], rows.shape[1]))


@torch.library.register_fake("epmoe::quantize_fp8")
def _(x: Tensor, num_tokens: Tensor | None, num_rows: int, block: int) -> tuple[Tensor, Tensor]:
    T, D = x.shape
    scales = (T, -(-D // block)) if block else (1,)
    return x.new_empty((T, D), dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


@torch.library.register_fake("epmoe::gated_activation")
def _(gate_up: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    quantize = rest[-1]
    N = gate_up.shape[0]
    F = gate_up.shape[1] // 2
    dtype = torch.float8_e4m3fn if quantize else gate_up.dtype
    scales = (WIRE_FORMATS["fp8"].num_scales(F), (N + 3) // 4 * 4 if quantize else 0)
    return gate_up.new_empty((N, F), dtype=dtype), gate_up.new_empty(scales, dtype=torch.float32)


@torch.library.register_fake("epmoe::few_rows")
@torch.library.register_fake("epmoe::fused_experts")
def _(rows: Tensor, *_: object) -> Tensor:
    return rows.new_empty(rows.shape, dtype=torch.bfloat16)


@torch.library.register_fake("epmoe::scales_by_block")
def _(scales: Tensor, expert_offsets: Tensor, tokens_per_expert: Tensor | None) -> Tensor:
    return scales.new_empty((scales.shape[1], (scales.shape[0] + 3) // 4 * 4))


@torch.library.impl(_library, "weighted_rows_backward_", "CPU")
def _(
    grad: Tensor,
    rows: Tensor,
    row_weights: Tensor | None,
    expert_offsets: Tensor,
    tokens: Tensor | None,
) -> Tensor:
    # In torch and not in C++: sums in torch's order have the bits of a layer of torch.
    by_weights = rows.new_empty(len(rows), dtype=torch.float32)
    places = torch.arange(min(int(expert_offsets[-1]), len(rows)))
    by_weights[: len(places)] = 0
    if tokens is not None:
        expert = torch.bucketize(places, expert_offsets[1:], right=True)
        places = places[places - expert_offsets[expert] < tokens[expert]]
    for part in places.split(_ROWS_AT_ONCE):
        by_rows = grad[part].float()
        factors = rows[part].float()
        by_weights[part] = (by_rows * factors).sum(1)
        if row_weights is not None:
            grad[part] = (by_rows * row_weights[part, None]).to(grad.dtype)
    return by_weights


@torch.library.register_fake("epmoe::zero_padding_rows_")
def _(*arguments: object) -> None:
    """It returns nothing."""


def __getattr__(name: str) -> torch._ops.OpOverload:
    """An operator. The first one loads the library: configs, plans and the doctor need neither it
    nor a compiler.

    Raises AttributeError if there is no such operator, and BuildError if the library does not
    build.
    """
    operator = getattr(torch.ops.epmoe, name).default
    _load()
    globals()[name] = operator  # what is found here is looked up without this function
    return operator


@cache
def _load() -> None:
    path = build.ready() or build.build()
    problem = build.problem_with_torch(torch.__version__)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # torch turns whatever is raised meanwhile into it, by a signal handler, too.
        cause = error.__cause__
        if cause is not None and not isinstance(cause, OSError):
            raise cause from None
        # The cause has the linker's words.
        reasons = [str(error.__cause__ or error), *([problem] if problem else [])]
        raise build.BuildError(f"the native library does not load: {'; '.join(reasons)}") from None
