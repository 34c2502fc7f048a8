"""Another kernel holds most multiprocessors of the GPU, or all of them, for longer than the deadline."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from busy import Holder
from exchanges import assert_y, make_tokens, run_experts, run_fused_experts, run_round
from helpers import ON_GPUS, RANKS_SHARE_GPUS, poison_

import epmoe

pytestmark = [ON_GPUS, pytest.mark.skipif(RANKS_SHARE_GPUS, reason="needs a GPU for each rank")]

DEADLINE_S = 1.0


@pytest.fixture
def hold() -> Holder:
    return Holder()


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("T", [1, 8, 100])
@pytest.mark.parametrize("free", [32, 12, 1])
def test_a_busy_gpu_only_slows_the_round(make_ep, rank, hold, free, T, layout):
    """Rounds end while the other kernel still runs: no block waits for one that cannot start."""
    ep = make_ep(ll_max_tokens=64, max_tokens=128, hidden=1024, timeout_s=DEADLINE_S)
    tokens = make_tokens(ep.config, rank, T)
    assert_y(run_round(ep, tokens, layout=layout), ep.config, tokens)
    ended = hold(torch.cuda.get_device_properties().multi_processor_count - free, 2.5)
    for _ in range(3):
        y = run_round(ep, tokens, layout=layout)
    assert not ended.query(), "the other kernel ended first"
    assert_y(y, ep.config, tokens)
    ep.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("T", [40, 100, 2000, 4096])
@pytest.mark.parametrize("num_sms", [None, 20, 24])
@pytest.mark.parametrize("free", [60, 12, 1])
def test_every_row_is_written(make_ep, rank, hold, free, num_sms, T, layout):
    """Of each variant that the launch policy has: blocks that find others missing leave, and their items are taken."""
    ep = make_ep(
        ll_max_tokens=64, max_tokens=4096, hidden=1024, dtype="bfloat16", timeout_s=20.0, exchange={"num_sms": num_sms}
    )
    tokens = make_tokens(ep.config, rank, T)
    x, ids, weights = (t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights))
    run = run_experts if layout == "expert" else run_fused_experts
    whole = run_round(ep, tokens, layout=layout)
    assert_y(whole, ep.config, tokens)
    for _ in range(6):
        d = ep.dispatch(x, ids, weights, layout=layout)
        rows, y = run(ep, d), poison_(torch.empty_like(x))
        hold(torch.cuda.get_device_properties().multi_processor_count - free, 0.15)
        (ep.combine if layout == "expert" else ep.combine_partial)(rows, d, out=y)
        assert torch.equal(y, whole)
        ep.check()


def test_a_dead_peer_is_named_on_a_busy_gpu(make_ep, rank, size, hold):
    """The error comes at the deadline, although blocks of this rank's kernel cannot start."""
    ep = make_ep(max_tokens=128, hidden=1024, timeout_s=DEADLINE_S)
    tokens = make_tokens(ep.config, rank, 128)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    if rank != 0:
        x, ids, weights = (t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights))
        ended = hold(torch.cuda.get_device_properties().multi_processor_count - 4, 4.0)
        begin = time.monotonic()
        ep.dispatch(x, ids, weights)
        with pytest.raises(epmoe.EPTimeoutError, match=r"rank\(s\) \[0\]"):
            ep.check()
        assert time.monotonic() - begin < DEADLINE_S + 1
        assert not ended.query()
        torch.cuda.synchronize()
    dist.barrier()


def test_a_kernel_that_never_starts(make_ep, rank, size, hold):
    """All multiprocessors of rank 0 are held: its own deadline on the host says so, and the others name it."""
    ep = make_ep(max_tokens=16, timeout_s=DEADLINE_S)
    tokens = make_tokens(ep.config, rank, 16)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    if rank == 0:
        hold(torch.cuda.get_device_properties().multi_processor_count, 4.0)
    dist.barrier()
    x, ids, weights = (t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights))
    d = ep.dispatch(x, ids, weights)
    why = "its own kernel was not scheduled" if rank == 0 else r"waiting for rank\(s\) \[0\]"
    begin = time.monotonic()
    with pytest.raises(epmoe.EPTimeoutError, match=why) as caught:
        ep.check(timeout_s=DEADLINE_S + 0.5)
    assert caught.value.missing_ranks == [0]
    assert time.monotonic() - begin < DEADLINE_S + 2
    torch.cuda.synchronize()
    if rank == 0:  # its kernel ran after all: the others have given up
        with pytest.raises(epmoe.EPTimeoutError, match="this rank came too late, or its own kernel was not scheduled"):
            ep.combine(run_experts(ep, d), d)
            ep.check()
    dist.barrier()
