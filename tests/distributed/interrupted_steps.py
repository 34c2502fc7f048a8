"""Steps of all ranks in which a signal handler raises on one, at every place in turn."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from helpers import Interrupted
from waits import SOON_S

from epmoe import service
from epmoe.checkpoint import put_adapter
from epmoe.group import collective, join, peers, waiting
from epmoe.life import life, membership

FILES = {
    module.__file__
    for module in (
        collective,
        contextlib,
        join,
        life,
        membership,
        peers,
        put_adapter,
        service,
        waiting,
    )
}
"""Where a rank is between the first line of a step and its outcome."""


class Handler:
    """A signal handler that raises once, behind so many steps of `files` from `arm` on."""

    def __init__(self, events: int, files: Container[str | None] = FILES) -> None:
        self.left = events
        self.files = files
        self.has_raised = False

    def arm(self) -> None:
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, what: str, _: object) -> None:
        if frame.f_code.co_filename not in self.files or what not in ("call", "c_return"):
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            self.has_raised = True
            raise Interrupted


def of_all(value: Any) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def outcome_of(step: Callable[[], object]) -> str:
    """What becomes of a step on this rank: "whole", or the name of its error."""
    try:
        step()
        sys.setprofile(None)
        return "whole"
    except (Exception, Interrupted) as error:
        sys.setprofile(None)
        return type(error).__name__


def steps_until_whole(
    rank: int,
    step: Callable[[Callable[[], None]], None],
    *,
    victim: int = 1,
    files: Container[str | None] = FILES,
    stride: int = 1,
) -> Iterator[list[str]]:
    """What a step becomes on each rank, while a handler raises on `victim` behind 0, 1, 2, … steps
    of `files`, or each `stride`-th of them.

    `step` calls its argument once it has begun. The last outcomes are those of a step in which no
    handler has raised.
    """
    for events in itertools.count(0, stride):
        handler = Handler(events, files)
        arm = handler.arm if rank == victim else lambda: None
        yield of_all(outcome_of(partial(step, arm)))
        if not of_all(handler.has_raised)[victim]:
            assert events > 10
            return


def settled_steps(
    rank: int,
    step: Callable[[Callable[[], None]], None],
    *,
    victim: int,
    files: Container[str | None],
    stride: int,
) -> Iterator[bool]:
    """The steps of `steps_until_whole`: whether each has succeeded, on all ranks but the victim, or
    raised RuntimeError on all of them, and at once. The last one succeeds on all.
    """
    outcomes: list[str] = []
    begin = time.monotonic()
    for outcomes in steps_until_whole(rank, step, victim=victim, files=files, stride=stride):
        assert time.monotonic() - begin < SOON_S, "the others hear of it at once"
        others = {outcome for r, outcome in enumerate(outcomes) if r != victim}
        assert others in ({"whole"}, {"RuntimeError"}), outcomes
        yield others == {"whole"}
        begin = time.monotonic()
    assert set(outcomes) == {"whole"}


def check_folder_of_steps(
    rank: int,
    step: Callable[[Callable[[], None]], None],
    folder: Path,
    *,
    victim: int,
    files: Container[str | None],
    stride: int,
) -> None:
    """The same for a step that makes a folder: it is there where the step has succeeded."""
    for has_succeeded in settled_steps(rank, step, victim=victim, files=files, stride=stride):
        assert folder.exists() == has_succeeded
        # The next step finds no folder.
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
