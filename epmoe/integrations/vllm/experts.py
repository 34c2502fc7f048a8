"""epmoe's `GroupedExperts` as the experts of vLLM's modular kernel, for the choice "layer".

They take the expert-major rows of the open round as they lie. Nothing sorts or permutes them again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from epmoe.config.config_file import ConfigError
from epmoe.integrations.served import ServedExperts
from epmoe.integrations.vllm.prepare_finalize import EpmoePrepareAndFinalize
from epmoe.local.experts import GroupedExperts
from epmoe.local.weight_formats import FP8_BLOCKS, MXFP4_GROUPS, NVFP4_GROUPS, product_dtype
from epmoe.native.arguments import FLOATS, FP8, MXFP4

GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
"""vLLM's activation "swigluoai", whose numbers stand in vLLM's kernels"""
_QUANTIZED = (
    (FP8, FP8_BLOCKS.scale, False),
    (torch.uint8, torch.uint8, False),  # MXFP4: vLLM has codes and scales as bytes
    (torch.uint8, NVFP4_GROUPS.scale, True),
)
"""Dtypes of weights and of their scales, and whether there are tensor scales, that `GroupedExperts`
take.
"""
_DIVISORS = ("w13_weight_global_scale", "w2_weight_global_scale")
"""Names of tensor scales in vLLM's layers of compressed-tensors, which divide."""


def loaded(layer: RoutedExperts, quantized: bool, invariant: bool = False) -> GroupedExperts:
    """Make the experts of a layer in the memory in which vLLM has loaded them, before it lays them
    out for a kernel of its own. `quantized`: the method is not that of plain weights.

    Raises ConfigError for what `GroupedExperts` do not take.
    """
    w13 = _first_parameter(layer, "w13_weight", "w13_weight_packed")
    w2 = _first_parameter(layer, "w2_weight", "w2_weight_packed")
    w13_scales = _first_parameter(layer, "w13_weight_scale_inv", "w13_weight_scale")
    w2_scales = _first_parameter(layer, "w2_weight_scale_inv", "w2_weight_scale")
    tensor_scales = _tensor_scales(layer)
    problem = _problem(layer, w13, w13_scales, tensor_scales is not None, quantized)
    if problem:
        raise ConfigError(f'`epmoe` = "layer" does not take {problem}: choose "rank"')
    assert w13 is not None and w2 is not None
    # vLLM has codes of four bits as bytes, and scales of MXFP4, too.
    if w2.dtype == torch.uint8:
        w13 = w13.view(MXFP4)
        w2 = w2.view(MXFP4)
        scale = MXFP4_GROUPS.scale if tensor_scales is None else NVFP4_GROUPS.scale
        w13_scales = _viewed(w13_scales, scale)
        w2_scales = _viewed(w2_scales, scale)
    options: dict[str, Any] = {
        "gate_up_scales": w13_scales,
        "down_scales": w2_scales,
        "tensor_scales": tensor_scales,
        "gate_up_bias": _first_parameter(layer, "w13_bias"),
        "down_bias": _first_parameter(layer, "w2_bias"),
    }
    # Biases come in the dtype of the products.
    for name in ("gate_up_bias", "down_bias"):
        if options[name] is not None:
            options[name] = options[name].to(product_dtype(w2))
    if layer.moe_config.activation is MoEActivation.SWIGLUOAI:
        options |= GPT_OSS
    try:
        experts = GroupedExperts(w13, w2, batch_invariant=invariant, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f'`epmoe` = "layer" does not take these experts: {error}') from error
    _rename_packed(layer)
    return experts.requires_grad_(False)


def refuse_loading_again(layer: RoutedExperts) -> None:
    """Raise ConfigError if vLLM cannot load the weights of a layer again into the memory of
    `loaded`. That has the reciprocals of the scales that compressed-tensors divides by.
    """
    if _first_parameter(layer, *_DIVISORS) is not None:
        raise ConfigError(
            '`epmoe` = "layer" cannot load weights in NVFP4 of compressed-tensors again: choose '
            '"rank"'
        )


def _tensor_scales(layer: RoutedExperts) -> Tensor | None:
    """The tensor scales of gate, up and down, fp32 [e, 3], of a layer in NVFP4; None of others.

    Those of modelopt become views of the result: vLLM may load them again.
    """
    names = ("w13_weight_scale_2", "w2_weight_scale_2")
    divides = _first_parameter(layer, _DIVISORS[0]) is not None
    w13, w2 = (_first_parameter(layer, name) for name in (_DIVISORS if divides else names))
    if w13 is None or w2 is None:
        return None
    scales = torch.cat([w13, w2[:, None]], 1)
    if divides:
        return scales.reciprocal()
    layer.w13_weight_scale_2.data = scales[:, :2]
    layer.w2_weight_scale_2.data = scales[:, 2]
    return scales


def _rename_packed(layer: RoutedExperts) -> None:
    """Give weights of compressed-tensors the names by which vLLM hands them to any kernel."""
    for part in ("w13", "w2"):
        packed = getattr(layer, f"{part}_weight_packed", None)
        if isinstance(packed, Tensor):
            delattr(layer, f"{part}_weight_packed")
            setattr(layer, f"{part}_weight", packed)


def _first_parameter(layer: RoutedExperts, *names: str) -> Tensor | None:
    """The first parameter of these names."""
    for name in names:
        parameter = getattr(layer, name, None)
        if isinstance(parameter, Tensor):
            return parameter.data
    return None


def _viewed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.view(dtype)


def _problem(
    layer: RoutedExperts,
    weight: Tensor | None,
    scale: Tensor | None,
    has_tensor_scales: bool,
    quantized: bool,
) -> str | None:
    """Say what `GroupedExperts` do not take of this layer; None: they take it.

    Scales of another granularity have another shape, which `GroupedExperts` refuse.
    """
    activation = layer.moe_config.activation
    if activation not in (MoEActivation.SILU, MoEActivation.SWIGLUOAI):
        return f"the activation {activation.value}"
    constants = (f"swiglu_{name}" for name in ("limit", "alpha", "beta"))
    if any(getattr(layer, name, None) is not None for name in constants):
        return "SwiGLU with a limit, an alpha or a beta of its own"
    if weight is None:
        return "experts without weights of their own"
    scale_dtype = getattr(scale, "dtype", None)
    # vLLM's own layers of plain weights serve in bf16 on GPUs.
    if quantized:
        is_taken = (weight.dtype, scale_dtype, has_tensor_scales) in _QUANTIZED
    elif weight.is_cpu:
        is_taken = weight.dtype in FLOATS
    else:
        is_taken = weight.dtype == torch.bfloat16
    return None if is_taken else f"{weight.dtype} weights with scales in {scale_dtype}"


class EpmoeExperts(mk.FusedMoEExpertsModular):
    """Runs `GroupedExperts` over the open round of `exchange`, in place of vLLM's experts."""

    def __init__(
        self, moe: FusedMoEConfig, experts: GroupedExperts, exchange: EpmoePrepareAndFinalize
    ) -> None:
        # Scales, if any, are our experts' own.
        super().__init__(moe, FusedMoEQuantConfig.make())
        self.experts = experts
        self.exchange = exchange
        self._serve = ServedExperts(experts)

    @property
    def expects_unquantized_inputs(self) -> bool:
        # Rows that do not travel in fp8 are quantized by the experts.
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def _never_selected(*_: Any) -> bool:
        return False

    # vLLM's oracle asks these before it chooses experts: it never chooses these.
    _supports_current_device = staticmethod(_never_selected)
    _supports_no_act_and_mul = staticmethod(_never_selected)
    _supports_quant_scheme = staticmethod(_never_selected)
    _supports_activation = staticmethod(_never_selected)
    _supports_parallel_config = staticmethod(_never_selected)

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        """No workspaces, and no outputs: `finalize` takes them from the exchange. vLLM cannot make
        an empty workspace, if it has made no other before.
        """
        return (1,), (0,), (0, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """None: combine does it."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self, output: Tensor, hidden_states: Tensor, *_: Any, a1q_scale: Tensor | None, **__: Any
    ) -> None:
        """The rows of the open round → outputs [N, D], for finalize; `output` is empty."""
        self.exchange.compute(partial(self._serve, hidden_states, a1q_scale))
