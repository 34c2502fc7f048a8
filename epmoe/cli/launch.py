"""Commands that run on several ranks: they start their ranks themselves, or are one of those that
torchrun started.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist
import typer

from epmoe.cli.console import RUN_ID, SEE_TRACEBACK, STDERR, UserError, console, fail, launched_rank
from epmoe.config.config import ConfigError, EPConfig
from epmoe.config.config_file import ready_configs

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


CONFIG = typer.Argument(
    metavar="CONFIG",
    help="Configuration file (YAML, TOML or JSON), or the name of a ready one, as in cpu_demo.",
    autocompletion=lambda: [*ready_configs()],
)
NPROC = typer.Option(min=1, help="Ranks, in place of `topology.ep_size`.", show_default=False)
_BACKENDS = "cpu:gloo,cuda:nccl"
# The variable with the file in which ranks meet that `epmoe` started itself.
_STORE = "EPMOE_STORE"
# Signals that torch's launcher handles.
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
)
# Ranks that fail so many seconds behind the first one may have failed because of it.
_MOMENTS_S = 3
# Of a crash, in a message.
_MOST_FRAMES = 3
# How a rank begins. Ctrl-C ends it without a traceback, also while it imports torch, and the kernel
# ends it (PR_SET_PDEATHSIG) if the process that started it is killed. What rank 0 and its libraries
# print to stderr goes to a file, as on the other ranks, but rank 0 keeps the stderr of the command.
# A crash of native code leaves the lines of Python there.
_BEGIN = f"""
import ctypes, faulthandler, os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.environ["RANK"] == "0":
    os.environ["{STDERR}"] = str(os.dup(2))
    folder = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    os.dup2(os.open(os.path.join(folder, "stderr.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
faulthandler.enable()
"""
_RUN = """
from epmoe.__main__ import main
main()
"""


def load(config: Path, nproc: int | None = None) -> EPConfig:
    """Load the configuration of this name or path, for `nproc` ranks if that is given. Raises
    ConfigError.

    With `nproc`, the path may be the folder of a Hugging Face checkpoint.
    """
    # A ready configuration goes before a folder of its name.
    if nproc is not None and config.is_dir() and str(config) not in ready_configs():
        return EPConfig.from_hf(config, ep_size=nproc)
    parsed = EPConfig.load(config)
    if nproc is None:
        return parsed
    sections = parsed.model_dump()
    sections["topology"]["ep_size"] = nproc
    try:
        return EPConfig(**sections)
    except ConfigError as error:
        raise ConfigError(f"{config} with `--nproc` {nproc}: {error}") from None


def _other_number(config: EPConfig, started: int, here: int) -> str:
    """Text that says what to do if a launcher has started another number of processes."""
    where = "--standalone"
    if config.topology.num_nodes > 1:
        nodes = config.topology.num_nodes
        where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    typed = shlex.join(sys.argv[1:])
    # torchrun has options that begin like this one.
    own = "-- " if "--nproc" in shlex.join(sys.argv) else ""
    return (
        f"`topology.ep_size` is {config.topology.ep_size}, but torchrun started {started} "
        f"processes:\n  torchrun {where} --nproc-per-node {here} -m {own}epmoe {typed}"
    )


def check_ranks(config: EPConfig) -> None:
    """Raise UserError if `config` cannot run here: its ranks, its GPUs, torch's backends, a
    launcher's variables.
    """
    size = config.topology.ep_size
    nodes = config.topology.num_nodes
    on_gpus = config.exchange.transport == "nvlink"
    launched = "RANK" in os.environ
    here = size // nodes if launched else size
    # The launcher has started as many processes as the configuration has ranks.
    if launched:
        started = _started_ranks()
        if started != size:
            raise UserError(_other_number(config, started, here))
    # A GPU for each of those on this machine.
    if on_gpus:
        found = torch.cuda.device_count()
        if found < here:
            raise UserError(
                f"`exchange.transport` nvlink wants a GPU for each of {here} ranks, and torch sees "
                f"{found}; EPMOE_EXCHANGE__TRANSPORT=shared_memory in the environment runs this "
                "configuration on the CPU"
            )
    # The backends that ranks talk by.
    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if not has_gloo or on_gpus and not has_nccl:
        needed = "gloo and NCCL" if on_gpus else "gloo"
        raise UserError(
            f"this build of torch has no torch.distributed with {needed}: install torch from "
            "pytorch.org"
        )


def _started_ranks() -> int:
    """The WORLD_SIZE that a launcher has set. It also checks the launcher's other variables."""
    # All are there, and are numbers.
    needed = ["WORLD_SIZE"]
    if _STORE not in os.environ:
        needed += ["MASTER_PORT", "MASTER_ADDR"]
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"RANK is set in the environment, but {missing[0]} is not: unset RANK, and this "
            "command starts its ranks itself, or start it under torchrun"
        )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise UserError(
                f"environment variable {name} must be a number, got {value!r}; launchers set it, "
                "not users"
            )
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    if rank >= size:
        raise UserError(f"environment variable RANK must be below WORLD_SIZE, {size}, got {rank}")
    return size


@contextmanager
def all_ranks(config: EPConfig) -> Iterator[int]:
    """Initialise the default process group over gloo, with `transport: nvlink` also over NCCL;
    yields this rank.
    """
    rank = launched_rank()
    on_gpus = config.exchange.transport == "nvlink"
    assert rank is not None, "`check_ranks` comes first"
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    console.quiet = rank != 0
    _load_native_library()
    join(_BACKENDS if on_gpus else "gloo")
    try:
        yield rank
    finally:
        # Graphs and buffers of other libraries that are left in cycles go before the communicators
        # that they use.
        gc.collect()
        dist.destroy_process_group()


def join(backends: str) -> None:
    """Initialise the default process group, of ranks that `epmoe` or another launcher started."""
    where = os.environ.get(_STORE)
    try:
        # torchrun's store at a port, or the file of ranks that `epmoe` started.
        if where is None:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            dist.init_process_group(backends)
        else:
            dist.init_process_group(
                backends,
                init_method=f"file://{where}",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {os.environ['RANK']} cannot join the others at {where}: "
            f"{str(error).splitlines()[0]}"
        ) from None


def start_ranks(config: EPConfig, arguments: Sequence[str]) -> int:
    """Start one process for each rank, wait for them, and print at most one message.

    `arguments` are those of `epmoe`, for each rank. Returns the exit code: 0, that of the rank
    which failed first, or 128 plus the number of the signal that ended this process. Neither
    processes nor files stay behind.
    """
    from torch.distributed.elastic.multiprocessing import SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _load_native_library()
    ranks = config.topology.ep_size
    command = ["-P", "-c", _BEGIN + _RUN, *arguments]
    # Rank 0 prints to the terminal; what else ranks print goes to files, which are read if a rank
    # fails.
    quiet = dict.fromkeys(range(1, ranks), Std.ALL)
    run_id = RUN_ID + uuid4().hex
    try:
        with tempfile.TemporaryDirectory(prefix="epmoe-") as folder:
            meeting = {_STORE: str(Path(folder, "store"))}
            try:
                launch(ranks, sys.executable, command, folder, quiet, meeting, run_id=run_id)
            except ChildFailedError as error:
                console.show_cursor()
                return _explain(error.failures, Path(folder))
    except SignalException as ended:
        console.show_cursor()
        return 128 + ended.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # torch's launcher has got no port, or no process.
        why = " ".join(str(error).split())[:400]
        fail(f"the ranks cannot be started: {type(error).__name__}: {why}", code=1)
        return 1
    return 0


def launch(
    ranks: int,
    program: str | Callable[..., object],
    arguments: Sequence[object],
    folder: str,
    redirects: Std | dict[int, Std],
    meeting: Mapping[str, str],
    *,
    run_id: str = "epmoe",
    start_method: str = "spawn",
    look_s: float = 0.1,
) -> None:
    """Run `program` with `arguments` on all ranks by torch's launcher, with their logs in `folder`.

    Ranks get the variables of torchrun, and those of `meeting` in place of MASTER_ADDR and
    MASTER_PORT: a store at a port would obey every user of this machine, and that of torch's
    `elastic_launch` listens on all interfaces. They also get this process's module search path,
    `folder` for temporary files, and one thread each. gloo connects them on the loopback interface,
    where no other machine reaches them. What the launcher changes in this process, handlers of
    signals among it, is undone. `run_id` and `start_method` are those of torch's launcher, which
    looks at the ranks every `look_s` seconds. Raises ChildFailedError if a rank fails,
    SignalException if a signal ends this process.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    variables = _variables_by_rank(ranks, run_id, meeting)
    with _restored():
        # Ranks find the same modules, and leave their temporary files in the folder.
        temporary = Path(folder, "tmp")
        temporary.mkdir()
        search_path = [entry or os.getcwd() for entry in sys.path]
        os.environ["PYTHONPATH"] = os.pathsep.join(search_path)
        os.environ["TMPDIR"] = str(temporary)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        # torch's launcher logs every failure and every signal.
        logging.disable(logging.CRITICAL)
        # Start them and wait. However it ends, none of them stays.
        logs = DefaultLogsSpecs(log_dir=folder, redirects=redirects)
        of_ranks = dict.fromkeys(variables, tuple(arguments))
        context = start_processes(
            "epmoe", program, of_ranks, variables, logs, start_method=start_method
        )
        try:
            result = context.wait(period=look_s)
        finally:
            context.close(signal.SIGTERM)
        if result is not None and result.is_failed():
            raise ChildFailedError("epmoe", result.failures)


def _variables_by_rank(
    ranks: int, run_id: str, meeting: Mapping[str, str]
) -> dict[int, dict[str, str]]:
    """Make the variables of torchrun for each rank, and those by which ranks meet."""
    variables = {}
    for rank in range(ranks):
        variables[rank] = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            **meeting,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
    return variables


@contextmanager
def _restored() -> Iterator[None]:
    """Undo within this context what torch's launcher changes in this process: environment, logging,
    handlers of signals.
    """
    environment = os.environ.copy()
    disabled = logging.root.manager.disable
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(environment)
        # In another thread than the main one this raises, and torch has set none there.
        with contextlib.suppress(ValueError):
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _explain(failures: Mapping[int, ProcessFailure], folder: Path) -> int:
    """Print why the run failed, from the rank that failed first. Returns the exit code."""
    rank = _cause(failures)
    failure = failures[rank]
    # The rank has said it. Without a message, rank 0 has printed that a check failed.
    if _left_message(failure):
        message = failure.error_file_data["message"]
        if message:
            fail(message, code=1)
        return failure.error_file_data["code"]
    # A signal has ended it, or its last line says why.
    if failure.exitcode < 0:
        message = f"rank {rank} was ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            message += ", as happens when memory runs out"
        message += _where_it_was(folder, rank)
    else:
        message = f"rank {rank} ended with exit code {failure.exitcode}"
        last = _last_line(folder, rank)
        if last:
            message += f": {last}"
        message += SEE_TRACEBACK
    fail(message, code=1)
    return 1


def _printed(folder: Path, rank: int) -> str:
    """What a rank has printed to stderr."""
    printed = ""
    for path in folder.glob(f"*/attempt_0/{rank}/stderr.log"):
        printed += path.read_text(errors="replace")
    return printed


def _last_line(folder: Path, rank: int) -> str:
    return _printed(folder, rank).strip().rpartition("\n")[2]


def _where_it_was(folder: Path, rank: int) -> str:
    """The innermost lines of Python of a rank that has crashed, as `faulthandler` has left them;
    "" where there are none, as at the end of an interpreter.
    """
    _, crashed, left = _printed(folder, rank).rpartition("Fatal Python error: ")
    _, _, of_thread = left.partition("(most recent call first):\n")
    lines = []
    for line in of_thread.splitlines():
        if not line.startswith("  File "):
            break
        lines.append(line.strip())
    if not crashed or not lines:
        return ""
    return f", in {' < '.join(lines[:_MOST_FRAMES])}"


class _Kind(IntEnum):
    """Of a rank's failure: lower ones explain higher ones."""

    DEATH = 0
    """A signal has ended it."""
    REFUSAL = 1
    """It has refused what a user has got wrong."""
    FAILURE = 2
    CONSEQUENCE = 3
    """It says that another rank, which has failed too, was missing."""


def _cause(failures: Mapping[int, ProcessFailure]) -> int:
    """Find the rank whose failure explains the others.

    It is among the first. A rank that dies or refuses its input makes others fail within moments;
    and once one has failed, torch's launcher ends the others: with SIGTERM, and those that remain
    with SIGKILL after 30 s.
    """
    # When each rank failed, and which only the launcher has ended.
    times = {}
    ended_by_launcher = set()
    for rank, failure in failures.items():
        times[rank] = failure.error_file_data.get("timestamp", failure.timestamp)
        if failure.exitcode == -signal.SIGTERM and not _left_message(failure):
            ended_by_launcher.add(rank)
    own = failures.keys() - ended_by_launcher or failures.keys()
    first = min(times[rank] for rank in own)

    def kind(rank: int) -> _Kind:
        failure = failures[rank]
        if not _left_message(failure):
            return _Kind.DEATH if failure.exitcode < 0 else _Kind.FAILURE
        if failure.error_file_data["code"] == 2:
            return _Kind.REFUSAL
        # A rank whose error names another failed rank has failed because of that one.
        named = set(failure.error_file_data["because_of"]) - {rank}
        return _Kind.FAILURE if named.isdisjoint(own) else _Kind.CONSEQUENCE

    # Of failures within moments, the one that explains most; of two of a kind the first.
    within_moments = [rank for rank in own if times[rank] <= first + _MOMENTS_S]
    return min(within_moments, key=lambda rank: (kind(rank), times[rank]))


def _left_message(failure: ProcessFailure) -> bool:
    """Whether the rank left a message before it ended, which may be empty."""
    return "code" in failure.error_file_data


def _load_native_library() -> None:
    """Build the native library here if need be, since that minute must not count as waiting for a
    rank.
    """
    from epmoe.native import ops
    from epmoe.native.build import BuildError

    with console.status(
        "loading the native library; the first time it is built, which takes minutes"
    ):
        try:
            _ = ops.route
        except BuildError:
            raise
        except (OSError, RuntimeError) as error:
            # It does not load, or there is no home folder for the cache.
            raise UserError(
                f"the native library cannot be built or loaded: {' '.join(str(error).split())}; "
                "EPMOE_CACHE_DIR names a folder to build it in, EPMOE_LIBRARY a library that is "
                "built"
            ) from None
