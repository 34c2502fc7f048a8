"""Rank 1 of three is killed, two go on, and a new rank joins.

Run: python examples/recover_after_a_kill.py
torchrun ends all ranks when one dies, so this file starts its ranks itself: what a supervisor does.
Prints: the device, "3 ranks play", "2 ranks play", "3 ranks play", each from rank 0.
"""

import contextlib
import multiprocessing
import signal
import tempfile

import torch
import torch.distributed as dist
from devices import describe, take_device

import epmoe

RANKS = 3
VICTIM = 1
E = 6  # experts, over all ranks
K = 2  # experts of a token
D = 64  # hidden size
T = 4  # tokens of a rank in a round


def make_config():
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": RANKS},
        capacity={"max_num_tokens_per_rank": 8},
        exchange={"timeout_s": 10.0},
    )


def load(moves):
    """Bring the weights of experts that this rank gets.

    Here the experts return their input and have none. A service copies rows, and reads what has no
    `source` from a checkpoint.
    """


def play(ep, rounds):
    """Rounds whose experts return their input, so that y is x."""
    x_TD = torch.full((T, D), 1.0 + ep.rank, device=ep.device)
    weights_TK = torch.full((T, K), 1 / K, device=ep.device)
    for i in range(rounds):
        ids_TK = (torch.arange(T * K, device=ep.device).view(T, K) + i) % E
        dispatched = ep.dispatch(x_TD, ids_TK, weights_TK)
        y_TD = ep.combine(dispatched.rows, dispatched)
        # On a GPU the host runs ahead: `check` waits, and raises what went wrong.
        ep.check()
        assert torch.equal(y_TD, x_TD)
    if ep.rank == 0:
        print(f"{ep.size} ranks play", flush=True)


def run_first(rank, folder, device):
    """A rank of the first group."""
    # Meet the other ranks over a store in the folder, which outlives every rank, and serve.
    store = epmoe.folder_store(folder)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ep = epmoe.ExpertParallel(make_config(), device=device)
    play(ep, 10)

    if rank == VICTIM:
        signal.raise_signal(signal.SIGKILL)

    # The death ends a round of the others by an EPTimeoutError. Recover outside of this block,
    # since the exception holds the old windows.
    with contextlib.suppress(epmoe.EPTimeoutError):
        play(ep, 1_000_000)

    # Go on without the victim: the ranks that live take its experts.
    epmoe.recover(ep, folder, load)
    play(ep, 10)

    # Between two rounds, wait for the new rank, and go on with it.
    epmoe.recover(ep, folder, load, min_ranks=RANKS)
    return ep


def run(rank, folder, is_new):
    """A process of the supervisor: a rank of the first group, or a new one in place of that."""
    torch.set_num_threads(1)
    # epmoe's own exchange is all that runs here: ranks may share a GPU.
    device = take_device(rank, RANKS, needs_nccl=False)
    if is_new:
        ep = epmoe.join_group(folder, device=device)
    else:
        if rank == 0:
            print(describe(device), flush=True)
        ep = run_first(rank, folder, device)
    play(ep, 10)
    ep.close()
    dist.destroy_process_group()


def main():
    start = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(target=run, args=(rank, folder, False)) for rank in range(RANKS)]
        for process in ranks:
            process.start()

        # The supervisor sees the death, and starts another process.
        ranks[VICTIM].join()
        ranks[VICTIM] = start(target=run, args=(VICTIM, folder, True))
        ranks[VICTIM].start()

        for process in ranks:
            process.join()
        raise SystemExit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
