"""`epmoe run` starts its ranks itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import listening
from launched import ROOT
from waits import SOON_S, until

from epmoe.cli import launch
from epmoe.config.config import EPConfig

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
MODEL = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "dtype": "float32"}
NUMBERS = ("OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWO_RANKS = EPConfig(model=MODEL, topology={"ep_size": 2})


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, in an environment without a launcher."""
    for variable in LAUNCHER:
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(launch.console, "quiet", False)
    return folder


def children() -> set[str]:
    """Process ids of this process's children. Other test files may have left some that serve them
    all.
    """
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def state() -> tuple:
    """What the launcher changes in this process meanwhile."""
    return dict(os.environ), logging.root.manager.disable, *map(signal.getsignal, SIGNALS)


def epmoe(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Types `epmoe COMMAND` in `folder`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | variables
    arguments = [sys.executable, "-m", "epmoe", *command.split()]
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def test_run_starts_its_ranks_itself(alone, tmp_path):
    """By name and outside the tree, with another number of ranks than the file has."""
    done = epmoe("run cpu_demo --nproc 2 --steps 1 --tokens 8 --report report.html", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("✓ error against the dense fp64 reference") == 1
    assert "travelled: " in done.stdout and "rows between ranks" in done.stdout
    assert "</html>" in (tmp_path / "report.html").read_text()
    assert list(alone.iterdir()) == []


@pytest.mark.slow
def test_a_failed_exchange_is_one_message_and_exit_code_1(alone, tmp_path):
    done = epmoe("run cpu_demo --nproc 2 --steps 1", tmp_path, EPMOE_CAPACITY__MAX_EXPERT_ROWS="8")
    assert done.returncode == 1, done.stdout + done.stderr
    (message,) = done.stderr.splitlines()
    assert message.startswith("epmoe: rank ") and "EPOverflowError: " in message
    assert list(alone.iterdir()) == []


SAY = """
import json, os, sys, time
rank = int(os.environ["RANK"])
def say(message, code, because_of=()):
    said = {
        "message": message, "code": code, "because_of": because_of, "timestamp": time.time()
    }
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(said))
    open(sys.argv[1] + str(rank), "w")
    sys.exit(code)
def after(other):  # it has said something
    while not os.path.exists(sys.argv[1] + str(other)): time.sleep(0.01)
"""
RANKS = {  # what the ranks do: the exit code of the command, what it prints
    "succeeds": ("", 0, ""),
    "is killed": (
        "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(300)",
        1,
        "epmoe: rank 1 was ended by SIGKILL, as happens when memory runs out\n",
    ),
    "crashes": (
        "os.abort() if rank == 0 else time.sleep(300)",
        1,
        'epmoe: rank 0 was ended by SIGABRT, in File "<string>", line ',
    ),
    "dies": (
        (
            "if rank == 1: print('some noise', 'last words', sep='\\n', file=sys.stderr); "
            "os._exit(7)\ntime.sleep(300)"
        ),
        1,
        (
            "epmoe: rank 1 ended with exit code 7: last words; the same command under torchrun "
            "shows "
            "the traceback\n"
        ),
    ),
    "has an exception": (
        "if rank == 1: 1 / 0\ntime.sleep(300)",
        1,
        "epmoe: rank 1 ended with exit code 1: ZeroDivisionError: division by zero; the same "
        "command under torchrun "
        "shows the traceback\n",
    ),
    "refuses its input, as all do": ("say('wrong', 2)", 2, "epmoe: wrong\n"),
    "has the cause": (
        "rank and after(0); say(f'rank {rank}: EPTimeoutError', 1 + (rank == 0))",
        2,
        "epmoe: rank 0: ",
    ),
    "is second": (
        "rank and (after(0), say('consequence', 1)); say('cause', 2)",
        2,
        "epmoe: cause\n",
    ),
    "is named by the first": (
        "rank and after(0); say('cause' if rank else 'effect', 1, [] if rank else [1])",
        1,
        "epmoe: cause\n",
    ),
    "dies, named by the first": (
        "rank or say('effect', 1, [1])\nafter(0); os._exit(7)",
        1,
        "epmoe: rank 1 ended with exit code 7",
    ),
    "is named by the other, which it names": (
        "rank and after(0); say(f'rank {rank}', 1, [1 - rank])",
        1,
        "epmoe: rank 0\n",
    ),
    "is named, and only ended with the others": (
        "rank or say('late', 1, [1])\ntime.sleep(300)",
        1,
        "epmoe: late\n",
    ),
    "fails a check": ("rank or say('', 1)", 1, ""),
    "is too slow to end": (
        (
            "rank or after(1)\ntry: say('cause' if rank else 'effect', 1 + rank)\nfinally: rank "
            "and "
            "time.sleep(300)"
        ),
        2,
        "epmoe: cause\n",
    ),
}


@pytest.fixture
def ranks(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Starts two ranks of a program with these arguments: the exit code, and what is printed to
    stderr.
    """

    def start(program: str, *arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(launch, "_RUN", SAY + program)
        running = children()
        before = state()
        code = launch.start_ranks(TWO_RANKS, [str(argument) for argument in arguments])
        assert list(alone.iterdir()) == [] and children() <= running, "nothing is left behind"
        assert state() == before
        return code, capfd.readouterr().err

    return start


@pytest.mark.slow
@pytest.mark.parametrize("what", RANKS)
def test_a_rank(what, ranks, tmp_path):
    program, wanted, printed = RANKS[what]
    started = time.monotonic()
    code, error = ranks(program, tmp_path / "said")
    assert code == wanted and time.monotonic() - started < SOON_S
    assert error.startswith(printed) and len(error.splitlines()) == bool(printed), error


def test_ranks_that_cannot_be_started_are_one_message(ranks, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, error = ranks("")
    assert code == 1 and error.startswith("epmoe: the ranks cannot be started: FileNotFoundError: ")


def test_ranks_have_an_environment_of_their_own(ranks, alone, tmp_path):
    """The module search path of this process, one thread, a folder for temporary files, and the
    arguments.
    """
    # A rank writes what it finds into a file.
    tell = (
        "import tempfile; tempfile.mkstemp(); found = [sys.argv[1:], sys.path, "
        "tempfile.gettempdir(), "
    )
    tell += (
        f"*map(os.environ.get, {NUMBERS})]; open(sys.argv[1] + str(rank), 'w').write(str(found))"
    )
    assert ranks(tell, tmp_path / "rank", "two words") == (0, "")
    for rank in range(2):
        arguments, path, temporary, *numbers = eval((tmp_path / f"rank{rank}").read_text())
        assert arguments == [str(tmp_path / "rank"), "two words"]
        # It looks for modules where this process does, in the same order.
        assert [entry for entry in path if entry in sys.path] == [
            entry for entry in dict.fromkeys(sys.path) if entry
        ]
        assert Path(temporary).is_relative_to(alone) and numbers == [
            "1",
            "2",
            "2",
            str(rank),
            str(rank),
        ]


WAIT = """
open(sys.argv[1] + str(rank), "w").write(str(os.getpid()))
time.sleep(300)
"""


def wait_for(files: list[Path]) -> None:
    until(lambda: all(file.exists() and file.read_text() for file in files), 2 * SOON_S)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_signal_ends_all_ranks_at_once(ranks, number, code, tmp_path):
    sent = []

    def send() -> None:
        wait_for([tmp_path / "ready0", tmp_path / "ready1"])
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    assert ranks(WAIT, tmp_path / "ready") == (code, "")
    assert time.monotonic() - sent[0] < SOON_S


def test_ranks_meet_where_no_other_machine_reaches_them(ranks, tmp_path):
    """gloo listens on the loopback interface alone, and the store is a file of this user."""
    meet = (
        "import torch.distributed as dist; from epmoe.cli.launch import join; join('gloo'); "
        "dist.barrier(); store = os.environ['EPMOE_STORE']; assert "
        "os.stat(os.path.dirname(store)).st_mode & 0o777 == 0o700; assert 'MASTER_PORT' not in "
        "os.environ; file = sys.argv[1] + "
    )
    meet += "str(rank); open(file, 'w').write('here')\nwhile os.path.exists(file): time.sleep(0.01)"
    files = [tmp_path / f"rank{rank}" for rank in range(2)]
    found = set[str]()

    def look() -> None:
        wait_for(files)
        try:
            found.update(listening([os.getpid(), *map(int, children())]))
        finally:
            for file in files:
                file.unlink()

    # While both ranks wait, the addresses on which they listen are looked at.
    threading.Thread(target=look, daemon=True).start()
    assert ranks(meet, tmp_path / "rank") == (0, "")
    assert found == {"127.0.0.1"}


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(alone, tmp_path):
    program = f"""
from epmoe.cli import launch
from epmoe.config.config import EPConfig
launch._RUN = {SAY + WAIT!r}
launch.start_ranks(EPConfig(**{TWO_RANKS.model_dump()!r}), [{str(tmp_path / "pid")!r}])
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    # The ranks run, and who started them is killed.
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    wait_for(files)
    starter.kill()
    starter.wait()
    # They end, too. A process that has ended may wait for init to collect it.
    for file in files:
        status = Path(f"/proc/{file.read_text()}/status")
        with contextlib.suppress(FileNotFoundError):
            until(lambda status=status: "State:\tZ" in status.read_text())
