"""Requests for examples/serve.py as clients of any kind send them, drawn by a seed; some leave
before the answer.
"""

from __future__ import annotations

import json
import random
import socket
from http.client import HTTPResponse
from typing import Any, NamedTuple

METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW")
PATHS = [
    "/generate",
    "/scale",
    "/ranks",
    "/metrics",
    "/health",
    "/ready",
    "/",
    "/generate/",
    "/%00",
]
PATHS += ["/..%2f", "*", "/é"]
NUMBERS = (
    -1,
    0,
    1,
    1.5,
    10**9,
    10**400,
    True,
    None,
    "x",
    "1",
    [],
    [[1]],
    {},
    float("nan"),
    float("inf"),
    -0.0,
    1e308,
)
BYTES = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 20_000, b"1" * 5_000, b"\0" * 99]
BYTES += [b'"\\ud800"', b'{"\\ud800": 1}']
HEADERS = (
    "Content-Length: x",
    "Content-Length: -1",
    "Transfer-Encoding: what",
    "X: " + "y" * 9_000,
    ": none",
    "Host",
)
WAIT_S = 60.0


class Drawn(NamedTuple):
    """A request, as bytes, and how long its client stays."""

    sent: bytes
    leaves: str
    """"" for never; or "sending" the request; "waiting" for the answer; "reading" it."""

    def answer(self, port: int) -> tuple[int, bytes] | None:
        """Status and body, where the client waits for them. Raises TimeoutError where nothing comes
        for WAIT_S.
        """
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
            try:
                connection.sendall(
                    self.sent[: len(self.sent) // 2] if self.leaves == "sending" else self.sent
                )
                if self.leaves in ("sending", "waiting"):
                    return None
                if self.leaves == "reading":
                    connection.recv(50)
                    return None
                response = HTTPResponse(connection, method=self.sent.split(b" ", 1)[0].decode())
                response.begin()
                return response.status, response.read()
            except (BrokenPipeError, ConnectionResetError):
                if len(self.sent) > 1 << 16:
                    return None  # refused before all of it was sent
                raise


def drawn(draw: random.Random, vocabulary: int, length: int) -> Drawn:
    """A third of them are right, of which few ask for another number of ranks: two at least, of
    which one may die.
    """
    kind = draw.random()
    leaves = draw.choice(("sending", "waiting", "reading")) if draw.random() < 0.15 else ""
    # Right requests.
    if kind < 0.3:
        return Drawn(
            _written(
                "POST", "/generate", json.dumps(right_body(draw, vocabulary, length)).encode()
            ),
            leaves,
        )
    if kind < 0.305:
        return Drawn(
            _written("POST", "/scale", json.dumps({"ranks": draw.randint(2, 4)}).encode()), leaves
        )

    # Requests of the right form with something wrong in them.
    if kind < 0.75:
        path = "/generate"
        body = right_body(draw, vocabulary, length)
        if draw.random() < 0.2:
            path = "/scale"
            body = {"ranks": draw.choice((*NUMBERS, 10**6, 99)), "extra": 1}
            body = {name: body[name] for name in draw.sample([*body], draw.randint(0, 2))}
        for _ in range(draw.randint(1, 3)):
            body = _spoiled(draw, body, vocabulary)
        return Drawn(
            _written("POST", path, json.dumps(body).encode()[: draw.choice((None, None, 9))]),
            leaves,
        )

    # Anything.
    method = draw.choice(METHODS)
    path = draw.choice(PATHS)
    body = draw.choice(
        (*BYTES, draw.randbytes(draw.randint(0, 300)), b" " * draw.choice((0, 70_000)))
    )
    headers = draw.sample(HEADERS, draw.choice((0, 0, 1)))
    return Drawn(_written(method, path, body, *headers), leaves)


def right_body(draw: random.Random, vocabulary: int, length: int) -> dict[str, Any]:
    prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(1, length // 3))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randint(1, 8)}
    if draw.random() < 0.3:
        body["stream"] = True
    if draw.random() < 0.1:
        body["timeout_s"] = draw.choice((1e-4, 0.02, 50))
    return body


def _spoiled(draw: random.Random, body: Any, vocabulary: int) -> Any:
    """The body with one change, which may leave it right."""
    if not isinstance(body, dict) or draw.random() < 0.1:
        return draw.choice((*NUMBERS, [body], {"body": body}, "prompt"))
    body = dict(body)
    name = draw.choice(["prompt", "max_tokens", "stream", "timeout_s", "ranks", "what"])
    if name == "prompt" and isinstance(body.get(name), list) and draw.random() < 0.7:
        prompt = list(body[name]) or [0]
        prompt[draw.randrange(len(prompt))] = draw.choice((*NUMBERS, vocabulary, vocabulary - 1))
        body[name] = draw.choice((prompt, prompt * 99, prompt[:0]))
    elif draw.random() < 0.2:
        body.pop(name, None)
    else:
        body[name] = draw.choice(NUMBERS)
    return body


def _written(method: str, path: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
