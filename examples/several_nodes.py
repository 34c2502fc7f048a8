"""Two nodes of two ranks, all on this machine: rows cross nodes by gloo (on GPUs by NCCL), as over
a network.

Run: torchrun --standalone --nproc-per-node 4 examples/several_nodes.py
Prints, on rank 0: "2 nodes of 2 ranks: y is x".
"""

import torch
import torch.distributed as dist

import epmoe

E = 8
K = 2
D = 64
T = 16


def main():
    dist.init_process_group("gloo")
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": 4, "ranks_per_node": 2},
        capacity={"max_num_tokens_per_rank": T},
    )
    with epmoe.ExpertParallel(config) as ep:
        x = torch.full((T, D), 1.0 + ep.rank)
        ids = torch.arange(T * K).view(T, K) % E
        d = ep.dispatch(x, ids, torch.full((T, K), 1 / K))
        # The experts return their input, and weights sum to 1: y is x.
        assert torch.equal(ep.combine(d.rows, d), x)
        if ep.rank == 0:
            print(
                f"{config.topology.num_nodes} nodes of {config.topology.ranks_here} ranks: y is x"
            )
    dist.destroy_process_group()


main()
