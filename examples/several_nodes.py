"""Two nodes, both on this machine: rows cross nodes by gloo (on GPUs by NCCL), as over a network.

Run: torchrun --standalone --nproc-per-node 4 examples/several_nodes.py
Any even number of ranks will do. Prints, on rank 0: the device, and "2 nodes of 2 ranks: y is x".
"""

import torch
import torch.distributed as dist
from devices import meet

import epmoe

E = 8  # experts, over all ranks
K = 2  # experts of a token
D = 64  # hidden size
T = 16  # tokens of a rank


def main():
    device = meet()
    ranks = dist.get_world_size()
    # `ranks_per_node` says which ranks share a node: of four 0 and 1, and 2 and 3.
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": ranks, "ranks_per_node": ranks // 2},
        capacity={"max_num_tokens_per_rank": T},
    )
    with epmoe.ExpertParallel(config, device=device) as ep:
        # Each token goes to K experts, with equal weights.
        x_TD = torch.full((T, D), 1.0 + ep.rank, device=device)
        ids_TK = torch.arange(T * K, device=device).view(T, K) % E
        weights_TK = torch.full((T, K), 1 / K, device=device)

        # One round: tokens to the ranks of their experts, and back.
        dispatched = ep.dispatch(x_TD, ids_TK, weights_TK)
        y_TD = ep.combine(dispatched.rows, dispatched)

        # The experts return their input, and weights sum to 1: y is x.
        assert torch.equal(y_TD, x_TD)
        if ep.rank == 0:
            nodes = config.topology.num_nodes
            ranks = config.topology.ranks_here
            print(f"{nodes} nodes of {ranks} ranks: y is x")
    dist.destroy_process_group()


main()
