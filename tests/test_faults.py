"""Every kind of fault, on one group of ranks that goes on after each: `make faults` runs more of
each.

`make faults NODES=2` also has faults of two nodes, with a network between them where this user may
make one.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from faults import nodes, ranks
from faults.ranks import EXPERTS, NAMED_S, assert_seen
from host import Host, resume

from epmoe import Placement

RUNS = int(os.environ.get("EPMOE_FAULTS_RUNS", 2))
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Kind:
    """A fault of one rank, the victim.

    victim, others: what they run meanwhile.
    signal: what the victim's process gets.
    named: whether the others must name the victim (True), must not be harmed (False), or may see
    anything (None). at_once: they must name it in half the deadline.
    """

    victim: Callable
    others: Callable
    signal: int | None = None
    named: bool | None = True
    at_once: bool = False


KINDS = {
    "killed": Kind(ranks.watch, ranks.watch, signal.SIGKILL, at_once=True),
    "stopped, and back": Kind(ranks.watch, ranks.watch, signal.SIGSTOP),
    "slow by half the deadline": Kind(ranks.late, ranks.through, named=False),
    "exception in experts": Kind(ranks.raising, ranks.without, named=False),
    "out of memory in experts": Kind(ranks.full, ranks.without, named=False),
    "left by an exception": Kind(ranks.quitting, ranks.watch, at_once=True),
    "corrupts the windows": Kind(ranks.mad, partial(ranks.through, play=ranks.endure), named=None),
}
BUSY = {
    f"busy GPU, {n}, and away": Kind(
        partial(ranks.busy_away, multiprocessors=n), partial(ranks.busy_on, multiprocessors=n)
    )
    for n in (100, 120, 131)
}


class Group:
    """Ranks that serve. Most faults leave their processes alive, and they resume; a new one
    replaces a dead one.
    """

    def __init__(self, folder: Path, device: torch.device, size: int) -> None:
        self.host = Host(folder, device)
        self.size = size
        self.names = list(range(size))
        self.full = Placement.build(
            EXPERTS,
            size,
            "explicit",
            [(p + i) % size for i in (0, 1) for p in range(EXPERTS)],
            EXPERTS,
        )
        # Ranks share GPUs by time slices.
        by_turns = device.type == "cuda" and size > torch.cuda.device_count()
        self.deadline_s = 5.0 if by_turns else 1.0 if device.type == "cuda" else 4.0
        self.host.spawn(*self.names)
        self.host.form(self.names)
        self.host.succeed(self.names, ranks.begin, self.full, self.deadline_s)
        self.host.play(self.names)

    def hurt(self, kind: Kind, seed: int) -> None:
        """The victim fails, the others report what they saw, and all go on."""
        victim = seed % self.size
        name = self.names[victim]
        others = [other for other in self.names if other != name]
        # All play, and one fails.
        self.host.play(self.names)
        self.host.start(others, kind.others, victim, seed)
        self.host.start([name], kind.victim, victim, seed)
        if kind.signal:
            time.sleep(random.Random(seed).uniform(0, 0.05))  # at any moment of a round
            self.host.signal(name, kind.signal)
        # What the others saw, and how soon.
        seen = self.host.answers(others)
        expected = {True: [[victim]], False: [None]}.get(kind.named)
        within_s = self.deadline_s / 2 if kind.at_once else self.deadline_s + NAMED_S
        assert_seen(seen, not expected or all(one.missing in expected for one in seen), within_s)
        if kind.signal is None:
            assert all(one.alive for one in self.host.answers([name]))
        self._go_on(kind, victim, others)

    def _go_on(self, kind: Kind, victim: int, others: list[int]) -> None:
        """The group plays without the victim while it is away, then with it or its successor."""
        name = self.names[victim]
        # Without the victim,
        if kind.signal:
            self.host.form(others)
            self.host.succeed(others, resume)
            self.host.play(others)
        # a stopped rank goes on and learns what the others have found,
        if kind.signal == signal.SIGSTOP:
            self.host.signal(name, signal.SIGCONT)
            (seen,) = self.host.answers([name])
            assert victim in seen.missing, f"the stopped rank misses {seen.missing}"
        if kind.signal == signal.SIGKILL:
            # a new process takes the place of a dead one,
            self.names[victim] = name + self.size  # on the same GPU
            self.host.spawn(self.names[victim])
            self.host.form(self.names)
            self.host.start([self.names[victim]], ranks.begin, self.full, self.deadline_s)
            self.host.start(others, resume, self.full)
            self.host.answers(self.names)
        elif kind.named is not False:
            # or all resume.
            self.host.form(self.names)
            self.host.succeed(self.names, resume, self.full)
        self.host.play(self.names)


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, Group]]:
    """By type of device: the group that has gone on after all faults so far."""
    groups = dict[str, Group]()
    yield groups
    for group in groups.values():
        group.host.close()


@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.parametrize("kind", [*KINDS, *BUSY])
def test_a_fault_of_a_rank(groups, device, kind, seed):
    if (
        device.type == "cuda"
        and torch.cuda.device_count() < 2
        or device.type == "cpu"
        and kind in BUSY
    ):
        pytest.skip("needs two GPUs")
    size = 3 if device.type == "cpu" else torch.cuda.device_count()
    group = groups.pop(device.type, None) or Group(Path(tempfile.mkdtemp()), device, size)
    try:
        group.hurt((KINDS | BUSY)[kind], seed)
    except BaseException:
        group.host.close()
        raise
    groups[device.type] = group


@pytest.mark.parametrize("seed", range(-(-RUNS // 2)))
@pytest.mark.parametrize("kind", nodes.KINDS)
def test_a_fault_of_two_nodes(tmp_path, kind, seed):
    """Without `NODES=2` ranks fail, and no network between the nodes."""
    if "network" in kind and not nodes.NAMESPACES:
        pytest.skip("needs two network namespaces: make faults NODES=2, as root")
    nodes.Nodes(tmp_path, seed).hurt(nodes.KINDS[kind], seed % nodes.RANKS)
