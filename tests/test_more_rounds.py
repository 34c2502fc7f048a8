"""Whether any rank needs more rounds, in one process: what dispatch answers, and how the wait for an answer ends."""

from __future__ import annotations

from ctypes import c_int64
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import epmoe
from epmoe import EPTimeoutError
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import PROGRESS, RoundState

ANSWER = PROGRESS.index("answer")
CONFIG = epmoe.EPConfig(
    model={"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"},
    topology={"ep_size": 1},
    capacity={"max_num_tokens_per_rank": 8},
)
INPUTS = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)


def test_dispatch_answers_where_it_is_asked():
    with epmoe.ExpertParallel(CONFIG) as ep:
        for more in (True, False, True):
            with ep._exchange.rounds.asking(more):
                dispatched = ep.dispatch(*INPUTS)
            assert ep._exchange.has_more_rounds() is more
            ep.combine(dispatched.rows, dispatched)
            assert ep._exchange.has_more_rounds() is more
        dispatched = ep.dispatch(*INPUTS)
        ep.combine(dispatched.rows, dispatched)
        assert ep._exchange.rounds.answer is None  # this round did not ask
        assert not ep._exchange.has_more_rounds()


def test_a_call_that_fails_asks_nothing_of_the_next_one():
    with epmoe.ExpertParallel(CONFIG) as ep:
        with pytest.raises(ValueError, match="`x` has 9 tokens"), ep._exchange.rounds.asking(True):
            ep.dispatch(torch.randn(9, 64), *INPUTS[1:])
        ep.dispatch(*INPUTS)
        ep.abort()
        assert ep._exchange.rounds.answer is None


def on_a_gpu(**options: object) -> SimpleNamespace:
    """An exchange on a GPU in round 5, as far as `has_more_rounds` looks at it; kernels have answered round 4."""
    progress = (c_int64 * len(PROGRESS))()
    progress[PROGRESS.index("phases")], progress[ANSWER] = 4 * 5, 4 << 1 | 1
    exchange = {"check": Mock(), "wait_for_device": Mock(side_effect=EPTimeoutError("dispatch", 5, [0], [0], "late"))}
    return SimpleNamespace(
        device=torch.device("cuda"),
        rounds=RoundState(progress),
        config=CONFIG,
        **exchange | options,
    )


@pytest.mark.parametrize("more", [True, False])
def test_the_answer_of_an_earlier_round_is_not_taken(more):
    looks = iter(range(3))
    exchange = on_a_gpu()

    def check() -> None:
        if next(looks) == 2:
            exchange.rounds.progress[ANSWER] = 5 << 1 | more

    exchange.check = check
    assert NodeExchange.has_more_rounds(exchange) is more


def test_a_failure_that_kernels_report_ends_the_wait():
    exchange = on_a_gpu(check=Mock(side_effect=[None, EPTimeoutError("dispatch", 5, [1], [1], "is missing")]))
    with pytest.raises(EPTimeoutError, match="is missing"):
        NodeExchange.has_more_rounds(exchange)
    assert not exchange.wait_for_device.called


def test_a_kernel_that_never_starts_ends_the_wait(monkeypatch):
    monkeypatch.setattr("epmoe.exchange.node._SPIN_S", 0.0)
    exchange = on_a_gpu()
    with pytest.raises(EPTimeoutError, match="late"):
        NodeExchange.has_more_rounds(exchange)
    exchange.wait_for_device.assert_called_once_with(CONFIG.exchange.warmup_timeout_s)
