"""epmoe's `GroupedExperts` as the experts of vLLM's modular kernel, for the choice "layer".

They take the expert-major rows of the open round as they lie. Nothing sorts or permutes them again.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from epmoe.config.config_file import ConfigError
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
    """The experts of a layer as vLLM has loaded them, in the same memory, before it lays them out
    for a kernel of its own. `quantized`: the method is not that of plain weights.

    Raises ConfigError for what `GroupedExperts` do not take.
    """
    w13 = _part(layer, "w13_weight")
    w2 = _part(layer, "w2_weight")
    scales = [
        _part(layer, f"{name}_weight_scale_inv", f"{name}_weight_scale") for name in ("w13", "w2")
    ]
    problem = _problem(layer, w13, scales[0], quantized)
    if problem:
        raise ConfigError(f'`epmoe` = "layer" does not take {problem}: choose "rank"')
    assert w13 is not None and w2 is not None
    if w2.dtype == torch.uint8:
        w13 = w13.view(MXFP4)
        w2 = w2.view(MXFP4)
        scales = [None if scale is None else scale.view(MXFP4_GROUPS.scale) for scale in scales]
    options: dict[str, Any] = {
        "gate_up_scales": scales[0],
        "down_scales": scales[1],
        "gate_up_bias": _part(layer, "w13_bias"),
        "down_bias": _part(layer, "w2_bias"),
    }
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


def _part(layer: RoutedExperts, *names: str) -> Tensor | None:
    """The first parameter of these names."""
    for name in names:
        part = getattr(layer, name, None)
        if isinstance(part, Tensor):
            return part.data
    return None


def _problem(
    layer: RoutedExperts, weight: Tensor | None, scale: Tensor | None, quantized: bool
) -> str | None:
    """What `GroupedExperts` do not take of this layer; None: they take it.

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
    if quantized:
        taken = (weight.dtype, scale_dtype) in _QUANTIZED
    else:
        taken = weight.dtype in (FLOATS if weight.is_cpu else (torch.bfloat16,))
    return None if taken else f"{weight.dtype} weights with scales in {scale_dtype}"


class EpmoeExperts(mk.FusedMoEExpertsModular):
    """`GroupedExperts` over the open round of `exchange`, in place of vLLM's experts."""

    def __init__(
        self, moe: FusedMoEConfig, experts: GroupedExperts, exchange: EpmoePrepareAndFinalize
    ) -> None:
        # Scales, if any, are our experts' own.
        super().__init__(moe, FusedMoEQuantConfig.make())
        self.experts = experts
        self.exchange = exchange

    @property
    def expects_unquantized_inputs(self) -> bool:
        # Rows that do not travel in fp8 are quantized by the experts.
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def _never_selected(*_: Any) -> bool:  # by vLLM's oracle, which asks these
        return False

    _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = staticmethod(
        _never_selected
    )
    _supports_activation = _supports_parallel_config = staticmethod(_never_selected)

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
        self.exchange.compute(
            lambda round_: self.experts(
                hidden_states, round_.expert_offsets, a1q_scale, **round_.segments
            )
        )
