"""How long this rank has waited for each rank: who is late. Who stays away: test_rounds.py."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress

import pytest
import torch.distributed as dist
from exchanges import first_round, given, make_tokens, run_experts
from helpers import ON_THE_CPU, RANKS_SHARE_GPUS
from waits import LONG_S, ctrl_c, says_that_it_waits, store

import epmoe

LATE_S = 0.35  # longer than three sleeps of a wait, which let Python handle its signals
BRIEF_S = 0.02  # with the looks at rank 2 before, shorter than one
OWN_GPUS = pytest.mark.skipif(RANKS_SHARE_GPUS, reason="needs a GPU for each rank")


@OWN_GPUS
@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_the_late_rank_is_told_from_the_others(make_ep, rank, size, device, stage):
    """The time of a wait counts once and in full, however often the wait was interrupted."""
    ep = make_ep(timeout_s=LONG_S)
    late = size - 1
    inputs = given(ep, first_round(ep, 6))
    d = ep.dispatch(*inputs) if stage == "combine" else None
    before = ep.health().waited_s
    assert ep.health(wait=False) == ep.health()
    # The last rank comes once all others have waited for so long.
    keys = [f"waits{r}" for r in range(late)]
    if rank == late and keys:
        store().wait(keys)
    started = time.perf_counter()
    with says_that_it_waits(keys[rank], LATE_S) if rank != late else nullcontext():
        if stage == "dispatch":
            d = ep.dispatch(*inputs)
        else:
            ep.combine(run_experts(ep, d), d)
        ep.check()
        took = time.perf_counter() - started
    if rank != late:
        store().delete_key(keys[rank])
    # The others have waited for it, and it for nobody.
    waited = [after - b for after, b in zip(ep.health().waited_s, before, strict=True)]
    if stage == "dispatch":
        ep.abort(d)
    own = 0 if device.type == "cpu" else 1e-3  # on a GPU another block raises it
    assert waited[rank] <= own, "its own signal is always there"
    assert all(0 <= seconds <= took for seconds in waited)
    if rank != late:
        assert LATE_S <= waited[late] == max(waited)


@ON_THE_CPU
def test_a_wait_that_another_rank_ends_counts(make_ep, rank, size, device):
    """Rank 0 stays away. Rank 1 leaves and so ends the wait of rank 2, which is shorter than one
    sleep.
    """
    if size < 3:
        pytest.skip("needs three ranks")
    ep = make_ep(timeout_s=LONG_S)
    inputs = given(ep, first_round(ep, 6))
    before = ep.health().waited_s[0]
    dist.barrier()
    # Rank 1 leaves once rank 2 waits,
    if rank == 1:
        store().wait(["waits"])
        with suppress(LookupError), ep:
            raise LookupError
    elif rank == 2:
        # whose wait ends at once, and counts.
        started = time.perf_counter()
        with says_that_it_waits("waits", BRIEF_S), pytest.raises(epmoe.EPTimeoutError):
            ep.dispatch(*inputs)
        took = time.perf_counter() - started
        waited = ep.health().waited_s[0] - before
        assert BRIEF_S <= waited <= took
        store().delete_key("waits")
    dist.barrier()


@ON_THE_CPU
def test_a_wait_that_an_exception_ends_counts_until_then(make_ep, rank, size, device):
    """Rank 0 waits twice: the others come only after an exception has ended its first wait."""
    ep = make_ep()
    inputs = given(ep, make_tokens(ep.config, rank, 6))
    if rank == 0:
        # The first wait ends by Ctrl-C, before any other rank has come,
        sent = ep.dispatch_send(*inputs)
        started = time.perf_counter()
        with ctrl_c(after_s=0.15):
            ep.dispatch_recv(sent)
        first = ep.health().waited_s
        assert first[0] == 0 and all(
            0.1 < seconds < time.perf_counter() - started for seconds in first[1:]
        )
        # and the second one by their coming.
        dist.barrier()
        d = ep.dispatch_recv(sent)
        assert ep.health().waited_s >= first
    else:
        dist.barrier()
        d = ep.dispatch(*inputs)
    ep.combine(run_experts(ep, d), d)
