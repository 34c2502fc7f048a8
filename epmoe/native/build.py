"""Builds the native library from ``csrc`` with ninja: ahead of time by ``setup.py``, otherwise at
first use.

``libepmoe.so`` holds the operators and the CPU kernels. It needs a C++ compiler and torch's
headers. The CUDA kernels are ``libepmoe_cuda.so`` in the same folder. nvcc builds it without torch,
and libepmoe.so loads it when a tensor on a GPU needs it.

Libraries are cached by the hash of all their inputs (sources, flags, torch, compilers, CPU, GPU
architectures), so a stale one is never loaded, and ninja starts only where one is missing. It works
in a folder of the cache, one for each set of compilers and flags, on a copy of the sources. A file
of the copy is written only where its text differs: ninja then compiles what an edit reaches,
whatever times a checkout gives its files, and an edit meanwhile reaches no compiler. The processes
of a machine take a file lock: the first process builds, and the others wait. The operating system
releases the lock when the builder and its compilers have ended, so nobody waits for a builder that
was killed.

Whoever can write into the cache can run code in every process that loads from it. Its folders are
therefore made for the user alone, and a cache that another user owns or can write into is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import os
import platform
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_TIMEOUT_S = 900.0
PROGRESS_S = 10.0
PACKAGE = Path(__file__).resolve().parents[1]
AHEAD_OF_TIME = PACKAGE / "_native" / "libepmoe.so"
CUDA_LIBRARY = "libepmoe_cuda.so"
CXX_FLAGS = (
    "-std=c++20",
    "-O3",
    # No fused multiply-add where the source has a product and a sum: CPUs and GPUs have equal bits.
    "-ffp-contract=off",
    # The stable ABI of torch 2.11, so that the library should work with every later torch.
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
)
CUDA_FLAGS = (
    "-std=c++20",
    "-O3",
    # As -ffp-contract=off.
    "--fmad=false",
    # Profilers and compute-sanitizer name lines. It changes no machine code.
    "-lineinfo",
    # The symbols of torch's own CUDA builds: no implicit conversion from or to half or bfloat16.
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)
HOPPER = "cuda/hopper/"  # sources with instructions of `sm_90a`
OLDEST_ARCHITECTURE = 8  # major number of a compute capability
TRIED_TORCH = ((2, 11), (2, 14))
"""Oldest and newest torch that epmoe was tried with."""


class BuildError(RuntimeError):
    """The native library could not be built or loaded; the message says what to do."""


def csrc() -> Path:
    """The folder of the native sources: next to the package in a checkout, inside the package when
    installed.
    """
    for folder in (PACKAGE.parent / "csrc", PACKAGE / "csrc"):
        if (folder / "ops.cpp").exists():
            return folder
    raise BuildError("the native sources (csrc/) are missing from this installation of epmoe")


def build(
    output_dir: Path | None = None, defines: tuple[str, ...] = (), *, portable: bool = False
) -> Path:
    """Compile the native library, unless one is cached that was built from the same inputs.

    The CUDA kernels are compiled for `architectures` where nvcc is on the PATH, and torch has CUDA
    or the library is `portable`, without `-march=native`. Returns the path of libepmoe.so;
    libepmoe_cuda.so lies in the same folder. Progress goes to stderr. Tests build mutated libraries
    with `defines`. Raises BuildError without a compiler, for its errors, a ``TORCH_CUDA_ARCH_LIST``
    or a cache that cannot be used, and after ``LOCK_TIMEOUT_S`` at a lock.
    """
    import torch

    cache = output_dir or _cache_dir()
    _check(cache.parent, around=True)

    # Collect all inputs. The folder's name is their hash, so other inputs have another folder.
    gpus = _gpus(portable)
    rules = _rules(gpus, portable)
    tools = [_version(_compiler())]
    if gpus:
        tools.append(_version("nvcc"))
    cpu = platform.machine() if portable else _cpu_features()
    files = _files()
    steps = _steps(files, defines, gpus)
    folder = cache / _digest(rules, *tools, cpu, torch.__version__, steps, *files, *files.values())
    # ninja works in a folder whose name does not depend on the sources. So after an edit it finds
    # its earlier results there, and compiles only what the edit reaches.
    work = cache / f"ninja-{_digest(rules, *tools, cpu)}"
    library = folder / "libepmoe.so"
    for path in (cache, folder, work):
        _check(path)

    if not library.exists():
        with _lock(work / "builder.lock") as lock:
            # Another process may have made it in the meantime.
            if not library.exists():
                purpose = "the CPU"
                if gpus:
                    purpose += f" and GPUs of compute capability {', '.join(gpus)}"
                print(
                    f"epmoe: compiling the native library for {purpose} into {folder}, once",
                    file=sys.stderr,
                )
                _make_folder(folder)
                head = f"to = ../../{folder.name}\ntorch = {torch.__version__}\n"
                _write(files | {"build.ninja": head + rules + steps}, work / "csrc")
                _run_ninja(work / "csrc", lock)
                for path in folder.iterdir():
                    path.chmod(0o755)
                # Rename the library last: a process that finds it also finds all that belongs to
                # it.
                os.replace(f"{library}.new", library)
                print("epmoe: the native library is compiled", file=sys.stderr)
    for path in folder.glob("*.so"):
        _check(path)
    return library


def ready() -> Path | None:
    """Find a library that exists already: that of ``EPMOE_LIBRARY``, or that of the installation.

    None says that `build` has to make one. That is also so if epmoe was installed where torch saw
    no GPU, and torch sees some now: the library of the installation then has no kernels for GPUs.
    """
    named = os.environ.get("EPMOE_LIBRARY")
    if named:
        return Path(named)
    if AHEAD_OF_TIME.exists() and (AHEAD_OF_TIME.with_name(CUDA_LIBRARY).exists() or not _gpus()):
        return AHEAD_OF_TIME
    return None


def architectures() -> tuple[str, ...]:
    """The compute capabilities to compile for, such as ("8.0", "9.0+PTX"), in ascending order,
    without repetitions.

    They are those of ``TORCH_CUDA_ARCH_LIST`` from 8.0 on; without it, of the GPUs that torch sees,
    which may be none. Raises BuildError for a list that cannot be used.
    """
    import torch

    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if listed:
        names = re.split(r"[;,\s]+", listed)
        wrong = [name for name in names if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", name)]
        if wrong:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST must be like `8.0;9.0+PTX`, got {wrong[0]!r} in {listed!r}"
            )
    else:
        gpus = range(torch.cuda.device_count())
        names = ["{}.{}".format(*torch.cuda.get_device_capability(gpu)) for gpu in gpus]
    kept = {name for name in names if int(name.split(".")[0]) >= OLDEST_ARCHITECTURE}
    if listed and not kept:
        raise BuildError(
            f"epmoe needs GPUs of compute capability 8.0 or newer, got {', '.join(names)}"
        )

    def order(name: str) -> tuple[float, str]:
        # "10.0" comes behind "9.0", and "9.0+PTX" behind "9.0".
        return float(re.sub(r"[^\d.]", "", name)), name

    return tuple(sorted(kept, key=order))


def _gpus(portable: bool = False) -> tuple[str, ...]:
    """The compute capabilities for which to compile CUDA kernels. Empty without CUDA or nvcc."""
    import torch

    has_cuda = portable or torch.version.cuda is not None
    if not has_cuda or shutil.which("nvcc") is None:
        return ()
    return architectures()


def problem_with_torch(version: str) -> str | None:
    """The warning for a user whose torch is older or newer than `TRIED_TORCH`, without a full stop.
    None for every other torch.
    """
    major, minor = version.split(".")[:2]
    if TRIED_TORCH[0] <= (int(major), int(minor)) <= TRIED_TORCH[1]:
        return None
    oldest, newest = (".".join(map(str, tried)) for tried in TRIED_TORCH)
    return (
        f"this epmoe was tried with torch {oldest} to {newest} (2.12 untested); this is torch "
        f"{version}"
    )


def _rules(gpus: tuple[str, ...], portable: bool) -> str:
    """The rules of `build.ninja`, as text.

    Their commands run in a copy of csrc, so they are the same for every checkout. Nor do they
    contain the folder of torch, which differs between virtual environments: it is in the
    environment.
    """
    cxx = shlex.quote(_compiler())
    host = f"-ccbin={cxx}" if os.environ.get("CXX") else ""
    native = "" if portable else "-march=native"

    # nvcc makes machine code for each architecture. With +PTX it also includes code that the
    # drivers of later GPUs compile.
    codes = ""
    for gpu in gpus:
        number = gpu.removesuffix("+PTX").replace(".", "")
        codes += f" -gencode=arch=compute_{number},code=sm_{number}"
        if gpu.endswith("+PTX"):
            codes += f" -gencode=arch=compute_{number},code=compute_{number}"
    # Sources with instructions that only Hopper has, such as wgmma, need the architecture sm_90a.
    hopper = re.sub(r"_90\b", "_90a", codes)

    # The reasons for parts of the commands:
    # -ccbin makes nvcc compile the host's part with the same compiler.
    # `: torch $torch;` does nothing in the shell. It makes the version of torch a part of the
    # command, and ninja compiles again what another command has made.
    # `$$TORCH` is the folder of torch in the environment, where virtual environments differ;
    # -fmacro-prefix-map keeps it out of the objects.
    # -MMD writes the headers of a source for ninja, system headers apart.
    # A compiler may link its C++ library statically. Its facets must not be mixed with those of
    # torch's, or the text of an error ends the process: hence --exclude-libs.
    # --threads=0 compiles the architectures of a source side by side.
    return f"""\
builddir = ..
codes = {codes}
hopper = {hopper}
torch_headers = -isystem"$$TORCH"/include -fmacro-prefix-map="$$TORCH"=torch
rule cpp
  command = : torch $torch; {cxx} {" ".join(CXX_FLAGS)} {native} -fPIC -I. $torch_headers $defines $
    -MMD -MF $out.d -c -o $out $in
  depfile = $out.d
  deps = gcc
rule cu
  command = nvcc {host} {" ".join(CUDA_FLAGS)} $codes -Xcompiler=-fPIC --threads=0 -I. $defines $
    -MMD -MF $out.d -c -o $out $in
  depfile = $out.d
  deps = gcc
rule link_cpp
  command = {cxx} -shared -Wl,--exclude-libs,ALL -o $out $in -L"$$TORCH"/lib -ltorch_cpu
rule link_cu
  command = nvcc {host} $codes -shared -cudart=static -o $out $in
"""


def _steps(files: dict[str, str], defines: tuple[str, ...], gpus: tuple[str, ...]) -> str:
    """The steps of `build.ninja`, as text. They build the libraries into the folder `$to`.

    A symbol of `defines` is defined only for sources in which it occurs, or a header of theirs.
    """
    # `build` removes the suffix ".new" once all files are there.
    libraries = {"cpp": "libepmoe.so.new"}
    if gpus:
        libraries["cu"] = CUDA_LIBRARY
    text = ""
    for kind, library in libraries.items():
        objects = []
        for source in files:
            if not source.endswith(f".{kind}"):
                continue
            reached = _reached(files, source) if defines else set()
            symbols = [
                f"-D{symbol}"
                for symbol in defines
                if any(symbol in files[name] for name in reached)
            ]
            # Mutated libraries have objects of their own only for sources that the symbols change.
            objects.append(f"../objects/{source}{''.join(symbols)}.o")
            text += f"build {objects[-1]}: {kind} {source}\n  defines = {' '.join(symbols)}\n"
            if source.startswith(HOPPER):
                text += "  codes = $hopper\n"
        text += f"build $to/{library}: link_{kind} {' '.join(objects)}\n"
    return text


def _reached(files: dict[str, str], source: str) -> set[str]:
    """The source, and all headers among `files` that it reaches by their includes."""
    reached: set[str] = set()
    left = [source]
    while left:
        name = left.pop()
        if name in reached:
            continue
        reached.add(name)
        # Headers are named from their folder on, or from csrc.
        for header in re.findall(r'^#include "(.*)"', files[name], re.MULTILINE):
            paths = f"{Path(name).parent}/{header}", header
            left += [path for path in paths if path in files]
    return reached


def _compiler() -> str:
    """The C++ compiler: that of the environment variable CXX, otherwise `c++`."""
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise BuildError(
            f"no C++ compiler: `{compiler}` is not on the PATH; install g++ ≥ 11 or set CXX"
        )
    return compiler


def _digest(*texts: str) -> str:
    """A short hash of these texts, for the name of a folder."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _files() -> dict[str, str]:
    """The text of each native source, by its path."""
    root = csrc()
    paths = sorted(path for path in root.rglob("*") if path.suffix in {".cpp", ".cu", ".cuh", ".h"})
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _version(tool: str) -> str:
    """What a compiler says of its version."""
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout


def _cpu_features() -> str:
    """The features of the CPU that ``-march=native`` uses, since machines that share a cache folder
    may differ.
    """
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _cache_dir() -> Path:
    """The folder in which libraries are cached."""
    base = (
        os.environ.get("EPMOE_CACHE_DIR")
        or os.environ.get("XDG_CACHE_HOME")
        or Path.home() / ".cache"
    )
    return Path(base) / "epmoe"


def _write(files: dict[str, str], folder: Path) -> None:
    """Make `folder` hold these files and no others. A file that has its text already is not
    touched, so that ninja does not compile it again.
    """
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            _make_folder(path.parent)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o600)


def _ninja() -> str:
    """Find ninja in this Python environment, even if that is not activated; then in the folders of
    `pip install --target`; then on the PATH.
    """
    folders = [
        sysconfig.get_path("scripts"),
        *(f"{path}/bin" for path in sys.path if path),
        os.environ.get("PATH", ""),
    ]
    ninja = shutil.which("ninja", path=os.pathsep.join(folders))
    if ninja is None:
        raise BuildError(
            "the native library is built with ninja, which is missing: pip install 'ninja>=1.11'"
        )
    # A relative path would be wrong, since ninja runs in another folder.
    return os.path.abspath(ninja)


def _run_ninja(folder: Path, lock: int) -> None:
    """Run ninja in `folder`, which builds what is missing or out of date. Prints how far it is.

    `lock` is the descriptor of the lock file, which ninja inherits. If this process is killed,
    ninja and the compilers run to their end and still hold the lock. For that case their output
    goes to a file: writing to a pipe that nobody reads would end them.
    """
    import torch

    command = [_ninja(), f"-j{len(os.sched_getaffinity(0))}"]
    env = os.environ | {
        "TORCH": str(Path(torch.__file__).resolve().parent),
        "NINJA_STATUS": "%f of %t steps: ",
    }
    began = time.monotonic()
    code = None
    with tempfile.TemporaryFile() as out:
        ninja = subprocess.Popen(
            command, cwd=folder, env=env, stdout=out, stderr=out, pass_fds=(lock,), umask=0o077
        )
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = ninja.wait(PROGRESS_S)
            # Read by `pread`, which does not move the position at which ninja writes.
            output = os.pread(out.fileno(), 1 << 24, 0).decode(errors="replace")
            steps = re.findall(r"^(\d+ of \d+ steps): ", output, re.MULTILINE)
            if code is None and steps:
                print(f"epmoe: {steps[-1]}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    # After a failure, show the output of the compilers without ninja's own lines.
    if code:
        errors = re.sub(r"^\d+ of \d+ steps: .*\n", "", output, flags=re.MULTILINE)
        raise BuildError(f"the native library did not compile:\n{errors.strip()}")


def _check(path: Path, *, around: bool = False) -> None:
    """Raise BuildError if another user could put code into a file or folder. See `who_else`."""
    who = who_else(path, around=around)
    if who:
        remedy = f"run `chmod go-w {path}`" if around else "remove it"
        raise BuildError(
            f"{path} {who}, who could put code there that this process would run: {remedy}, or set "
            "EPMOE_CACHE_DIR to a folder that only you can write into"
        )


def who_else(path: Path, *, around: bool = False) -> str | None:
    """Say which other user, besides root, owns `path` or can write into it. The text is the end of
    a sentence. None if there is no such user, or if the path does not exist.

    With `around`, the path is only the folder around a trusted folder, and less is asked of it. If
    it has the sticky bit, as /tmp has, other users may write into it, since they cannot rename the
    trusted folder. If this process is root, other users may own it, as in containers that mount a
    home.
    """
    with contextlib.suppress(OSError):
        found = path.stat()
        link = path.lstat()
        owners = {found.st_uid, link.st_uid} - {0, os.geteuid()}
        writers = _writers(found)
        if around:
            is_folder = stat.S_ISDIR(found.st_mode)
            is_sticky = found.st_mode & stat.S_ISVTX
            if not is_folder or os.geteuid() == 0:
                owners = set()
            if not is_folder or is_sticky:
                writers = None
        if owners or writers:
            return f"belongs to user {owners.pop()}" if owners else f"can be written by {writers}"
    return None


def _writers(found: os.stat_result) -> str | None:
    """Say who can write into a file or folder besides its owner and root. None if nobody can."""
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    if not found.st_mode & stat.S_IWGRP or found.st_gid == 0:
        return None
    user = str(os.geteuid())
    group = str(found.st_gid)
    members = list[str]()
    # KeyError: a container may have no names for its users.
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
        group, _, _, members = grp.getgrgid(found.st_gid)
    # On systems with a umask of 002 each user has a group of his own, which is no danger.
    return None if group == user and set(members) <= {user} else f"group {group}"


def _make_folder(path: Path) -> None:
    """Make a folder and all folders around it, for this user alone."""
    for folder in reversed((path, *path.parents)):
        folder.mkdir(0o700, exist_ok=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[int]:
    """A context that holds the lock of a file. Makes the file and its folder if they do not exist.

    The lock belongs to the file descriptor, which the context yields. Child processes that inherit
    the descriptor hold the lock, too. Raises BuildError if the lock is not free after
    ``LOCK_TIMEOUT_S``.
    """
    try:
        _make_folder(path.parent)
        for folder in (path.parents[1], path.parent):
            _check(folder)
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        advice = "set EPMOE_CACHE_DIR to a folder that can be written"
        raise BuildError(
            f"the native library cannot be built in {path.parent} ({error.strerror}): {advice}"
        ) from None
    with open(file, "w"):
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has been building for {LOCK_TIMEOUT_S:.0f} s and holds "
                        f"{path}"
                    ) from None
                time.sleep(0.1)
        yield file
