"""An HTTP server over an MoE model on several ranks. It balances, outlives a rank, and changes its
size.

    pip install '.[serve]'
    python examples/serve.py [--ranks 4] [--port 8000] [--model FOLDER]

    # answers {"tokens": [...]}, or an event for each token
    curl localhost:8000/generate -d '{"prompt": [3, 14, 15], "max_tokens": 9}'
    curl -N localhost:8000/generate -d '{"prompt": [3], "max_tokens": 9, "stream": true}'

    curl localhost:8000/scale -d '{"ranks": 3}'
    curl localhost:8000/health    # also /ready, /metrics, and /ranks, which Prometheus reads

FOLDER is a checkpoint as examples/generate.py takes it. Without one, a small model with random
weights is served.

    serve.py         HTTP: checks requests, and turns them into answers and events
    serve_front.py   the rest of this process: queues requests, orders steps, replaces dead ranks
    serve_rank.py    a process of its own for each rank: the model, its steps, recover and resize

A request stays on one rank, and each step yields one token of each request. Requests of a rank that
dies are answered with status 503, all others go on, and a new process takes its place. The server
ends with its last rank. SIGTERM ends it once all open requests have their answers.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import signal
import sys
import tempfile
import threading
from contextlib import suppress

import uvicorn
from prometheus_client import Counter, generate_latest
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from serve_front import LATE_S, Front, start_forkserver
from serve_rank import SMALL, Served
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

MOST_RANKS = 8
MOST_REQUESTS = 256  # that are open at once
MOST_BYTES = 1 << 16  # of the body of a request
TIMEOUT_S = 60.0  # of a request, at most


class Generate(BaseModel):
    """The body of a request for tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")
    prompt: list[NonNegativeInt] = Field(min_length=1)
    max_tokens: PositiveInt
    stream: bool = False
    timeout_s: float = Field(TIMEOUT_S, gt=0, le=TIMEOUT_S)


class Scale(BaseModel):
    """The body of a request for another number of ranks."""

    model_config = ConfigDict(strict=True, extra="forbid")
    ranks: int = Field(ge=1, le=MOST_RANKS)


async def read(request):
    """The body of a request, of MOST_BYTES at most."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"a body has up to {MOST_BYTES} bytes")
    return bytes(body)


def described(error):
    """What is wrong with a field of a body, or with the body as a whole."""
    field = ".".join(map(str, error["loc"]))
    return f"{field}: {error['msg']}" if field else error["msg"]


class Web:
    """The front's HTTP: it checks what clients send, so that ranks get nothing else."""

    TIMED_OUT = 408, {"error": "the request has not ended in its time"}
    GONE = 400, {"error": "the client has gone"}

    def __init__(self, front, most_requests=MOST_REQUESTS):
        self.front = front
        self.most_requests = most_requests
        self.answers = Counter(
            "serve_answers", "Answers by HTTP status", ["status"], registry=front.metrics
        )

    def application(self):
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/scale", self.scale, methods=["POST"]),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/ranks", self.ranks),
            Route("/metrics", self.metrics),
        ]
        handlers = {
            ValidationError: self.invalid,
            HTTPException: self.refused,
            TimeoutError: lambda request, error: self.reply(*self.TIMED_OUT),
            ClientDisconnect: lambda request, error: self.reply(*self.GONE),
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        application.router.redirect_slashes = False
        return application

    def reply(self, status, content, headers=None):
        self.answers.labels(status).inc()
        return JSONResponse(content, status, headers)

    def invalid(self, request, error):
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return self.reply(400, {"error": "; ".join(map(described, found[:3]))})

    def refused(self, request, error):
        return self.reply(error.status_code, {"error": error.detail}, error.headers)

    async def generate(self, request):
        front = self.front
        length = front.served.length
        vocabulary = front.served.vocabulary

        # Refuse what no rank should see.
        body = Generate.model_validate_json(await asyncio.wait_for(read(request), TIMEOUT_S))
        if max(body.prompt) >= vocabulary:
            return self.reply(400, {"error": f"prompt: tokens are below {vocabulary}"})
        if len(body.prompt) + body.max_tokens > length:
            return self.reply(400, {"error": f"a prompt and its answer have up to {length} tokens"})
        if not front.ready:
            return self.reply(503, {"error": front.over or "no rank is ready"})
        if len(front.open) >= self.most_requests:
            return self.reply(429, {"error": "too many requests wait"}, {"Retry-After": "1"})

        # The front's thread puts each token into the queue, and None behind the last one.
        loop = asyncio.get_running_loop()
        tokens = asyncio.Queue()

        def hear(token):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tokens.put_nowait, token)

        future = front.submit(body.prompt, body.max_tokens, hear)
        future.add_done_callback(lambda _: hear(None))
        if body.stream:
            events = self.events(future, tokens, loop.time() + body.timeout_s)
            return StreamingResponse(events, media_type="text/event-stream")

        # Wait for the answer, for the end of its time, or for the client to leave.
        answer = asyncio.wrap_future(future)
        gone = asyncio.create_task(disconnected(request))
        await asyncio.wait(
            [answer, gone], timeout=body.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        gone.cancel()
        status, content = answer.result() if answer.done() else self.TIMED_OUT
        answer.cancel()  # its rank computes no further tokens for it
        return self.reply(status, content)

    async def events(self, future, tokens, deadline):
        """Server-sent events: one for each token, and a last one of the type "end" or "error"."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                token = await asyncio.wait_for(tokens.get(), deadline - loop.time())
                if token is None:
                    break
                yield f"data: {json.dumps({'token': token})}\n\n"
            status, content = future.result()
        except TimeoutError:
            status, content = self.TIMED_OUT
        finally:
            future.cancel()
        self.answers.labels(status).inc()
        kind = "end" if status == 200 else "error"
        yield f"event: {kind}\ndata: {json.dumps(content)}\n\n"

    async def scale(self, request):
        body = Scale.model_validate_json(await asyncio.wait_for(read(request), TIMEOUT_S))
        if not self.front.ready:
            return self.reply(503, {"error": self.front.over or "no rank is ready"})
        self.front.scale(body.ranks)
        return self.reply(202, {})

    async def health(self, request):
        """Whether this process should live."""
        return self.reply(503 if self.front.over else 200, {})

    async def ready(self, request):
        """Whether requests may come."""
        return self.reply(200 if self.front.ready else 503, {"ranks": len(self.front.members)})

    async def ranks(self, request):
        """Where Prometheus finds each rank's metrics."""
        found = []
        for member in [*self.front.members]:  # which another thread changes
            labels = {"rank": str(member.rank), "pid": str(member.process.pid)}
            found.append({"targets": [f"127.0.0.1:{member.port}"], "labels": labels})
        return JSONResponse(found)

    async def metrics(self, request):
        return PlainTextResponse(generate_latest(self.front.metrics).decode())


async def disconnected(request):
    while (await request.receive())["type"] != "http.disconnect":
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4, choices=range(1, MOST_RANKS + 1))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument(
        "--requests", type=int, default=MOST_REQUESTS, help="at once; further ones get status 429"
    )
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    served = SMALL if arguments.model is None else Served.checkpoint(arguments.model)

    # A service manager sends SIGTERM to all processes of the group. The server of new processes,
    # and the ranks that come from it, are to live until the requests have their answers.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start_forkserver(served)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())

    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        front = Front(folder, arguments.ranks, served)
        config = uvicorn.Config(
            Web(front, arguments.requests).application(),
            port=arguments.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(TIMEOUT_S + LATE_S),  # no open request takes longer
        )
        server = uvicorn.Server(config)

        def run():
            try:
                front.run()
            finally:
                server.should_exit = True

        # The front orders steps on a thread; HTTP is served here until SIGTERM, Ctrl-C, or the end
        # of the last rank. uvicorn then waits for the open requests, and raises the signal again.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            server.run()
        finally:
            front.close()
            thread.join(LATE_S)
            for process in multiprocessing.active_children():
                process.kill()
        raise SystemExit(front.over)


if __name__ == "__main__":
    main()
