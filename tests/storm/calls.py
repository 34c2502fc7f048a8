"""What one rank does in a step of a storm: it calls a function of all ranks, while a signal handler
may raise at a drawn moment, and tells what has become of it.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

import epmoe
from epmoe.group.peers import Peers

CALLS_AGAIN = 5
"""A rank that may call again does so at most so often: a group that is broken does not mend."""


class SignalledError(Exception):
    """What the signal handler raises, as an exception that a host may take."""


class SignalledExit(BaseException):
    """What the signal handler raises, as KeyboardInterrupt and SystemExit do."""


class Moment(NamedTuple):
    """When a signal comes, from the begin of a call on, and whether it raises a BaseException."""

    after_s: float
    exits: bool


class Place(NamedTuple):
    """Where a signal comes: behind so many steps in files. Steps are where CPython runs signal
    handlers: the start of a function, and the end of one in C.
    """

    steps: int
    files: frozenset[str]
    exits: bool


class Outcome(NamedTuple):
    """What has become of a call on one rank."""

    ended: str
    """WHOLE, RAISED by the signal handler, or the error"""
    value: Any
    seconds: float
    hit: bool
    """whether the signal came within the call"""
    closed: bool
    """whether this rank's ExpertParallel has no group now"""
    size: int
    """of its group"""


WHOLE = "whole"
RAISED = "raised"


class Handler:
    """Raises once, at a moment or a place of what runs within it."""

    def __init__(self, moment: Moment | Place | None) -> None:
        self.moment = moment
        self.has_raised = False
        self._armed = False

    def _raise(self, *_: object) -> None:
        if self._armed:
            self._armed = False
            self.has_raised = True
            assert self.moment is not None
            raise SignalledExit if self.moment.exits else SignalledError

    def call(self, function: Callable[[], Any]) -> Any:
        if self.moment is None or self.has_raised:
            return function()
        if isinstance(self.moment, Place):
            return self._call_at_place(self.moment, function)
        signal.signal(signal.SIGALRM, self._raise)
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, self.moment.after_s)
        try:
            return function()
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _call_at_place(self, place: Place, function: Callable[[], Any]) -> Any:
        # Count the calls within the files of the place, and raise behind the last of its steps.
        self._armed = True
        left = place.steps

        def profile(frame: FrameType, what: str, _: object) -> None:
            nonlocal left
            if frame.f_code.co_filename in place.files and what in ("call", "c_return"):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    self._raise()

        sys.setprofile(profile)
        try:
            return function()
        finally:
            sys.setprofile(None)


class Begun:
    """Whether this rank is in a step of `Peers.together`, which tells its exception to the others.

    One that is raised before changes nothing: the others wait for this rank, which calls again.
    """

    def __init__(self) -> None:
        self.yes = False
        substep = Peers.substep

        @contextmanager
        def recorded(peers: Peers, then: Callable[[], object] = lambda: None) -> Iterator[None]:
            with substep(peers, then):
                self.yes = True
                yield

        Peers.substep = recorded


def prepare(state) -> None:
    """What a rank needs for the calls below; once in a process."""
    if not hasattr(state, "begun"):
        state.begun = Begun()
        logging.getLogger("epmoe").setLevel(logging.ERROR)


def call(
    state, moment: Moment | Place | None, calls_again: Callable, function: Callable, *rest: object
) -> Outcome:
    """Call `function(state, *rest)` of all ranks.

    `calls_again(state, before, error)` says whether this rank calls again by itself: `before` is
    its generation then. An error that is no EPError of the library leaves.
    """
    prepare(state)
    # The signal comes once, at the drawn moment of the first calls.
    handler = Handler(moment)
    before = None if state.ep is None else state.ep.generation
    start = time.monotonic()
    value = None
    # Call until the call is whole, or until nobody calls again.
    for _ in range(CALLS_AGAIN):
        state.begun.yes = False
        ended = WHOLE
        try:
            value = handler.call(partial(function, state, *rest))
            break
        except (SignalledError, SignalledExit) as error:
            ended = RAISED
            again = calls_again(state, before, error)
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
            again = calls_again(state, before, error)
        if not again:
            break
    seconds = time.monotonic() - start
    ep = state.ep
    size = 0 if ep is None else ep.size
    return Outcome(ended, value, seconds, handler.has_raised, is_closed(state), size)


def form(state, folder: Path, names: list[int]) -> None:
    dist.init_process_group(
        "gloo",
        store=epmoe.folder_store(folder),
        rank=names.index(state.name),
        world_size=len(names),
    )


def is_signal(error: BaseException) -> bool:
    return isinstance(error, (SignalledError, SignalledExit))


def of_step(state, before: int | None, error: BaseException) -> bool:
    """For steps that fail on all ranks, who then call again together: this rank alone does so only
    where the others still wait for it.
    """
    return is_signal(error) and not state.begun.yes


def of_regroup(state, before: int | None, error: BaseException) -> bool:
    """For `recover`, `resize` and `join_group`: until this rank is in the next group, or has left
    it.
    """
    left = state.ep is not None and state.ep.generation != before
    return is_signal(error) and not left


def of_resize(size: int, state, before: int | None, error: BaseException) -> bool:
    """As `of_regroup`; a rank that leaves is closed then."""
    has_left = state.ep.rank >= size and is_closed(state)
    return not has_left and of_regroup(state, before, error)


def is_closed(state) -> bool:
    ep = state.ep
    return ep is None or not ep.asleep and ep.life.opened is None


def of_none(state, before: int | None, error: BaseException) -> bool:
    """For what is not called again."""
    return False


def of_own(state, before: int | None, error: BaseException) -> bool:
    """For what each rank does by itself, and does to its end: it calls again."""
    return is_signal(error)


def of_sleep(state, before: int | None, error: BaseException) -> bool:
    """For `sleep`: while this rank is awake."""
    return is_signal(error) and not state.ep.asleep


def of_wake(state, before: int | None, error: BaseException) -> bool:
    """For `wake`: while this rank sleeps."""
    return state.ep.asleep and (is_signal(error) or isinstance(error, epmoe.EPError))
