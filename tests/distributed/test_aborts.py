"""A rank gives a round up, in any state: it waits for nobody, the others finish, and no other round is touched.

Deadlines are 300 s here, so that a test which passes has not run into one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, first_round, given, make_tokens, poison, run_experts, run_round
from helpers import ON_GPUS, ON_THE_CPU
from test_exceptions import AT_ONCE_S, LONG_S, out_of_memory, within, without_rank

from epmoe import EPTimeoutError


@pytest.mark.parametrize("after", ["dispatch_send", "dispatch_recv", "combine_send"])
@pytest.mark.parametrize("alone", [False, True])
def test_abort_without_a_handle(ep, rank, size, after, alone):
    """It closes whatever round is open, a second time does nothing, and the next round is complete."""
    ep.abort()
    for n in range(4):
        tokens = make_tokens(ep.config, rank, 16 - rank, seed=n)
        poison(ep)
        sent = ep.dispatch_send(*given(ep, tokens))
        if alone and rank != 0:
            d = ep.dispatch_recv(sent)
            y = ep.combine(run_experts(ep, d), d)
            assert_y(y, ep.config, without_rank(ep, tokens, 0, sent=after == "combine_send"))
        else:
            if after != "dispatch_send":
                d = ep.dispatch_recv(sent)
            if after == "combine_send":
                ep.combine_send(run_experts(ep, d), d)
            for _ in range(2):
                ep.abort()
            with pytest.raises(ValueError, match=f"round {2 * n + 1} is closed"):
                ep.abort(sent)
        assert_y(run_round(ep, tokens), ep.config, tokens)
    ep.check()


def test_abort_waits_for_nobody(ep, rank, size):
    """Rank 0 aborts before the other ranks have even called dispatch."""
    tokens = make_tokens(ep.config, rank, 9)
    for n in range(3):
        if rank == 0:
            with within(AT_ONCE_S if n else 30.0):  # on GPUs the first call loads the kernels
                ep.dispatch_send(*given(ep, tokens))
                ep.abort()
        dist.barrier()
        if rank != 0:
            assert_y(run_round(ep, tokens), ep.config, without_rank(ep, tokens, 0))
    assert_y(run_round(ep, tokens), ep.config, tokens)


def test_an_abort_takes_nothing_from_the_round_before(ep, rank, size):
    """Rank 0 is done with a round and gives the next one up, while the others have yet to add up its sums of the first.

    Headers hold the counts of two rounds: with one count, that of the abort would hide the sums that lie there.
    """
    if ep.config.topology.num_nodes > 1:
        pytest.skip("a round ends on all nodes together: combine_recv brings the sums back to other nodes")
    for n in range(4):
        tokens = make_tokens(ep.config, rank, 16, seed=n)
        d = ep.dispatch(*given(ep, tokens))
        ep.combine_send(run_experts(ep, d), d)
        if rank == 0:
            assert_y(ep.combine_recv(d), ep.config, tokens)
            ep.dispatch_send(*given(ep, tokens))
            ep.abort()
        dist.barrier()
        if rank != 0:
            assert_y(ep.combine_recv(d), ep.config, tokens)
            assert_y(run_round(ep, tokens), ep.config, without_rank(ep, tokens, 0))
    assert_y(run_round(ep, tokens), ep.config, tokens)


def test_ranks_that_abort_at_random(ep, rank, size):
    """80 rounds without a barrier, in which each rank gives up where it likes; rounds that none gives up are right."""
    choice = torch.randint(0, 12, (80, size), generator=torch.Generator().manual_seed(3)).tolist()
    for n, stops in enumerate(choice):
        tokens = make_tokens(ep.config, rank, (5 * n * (rank + 1)) % 17, seed=n)
        inputs = given(ep, tokens)
        if stops[rank] == 0:
            ep.dispatch_send(*inputs)
            ep.abort()
            continue
        if stops[rank] == 1:
            ep.dispatch(*inputs)
            ep.abort()
            continue
        if stops[rank] == 2:
            d = ep.dispatch(*inputs)
            ep.combine_send(run_experts(ep, d), d)
            ep.abort()
            continue
        d = ep.dispatch(*inputs)
        y = ep.combine(run_experts(ep, d), d)
        for other, stop in enumerate(stops):
            if stop in (0, 1, 2):
                tokens = without_rank(ep, tokens, other, sent=stop == 2)
        assert_y(y, ep.config, tokens)
    ep.check()


@ON_THE_CPU
def test_ranks_that_never_end_a_round_that_was_given_up(make_ep, rank, size):
    """The next dispatch of the rank that aborted waits for them, up to its deadline."""
    ep = make_ep(timeout_s=0.4)
    tokens, topology = make_tokens(ep.config, rank, 9), ep.config.topology
    awaited = range(topology.ranks_here, size, topology.ranks_here) if topology.num_nodes > 1 else range(1, size)
    assert_y(run_round(ep, tokens), ep.config, tokens)
    if rank == 0:
        ep.dispatch_send(*given(ep, tokens))
        ep.abort()
        for _ in range(2):
            with within(0.4 + AT_ONCE_S), pytest.raises(EPTimeoutError, match="combine of round 2") as caught:
                ep.dispatch(*given(ep, tokens))
            assert caught.value.missing_ranks == [*awaited]
    dist.barrier()


def test_abort_after_out_of_memory(ep, rank, size, monkeypatch):
    """Every allocation of torch fails, from before combine until the round is closed."""
    tokens = first_round(ep, 16)
    for call in ("dispatch_send", "dispatch"):
        d = getattr(ep, call)(*given(ep, tokens))
        rows = run_experts(ep, d) if call == "dispatch" else None
        with monkeypatch.context() as patch:
            for owner, names in ((torch, ("empty", "zeros", "empty_like")), (torch.Tensor, ("new_empty", "clone"))):
                for name in names:
                    patch.setattr(owner, name, out_of_memory)
            if rows is not None:
                with pytest.raises(torch.cuda.OutOfMemoryError):
                    ep.combine(rows, d)
            ep.abort()
        assert_y(run_round(ep, tokens), ep.config, tokens)
    ep.check()


@ON_GPUS
@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_abort_on_a_gpu_that_is_full(make_ep, rank, size, device, payload):
    ep = make_ep(hidden=256, top_k=1, dtype="float32", exchange={"payload": payload}, timeout_s=LONG_S)
    tokens = make_tokens(ep.config, rank, 16)
    d = ep.dispatch(*given(ep, tokens))
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    ep.abort(d)
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    run_round(ep, tokens)
    ep.check()
