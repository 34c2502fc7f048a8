"""What `MoELayer(shared=…)` saves: a shared expert during the exchange, and after the layer.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.shared_experts [RESULT.json]

A layer of DeepSeek-V3 with experts in fp8 (DeepGEMM where it is installed) and a shared expert in
bf16. Times are µs of a layer in graphs of ten, the median of replays by turns, on the slowest rank.
It needs a GPU for each rank.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks import render, results
from epmoe import EPConfig, ExpertParallel, MoELayer
from epmoe.bench.layer_sides import Precision, random_experts
from epmoe.bench.sides import Calls
from epmoe.bench.timing import rounds_in_turns

# A layer of DeepSeek-V3.
D = 7168
WIDTH = 2048
E = 256
K = 8
TOKENS = (1, 16, 128, 512, 4096)
REPLAYS = 21


def main() -> None:
    """Measure, print the table, and write the JSON file that the command line names."""
    # A group of one rank for each GPU.
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.set_grad_enabled(False)
    config = EPConfig(
        model={
            "num_experts": E,
            "num_experts_per_tok": K,
            "hidden_size": D,
            "intermediate_size": WIDTH,
        },
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": max(TOKENS)},
        exchange={"payload": "fp8"},
    )
    # The same weights on every rank.
    draw = torch.Generator().manual_seed(7)
    router, gate_up, down = (
        torch.randn(*shape, generator=draw).bfloat16().cuda() / shape[1] ** 0.5
        for shape in ((E, D), (2 * WIDTH, D), (D, WIDTH))
    )

    def shared(x: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, down)

    cells: list[list[float]] = []
    with ExpertParallel(config, device="cuda") as ep:
        experts = random_experts(config, ep.rank, ep.device, Precision.FP8)
        alone = MoELayer(ep, router, experts)
        beside = MoELayer(ep, router, experts, shared=shared)
        for T in TOKENS:
            # Each rank has tokens of its own.
            x = (
                torch.randn(T, D, generator=torch.Generator().manual_seed(ep.rank))
                .bfloat16()
                .cuda()
            )
            # What is compared: both parts alone, and together in two orders.
            sides = [
                Calls("the layer alone", partial(alone, x)),
                Calls("the shared expert alone", partial(shared, x)),
                Calls("one after the other", lambda x=x: alone(x) + shared(x)),
                Calls("**side by side**, `MoELayer(shared=…)`", partial(beside, x)),
            ]
            # Both orders must have the same bits, or their times mean nothing.
            *_, after, during = sides
            if not torch.equal(after.out(), during.out()):
                raise RuntimeError(f"{T} tokens: y of both orders differs")
            # The sides take turns, so that clocks are the same for all.
            cells.append(
                list(map(results.figure, rounds_in_turns(sides, REPLAYS, dist.group.WORLD)))
            )
            if ep.rank == 0:
                print(f"{T} tokens:", *cells[-1], flush=True)
        if ep.rank == 0:
            render.publish(
                "-m benchmarks.shared_experts",
                "a shared expert during the exchange",
                (
                    f"µs of a layer in graphs of ten; experts in fp8 ({experts.gemm}), the shared "
                    "one in bf16."
                ),
                [{"name": "what"}, *results.columns(TOKENS)],
                [
                    [side.name, *figures]
                    for side, figures in zip(sides, zip(*cells, strict=True), strict=True)
                ],
                next(map(Path, sys.argv[1:]), None),
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
