"""Ctrl-C, SIGTERM and other signals while a rank waits for others: the wait ends at once, or goes
on as before.

Deadlines are 300 s, so that a test which passes has not run into one. On the CPU the operators
wait, on GPUs `check`.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist
from exchanges import (
    assert_round,
    assert_y,
    expected_y,
    first_round,
    given,
    make_tokens,
    run_experts,
    run_round,
    without_rank,
)
from helpers import ON_GPUS, ON_THE_CPU
from waits import SHORT_S, SOON_S, ctrl_c, signalled, within

import epmoe


@ON_THE_CPU
@pytest.mark.parametrize("stage", ["dispatch", "combine", "opening"])
def test_ctrl_c_ends_a_wait(ep, rank, size, stage):
    """It ends at once, the round can be closed, and the ranks go on together."""
    tokens = make_tokens(ep.config, rank, 9)
    inputs = given(ep, tokens)
    for _ in range(2):
        # The others have yet to end the round that this rank has given up.
        if rank == 0 and stage == "opening":
            ep.dispatch_send(*inputs)
            ep.abort()
        d = ep.dispatch(*inputs) if stage == "combine" else None
        if rank == 0:
            with ctrl_c():
                ep.combine(run_experts(ep, d), d) if d else ep.dispatch(*inputs)
            ep.abort()
        dist.barrier()
        if rank != 0:
            y = ep.combine(run_experts(ep, d), d) if d else run_round(ep, tokens)
            assert_y(y, ep.config, without_rank(ep, tokens, 0, sent=stage == "combine"))
        assert_round(ep, tokens)


@ON_THE_CPU
def test_a_wait_that_ctrl_c_has_ended_can_be_taken_up_again(ep, rank, size):
    tokens = make_tokens(ep.config, rank, 9)
    sent = ep.dispatch_send(*given(ep, tokens)) if rank == 0 else None
    # Rank 0 is interrupted in dispatch, before the others come,
    if sent:
        with ctrl_c():
            ep.dispatch_recv(sent)
    dist.barrier()
    d = ep.dispatch_recv(sent) if sent else ep.dispatch(*given(ep, tokens))
    # and in combine.
    if rank == 0:
        with ctrl_c():
            ep.combine(run_experts(ep, d), d)
    dist.barrier()
    y = ep.combine_recv(d) if rank == 0 else ep.combine(run_experts(ep, d), d)
    assert_y(y, ep.config, tokens)


@ON_THE_CPU
def test_a_signal_whose_handler_returns_does_not_lengthen_the_wait(make_ep, rank, size):
    """A timer of 20 ms, as profilers set it: the wait goes on, and its deadline stays the same."""
    ep = make_ep(timeout_s=0.4)
    tokens = first_round(ep, 9)
    if rank == 0:
        # Signals all the time, and nobody comes.
        ticks = []
        before = signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        started = time.monotonic()
        try:
            with pytest.raises(
                epmoe.EPTimeoutError, match="dispatch of round 2 (timed out|got no answer)"
            ):
                ep.dispatch(*given(ep, tokens))
            assert 0.4 <= time.monotonic() - started < SOON_S
            assert ticks
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    dist.barrier()


@ON_THE_CPU
def test_a_signal_handler_may_abort_the_round(ep, rank, size):
    """The call that waits says so: it has no rows to return."""
    tokens = make_tokens(ep.config, rank, 9)
    if rank == 0:
        # The handler gives the round up while rank 0 waits.
        before = signal.signal(signal.SIGALRM, lambda number, frame: ep.abort())
        said = "round 1 was aborted while this call waited"
        with signalled(signal.SIGALRM), pytest.raises(RuntimeError, match=said):
            ep.dispatch(*given(ep, tokens))
        signal.signal(signal.SIGALRM, before)
    dist.barrier()
    # The others get through it.
    if rank != 0:
        run_round(ep, tokens)
    assert_round(ep, tokens)


@ON_THE_CPU
def test_a_signal_handler_may_leave_the_group(make_ep, rank, size):
    """The windows have gone when it returns: the call that waits ends, and uses them no more."""
    ep = make_ep()
    tokens = make_tokens(ep.config, rank, 9)
    if rank == 0:
        # The handler leaves while rank 0 waits.
        before = signal.signal(signal.SIGALRM, lambda number, frame: ep.close())
        with (
            signalled(signal.SIGALRM),
            pytest.raises(epmoe.EPStateError, match="has left the group of round 1"),
        ):
            ep.dispatch(*given(ep, tokens))
        signal.signal(signal.SIGALRM, before)
    dist.barrier()
    # The others hear of it.
    if rank != 0:
        with within(SOON_S), pytest.raises(epmoe.EPTimeoutError, match="left|timed out"):
            run_round(ep, tokens)


class Tick(Exception):
    pass


@ON_THE_CPU
def test_an_exception_at_any_moment(ep, rank, size):
    """A timer raises anywhere in rank 0's calls, and it aborts. Sums of the others lack its experts
    or are complete.
    """
    armed = []
    rng = random.Random(5)

    def raise_once(number: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise Tick

    before = signal.signal(signal.SIGALRM, raise_once)
    tokens = make_tokens(ep.config, rank, 16)
    rounds = ep.exchange.rounds
    alone = without_rank(ep, tokens, 0)

    # Each round is tried until it was opened, whole or in phases by turns.
    for n in range(1, 61):
        while rounds.count < n:  # an exception before anything was sent opens no round
            try:
                if rank == 0:
                    armed.append(True)
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
                if n % 2:
                    y = run_round(ep, tokens)
                else:
                    d = ep.dispatch_recv(ep.dispatch_send(*given(ep, tokens)))
                    ep.combine_send(run_experts(ep, d), d)
                    y = ep.combine_recv(d)
                armed.clear()
            except Tick:
                ep.abort()
            else:
                complete = rank == 0 or torch.allclose(
                    y.double(), expected_y(ep.config, tokens), atol=1e-4
                )
                assert_y(y, ep.config, tokens if complete else alone)
        assert rounds.count == n
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    dist.barrier()


@ON_THE_CPU
def test_another_thread_waits_without_blocking_the_main_thread(ep, rank, size):
    """It waits in the same slices, and the main thread gets Ctrl-C meanwhile."""
    tokens = make_tokens(ep.config, rank, 9)
    results = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: results.put(run_round(ep, tokens)))
    if rank == 0:
        # The other thread waits for ranks, and this one is interrupted.
        thread.start()
        with ctrl_c():
            results.get()
        dist.barrier()
    else:
        dist.barrier()
        thread.start()
    assert_y(results.get(timeout=60.0), ep.config, tokens)
    thread.join()


@ON_GPUS
def test_ctrl_c_ends_a_wait_for_the_gpu(make_ep, rank, size, device):
    """`check` and `health` wait for kernels, which wait for other ranks."""
    ep = make_ep(timeout_s=20.0)
    tokens = first_round(ep, 9)
    if rank == 0:
        ep.dispatch(*given(ep, tokens))
        # Each wait is interrupted, and the round is given up.
        for call in (ep.check, ep.health):
            with ctrl_c():
                call()
        ep.abort()
    dist.barrier()
    # The others get through it.
    if rank != 0:
        run_round(ep, tokens)
    assert_round(ep, tokens)


@pytest.mark.slow
def test_rank_stopped_in_the_middle_of_a_round(make_ep, rank, size, device, folder):
    """SIGSTOP, as from a debugger or a scheduler: the other ranks name the stopped one, and their
    device works on.
    """
    if size == 1:
        pytest.skip("needs a rank that waits for another")
    ep = make_ep(timeout_s=SHORT_S)
    tokens = first_round(ep, 9)
    told = [folder / f"told{other}" for other in range(1, size)]
    dist.barrier()
    if rank == 0:
        me = os.getpid()
        until = " && ".join(f"[ -e {file} ]" for file in told)
        command = f"kill -STOP {me}; until {until}; do sleep 0.1; done; kill -CONT {me}"
        with subprocess.Popen(["bash", "-c", command], start_new_session=True) as stopper:
            stopper.wait()  # this process is stopped meanwhile
        with pytest.raises(epmoe.EPTimeoutError):
            run_round(ep, tokens)
            ep.check()
    else:
        with pytest.raises(
            epmoe.EPTimeoutError, match=r"dispatch of round 2 .*rank\(s\) \[0\]"
        ) as caught:
            d = ep.dispatch(*given(ep, tokens))
            # This happens only on GPUs, where the host has not seen the error yet.
            assert ep.combine(d.rows, d).eq(0).all()
            ep.check()
        assert caught.value.missing_ranks == [0]
        told[rank - 1].touch()
        for _ in range(2):
            with pytest.raises(epmoe.EPTimeoutError):
                run_round(ep, tokens)
        eye = torch.eye(64, device=device)
        assert torch.equal(eye @ eye, eye)
    dist.barrier()
    again = make_ep()
    assert_round(again, tokens)
