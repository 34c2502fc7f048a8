"""Two micro-batches overlap: the rows of one travel while the experts of the other compute.

Run: torchrun --standalone --nproc-per-node 2 examples/two_micro_batches.py
Prints, on rank 0: "y of both micro-batches equals that of two ordinary rounds".
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
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": T},
    )
    # An ExpertParallel has one round open at a time; two of them have two.
    with epmoe.ExpertParallel(config) as a, epmoe.ExpertParallel(config) as b:
        torch.manual_seed(a.rank)
        x = torch.randn(2, T, D)
        routing = [a.route(torch.randn(T, E)) for _ in range(2)]
        sent_a = a.dispatch_send(x[0], *routing[0])
        sent_b = b.dispatch_send(x[1], *routing[1])  # under way while a's experts compute
        d_a = a.dispatch_recv(sent_a)
        a.combine_send(d_a.rows.tanh(), d_a)  # `tanh` in place of experts
        d_b = b.dispatch_recv(sent_b)  # a's rows are on their way back
        b.combine_send(d_b.rows.tanh(), d_b)
        y = [a.combine_recv(d_a).clone(), b.combine_recv(d_b).clone()]
        for i in range(2):
            d = a.dispatch(x[i], *routing[i])
            assert torch.equal(a.combine(d.rows.tanh(), d), y[i])
        if a.rank == 0:
            print("y of both micro-batches equals that of two ordinary rounds")
    dist.destroy_process_group()


main()
