"""A server loop in which a request of rank 1 raises: its round is given up on all ranks, and the
next one is served.

Run: torchrun --standalone --nproc-per-node 2 examples/server_loop.py
Prints, on rank 0: the device, "step 1: dropped, rank(s) [1] gave it up" and "served steps [0, 2]".
"""

import torch
import torch.distributed as dist
from devices import meet

import epmoe

E = 8  # experts, over all ranks
K = 2  # experts of a token
D = 64  # hidden size
T = 4  # tokens of a rank
TAG = 1  # number of the layer: all ranks open rounds with equal tags


def prepare(rank, step, device):
    """The tokens of this rank's request, [T, D]. The request of rank 1 in step 1 is a bad one."""
    if rank == 1 and step == 1:
        raise ValueError("a bad request")
    return torch.full((T, D), 1.0 + step, device=device)


def main():
    device = meet(needs_nccl=False)
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": dist.get_world_size()},
        capacity={"max_num_tokens_per_rank": T},
    )
    served = []
    with epmoe.ExpertParallel(config, device=device) as ep:
        ids_TK = torch.arange(T * K, device=device).view(T, K) % E
        weights_TK = torch.full((T, K), 1 / K, device=device)
        for step in range(3):
            try:
                # An exception inside `giving_up` takes this rank's place in the round, so that the
                # other ranks need not wait for it.
                with ep.giving_up(TAG):
                    x_TD = prepare(ep.rank, step, device)
                    dispatched = ep.dispatch(x_TD, ids_TK, weights_TK, tag=TAG)
                    y_TD = ep.combine(dispatched.rows, dispatched)
                # On a GPU the host runs ahead: `check` waits, and raises what went wrong.
                ep.check()
                # The experts return their input, and weights sum to 1.
                assert torch.equal(y_TD, x_TD)
                served.append(step)
            except epmoe.EPAbortedError as error:
                # On the other ranks: the step is lost, and the next one is served.
                print(f"step {step}: dropped, rank(s) {error.ranks} gave it up")
            except ValueError:
                # On the rank of the bad request: a server answers it with the error.
                pass
        if ep.rank == 0:
            print(f"served steps {served}")
    dist.destroy_process_group()


main()
