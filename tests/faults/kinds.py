"""The kinds of faults, and a group of ranks that is hurt by one, reports it, and goes on."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from faults import ranks
from faults.ranks import EXPERTS, Seen
from host import Host, resume

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

    def judge(self, seen: list[Seen], expected: bool, within_s: float, theirs: Sequence[Seen] = ()) -> None:
        """Whether ranks have reported what they should, in time, and all devices work; `theirs`: of the victim."""
        self.seconds, self.alive = max(one.seconds for one in seen), all(one.alive for one in [*seen, *theirs])
        self.named = expected and self.seconds < within_s
        if not (self.named and self.alive):
            self.why = f" missing: {[one.missing for one in seen]}, {self.seconds:.1f} s"

    @contextmanager
    def service_resumes(self) -> Iterator[None]:
        """Inside it the ranks go on."""
        try:
            yield
            self.resumed = True
        except (AssertionError, EOFError, OSError) as error:
            self.hung = "does not answer" in str(error)
            self.why += f" {type(error).__name__}: {error}"


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
        self.host.play(self.names)

    def close(self) -> None:
        self.host.close()

    def hurt(self, kind: Kind, seed: int) -> Outcome:
        """The victim fails, the others report what they saw, and all go on; otherwise the group is of no more use."""
        victim, outcome = seed % self.size, Outcome()
        name = self.names[victim]
        others = [other for other in self.names if other != name]
        with outcome.service_resumes():
            self.host.play(self.names)
            self.host.start(others, kind.others, victim, seed)
            self.host.start([name], kind.victim, victim, seed)
            if kind.signal:
                time.sleep(random.Random(seed).uniform(0, 0.05))  # at any moment of a round
                self.host.signal(name, kind.signal)
            seen = self.host.answers(others)
            expected = {True: [[victim]], False: [None]}.get(kind.named)
            within_s = AT_ONCE_S if kind.at_once else self.deadline_s + NAMED_S
            theirs = self.host.answers([name]) if kind.signal is None else []
            outcome.judge(seen, not expected or all(one.missing in expected for one in seen), within_s, theirs)
            self._go_on(kind, victim, others)
        return outcome

    def _go_on(self, kind: Kind, victim: int, others: list[int]) -> None:
        """The group plays without the victim while it is away, then with it or its successor."""
        name = self.names[victim]
        if kind.signal:
            self.host.form(others)
            self.host.succeed(others, resume)
            self.host.play(others)
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
        self.host.play(self.names)
