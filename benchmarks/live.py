"""Experts that move, on GPUs: what a round, a change of tables, a push and a captured decode step
take.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.live [--spare SLOTS_OF_A_RANK]

The shape is DeepSeek-V3's: D 7168, F 2048, 256 experts, top-8, and 58 layers, of which a step has a
few with experts in fp8, 44 MB each. Times are medians of the slowest rank. It needs a GPU for each
rank; with one rank nothing is pushed.
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.distributed as dist

from epmoe import EPConfig, ExpertParallel, MoELayer, balance
from epmoe.bench import timing
from epmoe.bench.layer_sides import Precision, random_experts
from epmoe.bench.sample import Sample
from epmoe.bench.sides import Fused
from epmoe.bench.timing import captured, elapsed_us, rounds_in_turns

# DeepSeek-V3's layer: hidden size, inner size, experts, experts of a token.
D = 7168
F = 2048
E = 256
K = 8
# The most tokens of a rank in one round.
M = 1024
LAYERS = 58
# Weights of one expert in fp8, with their scales.
EXPERT_BYTES = 44 << 20
# What is measured how often.
SAMPLES = 41
ROUNDS = 50
PUSHES = 20
STEPS = 300
STEP_LAYERS = 4
STEP_TOKENS = 128


def slowest(value: float) -> float:
    """The largest value over all ranks."""
    return timing.slowest([value])[0]


def make(live: bool, size: int, spare: int) -> ExpertParallel:
    placement = (
        {"live": True, "slots_per_rank": E // size + spare, "layers": LAYERS} if live else {}
    )
    return ExpertParallel(
        EPConfig(
            model={
                "num_experts": E,
                "num_experts_per_tok": K,
                "hidden_size": D,
                "intermediate_size": F,
            },
            topology={"ep_size": size},
            placement=placement,
            capacity={"max_num_tokens_per_rank": M},
        ),
        device="cuda",
    )


def decoder(ep: ExpertParallel) -> tuple[torch.cuda.CUDAGraph, list[MoELayer]]:
    """One step of the layers of a decoder that have experts, and these layers."""
    # Each rank has tokens of its own, and all ranks the same router.
    draw = torch.Generator().manual_seed(ep.rank)
    x = torch.randn(STEP_TOKENS, D, generator=draw).bfloat16().cuda()
    router = (
        torch.randn(E, D, generator=torch.Generator().manual_seed(7)).bfloat16().cuda() / D**0.5
    )
    experts = random_experts(ep.config, ep.rank, ep.device, Precision.FP8)
    layers = [
        MoELayer(ep, router, copy.deepcopy(experts)).requires_grad_(False)
        for _ in range(STEP_LAYERS)
    ]
    # Kernels load in a first call, which no graph may contain.
    for layer in layers:
        layer(x)
    return captured(lambda: [layer(x) for layer in layers])[0], layers


def steps(
    ep: ExpertParallel, graph: torch.cuda.CUDAGraph, moving: Callable[[], bool]
) -> list[float]:
    """Times of decode steps in µs while `moving()`, or `STEPS` of them. Ranks agree on the end."""
    times: list[float] = []
    for _ in range(STEPS):
        # The host polls after each step, as a server does.
        times.append(elapsed_us(graph.replay))
        ep.poll()
        going = torch.tensor([int(moving())])
        dist.all_reduce(going)
        if not going:
            break
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--spare", type=int, help="slots of a rank beyond E / ranks; 1 by default, 0 with one rank"
    )
    spare = parser.parse_args().spare
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.set_grad_enabled(False)
    rank = dist.get_rank()
    size = dist.get_world_size()
    spare = int(size > 1) if spare is None else spare
    # Two sets of windows over the same ranks: experts that stay, and experts that move.
    stays = make(False, size, spare)
    live = make(True, size, spare)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    say(f"{size} × {torch.cuda.get_device_name()}")
    # What a round costs that counts its tokens by quota.
    for T in (1, 16, 128, 1024):
        sides = [Fused(ep, Sample(ep.config, rank, T, device=ep.device)) for ep in (stays, live)]
        without, with_quotas = rounds_in_turns(sides, SAMPLES, dist.group.WORLD, ROUNDS)
        say(
            f"a round of {T} tokens: {without:.2f} µs where experts stay, {with_quotas:.2f} µs "
            "with quotas"
        )
    # What a change of the tables costs the stream.
    experts = live.live
    assert experts is not None
    mail = experts.mail

    def change() -> float:
        live.share(torch.ones(LAYERS, E))
        while experts.sharing is None or not experts.sharing.done:  # a thread makes the tables
            time.sleep(1e-3)
        torch.cuda._sleep(200_000)  # the host runs ahead, as in serving
        return elapsed_us(live.poll)

    say(
        f"tables of {LAYERS} layers: {slowest(median(change() for _ in range(SAMPLES))):.2f} µs of "
        "the stream"
    )
    if size > 1:
        # How fast weights travel, while all ranks push to their neighbour.
        weights = torch.randn(EXPERT_BYTES // 4, device="cuda").view(torch.uint8)
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(PUSHES):
            mail.put((rank + 1) % size, "moves.staging", weights)
        mail.flush()
        rate = PUSHES * EXPERT_BYTES / slowest(time.perf_counter() - started) / 1e9
        say(f"pushes of {EXPERT_BYTES >> 20} MiB: {rate:.0f} GB/s, all ranks at once")
        # Decode steps before any move.
        graph, _layers = decoder(live)
        idle = steps(live, graph, lambda: True)
        # The experts of rank 0 are busy, so that the balancer moves some of them.
        loads = torch.ones(LAYERS, E)
        loads[:STEP_LAYERS, : E // size] = 2  # the experts of rank 0
        slots = balance(loads, live.slots, ep_size=size, max_moves=8).slots
        moves = live.replace(slots)
        # The same steps while the experts move.
        busy = steps(live, graph, lambda: not moves.done)
        figures = [
            slowest(f(part))
            for part in (idle, busy)
            for f in (median, lambda p: quantiles(p, n=100)[98], max)
        ]
        say(f"{moves.count} experts move, during the first {len(busy)} steps")
        say(
            "a captured step of {} layers, {} tokens: {:.1f} µs (99th percentile {:.1f}, longest "
            "{:.1f}); while experts move {:.1f} ({:.1f}, "
            "{:.1f})".format(STEP_LAYERS, STEP_TOKENS, *figures)
        )
        # Moves that are left over must not outlive the windows.
        moves.cancel()
        live.apply(120.0)
    dist.barrier()
    live.close()
    stays.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
