"""Runs a command on several ranks. The command starts one process for each rank, or it is one of
the processes that torchrun has started.
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
# The variable with the path of a file. Ranks that `epmoe` has started meet in this file, where
# torch.distributed keeps its store.
_STORE = "EPMOE_STORE"
# Signals whose handlers torch's launcher replaces.
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
)
# A rank that fails within so many seconds after the first one may have failed because of it.
_MOMENTS_S = 3
# How many frames of a crash a message shows.
_MOST_FRAMES = 3
# The code with which a rank begins. Ctrl-C ends the rank without a traceback, even while it imports
# torch. The kernel ends the rank (PR_SET_PDEATHSIG, which is 1) if the process that started it is
# killed. The stderr of rank 0 and its libraries goes to a file, as on the other ranks; rank 0 keeps
# a copy of the command's own stderr. If native code crashes, faulthandler writes the lines of
# Python into the file.
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
    """Load the configuration with this name or path. Raises ConfigError.

    `nproc` is the number of ranks, in place of the configuration's. With `nproc`, the path may also
    be the folder of a Hugging Face checkpoint.
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


def _wrong_number_of_processes(config: EPConfig, started: int, here: int) -> str:
    """Write the message for a launcher that has started `started` processes, which is not what the
    configuration says. The message has the right command, with `here` processes on each machine.
    """
    where = "--standalone"
    if config.topology.num_nodes > 1:
        nodes = config.topology.num_nodes
        where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    arguments = shlex.join(sys.argv[1:])
    # torchrun would take `--nproc` for an option of its own, unless `--` stands before the module.
    separator = "-- " if "--nproc" in shlex.join(sys.argv) else ""
    return (
        f"`topology.ep_size` is {config.topology.ep_size}, but torchrun started {started} "
        f"processes:\n  torchrun {where} --nproc-per-node {here} -m {separator}epmoe {arguments}"
    )


def check_ranks(config: EPConfig) -> None:
    """Raise UserError if `config` cannot run here, before any rank is started.

    The number of processes of a launcher must be the number of ranks, each rank of this machine
    needs a GPU of its own with `transport: nvlink`, and torch must have the backends.
    """
    size = config.topology.ep_size
    nodes = config.topology.num_nodes
    on_gpus = config.exchange.transport == "nvlink"
    launched = "RANK" in os.environ
    here = size // nodes if launched else size
    # A launcher must have started as many processes as the configuration has ranks.
    if launched:
        started = _started_ranks()
        if started != size:
            raise UserError(_wrong_number_of_processes(config, started, here))
    # There must be a GPU for each rank on this machine.
    if on_gpus:
        found = torch.cuda.device_count()
        if found < here:
            raise UserError(
                f"`exchange.transport` nvlink wants a GPU for each of {here} ranks, and torch sees "
                f"{found}; EPMOE_EXCHANGE__TRANSPORT=shared_memory in the environment runs this "
                "configuration on the CPU"
            )
    # torch must have the backends of the process group.
    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if not has_gloo or (on_gpus and not has_nccl):
        needed = "gloo and NCCL" if on_gpus else "gloo"
        raise UserError(
            f"this build of torch has no torch.distributed with {needed}: install torch from "
            "pytorch.org"
        )


def _started_ranks() -> int:
    """Read the number of processes that a launcher has started, WORLD_SIZE. Raises UserError if a
    variable of the launcher is missing or wrong.
    """
    # All variables must be there, and hold numbers.
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
    """Initialise the default process group within this context, and yield this process's rank.

    The group uses gloo, and with `transport: nvlink` also NCCL. Only rank 0 prints.
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
        # CUDA graphs and buffers of other libraries may be left in cycles of references. They must
        # be freed before the communicators that they use.
        gc.collect()
        dist.destroy_process_group()


def join(backends: str) -> None:
    """Initialise the default process group over `backends`. Raises UserError if the ranks do not
    find one another.
    """
    where = os.environ.get(_STORE)
    try:
        # Ranks of torchrun meet at its store, which has an address and a port. Ranks that `epmoe`
        # has started meet in a file.
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
    """Start one process for each rank, wait for all of them, and print at most one message.

    Each process runs `epmoe` with `arguments`. Returns the exit code of the command: 0, the exit
    code of the rank that explains a failure, or 128 plus the number of the signal that ended this
    process. Neither processes nor files stay behind.
    """
    from torch.distributed.elastic.multiprocessing import SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _load_native_library()
    ranks = config.topology.ep_size
    command = ["-P", "-c", _BEGIN + _RUN, *arguments]
    # Rank 0 prints to the terminal. Everything else that ranks print goes to files, from which
    # `_explain` reads if a rank fails.
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
        # torch's launcher could not get a port or start a process.
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
    """Run `program` with `arguments` on all ranks by torch's launcher, and wait for the ranks.

    `redirects` says which output of which rank goes into files in `folder`. Ranks get the
    environment variables of torchrun. Instead of MASTER_ADDR and MASTER_PORT they get the variables
    in `meeting`: a store at a port would obey every user of this machine, and the store of torch's
    `elastic_launch` even listens on all interfaces. Ranks also get the module search path of this
    process, a folder for temporary files in `folder`, and one thread each. gloo connects them over
    the loopback interface, which no other machine reaches.

    torch's launcher changes the environment, the logging and the signal handlers of this process;
    all this is undone at the end. `run_id` and `start_method` are arguments of torch's launcher,
    which checks the ranks every `look_s` seconds. Raises ChildFailedError if a rank fails, and
    SignalException if a signal ends this process.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    variables = _variables_by_rank(ranks, run_id, meeting)
    with _restored():
        # Let the ranks find the same modules, and leave their temporary files in the folder.
        temporary = Path(folder, "tmp")
        temporary.mkdir()
        search_path = [entry or os.getcwd() for entry in sys.path]
        os.environ["PYTHONPATH"] = os.pathsep.join(search_path)
        os.environ["TMPDIR"] = str(temporary)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if ranks > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        # torch's launcher logs every failure and every signal, which the command reports itself.
        logging.disable(logging.CRITICAL)
        # Start the ranks and wait for them. However the wait ends, no rank keeps running.
        logs = DefaultLogsSpecs(log_dir=folder, redirects=redirects)
        arguments_by_rank = dict.fromkeys(variables, tuple(arguments))
        context = start_processes(
            "epmoe", program, arguments_by_rank, variables, logs, start_method=start_method
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
    """Make the environment variables of each rank: those that torchrun would set, and those of
    `meeting`.
    """
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
    """Undo at the end of this context what torch's launcher changes in this process: environment,
    logging and signal handlers.
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
        # Only the main thread may set signal handlers. In other threads this raises ValueError, and
        # torch has not changed any handlers there.
        with contextlib.suppress(ValueError):
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _explain(failures: Mapping[int, ProcessFailure], folder: Path) -> int:
    """Print why the run failed, from the rank that failed first. Returns the exit code."""
    rank = _cause(failures)
    failure = failures[rank]
    # The rank itself has left a message. An empty one means that rank 0 has printed already that a
    # check failed.
    if _left_message(failure):
        message = failure.error_file_data["message"]
        if message:
            fail(message, code=1)
        return failure.error_file_data["code"]
    # Otherwise say which signal has ended the rank, or repeat the last line that it has printed.
    if failure.exitcode < 0:
        message = f"rank {rank} was ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            message += ", as happens when memory runs out"
        message += _crashed_at(folder, rank)
    else:
        message = f"rank {rank} ended with exit code {failure.exitcode}"
        last = _last_line(folder, rank)
        if last:
            message += f": {last}"
        message += SEE_TRACEBACK
    fail(message, code=1)
    return 1


def _printed(folder: Path, rank: int) -> str:
    """Read what a rank has printed to stderr, from its log in `folder`."""
    printed = ""
    for path in folder.glob(f"*/attempt_0/{rank}/stderr.log"):
        printed += path.read_text(errors="replace")
    return printed


def _last_line(folder: Path, rank: int) -> str:
    """The last line that a rank has printed to stderr."""
    return _printed(folder, rank).strip().rpartition("\n")[2]


def _crashed_at(folder: Path, rank: int) -> str:
    """Say which lines of Python a rank was running when it crashed, the innermost first.

    `faulthandler` has written them to stderr. Returns "" where there are none, as in a crash while
    the interpreter ends.
    """
    _, crashed, after_error = _printed(folder, rank).rpartition("Fatal Python error: ")
    # The first stack is that of the thread that crashed.
    _, _, stack = after_error.partition("(most recent call first):\n")
    lines = []
    for line in stack.splitlines():
        if not line.startswith("  File "):
            break
        lines.append(line.strip())
    if not crashed or not lines:
        return ""
    return f", in {' < '.join(lines[:_MOST_FRAMES])}"


class _Kind(IntEnum):
    """The kind of a rank's failure. A kind with a lower number explains those with higher ones."""

    DEATH = 0
    """A signal has ended the rank."""
    REFUSAL = 1
    """The rank has refused something that the user has got wrong."""
    FAILURE = 2
    """The rank has failed for another reason."""
    CONSEQUENCE = 3
    """The rank has missed another rank, which has failed, too."""


def _cause(failures: Mapping[int, ProcessFailure]) -> int:
    """Find the rank whose failure explains the failures of the others.

    A rank that dies or refuses its input makes other ranks fail within moments. Once a rank has
    failed, torch's launcher ends all others: first with SIGTERM, and after 30 s with SIGKILL. So
    the cause is among the ranks that failed first, but it need not be the very first.
    """
    # Find when each rank failed, and which ranks the launcher has ended.
    times = {}
    ended_by_launcher = set()
    for rank, failure in failures.items():
        times[rank] = failure.error_file_data.get("timestamp", failure.timestamp)
        if failure.exitcode == -signal.SIGTERM and not _left_message(failure):
            ended_by_launcher.add(rank)
    # If the launcher has ended all of them, the cause must be among these.
    failed_alone = (failures.keys() - ended_by_launcher) or failures.keys()
    first = min(times[rank] for rank in failed_alone)

    def kind(rank: int) -> _Kind:
        failure = failures[rank]
        if not _left_message(failure):
            return _Kind.DEATH if failure.exitcode < 0 else _Kind.FAILURE
        if failure.error_file_data["code"] == 2:
            return _Kind.REFUSAL
        # A rank whose error names another failed rank has failed because of that rank.
        named = set(failure.error_file_data["because_of"]) - {rank}
        return _Kind.FAILURE if named.isdisjoint(failed_alone) else _Kind.CONSEQUENCE

    # Of the failures within moments, take the one of the lowest kind; of two of a kind the first.
    within_moments = [rank for rank in failed_alone if times[rank] <= first + _MOMENTS_S]
    return min(within_moments, key=lambda rank: (kind(rank), times[rank]))


def _left_message(failure: ProcessFailure) -> bool:
    """Whether the rank has left a message before it ended. The message may be empty."""
    return "code" in failure.error_file_data


def _load_native_library() -> None:
    """Load the native library, and build it if need be, before the ranks meet. A build takes
    minutes, in which the other ranks would take this rank for dead.
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
            # The library does not load, or there is no home folder for the cache.
            raise UserError(
                f"the native library cannot be built or loaded: {' '.join(str(error).split())}; "
                "EPMOE_CACHE_DIR names a folder to build it in, EPMOE_LIBRARY a library that is "
                "built"
            ) from None
