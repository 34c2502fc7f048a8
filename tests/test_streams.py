"""Streams of our own: torch hands out its 32 of a priority again and again, so that one of them may
be the one that another thread captures.
"""

from __future__ import annotations

import gc
import itertools
import re
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch
from helpers import NO_CUDA, ROOT, alone, is_right_in_a_fork

import epmoe
from epmoe.exchange import places, unscheduled
from epmoe.exchange.gpu import GpuCopies, GpuLane, GpuPeek, peek_stream
from epmoe.exchange.gpu_memory import GpuMemory
from epmoe.live.mail import Mail
from epmoe.local import side_stream
from epmoe.local.side_stream import SideStream, record_point
from epmoe.native import ops, streams
from epmoe.native.streams import HIGH, own_stream

GROUPS = 32
"""torch has as many streams of a priority."""


def test_no_stream_is_of_torchs_pool():
    taken = re.compile(r"\bcuda\.Stream\(")
    files = [*(ROOT / "epmoe").rglob("*.py")]
    assert len(files) > 100
    assert not [str(file) for file in files if taken.search(file.read_text(encoding="utf-8"))]


def test_without_cuda_it_is_one_sentence():
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="has no CUDA"):
            ops.make_stream(0, HIGH)


class Driver:
    """Streams of a GPU that is not there, by their handles."""

    def __init__(self) -> None:
        self.handles = itertools.count(1)
        self.live = set[int]()
        self.busy = set[int]()

    def make_stream(self, device: int, priority: int) -> int:
        handle = next(self.handles)
        self.live.add(handle)
        return handle

    def end_stream(self, handle: int) -> bool:
        assert handle in self.live, "it is destroyed once"
        if handle in self.busy:
            return False
        self.live.remove(handle)
        return True


class External(streams.EndsWithItsOwner):
    """In place of torch's, which needs CUDA."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream = handle


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(streams, "ops", driver)
    monkeypatch.setattr(streams, "_ended", type(streams._ended)())
    monkeypatch.setattr(streams, "_OwnStream", External)
    return driver


DEVICE = torch.device("cuda", 0)


def test_each_has_a_stream_of_its_own(driver):
    made = [own_stream(DEVICE, priority) for priority in (0, HIGH) for _ in range(GROUPS)]
    assert driver.live == {stream.cuda_stream for stream in made} and len(driver.live) == 64


def test_a_stream_ends_with_its_owner_and_its_work(driver):
    first = own_stream(DEVICE)
    second = own_stream(DEVICE)
    driver.busy.add(first.cuda_stream)
    # Both have lost their owner, and one still works.
    del first, second
    assert driver.live == {1, 2}  # a collection, on whichever thread, does nothing of CUDA
    third = own_stream(DEVICE)
    assert driver.live == {1, third.cuda_stream}
    # Now it is idle.
    driver.busy.clear()
    fourth = own_stream(DEVICE)
    assert driver.live == {third.cuda_stream, fourth.cuda_stream}


def expect_nothing_ended() -> None:
    assert not streams._ended


def test_a_forked_child_destroys_nothing(driver, monkeypatch):
    """Neither what its parent has let go of, nor what it lets go of itself."""
    # `os.register_at_fork` has the method of the module's own.
    monkeypatch.undo()
    monkeypatch.setattr(streams, "ops", driver)
    monkeypatch.setattr(streams, "_OwnStream", External)
    left = own_stream(DEVICE)
    del left
    assert is_right_in_a_fork(expect_nothing_ended)
    assert list(streams._ended) == [1]
    streams._ended.clear()


def live_config() -> epmoe.EPConfig:
    placement = {"live": True, "slots_per_rank": 8, "layers": 1, "staging_mb": 1}
    return alone(dtype="bfloat16", placement=placement, exchange={"transport": "nvlink"})


@pytest.fixture
def groups() -> Iterator[list[epmoe.ExpertParallel]]:
    made = [epmoe.ExpertParallel(live_config(), device="cuda") for _ in range(GROUPS)]
    yield made
    for ep in made:
        ep.close()


def mail_of(ep: epmoe.ExpertParallel) -> Mail:
    assert ep.live.can_move
    return ep.live.mail


def ours(groups: list[epmoe.ExpertParallel], copies: list[GpuCopies]) -> list[torch.cuda.Stream]:
    """Every stream of these groups, and those of the process."""
    device = groups[0].exchange.window.local.device
    found = [peek_stream(device), *unscheduled._streams_of(device)]
    found += side_stream._streams.values()
    found += [each._stream for each in copies]
    for ep in groups:
        lane = mail_of(ep)._lane
        assert isinstance(lane, GpuLane)
        found += [lane._stream, lane._uploads, ep.exchange.window._stream]
    return found


@contextmanager
def at_work(*steps: Callable[[], object]) -> Iterator[SimpleNamespace]:
    """Another thread does these all the time. What they raise is raised at the end."""
    stop = Event()
    state = SimpleNamespace(rounds=0, goes_on=True)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                for step in steps:
                    step()
                state.rounds += 1
        except BaseException as error:
            errors.append(error)
        state.goes_on = False

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.gpu
@NO_CUDA
def test_32_groups_have_no_stream_of_torchs_and_none_twice(groups):
    device = groups[0].exchange.window.local.device
    x = torch.ones(8, device=device)
    SideStream(record_point(device), torch.clone, x).result()
    copies = [GpuCopies(device) for _ in groups]
    handles = [stream.cuda_stream for stream in ours(groups, copies)]
    assert len(handles) == len(set(handles)) > 4 * GROUPS
    # torch hands out 32 of each priority.
    for priority in (0, -1):
        torchs = {torch.cuda.Stream(device, priority=priority).cuda_stream for _ in range(64)}
        assert torchs.isdisjoint(handles)
    assert torch.cuda.graph.default_capture_stream is None or (
        torch.cuda.graph.default_capture_stream.cuda_stream not in handles
    )


@pytest.mark.gpu
@NO_CUDA
def test_a_capture_on_each_stream_of_torchs_beside_our_copies(groups):
    """The thread that captures and the one that copies refuse each other nothing."""
    device = groups[0].exchange.window.local.device
    x = torch.arange(1024.0, device=device)
    weights = {"w": torch.ones(1 << 16, device=device)}
    spare = {"w": torch.zeros(1 << 16, device=device)}
    look = GpuPeek((x,))
    copies = GpuCopies(device)
    mail = mail_of(groups[0])
    source = torch.arange(8, dtype=torch.int64).pin_memory()
    kept = torch.zeros(8, dtype=torch.int64, device=device)

    def peeks() -> None:
        assert torch.equal(look.read()[0], torch.arange(1024.0))

    def copies_weights() -> None:
        with copies.running():
            spare["w"].copy_(weights["w"])

    def posts() -> None:
        mail.copy(kept, source)
        mail.words()
        mail.flush()

    def stores() -> None:
        groups[1].exchange.window.store(groups[1].exchange.plan["moves.words"].offset, 0)

    for step in (peeks, copies_weights, posts, stores):  # what they allocate is there by then
        step()
    torch.cuda.synchronize()
    pool = [torch.cuda.Stream(device, priority=priority) for priority in (0, -1) for _ in range(32)]
    with at_work(peeks, copies_weights, posts, stores) as beside:
        for number, stream in enumerate(pool):
            before = beside.rounds
            graph = torch.cuda.CUDAGraph()
            # This mode refuses to this thread alone what would not go into the graph.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                y = x + number
                while beside.goes_on and beside.rounds < before + 2:
                    pass
            graph.replay()
            torch.cuda.current_stream(device).synchronize()
            assert torch.equal(y.cpu(), torch.arange(1024.0) + number)
            del graph, y
    assert torch.equal(spare["w"], weights["w"]) and torch.equal(kept.cpu(), source)


def used_once(closes: bool) -> list[object]:
    """Alone in a cycle: a group that has played a round, with its weights that may sleep."""
    ep = epmoe.ExpertParallel(alone(exchange={"transport": "nvlink"}), device="cuda")
    x = torch.ones(4, 64, device=ep.device)
    ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32, device=ep.device)
    d = ep.dispatch(x, ids, torch.ones(4, 2, device=ep.device))
    ep.combine(d.rows, d)
    weights = epmoe.SleepingWeights(torch.nn.Linear(64, 64, device=ep.device))
    if closes:
        ep.close()
    cycle: list[object] = [ep, weights]
    cycle.append(cycle)
    return cycle


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("on", ["this thread", "another thread"])
@pytest.mark.parametrize("closes", [True, False])
def test_what_is_collected_during_a_capture(closes, on):
    """It does not end the capture. Its memory is free once the next group opens."""
    gc.collect()
    torch.cuda.synchronize()
    left = used_once(closes)
    x = torch.arange(8.0, device="cuda")
    torch.cuda.synchronize()
    collected = weakref.ref(left[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        del left
        if on == "this thread":
            gc.collect()
        else:
            other = Thread(target=gc.collect)
            other.start()
            other.join()
        assert collected() is None
        y *= 2
    graph.replay()
    assert torch.equal(y, 2 * (x + 1))
    assert places._left
    epmoe.ExpertParallel(alone(exchange={"transport": "nvlink"}), device="cuda").close()
    assert not places._left


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize(
    "what", ["note a death", "read health", "wait and read health", "free memory"]
)
def test_what_another_thread_does_during_a_capture(what):
    """It comes through, and the capture goes on."""
    config = alone(exchange={"transport": "nvlink"})
    with epmoe.ExpertParallel(config, device="cuda") as ep:
        window = ep.exchange.window
        x = torch.arange(8.0, device="cuda")
        memory = GpuMemory(x.device, torch.cuda.Event().synchronize)
        ranges = [memory.reserve(memory.granule) for _ in range(8)]
        for address in ranges:
            memory.map(None, address, memory.granule)

        def free() -> None:
            if ranges:
                memory.unmap(ranges[-1], memory.granule)
                memory.free(ranges.pop(), memory.granule)

        does = {
            "note a death": partial(window._note, 1),
            "read health": partial(ep.health, wait=False),
            "wait and read health": ep.health,
            "free memory": free,
        }
        window._note(0)
        ep.health()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            with at_work(does[what]) as other:
                while other.goes_on and other.rounds < 8:
                    pass
            y *= 2
        graph.replay()
        assert torch.equal(y, 2 * (x + 1))
        dead = int(ep.exchange.views["signal.dead"].view(torch.int64)[0])
        assert dead == (what == "note a death")
        window._note(0)


@pytest.mark.gpu
@NO_CUDA
def test_streams_are_destroyed_once_they_are_idle(monkeypatch):
    """The work on one that nobody has any more comes to its end."""
    ended = []

    def end_stream(handle: int) -> bool:
        is_idle = ops.end_stream(handle)
        if is_idle:
            ended.append(handle)
        return is_idle

    counted = SimpleNamespace(make_stream=ops.make_stream, end_stream=end_stream)
    monkeypatch.setattr(streams, "ops", counted)
    made = []
    device = torch.device("cuda", torch.cuda.current_device())
    a = torch.ones(1 << 24, device=device)
    b = torch.zeros_like(a)
    torch.cuda.synchronize()
    for _ in range(4 * GROUPS):
        stream = own_stream(device, HIGH)
        made.append(stream.cuda_stream)
        with torch.cuda.stream(stream):
            b.copy_(a)
        del stream
    gc.collect()
    torch.cuda.synchronize()
    streams._destroy_idle()
    assert not streams._ended and torch.equal(a, b)
    # CUDA may give a handle that has ended to a new stream.
    assert Counter(made) <= Counter(ended)


ENDS = """
import gc, torch
from epmoe.native.streams import own_stream
streams = [own_stream(torch.device("cuda", 0)) for _ in range(64)]
del streams
junk = [bytearray(64) for _ in range(10000)]
gc.collect()
"""


@pytest.mark.gpu
@NO_CUDA
def test_a_process_whose_streams_have_ended_ends_well():
    """Weak references to torch's streams would point into memory that is free."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_nobody_refers_weakly_to_a_stream_of_torchs():
    weak = re.compile(r"weakref\.(finalize|ref)\(\w*stream")
    files = [*(ROOT / "epmoe").rglob("*.py")]
    assert not [str(file) for file in files if weak.search(file.read_text(encoding="utf-8"))]
