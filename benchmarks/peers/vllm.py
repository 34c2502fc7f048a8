"""vLLM's default exchange: its all-gather of rows, weights and ids, and its reduce-scatter (`AgRsAll2AllManager`).

The calls are those of vLLM 0.26. Layers with vLLM's experts: benchmarks/vllm_layer.py.
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
from epmoe.bench.sides import ExchangeSide


class VLLMAllGather(ExchangeSide):
    """Every token everywhere; a rank puts out zeros for tokens that do not need it."""

    def __init__(self, coordinator: Any, sample: Sample) -> None:
        super().__init__("vLLM", sample)
        self.coordinator = coordinator
        self.sizes = [sample.tokens] * coordinator.world_size

    def out(self) -> list[Tensor]:
        sent = [self.sample.x_TD, self.sample.weights_TK, self.sample.ids_TK]
        return self.coordinator.all_gatherv(sent, dim=0, sizes=self.sizes)

    def back(self, handle: list[Tensor]) -> Tensor:
        return self.coordinator.reduce_scatterv(self.given, dim=0, sizes=self.sizes)

    def outputs(self, handle: list[Tensor]) -> Tensor:
        rows, _, ids = handle
        return rows * self.sample.needed_here(ids).to(rows)

    def arrived(self, handle: list[Tensor]) -> list[Tensor]:
        return handle[:1]


class VLLM(Peer):
    name = "vLLM all-gather"
    install = "vllm (with torch 2.11: 0.26.0)"

    def version(self) -> str:
        import vllm
        from vllm.distributed import get_dp_group, init_distributed_environment  # noqa: F401

        return vllm.__version__

    @contextmanager
    def exchange(self, sample: Sample, payload: Payload, group: dist.ProcessGroup) -> Iterator[ExchangeSide]:
        from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import get_dp_group, init_distributed_environment, initialize_model_parallel
        from vllm.distributed.parallel_state import model_parallel_is_initialized

        if payload is not Payload.PLAIN:
            raise LeftOut("this driver sends rows as they are")
        if not model_parallel_is_initialized():
            size = group.size()
            rank = group.rank()
            device = torch.cuda.current_device()
            parallel = ParallelConfig(
                data_parallel_size=size, enable_expert_parallel=True, distributed_executor_backend="external_launcher"
            )
            with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
                init_distributed_environment(size, rank, "env://", device, "nccl")
                initialize_model_parallel(1)
        yield VLLMAllGather(get_dp_group(), sample)


PEERS = [VLLM()]
