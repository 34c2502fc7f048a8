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
from multiprocessing import forkserver
from multiprocessing.connection import wait

from prometheus_client import CollectorRegistry, Gauge
from serve_rank import BATCH, SMALL, run_rank

LOAD_S = 600.0  # of a group that forms: its ranks may read a checkpoint
ANSWER_S = 60.0  # of a step: a rank that has not answered is killed
LATE_S = 5.0  # behind the others: a rank is killed if it is later, once they have lost a round
LOST_S = 2.0  # to wait for a new rank which may have died as the group formed
PAUSE_S = 1.0  # no rank starts so soon after a new one has died
TRIES = 3  # of the others to take a new rank in, which is then killed

log = logging.getLogger("serve")
context = multiprocessing.get_context("forkserver")  # a new rank takes no seconds to import torch


def start_forkserver(served):
    """Start the process from which ranks are forked. It inherits the signals that are ignored."""
    context.set_forkserver_preload([*served.modules])
    forkserver.ensure_running()


@dataclass(eq=False)
class Request:
    """A request that has not been answered, in the front."""

    id: int
    tokens: list[int]  # of the prompt, and behind it those that were generated
    left: int  # tokens to be generated
    hear: Callable[[int], object]  # gets each token
    # Of (HTTP status, answer); cancelled if the client waits no more.
    future: Future = field(default_factory=Future)


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
        who = "a new rank" if self.rank is None else f"rank {self.rank}"
        return f"process {self.process.pid}, {who},"


class Front:
    """Queues requests, orders steps, and replaces ranks that die. `run` is called on a thread of
    its own.
    """

    def __init__(self, folder, size, served=SMALL):
        self.folder = folder  # where ranks meet; it outlives every one of them
        self.size = size  # that the group should have; 0 ends it
        self.served = served

        # Requests: those that no rank has yet, and all without an answer.
        self.numbers = count()
        self.queue = queue.SimpleQueue()
        self.open = set()
        self.bell = os.eventfd(0)  # other threads ring it, so that `serve` looks around
        self.ready = False
        self.over = ""  # why the service has ended

        # Ranks: those of the group, and those that are on their way into it.
        self.members = []
        self.new = []
        self.broken = False  # a member has died, or has lost a round
        self.next_start = 0.0  # of a rank, at the earliest

        self.last = time.monotonic()  # the last complete step
        self.longest_s = 0.0  # between two of them
        self.metrics = CollectorRegistry()
        gauge = partial(Gauge, registry=self.metrics)
        self.gap = gauge("serve_longest_gap_seconds", "Longest time between two complete steps")
        ranks = gauge("serve_ranks", "Ranks in the group")
        ranks.set_function(lambda: len(self.members))
        requests = gauge("serve_open_requests", "Requests without an answer")
        requests.set_function(lambda: len(self.open))

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
            member.rank, member.port, device = said
            self.new.remove(member)
            self.members.append(member)
            log.info("%s has joined, %s", member, device)
        return said

    def hear_new(self):
        for pipe in wait([member.pipe for member in self.new], 0.1):
            self.hear(next(member for member in self.new if member.pipe is pipe))

    def ask(self, order, arguments, answer_s=ANSWER_S, expected=None):
        """What every rank that lives answers to its order, within `answer_s`.

        `expected` says of all answers so far whether no others need come: LATE_S is left for them.
        """
        # Send the order to all, and then listen to all at once.
        asked = list(self.members)
        for member in asked:
            with suppress(OSError):
                member.pipe.send((order, *arguments(member)))
        answers = []
        silent = {member.pipe: member for member in asked}
        deadline = time.monotonic() + answer_s
        while silent:
            spoken = wait(list(silent), max(0.0, deadline - time.monotonic()))
            for pipe in spoken:
                member = silent.pop(pipe)
                answer = self.hear(member)
                if answer is None:  # it has died
                    continue
                answers.append((member, answer))
                # All ranks that live hear of a lost round at the same time.
                if answer[0] == "lost" or (expected is not None and expected(answers)):
                    deadline = min(deadline, time.monotonic() + LATE_S)
            if not spoken:
                for member in silent.values():
                    self.bury(member, "does not answer")
                break
        return answers

    def take_in(self, size, wait_s=LOAD_S):
        """Wait until the group has `size` members: a new rank speaks as soon as it is one of
        them.
        """
        deadline = time.monotonic() + wait_s
        while len(self.members) < size and self.new and time.monotonic() < deadline:
            self.hear_new()
        self.broken = len(self.members) < size
        # Not in place: a list that is being sorted looks empty to other threads.
        self.members = sorted(self.members, key=lambda member: member.rank)
        log.info("the group has %d rank(s)", len(self.members))

    def regroup(self, order, *arguments):
        """All ranks go into the next group, or leave."""
        self.broken = False
        came = sum(member.ready for member in self.new)

        def are_all(answers):
            """Whether the group has no rank besides those that have answered, and new ones."""
            sizes = [size for _, (_, size) in answers if size]
            return bool(sizes) and len(sizes) + came >= max(sizes)

        # Take over what the ranks say of their new group.
        most = 0
        for member, (rank, size) in self.ask(order, lambda _: arguments, LOAD_S, are_all):
            if size:
                member.rank = rank
                most = size
            else:
                log.info("%s has left", member)
                self.members.remove(member)
                for request in member.requests.values():
                    self.queue.put(request)

        # Wait for the new ranks in it. One that died meanwhile may be counted in the size.
        self.take_in(most, LOST_S if self.broken else LOAD_S)
        for member in [member for member in self.new if member.ready]:
            member.tries += 1
            if member.tries == TRIES:
                self.bury(member, "was not taken in")

        # The group may have to change again at once, and no gap is to last for two changes.
        if self.members and not self.broken:
            self.step()

    def least_busy(self):
        return min(self.members, key=lambda member: len(member.requests))

    def assign(self):
        """By rank and number, the tokens of requests that begin now: each goes to the rank with the
        fewest.
        """
        # Drop requests whose clients wait no more.
        for member in self.members:
            for request in list(member.requests.values()):
                if request.future.cancelled():
                    self.end(member, request)

        # Fill the batches of the ranks.
        begin = {member: {} for member in self.members}
        while len(self.least_busy().requests) < BATCH:
            try:
                request = self.queue.get_nowait()
            except queue.Empty:
                break
            if request.future.cancelled():
                self.answer(request, 0, None)
                continue
            member = self.least_busy()
            member.requests[request.id] = request
            begin[member][request.id] = request.tokens
        return begin

    def step(self):
        """One token of each request."""
        begin = self.assign()
        if not any(member.requests for member in self.members):
            return
        ended = {member: member.ended for member in self.members}
        for member in self.members:
            member.ended = []
        answers = self.ask("step", lambda member: (begin[member], ended[member]))

        complete = False
        for member, (outcome, tokens, errors) in answers:
            self.broken |= outcome == "lost"
            complete |= outcome == "complete"
            for number, token in tokens.items():
                self.take_token(member, member.requests[number], token)
            for number, why in errors.items():
                self.end(member, member.requests[number], 500, {"error": why})
        if complete:
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self.last)
            self.gap.set(self.longest_s)
            self.last = now

    def take_token(self, member, request, token):
        request.tokens.append(token)
        request.left -= 1
        request.hear(token)
        if not request.left or token in self.served.ends:
            self.end(member, request, 200, {"tokens": request.tokens})

    def serve(self):
        # The first group. torch waits for a rank that dies as it forms, so that would be the end.
        for rank in range(self.size):
            self.start(rank)
        deadline = time.monotonic() + LOAD_S
        while len(self.members) < self.size and time.monotonic() < deadline:
            if len(self.members) + len(self.new) < self.size:
                return
            self.hear_new()
        if len(self.members) < self.size:
            return
        self.take_in(self.size)
        self.ready = True

        while self.members and self.size:
            self.listen()
            self.start_and_end_new()
            came = sum(member.ready for member in self.new)
            if self.broken:
                self.regroup("recover")
            elif came or len(self.members) > self.size > 0:
                self.regroup("resize", min(self.size, len(self.members) + came))
            else:
                self.step()

    def listen(self):
        """Until there is something to do. Hears what ranks say that nobody has asked."""
        asked = not self.queue.empty() or any(member.requests for member in self.members)
        came = any(member.ready for member in self.new)
        changes = self.broken or came or len(self.members) > self.size
        pause = max(0.0, self.next_start - time.monotonic()) or None
        if asked or changes:
            pause = 0.0
        spoken = wait([self.bell, *[member.pipe for member in (*self.members, *self.new)]], pause)
        if not asked:
            self.last = time.monotonic()  # a time without requests is no gap
        if self.bell in spoken:
            os.eventfd_read(self.bell)
        # A new rank is ready; any other one has died.
        for member in [*self.members, *self.new]:
            if member.pipe in spoken:
                self.hear(member)

    def start_and_end_new(self):
        """As many new ranks as the group lacks."""
        while len(self.members) + len(self.new) > self.size and self.new:
            self.bury(self.new[-1], "is not needed any more")
        while len(self.members) + len(self.new) < self.size and time.monotonic() >= self.next_start:
            self.start()

    def run(self):
        """Serve until `close`, or until no rank is left. Then every request has its answer, and no
        rank remains.
        """
        try:
            self.serve()
        finally:
            self.ready = False
            self.over = "no rank is left" if self.size else "the service has ended"
            log.log(logging.ERROR if self.size else logging.INFO, self.over)
            for member in (*self.members, *self.new):
                member.process.kill()
            self.members = []
            for request in list(self.open):
                self.answer(request, 503, {"error": self.over})
