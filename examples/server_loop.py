"""A server loop in which a request of rank 1 raises: its round is given up on all ranks, and the
next one is served.

Run: torchrun --standalone --nproc-per-node 2 examples/server_loop.py
Prints, on rank 0: "step 1: dropped, rank(s) [1] gave it up" and "served steps [0, 2]".
"""

import torch
import torch.distributed as dist

import epmoe

E = 8
K = 2
D = 64
T = 4
TAG = 1


def prepare(rank, step):
    if (rank, step) == (1, 1):
        raise ValueError("a bad request")
    return torch.full((T, D), 1.0 + step)


def main():
    dist.init_process_group("gloo")
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": T},
    )
    served = []
    with epmoe.ExpertParallel(config) as ep:
        ids = torch.arange(T * K).view(T, K) % E
        weights = torch.full((T, K), 1 / K)
        for step in range(3):
            try:
                with ep.giving_up(TAG):  # an exception inside takes this rank's place in the round
                    x = prepare(ep.rank, step)
                    d = ep.dispatch(x, ids, weights, tag=TAG)
                    y = ep.combine(d.rows, d)
                assert torch.equal(y, x)
                served.append(step)
            except epmoe.EPAbortedError as error:  # on the other ranks
                print(f"step {step}: dropped, rank(s) {error.ranks} gave it up")
            except ValueError:  # on the rank of the request: answer it with the error
                pass
        if ep.rank == 0:
            print(f"served steps {served}")
    dist.destroy_process_group()


main()
