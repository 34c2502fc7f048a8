"""FlashInfer's expert-parallel layer on CPUs, around experts in plain torch: its own experts are
kernels for GPUs.

As a script: two ranks serve, and rank 1 is killed between dispatch and combine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from flashinfer.moe_ep import (
    BootstrapConfig,
    EpAlgorithm,
    EpLayout,
    FleetParams,
    MoEEpLayer,
    MoEEpTensors,
    MoEWeightPack,
    SplitConfig,
    SplitKernelContext,
)
from flashinfer.moe_ep.core.kernel.base import SplitKernelBackend
from flashinfer.moe_ep.core.kernel.registry import register_split_kernel
from helpers import distinct_ids, randn
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port

from epmoe import EPTimeoutError
from epmoe.integrations import flashinfer
from epmoe.local.reference import moe_reference

E = 8
K = 2
D = 256
F = 64
M = 16


@dataclass
class PlainConfig:
    kernel_name: ClassVar[str] = "plain"
    kernel: ClassVar[str] = "plain"


@register_split_kernel("plain")
class PlainExperts(SplitKernelBackend):
    """This rank's experts in plain torch, as FlashInfer's contract has them: only ids of this
    rank's range count, weights are applied, and each row's outputs are summed.
    """

    @classmethod
    def kernel_name(cls) -> str:
        return "plain"

    def compute(self, ctx: SplitKernelContext) -> Tensor:
        assert ctx.recv_topk_idx is not None and ctx.recv_topk_weights is not None
        assert ctx.recv_topk_idx_global
        rows = ctx.expert_tensors.flatten(0, 1)
        pack = self._transformed_weights
        return local_experts(rows, ctx.recv_topk_idx, ctx.recv_topk_weights, (pack.w13, pack.w2))


def local_experts(
    rows_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, experts: tuple[Tensor, Tensor]
) -> Tensor:
    """Sums [N, D] over the experts of this rank, whose weights are `experts`. Rows without one are
    not read.
    """
    e = len(experts[0])
    local_NK = ids_NK - e * dist.get_rank()
    local_NK = local_NK.masked_fill((local_NK < 0) | (local_NK >= e), -1)
    return moe_reference(rows_ND, local_NK, weights_NK, experts).to(experts[0].dtype)


def weights() -> tuple[Tensor, Tensor]:
    """All experts' weights, bf16: gate and up [E, 2F, D], down [E, D, F]."""
    gate_up = randn(E, 2 * F, D, seed=1) / D**0.5
    down = randn(E, D, F, seed=2) / F**0.5
    return gate_up.bfloat16(), down.bfloat16()


def own_weights() -> tuple[Tensor, Tensor]:
    """Those of this rank's experts."""
    gate_up, down = weights()
    e = E // dist.get_world_size()
    own = slice(dist.get_rank() * e, (dist.get_rank() + 1) * e)
    return gate_up[own], down[own]


def tokens(rank: int, T: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of a rank."""
    x_TD = randn(T, D, seed=100 + 2 * seed + rank).bfloat16()
    ids_TK = distinct_ids(T, E, K, seed=200 + 2 * seed + rank)
    weights_TK = randn(T, K, seed=300 + 2 * seed + rank).softmax(-1)
    return x_TD, ids_TK, weights_TK


def bootstrap() -> BootstrapConfig:
    return BootstrapConfig(world_size=dist.get_world_size(), rank=dist.get_rank())


def make_layer(comm: Any = "epmoe") -> Any:
    """FlashInfer's layer, its tokens carried by `comm`."""
    sizes = FleetParams(
        num_experts=E,
        max_tokens_per_rank=M,
        token_hidden_size=D,
        algorithm=EpAlgorithm.LOW_LATENCY,
        layout=EpLayout.RANK_MAJOR,
    )
    split = SplitConfig(comm=comm, kernel=PlainConfig())
    return MoEEpLayer(bootstrap(), sizes, MoEWeightPack(*own_weights()), backend=split)


def serve(rank: int, port: int) -> None:
    """One step, and one in whose middle rank 1 is killed."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    layer = make_layer(flashinfer.EpmoeConfig({"timeout_s": 60}))
    batch = MoEEpTensors(*tokens(rank, M))
    layer(batch)
    if rank == 1:
        layer.stage_hook = lambda stage: _dies() if stage == "combine" else torch.no_grad()
    try:
        layer(batch)
    except EPTimeoutError as error:
        print("the other one says:", str(error).replace("\n", " "), flush=True)


def _dies() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    fork = multiprocessing.get_context("fork")
    port = get_free_port()
    ranks = [fork.Process(target=serve, args=(rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print("exit codes", sorted(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
