"""The rail of a GPU without one: the thread that watches it, and what the host refuses
or gives up.
"""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import suppress
from ctypes import c_int64
from threading import Event, RLock, Thread, Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from waits import SOON_S

from epmoe.config.deadlines import RETURN_S, Deadlines
from epmoe.exchange.left_groups import LeftGroups
from epmoe.exchange.node import NodeExchange
from epmoe.exchange.round_state import CLOSED
from epmoe.group.errors import EPStateError, EPTimeoutError
from epmoe.native.layouts import constant
from epmoe.rail import nccl
from epmoe.rail.exchange import HierarchicalExchange
from epmoe.rail.network_cuda import NetworkOnGPUs
from epmoe.rail.rail import RailError, Transfer

TIMEOUT_S = 0.3
FIRST_S = 0.9
MOST_LOOKS = 100


class Watched:
    """What the thread watches, and the clock: it goes on with each look, of which `at_look` gets
    the number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = torch.zeros(7, dtype=torch.int64)
        self.counts, self.told = nccl.words_of(self.memory)
        self.counts[2] = self.counts[3] = 1  # the first round has ended
        self.looks = 0
        self.at_look = lambda look: None
        monkeypatch.setattr(
            nccl, "time", SimpleNamespace(monotonic=lambda: self.looks * nccl._WATCH_S)
        )

    def wait(self, seconds: float) -> bool:
        """As that of the event that ends the thread, which never comes."""
        assert seconds == nccl._WATCH_S
        self.looks += 1
        self.at_look(self.looks)
        return self.looks == MOST_LOOKS

    def lost_after(self) -> float | None:
        """Seconds; None if the exchange is not lost."""
        exchange = Exchange()
        nccl._watch(
            weakref.WeakMethod(exchange.on_late),
            self.memory,
            Deadlines(FIRST_S, TIMEOUT_S, lambda: 2),
            self,
        )
        return self.looks * nccl._WATCH_S if exchange.lost else None


class Exchange:
    lost = False

    def on_late(self) -> None:
        self.lost = True


@pytest.fixture
def watched(monkeypatch) -> Watched:
    return Watched(monkeypatch)


@pytest.mark.parametrize(("way", "deadline_s"), [(0, TIMEOUT_S), (1, TIMEOUT_S + RETURN_S)])
def test_a_transfer_that_does_not_end(watched, way, deadline_s):
    watched.memory[2 * way] = 5
    watched.memory[2 * way + 1] = 4
    assert deadline_s <= watched.lost_after() <= deadline_s + 3 * nccl._WATCH_S


def test_the_first_round_has_its_own_deadline(watched):
    """Also where the host is in a later round already: ranks may still load or compile."""
    watched.memory[:4] = torch.tensor([2, 1, 0, 0])
    assert FIRST_S <= watched.lost_after() <= FIRST_S + 3 * nccl._WATCH_S


def test_transfers_that_end_are_left_alone(watched):
    """Each starts anew, although at every look one is under way."""

    def at_look(look: int) -> None:
        watched.counts[0] = look + 1
        watched.counts[1] = look

    watched.at_look = at_look
    assert watched.lost_after() is None and watched.looks * nccl._WATCH_S > 10 * TIMEOUT_S


def test_a_node_that_has_failed(watched):
    watched.memory[4] = 1
    assert watched.told.wanted == 1
    assert watched.lost_after() == nccl._WATCH_S
    watched.told.done = 1
    assert watched.memory[5] == 1


def test_the_thread_does_not_keep_the_exchange_alive():
    exchange = Exchange()
    memory = torch.zeros(7, dtype=torch.int64)
    arguments = (
        weakref.WeakMethod(exchange.on_late),
        memory,
        Deadlines(FIRST_S, TIMEOUT_S, lambda: 2),
        Event(),
    )
    thread = Thread(target=nccl._watch, args=arguments, daemon=True)
    thread.start()
    del exchange
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()


def rail_with(group: object) -> nccl.NcclRail:
    """Without a GPU or a thread."""
    rail = nccl.NcclRail.__new__(nccl.NcclRail)
    rail._shown = torch.zeros(7, dtype=torch.int64)
    rail._counts, rail._told = nccl.words_of(rail._shown)
    rail._ending = None
    rail._group = group
    return rail


def test_an_abort_waits_for_transfers_and_not_for_graphs(monkeypatch):
    """The abort of NCCL ends transfers at once, and goes on until graphs are gone: too long for
    ranks of the node.
    """
    monkeypatch.setattr(nccl, "_END_S", SOON_S)
    gone = Event()

    def abort() -> None:
        assert rail._told.cut
        rail._counts[1] = 5
        gone.wait(SOON_S)

    # Five transfers have begun and four have ended.
    rail = rail_with(SimpleNamespace(abort=abort))
    rail._counts[:2] = 5, 4
    rail.abort()
    # The abort is over, and that of NCCL goes on behind it.
    assert rail._told.done == 1 and rail._ending.is_alive()
    gone.set()
    rail._ending.join(SOON_S)


def test_nothing_is_left_for_the_destructor_of_nccl(monkeypatch):
    """It aborts a group that no call has ended, and may wait for ever: `close` aborts where NCCL
    cannot deliver.
    """
    monkeypatch.setattr(nccl, "_END_S", SOON_S)
    rail = rail_with(group := Mock(**{"shutdown.side_effect": RuntimeError}))
    rail._closed = Event()
    rail._watching = None
    rail.close()
    assert [name for name, *_ in group.method_calls] == ["shutdown", "abort"]


@pytest.mark.parametrize("before", [{}, {"TORCH_NCCL_BLOCKING_WAIT": "0"}])
def test_a_group_has_no_watchdog(monkeypatch, before):
    """torch starts none for a group that is made under this variable. The groups of the program
    keep theirs: "0" is torch's default. The variable is not removed again, since the C library
    moves others then, which other threads may read.
    """
    monkeypatch.setattr(os, "environ", {**before})
    monkeypatch.setattr(
        nccl, "dist", Mock(**{"ProcessGroupNCCL.side_effect": lambda *_: {**os.environ}})
    )
    monkeypatch.setattr(nccl, "_get_default_store", Mock())
    assert nccl.nccl_group("group", 0, 2) == {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert os.environ == {"TORCH_NCCL_BLOCKING_WAIT": "0"}


def test_groups_that_two_threads_make_at_once_have_none(monkeypatch):
    """One that restores the variable does not take it from the other."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(nccl, "_get_default_store", Mock())
    second_begins = Event()
    first_is_made = Event()

    def make(_: object, rank: int, *__: object) -> str | None:
        if rank == 0:
            second.start()
            second_begins.wait(0.2)  # it does not, but without the lock
        else:
            second_begins.set()
            first_is_made.wait()
        return os.environ.get("TORCH_NCCL_BLOCKING_WAIT")

    found: list[object] = []

    def make_second() -> None:
        found.append(nccl.nccl_group("second", 1, 2))

    # The second thread comes while the first one makes its group.
    second = Thread(target=make_second)
    monkeypatch.setattr(nccl, "dist", Mock(**{"ProcessGroupNCCL.side_effect": make}))
    found.append(nccl.nccl_group("first", 0, 2))
    first_is_made.set()
    second.join()
    assert found == ["1", "1"] and os.environ == {"TORCH_NCCL_BLOCKING_WAIT": "0"}


@pytest.mark.parametrize(
    ("what", "error"), [("Thread", RuntimeError()), ("time", KeyboardInterrupt())]
)
def test_an_abort_that_fails_lets_the_gpu_go_on(monkeypatch, what, error):
    """No thread can start, or a signal handler ends the wait. The GPU waits for the abort no
    longer, nor sends more.
    """

    def fails(*_: object, **__: object) -> None:
        raise error

    rail = rail_with(SimpleNamespace(abort=lambda: None))
    monkeypatch.setattr(nccl, what, fails if what == "Thread" else SimpleNamespace(monotonic=fails))
    with suppress(KeyboardInterrupt):
        rail.abort()
    assert rail._told.done == 1
    with pytest.raises(RailError, match="the rail is closed"):
        rail.start(Transfer(torch.empty(0), torch.empty(0), [], []))


def network_of(code: int, noticed: int) -> tuple[NetworkOnGPUs, list[object]]:
    """Rank 1 of the nodes {0, 1} and {2, 3}, with a status of its node and the word of `rail_sum`;
    and what it does.
    """
    network = NetworkOnGPUs.__new__(NetworkOnGPUs)
    told = list[object]()

    def check() -> None:
        raise EPStateError("a replay did nothing")

    def end_waits() -> None:
        told.append("left")

    # What it asks and tells: its node, its rail,
    status = SimpleNamespace(code=code)
    network.node = SimpleNamespace(
        lookout=SimpleNamespace(look=lambda: None),
        status=status,
        failed=False,
        check=check,
        end_waits=end_waits,
    )
    network.rail = SimpleNamespace(missing=lambda found: found, abort=lambda: told.append("cut"))
    # its place among the ranks,
    network.memory = SimpleNamespace(
        ranks_per_node=2, others=[1], rank_on=lambda node: 2 * node + 1
    )
    network.rounds = SimpleNamespace(state=CLOSED, count=3)
    network.global_ranks = [0, 1, 2, 3]
    network.rank = 1
    # and what was found.
    network._noticed = c_int64(noticed)
    network.recording = RLock()
    network.failure = None
    network.pending = []
    network.reported = lambda: [2]
    network.tell_node = told.append
    return network, told


def exchange_of(network: Any) -> HierarchicalExchange:
    exchange = HierarchicalExchange.__new__(HierarchicalExchange)
    exchange.network = network
    exchange.node = network.node
    return exchange


def test_sums_of_zeros_are_a_failure():
    """A rank of the node reports a missing one when all waits of this rank have ended: only its
    sums know.
    """
    network, told = network_of(code=0, noticed=0)
    network.check()
    network._noticed.value = -1
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match=r"rank\(s\) \[2\] of the group") as raised:
            network.check()
        assert raised.value.missing_ranks == [2] and told == ["cut", 2] and network.failed


def test_a_failure_on_a_gpu_that_copies_nothing():
    """As within a capture: neither a look at the words of others, nor the report to them takes the
    error's place.
    """

    def fails(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    network, _ = network_of(code=0, noticed=-1)
    # Neither words of others nor the report to them can be had.
    network._peek = SimpleNamespace(read=fails)
    network._peeked = []
    network.views = {"rail.missed": torch.zeros(2)}
    network.rail.missing = lambda found: found or [3]
    network.tell_node = fails
    del network.reported
    with pytest.raises(EPTimeoutError):
        network.check()
    assert network.failure.missing == [3]


def test_calls_wait_for_a_failure_that_another_thread_records():
    """They raise it once the node knows. A rank that leaves does not come first with
    its own name.
    """
    network, told = network_of(code=0, noticed=0)
    leaves = Thread(target=exchange_of(network).end_waits)
    recording = Event()
    go_on = Event()

    def missing(found: list[int]) -> list[int]:
        leaves.start()
        leaves.join(0.05)
        return found

    def abort() -> None:
        recording.set()
        go_on.wait(SOON_S)

    # One thread records the failure, and cannot end before the call below waits.
    network.rail = SimpleNamespace(missing=missing, abort=abort)
    thread = Thread(target=network.on_late)
    thread.start()
    recording.wait(SOON_S)
    Timer(0.05, go_on.set).start()
    # The call raises what that thread has found.
    with pytest.raises(EPTimeoutError) as raised:
        network.check()
    assert raised.value.missing_ranks == [2] and told == [2]
    for one in (thread, leaves):
        one.join(SOON_S)
    assert told == [2]


def test_leftovers_are_no_call_that_differs():
    """Another thread keeps the failure and cuts the rail, while this one is in a call."""
    network, _ = network_of(code=0, noticed=0)

    class Noticed:
        @property
        def value(self) -> int:
            network.keep_failure([2], "over the network")
            return 1

    network._noticed = Noticed()
    with pytest.raises(EPTimeoutError):
        network.check()


def test_the_node_is_told_before_its_windows_go():
    """A transfer may turn out to be late while the GPU is waited for: the thread then cuts it, and
    tells the node.
    """
    order = list[str]()
    # As much of an exchange of the node as its end needs.
    inside = NodeExchange.__new__(NodeExchange)
    inside.processor = SimpleNamespace(
        ends=lambda *_: not order.append("ended"), turn_replays_away=lambda *_: None
    )
    inside.plan = SimpleNamespace(sizes={})
    inside.views = {"state": None}
    inside._addresses = SimpleNamespace(left=LeftGroups())
    inside._lobby = None
    inside.deadlines = Deadlines(FIRST_S, TIMEOUT_S, lambda: 2)
    inside.window = SimpleNamespace(
        deaths=SimpleNamespace(close=lambda: None),
        places=SimpleNamespace(unmap=lambda: order.append("unmapped")),
    )
    exchange_of(SimpleNamespace(node=inside, close=lambda: order.append("told"))).release()
    assert order == ["ended", "told", "unmapped"]


def test_sums_of_zeros_do_not_keep_a_rank_from_its_last_words():
    """It leaves by another exception, before a call has looked at its sums."""
    network, told = network_of(code=0, noticed=-1)
    exchange_of(network).end_waits()
    assert network.failed and told == ["left"]


def test_a_replay_of_an_earlier_group_hides_no_failure():
    """Such a replay fails by itself. A transfer that is late at the same time fails the group."""
    network, told = network_of(code=constant("kOutdated"), noticed=0)
    with pytest.raises(EPStateError):
        network.check()
    network.on_late()
    assert network.failure.missing == [2] and told == ["cut", 2]


class Levels(NetworkOnGPUs):
    """Without memory or a GPU."""

    def __init__(self, error: BaseException | None = None) -> None:
        def start(*args: object) -> None:
            if error is not None:
                raise error

        self.rail = SimpleNamespace(start=start)
        self.rank = 3
        self.device = torch.device("cuda")
        self.memory = SimpleNamespace()
        self._last_stream = None
        self.pending = []
        self.lost = []

    def record_failure(self, found: list[int]) -> None:
        self.lost.append(found)

    def check(self) -> None:
        raise EPTimeoutError("dispatch", 1, [0], [0], "is missing")


@pytest.mark.parametrize(
    ("error", "raised", "lost"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, [3]),
        (MemoryError(), MemoryError, [3]),
        (RailError(), EPTimeoutError, []),
    ],
)
def test_a_start_that_an_exception_ends(error, raised, lost):
    """What is queued is unknown then: the others get this rank's name, not another round's rows.
    They get the rows of transfers that are under way, unless these last too long.
    """
    levels = Levels(error)
    lost_before = []

    def ends(timeout_s: float) -> None:
        assert timeout_s < TIMEOUT_S
        lost_before.append([*levels.lost])
        raise RuntimeError("operation not permitted when stream is capturing")

    # Transfers under way do not end in time.
    levels.node = SimpleNamespace(processor=SimpleNamespace(ends=ends))
    with pytest.raises(raised):
        levels.start(Transfer(torch.empty(0), torch.empty(0), [], []))
    assert levels.lost == [lost] and lost_before == [[]] * bool(lost)


def test_a_capture_behind_an_abort(monkeypatch):
    """Its transfers are outside of the graph, which cannot wait for them."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    levels = Levels()
    levels.wait_for_pending()
    levels.pending.append(Transfer(torch.empty(0), torch.empty(0), [], []))
    with pytest.raises(RuntimeError, match="run a round outside of the graph first, on all ranks"):
        levels.wait_for_pending()
