"""`vllm serve` with experts that move, over two ranks on CPUs, for tests that end it
in its middle.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # without which vLLM for CPUs makes a process for each model
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
ARGUMENTS = (
    *(
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--seed",
        "0",
    ),
    *("--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
    *(
        "--data-parallel-size",
        "2",
        "--enable-expert-parallel",
        "--distributed-executor-backend",
        "uni",
    ),
    *("--api-server-count", "1"),
)
START_S = 500
ANSWER_S = 60
NEW_TOKENS = 24


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _named_vllm(folder: Path) -> Path:
    """A folder for PYTHONPATH in which the package is called vllm, whose version the command line
    asks for.
    """
    about = folder / "vllm.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
    )
    return folder


class Server:
    """A server of two ranks. `log` has its lines, and grows while it runs."""

    def __init__(self, model: Path, live: dict[str, Any] | None, *arguments: str) -> None:
        self.model = str(model)
        self.port = free_port()
        self.metrics_port = free_port()
        choice = {"layout": "layer", "metrics_port": self.metrics_port} | (
            {"live": live} if live else {}
        )
        # The command as a user types it.
        additional = json.dumps({"epmoe": choice})
        path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_named_vllm(model.parent))]
        serve = [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(model),
            *ARGUMENTS,
            *arguments,
        ]
        self.process = subprocess.Popen(
            [
                *serve,
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--additional-config",
                additional,
            ],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        # A thread keeps what it prints.
        self.log = list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.end_of_log()
            with suppress(OSError):
                if (
                    urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).status
                    == 200
                ):
                    return
            time.sleep(0.5)
        raise TimeoutError(self.end_of_log())

    def post(self, path: str, body: dict[str, Any], timeout_s: float = ANSWER_S) -> tuple[int, Any]:
        """Status and answer; status 0 where there is no connection, or it broke."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, repr(error)

    def ask(self, prompt: list[int]) -> tuple[int, Any]:
        """Greedy tokens of a prompt."""
        status, answer = self.post(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "detokenize": False,
            },
        )
        return (status, answer["choices"][0]["token_ids"]) if status == 200 else (status, answer)

    def cores(self) -> list[int]:
        """Process ids of the engine cores, by rank."""
        found = re.findall(r"EngineCore_DP(\d+) pid=(\d+)", "".join(list(self.log)))
        ids = {int(rank): int(pid) for rank, pid in found}
        return [ids[rank] for rank in sorted(ids)]

    def moved_bytes(self) -> int:
        """Bytes of experts that have moved to either rank."""
        total = 0
        for rank in range(2):
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.metrics_port + rank}/metrics", timeout=5
            ) as page:
                found = re.findall(
                    r"^epmoe_moved_bytes_total\{.*\} (\S+)$", page.read().decode(), re.MULTILINE
                )
                total += sum(int(float(value)) for value in found)
        return total

    def processes(self) -> list[str]:
        """What runs of the server, as `ps` prints it."""
        listed = subprocess.run(
            ["ps", "-eo", "sid,pid,stat,args"], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(maxsplit=3) for line in listed.splitlines()[1:]]
        return [
            " ".join(row)
            for row in rows
            if row[0] == str(self.process.pid) and not row[2].startswith("Z")
        ]

    def end_of_log(self) -> str:
        return "".join(self.log[-60:])


class Load:
    """Clients that ask until `stop`, prompts that drift. `answers` has a prompt, its status and its
    tokens for each.
    """

    CLIENTS = 6
    DRIFT_S = 6

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answers = list[tuple[tuple[int, ...], int, Any]]()
        self._stopped = threading.Event()
        self._begun = time.monotonic()
        self._clients = [
            threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(self.CLIENTS)
        ]
        for client in self._clients:
            client.start()

    def _ask(self, client: int) -> None:
        for i in itertools.count():
            if self._stopped.is_set():
                return
            first = 40 if int(time.monotonic() - self._begun) // self.DRIFT_S % 2 else 300
            prompt = [
                first + (7 * i + 3 * j + client) % 3 for j in range(20 + (5 * i + 3 * client) % 20)
            ]
            status, tokens = self.server.ask(prompt)
            self.answers.append((tuple(prompt), status, tokens))
            if status != 200:
                return

    def stop(self, timeout_s: float) -> None:
        """Wait for the answers under way: none may be missing after `timeout_s`."""
        self._stopped.set()
        deadline = time.monotonic() + timeout_s
        for client in self._clients:
            client.join(max(0, deadline - time.monotonic()))
            assert not client.is_alive(), "a request got no answer"


@contextmanager
def serving(model: Path, live: dict[str, Any] | None, *arguments: str) -> Iterator[Server]:
    """A server that answers. Afterwards nothing of it runs."""
    server = Server(model, live, *arguments)
    try:
        server.wait_until_ready()
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
