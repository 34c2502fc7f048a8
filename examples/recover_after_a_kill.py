"""Rank 1 of three is killed, two go on, and a new rank joins. Run: python
examples/recover_after_a_kill.py

torchrun ends all ranks when one dies, so this file starts its ranks itself: what a supervisor does.
Prints: "3 ranks play", "2 ranks play", "3 ranks play", each from rank 0.
"""

import contextlib
import multiprocessing
import signal
import tempfile

import torch
import torch.distributed as dist

import epmoe

E = 6
D = 64


def config():
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": 2, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": 3},
        capacity={"max_num_tokens_per_rank": 8},
        exchange={"timeout_s": 10.0},
    )


def load(moves):
    """Here the experts return their input. A service copies rows, and reads what has no `source`
    from a checkpoint.
    """


def play(ep, rounds):
    x = torch.full((4, D), 1.0 + ep.rank)
    weights = torch.full((4, 2), 0.5)
    for i in range(rounds):
        ids = (torch.arange(8).view(4, 2) + i) % E
        d = ep.dispatch(x, ids, weights)
        assert torch.equal(ep.combine(d.rows, d), x)
    if ep.rank == 0:
        print(f"{ep.size} ranks play", flush=True)


def run(seat, folder):
    torch.set_num_threads(1)
    if seat is None:
        ep = epmoe.join_group(folder)
    else:
        store = epmoe.folder_store(folder)  # it outlives every rank
        dist.init_process_group("gloo", store=store, rank=seat, world_size=3)
        ep = epmoe.ExpertParallel(config())
        play(ep, 10)
        if seat == 1:
            signal.raise_signal(signal.SIGKILL)
        with contextlib.suppress(
            epmoe.EPTimeoutError
        ):  # go on outside: the exception holds the old windows
            play(ep, 1_000_000)
        epmoe.recover(ep, folder, load)
        play(ep, 10)
        epmoe.recover(ep, folder, load, min_ranks=3)  # between two rounds: wait for the new rank
    play(ep, 10)
    ep.close()
    dist.destroy_process_group()


def main():
    start = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(target=run, args=(seat, folder)) for seat in range(3)]
        for rank in ranks:
            rank.start()
        ranks[1].join()  # the supervisor sees the death, and starts another process
        ranks[1] = start(target=run, args=(None, folder))
        ranks[1].start()
        for rank in ranks:
            rank.join()
        raise SystemExit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
