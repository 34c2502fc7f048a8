"""Many rounds with random delays on every rank, and a rank that stops in the middle of a round."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, make_tokens, run_round

import epmoe

TOKENS = (0, 1, 7, 16, 33, 64, 200, 300)
K = 4
VARIANTS = 3  # inputs of each size


def delay_randomly(device: torch.device, rng: random.Random) -> None:
    """Delays the GPU, in 10 % of calls by up to 200 000 cycles (0.1 ms), or else the host, in 2 % by up to 1 ms."""
    if device.type == "cuda":
        if rng.random() < 0.1:
            torch.cuda._sleep(rng.randrange(200_000))
    elif rng.random() < 0.02:
        time.sleep(rng.random() * 1e-3)


@pytest.mark.slow
def test_many_rounds(make_ep, rank, size, device):
    """The experts return their rows, and all weights are 1: y is exactly K · x, in integers, whatever the delays."""
    ep = make_ep(ll_max_tokens=256, experts=4 * size, top_k=K, hidden=256, dtype="bfloat16", max_tokens=max(TOKENS))
    inputs = []
    for T in TOKENS:
        for seed in range(VARIANTS):
            tokens = make_tokens(ep.config, rank, T, seed=seed)
            x = tokens.x.mul(4).round().clamp(-15, 15)
            case = (x, tokens.ids, torch.ones(T, K), K * x)
            inputs.append(tuple(tensor.to(device) for tensor in case))
    rng = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    memory = None
    gc.collect()  # so that no garbage of earlier tests is freed between the two readings of memory
    for n in range(10_000 if device.type == "cuda" else 300):
        x, ids, weights, want = rng.choice(inputs)
        delay_randomly(device, rng)
        d = ep.dispatch(x, ids, weights)
        delay_randomly(device, rng)
        y = ep.combine(d.rows, d)
        wrong += (y != want).sum()
        del y
        if device.type == "cuda" and n == 1000:
            memory = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    ep.check()
    assert wrong.item() == 0
    assert ep.health().timeouts == 0
    if memory:
        assert memory == (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


@pytest.mark.slow
def test_rank_stopped_in_the_middle_of_a_round(make_ep, rank, size, device):
    """SIGSTOP, as from a debugger or a scheduler: the other ranks name the stopped one, and their device works on."""
    if size == 1:
        pytest.skip("needs a rank that waits for another")
    ep = make_ep(timeout_s=1.0)
    tokens = make_tokens(ep.config, rank, 9)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    dist.barrier()
    if rank == 0:
        me = os.getpid()
        command = f"kill -STOP {me}; sleep 4; kill -CONT {me}"
        with subprocess.Popen(["bash", "-c", command], start_new_session=True) as stopper:
            stopper.wait()  # this process is stopped meanwhile
        with pytest.raises(epmoe.EPTimeoutError):
            run_round(ep, tokens)
            ep.check()
    else:
        with pytest.raises(epmoe.EPTimeoutError, match=r"dispatch of round 2 .*rank\(s\) \[0\]") as caught:
            d = ep.dispatch(*(t.to(device) for t in (tokens.x, tokens.ids, tokens.weights)))
            assert ep.combine(d.rows, d).eq(0).all()  # only on GPUs: the host has not seen the error yet
            ep.check()
        assert caught.value.missing_ranks == [0]
        for _ in range(2):
            with pytest.raises(epmoe.EPTimeoutError):
                run_round(ep, tokens)
        eye = torch.eye(64, device=device)
        assert torch.equal(eye @ eye, eye)
    dist.barrier()
    again = make_ep()
    assert_y(run_round(again, tokens), again.config, tokens)
