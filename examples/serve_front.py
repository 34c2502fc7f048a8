"""The front of examples/serve.py: it starts a process for each rank, and orders what all of them do
next.

That is a step, or another group: after a death, and where the group is to have another size.
"""

import logging
import multiprocessing
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge
from serve_rank import BATCH, SMALL, run_rank

import epmoe

START_S = 600.0  # of the first group, whose ranks may read a checkpoint
ANSWER_S, LATE_S = (
    60.0,
    5.0,
)  # a rank is killed that does not answer, or is later than others that have lost a round
TRIES, PAUSE_S = (
    3,
    1.0,
)  # a new rank is killed that was not taken in; no rank starts so soon after one that died new

log = logging.getLogger("serve")
context = multiprocessing.get_context("forkserver")  # a new rank takes no seconds to import torch


@dataclass(eq=False)
class Request:
    """A request that has not been answered, in the front."""

    id: int
    tokens: list[int]  # of the prompt, and behind it those that were generated
    left: int  # tokens to be generated
    hear: Callable[[int], object]  # gets each token
    future: Future = field(
        default_factory=Future
    )  # of (HTTP status, answer); cancelled if the client waits no more


@dataclass(eq=False)
class Member:
    """A rank, as the front knows it."""

    process: multiprocessing.Process
    pipe: multiprocessing.connection.Connection
    rank: int | None = None
    port: int = 0
    ready: bool = False  # a new rank: it waits in `join_group`
    tries: int = 0  # of the others to take it in
    requests: dict[int, Request] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # requests, as the rank does not know yet

    def __str__(self):
        return (
            f"process {self.process.pid}, "
            f"{'a new rank' if self.rank is None else f'rank {self.rank}'},"
        )


class Front:
    """Queues requests, orders steps, and replaces ranks that die. `run` is called on a thread of
    its own.
    """

    def __init__(self, folder, size, served=SMALL):
        context.set_forkserver_preload([*served.modules])
        self.folder, self.size, self.served, self.numbers = folder, size, served, count()
        self.store = epmoe.loopback_store()  # it outlives every rank
        Path(folder, "port").write_text(str(self.store.port))
        self.queue, self.open, self.ready, self.over = queue.SimpleQueue(), set(), False, ""
        self.bell = os.eventfd(0)
        self.members, self.new, self.broken, self.last, self.next_start = (
            [],
            [],
            False,
            time.monotonic(),
            0.0,
        )
        self.metrics = CollectorRegistry()
        gauge = partial(Gauge, registry=self.metrics)
        self.gap = gauge("serve_longest_gap_seconds", "Longest time between two complete steps")
        gauge("serve_ranks", "Ranks in the group").set_function(lambda: len(self.members))
        gauge("serve_open_requests", "Requests without an answer").set_function(
            lambda: len(self.open)
        )

    def submit(self, tokens, left, hear=lambda token: None):
        """A request's future of (HTTP status, answer). Any thread may call it, and `scale` and
        `close`.
        """
        request = Request(next(self.numbers), tokens, left, hear)
        self.open.add(request)
        self.queue.put(request)
        self.ring()
        if self.over:
            self.answer(request, 503, {"error": self.over})
        return request.future

    def scale(self, size):
        self.size = size
        self.ring()

    def close(self):
        """`run` returns soon, and all ranks end."""
        self.size = 0
        self.ring()

    def ring(self):
        os.eventfd_write(self.bell, 1)

    def answer(self, request, status, content):
        with suppress(KeyError):  # it has its answer
            self.open.remove(request)
            if request.future.set_running_or_notify_cancel():
                request.future.set_result((status, content))

    def end(self, member, request, status=0, content=None):
        """A request leaves its rank, with an answer or because its client waits no more."""
        member.ended.append(member.requests.pop(request.id).id)
        self.answer(request, status, content)

    def start(self, rank=None):
        pipe, theirs = context.Pipe()
        arguments = theirs, self.folder, rank, self.size, self.served
        process = context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.new.append(Member(process, pipe))

    def bury(self, member, why="has died"):
        log.warning("%s %s; %d requests are lost", member, why, len(member.requests))
        member.process.kill()
        for request in member.requests.values():
            self.answer(request, 503, {"error": "the rank of this request has died"})
        if member in self.new:
            self.new.remove(member)
        else:
            self.members.remove(member)
            self.broken = True

    def hear(self, member):
        """What a rank that has spoken says; None if it has died."""
        said = None
        with suppress(EOFError, OSError):
            said = member.pipe.recv()
        if said is None:
            if member in self.new:
                self.next_start = time.monotonic() + PAUSE_S
            self.bury(member)
        elif said == "ready":
            member.ready = True
        elif member in self.new:
            member.rank, member.port = said
            self.new.remove(member)
            self.members.append(member)
            log.info("%s has joined", member)
        return said

    def hear_new(self):
        for pipe in wait([member.pipe for member in self.new], 0.1):
            self.hear(next(member for member in self.new if member.pipe is pipe))

    def ask(self, order, arguments):
        """What every rank that lives answers to its order."""
        asked = list(self.members)
        for member in asked:
            with suppress(OSError):
                member.pipe.send((order, *arguments(member)))
        answers = []
        silent = {member.pipe: member for member in asked}
        deadline = time.monotonic() + ANSWER_S
        while silent:
            for pipe in (spoken := wait(list(silent), max(0.0, deadline - time.monotonic()))):
                member = silent.pop(pipe)
                answer = self.hear(member)
                if answer is not None:
                    answers.append((member, answer))
                    if answer[0] == "lost":  # all ranks that live hear of it at the same time
                        deadline = min(deadline, time.monotonic() + LATE_S)
            if not spoken:
                for member in silent.values():
                    self.bury(member, "does not answer")
                break
        return answers

    def take_in(self, size, wait_s=ANSWER_S):
        """Wait until the group has `size` members: a new rank speaks as soon as it is
        one of them.
        """
        deadline = time.monotonic() + wait_s
        while len(self.members) < size and self.new and time.monotonic() < deadline:
            self.hear_new()
        self.broken = len(self.members) < size
        self.members = sorted(
            self.members, key=lambda member: member.rank
        )  # a list that is sorted looks empty
        log.info("the group has %d rank(s)", len(self.members))

    def regroup(self, order, *arguments):
        self.broken = False
        most = 0
        for member, (rank, size) in self.ask(order, lambda member: arguments):
            if size:
                member.rank = rank
                most = size
            else:
                log.info("%s has left", member)
                self.members.remove(member)
                for request in member.requests.values():
                    self.queue.put(request)
        self.take_in(
            most, 2.0 if self.broken else ANSWER_S
        )  # one that died meanwhile may be counted in the size
        for member in [member for member in self.new if member.ready]:
            member.tries += 1
            if member.tries == TRIES:
                self.bury(member, "was not taken in")
        if self.members and not self.broken:
            # the group may have to change again at once, and no gap is to last for two changes
            self.step()

    def assign(self):
        """The tokens of requests that begin now, by rank and number: each goes to the rank with the
        fewest.
        """
        for member in self.members:
            for request in [
                request for request in member.requests.values() if request.future.cancelled()
            ]:
                self.end(member, request)
        begin = {member: {} for member in self.members}
        while (
            len((member := min(self.members, key=lambda member: len(member.requests))).requests)
            < BATCH
        ):
            try:
                request = self.queue.get_nowait()
            except queue.Empty:
                break
            if request.future.cancelled():
                self.answer(request, 0, None)
            else:
                member.requests[request.id] = request
                begin[member][request.id] = request.tokens
        return begin

    def step(self):
        begin = self.assign()
        if not any(member.requests for member in self.members):
            return
        ended = {member: member.ended for member in self.members}
        for member in self.members:
            member.ended = []
        complete = False
        for member, (outcome, tokens, errors) in self.ask(
            "step", lambda member: (begin[member], ended[member])
        ):
            self.broken |= outcome == "lost"
            complete |= outcome == "complete"
            for number, token in tokens.items():
                request = member.requests[number]
                request.tokens.append(token)
                request.left -= 1
                request.hear(token)
                if not request.left or token in self.served.ends:
                    self.end(member, request, 200, {"tokens": request.tokens})
            for number, why in errors.items():
                self.end(member, member.requests[number], 500, {"error": why})
        if complete:
            now = time.monotonic()
            self.gap.set(max(self.gap._value.get(), now - self.last))
            self.last = now

    def serve(self):
        for rank in range(self.size):
            self.start(rank)
        deadline = time.monotonic() + START_S
        while (
            len(self.members) < self.size == len(self.members) + len(self.new)
            and time.monotonic() < deadline
        ):
            self.hear_new()
        if len(self.members) < self.size:
            return  # torch waits for the rank that has died
        self.take_in(self.size)
        self.ready = True
        while self.members and self.size:
            asked = not self.queue.empty() or any(member.requests for member in self.members)
            changes = (
                self.broken
                or any(member.ready for member in self.new)
                or len(self.members) > self.size
            )
            pause = (
                0.0 if asked or changes else max(0.0, self.next_start - time.monotonic()) or None
            )
            spoken = wait([self.bell, *[m.pipe for m in (*self.members, *self.new)]], pause)
            if not asked:
                self.last = time.monotonic()
            if self.bell in spoken:
                os.eventfd_read(self.bell)
            for member in [*self.members, *self.new]:
                if (
                    member.pipe in spoken
                ):  # a new rank is ready; any other that nobody has asked has died
                    self.hear(member)
            while len(self.members) + len(self.new) > self.size and self.new:
                self.bury(self.new[-1], "is not needed any more")
            while (
                len(self.members) + len(self.new) < self.size
                and time.monotonic() >= self.next_start
            ):
                self.start()
            came = sum(member.ready for member in self.new)
            if self.broken:
                self.regroup("recover")
            elif came or len(self.members) > self.size > 0:
                self.regroup("resize", min(self.size, len(self.members) + came))
            else:
                self.step()

    def run(self):
        """Serve until `close`, or until no rank is left. Then every request has its answer, and no
        rank remains.
        """
        try:
            self.serve()
        finally:
            self.ready, self.over = (
                False,
                "no rank is left" if self.size else "the service has ended",
            )
            log.log(logging.ERROR if self.size else logging.INFO, self.over)
            for member in (*self.members, *self.new):
                member.process.kill()
            self.members = []
            for request in list(self.open):
                self.answer(request, 503, {"error": self.over})
