"""The rounds of one process: a failure closes exactly its own round, and the next one is whole. Between ranks:
tests/distributed/test_exceptions.py."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from helpers import alone

import epmoe
from epmoe.exchange.health import MISMATCH

pytestmark = pytest.mark.usefixtures("serving")

X = torch.randn(3, 64)
INPUTS = X, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)


@pytest.fixture
def ep() -> Iterator[epmoe.ExpertParallel]:
    with epmoe.ExpertParallel(alone()) as ep:
        yield ep


def mismatch(ep: epmoe.ExpertParallel) -> None:
    """Leaves in the status words what kernels leave when the ranks' calls differ."""
    status = ep.exchange.status
    status.epoch, status.code = ep.exchange.rounds.count, MISMATCH


def assert_next_round_is_whole(ep: epmoe.ExpertParallel) -> None:
    d = ep.dispatch(*INPUTS)
    assert torch.equal(ep.combine(d.rows, d), X)


@pytest.mark.parametrize("call", ["dispatch_recv", "combine", "combine_send", "combine_recv", "abort"])
def test_a_mismatch_closes_the_round_whichever_call_sees_it(ep, call):
    for n in (1, 3):
        sent = ep.dispatch_send(*INPUTS)
        handle = sent if call == "dispatch_recv" else ep.dispatch_recv(sent)
        rows = [handle.rows] if call in ("combine", "combine_send") else []
        if call == "combine_recv":
            ep.combine_send(handle.rows, handle)
        mismatch(ep)
        with pytest.raises(epmoe.EPMismatchError, match=f"round {n}: .* The round was closed"):
            getattr(ep, call)(*rows, handle)
        with pytest.raises(ValueError, match=f"round {n} is closed: dispatch comes before combine"):
            ep.abort(handle)
        assert_next_round_is_whole(ep)


def test_the_handle_of_another_round_closes_none(ep):
    first = ep.dispatch(*INPUTS)
    ep.combine(first.rows, first)
    d = ep.dispatch(*INPUTS)
    mismatch(ep)
    with pytest.raises(epmoe.EPMismatchError):
        ep.combine(d.rows, first)
    assert torch.equal(ep.combine(d.rows, d), X)


def test_an_abort_without_a_handle_leaves_no_trace(ep):
    """A mismatch or an overflow of the round that is given up does not hit the next round."""
    status = ep.exchange.status
    for call in (ep.dispatch, ep.dispatch_send):
        handle = call(*INPUTS)
        status.code, status.needed_rows = MISMATCH, 99
        ep.abort()
        assert status.code == status.needed_rows == 0
        with pytest.raises(ValueError, match=f"round {handle.epoch} is closed"):
            ep.abort(handle)
        assert_next_round_is_whole(ep)
    ep.close()
    ep.abort()  # a closed ExpertParallel has no round


def test_experts_that_ctrl_c_ends(ep):
    def experts(*args: object) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return torch.zeros(0)

    layer = epmoe.MoELayer(ep, torch.ones(8, 64), experts)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            layer(torch.ones(4, 64))
        assert_next_round_is_whole(ep)


def test_a_combine_that_its_operator_refuses_may_be_repeated(ep, monkeypatch):
    def refuse(*args: object) -> None:
        raise MemoryError

    d = ep.dispatch(*INPUTS)
    for call in ("combine", "combine_send"):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(epmoe.native.ops, call, refuse)
            getattr(ep, call)(d.rows, d)
    assert torch.equal(ep.combine(d.rows, d), X)
