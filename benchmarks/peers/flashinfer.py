"""FlashInfer: the one-sided exchange over NVLink. Its whole layers are in flashinfer_layer.py.

The calls are those of flashinfer-python 0.7.2.post1. Experts write their outputs into the exchange's workspace, which
saves a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.bench.peers import LeftOut, Peer
from epmoe.bench.sample import Payload, Sample
from epmoe.bench.sides import ExchangeSide, slabs
from epmoe.local.quantize import dequantize_rows, quantize_fp8


class OneSided(ExchangeSide):
    """Rank-major rows. fp8 rows and their scales are there before the timing."""

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
    def exchange(self, sample: Sample, payload: Payload, group: dist.ProcessGroup) -> Iterator[ExchangeSide]:
        from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication

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
        device = torch.cuda.current_device()
        bootstrap = BootstrapConfig(group.size(), group.rank(), process_group=group, device=device)
        communication = create_communication(bootstrap, parameters, NVLinkOneSidedConfig())
        yield OneSided(communication, sample, payload)
        communication.destroy()


PEERS = [FlashInfer()]
