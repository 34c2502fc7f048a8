"""What `MoELayer(shared=…)` saves: a shared expert during the exchange, and after the layer.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.shared_experts [RESULT.json]

A layer of DeepSeek-V3 with experts in fp8 (DeepGEMM where it is installed) and a shared expert in bf16. Times are µs of
a layer in graphs of ten, the median of replays, on the slowest rank. It needs a GPU for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import render, results
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
    """Measure, print the table, and write the JSON file that the command line names."""
    dist.init_process_group("gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_grad_enabled(False)
    config = EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "intermediate_size": WIDTH},
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": max(TOKENS)},
        exchange={"payload": "fp8"},
    )
    cells: dict[str, list[float]] = {}
    with ExpertParallel(config, device="cuda") as ep:
        experts = random_experts(config, ep.rank, ep.device, Precision.FP8)
        shared = SharedExpert()
        router = torch.randn(E, D, generator=torch.Generator().manual_seed(7)).bfloat16().cuda() / D**0.5
        alone = MoELayer(ep, router, experts)
        beside = MoELayer(ep, router, experts, shared=shared)
        for T in TOKENS:
            x = torch.randn(T, D, generator=torch.Generator().manual_seed(ep.rank)).bfloat16().cuda()
            plays: dict[str, Callable[[], Tensor]] = {
                "the layer alone": partial(alone, x),
                "the shared expert alone": partial(shared, x),
                "one after the other": lambda x=x: alone(x) + shared(x),
                "**side by side**, `MoELayer(shared=…)`": partial(beside, x),
            }
            *_, after, during = plays.values()
            if not torch.equal(after(), during()):
                raise RuntimeError(f"{T} tokens: y of both orders differs")
            graphs = {name: captured(lambda _, play=play: play(), LAYERS) for name, play in plays.items()}
            times: dict[str, list[float]] = {name: [] for name in plays}
            for _ in range(REPLAYS):
                for name, graph in graphs.items():
                    dist.barrier()
                    times[name].append(timed(graph.replay) / LAYERS)
            for name, of_play in times.items():
                cells.setdefault(name, []).append(results.figure(slowest(median(of_play))))
            if ep.rank == 0:
                print(f"{T} tokens:", *(of_play[-1] for of_play in cells.values()), flush=True)
        if ep.rank == 0:
            content = results.of_this_run("shared_experts", ep.size) | {
                "title": f"{ep.size} × {torch.cuda.get_device_name()}: a shared expert during the exchange",
                "caption": f"µs of a layer in graphs of ten; experts in fp8 ({experts.gemm}), the shared one in bf16.",
                "columns": [{"name": "what"}, *results.columns(TOKENS)],
                "rows": [{"cells": [name, *figures]} for name, figures in cells.items()],
            }
            render.publish(content)


if __name__ == "__main__":
    main()
