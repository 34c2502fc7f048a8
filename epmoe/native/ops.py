"""The native operators: their schemas and fakes, and the library that implements them.

The schemas are here, and the implementations in ``csrc``. torch's dispatcher chooses that of the
tensors' device. A number that depends on the number of tokens is a SymInt, so that one compiled
graph serves any number of tokens. Operators that a compiler may see have a fake. The other
operators are called only within operators that are written in Python. The environment variable
``EPMOE_LIBRARY`` names a library to load in place of the built one.

Letters in comments: `T` tokens, `D` the hidden size, `N` expert-major rows, `E` logical and `e`
local experts, `K` experts per token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from epmoe.native import build
from epmoe.native.formats import WIRE_FORMATS

# The dtypes that kernels support, in the order of their numbers in csrc/types.h.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)

# `weighted_rows_backward_` on the CPU takes so many rows at once, since it has copies of them in
# fp32.
_ROWS_AT_ONCE = 4096

_library = torch.library.Library("epmoe", "DEF")
_library.define(
    "route(Tensor logits, int top_k, Tensor? bias, Tensor? num_tokens, SymInt num_rows, bool "
    "sigmoid, bool renormalize, float renormalize_epsilon, int num_expert_groups, int top_groups, "
    "int scores_per_group, float routed_scaling_factor, bool int64_ids, Tensor(a!)? counters) -> "
    "(Tensor ids, Tensor weights)"
)
# The gradients of the logits from those of the weights that route has returned for `ids`.
_library.define(
    "route_backward(Tensor grad_weights, Tensor logits, Tensor ids, Tensor weights, bool sigmoid, "
    "bool renormalize, float renormalize_epsilon, float routed_scaling_factor) -> Tensor"
)
# Copies rows of x [T, D] into the dtype of grad [T, E]. If a row of grad is all zeros, the row
# becomes zeros, whatever x holds there.
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
# Quantizes rows, with one scale for each `block` elements of a row; on GPUs `block` is 128 or 0.
# With a `block` of 0 there is one scale for all real rows.
_library.define(
    "quantize_fp8(Tensor x, Tensor? num_tokens, SymInt num_rows, int block) -> (Tensor q, Tensor "
    "scales)"
)
# These two read and write only rows of segments. Without tokens_per_expert the segments have no
# gaps. Scales are [blocks of a row, N], of which each row takes a multiple of 16 bytes. The scales
# of gated_activation are empty unless its outputs are quantized. Its tensor_scales, fp32 [e, 3], of
# each expert multiply gate and up before the bias is added, and the output.
_library.define(
    "gated_activation(Tensor gate_up, Tensor expert_offsets, Tensor? tokens_per_expert, Tensor? "
    "bias, bool interleaved, float limit, float alpha, float up_offset, bool quantize, Tensor? "
    "tensor_scales=None) -> (Tensor out, Tensor scales)"
)
_library.define(
    "scales_by_block(Tensor scales, Tensor expert_offsets, Tensor? tokens_per_expert) -> Tensor"
)
# On GPUs: converts weights [e, n, k] from MXFP4, which are codes [e, n, k/2] and scales [e, n,
# k/32], to bf16. Or from NVFP4 without its tensor scales, where scales are e4m3 [e, n, k/16].
_library.define("dequantize_mxfp4(Tensor codes, Tensor scales) -> Tensor")
# The whole experts stage on GPUs, for experts with few rows. Rows and weights are all fp8 with
# scales, or all bf16, or rows are bf16 and weights MXFP4 or NVFP4. NVFP4 has tensor_scales, fp32
# [e, 3]. The weights of an expert are read once for 8 · token_tiles rows. token_tiles is 1, 2 or 4
# with MXFP4 and NVFP4, and otherwise 1, 4 or 8. With 4 or 8 tiles, the sums of bf16 and fp8 have
# the same order as the GEMMs for many rows: `hopper_gemm` below for bf16, and DeepGEMM for fp8.
_EXPERTS = (
    "Tensor rows, Tensor? row_scales, Tensor gate_up, Tensor? gate_up_scales, Tensor? "
    "gate_up_bias, Tensor down, Tensor? down_scales, Tensor? down_bias, Tensor expert_offsets, "
    "Tensor? tokens_per_expert, bool interleaved, float limit, float alpha, float up_offset"
)
_library.define(f"few_rows({_EXPERTS}, int token_tiles, Tensor? tensor_scales=None) -> Tensor")
# The same stage in fp8 or bf16 as one kernel, on GPUs of compute capability 9.0. In fp8 it takes at
# most 512 experts, and its sums have the order of DeepGEMM. In bf16 it takes at most 224, and sums
# have the order of `hopper_gemm`. Weights in MXFP4 with rows in fp8 have another kernel for many
# rows, whose sums have another order.
_library.define(f"fused_experts({_EXPERTS}, bool many_rows=False) -> Tensor")
# Grouped GEMMs in bf16 on GPUs of compute capability 9.0. For each expert: rows [N, k] · weights
# [e, n, k]ᵀ → [N, n], and grad [N, n]ᵀ · rows [N, k] → [e, n, k]. `ends` has for each expert the
# first row behind its segment. The weights may be in MXFP4, or in NVFP4 without its tensor scales.
_library.define("hopper_gemm(Tensor rows, Tensor weights, Tensor ends) -> Tensor")
_library.define(
    "hopper_gemm_mxfp4(Tensor rows, Tensor codes, Tensor scales, Tensor ends) -> Tensor"
)
_library.define("hopper_gemm_weights(Tensor grad, Tensor rows, Tensor ends) -> Tensor")
# The experts stage of training by these GEMMs. `Gemm.train` and `Gemm.train_backward` describe it.
_GATING = "bool interleaved, float limit, float alpha, float up_offset"
_library.define(
    "hopper_experts(Tensor rows, Tensor w_gate_up, Tensor w_down, Tensor? bias, Tensor "
    f"expert_offsets, Tensor? tokens_per_expert, {_GATING}) -> (Tensor out, Tensor gate_up)"
)
# The same in one kernel, with the same bits.
_library.define(
    "fused_experts_of_training(Tensor rows, Tensor w_gate_up, Tensor w_down, Tensor? bias, Tensor "
    f"expert_offsets, Tensor? tokens_per_expert, {_GATING}) -> (Tensor out, Tensor gate_up)"
)
_library.define(
    "hopper_experts_backward(Tensor grad, Tensor? rows, Tensor gate_up, Tensor? row_weights, "
    f"Tensor? w_gate_up, Tensor w_down, Tensor expert_offsets, Tensor? tokens_per_expert, {_GATING}"
    ", bool needs_down) -> (Tensor grad_gate_up, Tensor grad_weights, Tensor, Tensor, Tensor)"
)
# On GPUs: x [T, k] · weight [n, k]ᵀ → [T, n]. The order of the sums is the same for any T.
_library.define("invariant_linear(Tensor x, Tensor weight) -> Tensor")
# For training: the gated activation, each row multiplied by its weight. It works on the rows of
# segments, and fills the rows of gaps with zeros.
_GATES = (
    "Tensor gate_up, Tensor? row_weights, Tensor expert_offsets, Tensor? tokens_per_expert, bool "
    "interleaved, float limit, float alpha, float up_offset"
)
_library.define(f"weighted_gates({_GATES}) -> Tensor")
# Its gradients: of gate_up and of row_weights. The third result is the output of weighted_gates if
# `outputs` is true, and otherwise an empty tensor [0, F], where F is the experts' inner size.
_library.define(
    f"weighted_gates_backward(Tensor grad, {_GATES}, bool outputs) -> (Tensor, Tensor, Tensor)"
)
# The gradients of rows multiplied by their weights. It overwrites `grad` with the gradient of the
# rows, and returns the gradient of the weights.
_library.define(
    "weighted_rows_backward_(Tensor(a!) grad, Tensor rows, Tensor? row_weights, Tensor "
    "expert_offsets, Tensor? tokens_per_expert) -> Tensor"
)
# Converts rows [T, D] to the format packed_fp8, [T, bytes of a row]; and back to [N, D] in the
# dtype of `like`.
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
# The dispatch of a round of training. It returns rows, expert_offsets, tokens_per_expert, row
# weights and the round's descriptor, all in new memory.
_library.define(
    "dispatch_to_caller(Tensor x, Tensor ids, Tensor weights, Tensor? num_tokens, SymInt num_real, "
    "Tensor(a!) window, Tensor(b!) scratch, Tensor prepared, Tensor? outputs, Tensor(c!)? "
    "products, SymInt num_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# On the CPU: words that ranks write into one another's windows. `post_word` stores a word at an
# offset in bytes, with release order. `read_words` loads words in ascending order, each with
# acquire order, and returns a new int64 [n].
_library.define("post_word(Tensor(a!) window, int offset, int value) -> ()")
_library.define("read_words(Tensor words) -> Tensor")
# On the CPU: the lobby, where ranks wait for a round to begin (epmoe/exchange/lobby.py). It is
# uint8, with a cache line of 64 bytes for a futex and one for each seat. A wait ends when the round
# begins, by a signal to the process, or after `longest_ns`.
_library.define("come(Tensor(a!) lobby, int seat, int value) -> ()")
_library.define("await_round(Tensor lobby, int round, int longest_ns) -> bool")
# For the exchange over several nodes (epmoe/rail/exchange.py): `rail_pack` makes a slab of rows for
# each node, and `rail_sum` adds the rows that the nodes send back.
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
# Only on GPUs (epmoe/rail/nccl.py): `rail_mark` shows the host how far transfers are, and
# `rail_tags` compares the tags of rows that have arrived.
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
# On the CPU: plans of where experts are (epmoe/live/balance.py). loads are float64 [layers, logical
# experts], and slots int32 [layers, physical experts].
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
# The layouts of structs of C++: epmoe/native/layouts.py reads them.
_library.define("layouts() -> str")
# Loads the CUDA kernels. Raises RuntimeError, with a text for users, if they cannot work here.
_library.define("load_cuda() -> ()")
# Only on GPUs (epmoe/native/streams.py): make_stream returns the handle of a new stream. end_stream
# destroys the stream if it has no work, and returns whether it has done so.
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
    quantize = rest[7]
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
    # It is written in torch and not in C++, so that its sums have the same order, and thus the same
    # bits, as those of a layer in torch.
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
    """Look an operator up by name. The first lookup loads the library, and builds it if necessary.

    The library is not loaded earlier, since configs, plans and `epmoe doctor` need neither the
    library nor a compiler. Raises AttributeError if there is no such operator, and BuildError if
    the library cannot be built.
    """
    operator = getattr(torch.ops.epmoe, name).default
    _load()
    # Python finds the name in the module from now on, and does not call this function for it again.
    globals()[name] = operator
    return operator


@cache
def _load() -> None:
    """Load the native library, once. Raises BuildError if it cannot be built or loaded."""
    path = build.ready() or build.build()
    problem = build.problem_with_torch(torch.__version__)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        # torch turns any exception during the load into an OSError, also one that a signal handler
        # has raised. Raise the original one.
        cause = error.__cause__
        if cause is not None and not isinstance(cause, OSError):
            raise cause from None
        # The cause has the message of the dynamic linker.
        reasons = [str(error.__cause__ or error), *([problem] if problem else [])]
        raise build.BuildError(f"the native library does not load: {'; '.join(reasons)}") from None
