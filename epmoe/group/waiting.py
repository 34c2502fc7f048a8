"""Waits that may block for long, in which this thread still runs signal handlers; and work on
another thread.
"""

from __future__ import annotations

import math
import time
import weakref
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import torch

_Value = TypeVar("_Value")
# Between two looks at the end of work, if its word should be missed.
_LOOK_S = 0.1
# Between two calls of `look`.
_GLANCE_S = 0.02


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

    # A daemon: a wait that never ends must not keep the process alive.
    thread = Thread(target=call, daemon=True)
    start_thread(thread)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_GLANCE_S)
        look()
    # This look goes before that at the errors, which the thread has left by then.
    ended = not thread.is_alive()
    if errors:
        raise errors[0]
    return ended


def first_answer(ask: Callable[[], _Value], until_s: float, pause_s: float = 0.0) -> _Value:
    """Ask until an answer is true, and return it. It asks once more after `until_s`, since this
    thread may not have run meanwhile.
    """
    while time.monotonic() < until_s:
        answer = ask()
        if answer:
            return answer
        if pause_s:
            time.sleep(pause_s)
    return ask()


def as_on_this_thread(work: Callable[[], _Value]) -> Callable[[], _Value]:
    """Make a function that does the work on another thread under torch's settings of this one:
    whether there are gradients and inference mode, the current GPU, and the current streams.
    """
    gradients = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    streams: list[torch.cuda.Stream] = []
    device = 0
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        everywhere = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
        # Setting a stream makes a context on its GPU, which one with a stream of its own has.
        streams = [stream for stream in everywhere if stream.cuda_stream]

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

    It runs on a thread of its own, since Python runs signal handlers on the main thread only. A
    handler may raise before the work begins, while it runs, or behind it. The exception is raised
    after the work, and `finish_or_cancel` tells whether the work has been done.
    """

    def __init__(self, work: Callable[[], _Value]) -> None:
        self._work = work
        # The thread pops it to begin the work; the caller pops it so that nobody ever will.
        self._turn = [True]
        self._running = allocate_lock()
        self._running.acquire()
        self._has_ended = False
        self._error: BaseException | None = None

    def run(self) -> _Value:
        """Do the work. Raises what it raises, or what a signal handler raises meanwhile."""
        start_new_thread(self._run, ())
        while not self._has_ended:
            self._running.acquire(timeout=_LOOK_S)
        return self._result()

    def finish_or_cancel(self) -> bool:
        """Wait for the end of work that has begun, and cancel work that has not. The caller of
        `run` calls it after an exception.

        Returns whether the work has been done. Exceptions of further signal handlers are dropped.
        """
        # Take the turn, if the work has not begun.
        with suppress(IndexError):
            self._turn.pop()
            return False
        # It has: wait for its end.
        while not self._has_ended:
            # Suppress what handlers raise: the caller has an exception to raise already.
            with suppress(BaseException):
                self._running.acquire(timeout=_LOOK_S)
        self._error = None
        return True

    def _run(self) -> None:
        """Do the work, on the thread."""
        # `finish_or_cancel` may have taken the turn: then the work never begins.
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
        # An error that refers to itself by its frames would keep what they hold, such as a process
        # group whose end other ranks wait for.
        error = self._error
        self._error = None
        try:
            if error is not None:
                raise error
        finally:
            del error
        return self._value


def to_its_end(work: Callable[[], _Value]) -> _Value:
    """The value of work that is done once and to its end, or not at all. What a signal handler
    raises is raised before it or behind it.
    """
    uninterrupted = Uninterrupted(work)
    try:
        return uninterrupted.run()
    except BaseException:
        uninterrupted.finish_or_cancel()
        raise


def start_thread(thread: Thread) -> None:
    """Start a thread. What a signal handler raises meanwhile is raised once `thread` has started,
    or never will: `thread.ident` tells which.

    `Thread.start` alone raises KeyError then, or keeps a thread that has never begun in Python's
    list of threads.
    """
    # Python runs signal handlers on the main thread only, so none raises in this call of `start`.
    to_its_end(thread.start)


class Promise(Generic[_Value]):
    """The result of a computation of a `Worker`. `done` says whether it is there."""

    def __init__(self, compute: Callable[[], _Value]) -> None:
        self._compute = compute
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._compute()
        except BaseException as error:
            self.error = error
        self.done = True

    def get(self) -> _Value:
        """The value, once it is done. Raises what the computation raised."""
        if self.error is not None:
            raise self.error
        return self._value


class Worker:
    """Computes on a thread of its own, one thing after another.

    A signal handler may raise in any of its methods. The locks of `concurrent.futures` would then
    stay locked.
    """

    def __init__(self, name: str) -> None:
        self._queue = SimpleQueue[object]()
        # Ends the thread where this object goes. No signal handler comes between, as it would in a
        # `__del__` in Python, where what it raises is lost.
        gone = weakref.ref(self, self._queue.put)
        self._thread = Thread(target=_serve, args=(self._queue, gone), name=name, daemon=True)
        start_thread(self._thread)

    @property
    def lives(self) -> bool:
        """Whether its thread has not ended. In a forked child there is none."""
        return self._thread.is_alive()

    def submit(self, compute: Callable[[], _Value]) -> Promise[_Value]:
        """Compute it after what was submitted before. Waits for nothing."""
        promise = Promise(compute)
        self._queue.put(promise)
        return promise

    def close(self) -> None:
        """End the thread after what was submitted. Waits for nothing."""
        self._queue.put(None)


def _serve(queue: SimpleQueue[object], gone: weakref.ref[Worker]) -> None:
    """The thread, until there is anything but a promise. It keeps `gone` alive, not the worker."""
    while isinstance(promise := queue.get(), Promise):
        promise.run()
        # Keep the value no longer than its reader does.
        del promise
