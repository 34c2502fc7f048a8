"""The rounds of one process: a failure closes exactly its own round, and the next one is whole. Between ranks:
tests/distributed/test_exceptions.py."""

from __future__ import annotations

import pytest
import torch
from helpers import alone

import epmoe
from epmoe.exchange.health import STATUS


def mismatch(ep: epmoe.ExpertParallel) -> None:
    """Leaves in the status words what kernels leave when the ranks' calls differ."""
    code, epoch = (STATUS.index(name) for name in ("code", "epoch"))
    ep._exchange.status[epoch], ep._exchange.status[code] = ep._exchange.rounds.count, 2


@pytest.mark.parametrize("call", ["dispatch_recv", "combine", "combine_send", "combine_recv", "abort"])
def test_a_mismatch_closes_the_round_whichever_call_sees_it(call):
    with epmoe.ExpertParallel(alone()) as ep:
        x, ids, weights = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
        for n in (1, 3):
            sent = ep.dispatch_send(x, ids, weights)
            handle = sent if call == "dispatch_recv" else ep.dispatch_recv(sent)
            rows = [handle.rows] if call in ("combine", "combine_send") else []
            if call == "combine_recv":
                ep.combine_send(handle.rows, handle)
            mismatch(ep)
            with pytest.raises(epmoe.EPMismatchError, match=f"round {n}: .* The round was closed"):
                getattr(ep, call)(*rows, handle)
            with pytest.raises(ValueError, match=f"round {n} is closed: dispatch comes before combine"):
                ep.abort(handle)
            d = ep.dispatch(x, ids, weights)
            assert torch.equal(ep.combine(d.rows, d), x)


def test_the_handle_of_another_round_closes_none():
    with epmoe.ExpertParallel(alone()) as ep:
        x, ids, weights = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
        first = ep.dispatch(x, ids, weights)
        ep.combine(first.rows, first)
        d = ep.dispatch(x, ids, weights)
        mismatch(ep)
        with pytest.raises(epmoe.EPMismatchError):
            ep.combine(d.rows, first)
        assert torch.equal(ep.combine(d.rows, d), x)
