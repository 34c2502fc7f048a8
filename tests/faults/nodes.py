"""Faults of a group over two nodes: a rank dies, the network between the nodes fails, or a node is
slow.

A node is a network namespace that tests/two_machines.sh has made; its ranks are processes of ours,
which no agent ends. Where there are no namespaces, the nodes share the network of this machine, and
its faults are left out.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from faults import ranks
from faults.ranks import EXPERTS, NAMED_S, Seen, assert_seen
from host import Host, resume

from epmoe import Placement

NAMESPACES = os.environ.get(
    "EPMOE_TEST_NAMESPACES", ""
).split()  # of the two nodes; empty: there are none
RANKS = 4
G = 2
AGENT = RANKS  # a process of node 0 that hosts the store, as an agent of torchrun does
DEADLINE_S = 5.0
DOWN_S = 2.0
MANY = 300  # rounds that take longer than it takes to cut the network
_CLONE_NEWNET = 0x40000000

Verdict = tuple[list[Seen], bool, list[int]]
"""What the ranks have seen, whether that is as expected, and the ranks that go on."""


class Nodes:
    """Two nodes of two ranks, which something hurts once."""

    def __init__(self, folder: Path, seed: int) -> None:
        # Each node has all experts.
        owners = [(p + i) % RANKS for i in (0, G) for p in range(EXPERTS)]
        self.placement = Placement.build(EXPERTS, RANKS, "explicit", owners, EXPERTS)
        self.host = Host(folder, torch.device("cpu"))
        self.random = random.Random(seed)

    def hurt(self, kind: Callable[[Nodes, int], Verdict], victim: int) -> None:
        """Something fails, the ranks report what they saw, and those that still can go on."""
        try:
            self._begin()
            # What fails, what must be seen, and who is left.
            seen, expected, rest = kind(self, victim)
            assert_seen(seen, expected, DEADLINE_S + NAMED_S)
            # Those that are left resume.
            if len(rest) < RANKS:
                self.host.succeed(rest, stay)
                self.host.form(rest)
                self.host.succeed(rest, resume)
            self.host.play(rest)
        finally:
            self.host.close()
            self._link("up")

    def killed(self, victim: int) -> Verdict:
        """A rank is killed at any moment of a round. All others name it at once; the other node
        goes on alone.
        """
        others = [rank for rank in range(RANKS) if rank != victim]
        # The rank dies while all play.
        self._play(ranks.watch)
        self.host.signal(victim, signal.SIGKILL)
        seen = self.host.answers(others)
        at_once = max(s.seconds for s in seen) < DEADLINE_S / 2
        return (
            seen,
            at_once and all(s.missing == [victim] for s in seen),
            self._node(1 - victim // G),
        )

    def cut(self, victim: int) -> Verdict:
        """The network fails for good. Each node names ranks of the other, and the first goes on
        alone.
        """
        self._play(ranks.watch)
        self._link("down")
        seen = self.host.answers(self._node(0, 1))
        expected = [
            {rank // G for rank in s.missing or ()} == {1 - at // G} for at, s in enumerate(seen)
        ]
        return seen, all(expected), self._node(victim // G)

    def cut_for_a_while(self, victim: int) -> Verdict:
        """The network fails, and is back within the deadline: a round takes long, and
        all end well.
        """
        self._play(partial(ranks.watch, rounds=MANY))
        self._link("down")
        time.sleep(DOWN_S)
        self._link("up")
        seen = self.host.answers(self._node(0, 1))
        long = max(s.seconds for s in seen) > 0.9 * DOWN_S
        return seen, long and all(s.missing is None for s in seen), self._node(0, 1)

    def slow(self, victim: int) -> Verdict:
        """Both ranks of a node are late by half the deadline, in dispatch and in combine: all
        rounds end well.
        """
        late = self._node(victim // G)
        self.host.start(late, ranks.late, victim, 0)
        self.host.start(self._node(1 - victim // G), ranks.through, victim, 0)
        seen = self.host.answers(self._node(0, 1))
        return seen, all(s.missing is None for s in seen), self._node(0, 1)

    def _begin(self) -> None:
        names = [*range(RANKS), AGENT]
        self.host.spawn(*names)
        # Each process enters the namespace of its node.
        for name in names:
            node = name // G % 2
            self.host.succeed([name], enter, NAMESPACES and NAMESPACES[node], f"wire{node}")
        self.host.form_at(names[:RANKS], AGENT, "192.0.2.1" if NAMESPACES else "127.0.0.1")
        self.host.succeed(names[:RANKS], ranks.begin, self.placement, DEADLINE_S, G)
        self.host.play(names[:RANKS])

    def _play(self, function: Callable) -> None:
        """Start rounds on all ranks. Returns at any moment of a round."""
        self.host.start(list(range(RANKS)), function, 0, 0)
        time.sleep(self.random.uniform(0, 0.2))

    def _link(self, state: str) -> None:
        for node, name in enumerate(NAMESPACES):
            subprocess.run(["ip", "-n", name, "link", "set", f"wire{node}", state], check=True)

    def _node(self, *nodes: int) -> list[int]:
        return [rank for node in nodes for rank in range(node * G, (node + 1) * G)]


KINDS = {
    "rank killed": Nodes.killed,
    "slow node": Nodes.slow,
    "network down for good": Nodes.cut,
    f"network down for {DOWN_S:.0f} s": Nodes.cut_for_a_while,
}


def enter(state, namespace: str, interface: str) -> None:
    """Moves this process to a node; threads that it starts later are there, too."""
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def stay(state) -> None:
    """This process talks to its own node only, from here on."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
