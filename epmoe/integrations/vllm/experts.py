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
from epmoe.local.weight_formats import FP8_BLOCKS, MXFP4_GROUPS, product_dtype
from epmoe.native.arguments import FLOATS, FP8, MXFP4

GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
"""vLLM's activation "swigluoai", whose numbers stand in vLLM's kernels"""
_QUANTIZED = (
    (FP8, FP8_BLOCKS.scale),
    (torch.uint8, torch.uint8),  # MXFP4: vLLM has codes and scales as bytes
)
"""Dtypes of weights and of their scales that `GroupedExperts` take."""


def loaded(layer: RoutedExperts, quantized: bool, invariant: bool = False) -> GroupedExperts:
    """Make the experts of a layer in the memory in which vLLM has loaded them, before it lays them
    out for a kernel of its own. `quantized`: the method is not that of plain weights.

    Raises ConfigError for what `GroupedExperts` do not take.
    """
    w13 = _first_parameter(layer, "w13_weight")
    w2 = _first_parameter(layer, "w2_weight")
    w13_scales = _first_parameter(layer, "w13_weight_scale_inv", "w13_weight_scale")
    w2_scales = _first_parameter(layer, "w2_weight_scale_inv", "w2_weight_scale")
    problem = _problem(layer, w13, w13_scales, quantized)
    if problem:
        raise ConfigError(f'`epmoe` = "layer" does not take {problem}: choose "rank"')
    assert w13 is not None and w2 is not None
    # vLLM has MXFP4 as bytes.
    if w2.dtype == torch.uint8:
        w13 = w13.view(MXFP4)
        w2 = w2.view(MXFP4)
        w13_scales = _viewed(w13_scales, MXFP4_GROUPS.scale)
        w2_scales = _viewed(w2_scales, MXFP4_GROUPS.scale)
    options: dict[str, Any] = {
        "gate_up_scales": w13_scales,
        "down_scales": w2_scales,
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
    return experts.requires_grad_(False)


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
    layer: RoutedExperts, weight: Tensor | None, scale: Tensor | None, quantized: bool
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
        is_taken = (weight.dtype, scale_dtype) in _QUANTIZED
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
