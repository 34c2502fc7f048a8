"""A decode loop: on a GPU one CUDA graph is captured, replayed at each step and polled; on CPUs the
layer is called.

Run: torchrun --standalone --nproc-per-node 2 examples/decode_loop.py
Prints, on rank 0: "8 steps of 1 to 4 tokens".
"""

import torch
import torch.distributed as dist

import epmoe

E = 8
K = 2
D = 64
F = 128
T = 4


def main():
    gpu = torch.cuda.device_count() >= dist.get_world_size()
    if gpu:
        torch.cuda.set_device(dist.get_rank())
    dtype = torch.bfloat16 if gpu else torch.float32
    config = epmoe.EPConfig(
        model={
            "num_experts": E,
            "num_experts_per_tok": K,
            "hidden_size": D,
            "dtype": str(dtype).split(".")[1],
        },
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": T},
    )
    with (
        epmoe.ExpertParallel(config, device="cuda" if gpu else "cpu") as ep,
        torch.inference_mode(),
    ):
        e = ep.num_local_experts
        like = {"device": ep.device, "dtype": dtype}
        experts = epmoe.GroupedExperts(
            torch.randn(e, 2 * F, D, **like) / 8, torch.randn(e, D, F, **like) / 11
        )
        torch.manual_seed(0)  # the router's weights are equal on all ranks
        layer = epmoe.MoELayer(ep, torch.randn(E, D, **like), experts)
        x = torch.zeros(T, D, **like)
        num_tokens = torch.zeros((), dtype=torch.int32, device=ep.device)
        y = layer(x, num_tokens)  # an ordinary round first: all ranks load their kernels
        if gpu:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x, num_tokens)
        for step in range(8):
            t = 1 + step % T  # as many requests as there are now
            x[:t] = torch.randn(t, D, **like)
            num_tokens.fill_(t)
            if gpu:
                graph.replay()
            else:
                y = layer(x, num_tokens)
            ep.poll()  # a replay raises nothing by itself
            assert not y[t:].any()  # padding yields zeros
        ep.check()
        if ep.rank == 0:
            print("8 steps of 1 to 4 tokens")


dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
main()
dist.destroy_process_group()
