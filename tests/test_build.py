"""The build of the native library: what makes it anew, what it is compiled for, and what a user
reads when it fails.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import fork
from launched import TIMEOUT_S, run_python
from waits import until

from epmoe.native import build, ops

SOURCES = {
    "ops.cpp": '#include "types.h"\n',
    "cpu/route.cpp": '#include "convert.h"\n// EPMOE_MUTATE_ROUTE_CLAMP\n',
    "cpu/convert.h": '#include "types.h"\n',
    "types.h": "#pragma once\n",
    "cuda_api.cu": "",
    "cuda/local/permute.cu": '#include "segments.cuh"\n// EPMOE_MUTATE_SORT_GUARD\n',
    "cuda/local/segments.cuh": "// EPMOE_MUTATE_SEGMENTS\n",
    "cuda/hopper/gemm.cu": '#include "types.h"\n',
}
EDIT = "// edited\n"
# A compiler that writes its command line, and the source that it compiles. A real one tells what
# the source includes.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec {cat} "$0.version"
words="${{0##*/}} $*"
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2 ;; -MF) deps=$2 ;; esac
  last=$1
  shift
done
echo "$words" >>"{bin}/commands"
. "{bin}/meanwhile"
echo "$words" >"$out"
if [ -n "$deps" ]; then
  {cxx} -MM -MT "$out" -MF "$deps" -I. -x c++ "$last" && {cat} "$last" >>"$out"
fi
"""


class Toolchain:
    """A C++ compiler, nvcc, and a csrc of a few lines, to be changed by a test."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.csrc = folder / "csrc"
        self.bin.mkdir()
        # Compilers that say how they were called, and the real ninja.
        real = {"cxx": shutil.which("c++"), "cat": shutil.which("cat"), "bin": self.bin}
        for tool in ("c++", "nvcc"):
            (self.bin / tool).write_text(COMPILER.format(**real))
            (self.bin / tool).chmod(0o755)
        self.meanwhile("")
        self.commands()
        ninja = shutil.which("ninja")
        if ninja:
            (self.bin / "ninja").symlink_to(ninja)
        self.reset()

    def reset(self) -> None:
        """Let compilers and sources be as they are at first."""
        self.release("c++", "g++ 12.2")
        self.release("nvcc", "nvcc: release 13.0, V13.0.88")
        for name in SOURCES:
            self.edit(name)

    def release(self, tool: str, version: str) -> None:
        (self.bin / f"{tool}.version").write_text(version)

    def edit(self, name: str, more: str = "") -> None:
        """Write a source as it is at first, and `more`. Its time is that of an old checkout."""
        path = self.csrc / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCES[name] + more)
        os.utime(path, (1e9, 1e9))

    def meanwhile(self, script: str) -> None:
        """What each compiler does before it writes."""
        (self.bin / "meanwhile").write_text(script)

    def commands(self) -> list[list[str]]:
        """The words of each command since the last call."""
        log = self.bin / "commands"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        return [line.split() for line in lines]

    def compiled(self) -> list[str]:
        """The sources that were compiled since the last call."""
        return sorted(words[-1] for words in self.commands() if "-c" in words)


@pytest.fixture
def toolchain(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Toolchain:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0;12.0")  # as `make wheel`
    made = Toolchain(tmp_path_factory.mktemp("toolchain"))
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setattr(build, "csrc", lambda: made.csrc)
    return made


def use_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])


def links(library: Path) -> tuple[str, str]:
    """The command that linked each of the two libraries in a folder."""
    return library.read_text(), library.with_name(build.CUDA_LIBRARY).read_text()


def every(*suffixes: str) -> list[str]:
    return sorted(name for name in SOURCES if name.endswith(suffixes))


EVERYTHING = every(".cpp", ".cu")


@pytest.mark.parametrize(
    ("change", "compiled"),
    [
        (lambda tools, to: tools.edit("ops.cpp", EDIT), ["ops.cpp"]),
        (lambda tools, to: tools.edit("cuda/local/permute.cu", EDIT), ["cuda/local/permute.cu"]),
        (lambda tools, to: tools.edit("cuda/local/segments.cuh", EDIT), ["cuda/local/permute.cu"]),
        (lambda tools, to: tools.edit("cpu/convert.h", EDIT), ["cpu/route.cpp"]),
        (
            lambda tools, to: tools.edit("types.h", EDIT),
            ["cpu/route.cpp", "cuda/hopper/gemm.cu", "ops.cpp"],
        ),
        (lambda tools, to: to.setattr(torch, "__version__", "2.99.0"), every(".cpp")),
        (lambda tools, to: to.setenv("TORCH_CUDA_ARCH_LIST", "9.0"), EVERYTHING),
        (lambda tools, to: to.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX"), EVERYTHING),
        (lambda tools, to: to.setattr(build, "CUDA_FLAGS", ("-O2",)), EVERYTHING),
        (lambda tools, to: tools.release("nvcc", "nvcc: release 13.1"), EVERYTHING),
        (lambda tools, to: tools.release("c++", "g++ 13.1"), EVERYTHING),
        # Other spellings of the same GPUs. Environments with the same torch share the library.
        (lambda tools, to: to.setenv("TORCH_CUDA_ARCH_LIST", "12.0 10.0 9.0 8.0"), []),
        (lambda tools, to: to.setenv("TORCH_CUDA_ARCH_LIST", "8.0, 9.0,12.0 10.0,9.0"), []),
        (lambda tools, to: to.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0;9.0;10.0;12.0"), []),
        (lambda tools, to: to.setattr(torch, "__file__", "/another place/torch/__init__.py"), []),
    ],
)
def test_a_change_compiles_what_it_reaches(change, compiled, toolchain, tmp_path):
    """Whatever the times of the files are: the objects of the other sources are those of the last
    build.
    """
    first = build.build(tmp_path, portable=True)
    assert toolchain.compiled() == EVERYTHING
    with pytest.MonkeyPatch.context() as to:
        change(toolchain, to)
        again = build.build(tmp_path, portable=True)
        assert toolchain.compiled() == compiled and (again != first) == bool(compiled)
        assert build.build(tmp_path, portable=True) == again and not toolchain.commands()
    toolchain.reset()
    assert build.build(tmp_path, portable=True) == first and not toolchain.commands()


@pytest.mark.parametrize(
    ("guard", "source"),
    [
        ("EPMOE_MUTATE_ROUTE_CLAMP", "cpu/route.cpp"),
        ("EPMOE_MUTATE_SORT_GUARD", "cuda/local/permute.cu"),
        # It stands in a header.
        ("EPMOE_MUTATE_SEGMENTS", "cuda/local/permute.cu"),
    ],
)
def test_a_library_without_one_guard_compiles_one_source(guard, source, toolchain, tmp_path):
    whole = build.build(tmp_path, portable=True)
    toolchain.commands()
    without = build.build(tmp_path, (guard,), portable=True)
    compiles = [words for words in toolchain.commands() if "-c" in words]
    assert [(words[-1], f"-D{guard}" in words) for words in compiles] == [(source, True)]
    assert build.build(tmp_path, ("EPMOE_MUTATE_NOTHING",), portable=True) == whole != without


def test_an_edit_during_a_build_reaches_no_compiler(toolchain, tmp_path):
    toolchain.meanwhile(f'echo "// edited" >"{toolchain.csrc}/ops.cpp"')
    library = build.build(tmp_path, portable=True)
    toolchain.meanwhile("")
    (object_file,) = tmp_path.rglob("ops.cpp.o")
    assert SOURCES["ops.cpp"] in object_file.read_text() and "edited" not in object_file.read_text()
    assert toolchain.compiled() == EVERYTHING
    assert build.build(tmp_path, portable=True) != library
    assert toolchain.compiled() == ["ops.cpp"] and "edited" in object_file.read_text()


def test_a_file_that_is_gone_is_not_found_in_the_copy(toolchain, tmp_path):
    build.build(tmp_path, portable=True)
    (toolchain.csrc / "cpu" / "convert.h").unlink()
    with pytest.raises(
        build.BuildError, match=r"(?s)did not compile:.*c\+\+ .*cpu/route\.cpp.*convert\.h"
    ):
        build.build(tmp_path, portable=True)


def test_commands_find_the_torch_of_this_environment(toolchain, tmp_path, monkeypatch):
    monkeypatch.setattr(
        torch, "__file__", str(tmp_path / "another place" / "torch" / "__init__.py")
    )
    build.build(tmp_path, portable=True)
    *compiles, link = (words for words in toolchain.commands() if words[0] == "c++")
    assert all("place/torch/include" in words for words in compiles) and "place/torch/lib" in link


def test_the_kernels_get_the_flags_that_their_results_rest_on(toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    build.build(tmp_path, ("EPMOE_MUTATE_SORT_GUARD",), portable=True)
    commands = [words for words in toolchain.commands() if words[0] == "nvcc"]
    compiles = [words for words in commands if "-c" in words]
    assert sorted(words[-1] for words in compiles) == every(".cu")
    # Each source of kernels,
    for words in compiles:
        assert {"-O3", "--fmad=false", "-lineinfo", "-std=c++20"} <= set(words)
        assert ("-DEPMOE_MUTATE_SORT_GUARD" in words) == (words[-1] == "cuda/local/permute.cu")
        assert {word for word in words if "CUDA_NO" in word} == {
            f"-D__CUDA_NO_{name}__"
            for name in (
                "HALF_OPERATORS",
                "HALF_CONVERSIONS",
                "BFLOAT16_CONVERSIONS",
                "HALF2_OPERATORS",
            )
        }
        hopper = "90a" if words[-1].startswith("cuda/hopper/") else "90"
        assert [word for word in words if word.startswith("-gencode")] == [
            "-gencode=arch=compute_80,code=sm_80",
            f"-gencode=arch=compute_{hopper},code=sm_{hopper}",
            f"-gencode=arch=compute_{hopper},code=compute_{hopper}",
        ]
        assert not [word for word in words if "torch" in word]
    # and the link.
    (link,) = [words for words in commands if "-c" not in words]
    assert "-cudart=static" in link and not [
        word for word in link if "torch" in word or "cudart=shared" in word
    ]


def test_a_first_use_builds_for_the_gpus_that_torch_sees_and_says_so_once(
    toolchain, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(build, "PROGRESS_S", 0.05)
    toolchain.meanwhile(f"{shutil.which('sleep', path=os.defpath)} 0.1")
    use_gpus(monkeypatch, (9, 0), (8, 0), (9, 0))
    assert build.architectures() == ("8.0", "9.0")
    # It builds for both, and says so with its steps,
    library = build.build(tmp_path)
    assert "code=sm_80 -gencode=arch=compute_90,code=sm_90" in links(library)[1]
    purpose = "the CPU and GPUs of compute capability 8.0, 9.0"
    first, *steps, last = capsys.readouterr().err.splitlines()
    assert first == f"epmoe: compiling the native library for {purpose} into {library.parent}, once"
    assert steps and all(re.fullmatch(r"epmoe: \d of 7 steps, \d+ s", line) for line in steps)
    assert last == "epmoe: the native library is compiled"
    build.build(tmp_path)
    # and once only.
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("without", ["a GPU", "a new GPU", "nvcc", "CUDA in torch"])
def test_a_machine_without_a_gpu_for_the_kernels_has_those_of_the_cpu(
    without, toolchain, tmp_path, monkeypatch
):
    """A login node, a container or CI, where torch and nvcc may be those of the
    machines with GPUs.
    """
    use_gpus(monkeypatch, *{"a GPU": (), "a new GPU": ((7, 5),)}.get(without, ((9, 0),)))
    if without == "nvcc":
        (toolchain.bin / "nvcc").unlink()
    elif without == "CUDA in torch":
        monkeypatch.setattr(torch.version, "cuda", None)
    library = build.build(tmp_path)
    assert library.exists() and not library.with_name(build.CUDA_LIBRARY).exists()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert build.build(tmp_path).with_name(build.CUDA_LIBRARY).exists() == ("GPU" in without)


def test_kernels_that_an_installation_without_gpus_lacks_are_built_at_first_use(
    toolchain, tmp_path, monkeypatch
):
    """Such as one in a container, which then starts on a machine with GPUs."""
    monkeypatch.delenv("EPMOE_LIBRARY", raising=False)
    monkeypatch.setattr(build, "AHEAD_OF_TIME", tmp_path / "libepmoe.so")
    assert build.ready() is None
    # An installation without kernels.
    shutil.copy(build.build(tmp_path / "cache"), tmp_path)
    use_gpus(monkeypatch)
    assert build.ready() == tmp_path / "libepmoe.so"
    # A GPU wants them, unless there is no compiler.
    use_gpus(monkeypatch, (9, 0))
    assert build.ready() is None
    (toolchain.bin / "nvcc").unlink()
    assert build.ready() == tmp_path / "libepmoe.so"


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        ("Hopper", "TORCH_CUDA_ARCH_LIST must be like `8.0;9.0+PTX`, got 'Hopper'"),
        ("9.0;sm_90", "got 'sm_90' in '9.0;sm_90'"),
        ("7.0 7.5", "epmoe needs GPUs of compute capability 8.0 or newer, got 7.0, 7.5"),
    ],
)
def test_an_architecture_list_that_cannot_be_used_is_named(
    listed, sentence, toolchain, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(build.BuildError, match=re.escape(sentence)):
        build.build(tmp_path, portable=True)


def test_an_empty_variable_names_no_compiler(toolchain, tmp_path, monkeypatch):
    """The library is that of an environment without it, also the part that nvcc compiles."""
    library = build.build(tmp_path, portable=True)
    monkeypatch.setenv("CXX", "")
    assert build.build(tmp_path, portable=True) == library


def test_without_a_compiler_the_message_names_one(toolchain, tmp_path):
    for tool in ("c++", "nvcc"):
        (toolchain.bin / tool).unlink()
    with pytest.raises(
        build.BuildError, match=re.escape("`c++` is not on the PATH; install g++ ≥ 11 or set CXX")
    ):
        build.build(tmp_path)


def test_without_ninja_the_message_names_it(toolchain, tmp_path, monkeypatch):
    """It may be in the environment, on the PATH, or in a folder of `pip install --target`."""
    ninja = build._ninja()
    # Neither on the PATH nor in the environment.
    (toolchain.bin / "ninja").unlink(missing_ok=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["target"])
    with pytest.raises(
        build.BuildError, match=re.escape("with ninja, which is missing: pip install 'ninja>=1.11'")
    ):
        build.build(tmp_path / "cache")
    # In a folder of packages it is found.
    (tmp_path / "target" / "bin").mkdir(parents=True)
    (tmp_path / "target" / "bin" / "ninja").symlink_to(ninja)
    assert build.build(tmp_path / "cache")


def test_an_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "cat")  # it knows none of the options
    with pytest.raises(
        build.BuildError, match=r"did not compile:\n(.|\n)* cat -std=c\+\+20 (.|\n)*\ncat: "
    ):
        build.build(tmp_path)


def test_a_build_that_was_killed_goes_on(toolchain, tmp_path):
    """The next process waits for the compilers that still run, and compiles nothing twice."""
    started = tmp_path / "started"
    toolchain.meanwhile(f': >"{started}"; {shutil.which("sleep", path=os.defpath)} 0.3')
    # The builder is killed while compilers run.
    builder = fork(partial(build.build, tmp_path, portable=True))
    until(started.exists)
    os.kill(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    # The next one goes on.
    library = build.build(tmp_path, portable=True)
    assert sorted(path.name for path in library.parent.iterdir()) == [
        "libepmoe.so",
        build.CUDA_LIBRARY,
    ]
    assert toolchain.compiled() == EVERYTHING


def test_what_a_killed_compiler_left_is_made_again(toolchain, tmp_path):
    library = build.build(tmp_path, portable=True)
    library.unlink()
    library.with_name("libepmoe.so.new").write_text("half")
    (object_file,) = tmp_path.rglob("ops.cpp.o")
    object_file.unlink()
    assert build.build(tmp_path, portable=True) == library and "half" not in library.read_text()


def test_of_several_processes_one_builds(toolchain, tmp_path):
    toolchain.meanwhile(f"{shutil.which('sleep', path=os.defpath)} 0.1")
    children = [fork(partial(build.build, tmp_path, portable=True)) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert toolchain.compiled() == EVERYTHING


def test_a_build_of_another_process_is_waited_for(toolchain, tmp_path, monkeypatch):
    library = build.build(tmp_path, portable=True)
    library.unlink()
    monkeypatch.setattr(build, "LOCK_TIMEOUT_S", 0.3)
    (held,) = tmp_path.glob("ninja-*/builder.lock")
    with open(held) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(build.BuildError, match="another process has been building for"):
            build.build(tmp_path, portable=True)


def test_a_cache_that_cannot_be_written_names_the_variable(toolchain, monkeypatch):
    monkeypatch.setenv("EPMOE_CACHE_DIR", "/dev/null")
    with pytest.raises(
        build.BuildError, match="set EPMOE_CACHE_DIR to a folder that can be written"
    ):
        build.build()


@pytest.fixture
def cache(toolchain, tmp_path, monkeypatch) -> Path:
    """The folder that EPMOE_CACHE_DIR names."""
    monkeypatch.setenv("EPMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    return tmp_path / "cache"


def refused(*said: str) -> None:
    with pytest.raises(build.BuildError, match=".*".join(map(re.escape, said))) as error:
        build.build(portable=True)
    assert "set EPMOE_CACHE_DIR to a folder that only you can write into" in str(error.value)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_the_cache_is_for_its_user_alone(cache, umask):
    before = os.umask(umask)
    try:
        library = build.build(portable=True)
    finally:
        os.umask(before)
    made = [cache, *cache.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert not [path for path in made if path.stat().st_mode & 0o022]
    assert build.build(portable=True) == library


PLACES = [
    "epmoe",
    "epmoe/KEY",
    "epmoe/NINJA",
    "epmoe/KEY/libepmoe.so",
    "epmoe/KEY/libepmoe_cuda.so",
]
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def place_of(which: str, library: Path) -> Path:
    """One of PLACES, of the cache that has the library."""
    cache = library.parents[2]
    (work,) = cache.glob("epmoe/ninja-*")
    return cache / which.replace("KEY", library.parent.name).replace("NINJA", work.name)


@pytest.mark.parametrize(
    ("which", "who"),
    [
        *((which, "can be written by every user") for which in ("", *PLACES)),
        *(
            pytest.param(which, "can be written by group 54321", marks=NEEDS_ROOT)
            for which in ("", *PLACES)
        ),
        *(pytest.param(which, "belongs to user 54321", marks=NEEDS_ROOT) for which in PLACES),
    ],
)
def test_a_cache_of_others_is_refused(cache, which, who):
    """What lies there may be another user's code."""
    library = build.build(portable=True)
    path = place_of(which, library)
    found = path.stat()
    # Others get a way into a part of it.
    if "every" not in who:
        os.chown(path, 54321 if "belongs" in who else -1, 54321 if "group" in who else -1)
    path.chmod(0o777 if "every" in who else 0o775 if "group" in who else 0o755)
    refused(str(path), who, "remove it" if which else f"run `chmod go-w {path}`")
    # Without, it is taken again.
    os.chown(path, found.st_uid, found.st_gid)
    path.chmod(0o755)
    assert build.build(portable=True) == library


def test_a_group_of_one_may_write(cache, monkeypatch):
    """Each user has a group, and the umask is 002."""
    library = build.build(portable=True)
    # A group of this user alone.
    for path in (cache, cache / "epmoe", library.parent, library):
        path.chmod(0o775)
    assert build.build(portable=True) == library
    # A group of two.
    names = SimpleNamespace(pw_name="ann"), ("ann", "x", 7, ["ann"])
    monkeypatch.setattr(build.pwd, "getpwuid", lambda user: names[0])
    monkeypatch.setattr(build.grp, "getgrgid", lambda group: names[1])
    found = os.stat_result((0o40775, 0, 0, 1, 7, 7, 0, 0, 0, 0))
    assert build._writers(found) is None
    names[1][3].append("bob")
    assert build._writers(found) == "group ann"


@NEEDS_ROOT
def test_a_link_of_another_user_is_refused(cache, tmp_path):
    build.build(portable=True)
    (cache / "epmoe").rename(tmp_path / "elsewhere")
    (cache / "epmoe").symlink_to(tmp_path / "elsewhere")
    assert build.build(portable=True)
    os.chown(cache / "epmoe", 54321, -1, follow_symlinks=False)
    refused(str(cache / "epmoe"), "belongs to user 54321")


def test_a_folder_that_keeps_names_for_their_owners_may_hold_the_cache(cache):
    """As /tmp does."""
    cache.mkdir()
    cache.chmod(0o1777)
    assert build.build(portable=True)


def test_a_cache_of_root_serves_all(cache, monkeypatch):
    library = build.build(portable=True)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    if os.getuid():
        refused("belongs to user")
    else:
        assert build.build(portable=True) == library


def test_the_lock_is_no_link(cache, tmp_path):
    library = build.build(portable=True)
    library.unlink()
    (tmp_path / "precious").write_text("mine")
    lock = place_of("epmoe/NINJA", library) / "builder.lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")
    with pytest.raises(build.BuildError, match="cannot be built"):
        build.build(portable=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [
        ("2.10.1", False),
        ("2.11.0+cu130", True),
        ("2.14.1+cu130", True),
        ("2.15.0a0+git1", False),
        ("3.0.0", False),
    ],
)
def test_a_torch_that_was_never_tried_is_said_to_be(version, is_tried):
    sentence = (
        f"this epmoe was tried with torch 2.11 to 2.14 (2.12 untested); this is torch {version}"
    )
    assert build.problem_with_torch(version) == (None if is_tried else sentence)


NEWER_TORCH = (
    "import torch; torch.__version__ = '2.15.0'; from epmoe.native import ops; ops.route; "
    "ops.permute; print('ok')"
)


def new_python(*program: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """An interpreter that has not imported epmoe yet."""
    return subprocess.run(
        [sys.executable, *map(str, program)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_a_newer_torch_is_one_warning():
    """An empty variable silences nothing."""
    run = new_python("-c", NEWER_TORCH, EPMOE_LIBRARY=str(native_library()), EPMOE_UNTRIED_TORCH="")
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr
    warning = (
        "was tried with torch 2.11 to 2.14 (2.12 untested); "
        "this is torch 2.15.0 (EPMOE_UNTRIED_TORCH=1 silences this)"
    )
    assert run.stderr.count(warning) == 1

    silenced = new_python(
        "-c", NEWER_TORCH, EPMOE_LIBRARY=str(native_library()), EPMOE_UNTRIED_TORCH="1"
    )
    assert (silenced.returncode, silenced.stdout, silenced.stderr) == (0, "ok\n", "")


def test_a_library_that_does_not_load_is_one_sentence(tmp_path):
    (tmp_path / "libepmoe.so").write_text("no library")
    run = run_python("-c", NEWER_TORCH, EPMOE_LIBRARY=str(tmp_path / "libepmoe.so"))
    last = run.stderr.splitlines()[-1]
    assert last.startswith(
        f"epmoe.native.build.BuildError: the native library does not load: {tmp_path}/libepmoe.so: "
    )
    assert "file too short" in last
    assert last.endswith("; this is torch 2.15.0")


def test_missing_cuda_kernels_are_one_sentence(tmp_path):
    shutil.copy(native_library(), tmp_path)  # alone
    run = run_python(
        "-c",
        "from epmoe.native import ops; ops.load_cuda()",
        EPMOE_LIBRARY=str(tmp_path / "libepmoe.so"),
    )
    last = run.stderr.splitlines()[-1]
    assert last.startswith(
        f"RuntimeError: this installation of epmoe has no CUDA kernels ({tmp_path}/libepmoe_cuda.so"
    )
    assert last.endswith("put nvcc on the PATH and start again")


def test_kernels_load_where_torch_has_cuda():
    if torch.cuda.is_available() and shutil.which("nvcc"):
        assert ops.load_cuda() is None
    else:
        with pytest.raises(RuntimeError, match="has no CUDA"):
            ops.load_cuda()


def native_library() -> Path:
    """libepmoe.so as this process loads it."""
    return Path(os.environ.get("EPMOE_LIBRARY") or build.build())
