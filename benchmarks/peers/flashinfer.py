"""FlashInfer: the one-sided exchange over NVLink, and layers for Hopper in bf16 (cake) and in fp8
(push and pull).

The calls are those of flashinfer-python 0.7.2.post1. Route is ours. A further kernel of a layer is
one more function here, and its `Layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.layer_sides import WholeLayer
from epmoe.bench.peers import LeftOut, Peer
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import ExchangeSide, slabs
from epmoe.local.quantize import dequantize_rows, quantize_fp8
from epmoe.local.weight_formats import dequantize_weights


def bootstrap(group: dist.ProcessGroup) -> Any:
    from flashinfer.moe_ep import BootstrapConfig

    device = torch.cuda.current_device()
    return BootstrapConfig(group.size(), group.rank(), process_group=group, device=device)


class OneSided(ExchangeSide):
    """Rank-major rows; experts write into its workspace. fp8 rows and their scales are there before
    the timing.
    """

    def __init__(self, communication: Any, sample: Sample, payload: Payload) -> None:
        super().__init__("FlashInfer", sample)
        self.communication = communication
        self.fp8 = payload is not Payload.PLAIN
        self.sent, self.scales = quantize_fp8(sample.x_TD) if self.fp8 else (sample.x_TD, None)

    def out(self) -> Any:
        return self.communication.dispatch(
            self.sent,
            self.sample.ids_TK,
            self.sample.weights_TK,
            hidden_states_scale=self.scales,
            max_tokens_per_rank=self.sample.tokens,
        )

    def back(self, handle: Any) -> Tensor:
        return self.communication.combine(
            self.communication.get_combine_input_buffer(self.sample.dtype)
        )

    def outputs(self, handle: Any) -> Tensor:
        rows = handle.hidden_states
        if self.fp8:
            rows = dequantize_rows(rows, handle.hidden_states_scale, self.sample.dtype)
        return self.communication.get_combine_input_buffer(self.sample.dtype).copy_(rows)

    def arrived(self, handle: Any) -> list[Tensor]:
        ranks = self.communication.ep_size
        return slabs(
            self.sample, handle.hidden_states.unflatten(0, (ranks, handle.tokens_per_rank))
        )


class FlashInfer(Peer):
    install = "flashinfer-python"

    def version(self) -> str:
        import flashinfer
        import flashinfer.moe_ep

        return flashinfer.__version__


class Exchange(FlashInfer):
    name = "FlashInfer"

    @contextmanager
    def exchange(
        self, sample: Sample, payload: Payload, group: dist.ProcessGroup
    ) -> Iterator[ExchangeSide]:
        from flashinfer.moe_ep import MoEEpCommParams, NVLinkOneSidedConfig, create_communication

        if payload is Payload.FP8_BOTH:
            raise LeftOut("fp8 on the way back changes the outputs that lie in its workspace")
        model = sample.config.model
        parameters = MoEEpCommParams(
            num_experts=model.num_experts,
            top_k=model.num_experts_per_tok,
            max_tokens_per_rank=sample.config.capacity.max_num_tokens_per_rank,
            hidden_size=model.hidden_size,
            dtype=sample.dtype,
        )
        communication = create_communication(bootstrap(group), parameters, NVLinkOneSidedConfig())
        yield OneSided(communication, sample, payload)
        communication.destroy()


class Layer(FlashInfer):
    """One kernel. `make` returns its backend and the weights that the layer is given."""

    def __init__(
        self, name: str, fp8: bool, make: Callable[[WholeLayer, dict[str, Any]], tuple[Any, Any]]
    ) -> None:
        self.name = name
        self.fp8 = fp8
        self.make = make

    @contextmanager
    def layer(self, case: WholeLayer) -> Iterator[Callable[[], Tensor]]:
        from flashinfer import moe_ep

        if case.experts.is_fp8 != self.fp8:
            raise LeftOut(f"it takes {'fp8' if self.fp8 else 'bf16'} weights")
        if case.experts.dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] != 9:
            raise LeftOut("it takes bf16 rows on Hopper")
        model = case.ep.config.model
        shape = {"intermediate_size": model.intermediate_size, "top_k": model.num_experts_per_tok}
        backend, weights = self.make(case, shape)
        sizes = moe_ep.FleetParams(
            num_experts=model.num_experts,
            max_tokens_per_rank=len(case.x_TD),
            token_hidden_size=model.hidden_size,
        )
        layer = moe_ep.MoEEpLayer(bootstrap(case.group), sizes, weights, backend=backend)
        y_TD = torch.empty_like(case.x_TD)

        def run() -> Tensor:
            routing = case.routed()
            return layer(moe_ep.MoEEpTensors(case.x_TD, routing.ids, routing.weights, output=y_TD))

        yield run
        torch.cuda.synchronize()
        layer.destroy()


def push(case: WholeLayer, shape: dict[str, Any]) -> tuple[Any, Any]:
    from flashinfer import moe_ep
    from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe import Sm90PushWeights

    experts = case.experts
    weights = Sm90PushWeights(
        experts.w_gate_up.data,
        experts.gate_up_scales.data,
        experts.w_down.data,
        experts.down_scales.data,
    )
    kernel = moe_ep.Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(**shape)
    return moe_ep.MegaConfig(kernel, preprocess_weights=False, transformed_weights=weights), None


def pull(case: WholeLayer, shape: dict[str, Any]) -> tuple[Any, Any]:
    """It quantizes weights by itself, since it wants the rows of gate and up by turns. Its exchange
    is NVSHMEM's.
    """
    from flashinfer import moe_ep

    experts = case.experts
    weights = moe_ep.MoEWeightPack(
        dequantize_weights(experts.w_gate_up.data, experts.gate_up_scales.data, torch.bfloat16),
        dequantize_weights(experts.w_down.data, experts.down_scales.data, torch.bfloat16),
    )
    kernel = moe_ep.Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig(fp8_scale_mode="blockwise", **shape)
    return moe_ep.MegaConfig(kernel), weights


def cake(case: WholeLayer, shape: dict[str, Any]) -> tuple[Any, Any]:
    from flashinfer import moe_ep

    weights = moe_ep.MoEWeightPack(case.experts.w_gate_up.data, case.experts.w_down.data)
    return moe_ep.MegaConfig(moe_ep.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig(**shape)), weights


PEERS = [
    Exchange(),
    Layer("FlashInfer push", True, push),
    Layer("FlashInfer pull", True, pull),
    Layer("FlashInfer cake", False, cake),
]
