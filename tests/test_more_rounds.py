"""`epmoe.exchange.more_rounds` in one process: what dispatch answers, and how the wait for an answer ends."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import epmoe
from epmoe import EPTimeoutError
from epmoe.exchange.more_rounds import another, asking
from epmoe.exchange.round_state import ANSWER, ASKED, PROGRESS

CONFIG = epmoe.EPConfig(
    model={"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"},
    topology={"ep_size": 1},
    capacity={"max_num_tokens_per_rank": 8},
)
INPUTS = torch.randn(3, 64), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)


def test_dispatch_answers_where_it_is_asked():
    with epmoe.ExpertParallel(CONFIG) as ep:
        progress = ep._exchange.rounds.progress
        for epoch, more in enumerate((True, False, True), 1):
            with asking(ep._exchange, more):
                dispatched = ep.dispatch(*INPUTS)
            assert another(ep._exchange) is more
            ep.combine(dispatched.rows, dispatched)
            assert another(ep._exchange) is more
            assert (progress[ASKED], progress[ANSWER]) == (0, 2 * epoch + more)
        dispatched = ep.dispatch(*INPUTS)
        ep.combine(dispatched.rows, dispatched)
        assert progress[ANSWER] == 7  # as the last round that asked has left it
        assert not another(ep._exchange)


def test_a_call_that_fails_asks_nothing_of_the_next_one():
    with epmoe.ExpertParallel(CONFIG) as ep:
        with pytest.raises(ValueError, match="`x` has 9 tokens"), asking(ep._exchange, True):
            ep.dispatch(torch.randn(9, 64), *INPUTS[1:])
        ep.dispatch(*INPUTS)
        ep.abort()
        assert ep._exchange.rounds.progress[ANSWER] == 0


def on_a_gpu(**options: object) -> SimpleNamespace:
    """An exchange on a GPU in round 5, as far as `another` looks at it; kernels have answered round 4."""
    progress = [0] * len(PROGRESS)
    progress[ANSWER] = 4 << 1 | 1
    exchange = {"check": Mock(), "wait_for_device": Mock(side_effect=EPTimeoutError("dispatch", 5, [0], [0], "late"))}
    return SimpleNamespace(
        device=torch.device("cuda"),
        rounds=SimpleNamespace(progress=progress, count=5),
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
    assert another(exchange) is more


def test_a_failure_that_kernels_report_ends_the_wait():
    exchange = on_a_gpu(check=Mock(side_effect=[None, EPTimeoutError("dispatch", 5, [1], [1], "is missing")]))
    with pytest.raises(EPTimeoutError, match="is missing"):
        another(exchange)
    assert not exchange.wait_for_device.called


def test_a_kernel_that_never_starts_ends_the_wait(monkeypatch):
    monkeypatch.setattr("epmoe.exchange.more_rounds._SPIN_S", 0.0)
    exchange = on_a_gpu()
    with pytest.raises(EPTimeoutError, match="late"):
        another(exchange)
    exchange.wait_for_device.assert_called_once_with(CONFIG.exchange.warmup_timeout_s)
