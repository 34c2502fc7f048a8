"""Runs programs in child processes.

An interpreter takes seconds to import torch. Most children are therefore forked from a server that
has imported it, and what else takes long. `run` starts a command as a shell does.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.checkpoint.state_dict", "pytest", "yaml", "epmoe"]
)


def load_example(name: str) -> dict[str, Any]:
    """The names of a file in examples/, which may import others there."""
    folder = ROOT / "examples"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return runpy.run_path(str(folder / f"{name}.py"))


def start_server() -> None:
    """Starts the server before a test that watches this process's children and files."""
    forkserver.ensure_running()


def run_python(*program: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python PROGRAM` in the root of the repository: `-c` and code, `-m` and a module, or a
    script.
    """
    words = [*map(str, program)]
    # A child that is forked writes into files, as its streams are those of the server.
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        child = context.Process(target=_execute_alone, args=(words, os.environ | variables, files))
        child.start()
        child.join(TIMEOUT_S)
        # Nothing outlives the test.
        if child.exitcode is None:
            child.kill()
            raise subprocess.TimeoutExpired(words, TIMEOUT_S)
        return subprocess.CompletedProcess(
            words, child.exitcode, *(file.read_text() for file in files)
        )


def _hosted() -> dict[str, str]:
    """The variables by which ranks meet at a store of this process, as at that of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()
    global _store  # as long as ranks use it
    _store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def torchrun(ranks: int, *program: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `torchrun --nproc-per-node RANKS PROGRAM`: its own agent, here, forks the ranks."""
    from epmoe.cli.launch import launch

    # Not within `launch`, whose folder for temporary files the server would keep.
    start_server()
    words = [*map(str, program)]
    code = 0
    failures = ""
    arguments = [words, os.environ | {"COLUMNS": "120"} | variables]
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(
                ranks,
                _execute,
                arguments,
                folder,
                Std.ALL,
                _hosted(),
                start_method="forkserver",
                look_s=0.05,
            )
        except ChildFailedError as error:
            code = 1
            failures = str(error)
        stdout, stderr = (
            "".join(
                path.read_text()
                for path in sorted(Path(folder).glob(f"*/attempt_0/*/{stream}.log"))
            )
            for stream in ("stdout", "stderr")
        )
    return subprocess.CompletedProcess(words, code, stdout, stderr + failures)


def run_fresh(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -c CODE` in an interpreter that has imported nothing, as that of a user."""
    return run([sys.executable, "-c", code], **variables)


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = (
        os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"} | variables
    )
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def run_two_ranks(script: str, store: Path, *arguments: object) -> None:
    """Runs `python -c SCRIPT RANK STORE ARGUMENTS` for two ranks. Both must end well, as
    interpreters of users do.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        # Both start before either is waited for.
        for rank in "01":
            command = [sys.executable, "-c", script, rank, str(store), *map(str, arguments)]
            child = subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            ranks.append(child)
        for process in ranks:
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has forked


def _execute_alone(program: list[str], environment: dict[str, str], files: list[Path]) -> None:
    os.environ.clear()
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    _execute(program, environment)


def _execute(program: list[str], environment: dict[str, str]) -> None:
    """What a child does."""
    os.environ |= environment
    # What the server has imported may have asked for the folder of its own TMPDIR.
    tempfile.tempdir = None
    os.chdir(ROOT)
    torch.set_num_threads(1)
    first, *rest = program
    try:
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            # Where Python looks first for what a script imports.
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        if ended.code:  # otherwise it returns: torchrun's agent waits for that
            raise
