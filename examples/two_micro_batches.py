"""Two micro-batches overlap: the rows of one travel while the experts of the other compute.

Run: torchrun --standalone --nproc-per-node 2 examples/two_micro_batches.py
Prints, on rank 0: the device, and "y of both micro-batches equals that of two ordinary rounds".
"""

import torch
import torch.distributed as dist
from devices import meet

import epmoe

E = 8  # experts, over all ranks
K = 2  # experts of a token
D = 64  # hidden size
T = 16  # tokens of a rank in a micro-batch


def compute(rows_ND):
    """`tanh` stands for the experts."""
    return rows_ND.tanh()


def main():
    device = meet(needs_nccl=False)
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": T},
    )
    # An ExpertParallel has one round open at a time. Two of them have two.
    with (
        epmoe.ExpertParallel(config, device=device) as ep_a,
        epmoe.ExpertParallel(config, device=device) as ep_b,
    ):
        # Each micro-batch has tokens, and experts for each token.
        torch.manual_seed(ep_a.rank)
        a_TD = torch.randn(T, D, device=device)
        b_TD = torch.randn(T, D, device=device)
        routing_a = ep_a.route(torch.randn(T, E, device=device))
        routing_b = ep_b.route(torch.randn(T, E, device=device))

        # Send the tokens of both.
        sent_a = ep_a.dispatch_send(a_TD, *routing_a)
        sent_b = ep_b.dispatch_send(b_TD, *routing_b)

        # Compute a's rows, while b's are under way.
        dispatched_a = ep_a.dispatch_recv(sent_a)
        ep_a.combine_send(compute(dispatched_a.rows), dispatched_a)

        # Compute b's rows, while a's are on their way back.
        dispatched_b = ep_b.dispatch_recv(sent_b)
        ep_b.combine_send(compute(dispatched_b.rows), dispatched_b)

        # Receive the sums.
        y_a_TD = ep_a.combine_recv(dispatched_a)
        y_b_TD = ep_b.combine_recv(dispatched_b)

        # Compare with two ordinary rounds, one after the other.
        for x_TD, routing, y_TD in ((a_TD, routing_a, y_a_TD), (b_TD, routing_b, y_b_TD)):
            dispatched = ep_a.dispatch(x_TD, *routing)
            assert torch.equal(ep_a.combine(compute(dispatched.rows), dispatched), y_TD)

        if ep_a.rank == 0:
            print("y of both micro-batches equals that of two ordinary rounds")
    dist.destroy_process_group()


main()
