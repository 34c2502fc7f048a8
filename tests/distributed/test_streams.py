"""The calls of a round on different CUDA streams: they run in the order of the calls."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, given, make_tokens, run_experts
from helpers import ON_GPUS

pytestmark = ON_GPUS
LONG = 4_000_000  # cycles: about 2 ms, longer than a round


@pytest.mark.parametrize("T", [8, 100])
@pytest.mark.parametrize("phases", [False, True])
def test_calls_change_the_stream(make_ep, rank, size, device, phases, T):
    """Before each call another stream sleeps, with the call before it behind the sleep."""
    ep = make_ep(ll_max_tokens=32, max_tokens=100)
    tokens = make_tokens(ep.config, rank, T)
    x, ids, weights = given(ep, tokens)
    d = ep.dispatch(x, ids, weights)
    rows = run_experts(ep, d)  # of every round
    assert_y(ep.combine(rows, d), ep.config, tokens)
    torch.cuda.synchronize()
    dist.barrier()
    streams, ys = cycle(torch.cuda.Stream() for _ in range(3)), []
    for _ in range(6):
        with torch.cuda.stream(next(streams)):
            torch.cuda._sleep(LONG)
            d = ep.dispatch_send(x, ids, weights) if phases else ep.dispatch(x, ids, weights)
        if phases:
            with torch.cuda.stream(next(streams)):
                d = ep.dispatch_recv(d)
            with torch.cuda.stream(next(streams)):
                torch.cuda._sleep(LONG)
                ep.combine_send(rows, d)
        with torch.cuda.stream(next(streams)):
            ys.append(ep.combine_recv(d) if phases else ep.combine(rows, d))
    ep.check()
    for y in ys:
        assert_y(y, ep.config, tokens)
