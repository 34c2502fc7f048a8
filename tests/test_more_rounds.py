"""Whether a rank has more rounds, in one process: what a round tells, and how the wait for it ends."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import alone

import epmoe
from epmoe import EPTimeoutError
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import RoundState
from epmoe.native.layouts import struct

CONFIG = alone(max_tokens=8)
INPUTS = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)


def test_a_round_tells_whether_more_follow():
    with epmoe.ExpertParallel(CONFIG) as ep:
        exchange = ep.exchange
        for has_more in (True, False, True):
            with exchange.rounds.sending(has_more):
                dispatched = ep.dispatch(*INPUTS)
            assert exchange.has_more_rounds() is has_more
            ep.combine(dispatched.rows, dispatched)
            assert exchange.has_more_rounds() is has_more
        dispatched = ep.dispatch(*INPUTS)  # tells nothing
        ep.combine(dispatched.rows, dispatched)
        assert not exchange.has_more_rounds()


def test_a_call_that_fails_tells_nothing_in_the_next_one():
    with epmoe.ExpertParallel(CONFIG) as ep:
        exchange = ep.exchange
        with pytest.raises(ValueError, match="`x` has 9 tokens"), exchange.rounds.sending(True):
            ep.dispatch(torch.randn(9, 64), *INPUTS[1:])
        dispatched = ep.dispatch(*INPUTS)
        ep.combine(dispatched.rows, dispatched)
        assert not exchange.has_more_rounds()


@pytest.mark.parametrize("ends_by", ["an answer", "a failure", "a deadline"])
def test_the_wait_on_a_gpu(ends_by, monkeypatch):
    """In round 5, after an answer of round 4, which the wait must not take."""
    progress, late = struct("Progress")(phases=4 * 5), EPTimeoutError("dispatch", 5, [0], [0], "late")
    progress.has_more_rounds, looks = 4 << 1 | 1, iter(range(3))

    def check() -> None:
        if next(looks) == 2 and ends_by == "a failure":
            raise late
        if ends_by == "an answer":
            progress.has_more_rounds = 5 << 1

    if ends_by == "a deadline":
        monkeypatch.setattr("epmoe.exchange.node._SPIN_S", 0.0)
    wait = Mock(side_effect=late)
    exchange = SimpleNamespace(
        device=torch.device("cuda"), rounds=RoundState(progress), config=CONFIG, check=check, wait_for_device=wait
    )
    has_more_rounds = partial(NodeExchange.has_more_rounds, exchange)
    if ends_by == "an answer":
        assert not has_more_rounds()
    else:
        with pytest.raises(EPTimeoutError, match="late"):
            has_more_rounds()
    assert wait.called == (ends_by == "a deadline")
