"""Reads transformers' experts in fp8 (`FP8Experts`): whether epmoe takes them, their gate, and
their scales.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epmoe.local.gemm.gemm import Gating
from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native.arguments import FLOATS, FP8, dtype_name

PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv")
SILU = ("SiLU", "SiLUActivation")
_BLOCK = FP8_BLOCKS.block


def is_quantized(experts: Any) -> bool:
    """Whether transformers has quantized the module to fp8 or fp4: its weights have scales."""
    return hasattr(experts, "down_proj_scale_inv") and experts.down_proj.dtype not in FLOATS


def check(experts: Any) -> None:
    """Raise ValueError unless epmoe takes the quantized module `experts`. The message names the
    property that epmoe does not take.
    """
    problem = _problem(experts)
    if problem:
        raise ValueError(
            f"epmoe takes fp8 experts with scales of blocks of {_BLOCK[0]} × {_BLOCK[1]} or of "
            "whole weights, "
            f"dynamic activation scales and SwiGLU, but these have {problem}: load the checkpoint "
            "with "
            "`FineGrainedFP8Config(dequantize=True)`, or "
            'without epmoe, as by `ep_implementation="all_to_all"`'
        )


def gating(experts: Any) -> Gating:
    """The parameters of the SwiGLU of a quantized module, which `check` has accepted."""
    limit = experts.swiglu_limit
    if limit is None:
        limit = math.inf
    # A module with an alpha has the activation of gpt-oss, which adds 1 to the up projection.
    if experts.swiglu_alpha is None:
        return Gating(interleaved=False, limit=limit, alpha=1.0, up_offset=0.0)
    return Gating(interleaved=False, limit=limit, alpha=experts.swiglu_alpha, up_offset=1.0)


def by_block(scales: Tensor, weight: Tensor) -> Tensor:
    """Return one fp32 scale for each block of `weight` [e, n, k], as [e, a, b]: the shape that
    epmoe's GEMMs take.

    fp32 scales of blocks are returned as they are. Scales in another dtype (powers of two) are
    converted. Scales of whole weights are repeated for each block: [e, 2, 1] has one scale for gate
    and one for up, [e, 1, 1] has one scale for down.
    """
    shape = _block_scales_shape(weight)
    values = scales.detach().float()
    if list(values.shape) == shape:
        return values
    # Repeat the scale of a whole weight for each of its blocks.
    rows = values.repeat_interleave(shape[1] // values.shape[1], 1)
    return rows.expand(*shape).contiguous()


def _block_scales_shape(weight: Tensor) -> list[int]:
    """The shape of the scales of all blocks of `weight` [e, n, k]."""
    return list(FP8_BLOCKS.scales_shape(*weight.shape))


def _problem(experts: Any) -> str | None:
    """Name the property of a quantized module that epmoe does not take, or return None if epmoe
    takes the module.
    """
    weights = experts.down_proj
    block = experts.block_size
    F = weights.shape[-1]
    scales = experts.down_proj_scale_inv.dtype
    # Check dtypes and blocks.
    if experts.activation_scheme != "dynamic":
        return f"activation scales of the kind {experts.activation_scheme!r}"
    if weights.dtype != FP8:
        return f"weights in {dtype_name(weights.dtype)}"
    if block is not None and tuple(block) != _BLOCK:
        return f"blocks of {' × '.join(map(str, block))}"
    if scales not in (torch.float32, torch.float8_e8m0fnu):
        return f"scales in {dtype_name(scales)}"
    # Check the function that the experts compute.
    if not experts.has_gate:
        return "no gate"
    if experts.has_bias:
        return "biases"
    if getattr(experts, "has_post_expert_norm", False):
        return "a norm behind each expert"
    if getattr(experts, "gate_softcap", None) is not None:
        return "a soft cap on the gate"
    if experts.swiglu_alpha is None and type(experts.act_fn).__name__ not in SILU:
        return f"the activation {type(experts.act_fn).__name__}"
    # Check shapes. A block must not have rows of both gate and up, which have different scales.
    if block is None and F % _BLOCK[0]:
        return f"F={F} and one scale for each of gate and up, whose rows share a block"
    up = experts.gate_up_proj
    down = weights
    if block is None:
        wanted = [[len(up), 2, 1], [len(down), 1, 1]]
    else:
        wanted = [_block_scales_shape(up), _block_scales_shape(down)]
    got = [list(experts.gate_up_proj_scale_inv.shape), list(experts.down_proj_scale_inv.shape)]
    return None if got == wanted else f"scales of {got} in place of {wanted}"
