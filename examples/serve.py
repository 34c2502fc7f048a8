"""An HTTP server over an MoE model on several ranks, which balances, outlives a rank, and changes its size.

Run: python examples/serve.py [--ranks 4] [--port 8000]     after: pip install '.[serve]'
    curl localhost:8000/generate -d '{"prompt": [3, 14, 15], "max_tokens": 9}'   # {"tokens": [...]}
    curl localhost:8000/scale -d '{"ranks": 3}'
    curl localhost:8000/ranks, /metrics   # /ranks is what `http_sd_configs` of Prometheus reads

This process is the front: it starts one process for each rank, and orders what all of them do next, a step or another
group. A request stays on one rank, and each step yields one token of each request. Requests of a rank that dies are
answered with status 503, all others go on, and a new process takes its place.
"""

import argparse
import asyncio
import multiprocessing
import queue
import signal
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.nn.functional as F
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import epmoe
from epmoe.integrations.prometheus import HealthCollector

E, K, D, WIDTH, HEADS, BLOCKS, VOCABULARY, LENGTH = 8, 2, 32, 32, 4, 2, 64, 32
SLOTS, BATCH, EVERY = 4, 4, 20  # slots and requests of a rank; steps from one plan of the balancer to the next
DEADLINE_S = 10.0  # of a round, and of a group that opens
ANSWER_S, LATE_S = 60.0, 5.0  # a rank is killed that does not answer, or is later than others that have lost a round
TRIES = 3  # a new rank is killed that was not taken in

context = multiprocessing.get_context("forkserver")  # a new rank takes no seconds to import torch
context.set_forkserver_preload(["torch", "epmoe"])


def configured(size):
    return epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        topology={"ep_size": size},
        placement={"live": True, "slots_per_rank": max(SLOTS, -(-E // size)), "layers": BLOCKS, "staging_mb": 1},
        capacity={"max_num_tokens_per_rank": BATCH * LENGTH},
        exchange={"timeout_s": DEADLINE_S, "warmup_timeout_s": DEADLINE_S},
        routing={"renormalize": True},
    )


@dataclass
class Request:
    id: int
    tokens: list[int]  # of the prompt, and behind it those that were generated
    left: int  # tokens to be generated


class RequestError(Exception):
    """(id of the request, why): this request, and no other, is at fault."""


class Block(nn.Module):
    def __init__(self, ep, router, gate_up, down):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.moe = epmoe.MoELayer.from_full(ep, router, gate_up, down)  # keeps what this rank's slots hold

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    """Without a cache of keys and values: each step computes its sequences anew."""

    def __init__(self, ep):
        super().__init__()
        torch.manual_seed(0)  # in place of a checkpoint: the same weights in all processes
        shapes = (E, D), (E, 2 * WIDTH, D), (E, D, WIDTH)
        self.full = [[torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes] for _ in range(BLOCKS)]
        self.ep, self.embedding, self.positions = ep, nn.Embedding(VOCABULARY, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(Block(ep, *weights) for weights in self.full)
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def embed(self, requests):
        rows = [torch.zeros(0, D)] if not requests else []
        for request in requests:
            try:
                rows.append(self.embedding(torch.tensor(request.tokens)) + self.positions.weight[: len(request.tokens)])
            except IndexError as error:
                raise RequestError(request.id, f"the model has no such token: {error}") from None
        return pad_sequence(rows, batch_first=True)

    @torch.inference_mode()
    def forward(self, requests):
        """The next token of each. Collective: a rank without requests computes for the others."""
        x = None
        for block in self.blocks:
            with self.ep.giving_up(block.moe.tag):  # an exception inside takes this rank's place in the round
                x = block(self.embed(requests) if x is None else x)
        ends = torch.tensor([len(request.tokens) - 1 for request in requests], dtype=torch.int64)
        return self.head(self.norm(x[torch.arange(len(requests)), ends])).argmax(1).tolist()

    def load(self, moves):
        """After a death or another size. A service with large experts reads those of `moves` alone."""
        for block, (_, gate_up, down) in zip(self.blocks, self.full, strict=True):
            held = self.ep.logical_experts(block.moe.tag)
            if len(held) != len(block.moe.experts.w_down) or any(move.tag == block.moe.tag for move in moves):
                block.moe.experts = epmoe.GroupedExperts(gate_up[held], down[held])


class Rank:
    """A rank, in its process: does what the front orders."""

    def __init__(self, folder, ep):
        self.folder, self.ep, self.running = folder, ep, {}
        self.model = Model(ep)
        self.balancer = epmoe.Balancer(ep, every=EVERY)

    def step(self, new):
        """Whether the round was complete here, and what requests that ended are answered."""
        self.running |= {request.id: request for request in new}
        batch = list(self.running.values())[:BATCH]
        try:
            tokens = self.model(batch)
            self.balancer.tick()
        except RequestError as error:  # the others get an EPAbortedError, and all do the step again
            number, why = error.args
            del self.running[number]
            return "aborted", {number: (400, {"error": why})}
        except epmoe.EPAbortedError:
            return "aborted", {}
        except epmoe.EPTimeoutError:
            return "lost", {}
        done = {}
        for request, token in zip(batch, tokens, strict=True):
            request.tokens.append(token)
            request.left -= 1
            if not request.left:
                del self.running[request.id]
                done[request.id] = 200, {"tokens": request.tokens}
        return "complete", done

    def recover(self):
        epmoe.recover(self.ep, self.folder, self.model.load)
        return self.ep.rank, self.ep.size

    def resize(self, size):
        if epmoe.resize(self.ep, self.folder, size, self.model.load, balancer=self.balancer, wait_s=0.2):
            return self.ep.rank, self.ep.size
        return list(self.running.values()), 0  # this rank has left, and hands its requests back


def run_rank(pipe, folder, rank, size):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front ends
    torch.set_num_threads(1)
    metrics = CollectorRegistry()
    port = start_http_server(0, "127.0.0.1", metrics)[0].server_port
    if rank is None:
        with epmoe.ExpertParallel(configured(1)) as alone:  # what is slow the first time delays no other rank then
            Model(alone)([])
        pipe.send("ready")
        ep = epmoe.join_group(folder)
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/start", rank=rank, world_size=size)
        ep = epmoe.ExpertParallel(configured(size))
    metrics.register(HealthCollector(ep))
    own = Rank(folder, ep)
    pipe.send((ep.rank, port))
    with suppress(EOFError):  # the front has ended
        while True:
            order, *arguments = pipe.recv()
            pipe.send(getattr(own, order)(*arguments))


@dataclass(eq=False)
class Member:
    """A rank, as the front knows it."""

    process: multiprocessing.Process
    pipe: multiprocessing.connection.Connection
    rank: int = -1
    port: int = 0
    ready: bool = False  # a new rank: it waits in `join_group`
    tries: int = 0  # of the others to take it in
    requests: dict[int, Request] = field(default_factory=dict)


class Front:
    """Queues requests, orders steps, and replaces ranks that die. `serve` runs on a thread of its own."""

    def __init__(self, folder, size):
        self.folder, self.size, self.numbers = folder, size, count()
        self.metrics = CollectorRegistry()
        self.answers = Counter("serve_answers", "Answers by HTTP status", ["status"], registry=self.metrics)
        self.gap = Gauge("serve_longest_gap_seconds", "Longest time between two complete steps", registry=self.metrics)
        Gauge("serve_ranks", "Ranks in the group", registry=self.metrics).set_function(lambda: len(self.members))
        self.queue, self.futures = queue.SimpleQueue(), {}
        self.woken, self.bell = context.Pipe(duplex=False)
        self.members, self.new, self.broken, self.last = [], [], False, time.monotonic()
        for rank in range(size):
            self.start(rank)
        self.take_in(size)

    def submit(self, tokens, left):
        """A future of (HTTP status, answer); any thread may call it, and `scale`."""
        request, future = Request(next(self.numbers), tokens, left), Future()
        self.futures[request.id] = future
        self.queue.put(request)
        self.bell.send(None)
        return future

    def scale(self, size):
        self.size = size
        self.bell.send(None)

    def start(self, rank=None):
        pipe, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(theirs, self.folder, rank, self.size), daemon=True)
        process.start()
        theirs.close()
        self.new.append(Member(process, pipe))

    def answer(self, number, status, content):
        self.answers.labels(status).inc()
        future = self.futures.pop(number)
        if future.set_running_or_notify_cancel():  # the client still waits
            future.set_result((status, content))

    def bury(self, member):
        member.process.kill()
        for number in member.requests:
            self.answer(number, 503, {"error": "the rank of this request has died"})
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
            self.bury(member)
        elif said == "ready":
            member.ready = True
        elif member in self.new:
            member.rank, member.port = said
            self.new.remove(member)
            self.members.append(member)
        return said

    def ask(self, order, arguments):
        """What every rank that lives answers to its order."""
        asked = list(self.members)
        for member in asked:
            with suppress(OSError):
                member.pipe.send((order, *arguments(member)))
        answers, silent, deadline = [], {member.pipe: member for member in asked}, time.monotonic() + ANSWER_S
        while silent:
            for pipe in (spoken := wait(list(silent), max(0.0, deadline - time.monotonic()))):
                member = silent.pop(pipe)
                if (answer := self.hear(member)) is not None:
                    answers.append((member, answer))
                    if answer[0] == "lost":  # all ranks that live hear of it at the same time
                        deadline = min(deadline, time.monotonic() + LATE_S)
            if not spoken:
                for member in silent.values():
                    self.bury(member)
                break
        return answers

    def take_in(self, size, wait_s=ANSWER_S):
        """Wait until the group has `size` members: a new rank speaks as soon as it is one of them."""
        deadline = time.monotonic() + wait_s
        while len(self.members) < size and self.new and time.monotonic() < deadline:
            for pipe in wait([member.pipe for member in self.new], 0.1):
                self.hear(next(member for member in self.new if member.pipe is pipe))
        self.broken = len(self.members) < size
        self.members.sort(key=lambda member: member.rank)

    def regroup(self, order, *arguments):
        self.broken, most = False, 0
        for member, (rank, size) in self.ask(order, lambda member: arguments):
            if size:
                member.rank, most = rank, size
            else:  # it has left
                self.members.remove(member)
                for request in rank:
                    self.queue.put(request)
        self.take_in(most, 2.0 if self.broken else ANSWER_S)  # one that died meanwhile may be counted in the size
        for member in [member for member in self.new if member.ready]:
            member.tries += 1
            if member.tries == TRIES:
                self.bury(member)
        if self.members and not self.broken:
            self.step()  # the group may have to change again at once, and no gap is to last for two changes

    def step(self):
        orders = {member: [] for member in self.members}
        while not self.queue.empty():
            request = self.queue.get()
            member = min(self.members, key=lambda member: len(member.requests))
            member.requests[request.id] = request
            orders[member].append(request)
        if not any(orders.values()) and not any(member.requests for member in self.members):
            return
        complete = False
        for member, (outcome, done) in self.ask("step", lambda member: [orders[member]]):
            self.broken |= outcome == "lost"
            complete |= outcome == "complete"
            for number, (status, content) in done.items():
                del member.requests[number]
                self.answer(number, status, content)
        if complete:
            now = time.monotonic()
            self.gap.set(max(self.gap._value.get(), now - self.last))
            self.last = now

    def serve(self):
        while self.members:
            busy = self.broken or not self.queue.empty() or any(member.requests for member in self.members)
            spoken = wait([self.woken, *[m.pipe for m in (*self.members, *self.new)]], 0 if busy else None)
            if not busy:
                self.last = time.monotonic()
            while self.woken.poll():
                self.woken.recv()
            for member in [*self.members, *self.new]:
                if member.pipe in spoken:  # a new rank is ready; any other that nobody has asked has died
                    self.hear(member)
            while len(self.members) + len(self.new) > self.size and self.new:
                self.bury(self.new[-1])
            while len(self.members) + len(self.new) < self.size:
                self.start()
            came = sum(member.ready for member in self.new)
            if self.broken:
                self.regroup("recover")
            elif came or len(self.members) > self.size:
                self.regroup("resize", min(self.size, len(self.members) + came))
            else:
                self.step()
        raise SystemExit("no rank is left")


def application(front):
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    async def generate(request):
        body = await request.json()
        prompt, most = body["prompt"], body["max_tokens"]
        if not 0 < len(prompt) < len(prompt) + most <= LENGTH:
            return JSONResponse({"error": f"a prompt and its answer have up to {LENGTH} tokens"}, 400)
        status, content = await asyncio.wrap_future(front.submit(prompt, most))
        return JSONResponse(content, status)

    async def scale(request):
        front.scale((await request.json())["ranks"])
        return JSONResponse({}, 202)

    async def ranks(request):
        found = [(f"127.0.0.1:{m.port}", {"rank": str(m.rank), "pid": str(m.process.pid)}) for m in front.members]
        return JSONResponse([{"targets": [target], "labels": labels} for target, labels in found])

    async def metrics(request):
        return PlainTextResponse(generate_latest(front.metrics).decode())

    routes = [("/generate", generate, "POST"), ("/scale", scale, "POST"), ("/ranks", ranks, "GET")]
    routes.append(("/metrics", metrics, "GET"))
    return Starlette(routes=[Route(path, function, methods=[method]) for path, function, method in routes])


def main():
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        front = Front(folder, arguments.ranks)
        threading.Thread(target=front.serve, daemon=True).start()
        uvicorn.run(application(front), host="127.0.0.1", port=arguments.port)


if __name__ == "__main__":
    main()
