"""`poll` raises what kernels have reported, without a wait. Here one process; with several ranks: test_failure.py and
tests/distributed/test_waited.py; with CUDA graphs: tests/distributed/test_graphs.py."""

from __future__ import annotations

import pytest
import torch
from helpers import alone
from test_rounds import mismatch

import epmoe
from epmoe.exchange.health import TIMEOUT

X, IDS, WEIGHTS = torch.ones(4, 64), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)


def make_ep(**capacity: object) -> epmoe.ExpertParallel:
    return epmoe.ExpertParallel(alone(capacity=capacity))


def test_nothing_to_report():
    with make_ep() as ep:
        ep.poll()
        d = ep.dispatch(X, IDS, WEIGHTS)
        ep.poll()  # between any two calls
        ep.combine(d.rows, d)
        ep.poll()
    with pytest.raises(RuntimeError, match="this ExpertParallel is closed"):
        ep.poll()


def test_an_overflow_is_raised_once_and_leaves_the_round_open():
    with make_ep(max_expert_rows=5) as ep:
        for _ in range(2):
            d = ep.dispatch(X, IDS, WEIGHTS)
            with pytest.raises(epmoe.EPOverflowError, match=r"needed 8 .*set it to at\s+least 8"):
                ep.poll()
            ep.poll()
            assert ep.combine(d.rows, d).shape == X.shape


def test_an_overflow_beside_an_abort_leaves_nothing_for_the_next_round():
    """One error tells of both."""
    with make_ep(max_expert_rows=5) as ep:
        d = ep.dispatch(X, IDS, WEIGHTS)
        ep.exchange.status.aborted, ep.exchange.status.aborted_epoch = 0b1, 1
        with pytest.raises(epmoe.EPOverflowError, match="needed 8") as caught:
            ep.combine(d.rows, d)
        assert [note[:42] for note in caught.value.__notes__] == ["round 1: rank(s) [0] aborted the round, af"]
        d = ep.dispatch(X[:1], IDS[:1], WEIGHTS[:1])
        assert torch.equal(ep.combine(d.rows, d), 2 * X[:1])


def test_an_overflow_that_is_only_counted():
    with make_ep(max_expert_rows=5, on_overflow="drop") as ep:
        d = ep.dispatch(X, IDS, WEIGHTS)
        ep.poll()
        ep.combine(d.rows, d)
        assert ep.health().dropped_pairs == 3


def test_a_mismatch():
    with make_ep() as ep:
        d = ep.dispatch(X, IDS, WEIGHTS)
        mismatch(ep)
        with pytest.raises(epmoe.EPMismatchError, match="round 1"):
            ep.poll()
        ep.poll()
        ep.abort(d)
        d = ep.dispatch(X, IDS, WEIGHTS)
        assert torch.equal(ep.combine(d.rows, d), 2 * X)


def test_a_timeout_is_raised_by_every_poll():
    with make_ep() as ep:
        ep.exchange.status.missing, ep.exchange.status.code = 1, TIMEOUT
        for raising in (ep.poll, ep.check, ep.poll):
            with pytest.raises(epmoe.EPTimeoutError, match=r"rank\(s\) \[0\]"):
                raising()
