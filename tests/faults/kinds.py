"""The kinds of faults, and a group of ranks that is hurt by one, reports it, and goes on."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from faults import ranks
from faults.ranks import EXPERTS
from host import Host, play, resume

from epmoe import Placement

NAMED_S = 2.0
"""A failure is named within the deadline and these seconds."""
AT_ONCE_S = 0.5
"""A death is named within these seconds, whatever the deadline."""


@dataclass(frozen=True)
class Kind:
    """A fault of one rank, the victim.

    victim, others: what they run meanwhile.
    signal: what the victim's process gets.
    named: whether the others must name the victim (True), must not be harmed (False), or may see anything (None).
    at_once: they must name it without waiting for the deadline.
    """

    victim: Callable
    others: Callable
    signal: int | None = None
    named: bool | None = True
    at_once: bool = False


KINDS = {
    "killed": Kind(ranks.on, ranks.on, signal.SIGKILL, at_once=True),
    "stopped, and back": Kind(ranks.on, ranks.on, signal.SIGSTOP),
    "slow by half the deadline": Kind(ranks.late, ranks.through, named=False),
    "exception in experts": Kind(ranks.raising, ranks.without, named=False),
    "out of memory in experts": Kind(ranks.full, ranks.without, named=False),
    "left by an exception": Kind(ranks.quitting, ranks.on, at_once=True),
    "corrupts the windows": Kind(ranks.mad, ranks.scribbled_on, named=None),
}
BUSY = {
    f"busy GPU, {n}, and away": Kind(
        partial(ranks.busy_away, multiprocessors=n), partial(ranks.busy_on, multiprocessors=n)
    )
    for n in (100, 120, 131)
}


def kinds_of(device: torch.device) -> dict[str, Kind]:
    return KINDS | (BUSY if device.type == "cuda" else {})


@dataclass
class Outcome:
    """What came of one fault; `why` says what went wrong."""

    named: bool = False
    hung: bool = False
    alive: bool = False
    resumed: bool = False
    seconds: float = 0.0
    why: str = ""


class Group:
    """Ranks that serve. Most faults leave their processes alive, and they resume; a new one replaces a dead one."""

    def __init__(self, folder: Path, device: torch.device, size: int) -> None:
        self.host, self.size, self.names = Host(folder, device), size, list(range(size))
        self.full = Placement.build(
            EXPERTS, size, "explicit", [(p + i) % size for i in (0, 1) for p in range(EXPERTS)], EXPERTS
        )
        by_turns = device.type == "cuda" and size > torch.cuda.device_count()  # ranks share GPUs by time slices
        self.deadline_s = 5.0 if by_turns else 1.0
        self.host.spawn(*self.names)
        self.host.form(self.names)
        self.host.succeed(self.names, ranks.begin, self.full, self.deadline_s)
        self.host.succeed(self.names, play)

    def close(self) -> None:
        self.host.close()

    def hurt(self, kind: Kind, seed: int) -> Outcome:
        """The victim fails, the others report what they saw, and all go on; otherwise the group is of no more use."""
        victim, outcome = seed % self.size, Outcome()
        name = self.names[victim]
        others = [other for other in self.names if other != name]
        try:
            self.host.succeed(self.names, play)
            self.host.start(others, kind.others, victim, seed)
            self.host.start([name], kind.victim, victim, seed)
            if kind.signal:
                time.sleep(random.Random(seed).uniform(0, 0.05))  # at any moment of a round
                self.host.signal(name, kind.signal)
            seen = self.host.answers(others)
            theirs = self.host.answers([name]) if kind.signal is None else []
            outcome.seconds = max(s.seconds for s in seen)
            outcome.alive = all(s.alive for s in seen + theirs)
            expected = {True: [[victim]], False: [None]}.get(kind.named)
            unexpected = [s.missing for s in seen if expected and s.missing not in expected]
            within_s = AT_ONCE_S if kind.at_once else self.deadline_s + NAMED_S
            outcome.named = not unexpected and outcome.seconds < within_s
            outcome.why = f"missing: {unexpected}, {outcome.seconds:.1f} s" if not outcome.named else ""
            self._go_on(kind, victim, others)
            outcome.resumed = True
        except (AssertionError, EOFError, OSError) as error:
            outcome.hung = "does not answer" in str(error)
            outcome.why += f" {type(error).__name__}: {error}"
        return outcome

    def _go_on(self, kind: Kind, victim: int, others: list[int]) -> None:
        """The group plays without the victim while it is away, then with it or its successor."""
        name = self.names[victim]
        if kind.signal:
            self.host.form(others)
            self.host.succeed(others, resume)
            self.host.succeed(others, play)
        if kind.signal == signal.SIGSTOP:
            self.host.signal(name, signal.SIGCONT)
            (seen,) = self.host.answers([name])
            assert victim in seen.missing, f"the stopped rank misses {seen.missing}"
        if kind.signal == signal.SIGKILL:
            self.names[victim] = name + self.size  # on the same GPU
            self.host.spawn(self.names[victim])
            self.host.form(self.names)
            self.host.start([self.names[victim]], ranks.begin, self.full, self.deadline_s)
            self.host.start(others, resume, self.full)
            self.host.answers(self.names)
        elif kind.named is not False:
            self.host.form(self.names)
            self.host.succeed(self.names, resume, self.full)
        self.host.succeed(self.names, play)
