"""examples/serve.py under load: ranks die, new ones come, the group changes its size, and no token is wrong.

Clients have one request each at a time, with prompts drawn by a seed. EPMOE_SERVE_RUNS repeats each death so often.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import long
from launched import ROOT

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
sys.path.insert(0, str(ROOT / "examples"))

import serve  # noqa: E402
from dying_server import STATES, victims  # noqa: E402

import epmoe  # noqa: E402

CLIENTS, RANKS, WAIT_S = 8, 4, 120.0
IN_CI = ("before", "in", "moving", "new-opens")  # of the states of a death
GAP_S = serve.DEADLINE_S  # no death costs a deadline, also on a machine with other load; the gap itself is printed


class Answer(NamedTuple):
    prompt: list[int]
    most: int
    status: int
    content: dict[str, Any]


class Server:
    def __init__(self, port: int, pid: int = 0) -> None:
        self.port, self.pid, self.answers, self._stop = port, pid, list[Answer](), threading.Event()

    def call(self, path: str, body: object = None) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def generate(self, prompt: list[int], most: int) -> None:
        status, content = self.call("/generate", {"prompt": prompt, "max_tokens": most})
        self.answers.append(Answer(prompt, most, status, json.loads(content)))

    def ranks(self) -> list[dict[str, Any]]:
        return json.loads(self.call("/ranks")[1])

    def pids(self) -> list[int]:
        return [int(rank["labels"]["pid"]) for rank in self.ranks()]

    def metric(self, name: str, port: int | None = None) -> float:
        """The sum over labels, of the front or of a rank."""
        text = Server(port or self.port).call("/metrics")[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (.*)$", text, re.MULTILINE))

    def wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < deadline, f"{self.ranks()}, {len(self.answers)} answers"
            time.sleep(0.05)

    def more(self, answers: int) -> None:
        """Wait for so many further answers."""
        goal = len(self.answers) + answers
        self.wait(lambda: len(self.answers) >= goal)

    @contextmanager
    def load(self, seed: int) -> Iterator[None]:
        """Meanwhile clients ask. Every request is answered."""
        clients = [threading.Thread(target=self._ask, args=(seed * CLIENTS + i,), daemon=True) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self._stop.set()
            for client in clients:
                client.join(WAIT_S)
        assert not any(client.is_alive() for client in clients), "a request was lost"

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop.is_set():
            prompt = [draw.randrange(serve.VOCABULARY) for _ in range(draw.randint(1, 12))]
            self.generate(prompt, draw.randint(1, 12))


@contextmanager
def running(tmp_path: Path, *program: object) -> Iterator[Server]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", *filter(None, [os.environ.get("PYTHONPATH")]))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, *map(str, program), "--ranks", str(RANKS), "--port", "0"]
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=ROOT)
    try:
        deadline = time.monotonic() + WAIT_S
        while not (found := re.search(r"running on http://127.0.0.1:(\d+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield Server(int(found[1]), process.pid)
    except AssertionError as error:
        error.add_note(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def alone() -> Iterator[serve.Model]:
    """The model in one process."""
    with epmoe.ExpertParallel(serve.configured(1)) as ep:
        yield serve.Model(ep)


def check(server: Server, model: serve.Model, most_lost: int, gap_s: float = GAP_S) -> None:
    """Answers are those of one process, but for requests of ranks that have died."""
    right = [answer for answer in server.answers if answer.status == 200]
    lost = [answer for answer in server.answers if answer.status != 200]
    assert all(answer.status == 503 and "has died" in answer.content["error"] for answer in lost), lost
    assert len(lost) <= most_lost, f"{len(lost)} lost"
    expected = [serve.Request(i, list(answer.prompt), answer.most) for i, answer in enumerate(right)]
    while batch := [request for request in expected if request.left][: serve.BATCH]:
        for request, token in zip(batch, model(batch), strict=True):
            request.tokens.append(token)
            request.left -= 1
    wrong = [(answer, request) for answer, request in zip(right, expected, strict=True)
             if answer.content["tokens"] != request.tokens]  # fmt: skip
    assert not wrong, wrong[0]
    gap = server.metric("serve_longest_gap_seconds")
    print(f"{len(right)} right, {len(lost)} of dead ranks, longest gap {gap:.3f} s")
    assert gap < gap_s


def test_a_rank_is_killed_under_load(tmp_path, alone):
    """A request that raises harms no other; a rank dies and is replaced; then the group shrinks. Experts move."""
    with running(tmp_path, "examples/serve.py") as server:
        with server.load(seed=0):
            server.more(20)
            status, content = server.call("/generate", {"prompt": [1, serve.VOCABULARY], "max_tokens": 3})
            assert status == 400 and "no such token" in content
            assert server.call("/generate", {"prompt": [1] * serve.LENGTH, "max_tokens": 1})[0] == 400
            before = server.pids()
            os.kill(before[1], signal.SIGKILL)
            server.wait(lambda: len(pids := server.pids()) == RANKS and before[1] not in pids)
            server.more(20)
            server.call("/scale", {"ranks": 3})
            server.wait(lambda: len(server.pids()) == 3)
            server.more(20)
        check(server, alone, most_lost=serve.BATCH)
        ports = [int(rank["targets"][0].split(":")[1]) for rank in server.ranks()]
        assert sum(server.metric("epmoe_moved_experts_total", port) for port in ports)
        pids = server.pids()
        os.kill(server.pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while any(lives(pid) for pid in pids):  # nobody outlives the front
            assert time.monotonic() < deadline


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed(tmp_path, alone):
    with running(tmp_path, "tests/dying_server.py", "hangs") as server:
        before = server.pids()
        with server.load(seed=0):
            server.wait(lambda: len(pids := server.pids()) == RANKS and before[1] not in pids)
            server.more(30)
        check(server, alone, most_lost=serve.BATCH, gap_s=2 * serve.DEADLINE_S + serve.LATE_S)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(int(os.environ.get("EPMOE_SERVE_RUNS", "1"))))
@pytest.mark.parametrize("state", [s if s in IN_CI else long(s) for s in STATES if s != "hangs"])
def test_a_death_in_every_state(tmp_path, alone, state, run):
    _, new, old = STATES[state]
    deaths = len(victims(state)) + (new is not None) + (old is not None)
    with running(tmp_path, "tests/dying_server.py", state) as server:
        before = server.pids()
        kept = set(before) - {before[rank] for rank in victims(state)} - ({before[0]} if old else set())
        with server.load(seed=run):
            server.wait(lambda: len(pids := server.pids()) == RANKS and set(pids) & set(before) == kept)
            server.more(30)
        check(server, alone, most_lost=deaths * serve.BATCH)
