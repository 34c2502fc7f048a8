"""The build of the native library: what makes it anew, what it is compiled for, and what a user reads when it fails."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launched import run_fresh, run_python

from epmoe.native import build, ops

NVCC = "nvcc: release 13.0, V13.0.88"


@pytest.fixture
def toolchain(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Tools and their versions, to be changed by a test. Commands run nothing: their output is their command line."""
    tools = {"nvcc": NVCC, "c++": "g++ 12.2"}
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}" if tool in tools else None)
    monkeypatch.setattr(build, "_version", tools.__getitem__)
    monkeypatch.setattr(build, "_run", lambda *words: Path(words[words.index("-o") + 1]).write_text(" ".join(words)))
    return tools


def use_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capabilities[gpu])


def links(library: Path) -> tuple[str, str]:
    """The command that linked each of the two libraries in a folder."""
    return library.read_text(), library.with_name(build.CUDA_LIBRARY).read_text()


def recorded_commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that builds run from now on."""
    commands, run = list[tuple[str, ...]](), build._run
    monkeypatch.setattr(build, "_run", lambda *words: (commands.append(words), run(*words)))
    return commands


def compiled(commands: list[tuple[str, ...]]) -> set[str]:
    """The sources that the commands compile; forgets the commands."""
    sources = {words[-1] for words in commands if "-c" in words}
    commands.clear()
    return sources


def sources_in(folder: Path, *patterns: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for pattern in patterns for path in folder.rglob(pattern)}


def users_of(header: str) -> set[str]:
    """The sources that the compiler says include a header of csrc."""
    command = ["c++", "-std=c++20", "-MM", "-I.", f"-isystem{Path(torch.__file__).parent / 'include'}"]
    sources = sources_in(build.csrc(), "*.cpp")
    rules = [subprocess.run([*command, s], cwd=build.csrc(), capture_output=True, text=True).stdout for s in sources]
    return {source for source, rule in zip(sources, rules, strict=True) if re.search(rf"\b{header}\b", rule)}


def test_only_what_an_edit_reaches_is_compiled(toolchain, tmp_path, monkeypatch):
    """The objects of the other sources are those of the last build."""
    sources = shutil.copytree(build.csrc(), tmp_path / "csrc")
    users = users_of("cpu/convert.h")
    monkeypatch.setattr(build, "csrc", lambda: sources)
    commands = recorded_commands(monkeypatch)
    first = build.build(tmp_path, portable=True)
    assert compiled(commands) == sources_in(sources, "*.cpp", "*.cu")
    for file, reached in (
        ("ops.cpp", {"ops.cpp"}),
        ("cuda/rail/sum.cu", {"cuda/rail/sum.cu"}),
        ("cpu/convert.h", users),
    ):
        text = (sources / file).read_text()
        (sources / file).write_text(f"{text}// edited\n")
        assert build.build(tmp_path, portable=True) != first
        assert compiled(commands) == reached != set()
        (sources / file).write_text(text)
        assert build.build(tmp_path, portable=True) == first and not commands


def test_an_object_of_a_source_that_changes_meanwhile_is_not_kept(toolchain, tmp_path, monkeypatch):
    sources = shutil.copytree(build.csrc(), tmp_path / "csrc")
    monkeypatch.setattr(build, "csrc", lambda: sources)
    run = build._run

    def edit_meanwhile(*words: str) -> None:
        run(*words)
        if words[-1] == "ops.cpp":
            (sources / "ops.cpp").write_text("// edited")

    monkeypatch.setattr(build, "_run", edit_meanwhile)
    with pytest.raises(build.BuildError, match=r"csrc/ops\.cpp, or what it includes, has changed"):
        build.build(tmp_path, portable=True)
    assert not list((tmp_path / "objects").glob("ops-*.o"))


def test_kernels_are_built_anew_for_other_gpus_or_another_nvcc(toolchain, tmp_path, monkeypatch):
    libraries = [build.build(tmp_path, portable=True)]
    for change in (
        lambda: monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0"),
        lambda: monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX"),
        lambda: toolchain.update({"nvcc": "nvcc: release 13.1"}),
        lambda: toolchain.update({"c++": "g++ 13.1"}),
        lambda: monkeypatch.setattr(build, "CUDA_FLAGS", ("-O2",)),
    ):
        change()
        libraries.append(build.build(tmp_path, portable=True))
    assert len({library.parent for library in libraries}) == len(libraries)
    assert len({links(library)[1] for library in libraries}) == len(libraries)
    assert build.build(tmp_path, portable=True) == libraries[-1]


def test_another_spelling_of_the_same_gpus_builds_nothing(toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0")
    library = build.build(tmp_path, portable=True)
    for spelling in ("10.0 9.0 8.0", "8.0, 9.0,10.0,9.0", "7.5;8.0;9.0;10.0", ""):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", spelling)
        assert build.build(tmp_path, portable=True) == library


def test_another_torch_builds_the_operators_anew_and_not_the_kernels(toolchain, tmp_path, monkeypatch):
    before = build.build(tmp_path, portable=True)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    after = build.build(tmp_path, portable=True)
    assert before != after
    kernels = [library.with_name(build.CUDA_LIBRARY) for library in (before, after)]
    assert kernels[0].samefile(kernels[1])


def test_the_kernels_get_the_flags_that_their_results_rest_on(toolchain, tmp_path, monkeypatch):
    commands = recorded_commands(monkeypatch)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    build.build(tmp_path, ("EPMOE_MUTATE_SORT_GUARD",), portable=True)
    compiles = [words for words in commands if words[0] == "nvcc" and "-c" in words]
    assert {words[-1] for words in compiles} == sources_in(build.csrc(), "*.cu")
    for words in compiles:
        assert {"-O3", "--fmad=false", "-lineinfo", "-std=c++20"} <= set(words)
        assert ("-DEPMOE_MUTATE_SORT_GUARD" in words) == (words[-1] == "cuda/local/permute.cu")
        assert {word for word in words if "CUDA_NO" in word} == {
            f"-D__CUDA_NO_{name}__"
            for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
        }
        hopper = "90a" if words[-1].startswith("cuda/hopper/") else "90"
        assert [word for word in words if word.startswith("-gencode")] == [
            "-gencode=arch=compute_80,code=sm_80",
            f"-gencode=arch=compute_{hopper},code=sm_{hopper}",
            f"-gencode=arch=compute_{hopper},code=compute_{hopper}",
        ]
    (link,) = [words for words in commands if words[0] == "nvcc" and "-c" not in words]
    assert "-cudart=static" in link and not [word for word in link if "torch" in word or "cudart=shared" in word]


def test_first_use_builds_for_the_gpus_that_torch_sees(toolchain, tmp_path, monkeypatch):
    use_gpus(monkeypatch, (9, 0), (8, 0), (9, 0))
    assert build.architectures() == ("8.0", "9.0")
    assert "code=sm_80 -gencode=arch=compute_90,code=sm_90" in links(build.build(tmp_path))[1]


@pytest.mark.parametrize("gpus", [(), ((7, 5),)], ids=["no GPU", "an old GPU"])
def test_a_machine_without_a_gpu_for_the_kernels_has_those_of_the_cpu(gpus, toolchain, tmp_path, monkeypatch):
    """A login node, a container or CI, where torch and nvcc are those of the machines with GPUs."""
    use_gpus(monkeypatch, *gpus)
    library = build.build(tmp_path)
    assert library.exists() and not library.with_name(build.CUDA_LIBRARY).exists()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert links(build.build(tmp_path))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    use_gpus(monkeypatch, (9, 0))
    with_gpu = build.build(tmp_path)
    assert with_gpu != library and links(with_gpu)


@pytest.mark.parametrize("missing", ["nvcc", "CUDA in torch"])
def test_first_use_without_cuda_builds_the_cpu_kernels(missing, toolchain, tmp_path, monkeypatch):
    if missing == "nvcc":
        use_gpus(monkeypatch)
        del toolchain["nvcc"]
    else:
        monkeypatch.setattr(torch.version, "cuda", None)
    library = build.build(tmp_path)
    assert library.exists() and not library.with_name(build.CUDA_LIBRARY).exists()


@pytest.mark.parametrize(
    ("listed", "sentence"),
    [
        ("Hopper", "TORCH_CUDA_ARCH_LIST must be like `8.0;9.0+PTX`, got 'Hopper'"),
        ("9.0;sm_90", "got 'sm_90' in '9.0;sm_90'"),
        ("7.0 7.5", "epmoe needs GPUs of compute capability 8.0 or newer, got 7.0, 7.5"),
    ],
)
def test_an_architecture_list_that_cannot_be_used_is_named(listed, sentence, toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    with pytest.raises(build.BuildError, match=re.escape(sentence)):
        build.build(tmp_path, portable=True)


def test_without_a_compiler_the_message_names_one(toolchain, tmp_path):
    del toolchain["c++"], toolchain["nvcc"]
    with pytest.raises(build.BuildError, match=re.escape("`c++` is not on the PATH; install g++ ≥ 11 or set CXX")):
        build.build(tmp_path)


def test_an_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "cat")  # it knows none of the options
    with pytest.raises(build.BuildError, match=r"did not compile:\ncat -std=c\+\+20 (.|\n)*\ncat: "):
        build.build(tmp_path)


def test_a_build_that_was_killed_is_started_over(toolchain, tmp_path):
    library = build.build(tmp_path, portable=True)
    library.unlink()
    library.with_name("libepmoe.so.new").write_text("half")
    half = next((tmp_path / "objects").glob("ops-*.o"))
    half.rename(f"{half}.new")
    assert build.build(tmp_path, portable=True) == library
    assert sorted(path.name for path in library.parent.iterdir()) == [
        "builder.lock", "libepmoe.so", build.CUDA_LIBRARY,
    ]  # fmt: skip


def test_a_build_of_another_process_is_waited_for(toolchain, tmp_path, monkeypatch):
    library = build.build(tmp_path, portable=True)
    library.unlink()
    monkeypatch.setattr(build, "LOCK_TIMEOUT_S", 0.3)
    with open(library.parent / "builder.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(build.BuildError, match="another process has been building for"):
            build.build(tmp_path, portable=True)


def test_a_cache_that_cannot_be_written_names_the_variable(toolchain, monkeypatch):
    monkeypatch.setenv("EPMOE_CACHE_DIR", "/dev/null")
    with pytest.raises(build.BuildError, match="set EPMOE_CACHE_DIR to a folder that can be written"):
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


@pytest.mark.parametrize("which", ["", "epmoe", "epmoe/KEY", "epmoe/objects", "epmoe/KEY/libepmoe.so"])
@pytest.mark.parametrize(("mode", "who"), [(0o777, "every user"), (0o775, "group 54321")])
def test_a_cache_that_others_can_write_into_is_refused(cache, which, mode, who):
    """What lies there may be another user's code."""
    library = build.build(portable=True)
    path = cache / which.replace("KEY", library.parent.name)
    own_group = path.stat().st_gid
    if "group" in who:
        if os.geteuid():
            pytest.skip("needs root")
        os.chown(path, -1, 54321)
    path.chmod(mode)
    if which == "epmoe/objects":
        library.unlink()  # otherwise no object is looked at
    refused(str(path), f"can be written by {who}", "remove it" if which else f"run `chmod go-w {path}`")
    os.chown(path, -1, own_group)
    path.chmod(0o755)
    assert build.build(portable=True) == library


def test_a_group_of_one_may_write(cache, monkeypatch):
    """Each user has a group, and the umask is 002."""
    library = build.build(portable=True)
    for path in (cache, cache / "epmoe", library.parent, library):
        path.chmod(0o775)
    assert build.build(portable=True) == library
    names = SimpleNamespace(pw_name="ann"), ("ann", "x", 7, ["ann"])
    monkeypatch.setattr(build.pwd, "getpwuid", lambda user: names[0])
    monkeypatch.setattr(build.grp, "getgrgid", lambda group: names[1])
    found = os.stat_result((0o40775, 0, 0, 1, 7, 7, 0, 0, 0, 0))
    assert build._writers(found) is None
    names[1][3].append("bob")
    assert build._writers(found) == "group ann"


@pytest.mark.parametrize("which", ["epmoe", "epmoe/KEY", "epmoe/KEY/libepmoe.so"])
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_another_user_owns_is_refused(cache, which):
    library = build.build(portable=True)
    path = cache / which.replace("KEY", library.parent.name)
    os.chown(path, 54321, -1)
    refused(str(path), "belongs to user 54321")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
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
    (library.parent / "builder.lock").unlink()
    (library.parent / "builder.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(build.BuildError, match="cannot be built"):
        build.build(portable=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("version", "is_tried"),
    [("2.10.1", False), ("2.11.0+cu130", True), ("2.13.0+cpu", True), ("2.14.0a0+git1", False), ("3.0.0", False)],
)
def test_a_torch_that_was_never_tried_is_said_to_be(version, is_tried):
    sentence = f"this epmoe was tried with torch 2.11 to 2.13 (2.12 untested); this is torch {version}"
    assert build.problem_with_torch(version) == (None if is_tried else sentence)


NEWER_TORCH = (
    "import torch; torch.__version__ = '2.14.0'; from epmoe.native import ops; ops.route; ops.permute; print('ok')"
)


def test_a_newer_torch_is_one_warning():
    run = run_fresh(NEWER_TORCH, EPMOE_LIBRARY=str(native_library()))
    assert (run.returncode, run.stdout) == (0, "ok\n"), run.stderr
    assert run.stderr.count("was tried with torch 2.11 to 2.13 (2.12 untested); this is torch 2.14.0") == 1
    run = run_fresh("import torch; torch.__version__ = '2.14.0'; import epmoe", EPMOE_UNTRIED_TORCH="")
    assert run.stderr.count("this is torch 2.14.0 (EPMOE_UNTRIED_TORCH=1 silences this)") == 1
    silenced = run_fresh(NEWER_TORCH, EPMOE_LIBRARY=str(native_library()), EPMOE_UNTRIED_TORCH="1")
    assert (silenced.returncode, silenced.stdout, silenced.stderr) == (0, "ok\n", "")


def test_a_library_that_does_not_load_is_one_sentence(tmp_path):
    (tmp_path / "libepmoe.so").write_text("no library")
    run = run_python("-c", NEWER_TORCH, EPMOE_LIBRARY=str(tmp_path / "libepmoe.so"))
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"epmoe.native.build.BuildError: the native library does not load: {tmp_path}/libepmoe.so: ")
    assert "file too short" in last
    assert last.endswith("; this is torch 2.14.0")


def test_missing_cuda_kernels_are_one_sentence(tmp_path):
    shutil.copy(native_library(), tmp_path)  # alone
    run = run_python("-c", "from epmoe.native import ops; ops.load_cuda()", EPMOE_LIBRARY=str(tmp_path / "libepmoe.so"))
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"RuntimeError: this installation of epmoe has no CUDA kernels ({tmp_path}/libepmoe_cuda.so")
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
