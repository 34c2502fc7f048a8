"""The package as users install it: its version, the contents of the wheel, and what works without
the extras.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from launched import ROOT, run_fresh, run_python
from typer.testing import CliRunner

import epmoe
from epmoe.__main__ import main
from epmoe.cli import app
from epmoe.native import build
from epmoe.native.package import EXTRAS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("epmoe", "csrc", "configs")


def without(packages: list[str], program: str) -> subprocess.CompletedProcess[str]:
    """Run `program` in an interpreter in which `packages` cannot be imported."""
    # to None: an import of it fails
    block = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))"
    return run_python("-c", f"{block}\n{program}")


def distribution(kind: str, tree: Path) -> Path:
    """The sdist or wheel of a tree, built as pip does. Without torch, so that it
    compiles nothing.
    """
    program = (
        f"import os; os.chdir({str(tree)!r}); from setuptools import build_meta; "
        f"build_meta.build_{kind}('dist')"
    )
    run = without(["torch"], program)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = (tree / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the distributions are made of."""
    tree = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "_native")
        )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(distribution("wheel", tree))


def test_the_wheel_holds_everything_that_is_read_at_run_time(tree, wheel):
    names = set(wheel.namelist())
    for folder in FOLDERS:
        inside = "" if folder == "epmoe" else "epmoe/"
        for path in (path for path in (tree / folder).rglob("*") if path.is_file()):
            assert f"{inside}{path.relative_to(tree).as_posix()}" in names
    assert {"epmoe/py.typed", "epmoe/configs/cpu_demo.yaml", "epmoe/csrc/cuda_api.cu"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]


def test_a_wheel_without_the_library_is_for_any_platform(wheel):
    assert Path(str(wheel.filename)).name == f"epmoe-{epmoe.__version__}-py3-none-any.whl"
    assert not [name for name in wheel.namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_the_wheel_of_an_sdist_is_the_wheel_of_the_tree(tree, wheel, tmp_path):
    with tarfile.open(distribution("sdist", tree)) as sdist:
        sdist.extractall(tmp_path)
    (unpacked,) = tmp_path.iterdir()
    again = zipfile.ZipFile(distribution("wheel", unpacked))
    assert {entry.filename: entry.CRC for entry in again.infolist()} == {
        entry.filename: entry.CRC for entry in wheel.infolist()
    }


def test_one_version_everywhere(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert Parser().parsestr(wheel.read(metadata).decode())["Version"] == epmoe.__version__
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"epmoe {epmoe.__version__}\n")


def test_every_optional_package_is_in_its_extra():
    for package, extra in EXTRAS.items():
        required = [
            requirement.split(">=")[0] for requirement in PROJECT["optional-dependencies"][extra]
        ]
        assert package in required or package == "click", "typer brings click"
        assert package not in [
            requirement.split(">=")[0] for requirement in PROJECT["dependencies"]
        ]


def test_the_wheel_needs_no_extra(wheel, tmp_path):
    """Neither for its version, nor for a ready configuration, nor for that of a model."""
    wheel.extractall(tmp_path)
    keys = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"} | keys))
    # A new interpreter, in which no extra can be imported.
    run = run_fresh(
        f"import sys; sys.modules.update(dict.fromkeys({list(EXTRAS)!r}))\n"
        f"import os; os.chdir({str(tmp_path)!r}); sys.path.insert(0, os.getcwd()); import epmoe\n"
        "assert epmoe.__file__ == os.path.abspath('epmoe/__init__.py') and "
        "epmoe.EPConfig.load('cpu_demo')\n"
        "print(epmoe.__version__, epmoe.EPConfig.from_hf('.', ep_size=4).model.intermediate_size)"
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [epmoe.__version__, "96"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_library_takes_of_torch_what_its_stable_abi_has():
    """So one wheel serves every torch from the oldest on. Names of C++ would be those of one torch.

    System libraries have versions behind their names."""
    path = build.ready() or build.build()
    command = ["nm", "--dynamic", "--undefined-only", str(path)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines() if line.split()[-2] == "U"]
    of_torch = [name for name in names if "@" not in name]
    assert "aoti_torch_get_data_ptr" in of_torch
    assert not [name for name in of_torch if not name.startswith(("aoti_torch_", "torch_"))]
    (target,) = [flag for flag in build.CXX_FLAGS if "TORCH_TARGET_VERSION" in flag]
    major, minor = build.TRIED_TORCH[0]
    assert int(target.partition("=")[2], 16) == (major << 56) + (minor << 48)


def test_a_release_is_tried_with_every_torch_that_the_makefile_names():
    """Its workflow makes what is there to make, for the GPUs whose kernels `make` compiles."""
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    # Targets and versions of torch.
    jobs = yaml.safe_load(text)["jobs"]
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)$", text, re.MULTILINE)) == {"wheel-for-gpus"} <= targets
    (torches,) = re.findall(r"^WHEEL_TORCHES \?= (.*)", makefile, re.MULTILINE)
    assert jobs["try"]["strategy"]["matrix"]["torch"] == torches.split()
    assert [build.problem_with_torch(version) for version in torches.split()] == [None] * 3

    # Architectures.
    (capabilities,) = re.findall(r"export TORCH_CUDA_ARCH_LIST \?= (.*)", makefile)
    (numbers,) = re.findall(r"foreach number,([\d ]+),", makefile)
    assert capabilities.replace(".", "").split(";") == numbers.split()
    assert all(f"sm_{number}" in text for number in numbers.split())


@pytest.mark.parametrize("lacks", ["nothing", "auditwheel"])
def test_a_wheel_is_made_with_the_packages_at_hand(lacks, tmp_path):
    """`make wheel` sets up an environment, with a torch of its own, only where a package lacks."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    says = f"""#!{sys.executable}
import importlib.util, sys
from pathlib import Path
with open({str(tmp_path / "log")!r}, "a") as log:
    print(*sys.argv[1:3], file=log)
if sys.argv[1] == "-c":
    importlib.util.find_spec = lambda name: None if name == {lacks!r} else name
    exec(sys.argv[2])
if sys.argv[1:3] == ["-m", "build"]:
    Path("build/wheel").mkdir(parents=True)
    Path("build/wheel/epmoe.tar.gz").touch()
    Path("dist").mkdir()
"""
    # Tools that say how they were called, of which one package may be absent.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python3", "auditwheel", "patchelf"):
        (tools / name).write_text(says)
        (tools / name).chmod(0o755)
    run = subprocess.run(
        ["make", "wheel"],
        cwd=tmp_path,
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    # An environment is set up only where one is.
    log = (tmp_path / "log").read_text()
    assert ("-m venv" in log) == (lacks != "nothing"), run.stdout + run.stderr
    assert ("-m build" in log) == (lacks == "nothing"), run.stdout + run.stderr
    assert (run.returncode == 0) == (lacks == "nothing"), run.stdout + run.stderr


def test_an_import_brings_no_compiler():
    """torch._dynamo takes longer than all of epmoe, and FSDP longer than all of a command."""
    slow = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]
    run = run_fresh(f"import sys, epmoe, epmoe.cli; print([x for x in {slow} if x in sys.modules])")
    assert run.stdout == "[]\n", run.stderr


def test_the_command_line_names_its_extra():
    run = without(
        ["rich"], "import runpy; runpy.run_module('epmoe', run_name='__main__', alter_sys=True)"
    )
    assert run.returncode == 2
    assert run.stderr == "epmoe: this command needs rich: pip install 'epmoe[cli]'\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_one_rank_names_the_extra(rank, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "epmoe.cli")
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setenv("RANK", str(rank))
    module, function = PROJECT["scripts"]["epmoe"].split(":")
    with pytest.raises(SystemExit) as stopped:
        getattr(importlib.import_module(module), function)()
    assert stopped.value.code == 2
    assert ("epmoe[cli]" in capsys.readouterr().err) == (rank == 0)


def test_another_missing_module_is_an_exception(monkeypatch):
    monkeypatch.delitem(sys.modules, "epmoe.cli")
    monkeypatch.setitem(sys.modules, "epmoe.cli.plan", None)
    with pytest.raises(ModuleNotFoundError, match="epmoe.cli.plan"):
        main()


@pytest.mark.parametrize(
    ("command", "option", "file", "package"),
    [("run", "--report", "report.html", "jinja2"), ("bench", "--plot", "plot.svg", "matplotlib")],
)
def test_an_output_names_its_extra_before_the_run(
    command,
    option,
    file,
    package,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(app, [command, "cpu_demo", option, str(tmp_path / file)])
    assert result.exit_code == 2
    assert (
        result.output
        == f"epmoe: `{option}` needs {package}: pip install 'epmoe[{EXTRAS[package]}]'\n"
    )


def test_a_command_names_the_extra_of_a_late_import(monkeypatch):
    def needs_matplotlib(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.figure")

    monkeypatch.setattr("epmoe.cli.doctor.diagnose", needs_matplotlib)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert result.output == "epmoe: this command needs matplotlib: pip install 'epmoe[bench]'\n"
