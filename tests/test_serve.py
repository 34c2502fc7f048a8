"""examples/serve.py: whatever clients send and whichever ranks die, all requests are answered, and
no token is wrong.

Under load, clients have one request each at a time, with prompts drawn by a seed. EPMOE_SERVE_RUNS
repeats each death so often.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from drawn_requests import drawn
from helpers import NO_CUDA, TINY_MODEL, continued, listening, long
from launched import ROOT
from waits import until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
sys.path.insert(0, str(ROOT / "examples"))

import serve_front  # noqa: E402
import serve_rank  # noqa: E402
from dying_server import POISON, STATES, victims  # noqa: E402

import epmoe  # noqa: E402

CLIENTS = 8
RANKS = 4
MOST_REQUESTS = 16
WAIT_S = 120.0
IN_CI = ("before", "in", "moving", "new-opens", "hangs")  # of the states of a death
RUNS = int(os.environ.get("EPMOE_SERVE_RUNS", "1"))
# No death costs a deadline, also on a machine with other load; the gap itself is printed.
GAP_S = serve_rank.DEADLINE_S
# from a death to its successor in the group: 0.4 s, and 2 s at most on idle cores; printed
JOIN_S = GAP_S
PROMPTS = ("abc", [], [2.5], [[1]], [10**9], [-1], [True], None, [1] * serve_rank.LENGTH)
OPTIONS = ({"stream": 1}, {"timeout_s": 0}, {"timeout_s": 61}, {"temperature": 1})
REFUSED = [  # bodies of /generate
    *({"prompt": prompt, "max_tokens": 2} for prompt in PROMPTS),
    *({"prompt": [1], "max_tokens": most} for most in (0, -1, 1.5, "x", True, None, 10**9)),
    *({"prompt": [1], "max_tokens": 2} | options for options in OPTIONS),
    *({"prompt": [1]}, {"max_tokens": 2}, [], "x", b"null", b"", b"{", b"\xff", b"[" * 10_000),
]


class Answer(NamedTuple):
    prompt: list[int]
    most: int
    status: int
    content: dict[str, Any]


class Server:
    def __init__(
        self, port: int, process: subprocess.Popen[bytes], log: Path, size: int = RANKS
    ) -> None:
        self.port = port
        self.process = process
        self.log = log
        self.size = size
        self.answers = list[Answer]()

    def begin(self, path: str, body: object = None, method: str | None = None) -> HTTPConnection:
        """A request whose answer nobody has read yet."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        content = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, content)
        return connection

    def call(self, path: str, body: object = None, method: str | None = None) -> tuple[int, str]:
        connection = self.begin(path, body, method)
        try:
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def generate(self, prompt: list[int], most: int) -> None:
        status, content = self.call("/generate", {"prompt": prompt, "max_tokens": most})
        self.answers.append(Answer(prompt, most, status, json.loads(content)))

    def answers_of(self, asked: list[tuple[list[int], int]]) -> list[tuple[int, dict[str, Any]]]:
        """Status and content of each, all asked at the same time."""
        bodies = [{"prompt": prompt, "max_tokens": most} for prompt, most in asked]
        responses = [
            connection.getresponse()
            for connection in [self.begin("/generate", body) for body in bodies]
        ]
        return [(response.status, json.loads(response.read())) for response in responses]

    def events(self, prompt: list[int], most: int) -> tuple[list[int], str, dict[str, Any]]:
        """The tokens of a stream, and the type and data of its last event."""
        status, text = self.call(
            "/generate", {"prompt": prompt, "max_tokens": most, "stream": True}
        )
        assert status == 200
        *events, last = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
        kind, content = (line.split(": ", 1)[1] for line in last)
        return (
            [json.loads(line.removeprefix("data: "))["token"] for (line,) in events],
            kind,
            json.loads(content),
        )

    def ranks(self) -> list[dict[str, Any]]:
        return json.loads(self.call("/ranks")[1])

    def pids(self) -> list[int]:
        return [int(rank["labels"]["pid"]) for rank in self.ranks()]

    def metric(self, name: str, port: int | None = None) -> float:
        """The sum over labels, of the front or of a rank."""
        text = Server(port or self.port, self.process, self.log).call("/metrics")[1]
        return sum(
            float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (.*)$", text, re.MULTILINE)
        )

    def wait(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < deadline, f"{self.ranks()}, {len(self.answers)} answers"
            time.sleep(0.02)

    def more(self, answers: int) -> None:
        """Wait for so many further answers."""
        goal = len(self.answers) + answers
        self.wait(lambda: len(self.answers) >= goal)

    def replace(self, rank: int, most_s: float = JOIN_S) -> None:
        """Kill a rank, and wait for its successor."""
        victim = self.pids()[rank]
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self.wait(lambda: len(pids := self.pids()) == self.size and victim not in pids)
        print(f"a new rank has joined {(joined_s := time.monotonic() - begin):.2f} s after a death")
        assert joined_s < most_s

    @contextmanager
    def load(self, seed: int) -> Iterator[None]:
        """Meanwhile clients ask. Every request is answered."""

        def ask(draw: random.Random) -> None:
            prompt = [draw.randrange(serve_rank.VOCABULARY) for _ in range(draw.randint(1, 12))]
            self.generate(prompt, draw.randint(1, 12))

        with self._clients(seed, ask):
            yield

    @contextmanager
    def storm(self, seed: int) -> Iterator[Counter[int | None]]:
        """Meanwhile clients send drawn requests. Yields how often which status came; None: a client
        did not wait.
        """
        found = Counter[int | None]()

        def ask(draw: random.Random) -> None:
            answer = drawn(draw, serve_rank.VOCABULARY, serve_rank.LENGTH).answer(self.port)
            found[answer and answer[0]] += 1

        with self._clients(seed, ask):
            yield found

    @contextmanager
    def _clients(self, seed: int, ask: Callable[[random.Random], None]) -> Iterator[None]:
        stop = threading.Event()

        def repeat(draw: random.Random) -> None:
            while not stop.is_set():
                ask(draw)

        with ThreadPoolExecutor(CLIENTS) as clients:
            asking = [
                clients.submit(repeat, random.Random(seed * CLIENTS + i)) for i in range(CLIENTS)
            ]
            try:
                yield
            finally:
                stop.set()
            # What a client has raised is raised here.
            for client in asking:
                client.result(WAIT_S)


@contextmanager
def running(
    tmp_path: Path,
    *program: object,
    ranks: int = RANKS,
    requests: int = MOST_REQUESTS,
    on_gpus: bool = False,
) -> Iterator[Server]:
    """A server that is ready."""
    # Start it, without GPUs unless the test has some,
    path = os.pathsep.join(
        map(str, (ROOT, ROOT / "examples", *filter(None, [os.environ.get("PYTHONPATH")])))
    )
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = tmp_path / "log"
    with log.open("w") as file:
        options = ["--ranks", str(ranks), "--port", "0", "--requests", str(requests)]
        command = [sys.executable, *map(str, program), *options]
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, cwd=ROOT, start_new_session=True
        )
    try:
        # and wait until it says its port and is ready.
        deadline = time.monotonic() + WAIT_S
        while not (found := re.search(r"running on http://127.0.0.1:(\d+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        server = Server(int(found[1]), process, log, ranks)
        server.wait(lambda: server.call("/ready")[0] == 200)
        yield server
    except AssertionError as error:
        error.add_note(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def alone() -> Iterator[serve_rank.Model]:
    """The model in one process."""
    with epmoe.ExpertParallel(serve_rank.configured(1)) as ep:
        yield serve_rank.Model(ep)


def check(server: Server, model: serve_rank.Model, most_lost: int, gap_s: float = GAP_S) -> None:
    """Answers are those of one process, but for requests of ranks that have died."""
    # Only requests of dead ranks are lost, and not many.
    right = [answer for answer in server.answers if answer.status == 200]
    lost = [answer for answer in server.answers if answer.status != 200]
    assert all(answer.status == 503 and "has died" in answer.content["error"] for answer in lost), (
        lost
    )
    assert len(lost) <= most_lost, f"{len(lost)} lost"
    # Tokens are right.
    expected = continued(model, [answer[:2] for answer in right], serve_rank.BATCH)
    wrong = [
        (answer, tokens)
        for answer, tokens in zip(right, expected, strict=True)
        if answer.content["tokens"] != tokens
    ]
    assert not wrong, wrong[0]
    # Nobody has waited for long.
    gap = server.metric("serve_longest_gap_seconds")
    print(f"{len(right)} right, {len(lost)} of dead ranks, longest gap {gap:.3f} s")
    assert gap < gap_s


def test_whatever_is_asked_and_a_death_under_load(tmp_path, alone):
    """No request harms another one or a rank; a rank dies and is replaced; then the group shrinks.
    Experts move.
    """
    with running(tmp_path, "examples/serve.py") as server:
        # Wrong requests, too many, and streams: no process ends.
        before = server.pids()
        refuse(server)
        limit(server)
        stream(server, alone)
        assert server.pids() == before
        assert listening([server.process.pid, *family(server.process.pid)]) == {"127.0.0.1"}

        # Under load a rank dies and is replaced, and the group shrinks.
        with server.load(seed=0):
            server.more(20)
            server.replace(1)
            server.more(20)
            assert server.call("/scale", {"ranks": 3})[0] == 202
            server.wait(lambda: len(server.pids()) == 3)
            server.more(20)
            # The new group counts from 0, and plans its first moves some steps behind its start.
            server.wait(lambda: moved_experts(server) > 0)

        # All tokens are right, and the log says what happened.
        check(server, alone, most_lost=serve_rank.BATCH)
        lines = server.log.read_text()
        died = f"process {before[1]}, rank 1, has died; "
        for line in (died, "rank 3, has joined", "rank 3, has left", "the group has 3 rank(s)"):
            assert line in lines

        # The front dies while a new rank waits for the others.
        processes = family(server.process.pid)
        assert server.call("/scale", {"ranks": 4})[0] == 202
        server.wait(lambda: family(server.process.pid) - processes)  # a new rank
        server.process.send_signal(signal.SIGSTOP)
        # It has come to wait in `join_group`, and nobody tells the others to take it in.
        time.sleep(1.5)
        processes = family(server.process.pid)
        server.process.kill()
        all_end(processes)  # nobody outlives the front


def moved_experts(server: Server) -> float:
    ports = [int(rank["targets"][0].split(":")[1]) for rank in server.ranks()]
    return sum(server.metric("epmoe_moved_experts_total", port) for port in ports)


def refuse(server: Server) -> None:
    """Requests that are wrong get an answer that says so, from the front."""
    # Bodies and sizes that are wrong,
    for body in REFUSED:
        status, content = server.call("/generate", body)
        error = json.loads(content)["error"]
        assert status == 400 and error and not error.startswith(":"), (body, error)
    for ranks in ("x", 0, -1, 1.5, True, None, 10**9):
        assert server.call("/scale", {"ranks": ranks})[0] == 400
    # a body that is too long,
    status, content = server.call("/generate", b" " * 100_000)
    assert status == 413 and json.loads(content)["error"] == "a body has up to 65536 bytes"
    # and paths that are not there.
    for status, method, path in ((404, "GET", "/x"), (404, "PUT", "/"), (405, "GET", "/scale")):
        assert server.call(path, method=method)[0] == status
    assert [server.call(path)[0] for path in ("/health", "/ready")] == [200, 200]


def limit(server: Server) -> None:
    """Requests beyond the most are refused, those whose time is up are answered, and clients may go
    at any time.
    """
    longest = {"prompt": [1], "max_tokens": serve_rank.LENGTH - 1}
    # One rank is stopped, so that requests stay open.
    os.kill(stopped := server.pids()[0], signal.SIGSTOP)  # meanwhile no request ends
    try:
        assert server.call("/generate", longest | {"timeout_s": 0.1})[0] == 408
        connections = [server.begin("/generate", longest) for _ in range(2 * MOST_REQUESTS)]
        server.wait(lambda: server.metric("serve_open_requests") == MOST_REQUESTS)
    finally:
        os.kill(stopped, signal.SIGCONT)
    # It goes on: what was accepted is answered.
    statuses = Counter(connection.getresponse().status for connection in connections)
    assert set(statuses) == {200, 429}, statuses
    # Clients that leave.
    for stream in (False, True):
        server.begin("/generate", longest | {"stream": stream}).close()
    server.wait(lambda: not server.metric("serve_open_requests"))


def stream(server: Server, model: serve_rank.Model) -> None:
    """An event for each token, then one with all; or an error, as in an answer that is
    no stream.
    """
    ((_, *tokens),) = continued(model, [([5], 9)], 1)
    assert server.events([5], 9) == (tokens, "end", {"tokens": [5, *tokens]})
    status, text = server.call(
        "/generate", {"prompt": [1], "max_tokens": 31, "stream": True, "timeout_s": 1e-3}
    )
    assert status == 200 and "event: error" in text and "in its time" in text


def test_other_threads_see_all_ranks_while_the_front_orders_them():
    front = SimpleNamespace(members=[], new=[])
    seen = []

    class Member:
        @property
        def rank(self) -> int:
            seen.append(len(front.members))
            return -len(seen)

    front.members = [Member(), Member()]
    serve_front.Front.take_in(front, 2)
    assert seen == [2, 2]


def test_a_model_that_raises_and_then_no_rank(tmp_path, alone):
    """A request at which the model raises fails alone. The server ends with its last rank, and
    answers everyone.
    """
    with running(tmp_path, "tests/dying_server.py", "raises", ranks=2) as server:
        before = server.pids()
        # Every third prompt is poisoned: it fails, and no other one.
        prompts = [[POISON if i % 3 == 1 else 1, i] for i in range(8)]
        asked = [(prompt, 5) for prompt in prompts]
        answers = server.answers_of(asked)
        for (status, content), tokens in zip(answers, continued(alone, asked, 4), strict=True):
            if tokens[0] == POISON:
                assert status == 500 and content["error"] == "ValueError: a poisoned prompt"
            else:
                assert status == 200 and content["tokens"] == tokens
        assert server.pids() == before
        # All ranks die with a request open.
        for process in before:
            # So that the next request is not answered before they die.
            os.kill(process, signal.SIGSTOP)
        waiting = server.begin("/generate", {"prompt": [1], "max_tokens": 31})
        server.wait(lambda: server.metric("serve_open_requests"))
        for process in before:
            os.kill(process, signal.SIGKILL)
        # It is answered, and the server ends.
        assert waiting.getresponse().status == 503
        assert server.process.wait(WAIT_S) == 1
        assert "no rank is left" in server.log.read_text()


def family(front: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {front}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {front}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(processes: set[int]) -> None:
    until(lambda: not any(map(lives, processes)), WAIT_S)


@pytest.mark.long
@pytest.mark.slow
def test_ten_thousand_drawn_requests(tmp_path):
    """Bodies, paths, methods, headers and clients that leave: no rank dies, and every answer is 2xx
    or 4xx.
    """
    with running(tmp_path, "examples/serve.py") as server:
        with server.storm(seed=0) as statuses:
            server.wait(lambda: statuses.total() >= 10_000)
        print(dict(statuses))
        assert all(status is None or status // 100 in (2, 4) for status in statuses), statuses
        assert server.call("/ready")[0] == 200
        lines = server.log.read_text()
        assert "has died" not in lines and "Traceback" not in lines


@pytest.mark.slow
@pytest.mark.parametrize("run", range(RUNS))
def test_drawn_requests_while_ranks_die(tmp_path, run):
    with running(tmp_path, "examples/serve.py") as server:
        draw = random.Random(run)
        with server.storm(run) as statuses:
            # Five ranks die, one after the other, while one at least is left.
            for _ in range(5):
                time.sleep(draw.uniform(0.1, 1.0))
                # One is left.
                server.wait(lambda: len(pids := server.pids()) > 1 and all(map(lives, pids)))
                os.kill(draw.choice(server.pids()), signal.SIGKILL)
            goal = statuses.total() + 500
            server.wait(lambda: statuses.total() >= goal)
        print(dict(statuses))
        # Every answer has a meaning, and the server serves on with all ranks.
        assert all(
            status is None or status // 100 in (2, 4) or status == 503 for status in statuses
        ), statuses
        assert server.call("/scale", {"ranks": RANKS})[0] == 202
        server.wait(lambda: len(server.pids()) == RANKS)
        assert server.call("/generate", {"prompt": [1], "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("servers", "requests"), [(1, 40), pytest.param(4, 250, marks=pytest.mark.slow)]
)
def test_sigterm_to_the_process_group(tmp_path, alone, servers, requests):
    """As service managers send it. Every request that was accepted gets its answer, and then all
    processes end.
    """
    longest = serve_rank.LENGTH - 1
    asked = [([i % serve_rank.VOCABULARY], longest) for i in range(requests)]
    expected = [(200, {"tokens": tokens}) for tokens in continued(alone, asked, serve_rank.BATCH)]
    for _ in range(servers):
        with running(tmp_path, "examples/serve.py", ranks=2, requests=requests) as server:
            processes = family(server.process.pid)
            # Ranks are stopped until all requests are there.
            stopped = server.pids()
            for pid in stopped:  # until all requests are there
                os.kill(pid, signal.SIGSTOP)
            connections = [
                server.begin("/generate", {"prompt": prompt, "max_tokens": most})
                for prompt, most in asked
            ]
            server.wait(lambda: server.metric("serve_open_requests") == requests)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            # All are answered, and then no process is left.
            os.killpg(server.process.pid, signal.SIGTERM)
            responses = [connection.getresponse() for connection in connections]
            found = [(response.status, json.loads(response.read())) for response in responses]
            assert found == expected
            assert server.process.wait(WAIT_S) == 0
            all_end(processes)
            assert "has died" not in server.log.read_text()


@pytest.mark.parametrize(("size", "is_killed"), [(2, False), (1, True)])
def test_a_rank_that_loads_for_long_is_not_killed(monkeypatch, size, is_killed):
    """Others have answered and wait for it. One that the group went on without is killed soon."""
    monkeypatch.setattr(serve_front, "ANSWER_S", 0.05)
    monkeypatch.setattr(serve_front, "LATE_S", 0.05)
    # A front with two ranks, of which one answers at once.
    slow = Silent()
    members = [Silent(), slow]
    buried = []
    front = SimpleNamespace(
        members=members,
        new=[],
        broken=False,
        hear=lambda member: member.pipe.recv(),
        bury=lambda member, why: buried.append(member),
        take_in=lambda size, wait_s: None,
        step=lambda: None,
    )
    front.ask = partial(serve_front.Front.ask, front)
    members[0].answer((0, size))
    # The other one answers later than the front waits.
    late = threading.Timer(0.3, slow.answer, [(1, size)])
    late.start()
    serve_front.Front.regroup(front, "recover")
    late.join()
    assert buried == [slow] * is_killed


class Silent:
    """A rank that answers an order once it is told to."""

    def __init__(self) -> None:
        self.pipe, self._theirs = multiprocessing.Pipe()
        self.rank = 0
        self.requests = {}

    def answer(self, said: object) -> None:
        self._theirs.send(said)


def test_the_length_of_a_checkpoint_is_the_limit(tmp_path):
    """A prompt and its answer have as many tokens at most as the model has positions."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", **TINY_MODEL | {"max_position_embeddings": 64}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert serve_rank.Served.checkpoint(str(tmp_path)).length == 64


@pytest.mark.slow
def test_a_checkpoint_of_transformers(tmp_path):
    """The tokens are those of transformers, also after a death. A request at which the model raises
    fails alone.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **TINY_MODEL)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")

    @torch.inference_mode()
    def step(batch: list[list[int]]) -> list[int]:
        return [int(model(torch.tensor([tokens])).logits[0, -1].argmax()) for tokens in batch]

    # Prompts, one of them poisoned, and what transformers says to them.
    draw = random.Random(0)
    asked = [([draw.randrange(POISON) for _ in range(draw.randint(1, 20))], 20) for _ in range(12)]
    expected = [(200, {"tokens": tokens}) for tokens in continued(step, asked, 1)]
    asked.insert(5, ([POISON], 20))
    expected.insert(5, (500, {"error": "ValueError: a poisoned prompt"}))
    # Before and after a death.
    with running(
        tmp_path, "tests/dying_server.py", "raises", "--model", tmp_path / "model"
    ) as server:
        for _ in range(2):
            assert server.answers_of(asked) == expected
            server.replace(1)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("state", [s if s in IN_CI else long(s) for s in STATES])
def test_a_death_in_every_state(tmp_path, alone, state, run):
    """A rank that hangs is killed, once the others have waited for a deadline."""
    _, new, old = STATES[state]
    gap_s = 2 * serve_rank.DEADLINE_S + serve_front.LATE_S if state == "hangs" else GAP_S
    deaths = len(victims(state)) + (new is not None) + (old is not None)
    with running(tmp_path, "tests/dying_server.py", state) as server:
        before = server.pids()
        # All others stay, and the dead are replaced.
        kept = (
            set(before)
            - {before[rank] for rank in victims(state)}
            - ({before[0]} if old else set())
        )
        with server.load(seed=run):
            server.wait(
                lambda: len(pids := server.pids()) == RANKS and set(pids) & set(before) == kept
            )
            server.more(30)
        check(server, alone, deaths * serve_rank.BATCH, gap_s)


@pytest.mark.gpu
@pytest.mark.slow
@NO_CUDA
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_killed_that_replay_graphs(tmp_path, alone, ranks):
    """New ranks join and capture theirs. The others capture nothing again, as `topology.max_ranks`
    has it.
    """
    with running(tmp_path, "tests/graphed_server.py", ranks=ranks, on_gpus=True) as server:
        with server.load(seed=0):
            # Five ranks die under load.
            server.more(40)
            for death in range(5):
                server.replace(death % ranks, WAIT_S)
                server.more(40)
        # Each process has captured once, and new ones also in their group of one.
        log = server.log.read_text()
        captured = Counter(re.findall(r"process (\d+) captured in generation", log))
        # Before it joins.
        alone_first = set(re.findall(r"process (\d+) captured in generation [1-9]", log))
        assert len(captured) == ranks + 5 and all(
            captured[pid] == 1 + (pid in alone_first) for pid in captured
        )
        assert len(server.answers) >= 200 + 5 * serve_rank.BATCH
        check(server, alone, most_lost=5 * serve_rank.BATCH, gap_s=WAIT_S)
