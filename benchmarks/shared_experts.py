"""What `MoELayer(shared=…)` saves: a shared expert beside the exchange, and behind the layer.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.shared_experts

A layer of DeepSeek-V3 with experts in fp8 (DeepGEMM where it is installed) and a shared expert in bf16. Times are µs of
a layer in graphs of ten, the median of replays, on the slowest rank. It needs a GPU for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.replays import captured, slowest, timed
from epmoe import EPConfig, ExpertParallel, MoELayer
from epmoe.bench.layer_sides import Precision, random_experts

D, WIDTH, E, K = 7168, 2048, 256, 8
TOKENS, LAYERS, REPLAYS = (1, 16, 128, 512, 4096), 10, 21


class SharedExpert:
    """down(silu(gate) · up) of every token."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.gate_up, self.down = (
            torch.randn(*shape, generator=draw).bfloat16().cuda() / shape[1] ** 0.5
            for shape in ((2 * WIDTH, D), (D, WIDTH))
        )

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, self.down)


def main() -> None:
    dist.init_process_group("gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_grad_enabled(False)
    config = EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "intermediate_size": WIDTH},
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": max(TOKENS)},
        exchange={"payload": "fp8"},
    )
    with ExpertParallel(config, device="cuda") as ep:
        experts, shared = random_experts(config, ep.rank, ep.device, Precision.FP8), SharedExpert()
        router = torch.randn(E, D, generator=torch.Generator().manual_seed(7)).bfloat16().cuda() / D**0.5
        alone, beside = MoELayer(ep, router, experts), MoELayer(ep, router, experts, shared=shared)
        if ep.rank == 0:
            print(f"{ep.size} × {torch.cuda.get_device_name()}, gemm {experts.gemm}")
            print("tokens: layer alone / shared expert alone / layer, then shared expert / both side by side, µs")
        for T in TOKENS:
            x = torch.randn(T, D, generator=torch.Generator().manual_seed(ep.rank)).bfloat16().cuda()
            plays: tuple[Callable[[], Tensor], ...] = (
                lambda x=x: alone(x),
                lambda x=x: shared(x),
                lambda x=x: alone(x) + shared(x),
                lambda x=x: beside(x),
            )
            if not torch.equal(plays[2](), plays[3]()):
                raise RuntimeError(f"{T} tokens: y of both orders differs")
            graphs = [captured(lambda _, play=play: play(), LAYERS) for play in plays]
            times: list[list[float]] = [[] for _ in plays]
            for _ in range(REPLAYS):
                for of_play, graph in zip(times, graphs, strict=True):
                    dist.barrier()
                    of_play.append(timed(graph.replay) / LAYERS)
            figures = [slowest(median(of_play)) for of_play in times]
            if ep.rank == 0:
                print(f"{T}: " + " / ".join(f"{us:.1f}" for us in figures), flush=True)


if __name__ == "__main__":
    main()
