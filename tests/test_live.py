"""One process whose experts can move: calls of other threads, of signal handlers and of forked
children.
"""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import alone, fork, full_layer, is_right_in_a_fork
from waits import until

import epmoe
from epmoe.live import experts
from epmoe.live.layout import Word
from epmoe.live.mail import Mail
from epmoe.native import ops

E = 8
L = 2
X = torch.ones(4, 64)
IDS = torch.zeros(4, 2, dtype=torch.int32)
WEIGHTS = torch.ones(4, 2)
LIVE = {"live": True, "slots_per_rank": E, "layers": L, "staging_mb": 1}
REFUSED = "another thread is in a call of this ExpertParallel: one thread at a time"


@pytest.fixture
def ep() -> Iterator[epmoe.ExpertParallel]:
    with epmoe.ExpertParallel(alone(E, placement=LIVE)) as ep:
        yield ep


def in_the_middle_of_a_dispatch(
    ep: epmoe.ExpertParallel, monkeypatch: pytest.MonkeyPatch, call: Callable
) -> None:
    """Call it on the thread of a dispatch that has not sent yet."""
    dispatch = ops.dispatch

    def interrupted(*arguments: object) -> None:
        call()
        dispatch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "dispatch", interrupted)
        d = ep.dispatch(X, IDS, WEIGHTS, tag=1)
    torch.testing.assert_close(ep.combine(d.rows, d), 2 * X)


def on_another_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_calls_of_another_thread_during_a_round_are_refused(ep, monkeypatch):
    """Tables do not change in the middle of a send."""
    balancer = epmoe.Balancer(ep)
    table = ep.exchange.views["table.copies"]
    ep.share(torch.rand(L, E))
    until(lambda: ep.live.sharing.done)  # the next poll would use it
    before = table.clone()
    generation = torch.rand(L, E)

    def all_refused() -> None:
        for call in (
            ep.poll,
            ep.check,
            lambda: ep.share(generation),
            lambda: ep.replace(ep.slots),
            ep.apply,
            ep.loads,
            balancer.tick,
            balancer.finish,
        ):
            with pytest.raises(RuntimeError, match=REFUSED):
                call()
        assert (
            ep.health().timeouts == 0
            and ep.memory_plan()
            and "round" in repr(ep)
            and ep.live.moves is None
        )

    # Another thread calls everything in the middle of a dispatch: nothing changes.
    in_the_middle_of_a_dispatch(ep, monkeypatch, lambda: on_another_thread(all_refused))
    assert torch.equal(table, before)
    ep.poll()
    on_another_thread(ep.apply)
    balancer.close()


def test_a_poll_between_the_calls_of_a_round_changes_no_table(ep, monkeypatch):
    table = ep.exchange.views["table.copies"]
    ep.apply()
    before = table.clone()
    table_of_a_share = before.flip(-1)
    monkeypatch.setattr(experts, "tables", lambda *_: table_of_a_share)
    for calls in (1, 2):
        # The round is open behind one call of dispatch or two.
        sent = ep.dispatch_send(X, IDS, WEIGHTS, tag=1)
        d = ep.dispatch_recv(sent) if calls > 1 else None
        # A poll does not take the table up,
        ep.share(torch.rand(L, E))
        until(lambda: ep.live.sharing.done)
        on_another_thread(ep.poll)
        assert torch.equal(table, before)
        # but does behind the round.
        ep.abort(d or sent)
        on_another_thread(ep.poll)
        assert torch.equal(table, table_of_a_share)
        table.copy_(before)


def test_a_call_of_a_signal_handler_lets_no_other_thread_in(ep, monkeypatch):
    """Its end is not the end of the call that it interrupts."""

    def interrupt() -> None:
        ep.poll()
        with pytest.raises(RuntimeError, match=REFUSED):
            on_another_thread(ep.poll)

    in_the_middle_of_a_dispatch(ep, monkeypatch, interrupt)
    on_another_thread(ep.poll)


def test_a_signal_handler_in_a_step_changes_nothing(ep, monkeypatch):
    """It may poll; what waits is refused."""
    moves = ep.replace(ep.slots)
    seen = []
    words = ep.live.mail.words
    balancer = epmoe.Balancer(ep, every=1)

    def interrupted() -> list[list[int]]:
        for call in (ep.poll, balancer.tick):
            call()
        for call in (ep.apply, lambda: ep.replace(ep.slots)):
            with pytest.raises(
                epmoe.EPStateError, match="a signal handler called|experts are moving"
            ):
                call()
        seen.append(moves.version)
        return words()

    # The handler runs within a poll. Then the moves end as usual.
    with monkeypatch.context() as patch:
        patch.setattr(ep.live.mail, "words", interrupted)
        ep.poll()
    ep.apply()
    assert seen == [-1] and moves.done and moves.version == 0
    balancer.close()


def test_a_forked_child_writes_nothing_into_windows(ep):
    """Neither by moves that have begun nor by the balancer, also after `close`."""
    balancer = epmoe.Balancer(ep, every=1)
    moves = ep.replace(ep.slots)
    before = ep.exchange.window.local.clone()
    mail = ep.live.mail
    calls = (
        balancer.tick,
        balancer.finish,
        moves.step,
        lambda: mail.post(Word.CANCELLED, 1, [0]),
        lambda: mail.put(0, 0, torch.ones(8)),
        ep.live.send_loads,
        lambda: ep.live.replace(ep.live.slots),
    )

    def call_all() -> None:
        refused = 0
        for close in (lambda: None, ep.close):
            close()
            for call in calls:
                moves.cancel()
                try:
                    call()
                except RuntimeError:
                    refused += 1
        assert refused >= 12  # `step` does nothing after `close`

    # The windows are as before, and the parent goes on.
    assert is_right_in_a_fork(call_all)
    assert torch.equal(ep.exchange.window.local, before)
    ep.apply()
    assert moves.done and not moves.cancelled
    balancer.close()


def test_a_closed_balancer_writes_nothing(ep):
    balancer = epmoe.Balancer(ep)
    live = ep.live
    ep.close()
    for call in (balancer.tick, balancer.finish, lambda: live.mail.post(Word.PLAN, 1, [0])):
        with pytest.raises(epmoe.EPStateError, match="is closed"):
            call()


def test_a_refusal_that_an_exception_held_back_is_told_later(ep, monkeypatch):
    words = ep.exchange.views["moves.words"]
    with monkeypatch.context() as patch:
        patch.setattr(ep.live.mail, "post", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            ep.replace(torch.zeros(1))
    assert words[0, Word.PLAN] == 0
    ep.poll()
    assert words[0, Word.PLAN] == 1 << 32 and ep.health().refused_plans == 1
    ep.replace(ep.slots)
    ep.apply()


def test_plans_have_room_for_what_moves_need_and_others_have_none(ep):
    plan = epmoe.MemoryPlan.build(ep.config)
    assert plan == ep.memory_plan() and plan["moves.staging"].nbytes == 1 << 20
    others = epmoe.MemoryPlan.build(alone(E)).buffers
    assert not [buffer for buffer in others if buffer.name.startswith("moves.")]


def test_experts_of_a_copied_layer_move_too(ep):
    layer, _ = full_layer(ep)
    for one in (layer, copy.deepcopy(layer)):
        weights = ep.live.weights[one.tag](one.tag, 3)
        assert [t.data_ptr() for t in weights] == [
            parameter[3].data_ptr() for parameter in one.experts.parameters()
        ]


def test_a_word_is_never_seen_in_part(ep):
    """A reader sees a word that was written, never a mixture of two."""
    exchange = ep.exchange
    end = time.monotonic() + 2
    parent = os.getpid()
    place = exchange.views["moves.words"].data_ptr() + 8 * Word.VERSION

    def write() -> None:
        mail = Mail(exchange)  # that of a parent is not the child's
        while os.getppid() == parent:
            for value in (0, -1) * 500:
                mail.post(Word.VERSION, value, [0])

    # The child writes two words in turn, and this process reads all the time.
    writer = fork(write)
    word = ctypes.c_int64.from_address(place)
    seen = set()
    while time.monotonic() < end or len(seen) < 2:
        for _ in range(10000):
            seen.add(word.value)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    assert seen == {0, -1}
