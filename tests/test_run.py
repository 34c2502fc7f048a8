"""`epmoe run` and `epmoe bench` as a user starts them: under torchrun, in child processes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from launched import torchrun

from epmoe import __version__
from epmoe.bench.facts import commit
from epmoe.config.config import EPConfig

TINY = {
    "model": {"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": 128, "dtype": "float32"},
    "topology": {"ep_size": 2},
    "capacity": {"max_num_tokens_per_rank": 16},
}


def epmoe(command: str, config: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return torchrun(2, "-m", "epmoe", command, config, *options)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


def test_experts_move_while_the_layer_runs(config, tmp_path):
    """Rank 0 prints, and no other."""
    report = tmp_path / "report.html"
    run = epmoe("run", config, "--steps", 40, "--routing", "drift", "--balance", "--report", report)
    assert run.returncode == 0, run.stdout + run.stderr
    said = re.search(
        r"(\d+) experts? ha(s|ve) moved; the busiest rank", " ".join(run.stdout.split())
    )
    assert said and "load per slot" in run.stdout
    assert run.stdout.count("✓ error against the dense fp64 reference") == 1
    assert f"{said[0]} took" in report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_model_generates_the_tokens_of_one_process(config, tmp_path):
    pytest.importorskip("transformers")
    report = tmp_path / "report.html"
    run = epmoe("run", config, "--model", "mixtral", "--steps", 3, "--report", report)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "✓ same tokens as one process: yes" in run.stdout
    assert "MixtralForCausalLM" in report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_bench_prints_and_writes_its_figures(config, tmp_path):
    written = tmp_path / "bench.json"
    plot = tmp_path / "plot.svg"
    options = ["--tokens", 1, "--tokens", 16, "--repeats", 2, "--json", written, "--plot", plot]
    run = epmoe("bench", config, *options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "gloo" in run.stdout
    # Three sides for each number of tokens.
    content = json.loads(written.read_text())
    assert [row["tokens"] for row in content["results"]] == [1, 1, 1, 16, 16, 16]
    assert (content["benchmark"], content["routing"], content["ranks"], content["repeats"]) == (
        "gloo",
        "uniform",
        2,
        2,
    )
    # What a reader needs to repeat the run.
    assert EPConfig(**content["config"]) == EPConfig.load(config)
    assert (
        content["versions"]["epmoe"] == __version__
        and content["versions"]["torch"] == torch.__version__
    )
    assert content["machine"]["cpu"] and content["machine"]["cores"] >= 1
    assert content["commit"] == commit()
    # Each column has a unit.
    assert set(content["units"]) == {
        "tokens",
        "dispatch",
        "combine",
        "round",
        "ratio",
        "ratio_kept",
    }
    assert "<svg" in plot.read_text()
