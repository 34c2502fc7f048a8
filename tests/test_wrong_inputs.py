"""Wrong files, flags and environments: each gets one short message, the right exit code, and leaves
nothing behind.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import run_python, start_server
from typer.testing import CliRunner

from epmoe.cli import app

SCREEN = 24  # lines
GOOD = """
model: {num_experts: 8, num_experts_per_tok: 2, hidden_size: 64, dtype: float32}
topology: {ep_size: 2}
capacity: {max_num_tokens_per_rank: 16}
"""
LAUGHS = (
    "a0: &a0 [x, x]\n"
    + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40))
    + "model: *a40\n"
)
RANKS = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
NVLINK = {"EPMOE_EXCHANGE__TRANSPORT": "nvlink"}
GOES_WITHOUT = "`--layer` goes without `--side`, `--payload` and `--eager`"
WIDTH = {"EPMOE_MODEL__INTERMEDIATE_SIZE": "64"}
LARGE = {"EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK": str(2**20), "EPMOE_MODEL__HIDDEN_SIZE": "65536"}
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


FILES: dict[str, tuple[str | bytes, str]] = {
    "empty.yaml": ("", "empty.yaml: `model` must be set"),
    "binary.yaml": (
        b"model\0\x01\x02",
        "binary.yaml: is not valid YAML: special characters are not allowed",
    ),
    "latin1.yaml": (
        "# gr\u00fc\u00dfe".encode("latin-1"),
        "is not a text file in UTF-8: byte 4 is 0xfc",
    ),
    "utf16.json": ("{}".encode("utf-16"), "utf16.json: is not a text file"),
    "bell.yaml": ("model: \a", "bell.yaml: is not valid YAML: special characters are not allowed"),
    "tab.yaml": ("model:\n\tnum_experts: 8\n", "line 2: found character"),
    "open.yaml": ("model: [\n", "open.yaml: is not valid YAML: line 2: "),
    "twice.yaml": (
        GOOD + "topology: {}\n",
        "key `topology` is given twice, on line 3 and on line 5",
    ),
    "within.yaml": (
        "topology:\n  ep_size: 4\n  ep_size: 4\n",
        "key `ep_size` is given twice, on line 2 and on line 3",
    ),
    "twice.json": (
        '{"topology": {"ep_size": 4, "ep_size": 2}}',
        "twice.json: key `ep_size` is given twice",
    ),
    "twice.toml": ("[topology]\nep_size = 4\nep_size = 4\n", "twice.toml: is not valid TOML"),
    "laughs.yaml": (LAUGHS, "`model` must be a mapping of keys, got [[["),
    "deep.yaml": ("[" * 100_000, "deep.yaml: is nested too deep"),
    "deep.json": ('{"a":' * 40_000, "deep.json: is nested too deep"),
    "list.yaml": ("- 1\n", "list.yaml: must hold sections such as `model:`"),
    "tag.yaml": (
        "model: !!python/object/apply:os.getpid []\n",
        "line 1: could not determine a constructor",
    ),
    "two.yaml": (GOOD + "---\nmodel: {}\n", "two.yaml: is not valid YAML: line 5: "),
    "comma.json": ('{"model": {},}', "comma.json: is not valid JSON: line 1: "),
    "section.yaml": (
        GOOD.replace("{ep_size: 2}", "2"),
        "`topology` must be a mapping of keys, got 2",
    ),
    "type.yaml": (
        GOOD.replace("hidden_size: 64", "hidden_size: '64'"),
        "`model.hidden_size` must be a valid integer",
    ),
    "key.yaml": (GOOD.replace("ep_size", "ep_sise"), "is not a known key; did you mean `ep_size`?"),
    "keys.json": (json.dumps({"model": {f"key{i}": i for i in range(5000)}}), "and 4,992 more"),
    "long.json": (json.dumps({"model": "x" * 200_000}), "must be a mapping of keys, got 'xxx"),
    "number.json": (
        '{"model": {"num_experts": ' + "9" * 5000 + "}}",
        "number.json: is not valid JSON: ",
    ),
    "suffix.ini": (
        GOOD,
        "suffix.ini: a configuration must end in .yaml, .yml, .toml, .json, got `.ini`",
    ),
}
FLAGS = [
    ("plan nowhere.yaml", "nowhere.yaml: no such configuration file"),
    (
        "run cpu_dem",
        "cpu_dem: is neither a file nor a ready configuration; there are cpu_bench, cpu_demo,",
    ),
    ("plan folder.yaml", "folder.yaml: cannot be read: Is a directory"),
    ("run .", ".: is a folder: give a file, or for a checkpoint `--nproc`"),
    ("ran good.yaml", "No such command 'ran'"),
    ("run", "Missing argument 'CONFIG'"),
    ("run good.yaml --colour red", "No such option: --colour"),
    ("run good.yaml --tokens -1", "Invalid value for '--tokens'"),
    (
        "run good.yaml --tokens 17",
        "`--tokens` must be at most `capacity.max_num_tokens_per_rank` = 16, got 17",
    ),
    ("run good.yaml --steps 0", "Invalid value for '--steps'"),
    ("run good.yaml --routing nonsense", "'nonsense' is not one of"),
    ("run good.yaml --nproc 0", "Invalid value for '--nproc'"),
    (
        "run good.yaml --nproc 65",
        "good.yaml with `--nproc` 65: `topology.ep_size` must be at most 64 on one node",
    ),
    ("run good.yaml --report nowhere/report.html", "`--report` must be in an existing folder"),
    ("run good.yaml --report report.pdf", "`--report` must end in .html or .htm, got report.pdf"),
    (
        "run good.yaml --report folder.html",
        "`--report` must be a file, but folder.html is a folder",
    ),
    (
        "run good.yaml --model llama",
        "`--model` 'llama' is not one of qwen3_moe, mixtral, deepseek_v3, gpt_oss,",
    ),
    ("bench good.yaml --json figures.yaml", "`--json` must end in .json, got figures.yaml"),
    (
        "bench good.yaml --json /proc/figures.json",
        "`--json` cannot be written: /proc/figures.json: ",
    ),
    ("bench good.yaml --plot plot.jpg", "`--plot` must end in .png or .svg or .pdf, got plot.jpg"),
    ("bench good.yaml --side fused", "`--side` is for GPUs"),
    ("bench good.yaml --routing adversarial", "`--routing` must not be adversarial"),
    *(
        (
            f"run good.yaml --model all {option}",
            f"`{option.split()[0]}` is for the rounds of the layer, and `--m",
        )
        for option in ("--routing uniform", "--tokens 8", "--balance")
    ),
    (
        "bench good.yaml --tokens 17",
        "`--tokens` must be at most `capacity.max_num_tokens_per_rank` = 16, got 17",
    ),
    (
        "bench good.yaml --layer",
        "`--layer`: `model.intermediate_size` must be set, to the width of the experts",
    ),
    ("bench good.yaml --layer --payload plain", GOES_WITHOUT, NVLINK),
    ("bench good.yaml --layer --eager", GOES_WITHOUT, NVLINK | WIDTH),
    (
        "bench good.yaml --payload fp8-out",
        "wants `model.hidden_size` to be a multiple of 128",
        NVLINK,
    ),
    ("bench good.yaml --side gloo", "'gloo' is not one of", NVLINK),
    ("bench good.yaml --eager", "`--eager` is for GPUs"),
    ("bench good.yaml --peers .", "`--peers` is for GPUs or for `--layer`"),
    ("bench good.yaml --layer --peers none", "`--peers`: none holds no driver", WIDTH),
    ("plan good.yaml --json plan.yaml", "`--json` must end in .json, got plan.yaml"),
]
ENVIRONMENT = [
    (
        "run good.yaml",
        "environment variable RANK must be a number, got 'abc'",
        RANKS | {"RANK": "abc"},
    ),
    (
        "run good.yaml",
        "environment variable RANK must be a number, got '-1'",
        RANKS | {"RANK": "-1"},
    ),
    ("run good.yaml", "environment variable RANK must be a number, got ''", RANKS | {"RANK": ""}),
    (
        "run good.yaml",
        "RANK is set in the environment, but WORLD_SIZE is not: unset RANK",
        {"RANK": "0"},
    ),
    *(
        ("bench good.yaml", f"but {name} is not: unset RANK", RANKS | {"RANK": "0", name: ""})
        for name in RANKS
    ),
    ("run good.yaml", "must be a number, got 'no'", RANKS | {"RANK": "0", "MASTER_PORT": "no"}),
    (
        "run good.yaml",
        "LOCAL_RANK must be a number, got 'a'",
        RANKS | {"RANK": "0", "LOCAL_RANK": "a"},
    ),
    ("run good.yaml", "RANK must be below WORLD_SIZE, 2, got 2", RANKS | {"RANK": "2"}),
    ("run good.yaml", "but torchrun started 3 processes", RANKS | {"RANK": "0", "WORLD_SIZE": "3"}),
    (
        "plan good.yaml",
        "`topology.ep_size` must be a valid integer",
        {"EPMOE_TOPOLOGY__EP_SIZE": "many"},
    ),
    ("bench good.yaml", "nvlink wants a GPU for each of 2 ranks", NVLINK),
    ("run good.yaml", "lower `capacity.max_num_tokens_per_rank`", LARGE),
]


def children() -> list[str]:
    """Process ids of this process's children."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    """Runs the test in a folder of its own. Afterwards there are the same files and processes as
    before.
    """
    start_server()
    for variable in [name for name in os.environ if name in LAUNCHER or name.startswith("EPMOE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(GOOD)
    for folder in ("folder.yaml", "folder.html"):
        Path(folder).mkdir()
    before = set(children())
    yield
    # torch's cache may stay.
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")}
    assert left - set(FILES) == {"folder.html", "folder.yaml", "good.yaml"}
    assert set(children()) <= before


def refused(command: str, says: str, environment: dict[str, str] | None = None) -> None:
    """Types `epmoe COMMAND`: exit code 2, and `says` in an answer of one screen, with the usage at
    most once.
    """
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "160"} | (environment or {}))
    assert isinstance(result.exception, SystemExit), f"{result.exception!r}\n{result.output}"
    check(result.exit_code, result.output, says)


def check(code: int, output: str, says: str) -> None:
    assert code == 2, output
    assert says in " ".join(output.split()), output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= SCREEN, output
    assert max(map(len, output.splitlines())) < 600
    assert output.count("Usage:") <= 1 and output.count("epmoe: ") <= 1


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file(name):
    content, says = FILES[name]
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(f"plan {name}", says)


@pytest.mark.parametrize("wrong", [*FLAGS, *ENVIRONMENT], ids=lambda wrong: wrong[1])
def test_wrong_flags_and_environments(wrong):
    refused(*wrong)


def test_torch_without_distributed(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    refused("run good.yaml", "this build of torch has no torch.distributed with gloo")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "checkpoint: has no config.json or no weights"),
        (
            {"config.json": '{"model_type": "mixtral"}'},
            "checkpoint: has no config.json or no weights (*.safetensors)",
        ),
        ("{", "checkpoint: transformers cannot make the model: "),
        ('{"model_type": "nonsense"}', "transformers cannot make the model: "),
        (
            '{"model_type": "llama", "num_hidden_layers": 1}',
            "LlamaForCausalLM has no experts that transformers can spr",
        ),
        (
            '{"model_type": "mixtral", "num_local_experts": 7}',
            "its experts must divide evenly over 2 ranks, got [7]",
        ),
    ],
    ids=["empty", "no weights", "broken", "unknown", "dense", "uneven"],
)
def test_a_wrong_checkpoint(files, says, tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "checkpoint"
    folder.mkdir()
    for name, content in (
        files if isinstance(files, dict) else {"config.json": files, "model.safetensors": ""}
    ).items():
        (folder / name).write_text(content)
    refused(f"run good.yaml --model {folder}", says)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"EPMOE_LIBRARY": "/nowhere/libepmoe.so"}, "the native library does not load"),
        (
            {"EPMOE_CACHE_DIR": "/proc/nowhere"},
            "set EPMOE_CACHE_DIR to a folder that can be written",
        ),
    ],
    ids=["library", "cache"],
)
def test_a_library_that_is_not_there(variables, says):
    """It takes a process of its own, because the library of this one is loaded."""
    run = run_python("-m", "epmoe", "run", Path("good.yaml").absolute(), **variables)
    check(run.returncode, run.stdout + run.stderr, says)


def test_of_several_ranks_only_one_prints_the_usage():
    for arguments in ("run", "run good.yaml --steps 0", "ran", "run nowhere.yaml"):
        result = CliRunner().invoke(app, arguments.split(), env=RANKS | {"RANK": "1"})
        assert (result.exit_code, result.output) == (2, ""), arguments
