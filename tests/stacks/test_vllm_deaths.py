"""Deaths and signals under `vllm serve` with experts that move, over two ranks on CPUs
(docs/serving.md).

`make stacks` runs it, and `make stacks-ci` does not: each case takes a server of its own.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_vllm_engine import HERE, TIMEOUT_S, run
from vllm_server import ANSWER_S, Load, Server, serving

LIVE = {"slots_per_rank": 8, "every": 20, "staging_mb": 1}
EXPERT_BYTES = 3 * 4 * 128 * 4096  # of the model "wide"
END_S = 60


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    run(str(HERE / "vllm_models.py"), str(folder), "wide")
    return folder / "wide"


@pytest.fixture(autouse=True)
def _no_shared_memory_is_left() -> Iterator[None]:
    """But for semaphores of 32 bytes, which any process of Python makes here."""
    before = shared_memory()
    yield
    assert shared_memory() <= before


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def wait_for(condition: Callable[[], bool], what: str, server: Server) -> None:
    deadline = time.monotonic() + TIMEOUT_S / 2
    while not condition():
        assert server.process.poll() is None and time.monotonic() < deadline, (
            f"{what}: {server.end_of_log()}"
        )
        time.sleep(0.002)


def is_moving(server: Server) -> bool:
    """Whether an expert has come to a rank in part."""
    return server.moved_bytes() % EXPERT_BYTES != 0


def check_answers(load: Load, *refusals: int) -> None:
    """Greedy tokens of a prompt are the same throughout; what was not answered by tokens has one of
    these statuses.
    """
    tokens: dict[tuple[int, ...], list[int]] = {}
    for prompt, status, answer in load.answers:
        if status == 200:
            assert answer == tokens.setdefault(prompt, answer)
        else:
            assert status in refusals, answer
    assert len(tokens) > 10


def check_it_ends(server: Server, since: float, of: str = "") -> None:
    """No process of the server is left, of those whose name contains `of`."""
    while left := [process for process in server.processes() if of in process]:
        assert time.monotonic() - since < END_S, f"{left}: {server.end_of_log()}"
        time.sleep(0.05)
    print(
        f"the last process ended after {time.monotonic() - since:.1f} s, exit status "
        f"{server.process.poll()}"
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moving", [True, False], ids=["moving", "still"])
def test_a_rank_dies(wide: Path, moving: bool, rank: int) -> None:
    """Rank 0 plans. All requests are answered, and the server ends."""
    with serving(wide, LIVE if moving else LIVE | {"every": 10**6}) as server:
        load = Load(server)
        wait_for(lambda: len(load.answers) > 20, "answers", server)
        if moving:
            wait_for(lambda: is_moving(server), "moves", server)
        since = time.monotonic()
        os.kill(server.cores()[rank], signal.SIGKILL)
        load.stop(END_S)
        print(
            f"all requests were answered after {time.monotonic() - since:.1f} s:",
            {a[1] for a in load.answers},
        )
        check_answers(load, 0, 500)
        check_it_ends(server, since)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_the_server(wide: Path, number: int) -> None:
    """During a move. The engine cores end, without an error of epmoe. The end of the API server is
    vLLM's own.
    """
    with serving(wide, LIVE) as server:
        load = Load(server)
        wait_for(lambda: len(load.answers) > 20 and is_moving(server), "moves", server)
        since = time.monotonic()
        os.kill(server.process.pid, number)
        check_it_ends(server, since, "EngineCore")
        load.stop(2 * ANSWER_S)
        check_answers(load, 0, 500, 503)
        print("".join(line for line in server.log if "EngineCore" in line and "Error" in line))
        assert not any(re.search(r"epmoe\S*Error", line) for line in server.log), (
            server.end_of_log()
        )
