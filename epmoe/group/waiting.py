"""Waits that may block for long while this thread still runs signal handlers, and work that is done
on another thread.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
import weakref
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import torch

_Value = TypeVar("_Value")
# The longest time until a caller notices that work has ended, if it misses the release of the lock
# that says so.
_END_OF_WORK_POLL_S = 0.1
# The pause between two calls of `look`.
_LOOK_PAUSE_S = 0.02


def interruptible(
    wait: Callable[[], None],
    timeout_s: float | None = None,
    look: Callable[[], None] = lambda: None,
) -> bool:
    """Call `wait` on another thread, so that this thread can run signal handlers meanwhile.

    Returns whether `wait` has ended within `timeout_s` seconds; it runs to its end anyway. `look`
    is called about every 20 ms. Raises what `wait`, `look` or a signal handler raises.
    """
    errors: list[BaseException] = []

    def call() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    # A wait that never ends must not keep the process alive, so the thread is a daemon.
    thread = Thread(target=call, daemon=True)
    start_thread(thread)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_LOOK_PAUSE_S)
        look()
    # Ask whether the thread has ended before reading its errors. If it has, its error is there.
    ended = not thread.is_alive()
    if errors:
        raise errors[0]
    return ended


def first_answer(ask: Callable[[], _Value], until_s: float, pause_s: float = 0.0) -> _Value:
    """Call `ask` until its answer is true, and return the answer. `until_s` is the deadline, a time
    of `time.monotonic`.

    It asks once more after the deadline, and returns whatever the answer is then: on a busy machine
    this thread may not have run for long.
    """
    while time.monotonic() < until_s:
        answer = ask()
        if answer:
            return answer
        if pause_s:
            time.sleep(pause_s)
    return ask()


def as_on_this_thread(work: Callable[[], _Value]) -> Callable[[], _Value]:
    """Make a function that does `work` on another thread under the settings that torch has on this
    thread: grad mode, inference mode, the current GPU, and the current streams of all GPUs.
    """
    gradients = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    streams: list[torch.cuda.Stream] = []
    device = 0
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        current_streams = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
        # Leave out default streams, which every thread begins with. Setting a stream makes a
        # context on its GPU, and a GPU with another stream has a context already.
        streams = [stream for stream in current_streams if stream.cuda_stream]

    def call() -> _Value:
        for stream in streams:
            torch.cuda.set_stream(stream)
        if streams or device:
            torch.cuda.set_device(device)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            return work()

    return call


class Uninterrupted(Generic[_Value]):
    """Work that is done once and to its end, or not at all, whatever signal handlers raise.

    The work runs on a thread of its own, because Python runs signal handlers on the main thread
    only. A handler may raise before the work begins, while it runs, or after it. In each case the
    exception reaches the caller of `run`, who then calls `finish_or_cancel`: it waits for work that
    has begun, and says whether the work has been done.
    """

    def __init__(self, work: Callable[[], _Value]) -> None:
        self._work = work
        # Whoever pops the only item decides: the thread pops it to begin the work, and the caller
        # pops it to cancel the work. A pop is one step, which no signal handler can divide.
        self._turn = [True]
        self._running = allocate_lock()
        self._running.acquire()
        self._has_ended = False
        self._error: BaseException | None = None

    def run(self) -> _Value:
        """Do the work, and return its result. Raises what the work raises, or what a signal handler
        raises meanwhile.
        """
        start_new_thread(self._run, ())
        while not self._has_ended:
            self._running.acquire(timeout=_END_OF_WORK_POLL_S)
        return self._result()

    def finish_or_cancel(self) -> bool:
        """Wait for the end of work that has begun, and cancel work that has not begun. The caller
        of `run` calls it after an exception.

        Returns whether the work has run to its end, successful or not. Exceptions of further signal
        handlers are dropped meanwhile.
        """
        # If the work has not begun, take its turn, so that it never begins.
        with suppress(IndexError):
            self._turn.pop()
            return False
        # The work has begun, so wait for its end.
        while not self._has_ended:
            # Drop what signal handlers raise, since the caller already has an exception to raise.
            with suppress(BaseException):
                self._running.acquire(timeout=_END_OF_WORK_POLL_S)
        self._error = None
        return True

    def _run(self) -> None:
        """Do the work. It runs on the thread."""
        # If `finish_or_cancel` has taken the turn, the work never begins.
        try:
            self._turn.pop()
        except IndexError:
            return
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error
        self._has_ended = True
        self._running.release()

    def _result(self) -> _Value:
        """Return the result of work that has ended, or raise its error."""
        # Delete the local `error` at the end. Otherwise the traceback of the error holds this
        # frame, and this frame holds the error. Such a cycle keeps alive what the frames hold, for
        # example a process group whose end other ranks wait for.
        error = self._error
        self._error = None
        try:
            if error is not None:
                raise error
        finally:
            del error
        return self._value


def to_its_end(work: Callable[[], _Value]) -> _Value:
    """Do `work` once and to its end, or not at all, and return its result. What a signal handler
    raises meanwhile is raised before the work or after it.
    """
    uninterrupted = Uninterrupted(work)
    try:
        return uninterrupted.run()
    except BaseException:
        uninterrupted.finish_or_cancel()
        raise


def import_undisturbed(*names: str) -> None:
    """Import modules where no signal handler runs, which is on another thread.

    Python's import system takes a lock right before the `try` that gives it back. If a handler
    raises between the two, the lock stays with the main thread, and each import of another thread
    waits for ever. A module that is imported already takes no lock.
    """
    for name in names:
        if name not in sys.modules:
            to_its_end(partial(importlib.import_module, name))


def start_thread(thread: Thread) -> None:
    """Start a thread. What a signal handler raises meanwhile is raised when the thread has started,
    or when it is certain that it never will; `thread.ident` tells which.

    If a handler raises within `Thread.start` itself, `start` may raise KeyError, or Python may keep
    a thread that has never begun in its list of threads.
    """
    # `start` is called on another thread here, where no signal handler runs.
    to_its_end(thread.start)


class Promise(Generic[_Value]):
    """The result of a computation that a `Worker` runs. `done` says whether it has ended."""

    def __init__(self, compute: Callable[[], _Value]) -> None:
        self._compute = compute
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the computation, and keep its value or its error. The worker calls it."""
        try:
            self._value = self._compute()
        except BaseException as error:
            self.error = error
        self.done = True

    def get(self) -> _Value:
        """Return the value. The caller has seen `done`. Raises what the computation has raised."""
        if self.error is not None:
            raise self.error
        return self._value


class Worker:
    """A thread that runs computations, one after the other.

    A signal handler may raise in any of its methods without harm. That is why it does not use
    `concurrent.futures`, whose locks would stay locked.
    """

    def __init__(self, name: str) -> None:
        self._queue = SimpleQueue[object]()
        # When this object is collected, the callback puts the dead reference into the queue, which
        # ends the thread. The callback is a function of C, so no signal handler runs in it. In a
        # `__del__` of Python one might, and its exception would be lost.
        gone = weakref.ref(self, self._queue.put)
        self._thread = Thread(target=_serve, args=(self._queue, gone), name=name, daemon=True)
        start_thread(self._thread)

    @property
    def lives(self) -> bool:
        """Whether the thread runs. In a forked child it does not."""
        return self._thread.is_alive()

    def submit(self, compute: Callable[[], _Value]) -> Promise[_Value]:
        """Queue a computation behind those that were submitted before. It waits for nothing."""
        promise = Promise(compute)
        self._queue.put(promise)
        return promise

    def close(self) -> None:
        """End the thread after the computations that were submitted. It waits for nothing."""
        self._queue.put(None)


def _serve(queue: SimpleQueue[object], gone: weakref.ref[Worker]) -> None:
    """Run the promises of the queue, until something else comes. It is the work of a thread.

    `gone` is not used here. It is an argument so that the thread keeps the weak reference alive,
    without which its callback would never be called.
    """
    while isinstance(promise := queue.get(), Promise):
        promise.run()
        # Do not keep the value alive during the wait for the next promise.
        del promise
