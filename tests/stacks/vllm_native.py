"""Stand-ins in plain torch for the native operators of vLLM around its Triton kernels, for machines
without a GPU.

Import this before vLLM. Triton's kernels themselves run in Triton's interpreter.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then accepts Triton without a driver

import torch
from torch import Tensor

FP8_MAX = 448.0
# vLLM's workspace calls it, and it fails without an accelerator.
torch.accelerator.empty_cache = lambda: None


def moe_align_block_size(
    ids: Tensor,
    num_experts: int,
    block: int,
    sorted_ids: Tensor,
    experts: Tensor,
    total: Tensor,
    expert_map: Tensor | None = None,
    scatter: Tensor | None = None,
) -> None:
    """Pairs sorted by expert, each expert's segment filled up to whole blocks with the number of
    pairs. With an expert map the experts are local, and pairs of other ranks are left out.
    """
    flat = ids.flatten()
    place = 0
    if expert_map is not None:
        flat = expert_map[flat.long()]
    sorted_ids.fill_(flat.numel())
    experts.zero_()
    for expert in range(num_experts):
        (pairs,) = torch.where(flat == expert)
        blocks = -(-len(pairs) // block)
        sorted_ids[place : place + len(pairs)] = pairs.int()
        experts[place // block : place // block + blocks] = expert
        place += blocks * block
    total.fill_(place)


def moe_sum(
    rows: Tensor, output: Tensor, ids: Tensor | None = None, expert_map: Tensor | None = None
) -> None:
    if expert_map is not None:  # rows of pairs of other ranks are not to be read
        rows = torch.where((expert_map[ids.long()] >= 0)[..., None], rows, 0)
    output.copy_(rows.float().sum(1))


def silu_and_mul(output: Tensor, rows: Tensor) -> None:
    gate, up = rows.float().chunk(2, -1)
    output.copy_(torch.nn.functional.silu(gate) * up)


def silu_and_mul_per_block_quant(
    output: Tensor, rows: Tensor, scales: Tensor, group: int, bound: Tensor | None, transposed: bool
) -> None:
    gate, up = rows.float().chunk(2, -1)
    blocks = (torch.nn.functional.silu(gate) * up).unflatten(-1, (-1, group))
    scales.copy_(blocks.abs().amax(-1).clamp(min=1e-10) / FP8_MAX)
    output.copy_((blocks / scales[..., None]).flatten(-2).to(output.dtype))


def per_token_group_quant_fp8(
    rows: Tensor, group: int, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    """On GPUs vLLM has a native operator for it. Its Triton kernel gives wrong values in the
    interpreter, which casts 124.3 to 64 in fp8.
    """
    blocks = rows.float().unflatten(-1, (-1, group))
    scales = blocks.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
    return (blocks / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn), scales


def define(namespace: str, schema: str, function: object) -> None:
    """Defines `namespace::schema` unless a native library has done it already."""
    name = schema.partition("(")[0]
    if not hasattr(getattr(torch.ops, namespace), name):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema)
        library.impl(name, function, "CPU")
        LIBRARIES.append(library)


LIBRARIES: list[torch.library.Library] = []
define(
    "_moe_C",
    "moe_align_block_size(Tensor ids, int num_experts, int block, Tensor(a!) sorted_ids, "
    "Tensor(b!) experts, Tensor(c!) total, Tensor? expert_map=None, Tensor? scatter=None) -> ()",
    moe_align_block_size,
)
define(
    "_moe_C",
    "moe_sum(Tensor rows, Tensor(a!) output, Tensor? ids=None, Tensor? expert_map=None) -> ()",
    moe_sum,
)
define("_C", "silu_and_mul(Tensor(a!) output, Tensor rows) -> ()", silu_and_mul)
define(
    "_C",
    "silu_and_mul_per_block_quant(Tensor(a!) output, Tensor rows, Tensor(b!) scales, int group, "
    "Tensor? bound, bool transposed) -> ()",
    silu_and_mul_per_block_quant,
)
