"""The rounds of one process: which failure closes a round, what `poll` raises without a wait, what
a round tells of the next one, and the names of its stages in a profile. Rounds of several ranks are
in tests/distributed/.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import alone
from torch.profiler import ProfilerActivity, profile

import epmoe
from epmoe import EPTimeoutError
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import RoundState
from epmoe.native.layouts import constant, struct

pytestmark = pytest.mark.usefixtures("serving")

X, IDS, WEIGHTS = INPUTS = torch.ones(4, 64), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)


def make_ep(**capacity: object) -> epmoe.ExpertParallel:
    return epmoe.ExpertParallel(alone(capacity=capacity))


@pytest.fixture
def ep() -> Iterator[epmoe.ExpertParallel]:
    with make_ep() as ep:
        yield ep


def leave(ep: epmoe.ExpertParallel, **words: int) -> None:
    """Leaves status words behind, as kernels do."""
    for name, value in words.items():
        setattr(ep.exchange.status, name, value)


def mismatch(ep: epmoe.ExpertParallel) -> None:
    """Leaves behind what kernels leave when the ranks' calls differ."""
    leave(ep, epoch=ep.exchange.rounds.count, code=constant("kMismatch"))


def assert_next_round_is_whole(ep: epmoe.ExpertParallel) -> None:
    d = ep.dispatch(*INPUTS)
    assert torch.equal(ep.combine(d.rows, d), 2 * X)


@pytest.mark.parametrize(
    "call", ["dispatch_recv", "combine", "combine_send", "combine_recv", "abort"]
)
def test_a_mismatch_closes_the_round_whichever_call_sees_it(ep, call):
    for n in (1, 3):
        # Bring the round to the call.
        sent = ep.dispatch_send(*INPUTS)
        handle = sent if call == "dispatch_recv" else ep.dispatch_recv(sent)
        rows = [handle.rows] if call in ("combine", "combine_send") else []
        if call == "combine_recv":
            ep.combine_send(handle.rows, handle)
        # It sees the mismatch, and the round is closed.
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
    assert torch.equal(ep.combine(d.rows, d), 2 * X)


def test_an_abort_without_a_handle_leaves_no_trace(ep):
    """A mismatch or an overflow of the round that is given up does not hit the next round."""
    for call in (ep.dispatch, ep.dispatch_send):
        handle = call(*INPUTS)
        # The device has reported a mismatch and an overflow.
        leave(ep, code=constant("kMismatch"), needed_rows=99)
        ep.abort()
        ep.poll()
        with pytest.raises(ValueError, match=f"round {handle.epoch} is closed"):
            ep.abort(handle)
        assert_next_round_is_whole(ep)
    ep.close()
    ep.abort()  # a closed ExpertParallel has no round


def test_a_call_that_its_operator_refuses_may_be_repeated(ep, monkeypatch):
    """Nothing was sent, so no round is open, or the same one still is."""

    def refused(call: str, *arguments: object) -> None:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(epmoe.native.ops, call, Mock(side_effect=MemoryError))
            getattr(ep, call)(*arguments)

    # No round is open yet.
    for call in ("dispatch", "dispatch_send"):
        refused(call, *INPUTS)
        ep.abort()  # there is nothing to abort
    # The round stays open, and ends.
    d = ep.dispatch(*INPUTS)
    for call in ("combine", "combine_send"):
        refused(call, d.rows, d)
    assert (
        torch.equal(ep.combine(d.rows, d), 2 * X)
        and d.epoch == 1
        and ep.health().aborted_rounds == [0]
    )


def test_an_overflow_is_raised_once_and_leaves_the_round_open():
    with make_ep(max_expert_rows=5) as ep:
        for _ in range(2):
            d = ep.dispatch(*INPUTS)
            with pytest.raises(epmoe.EPOverflowError, match=r"needed 8 .*set it to at\s+least 8"):
                ep.poll()
            ep.poll()
            assert ep.combine(d.rows, d).shape == X.shape


def test_poll_raises_a_mismatch_once_and_leaves_the_round_open(ep):
    d = ep.dispatch(*INPUTS)
    mismatch(ep)
    with pytest.raises(epmoe.EPMismatchError, match="round 1"):
        ep.poll()
    ep.poll()
    ep.abort(d)
    assert_next_round_is_whole(ep)


def test_a_round_tells_whether_more_follow(ep):
    """A call that fails tells nothing in the next one."""
    exchange = ep.exchange
    for has_more in (True, False, True):
        d = exchange.sending(has_more, lambda: ep.dispatch(*INPUTS))
        assert exchange.has_more_rounds() is has_more
        ep.combine(d.rows, d)
        assert exchange.has_more_rounds() is has_more
    # A call that is refused.
    with pytest.raises(ValueError, match="`x` has 9 tokens"):
        exchange.sending(True, lambda: ep.dispatch(torch.randn(9, 64), IDS, WEIGHTS))
    assert_next_round_is_whole(ep)  # a round that tells nothing
    assert not exchange.has_more_rounds()


@pytest.mark.parametrize("ends_by", ["an answer", "a failure", "a deadline"])
def test_the_wait_on_a_gpu_for_whether_more_follow(ends_by, monkeypatch):
    """The wait is in round 5. There is an answer of round 4, which it must not take."""
    # What the wait reads, and what ends it at its third look.
    late = EPTimeoutError("dispatch", 5, [0], [0], "late")
    progress = struct("Progress")(phases=4 * 5, has_more_rounds=4 << 1 | 1)
    looks = iter(range(3))

    def check() -> None:
        if next(looks) == 2 and ends_by == "a failure":
            raise late
        if ends_by == "an answer":
            progress.has_more_rounds = 5 << 1

    # An exchange with the parts that the wait uses. Behind the spin it waits for the device, which
    # is late here.
    if ends_by == "a deadline":
        monkeypatch.setattr("epmoe.exchange.node._SPIN_S", 0.0)
    wait = Mock(side_effect=late)
    exchange = SimpleNamespace(
        processor=SimpleNamespace(runs_ahead=True),
        rounds=RoundState(progress),
        check=check,
        wait_for_device=wait,
        deadlines=SimpleNamespace(first_s=1.0),
    )
    exchange._await_word_of_kernel = partial(NodeExchange._await_word_of_kernel, exchange)
    has_more_rounds = partial(NodeExchange.has_more_rounds, exchange)
    if ends_by == "an answer":
        assert not has_more_rounds()
    else:
        with pytest.raises(EPTimeoutError, match="late"):
            has_more_rounds()
    assert wait.called == (ends_by == "a deadline")


def test_every_stage_has_a_name_in_a_profile(ep):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        ep.route(torch.randn(4, 8))
        assert_next_round_is_whole(ep)
        d = ep.dispatch_recv(ep.dispatch_send(*INPUTS))
        ep.combine_send(d.rows, d)
        ep.combine_recv(d)
    # Each stage, whole and in its phases, has run once.
    counts = {
        event.key: event.count
        for event in profiled.key_averages()
        if event.key.startswith("epmoe::")
    }
    phases = [
        f"{stage}{phase}" for stage in ("dispatch", "combine") for phase in ("", "_send", "_recv")
    ]
    assert counts == dict.fromkeys((f"epmoe::{name}" for name in ("route", *phases)), 1)
