"""Builds the native library from ``csrc``: ahead of time by ``setup.py``, otherwise at first use.

``libepmoe.so`` holds the operators and the CPU kernels. It needs a C++ compiler and torch's headers. The CUDA kernels
are ``libepmoe_cuda.so`` in the same folder. nvcc builds it without torch, and libepmoe.so loads it when a tensor on a
GPU needs it.

A library is cached by the hash of all its inputs (sources, flags, torch, compilers, CPU, GPU architectures), so a stale
library is never loaded. So is the object of each source file, by that file, the headers that it includes, and the
symbols that these mention: after an edit, or without one guard, only the files that differ are compiled. The processes
of a machine take a file lock: the first process builds, and the others wait. The operating system releases the lock
when its holder ends, so nobody waits for a builder that was killed.

Whoever can write into the cache can run code in every process that loads from it. Its folders are therefore made for
the user alone, and a cache that another user owns or can write into is refused.
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
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LOCK_TIMEOUT_S = 900.0
PACKAGE = Path(__file__).resolve().parents[1]
AHEAD_OF_TIME = PACKAGE / "_native" / "libepmoe.so"
CUDA_LIBRARY = "libepmoe_cuda.so"
# The library uses the stable ABI of torch 2.11, so it should work with every later torch.
CXX_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-DTORCH_TARGET_VERSION=0x020b000000000000")
# The symbols are those of torch's own CUDA builds: no implicit conversion from or to half or bfloat16.
CUDA_FLAGS = (
    "-std=c++20", "-O3", "--fmad=false", "-lineinfo",
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
)  # fmt: skip
HOPPER = "cuda/hopper/"  # sources with instructions of `sm_90a`
WHEEL_ARCHITECTURES = ("8.0", "9.0", "10.0")
OLDEST_ARCHITECTURE = 8
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
TRIED_TORCH = ((2, 11), (2, 13))
"""Oldest and newest torch that epmoe was tried with."""


class BuildError(RuntimeError):
    """The native library could not be built or loaded; the message says what to do."""


def csrc() -> Path:
    """The folder of the native sources: next to the package in a checkout, inside the package when installed."""
    for folder in (PACKAGE.parent / "csrc", PACKAGE / "csrc"):
        if (folder / "ops.cpp").exists():
            return folder
    raise BuildError("the native sources (csrc/) are missing from this installation of epmoe")


def build(output_dir: Path | None = None, defines: tuple[str, ...] = (), *, portable: bool = False) -> Path:
    """Compile the native library, unless one is cached that was built from the same inputs.

    The CUDA kernels are compiled where nvcc is on the PATH: for a portable library always, at first use only if torch
    has CUDA and `architectures` names some.

    Args:
        output_dir: where the library goes; by default a folder in the user's cache.
        defines: preprocessor symbols; the tests build mutated libraries with them.
        portable: a library that other machines load: without `-march=native`, and for the GPUs of
            `WHEEL_ARCHITECTURES`.

    Returns:
        The path of libepmoe.so. libepmoe_cuda.so, if it was built, lies in the same folder.

    Raises:
        BuildError: no compiler, a ``TORCH_CUDA_ARCH_LIST`` that cannot be used, the compiler's own errors, a cache that
            cannot be written or that other users can write into, or a lock held longer than ``LOCK_TIMEOUT_S``.
    """
    import torch

    cache = output_dir or _cache_dir()
    _check(cache.parent, around=True)
    cuda = None
    if shutil.which("nvcc") is not None and (portable or torch.version.cuda is not None):
        targets = architectures(portable)
        cuda = _build(_cuda_recipe(defines, targets), cache) if targets else None
    return _build(_recipe(defines, portable, cuda), cache)


def architectures(portable: bool = False) -> tuple[str, ...]:
    """The compute capabilities to compile for, such as ("8.0", "9.0+PTX").

    They are those of ``TORCH_CUDA_ARCH_LIST`` from 8.0 on; without it, those of ``WHEEL_ARCHITECTURES`` for a portable
    library, otherwise of the GPUs that torch sees.

    Args:
        portable: as in `build`.

    Returns:
        In ascending order, without repetitions. Empty without a list where torch sees no GPU from 8.0 on.

    Raises:
        BuildError: the list cannot be read, or nothing in it is 8.0 or newer.
    """
    import torch

    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if names := re.split(r"[;,\s]+", listed.strip()) if listed.strip() else []:
        if wrong := [name for name in names if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", name)]:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST must be like `8.0;9.0+PTX`, got {wrong[0]!r} in {listed!r}")
    elif portable:
        names = list(WHEEL_ARCHITECTURES)
    else:
        gpus = range(torch.cuda.device_count())
        names = ["{}.{}".format(*torch.cuda.get_device_capability(gpu)) for gpu in gpus]
    kept = {name for name in names if int(name.split(".")[0]) >= OLDEST_ARCHITECTURE}
    if listed.strip() and not kept:
        raise BuildError(f"epmoe needs GPUs of compute capability 8.0 or newer, got {', '.join(names)}")
    return tuple(sorted(kept, key=lambda name: (float(re.sub(r"[^\d.]", "", name)), name)))


def problem_with_torch(version: str) -> str | None:
    """Words for a user whose torch is outside `TRIED_TORCH`; None for every other torch.

    Args:
        version: the version of torch, such as "2.13.0+cpu".

    Returns:
        A sentence without a full stop.
    """
    oldest, newest = (".".join(map(str, tried)) for tried in TRIED_TORCH)
    if TRIED_TORCH[0] <= tuple(int(part) for part in version.split(".")[:2]) <= TRIED_TORCH[1]:
        return None
    return f"this epmoe was tried with torch {oldest} to {newest} (2.12 untested); this is torch {version}"


@dataclass(frozen=True)
class _Recipe:
    """One library. Its commands run in the folder of the sources, so they are the same in every checkout."""

    library: str
    sources: tuple[str, ...]  # relative to csrc()
    defines: tuple[str, ...]
    compile: tuple[str, ...]  # `-DSYMBOL ... -c -o OBJECT SOURCE` follows
    link: tuple[str, ...]  # `-o LIBRARY OBJECT ...` follows
    inputs: tuple[str, ...]  # what decides the result besides sources and flags: versions, the CPU
    include: tuple[str, ...] = ()  # further options of compile, named by a version in `inputs`
    libraries: tuple[str, ...] = ()  # further options of link, named by a version in `inputs`
    beside: Path | None = None  # a library that goes into the same folder, and so a part of the key

    def key(self, objects: Sequence[_Object]) -> str:
        """The key of the library that `objects` become."""
        beside = self.beside.parent.name if self.beside else ""
        return _digest(repr((self.library, self.link, self.inputs, beside, [each.key for each in objects])))

    def objects(self) -> list[_Object]:
        """What the sources compile to, as they are now."""
        files: dict[str, _File] = {}
        return [self.object_of(source, files) for source in self.sources]

    def object_of(self, source: str, files: dict[str, _File]) -> _Object:
        """What one source compiles to. `files` is that of `_unit`."""
        text = "".join(f"{path}\0{files[path].text}\0" for path in _unit(source, files))
        symbols = tuple(f"-D{name}" for name in self.defines if re.search(rf"\b{name.split('=')[0]}\b", text))
        command = (*self.compile, *symbols)
        if source.startswith(HOPPER):
            command = tuple(re.sub(r"_90\b", "_90a", word) for word in command)
        return _Object(source, _digest(repr((command, self.inputs)) + text), command)


@dataclass(frozen=True)
class _Object:
    source: str
    key: str
    command: tuple[str, ...]  # without the further options, which do not count in the key


class _File(NamedTuple):
    text: str
    includes: list[str]  # files of csrc, by their paths in it

    @classmethod
    def read(cls, path: str) -> _File:
        root = csrc()
        folder = os.path.dirname(path)
        text = (root / path).read_text(encoding="utf-8")
        places = [[os.path.normpath(os.path.join(at, name)) for at in (folder, "")] for name in _INCLUDE.findall(text)]
        # The compiler reports a file that is in neither place.
        return cls(text, [path for both in places for path in [p for p in both if (root / p).exists()][:1]])


def _unit(source: str, files: dict[str, _File]) -> list[str]:
    """What `source` consists of in csrc: itself and what it includes, directly or not.

    `files` has the files that were read already, and gets the others.
    """
    unit = set[str]()
    waiting = [source]
    while waiting:
        if (path := waiting.pop()) not in unit:
            unit.add(path)
            file = files[path] = files.get(path) or _File.read(path)
            waiting += file.includes
    return sorted(unit)


def _recipe(defines: tuple[str, ...], portable: bool, cuda: Path | None) -> _Recipe:
    import torch

    compiler = _compiler()
    home = Path(torch.__file__).resolve().parent
    native = () if portable else ("-march=native",)
    cpu = platform.machine() if portable else _cpu_features()
    return _Recipe(
        library="libepmoe.so",
        sources=_files("*.cpp", "cpu/*.cpp"),
        defines=defines,
        compile=(compiler, *CXX_FLAGS, *native, "-fPIC", "-I."),
        # A compiler may link its C++ library statically. Its facets must not be mixed with those of torch's, or the
        # text of an error ends the process.
        link=(compiler, "-shared", "-Wl,--exclude-libs,ALL"),
        inputs=(_version(compiler), torch.__version__, cpu),
        include=(f"-isystem{home / 'include'}", f"-fmacro-prefix-map={home}=torch"),
        libraries=(f"-L{home / 'lib'}", "-ltorch_cpu"),
        beside=cuda,
    )


def _cuda_recipe(defines: tuple[str, ...], targets: tuple[str, ...]) -> _Recipe:
    host = (f"-ccbin={os.environ['CXX']}",) if "CXX" in os.environ else ()
    codes = []
    for target in targets:
        number = target.removesuffix("+PTX").replace(".", "")
        codes.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if target.endswith("+PTX"):
            codes.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return _Recipe(
        library=CUDA_LIBRARY,
        sources=_files("*.cu", "cuda/**/*.cu"),
        defines=defines,
        compile=("nvcc", *host, *CUDA_FLAGS, *codes, "-Xcompiler=-fPIC", "--threads=0", "-I."),
        link=("nvcc", *host, *codes, "-shared", "-cudart=static"),
        inputs=(_version("nvcc"), _version(_compiler()), platform.machine()),
    )


def _compiler() -> str:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler: `{compiler}` is not on the PATH; install g++ ≥ 11 or set CXX")
    return compiler


def _files(*patterns: str) -> tuple[str, ...]:
    paths = (path for pattern in patterns for path in csrc().glob(pattern))
    return tuple(sorted(path.relative_to(csrc()).as_posix() for path in paths))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(tool: str) -> str:
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout


def _cpu_features() -> str:
    """The CPU features that ``-march=native`` uses: machines that share a cache folder may have different CPUs."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _cache_dir() -> Path:
    base = os.environ.get("EPMOE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "epmoe"


def _build(recipe: _Recipe, cache: Path) -> Path:
    objects = recipe.objects()
    folder = cache / recipe.key(objects)

    def link(library: Path) -> None:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            parts = list(pool.map(lambda part: _compiled(recipe, part, cache / "objects"), objects))
        _run(*recipe.link, "-o", str(library), *map(str, parts), *recipe.libraries)
        if recipe.beside:
            (folder / recipe.beside.name).unlink(missing_ok=True)  # of a build that was killed
            try:
                os.link(recipe.beside, folder / recipe.beside.name)
            except OSError:  # a file system without hard links
                shutil.copy(recipe.beside, folder)

    return _made_once(folder / recipe.library, folder / "builder.lock", link)


def _compiled(recipe: _Recipe, part: _Object, folder: Path) -> Path:
    def compile_part(to: Path) -> None:
        _run(*part.command, *recipe.include, "-c", "-o", str(to), part.source)
        if recipe.object_of(part.source, {}) != part:
            raise BuildError(f"csrc/{part.source}, or what it includes, has changed while it was compiled: start again")

    path = folder / f"{Path(part.source).stem}-{part.key}.o"
    return _made_once(path, path.with_suffix(".lock"), compile_part)


def _made_once(path: Path, lock: Path, make: Callable[[Path], None]) -> Path:
    """`path`, which `make` writes unless it exists: under the lock, and elsewhere first, so that it is whole."""
    for folder in (path.parents[1], path.parent):  # the cache, and the folder in it
        _check(folder)
    if not path.exists():
        with _lock(lock):
            if not path.exists():  # no other process has made it in the meantime
                new = path.with_name(f"{path.name}.new")
                make(new)
                new.chmod(new.stat().st_mode & ~0o022)  # whatever the umask is
                os.replace(new, path)
    _check(path)
    return path


def _check(path: Path, *, around: bool = False) -> None:
    """Raise BuildError where another user, except root, owns `path` or can write into it. It need not exist.

    Args:
        path: a folder of the cache, or a file that is loaded.
        around: the folder that the cache is in. Its sticky bit keeps others from renaming what is not theirs, as in
            /tmp; and root works in folders of users, as containers do that mount a home.
    """
    with contextlib.suppress(OSError):
        found = path.stat()
        link = path.lstat()
        owners = {found.st_uid, link.st_uid} - {0, os.geteuid()}
        writers = _writers(found)
        if around:
            owners = owners if os.geteuid() and stat.S_ISDIR(found.st_mode) else set()
            writers = writers if stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_ISVTX else None
        if owners or writers:
            who = f"belongs to user {owners.pop()}" if owners else f"can be written by {writers}"
            raise BuildError(
                f"{path} {who}, who could put code there that this process would run: "
                f"{f'run `chmod go-w {path}`' if around else 'remove it'}, or set EPMOE_CACHE_DIR to a folder that "
                "only you can write into"
            )


def _writers(found: os.stat_result) -> str | None:
    """Who can write there besides the owner and root, if anybody."""
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    if not found.st_mode & stat.S_IWGRP or found.st_gid == 0:
        return None
    user = str(os.geteuid())
    group = str(found.st_gid)
    members = list[str]()
    with contextlib.suppress(KeyError):  # a container may have no names for its users
        user = pwd.getpwuid(os.geteuid()).pw_name
        group, _, _, members = grp.getgrgid(found.st_gid)
    return None if group == user and set(members) <= {user} else f"group {group}"  # a umask of 002 has such groups


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=csrc(), capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr + done.stdout).strip()
        raise BuildError(f"the native library did not compile:\n{' '.join(command)}\n{output}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Makes the file and its folder, and holds its lock."""
    try:
        for folder in reversed((path.parent, *path.parent.parents)):
            folder.mkdir(0o700, exist_ok=True)
        for folder in (path.parents[1], path.parent):
            _check(folder)
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        advice = "set EPMOE_CACHE_DIR to a folder that can be written"
        raise BuildError(f"the native library cannot be built in {path.parent} ({error.strerror}): {advice}") from None
    with open(file, "w"):
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has been building for {LOCK_TIMEOUT_S:.0f} s and holds {path}"
                    ) from None
                time.sleep(0.1)
        yield
