"""A decode loop: on a GPU one CUDA graph is captured, replayed at each step and polled; on CPUs the
layer is called.

Run: torchrun --standalone --nproc-per-node 2 examples/decode_loop.py
Prints, on rank 0: the device, and "8 steps of 1 to 4 tokens".
"""

import torch
import torch.distributed as dist
from devices import meet

import epmoe

E = 8  # experts, over all ranks
K = 2  # experts of a token
D = 64  # hidden size
F = 128  # width of an expert
T = 4  # most tokens of a rank in a step
STEPS = 8


def make_layer(ep, like):
    """A MoE layer with random weights."""
    # Each rank has other experts.
    e = ep.num_local_experts
    gate_up_e2FD = torch.randn(e, 2 * F, D, **like) / D**0.5
    down_eDF = torch.randn(e, D, F, **like) / F**0.5
    experts = epmoe.GroupedExperts(gate_up_e2FD, down_eDF)
    # The router has equal weights on all ranks.
    torch.manual_seed(0)
    router_ED = torch.randn(E, D, **like)
    return epmoe.MoELayer(ep, router_ED, experts)


def decode(ep, like):
    layer = make_layer(ep, like)

    # A graph reads the same memory at each replay: inputs are written into these tensors.
    x_TD = torch.zeros(T, D, **like)
    num_tokens = torch.zeros((), dtype=torch.int32, device=ep.device)

    # An ordinary round comes first, in which all ranks load their kernels.
    y_TD = layer(x_TD, num_tokens)
    on_gpu = ep.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_TD = layer(x_TD, num_tokens)

    for step in range(STEPS):
        # There are as many tokens as there are requests now. The rest of x is padding.
        t = 1 + step % T
        x_TD[:t] = torch.randn(t, D, **like)
        num_tokens.fill_(t)

        if on_gpu:
            graph.replay()
        else:
            y_TD = layer(x_TD, num_tokens)

        # A replay raises nothing by itself: `poll` raises what went wrong so far.
        ep.poll()
        # Padding yields zeros.
        assert not y_TD[t:].any()

    # Wait for the last step, and raise what went wrong.
    ep.check()


def main():
    device = meet(needs_nccl=False)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": dtype},
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": T},
    )
    with epmoe.ExpertParallel(config, device=device) as ep, torch.inference_mode():
        decode(ep, {"device": ep.device, "dtype": getattr(torch, dtype)})
        if ep.rank == 0:
            print(f"{STEPS} steps of 1 to {T} tokens")
    dist.destroy_process_group()


main()
