"""How long this rank has waited for each rank: who is late. Who stays away: test_rounds.py."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist
from exchanges import first_round, given, make_tokens, run_experts
from helpers import ON_THE_CPU, RANKS_SHARE_GPUS
from waits import ctrl_c

import epmoe

LATE_S = 0.35  # longer than three sleeps of a wait, which let Python handle its signals
OWN_GPUS = pytest.mark.skipif(RANKS_SHARE_GPUS, reason="needs a GPU for each rank")


@OWN_GPUS
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_the_late_rank_is_told_from_the_others(make_ep, rank, size, device, stage):
    """The time of a wait counts once and in full, however often the wait was interrupted."""
    ep, late = make_ep(), size - 1
    inputs = given(ep, first_round(ep, 6))
    d = ep.dispatch(*inputs) if stage == "combine" else None
    before = ep.health().waited_s
    assert ep.health(wait=False) == ep.health()
    dist.barrier()
    if rank == late:
        threading.Event().wait(LATE_S)
    started = time.perf_counter()
    if stage == "dispatch":
        d = ep.dispatch(*inputs)
    else:
        ep.combine(run_experts(ep, d), d)
    ep.check()
    took = time.perf_counter() - started
    waited = [after - b for after, b in zip(ep.health().waited_s, before, strict=True)]
    if stage == "dispatch":
        ep.abort(d)
    own = 0 if device.type == "cpu" else 1e-3  # on a GPU another block raises it
    assert waited[rank] <= own, "its own signal is always there"
    assert all(0 <= seconds <= took for seconds in waited)
    if rank != late and took > 0.1:  # a busy machine may hold up this rank for longer than the late one
        assert waited[late] >= 0.8 * took
        assert waited[late] == max(waited)


@ON_THE_CPU
def test_a_wait_that_another_rank_ends_counts(make_ep, rank, size, device):
    """Rank 0 stays away. Rank 2 starts late, and rank 1 ends its wait, which is shorter than one sleep."""
    if size < 3:
        pytest.skip("needs three ranks")
    ep = make_ep(timeout_s=0.5)
    inputs = given(ep, first_round(ep, 6))
    before = ep.health().waited_s[0]
    dist.barrier()
    if rank != 0:
        if rank == 2:
            threading.Event().wait(0.43)
        started = time.perf_counter()
        with pytest.raises(epmoe.EPTimeoutError):
            ep.dispatch(*inputs)
        took, waited = time.perf_counter() - started, ep.health().waited_s[0] - before
        assert waited <= took
        if rank != 2 or took > 0.03:  # a busy machine may hold rank 2 up until the wait of rank 1 is over
            assert waited >= 0.5 * took
    dist.barrier()


@ON_THE_CPU
def test_a_wait_that_an_exception_ends_counts_until_then(make_ep, rank, size, device):
    """Rank 0 waits twice: the others come only after an exception has ended its first wait."""
    ep = make_ep()
    inputs = given(ep, make_tokens(ep.config, rank, 6))
    if rank == 0:
        sent, started = ep.dispatch_send(*inputs), time.perf_counter()
        with ctrl_c(0.15):
            ep.dispatch_recv(sent)
        first = ep.health().waited_s
        assert first[0] == 0 and all(0.1 < seconds < time.perf_counter() - started for seconds in first[1:])
        dist.barrier()
        d = ep.dispatch_recv(sent)
        assert ep.health().waited_s >= first
    else:
        dist.barrier()
        d = ep.dispatch(*inputs)
    ep.combine(run_experts(ep, d), d)
