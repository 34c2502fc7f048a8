"""Experts as a service: two ranks bring tokens and hold no expert, two others hold all experts.

Run: python examples/experts_service.py
Nobody asks for longer than the deadline, which is no failure. Then one of the ranks with experts is
killed, the other one takes its experts, and a new rank joins. torchrun ends all ranks when one
dies, so this file starts its ranks itself: what a supervisor does.
Prints: the device, then from rank 0 "experts on ranks [2, 3]: answers are right", the same after an
idle while, "experts on ranks [2]: answers are right", "experts on ranks [2, 3]: answers are right".
"""

import contextlib
import multiprocessing
import signal
import tempfile
import time

import torch
import torch.distributed as dist
from devices import describe, take_device

import epmoe

ASKING = 2  # ranks 0 and 1 bring tokens, as those that compute attention do
HOLDING = 2  # ranks 2 and 3 hold the experts
RANKS = ASKING + HOLDING
VICTIM = 3
E = 8  # experts, over all ranks
K = 2  # experts of a token
D = 64  # hidden size
DEADLINE_S = 3.0  # of a round that has begun
IDLE_S = 2 * DEADLINE_S


def make_config():
    owners = [ASKING + expert % HOLDING for expert in range(E)]
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": RANKS},
        placement={"strategy": "explicit", "assignment": owners},
        capacity={"max_num_tokens_per_rank": 16},
        # Ranks that hold experts wait for tokens as long as it takes.
        exchange={"timeout_s": DEADLINE_S, "idle": "wait"},
    )


def ask(ep, rounds):
    """A rank without experts: it brings tokens, and compares y with what experts should do."""
    for i in range(rounds):
        T = 1 + (i + ep.rank) % 16
        x_TD = torch.randn(T, D, device=ep.device)
        ids_TK = (torch.arange(T * K, device=ep.device).view(T, K) + i) % E
        weights_TK = torch.full((T, K), 1 / K, device=ep.device)
        dispatched = ep.dispatch(x_TD, ids_TK, weights_TK)
        y_TD = ep.combine(dispatched.rows, dispatched)
        # On a GPU the host runs ahead: `check` waits, and raises what went wrong.
        ep.check()
        factor_T1 = (weights_TK * (1 + ids_TK)).sum(1, keepdim=True)
        torch.testing.assert_close(y_TD, x_TD * factor_T1)
    if ep.rank == 0:
        holders = sorted(set(ep.placement.owners))
        print(f"experts on ranks {holders}: answers are right", flush=True)


def serve(ep, rounds):
    """A rank with experts: expert e multiplies its rows by 1 + e. It sleeps while nobody asks."""
    factors = torch.tensor([1.0 + expert for expert in ep.logical_experts()], device=ep.device)
    no_x = torch.empty(0, D, device=ep.device)
    no_ids = torch.empty(0, K, dtype=torch.int64, device=ep.device)
    no_weights = torch.empty(0, K, device=ep.device)
    for _ in range(rounds):
        dispatched = ep.dispatch(no_x, no_ids, no_weights)
        factors_N = factors.repeat_interleave(dispatched.tokens_per_expert)
        rows_ND = dispatched.rows[: len(factors_N)] * factors_N[:, None]
        ep.combine(rows_ND, dispatched)
        ep.check()


def play(ep, rounds):
    if ep.num_local_experts == 0:
        ask(ep, rounds)
    else:
        serve(ep, rounds)


def load(moves):
    """Bring the weights of experts that this rank gets. Here they are but a number each."""


def run_first(rank, folder, device):
    """A rank of the first group."""
    # Meet the other ranks over a store in the folder, which outlives every rank, and serve.
    store = epmoe.folder_store(folder)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ep = epmoe.ExpertParallel(make_config(), device=device)
    play(ep, 10)

    # Nobody has a request for twice the deadline. The ranks with experts wait in dispatch.
    if rank < ASKING:
        time.sleep(IDLE_S)
    play(ep, 10)

    if rank == VICTIM:
        signal.raise_signal(signal.SIGKILL)

    # The death ends a round of the others by an EPTimeoutError. Recover outside of this block,
    # since the exception holds the old windows.
    with contextlib.suppress(epmoe.EPTimeoutError):
        play(ep, 1_000_000)

    # The rank that is left takes the experts. Ranks without experts stay without.
    epmoe.recover(ep, folder, load)
    play(ep, 10)

    # Between two rounds, wait for the new rank, and spread the experts over both.
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
