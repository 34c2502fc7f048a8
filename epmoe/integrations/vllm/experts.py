"""epmoe's `GroupedExperts` as the experts of vLLM's modular kernel, for the choice "layer".

They take the expert-major rows of the open round as they lie. Nothing sorts or permutes them again.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from epmoe.config.config_file import ConfigError
from epmoe.integrations.vllm.prepare_finalize import EpmoePrepareAndFinalize
from epmoe.local.experts import GroupedExperts
from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native.arguments import FLOATS, FP8

GPT_OSS = {"interleaved": True, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
"""vLLM's activation "swigluoai", whose numbers stand in vLLM's kernels"""
_PLAIN = ("TritonExperts", "DeepGemmExperts", "TritonOrDeepGemmExperts")  # which leave weights as loaded
_PACKING = "CPUUnquantizedExperts"  # and its subclasses pack the weights; `layer.py` has those that were loaded


def grouped(of: mk.FusedMoEExperts, w13: Tensor | None, w2: Tensor | None) -> GroupedExperts:
    """The experts w13 [e, 2F, D] and w2 [e, D, F] of vLLM's layer, in the same memory. None: it has others.

    Raises ConfigError for what `GroupedExperts` do not take.
    """
    quant, activation = of.quant_config, of.moe_config.activation
    if problem := _problem(of, None if w2 is None else w2.dtype):
        raise ConfigError(f'`epmoe` = "layer" does not take {problem}: choose "rank"')
    assert w13 is not None and w2 is not None
    options: dict[str, Any] = {}
    if w2.dtype == FP8:
        options |= {"gate_up_scales": quant.w1_scale, "down_scales": quant.w2_scale}
    if activation is MoEActivation.SWIGLUOAI:
        options |= GPT_OSS
    for name, bias in (("gate_up_bias", quant.w1_bias), ("down_bias", quant.w2_bias)):
        if bias is not None:
            options[name] = bias.detach().to(torch.bfloat16 if w2.dtype == FP8 else w2.dtype)
    return GroupedExperts(w13, w2, **options).requires_grad_(False)


def _problem(of: mk.FusedMoEExperts, dtype: torch.dtype | None) -> str | None:
    quant, config = of.quant_config, of.moe_config
    on_cpu = any(base.__name__ == _PACKING for base in type(of).__mro__)
    if dtype is None or type(of).__name__ not in _PLAIN and not on_cpu:
        return f"weights in the layout of {type(of).__name__}"
    if config.activation not in (MoEActivation.SILU, MoEActivation.SWIGLUOAI):
        return f"the activation {config.activation.value}"
    limits = (getattr(quant, name, None) for name in ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta"))
    if any(limit is not None for limit in limits):
        return "SwiGLU with a limit, an alpha or a beta of its own"
    if config.is_lora_enabled:
        return "LoRA"
    if dtype in (FLOATS if on_cpu else (torch.bfloat16,)) and quant.quant_dtype is None:
        return None
    scales = {getattr(scale, "dtype", None) for scale in (quant.w1_scale, quant.w2_scale)}
    if dtype == FP8 and tuple(quant.block_shape or ()) == FP8_BLOCKS.block and scales == {FP8_BLOCKS.scale}:
        return None  # also with scales that vLLM has made powers of two, for its DeepGEMM
    return f"{dtype} weights in blocks of {quant.block_shape} with scales in {', '.join(map(str, scales))}"


class EpmoeExperts(mk.FusedMoEExpertsModular):
    """`GroupedExperts` over the open round of `exchange`. They take the place of vLLM's experts `of`."""

    def __init__(self, of: mk.FusedMoEExperts, experts: GroupedExperts, exchange: EpmoePrepareAndFinalize) -> None:
        super().__init__(of.moe_config, of.quant_config)
        self.experts, self.exchange = experts, exchange

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # rows that do not travel in fp8 are quantized by the experts

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def _never_selected(*_: Any) -> bool:  # by vLLM's oracle, which asks these
        return False

    _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = staticmethod(_never_selected)
    _supports_activation = _supports_parallel_config = staticmethod(_never_selected)

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> tuple[tuple[int, ...], ...]:
        """No workspaces, and no outputs: `finalize` takes them from the exchange. vLLM cannot make an empty workspace,
        if it has made no other before."""
        return (1,), (0,), (0, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        """None: combine does it."""
        return TopKWeightAndReduceNoOP()

    def apply(self, output: Tensor, hidden_states: Tensor, *_: Any, a1q_scale: Tensor | None, **__: Any) -> None:
        """The rows of the open round → outputs [N, D], for finalize; `output` is empty."""
        self.exchange.compute(
            lambda round_: self.experts(hidden_states, round_.expert_offsets, a1q_scale, **round_.segments)
        )
