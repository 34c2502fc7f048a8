"""A module's experts as `GroupedExperts` in the memory of its parameters: SwiGLU, with plain or fp8 weights.

    gate_up_proj, down_proj, fp8: their scales ─▶ GroupedExperts ◀─ rows of a round

Only scales that are powers of two (`scale_fmt="ue8m0"`) or of whole weights are copied, in each call: they become fp32,
one for each block of 128 × 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from epmoe.integrations.transformers import fp8
from epmoe.local.experts import GroupedExperts
from epmoe.native.arguments import FLOATS

_ARGUMENTS = ("w_gate_up", "w_down", "gate_up_scales", "down_scales")  # of `GroupedExperts`, in this order


class _Made(NamedTuple):
    layout: list[object]
    """Dtypes, devices, shapes and strides of the module's parameters."""
    experts: GroupedExperts


_made: WeakKeyDictionary[Any, _Made] = WeakKeyDictionary()  # by module


def takes(experts: Any) -> bool:
    """Whether `GroupedExperts` compute what the module does. A quantized module that they do not take is an error.

    Not in training mode: reentrant checkpointing runs calls without gradients, which need the bits of those with them.
    """
    if fp8.is_quantized(experts):
        return True
    return (
        not (experts.training or experts.has_bias or experts.is_transposed)
        and experts.has_gate
        and getattr(experts._apply_gate, "__func__", None) is moe._default_apply_gate
        and type(experts.act_fn).__name__ in fp8.SILU
        and not getattr(experts, "has_post_expert_norm", False)
        and experts.down_proj.dtype in FLOATS
    )


def grouped(experts: Any, parameters: list[Tensor]) -> GroupedExperts:
    """The experts of a module that `takes` is true for, in the memory of `parameters`; valid until the next call.

    They are this rank's part: [e, 2F, D] and [e, D, F], and their scales with fp8. They may move from call to call, as
    FSDP moves them. Raises ValueError for a quantized module that `GroupedExperts` do not take.
    """
    layout: list[object] = [(p.dtype, p.device, p.shape, p.stride()) for p in parameters]
    if experts not in _made or _made[experts].layout != layout:
        _made[experts] = _Made(layout, _new(experts, parameters))
    made = _made[experts].experts
    for name, given in zip(_ARGUMENTS, parameters, strict=False):
        ours = getattr(made, name)
        if ours.dtype != given.dtype or ours.shape != given.shape:
            ours.copy_(fp8.of_blocks(given, ours.shape))
        elif ours.data_ptr() != given.data_ptr():
            setattr(made, name, nn.Parameter(given.detach(), requires_grad=False))
    return made


def release() -> None:
    _made.clear()


def _new(experts: Any, parameters: list[Tensor]) -> GroupedExperts:
    if quantized := fp8.is_quantized(experts):
        fp8.check(experts)
    detached = [parameter.detach() for parameter in parameters]
    with torch.inference_mode(False):  # otherwise calls outside inference mode could not write copies of scales
        options = fp8.options(experts, *detached) if quantized else {}
        return GroupedExperts(*detached[:2], **options).requires_grad_(False)
