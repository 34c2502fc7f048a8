"""Builds the native library from ``csrc``: ahead of time by ``setup.py``, otherwise at first use.

A library is cached by the hash of all its inputs (sources, flags, torch, compiler, CPU), so a stale library is never
loaded. The processes of a machine take a file lock: the first process builds, and the others wait. The operating
system releases the lock when its holder ends, so nobody waits for a builder that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_TIMEOUT_S = 900.0
PACKAGE = Path(__file__).resolve().parent
AHEAD_OF_TIME = PACKAGE / "_native" / "libepmoe.so"
# The library uses torch's stable ABI as of torch 2.11, so it works with every later torch.
CXX_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-DTORCH_TARGET_VERSION=0x020b000000000000")
CUDA_FLAGS = ("-std=c++20", "-O3", "--fmad=false", "-lineinfo")


class BuildError(RuntimeError):
    """The native library could not be built; the message says what to do."""


def csrc() -> Path:
    """The folder of the native sources: beside the package in a checkout, inside the package when installed."""
    for folder in (PACKAGE.parent / "csrc", PACKAGE / "csrc"):
        if (folder / "ops.cpp").exists():
            return folder
    raise BuildError("the native sources (csrc/) are missing from this installation of epmoe")


def build(output_dir: Path | None = None, defines: tuple[str, ...] = (), *, portable: bool = False) -> Path:
    """Compile the native library, unless one is cached that was built from the same inputs.

    Args:
        output_dir: where the library goes; by default a folder in the user's cache.
        defines: preprocessor symbols; the tests build mutated libraries with them.
        portable: leave out `-march=native`, for a library that other machines load.

    Returns:
        The path of the library.

    Raises:
        BuildError: no compiler, the compiler's own errors, or a lock held longer than ``LOCK_TIMEOUT_S``.
    """
    import torch

    with_cuda = torch.version.cuda is not None and shutil.which("nvcc") is not None
    flags = CXX_FLAGS if portable else (*CXX_FLAGS, "-march=native")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler: `{compiler}` is not on the PATH; install g++ ≥ 11 or set CXX")
    sources = _sources(with_cuda)
    key = _hash(sources, flags + defines, compiler, torch.__version__, with_cuda)
    folder = (output_dir or _cache_dir()) / key
    library = folder / "libepmoe.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "builder.lock"):
            if not library.exists():
                _compile(folder, library, sources, flags, defines, with_cuda)
    return library


def _compile(
    folder: Path, library: Path, sources: list[Path], flags: tuple[str, ...], defines: tuple[str, ...], with_cuda: bool
) -> None:
    from torch.utils import cpp_extension

    name = f"epmoe_{folder.name}"  # differs by library, because torch adds a suffix to a name that it has seen
    (folder / "lock").unlink(missing_ok=True)  # torch's own lock, left by a killed build: we hold the outer lock
    symbols = [f"-D{name}" for name in defines]
    cuda_symbols = ["-DEPMOE_CUDA", "-DUSE_CUDA"] if with_cuda else []
    search = os.environ.get("PATH", "")
    # pip installs ninja beside the environment's Python, and the environment may not be activated.
    os.environ["PATH"] = os.pathsep.join([search, str(Path(sys.executable).parent)])
    try:
        cpp_extension.load(
            name=name,
            sources=[str(source) for source in sources],
            extra_cflags=[*flags, *symbols, *cuda_symbols],
            extra_cuda_cflags=[*CUDA_FLAGS, *symbols, *cuda_symbols],
            extra_include_paths=[str(csrc())],
            build_directory=str(folder),
            with_cuda=with_cuda,
            is_python_module=False,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the native library did not compile (log and build.ninja in {folder}):\n{error}") from error
    finally:
        os.environ["PATH"] = search
    os.replace(folder / f"{name}.so", library)


def _sources(with_cuda: bool) -> list[Path]:
    root = csrc()
    sources = [*root.glob("*.cpp"), *(root / "cpu").glob("*.cpp")]
    if with_cuda:
        sources += (root / "cuda").rglob("*.cu")
    return sorted(sources)


def _hash(sources: list[Path], flags: tuple[str, ...], compiler: str, torch_version: str, with_cuda: bool) -> str:
    headers = sorted(csrc().rglob("*.h")) + sorted(csrc().rglob("*.cuh"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((flags, version, torch_version, with_cuda, platform.machine())).encode())
    digest.update(_cpu_features().encode())
    for path in (*sources, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


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


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
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
