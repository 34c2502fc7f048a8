"""vLLM's real FusedMoEKernel and TritonExperts, on one rank by itself and on several through epmoe
or all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEExpertsModular,
    FusedMoEKernel,
    FusedMoEPrepareAndFinalizeModular,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)

from epmoe.integrations.vllm.experts import EpmoeExperts
from epmoe.integrations.vllm.prepare_finalize import EpmoePrepareAndFinalize
from epmoe.local.experts import GroupedExperts
from epmoe.local.quantize import quantize_weights

BLOCK = 128
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Model:
    """Shapes of a layer: E experts, K of them for a token, rows of D, F inside an expert."""

    E: int
    K: int
    D: int
    F: int


@dataclass(frozen=True)
class Weights:
    """w1 [e, 2·F, D] and w2 [e, D, F], in bf16 or block-scaled fp8."""

    w1: Tensor
    w2: Tensor
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None

    @classmethod
    def random(cls, model: Model, fp8: bool, device: torch.device) -> Weights:
        """The same on every rank. Expert by expert, since a model's experts fit once only."""
        generator = torch.Generator(device).manual_seed(3)
        shapes = (2 * model.F, model.D), (model.D, model.F)
        weights = [
            torch.empty(model.E, *nk, dtype=FP8 if fp8 else torch.bfloat16, device=device)
            for nk in shapes
        ]
        scales = [torch.empty(model.E, n // BLOCK, k // BLOCK, device=device) for n, k in shapes]
        for expert in range(model.E):
            for w, s in zip(weights, scales, strict=True):
                drawn = (
                    torch.randn(w.shape[1:], generator=generator, device=device)
                    * w.shape[-1] ** -0.5
                )
                if fp8:
                    w[expert], scale = quantize_weights(drawn)
                    # Blocks that differ, so that the scale of none passes for another's.
                    s[expert] = scale * (
                        0.5 + torch.rand(scale.shape, generator=generator, device=device)
                    )
                else:
                    w[expert] = drawn
        return cls(*weights, *(scales if fp8 else ()))

    def of_rank(self, rank: int, size: int) -> Weights:
        """The experts of one rank: a block of them in order."""
        mine = slice(rank * len(self.w1) // size, (rank + 1) * len(self.w1) // size)
        fields = (self.w1, self.w2, self.w1_scale, self.w2_scale)
        return Weights(*(None if field is None else field[mine].contiguous() for field in fields))

    def quant_config(self) -> FusedMoEQuantConfig:
        if self.w1_scale is None:
            return FUSED_MOE_UNQUANTIZED_CONFIG
        return fp8_w8a8_moe_quant_config(self.w1_scale, self.w2_scale, block_shape=[BLOCK, BLOCK])


def moe_config(
    model: Model, rank: int, size: int, max_tokens: int, device: torch.device
) -> FusedMoEConfig:
    parallel = replace(
        FusedMoEParallelConfig.make_no_parallel(),
        dp_size=size,
        dp_rank=rank,
        ep_size=size,
        ep_rank=rank,
        use_ep=size > 1,
    )
    return FusedMoEConfig(
        num_experts=model.E,
        experts_per_token=model.K,
        hidden_dim=model.D,
        intermediate_size=model.F,
        num_local_experts=model.E // size,
        num_logical_experts=model.E,
        activation=MoEActivation.SILU,
        device=device,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=max_tokens,
    )


class Layer:
    """One MoE layer of vLLM's on one rank: `exchange` around its own Triton experts, or around
    `GroupedExperts` where the layout is "layer"; None for one rank by itself.

    `slack` is for `check_close` with what others compute: `GroupedExperts` round otherwise between
    the two GEMMs.
    """

    def __init__(
        self,
        config: FusedMoEConfig,
        weights: Weights,
        exchange: FusedMoEPrepareAndFinalizeModular | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.slack = 1
        self.gemm = "triton"
        # vLLM's own experts, or ours where the layout is that of a layer.
        experts: FusedMoEExpertsModular = TritonExperts(config, weights.quant_config())
        if isinstance(exchange, EpmoePrepareAndFinalize) and exchange.layout == "layer":
            scales = {"gate_up_scales": weights.w1_scale, "down_scales": weights.w2_scale}
            ours = GroupedExperts(weights.w1, weights.w2, **scales).requires_grad_(False)
            self.slack = 8 if ours.is_fp8 else 2
            self.gemm = ours.gemm
            experts = EpmoeExperts(config, ours, exchange)
        self.kernel = FusedMoEKernel(exchange or MoEPrepareAndFinalizeNoDPEPModular(), experts)
        # Numbers of this rank's experts, and −1 of those that are elsewhere.
        self.expert_map = None
        if config.ep_size > 1:
            e = config.num_local_experts
            local = (
                torch.arange(config.num_experts, dtype=torch.int32)
                - e * config.moe_parallel_config.ep_rank
            )
            self.expert_map = (
                torch.where((local >= 0) & (local < e), local, -1).int().to(weights.w1.device)
            )

    def __call__(
        self, x: Tensor, ids: Tensor, routing_weights: Tensor, on_input: bool = False
    ) -> Tensor:
        return self.kernel.apply(
            hidden_states=x,
            w1=self.weights.w1,
            w2=self.weights.w2,
            topk_weights=routing_weights,
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=self.config.num_experts,
            expert_map=self.expert_map,
            apply_router_weight_on_input=on_input,
        )


def batch(
    model: Model, num_tokens: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x bf16 [T, D], ids int32 and weights fp32 [T, K]."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(num_tokens, model.D, generator=generator, device=device).bfloat16()
    scores = torch.rand(num_tokens, model.E, generator=generator, device=device).softmax(-1)
    weights, ids = scores.topk(model.K)
    return x, ids.int(), weights / weights.sum(-1, keepdim=True)


@contextmanager
def step(tokens: list[int], ranks_per_batch: int = 1) -> Iterator[None]:
    """What vLLM's runner sets up for one step of so many tokens on each replica, as far as the
    exchange looks at it.
    """
    metadata = DPMetadata(torch.tensor(tokens, dtype=torch.int32))
    context = ForwardContext(
        no_compile_layers={}, attn_metadata={}, slot_mapping={}, dp_metadata=metadata
    )
    with override_forward_context(context), metadata.sp_local_sizes(ranks_per_batch):
        yield


def plain(
    weights: Weights, x: Tensor, ids: Tensor, routing_weights: Tensor, on_input: bool
) -> Tensor:
    """y bf16 [T, D] in fp32 arithmetic. Triton's interpreter has none for bf16, so its figures
    compare with themselves only.
    """

    def whole(w: Tensor, scales: Tensor | None) -> Tensor:
        if scales is None:
            return w.float()
        each = scales.repeat_interleave(BLOCK, 1)[:, : w.shape[1]].repeat_interleave(BLOCK, 2)[
            :, :, : w.shape[2]
        ]
        return w.float() * each

    # The weights in fp32, and then one token after the other.
    w1 = whole(weights.w1, weights.w1_scale)
    w2 = whole(weights.w2, weights.w2_scale)
    y = torch.zeros(x.shape, device=x.device)
    for t, row in enumerate(x.float()):
        for expert, weight in zip(ids[t].tolist(), routing_weights[t].float(), strict=True):
            given, factor = (row * weight, 1.0) if on_input else (row, weight)
            gate, up = (w1[expert] @ given).chunk(2)
            y[t] += factor * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return y.bfloat16()


def check_close(got: Tensor, expected: Tensor, what: str, slack: float = 1) -> None:
    """Equal within `slack` times bf16 rounding: each rank's part of a sum, and the sum, are rounded
    once.
    """
    assert got.dtype == expected.dtype == torch.bfloat16 and got.shape == expected.shape, what
    if len(got):
        bound = 2**-7 * (expected.float().abs() + expected.float().abs().amax(-1, keepdim=True))
        worst = ((got.float() - expected.float()).abs() / bound).max().item()
        assert worst <= slack, f"{what}: off by {worst:.2f} times what bf16 allows"
