"""FlashInfer: the one-sided exchange over NVLink, and its whole layers for Hopper in bf16 (cake) and fp8 (push).

Calls as in flashinfer-python 0.7.2.post1. Experts write their outputs into the exchange's workspace, which saves a
copy.
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
from epmoe.bench.sides import Exchange, slabs
from epmoe.local.quantize import dequantize_rows, quantize_fp8


class OneSided(Exchange):
    """Rank-major rows. fp8 rows and their scales are there before the timing."""

    def __init__(self, communication: Any, sample: Sample, payload: Payload) -> None:
        super().__init__("FlashInfer", sample)
        self.communication, self.fp8 = communication, payload is not Payload.PLAIN
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
        return self.communication.combine(self.communication.get_combine_input_buffer(self.sample.dtype))

    def outputs(self, handle: Any) -> Tensor:
        rows = handle.hidden_states
        if self.fp8:
            rows = dequantize_rows(rows, handle.hidden_states_scale, self.sample.dtype)
        return self.communication.get_combine_input_buffer(self.sample.dtype).copy_(rows)

    def arrived(self, handle: Any) -> list[Tensor]:
        ranks = self.communication.ep_size
        return slabs(self.sample, handle.hidden_states.unflatten(0, (ranks, handle.tokens_per_rank)))


class FlashInfer(Peer):
    name = "FlashInfer"
    install = "flashinfer-python"

    def version(self) -> str:
        import flashinfer
        import flashinfer.moe_ep  # noqa: F401

        return flashinfer.__version__

    @contextmanager
    def exchange(self, sample: Sample, payload: Payload, group: dist.ProcessGroup) -> Iterator[Exchange]:
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
        communication = create_communication(_bootstrap(group), parameters, NVLinkOneSidedConfig())
        yield OneSided(communication, sample, payload)
        communication.destroy()

    @contextmanager
    def layer(self, case: WholeLayer) -> Iterator[Callable[[], Tensor]]:
        from flashinfer import moe_ep

        model, experts, T = case.ep.config.model, case.experts, len(case.x_TD)
        if experts.dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] != 9:
            raise LeftOut("its layers take bf16 rows on Hopper")
        shape = {"intermediate_size": model.intermediate_size, "top_k": model.num_experts_per_tok}
        if experts.is_fp8:
            from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe import Sm90PushWeights

            weights = None
            backend = moe_ep.MegaConfig(
                moe_ep.Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(**shape),
                preprocess_weights=False,
                transformed_weights=Sm90PushWeights(
                    experts.w_gate_up.data, experts.gate_up_scales.data, experts.w_down.data, experts.down_scales.data
                ),
            )
        else:
            weights = moe_ep.MoEWeightPack(experts.w_gate_up.data, experts.w_down.data)
            backend = moe_ep.MegaConfig(moe_ep.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig(**shape))
        sizes = moe_ep.FleetParams(
            num_experts=model.num_experts, max_tokens_per_rank=T, token_hidden_size=model.hidden_size
        )
        layer = moe_ep.MoEEpLayer(_bootstrap(case.group), sizes, weights, backend=backend)
        y_TD = torch.empty_like(case.x_TD)

        def run() -> Tensor:
            routing = case.routed()
            return layer(moe_ep.MoEEpTensors(case.x_TD, routing.ids, routing.weights, output=y_TD))

        yield run
        torch.cuda.synchronize()
        layer.destroy()


def _bootstrap(group: dist.ProcessGroup) -> Any:
    from flashinfer.moe_ep import BootstrapConfig

    return BootstrapConfig(group.size(), group.rank(), process_group=group, device=torch.cuda.current_device())


PEERS = [FlashInfer()]
