"""A rank that leaves by an exception, Ctrl-C or SIGTERM: the others hear of it at once, and none waits for a deadline.

Rounds that go on after an exception: tests/distributed/test_exceptions.py.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from helpers import ROOT, alone
from test_failure import NOTHING_LEFT, Rank, play_round, ranks
from test_mirrors import constant, int64s, struct_fields

import epmoe
from epmoe.exchange.health import MISMATCH, STATUS
from epmoe.exchange.round_state import PROGRESS, PROGRESS_AT

LONG = {"timeout_s": 300.0, "warmup_timeout_s": 300.0}
AT_ONCE_S = 2.0
CONFIG = alone(7, max_tokens=8)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(6, 64), torch.arange(12).view(6, 2) % 7, torch.full((6, 2), 0.5)


def wait_for_the_others(ep: epmoe.ExpertParallel, report: Callable) -> None:
    """Plays rounds until one fails; reports when, and the error."""
    play_round(ep)
    report("playing")
    try:
        while True:
            play_round(ep)
    except epmoe.EPTimeoutError as error:
        report((time.monotonic(), error.missing_ranks, error.missing_global_ranks, str(error)))
    with pytest.raises(epmoe.EPTimeoutError):
        play_round(ep)


def leave(ep: epmoe.ExpertParallel, report: Callable, act: Callable[[], None]) -> None:
    """Runs `act` in a `with` that an exception ends; reports when, and the exception."""
    play_round(ep)
    report("playing")
    try:
        with ep:
            act()
    except BaseException as error:
        report((time.monotonic(), type(error).__name__))
    else:
        report((time.monotonic(), "no exception"))


def fail_between_rounds(ep: epmoe.ExpertParallel, report: Callable) -> None:
    def act() -> None:
        raise LookupError("a bug of the caller")

    leave(ep, report, act)


def fail_in_a_round(ep: epmoe.ExpertParallel, report: Callable) -> None:
    def act() -> None:
        ep.dispatch(*inputs())
        raise LookupError("a bug of the caller")

    leave(ep, report, act)


def close_in_a_round(ep: epmoe.ExpertParallel, report: Callable) -> None:
    leave(ep, report, lambda: (ep.dispatch(*inputs()), ep.close()))


def wait_for_ctrl_c(ep: epmoe.ExpertParallel, report: Callable) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a forked server of pytest may ignore it
    leave(ep, report, lambda: play_forever(ep))


def wait_for_sigterm(ep: epmoe.ExpertParallel, report: Callable) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: exit(0))
    leave(ep, report, lambda: play_forever(ep))


def play_forever(ep: epmoe.ExpertParallel) -> None:
    while True:
        play_round(ep)


def stop_between_rounds(ep: epmoe.ExpertParallel, report: Callable) -> None:
    play_round(ep)
    report("playing")
    threading.Event().wait(20.0)


def assert_released(others: list[Rank], left_at: float, who: int) -> None:
    for rank in others:
        at, missing, missing_global, text = rank.next_report()
        assert at - left_at < AT_ONCE_S
        assert missing == missing_global == [who]
        assert f"rank(s) [{who}] of the group (global rank(s) [{who}]) left the group" in text
        assert rank.next_report() == NOTHING_LEFT


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (fail_between_rounds, "LookupError"),
        (fail_in_a_round, "LookupError"),
        (close_in_a_round, "no exception"),
    ],
)
def test_a_rank_that_leaves_releases_the_others(tmp_path, body, error):
    """By an exception, or by close() in the middle of a round: the others' waits, of up to 300 s, end within 2 s."""
    bodies = [wait_for_the_others, body, wait_for_the_others]
    with ranks(tmp_path, bodies, **LONG) as started:
        for rank in started:
            assert rank.next_report() == "playing"
        left_at, raised = started[1].next_report()
        assert raised == error
        assert_released([started[0], started[2]], left_at, 1)
        assert started[1].next_report() == NOTHING_LEFT


@pytest.mark.parametrize(
    ("body", "number", "error"),
    [(wait_for_ctrl_c, signal.SIGINT, "KeyboardInterrupt"), (wait_for_sigterm, signal.SIGTERM, "SystemExit")],
)
def test_a_signal_ends_the_wait_and_releases_the_others(tmp_path, body, number, error):
    """Ranks 1 and 2 wait for rank 0, which stays away. The signal ends rank 1 at once, and rank 2 hears of it."""
    bodies = [stop_between_rounds, body, wait_for_the_others]
    with ranks(tmp_path, bodies, **LONG) as started:
        for rank in started:
            assert rank.next_report() == "playing"
        time.sleep(0.3)  # ranks 1 and 2 sleep in their waits by now
        pressed_at = time.monotonic()
        started[1].send_signal(number)
        left_at, raised = started[1].next_report()
        assert raised == error and left_at - pressed_at < AT_ONCE_S
        assert_released([started[2]], left_at, 1)
        started[0].process.kill()


def test_sigterm_without_a_handler_ends_the_process_at_once(tmp_path):
    bodies = [stop_between_rounds, wait_for_the_others, stop_between_rounds]
    with ranks(tmp_path, bodies, **LONG) as started:
        for rank in started:
            assert rank.next_report() == "playing"
        time.sleep(0.3)
        started[1].send_signal(signal.SIGTERM)
        started[1].process.join(AT_ONCE_S)
        assert started[1].process.exitcode == -signal.SIGTERM
        for rank in (started[0], started[2]):
            rank.process.kill()


def test_ctrl_c_in_a_group_of_one():
    """Experts that are interrupted leave nothing open, and abort is there for the rest."""

    def experts(*args: object) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return torch.zeros(0)

    with epmoe.ExpertParallel(CONFIG) as ep:
        layer = epmoe.MoELayer(ep, torch.ones(7, 64), experts)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                layer(torch.ones(6, 64))
        d = ep.dispatch(*inputs())
        ep.abort()
        ep.abort()
        with pytest.raises(ValueError, match="round 3 is closed"):
            ep.abort(d)
        play_round(ep)
    ep.abort()  # a closed ExpertParallel has no round


def test_abort_without_a_handle_leaves_no_trace():
    """A mismatch or an overflow of the round that is given up does not hit the next round."""
    code, needed = STATUS.index("code"), STATUS.index("needed_rows")
    with epmoe.ExpertParallel(CONFIG) as ep:
        x, ids, weights = torch.randn(3, 64), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
        for call in (ep.dispatch, ep.dispatch_send):
            handle = call(x, ids, weights)
            ep._exchange.status[code], ep._exchange.status[needed] = MISMATCH, 99
            ep.abort()
            assert ep._exchange.status[code] == ep._exchange.status[needed] == 0
            with pytest.raises(ValueError, match=f"round {handle.epoch} is closed"):
                ep.abort(handle)
            d = ep.dispatch(x, ids, weights)
            assert torch.equal(ep.combine(d.rows, d), x)


def test_a_combine_that_its_operator_refuses_may_be_repeated(monkeypatch):
    def refuse(*args: object) -> None:
        raise MemoryError

    with epmoe.ExpertParallel(CONFIG) as ep:
        x = torch.randn(3, 64)
        d = ep.dispatch(x, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
        for call in ("combine", "combine_send"):
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(epmoe.native.ops, call, refuse)
                getattr(ep, call)(d.rows, d)
        assert torch.equal(ep.combine(d.rows, d), x)


def test_python_and_cpp_agree_on_the_progress_words():
    assert struct_fields((ROOT / "csrc" / "plan.h").read_text(), "Progress") == int64s(*PROGRESS)
    assert constant(r"offsetof\(RoundState, progress\) == (\d+)", ".h") == PROGRESS_AT
