"""Commands that run in one process, and their messages for mistakes of the user."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import ROOT, TIMEOUT_S, run_python
from rich.table import Table
from torch.distributed.run import parse_args
from typer.testing import CliRunner, Result

from epmoe import __version__
from epmoe.cli import app, simulated
from epmoe.cli.console import console, human_bytes, human_seconds, print_table, sparkline
from epmoe.config.config import EPConfig
from epmoe.exchange.memory import MemoryPlan

DEMO = ROOT / "configs" / "cpu_demo.yaml"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(console, "quiet", False)


def epmoe(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "120"}
    )


def write(tmp_path: Path, **changes: dict) -> Path:
    sections = {
        "model": {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "hidden_size": 64,
            "dtype": "float32",
        },
        "topology": {"ep_size": 2},
        "capacity": {"max_num_tokens_per_rank": 16},
    }
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {name: sections.get(name, {}) | changes.get(name, {}) for name in sections | changes}
        )
    )
    return path


def test_the_command_line_has_its_commands_a_schema_and_a_version():
    shown = epmoe("--help").output
    assert all(
        command in shown for command in ("run", "plan", "balance", "doctor", "schema", "bench")
    )
    run = run_python("-m", "epmoe", "schema")
    assert run.returncode == 0 and json.loads(run.stdout) == EPConfig.model_json_schema(), (
        run.stderr
    )
    assert epmoe("--version").output == f"epmoe {__version__}\n"


@pytest.mark.parametrize("command", [[], ["run"], ["plan"], ["balance"], ["doctor"], ["bench"]])
def test_the_help_shows_flags_as_flags(command):
    """They take no value."""
    shown = epmoe(*command, "--help").output
    assert "--help" in shown and "bool" not in shown


def test_plan_shows_the_bytes_of_the_memory_plan():
    result = epmoe("plan", DEMO)
    plan = MemoryPlan.build(EPConfig.load(DEMO))
    assert result.exit_code == 0
    assert f"{plan['recv.x'].nbytes:,}" in result.output
    assert f"{plan.window_bytes:,}" in result.output
    assert f"{4 * plan.total_bytes:,}" in result.output  # four equal ranks


def test_plan_as_json_counts_every_rank_of_an_uneven_placement(tmp_path):
    """It is written to a file, or printed."""
    path = write(tmp_path, model={"num_experts": 7})
    assert epmoe("plan", path, "--json", tmp_path / "plan.json").output == ""
    shown = json.loads(epmoe("plan", path, "--json", "-").output)
    assert json.loads((tmp_path / "plan.json").read_text()) == shown
    plans = [MemoryPlan.build(EPConfig.load(path), rank) for rank in (0, 1)]
    assert [rank["total_bytes"] for rank in shown["ranks"]] == [plan.total_bytes for plan in plans]
    assert shown["node_bytes"] == sum(plan.total_bytes for plan in plans)
    assert [b["nbytes"] for b in shown["ranks"][1]["buffers"]] == [
        b.nbytes for b in plans[1].buffers
    ]


@pytest.mark.parametrize("command", ["plan", "run", "doctor", "bench"])
def test_wrong_key_gives_one_message_and_exit_code_2(tmp_path, command):
    result = epmoe(command, write(tmp_path, topology={"ep_sise": 2}))
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "`topology.ep_sise` is not a known key; did you mean `ep_size`?" in result.output


@pytest.mark.parametrize("command", ["run", "bench"])
def test_without_torchrun_a_command_starts_its_ranks(command, monkeypatch):
    started = []

    def start(config: EPConfig, arguments: list[str]) -> int:
        started.append((config.topology.ep_size, arguments))
        return 1

    monkeypatch.setattr(sys.modules[f"epmoe.cli.{command}"], "start_ranks", start)
    assert epmoe(command, DEMO).exit_code == 1
    assert epmoe(command, "cpu_demo", "--nproc", 2, "--tokens", 8).exit_code == 1
    assert started == [
        (4, [command, str(DEMO)]),
        (2, [command, "cpu_demo", "--nproc", "2", "--tokens", "8"]),
    ]


def launched(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """This process is rank 0 of a launcher; the port is a free one."""
    for variable, value in {
        "RANK": 0,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }.items():
        monkeypatch.setenv(variable, str(value))


@pytest.mark.parametrize(
    ("command", "option"), [("run", []), ("bench", ["--nproc", "4"]), ("bench", ["--nproc=4"])]
)
def test_wrong_number_of_processes_is_an_error(command, option, monkeypatch):
    typed = [command, "my config.yaml", *option]
    monkeypatch.setattr(sys, "argv", ["epmoe", *typed])
    launched(monkeypatch, 3)
    result = epmoe(command, DEMO)
    assert result.exit_code == 2
    assert "`topology.ep_size` is 4, but torchrun started 3 processes" in result.output
    # The advice is a command that torchrun takes.
    torchrun, *arguments = shlex.split(result.output.splitlines()[-1])
    advised = parse_args(arguments)  # `--nproc` is ambiguous to torchrun without `--`
    assert (torchrun, advised.training_script, advised.training_script_args) == (
        "torchrun",
        "epmoe",
        typed,
    )
    assert advised.standalone and advised.nproc_per_node == "4" and advised.module
    # Over two nodes it has a rendezvous.
    monkeypatch.setenv("EPMOE_TOPOLOGY__RANKS_PER_NODE", "2")
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert f"torchrun --nnodes 2 {rendezvous} --nproc-per-node 2 -m " in epmoe(command, DEMO).output


def test_a_full_disk_is_no_fault_of_the_library():
    command = [sys.executable, "-m", "epmoe", "run", DEMO]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S
        )
    assert (ended.returncode, ended.stderr) == (1, "epmoe: [Errno 28] No space left on device\n")


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 1)


def test_no_tokens_are_no_passed_check(one_rank, tmp_path):
    path = write(tmp_path, topology={"ep_size": 1})
    result = epmoe("run", path, "--steps", 1, "--tokens", 0)
    assert result.exit_code == 0, result.output
    assert (
        "nothing was checked: no rank brought tokens" in result.output and "✓" not in result.output
    )
    result = epmoe("bench", path, "--repeats", 1, "--tokens", 0)
    assert result.exit_code == 0, result.output
    assert "T = 0: no tokens, so nothing was checked" in result.output
    result = epmoe("bench", path, "--repeats", 1, "--tokens", 1, "--json", "-")
    assert json.loads(result.stdout)["benchmark"] == "gloo", "the figures alone"


def test_a_failed_check_is_exit_code_1(one_rank, tmp_path, monkeypatch):
    monkeypatch.setitem(simulated.TOLERANCE, "float32", 0.0)
    result = epmoe("run", write(tmp_path, topology={"ep_size": 1}), "--steps", 1)
    assert result.exit_code == 1 and "✗ error against the dense fp64 reference" in result.output


def test_a_benchmark_without_a_terminal_tells_of_each_case(one_rank, tmp_path, capfd):
    path = write(tmp_path, topology={"ep_size": 1}, model={"intermediate_size": 64})
    result = epmoe(
        "bench", path, "--layer", "--tokens", 1, "--tokens", 16, "--repeats", 1, "--json", "-"
    )
    assert result.exit_code == 0, result.output
    lines = re.findall(
        r"^ *[\d.]+ s  (\d+) tokens, plain: layer [\d.]+ µs, ", capfd.readouterr().err, re.MULTILINE
    )
    assert lines == ["1", "16"]
    assert json.loads(result.stdout)["benchmark"] == "layer"


def test_the_host_is_timed_beside_a_linear_layer(one_rank, tmp_path):
    path = write(tmp_path, topology={"ep_size": 1}, model={"intermediate_size": 64})
    result = epmoe("bench", path, "--host", "--tokens", 1, "--json", "-")
    assert result.exit_code == 0, result.output
    rows = {each["side"]: each for each in json.loads(result.stdout)["results"]}
    assert list(rows) == [
        f"{module}, {use}"
        for module in ("MoELayer", "nn.Linear")
        for use in ("serving", "training")
    ]
    assert rows["nn.Linear, serving"]["operators"] == 1
    assert all(row["forward"] > 0 and row["launches"] is None for row in rows.values())


def test_the_host_needs_the_width_of_the_experts(one_rank, tmp_path):
    path = write(tmp_path, topology={"ep_size": 1}, model={"intermediate_size": None})
    result = epmoe("bench", path, "--host", "--tokens", 1)
    assert result.exit_code != 0 and "`model.intermediate_size` must be set" in result.output


@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_other_dtypes_and_copies(one_rank, tmp_path, payload):
    sections = {"topology": {"ep_size": 1}, "model": {"hidden_size": 128, "dtype": "bfloat16"}}
    placement = {"strategy": "round_robin", "num_redundant_experts": 3}
    path = write(
        tmp_path,
        **sections,
        placement=placement,
        exchange={"payload": payload, "combine_payload": payload},
    )
    result = epmoe("run", path, "--steps", 2, "--tokens", 5)
    assert result.exit_code == 0 and "✓ error against" in result.output, result.output
    assert "travelled: 0 rows between ranks (0 B out, 0 B back); 10 stayed" in result.output


def test_the_commands_know_of_a_file_of_slots(one_rank, tmp_path):
    """The demonstration computes with what its slots hold; the benchmarks refuse."""
    slots = tmp_path / "slots.json"
    slots.write_text(json.dumps({"slots": [[7, 6, 5, 4, 3, 2, 1, 0]]}))
    placement = {"live": True, "slots_per_rank": 8, "slots": str(slots)}
    path = write(tmp_path, topology={"ep_size": 1}, placement=placement)
    assert epmoe("run", path, "--steps", 2, "--tokens", 8).exit_code == 0
    assert "`placement.slots` must be unset" in epmoe("bench", path).output


def test_the_shell_completes_commands_names_and_options(monkeypatch):
    # Of the shell that started pytest.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    # The script is right,
    script = epmoe("--show-completion", "bash").output
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "complete -o default -F _epmoe_completion epmoe" in script

    def completed(line: str) -> list[str]:
        variables = {
            "_EPMOE_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        }
        return CliRunner().invoke(app, env=variables, prog_name="epmoe").output.split()

    # and so is what it asks.
    assert completed("epmoe ") == ["run", "plan", "balance", "doctor", "schema", "bench"]
    assert completed("epmoe plan cpu") == ["cpu_bench", "cpu_demo", "cpu_service"]
    assert completed("epmoe run cpu_demo --model m") == ["mixtral"]
    assert "--nproc" in completed("epmoe run --")


@pytest.mark.parametrize("command", ["run", "bench"])
def test_nvlink_with_too_few_gpus_is_an_error(tmp_path, command, monkeypatch):
    launched(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = epmoe(command, write(tmp_path, exchange={"transport": "nvlink"}))
    assert result.exit_code == 2
    assert (
        "wants a GPU for each of 2 ranks, and torch sees 1; EPMOE_EXCHANGE__TRANSPORT=shared_memory"
        in result.output
    )
    launched(monkeypatch, 4)  # on two nodes, of which torch sees one
    two_nodes = write(
        tmp_path, topology={"ep_size": 4, "ranks_per_node": 2}, exchange={"transport": "nvlink"}
    )
    assert "wants a GPU for each of 2 ranks, and torch sees 1" in epmoe(command, two_nodes).output


def test_model_option_needs_transformers(monkeypatch):
    from epmoe.cli.console import UserError
    from epmoe.cli.demo import models

    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in [name for name in sys.modules if name.startswith("epmoe.integrations.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UserError, match=r"`--model` needs transformers: pip install 'epmoe\[hf\]'"):
        models.run_models(EPConfig.load(DEMO), ["mixtral"], steps=1, seed=0)


def test_a_table_in_a_file_has_all_columns(monkeypatch, capsys):
    monkeypatch.setattr(console, "quiet", False)
    monkeypatch.setenv("COLUMNS", "40")
    cells = [f"a library {version}" for version in range(9)]
    table = Table(*cells, title="a title")
    table.add_row(*cells)
    print_table(table)
    shown = capsys.readouterr().out
    assert all(shown.count(cell) == 2 for cell in cells) and "…" not in shown


def test_human_readable_numbers():
    sizes = ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == sizes
    assert [human_seconds(s) for s in (2.5, 0.0123, 45e-6)] == ["2.5 s", "12.3 ms", "45 µs"]
    assert [human_seconds(s) for s in (1234, 999.6e-6, 999.6e-3, 0)] == [
        "1,234 s",
        "1 ms",
        "1 s",
        "0 s",
    ]
    assert [human_seconds(s, zeros=True) for s in (2.5, 0.012, 0.1, 0)] == [
        "2.50 s",
        "12.0 ms",
        "100 ms",
        "0 s",
    ]
    assert sparkline([0, 1, 4, 8]) == " ▁▄█"
    assert len(sparkline(range(100))) <= 24
    assert sparkline([]) == ""
