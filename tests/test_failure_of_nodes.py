"""Two nodes of two ranks, of which one rank dies or stops: every rank, on both nodes, names it in time.

The tests start their own processes, since torchrun would end the survivors.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import context

import epmoe
from epmoe.exchange.health import EPTimeoutError

RANKS, VICTIM = 4, 2
TIMEOUT_S = 2.0
IN_TIME_S = TIMEOUT_S + 2.0


def play_round(ep: epmoe.ExpertParallel) -> None:
    """One round of 6 tokens with experts that return their input, checked."""
    x = torch.full((6, 64), 1.0 + ep.rank)
    ids = (torch.arange(12).view(6, 2) + ep.rank) % 7
    d = ep.dispatch(x, ids, torch.full((6, 2), 0.5))
    assert torch.equal(ep.combine(d.rows, d), x)


def run(rank: int, store: Path, pipe: Connection, victim: Callable) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    config = epmoe.EPConfig(
        model={"num_experts": 7, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"},
        topology={"ep_size": RANKS, "ranks_per_node": 2},
        capacity={"max_num_tokens_per_rank": 8},
        exchange={"timeout_s": TIMEOUT_S, "warmup_timeout_s": 30.0},
    )
    ep = epmoe.ExpertParallel(config)
    for _ in range(20):
        play_round(ep)
    if rank == VICTIM:
        victim(ep)
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            play_round(ep)
    except EPTimeoutError as error:
        pipe.send((error.missing_ranks, str(error), time.monotonic() - started, ep.survivors()))
    wait([pipe], 60)  # a process that has ended is no survivor
    ep.close()
    os._exit(0)  # tearing down the group of a killed rank may hang


def dies(ep: epmoe.ExpertParallel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_a_round(ep: epmoe.ExpertParallel) -> None:
    ep.dispatch(torch.ones(6, 64), torch.zeros(6, 2, dtype=torch.int32), torch.ones(6, 2))
    dies(ep)


def stops(ep: epmoe.ExpertParallel) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("fault", [dies, dies_in_a_round, stops])
def test_every_rank_names_the_rank_that_is_gone(fault, tmp_path):
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=run, args=(rank, tmp_path / "store", theirs, fault), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for rank in range(RANKS):
            if rank != VICTIM:
                assert wait([pipes[rank]], 60), f"rank {rank} does not report"
                missing, message, took, survivors = pipes[rank].recv()
                assert missing == [VICTIM], message
                assert took < IN_TIME_S, message
                assert survivors == [0, 1, 3]
        for rank in {*range(RANKS)} - {VICTIM}:
            pipes[rank].send("end")
        for rank, process in enumerate(processes):
            process.join(0 if rank == VICTIM else 30)
            assert rank == VICTIM or process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
