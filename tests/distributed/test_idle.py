"""`exchange.idle: wait`: a round begins with the first tokens, and ranks without any wait for it on
the host, for as long as it takes.

Rank 0 brings tokens, the others hold the experts. Deadlines are 300 s where a test passes without
one.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from exchanges import assert_y, given, make_tokens, run_experts, run_round
from helpers import ON_GPUS, ON_THE_CPU, full_layer, randn, refuse_another_thread
from waits import LONG_S, SOON_S, ctrl_c, meanwhile, signalled, within

import epmoe
from epmoe import ExpertParallel
from epmoe.training import TrainingExchange

E = 6
D = 64
T = 9


class Service:
    """A group whose ranks wait while idle, and rounds of it."""

    def __init__(self, make_ep, rank: int, size: int, device: torch.device) -> None:
        self.make_ep = make_ep
        self.rank = rank
        self.size = size
        # Ranks may share a GPU by time slices.
        self.deadline_s = 0.4 if device.type == "cpu" else 2.0

    def open(self, timeout_s: float = LONG_S, **options: object) -> ExpertParallel:
        owners = [1 + expert % (self.size - 1) if self.size > 1 else 0 for expert in range(E)]
        given = {
            "placement": {"strategy": "explicit", "assignment": owners},
            "exchange": {"idle": "wait", "on_abort": "raise"},
        }
        return self.make_ep(experts=E, hidden=D, timeout_s=timeout_s, **given | options)

    def tokens(self, ep: ExpertParallel, seed: int = 0):
        """Of rank 0."""
        return make_tokens(ep.config, self.rank, T if self.rank == 0 else 0, seed=seed)

    def play(self, ep: ExpertParallel, rounds: int = 3, tag: int = 0) -> None:
        """Rounds that agree with the dense layer."""
        for seed in range(rounds):
            tokens = self.tokens(ep, seed)
            d = ep.dispatch(*given(ep, tokens), tag=tag)
            assert_y(ep.combine(run_experts(ep, d), d), ep.config, tokens)
            ep.check()


@pytest.fixture
def service(make_ep, rank, size, device) -> Service:
    return Service(make_ep, rank, size, device)


def test_idle_for_ten_deadlines(service, rank):
    """On GPUs no kernel waits meanwhile."""
    deadline_s = service.deadline_s
    ep = service.open(deadline_s)
    service.play(ep)
    busy = []

    def look() -> None:
        if ep.device.type == "cuda":
            with torch.cuda.device(ep.device):
                busy.append(not torch.cuda.default_stream(ep.device).query())

    if rank == 0:
        # No request comes.
        time.sleep(10 * deadline_s)
        service.play(ep)
    else:
        with meanwhile(look, after_s=2 * deadline_s):
            service.play(ep)
    assert not any(busy)
    assert ep.health().timeouts == 0


def test_all_ranks_come_without_tokens(service):
    """Then nobody waits for any."""
    ep = service.open()
    for seed in range(3):
        with within(SOON_S):
            run_round(ep, make_tokens(ep.config, ep.rank, 0, seed=seed))
    service.play(ep)


def test_any_rank_may_bring_tokens(service, rank, size):
    """Another one in each round, of which the others learn by its first word."""
    ep = service.open()
    for seed in range(4 * size):
        tokens = make_tokens(ep.config, rank, T if seed % size == rank else 0, seed=seed)
        assert_y(run_round(ep, tokens), ep.config, tokens)


def test_a_round_that_has_begun_keeps_its_deadline(service, rank, size):
    """A rank that does not come to it is named."""
    ep = service.open(service.deadline_s)
    service.play(ep)
    if rank == size - 1:
        dist.barrier()
        return
    with pytest.raises(epmoe.EPTimeoutError) as caught:
        run_round(ep, service.tokens(ep))
        ep.check()
    assert caught.value.missing_ranks == [size - 1]
    dist.barrier()


def test_ctrl_c_while_idle(service, rank, size):
    """The round has not begun, so the call may be made again."""
    ep = service.open()
    service.play(ep)
    for _ in range(2):
        if rank == size - 1:
            with ctrl_c():
                service.play(ep)
            assert ep.exchange.rounds.state == 0
        dist.barrier()
        service.play(ep)


@pytest.mark.parametrize("late", [False, True])
def test_a_layer_that_is_interrupted_while_idle(service, rank, size, late):
    """It gives up the round, on GPUs once it has begun, and the others hear of it. Then ranks are
    in step.
    """
    ep = service.open()
    exchange = ep.exchange
    exchange._skips_late |= late
    layer, _ = full_layer(ep)
    # Only rank 0 has tokens.
    x = randn(T if rank == 0 else 0, D, seed=rank).to(ep.device)
    last = size - 1
    with torch.inference_mode():
        want = layer(x)
        # The last rank is interrupted twice while the others stay away.
        if rank == last:
            for _ in range(2):
                with ctrl_c():
                    layer(x)
        dist.barrier()
        # The others hear of it in their next round.
        if rank != last:
            with pytest.raises(epmoe.EPAbortedError) as caught:
                layer(x)
                ep.check()
            assert caught.value.ranks == [last]
        if not exchange._skips_late:
            dist.barrier()  # they have heard of it, although this rank has made no further call
        # All are in step.
        for _ in range(3):
            torch.testing.assert_close(layer(x), want)
    ep.check()


def test_a_handler_that_returns_while_idle(service, rank, size):
    ep = service.open()
    service.play(ep)
    if rank == size - 1:
        before = signal.signal(signal.SIGALRM, lambda *_: dist.barrier())
        with signalled(signal.SIGALRM):
            service.play(ep)
        signal.signal(signal.SIGALRM, before)
    else:
        dist.barrier()
        service.play(ep)


def test_a_handler_that_closes_while_idle(service, rank, size):
    """The call that waits ends. The others find it missing in the next round."""
    ep = service.open(2.0)
    service.play(ep)
    if rank == size - 1:
        before = signal.signal(signal.SIGALRM, lambda *_: ep.close())
        with signalled(signal.SIGALRM), pytest.raises(epmoe.EPStateError, match="has left"):
            service.play(ep)
        signal.signal(signal.SIGALRM, before)
    dist.barrier()
    if rank != size - 1:
        with within(SOON_S), pytest.raises(epmoe.EPTimeoutError):
            service.play(ep)
    dist.barrier()


def test_ranks_that_close_end_the_waits(service, rank, size):
    """At once, although their processes live."""
    ep = service.open()
    service.play(ep)
    if rank == 0:
        ep.close()
    else:
        with within(SOON_S), pytest.raises(epmoe.EPTimeoutError, match="left the group") as caught:
            service.play(ep)
        assert 0 in caught.value.missing_ranks
        ep.close()
    dist.barrier()


def test_ranks_fall_asleep_while_others_are_idle(service, rank):
    """Rank 0 does, the others hear of it and follow."""
    ep = service.open()
    service.play(ep)
    if rank != 0:
        with pytest.raises(epmoe.EPTimeoutError, match="left the group; .* follow them by `sleep`"):
            service.play(ep)
    ep.sleep()
    ep.wake()
    service.play(ep)


def test_a_handler_that_sleeps_while_idle(service, rank, size):
    """All ranks sleep and wake up."""
    ep = service.open()
    service.play(ep)
    if rank == size - 1:
        before = signal.signal(signal.SIGALRM, lambda *_: ep.sleep())
        with signalled(signal.SIGALRM), pytest.raises(epmoe.EPStateError, match="has left"):
            service.play(ep)
        signal.signal(signal.SIGALRM, before)
    dist.barrier()
    if rank != size - 1:
        ep.sleep()
    ep.wake()
    service.play(ep)


@ON_THE_CPU
def test_a_forked_child_while_idle(service, rank, size):
    """The child is no rank, and its parent goes on."""
    ep = service.open()
    service.play(ep)
    if rank == size - 1:
        children = []

        def fork(*_: object) -> None:
            children.append(os.fork())

        # A signal handler forks in the middle of the wait.
        before = signal.signal(signal.SIGALRM, fork)
        try:
            with signalled(signal.SIGALRM):
                play_in_the_parent(service, ep, children)
        finally:
            signal.signal(signal.SIGALRM, before)
        # The child has ended as `play_in_the_parent` says.
        _, status = os.waitpid(children[0], 0)
        assert os.waitstatus_to_exitcode(status) == 7
    else:
        dist.barrier()
        service.play(ep)


def play_in_the_parent(service: Service, ep: ExpertParallel, children: list[int]) -> None:
    """Rounds, whose call the child leaves by an error."""
    try:
        tokens = service.tokens(ep)
        released = threading.Timer(1.0, dist.barrier)
        released.start()
        run_round(ep, tokens)
    except epmoe.EPStateError as error:
        os._exit(7 if children == [0] and "is a fork" in str(error) else 8)
    if children == [0]:
        os._exit(9)
    released.join()
    for seed in range(1, 3):
        run_round(ep, service.tokens(ep, seed))


def test_another_thread_while_idle(service, rank, size):
    """It gets the turn's RuntimeError at once; `health` and `repr` work."""
    ep = service.open()
    service.play(ep)
    if rank == size - 1:
        seen = []

        def call() -> None:
            refuse_another_thread(lambda: ep.dispatch(*given(ep, service.tokens(ep))))
            seen.append((ep.health(wait=False).timeouts, repr(ep)))
            # Now the others may come, and end the wait.
            dist.barrier()

        with meanwhile(call):
            service.play(ep)
        assert seen and seen[0][0] == 0
    else:
        dist.barrier()
        service.play(ep)


def test_a_thread_of_its_own_waits(service, rank, size):
    """The main thread closes meanwhile."""
    ep = service.open(2.0)
    service.play(ep)
    if rank == size - 1:
        errors = []

        def wait() -> None:
            try:
                service.play(ep)
            except BaseException as error:
                errors.append(error)

        # Once the thread has its turn, the main thread closes.
        thread = threading.Thread(target=wait)
        thread.start()
        while ep.exchange.thread == 0:
            time.sleep(0.01)
        ep.close()
        thread.join(SOON_S)
        assert isinstance(errors[0], epmoe.EPStateError), errors
    dist.barrier()


def test_experts_move_on_after_an_idle_while(service, rank, size):
    """Moves wait for the next rounds, and need no deadline meanwhile."""
    placement = {"live": True, "slots_per_rank": E, "layers": 1, "staging_mb": 1}
    ep = service.open(service.deadline_s, placement=placement)
    tokens = make_tokens(ep.config, rank, T if rank == 0 else 0)

    def play() -> None:
        d = ep.dispatch(*given(ep, tokens), tag=1)
        rows = d.rows.clone()
        y = ep.combine(rows, d)
        scale = tokens.weights.float().sum(1, keepdim=True).to(y.device)
        torch.testing.assert_close(y, tokens.x.to(y.device) * scale)
        ep.check()

    # Moves begin, and rank 0 comes to no round for three deadlines.
    weights = torch.zeros(E, 8, device=ep.device)
    play()
    moves = ep.replace(ep.slots.roll(1, 1), lambda tag, slot: [weights[slot]])
    play()
    if rank == 0:
        time.sleep(3 * service.deadline_s)
    # They go on with the rounds.
    for _ in range(200):
        play()
        ep.poll()
    assert moves.done
    ep.apply()


@pytest.mark.slow
def test_a_compiled_layer_waits(service, rank):
    ep = service.open()
    layer, _ = full_layer(ep)
    compiled = torch.compile(layer)
    with torch.inference_mode():
        for seed in range(3):
            x = randn(T if rank == 0 else 0, D, seed=seed).to(ep.device)
            if rank == 0:
                time.sleep(0.2)
            torch.testing.assert_close(compiled(x), layer(x))


def test_what_it_does_not_do_is_refused_by_name(service, rank):
    ep = service.open()
    inputs = given(ep, service.tokens(ep))
    key = r"`exchange.idle` must be timeout for "
    with pytest.raises(ValueError, match=key + "phases of their own"):
        ep.dispatch_send(*inputs)
    with pytest.raises(ValueError, match=key + "training"):
        TrainingExchange(ep)
    with pytest.raises(ValueError, match=key + "calls of several rounds"):
        ep.exchange.sending(False, lambda: None)
    service.play(ep)


@ON_GPUS
def test_a_capture_is_refused_by_name(service, rank):
    """No rank gives up a round for it."""
    ep = service.open()
    service.play(ep)
    inputs = given(ep, service.tokens(ep))
    graph = torch.cuda.CUDAGraph()
    refused = "`exchange.idle` must be timeout for CUDA graphs"
    with pytest.raises(epmoe.EPStateError, match=refused), torch.cuda.graph(graph):
        ep.dispatch(*inputs)
    service.play(ep)
