"""What the host concludes of kernels that do not begin, from copies of a stream that this file
imagines. On GPUs: tests/distributed/test_busy_gpu.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from helpers import alone

import epmoe
from epmoe.exchange import unscheduled
from epmoe.exchange.gpu import GpuPeek
from epmoe.exchange.unscheduled import LOOK_S, CopyOfNow, LateStage, Marks, NextWork
from epmoe.group import waiting
from epmoe.native import layouts

TIMEOUT_S = 1.0


class Gpu:
    """One stream, whose work ends when a test says so, and the host that looks."""

    def __init__(self) -> None:
        self.state = layouts.struct("RoundState")()
        self.stream = list[Callable[[], None]]()
        self.errors = [0, 0]
        self.time_s = 100.0
        self.phases = 0
        # Whether copies of now come, and what happens behind one.
        self.shows = True
        self.behind_now = lambda: None
        before_launch = InStream(self), InStream(self)
        now = SimpleNamespace(read=self.state_now)
        errors = SimpleNamespace(read=lambda: struct.pack("<2q", *self.errors))
        self.watch = Marks(before_launch, InStream(self), now, errors)

    def state_now(self) -> bytes | None:
        state = bytes(self.state) if self.shows else None
        self.behind_now()
        return state

    def work(self) -> Callable[[], None]:
        """Other work of the stream: a call ends it."""
        ended = [False]
        self.stream.append(lambda: ended[0])
        return lambda: ended.__setitem__(0, True) or self.run()

    def launch(self, look: bool = True) -> Kernel:
        """A call of an operator, with both phases."""
        late = self.look("launch") if look else None
        assert late is None
        self.phases += 2
        return self.replay()

    def replay(self) -> Kernel:
        kernel = Kernel(self)
        self.stream.append(kernel.run)
        self.run()
        return kernel

    def round(self) -> None:
        for _ in range(2):
            self.launch().begin(ends=True)

    def run(self) -> None:
        while self.stream and self.stream[0]() is not False:
            self.stream.pop(0)

    def look(self, next_work: NextWork = "replay") -> LateStage | None:
        self.time_s += LOOK_S
        return self.watch.look(self.time_s, TIMEOUT_S, self.phases, next_work)

    def looks(
        self, seconds: float, next_work: NextWork = "replay"
    ) -> tuple[LateStage, float] | None:
        """Polls for so long. What is late, and after how many seconds."""
        begin = self.time_s
        while self.time_s - begin < seconds:
            late = self.look(next_work)
            if late:
                return late, self.time_s - begin
        return None


class InStream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.copied = b"none so far"

    def start(self) -> None:
        assert self.copied, "the copy before has not come"
        self.copied = None
        self.gpu.stream.append(lambda: setattr(self, "copied", bytes(self.gpu.state)))
        self.gpu.run()

    def read(self) -> bytes | None:
        return self.copied


class Kernel:
    """A stage with both phases. It has no place until it may begin."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.has_place = False
        self.begun = False
        self.ended = False

    def begin(self, ends: bool = False) -> None:
        self.has_place = True
        self.ended = ends
        self.gpu.run()

    def run(self) -> bool:
        if not self.has_place:
            return False
        state = self.gpu.state
        combines = state.phases == 2
        if not self.begun:
            self.begun = True
            state.receiving[combines] += 1
        if self.ended:
            state.done[combines] += 1
            if combines:
                state.combine_epoch += 1
            else:
                state.dispatch_epoch += 1
            state.phases = 0 if combines else 2
        return self.ended


@pytest.fixture
def gpu() -> Gpu:
    gpu = Gpu()
    for _ in range(3):
        gpu.round()
    return gpu


def assert_late(found: tuple[LateStage, float] | None, stage: LateStage) -> None:
    """The stage is late, and the host says so in time."""
    assert found is not None
    late, seconds = found
    assert late == stage and TIMEOUT_S <= seconds <= TIMEOUT_S + 3 * LOOK_S


@pytest.mark.parametrize("stage", [0, 1])
def test_a_kernel_without_a_place_is_late(gpu, stage):
    if stage:
        gpu.launch().begin(ends=True)
    gpu.launch()
    assert_late(gpu.looks(3.0), LateStage(stage, 4))


def test_the_caller_goes_on_launching(gpu):
    gpu.launch()
    looks = 0
    while (late := gpu.look("launch")) is None:
        gpu.phases += 2
        looks += 1
        gpu.stream.append(Kernel(gpu).run)
    assert late == LateStage(0, 4) and looks * LOOK_S <= TIMEOUT_S + 3 * LOOK_S


def test_work_in_front_of_a_kernel_may_take_any_time(gpu):
    end = gpu.work()
    kernel = gpu.launch()
    assert gpu.looks(10.0) is None
    end()
    assert gpu.looks(TIMEOUT_S / 2) is None  # the deadline begins with the kernel's turn
    kernel.begin(ends=True)
    assert gpu.looks(10.0) is None
    gpu.launch()
    assert gpu.looks(3.0)


def test_work_in_front_of_a_kernel_that_no_look_preceded(gpu):
    gpu.look()
    gpu.look()
    gpu.work()
    gpu.launch(look=False)
    assert gpu.looks(10.0) is None


def test_a_kernel_that_has_begun_has_a_deadline_of_its_own(gpu):
    gpu.launch().begin()
    assert gpu.looks(10.0) is None
    gpu.replay()
    assert gpu.looks(10.0) is None


def test_a_call_that_launched_nothing(gpu):
    gpu.look("launch")  # its operator then refused the arguments
    assert gpu.looks(10.0) is None
    end = gpu.work()
    kernel = gpu.launch()
    assert gpu.looks(10.0) is None
    end()
    kernel.begin(ends=True)
    gpu.launch()
    assert gpu.looks(3.0)


def test_work_behind_a_call_that_launched_nothing(gpu):
    end = gpu.work()
    gpu.look("launch")  # its operator then refused the arguments
    gpu.work()
    gpu.launch()
    end()
    assert gpu.looks(10.0) is None


def test_polls_while_another_thread_launches(gpu):
    """A launch may wait inside the driver. Its deadline begins behind it."""
    gpu.look("launch")
    assert gpu.looks(10.0, None) is None
    gpu.phases += 2
    gpu.replay()
    assert_late(gpu.looks(3.0, None), LateStage(0, 4))


def test_a_launch_behind_a_look_that_does_not_see_the_state(gpu):
    """Nor does it see that the kernel of the last mark has begun."""
    gpu.shows = False
    gpu.launch()
    assert gpu.looks(2 * TIMEOUT_S) is None
    gpu.shows = True
    assert gpu.look() == LateStage(0, 4)  # the deadline has gone on


def test_a_kernel_that_comes_to_its_turn_during_a_look(gpu):
    """The copy of now is older than that in front of the kernel, which has not begun."""
    dispatch = gpu.launch(look=False)
    dispatch.begin()
    gpu.launch()
    gpu.behind_now = lambda: dispatch.begin(ends=True)
    assert_late(gpu.looks(3.0), LateStage(1, 4))


def test_others_gave_up_what_may_be_behind_other_work(gpu):
    gpu.look()
    gpu.work()
    gpu.launch(look=False)
    assert gpu.looks(3.0) is None
    gpu.errors[1] = 0b01
    assert gpu.look() == LateStage(0, 4, (0, 0b01))


def test_replays(gpu):
    gpu.phases += 4  # the capture
    for _ in range(50):
        for _ in range(2):
            gpu.replay().begin(ends=True)
        assert gpu.look() is None
    epoch = gpu.state.dispatch_epoch + 1
    gpu.replay()
    assert_late(gpu.looks(3.0), LateStage(0, epoch))


def test_replays_that_go_on_behind_a_host_that_runs_ahead(gpu):
    gpu.look()
    kernels = [gpu.replay() for _ in range(40)]
    for kernel in kernels:
        assert gpu.looks(TIMEOUT_S / 2) is None
        kernel.begin(ends=True)
    assert gpu.looks(5.0) is None


def test_a_replay_after_a_pause(gpu):
    gpu.phases += 4  # the capture
    assert gpu.looks(10.0) is None
    kernel = gpu.replay()
    assert gpu.looks(TIMEOUT_S - 2 * LOOK_S) is None
    kernel.begin(ends=True)
    assert gpu.looks(10.0) is None


def test_polls_on_another_thread(gpu):
    """They see no stream of the rounds, but what other ranks have reported."""
    gpu.launch(look=False)
    assert gpu.looks(5.0, None) is None
    gpu.errors[0] = 0b10
    assert gpu.look(None) == LateStage(0, 4, (0b10, 0))


def test_a_replay_that_waits_for_ranks(gpu):
    gpu.phases += 4  # the capture
    assert gpu.looks(1.0) is None
    gpu.replay().begin()
    assert gpu.looks(10.0) is None


def test_a_call_behind_work_beside_graphs(gpu):
    gpu.phases += 4  # the capture
    assert gpu.looks(1.0) is None
    gpu.work()
    assert gpu.look() is None
    gpu.launch(look=False)
    assert gpu.looks(10.0) is None


def test_nothing_is_due(gpu):
    assert gpu.looks(10.0) is None
    end = gpu.work()
    assert gpu.looks(10.0) is None
    end()
    gpu.launch().begin(ends=True)  # between dispatch and combine
    assert gpu.looks(10.0) is None


class InQueue:
    """A copy in a hardware queue, which a kernel without a place may hold."""

    def __init__(self) -> None:
        self.held = False
        self.buffer = b""
        self.copied = b"none so far"

    def start(self) -> None:
        assert self.copied, "the copy before has not come"
        self.copied = None
        self.go_on()

    def go_on(self) -> None:
        if not self.held:
            self.copied = self.buffer

    def read(self) -> bytes | None:
        return self.copied


@pytest.fixture
def queues() -> list[InQueue]:
    return [InQueue() for _ in range(3)]


def write(queues: list[InQueue], buffer: bytes) -> None:
    for queue in queues:
        queue.buffer = buffer


def test_a_copy_of_now_takes_another_queue(queues):
    now = CopyOfNow(queues)
    write(queues, b"1")
    assert now.read() == b"1"
    for number, queue in enumerate(queues):
        queue.held = True
        assert now.read() is None
        write(queues, b"%d" % number)
        if queue is not queues[-1]:
            assert now.read() == now.read() == b"%d" % number
    assert now.read() is None
    queues[1].held = False
    assert now.read() is None  # its copy is still on its way
    queues[1].go_on()
    write(queues, b"new")
    assert now.read() == b"new"  # and not what came late


def test_a_thread_that_did_not_run_while_a_copy_came(monkeypatch):
    queue = InQueue()
    peek = GpuPeek.__new__(GpuPeek)
    now = CopyOfNow([queue])
    times = [1.0, 0.0, 1.0, 0.0]  # it is late at once
    for module in (unscheduled, waiting):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=times.pop))
    queue.buffer = b"1"
    assert now.read() == b"1"
    monkeypatch.setattr(peek, "_event", SimpleNamespace(query=lambda: not times), raising=False)
    assert peek._has_come(until_s=0.5)


@pytest.fixture
def ep() -> Iterator[epmoe.ExpertParallel]:
    with epmoe.ExpertParallel(alone()) as ep:
        yield ep


def dispatched(ep: epmoe.ExpertParallel) -> epmoe.Dispatched:
    """A round that is open. From now on each call looks, as on a GPU."""
    x_TD = torch.ones(4, 64)
    ids_TK = torch.zeros(4, 2, dtype=torch.int32)
    d = ep.dispatch(x_TD, ids_TK, torch.ones(4, 2))
    exchange = ep.exchange
    exchange.lookout.look_at.update(dict.fromkeys(exchange.lookout.look_at, 0.0))
    return d


def test_polls_take_no_look_of_a_launch_away(ep, monkeypatch):
    looks = list[NextWork]()
    monkeypatch.setattr(ep.exchange.lookout, "_late", looks.append)
    d = dispatched(ep)
    thread = Thread(target=ep.exchange.lookout.look)
    thread.start()
    thread.join()
    ep.poll()
    ep.combine(d.rows, d)
    assert looks == [None, "replay", "launch"]


def test_the_exchange_reports_it(ep, monkeypatch):
    """Every later call raises it, also a call that launches."""
    d = dispatched(ep)
    late = {"launch": LateStage(1, 1)}
    monkeypatch.setattr(ep.exchange.lookout, "_late", late.get)
    ep.poll()
    says = "combine of round 1 .*this rank's own kernel was not scheduled"
    for raising in (lambda: ep.combine(d.rows, d), ep.poll, ep.check):
        with pytest.raises(epmoe.EPTimeoutError, match=says):
            raising()
    assert ep.exchange.rounds.state and ep.exchange.missing() == 0  # this rank is not missing


def test_the_exchange_passes_on_what_others_report(ep, monkeypatch):
    dispatched(ep)
    monkeypatch.setattr(ep.exchange.lookout, "_late", lambda next_work: LateStage(0, 7, (0, 1)))
    with pytest.raises(epmoe.EPTimeoutError, match=r"round 7 .*first seen by rank 1") as caught:
        ep.poll()
    assert caught.value.missing_ranks == [0]
