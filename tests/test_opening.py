"""Opening an `ExpertParallel` has a deadline and one outcome: it opens on all ranks, or fails on
all, with names.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Event, Thread, Timer
from typing import cast

import pytest
import torch
from exchanges import make_config
from host import Host, create, die, fail_in, resume
from waits import LONG_S, SOON_S

import epmoe
import epmoe.rail.opening
from epmoe.exchange import sockets
from epmoe.group.deaths import this_process
from epmoe.group.peers import Peers

RANKS = 3
FAULTY = 2
DEADLINE_S = 3.0
NAMES = list(range(RANKS))


@pytest.fixture(params=[1, 3], ids="{} nodes".format)
def nodes(request) -> int:
    return request.param


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Three ranks in one group."""
    with Host(tmp_path, torch.device("cpu")) as host:
        host.spawn(*NAMES)
        host.form(NAMES)
        yield host


def config_of(nodes: int, deadline_s: float = LONG_S) -> epmoe.EPConfig:
    exchange = {"warmup_timeout_s": deadline_s}
    return make_config(
        RANKS, experts=8, timeout_s=deadline_s, ranks_per_node=RANKS // nodes, exchange=exchange
    )


def no_memory() -> None:
    raise MemoryError("no room for the window")


def no_file() -> None:
    raise FileNotFoundError("no such table")


def threads(state, most: int = 0) -> int:
    """How many there are. The kernel lists a thread for a moment after it has been joined: this
    waits for `most`.
    """
    until = time.monotonic() + SOON_S
    while (found := len(os.listdir("/proc/self/task"))) > most > 0 and time.monotonic() < until:
        time.sleep(1e-3)
    return found


@pytest.mark.parametrize("fault", ["never comes", "has ended", "ends in the windows"])
def test_a_rank_that_does_not_open_is_named(host, nodes, fault):
    opening = NAMES[:FAULTY]
    config = config_of(nodes, DEADLINE_S if fault == "never comes" else LONG_S)
    # One rank does not come, or ends.
    if fault == "has ended":
        host.signal(FAULTY, signal.SIGKILL)
    elif fault == "ends in the windows":
        host.do([FAULTY], fail_in, "opens its window", die)
        host.start([FAULTY], create, config)
    # The others name it, and say nothing of gloo.
    started = time.monotonic()
    for error in host.do(opening, create, config):
        assert error.startswith(
            f"EPOpenError: rank(s) [{FAULTY}] of the group, global rank(s) [{FAULTY}]"
        ), error
        assert "gloo" not in error and "peer" not in error
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize(
    ("where", "problem", "own", "theirs"),
    [
        ("checks", no_memory, "MemoryError: rank 2: no room", "MemoryError: rank 2: no room"),
        (
            "opens its window",
            no_memory,
            "MemoryError: rank 2: no room",
            "MemoryError: rank 2: no room",
        ),
        (
            "has windows",
            no_file,
            "FileNotFoundError: no such",
            "RuntimeError: rank 2: FileNotFoundError: no such",
        ),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(host, nodes, where, problem, own, theirs):
    """Soon, and without a trace: the same group opens the next one."""
    before = host.do(NAMES, threads)
    host.do([FAULTY], fail_in, where, problem)
    started = time.monotonic()
    # One rank fails, and the others learn it.
    *others, faulty = host.do(NAMES, create, config_of(nodes))
    assert faulty.startswith(own), faulty
    assert all(error.startswith(theirs) for error in others), others
    assert time.monotonic() - started < SOON_S
    # No thread is left, and the next group opens.
    assert [
        host.do([name], threads, most)[0] for name, most in zip(NAMES, before, strict=True)
    ] == before
    assert host.do(NAMES, create, config_of(nodes)) == [None] * RANKS
    host.play(NAMES)


def test_resume_again_in_the_same_store(host, nodes):
    """After a failure behind the point at which the ranks have connected."""
    assert host.do(NAMES, create, config_of(nodes)) == [None] * RANKS
    placement = config_of(nodes).place_experts()
    for _ in range(2):
        host.do([FAULTY], fail_in, "opens its window", no_memory)
        assert all("MemoryError: rank 2" in error for error in host.do(NAMES, resume, placement))
    host.do(NAMES, resume, placement)
    host.play(NAMES)


class TwoRanks:
    """This process as rank 0; at the socket of rank 1 nobody sends anything."""

    rank = 0
    size = 2

    def __init__(
        self, timeout_s: float, other: socket.socket, met: Callable[[str], object], backlog: int = 9
    ) -> None:
        self.timeout_s = timeout_s
        self.met = met
        other.bind("\0epmoe-test-" + os.urandom(8).hex())
        other.listen(backlog)
        self.name = other.getsockname().decode()

    def all_gather(self, value: tuple[str, str] | None) -> list[object]:
        if value is None:
            return [None, None]
        self.met(value[1])
        return [value, (value[0], self.name)]


@pytest.fixture
def other() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        yield made


def test_connections_of_other_users_put_no_deadline_off(monkeypatch, other):
    """Every user can connect to an abstract name. One that goes on doing so holds an opening up no
    longer.
    """
    timeout_s = 0.6
    ended = Event()

    def connect(name: str) -> None:
        while not ended.wait(0.1):
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
                foreign.connect(name)

    # All who connect are of another user.
    monkeypatch.setattr(
        sockets, "_user_of", lambda accepted: os.getuid() + bool(accepted.getsockname())
    )
    ranks = TwoRanks(
        2 * timeout_s, other, lambda name: Thread(target=connect, args=(name,), daemon=True).start()
    )
    # The opening ends at its deadline.
    begin = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            sockets.share_descriptors(other.fileno(), cast(Peers, ranks)).__enter__()
    finally:
        ended.set()
    assert timeout_s <= time.monotonic() - begin < SOON_S


def test_another_user_at_the_socket_of_a_rank_is_no_rank(monkeypatch, other):
    monkeypatch.setattr(
        sockets, "_user_of", lambda connection: os.getuid() + (not connection.getsockname())
    )
    with pytest.raises(RuntimeError, match="rank 1's socket: another user answers"):
        sockets.share_descriptors(
            other.fileno(), cast(Peers, TwoRanks(2.0, other, lambda name: None))
        ).__enter__()


@pytest.mark.parametrize(
    ("opens", "error", "message"),
    [
        # Nobody does in this test.
        (
            True,
            TimeoutError,
            "cannot reach rank 1's socket: its process does not answer",
        ),
        (
            False,
            RuntimeError,
            "cannot reach rank 1's socket: other processes of this machine connect to it all",
        ),
    ],
)
def test_a_socket_whose_queue_others_fill(other, opens, error, message):
    """A rank connects once there is room. After the deadline it says what it has met."""
    with ExitStack() as stack:

        def fill(_: str) -> None:
            for _ in range(2):
                foreign = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                foreign.connect(other.getsockname())
            if opens:
                Timer(0.1, other.accept).start()

        with pytest.raises(error, match=message):
            sockets.share_descriptors(
                other.fileno(), cast(Peers, TwoRanks(2.0, other, fill, backlog=1))
            ).__enter__()


def test_a_descriptor_that_is_lost_at_the_file_limit_is_told(monkeypatch, tmp_path):
    """Whether the kernel gives none of this process, or drops one on its way."""

    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with closing(sockets.Handout()) as handout:
        for number in range(2):
            handout.keep(number, os.open(tmp_path, os.O_RDONLY))
        receive = socket.recv_fds

        def all_but_one(*arguments: object) -> tuple:
            message, descriptors, *rest = receive(*arguments)
            os.close(descriptors.pop())
            return message, descriptors, *rest

        # The kernel drops the second descriptor.
        monkeypatch.setattr(socket, "recv_fds", all_but_one)
        deadline = time.monotonic() + SOON_S
        with sockets._connected(handout.name, "here", deadline) as connection:
            kept = sockets._received(connection, "here", deadline)
        assert [*kept.descriptors] == [0] and kept.lost == [1]
        os.close(kept.descriptors[0])
    # The kernel gives none of this process.
    monkeypatch.setattr(os, "pidfd_open", refused)
    with pytest.raises(OSError, match="Too many open files"):
        this_process()
