"""`bench --layer`, small, over two ranks: y is the weighted sum in every precision, and every view is written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import run, torchrun

from epmoe.bench import layer, layer_sides
from epmoe.bench.layer_sides import Precision
from epmoe.bench.report import Job
from epmoe.config.config import EPConfig
from epmoe.local.weight_formats import bits_of
from epmoe.service import ExpertParallel

TOKENS = (0, 1, 24)
CPU = torch.device("cpu")


def _config(**changes: dict) -> EPConfig:
    sections = {
        "model": {"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": 256, "intermediate_size": 128},
        "topology": {"ep_size": 2},
        "placement": {"strategy": "round_robin", "num_redundant_experts": 2},
        "capacity": {"max_num_tokens_per_rank": 32, "alignment": 4},
    }
    return EPConfig(**{name: sections.get(name, {}) | changes.get(name, {}) for name in sections | changes})


def _worker(folder: Path) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    steps: list[None] = []
    lines: list[str] = []
    report = layer.run(Job(_config(), TOKENS, 2, advance=lambda: steps.append(None), log=lines.append))
    assert report.benchmark == "layer" and len(steps) == len(TOKENS) * len(Precision)
    cases = [f"{T} tokens, {precision}" for precision in ("plain", "fp8", "MXFP4") for T in TOKENS]
    assert [line.partition(":")[0] for line in lines] == cases
    combine = ExpertParallel.combine
    for broken in (lambda *given: combine(*given) * 1.2, lambda *given: combine(*given) * torch.nan):
        ExpertParallel.combine = broken
        with pytest.raises(RuntimeError, match="the layer: y is not the weighted sum"):
            layer.run(Job(_config(), (4,), 1))
    if dist.get_rank() == 0:
        report.write_json(folder / "results.json")
        report.plot(folder / "plot.svg", "tiny")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path):
    done = torchrun(2, __file__, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["left_out"] == {"plain, DeepGEMM": "DeepGEMM is for GPUs"}
    rows = content["results"]
    precisions = ("plain", "fp8", "MXFP4")
    assert [(row["tokens"], row["precision"]) for row in rows] == [(T, p) for T in TOKENS for p in precisions]
    for row in rows:
        assert min(row["layer"], row["experts"], row["exchange"]) > 0 and row["side"] == "epmoe, torch"
        assert row["on_top"] == row["layer"] - row["experts"]
        assert row["tokens"] * 3 <= row["rows"] <= 2 * row["tokens"] * 3 + 5 * 3
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_the_table_says_what_was_left_out():
    figures = {"rows": 512, "floor": 15.0, "layer": 30.0}
    results = [{"tokens": T, "precision": Precision.FP8, "side": "a peer"} | figures for T in (1, 16)]
    view = layer.report(results, {Precision.PLAIN_DEEP_GEMM: "it is not installed"}, "bfloat16").table()
    assert view.row_count == 2 and "plain, DeepGEMM was left out: it is not installed" in str(view.caption)
    assert list(view.columns[6].cells) == ["–", "–"], "the experts of a peer alone"


@pytest.mark.parametrize(
    ("model", "precision", "reason"),
    [
        ({"dtype": "float32"}, Precision.FP8, "it computes in bfloat16, and `model.dtype` is float32"),
        ({"intermediate_size": 96}, Precision.FP8, "D and F must be multiples of 128, got 256 and 96"),
        ({}, Precision.PLAIN_DEEP_GEMM, "DeepGEMM is for GPUs"),
        ({}, Precision.FP8, None),
        ({"intermediate_size": 96}, Precision.MXFP4, None),
        ({"intermediate_size": 80}, Precision.MXFP4, "D and F must be multiples of 32, got 256 and 80"),
        ({"dtype": "float32"}, Precision.MXFP4, "it computes in bfloat16, and `model.dtype` is float32"),
        ({"dtype": "float32", "intermediate_size": 96}, Precision.PLAIN, None),
    ],
)
def test_what_cannot_be_measured(model, precision, reason):
    assert layer_sides.problem_with(precision, _config(model=model), CPU) == reason


@pytest.mark.parametrize("precision", [Precision.PLAIN, Precision.FP8, Precision.MXFP4])
def test_copies_of_an_expert_have_its_weights(precision):
    """Expert 0 of rank 0 has its copy, physical expert 7, on rank 1."""
    config = _config()
    first, second = (layer_sides.random_experts(config, rank, CPU, precision).state_dict() for rank in range(2))
    for name, tensor in first.items():
        assert torch.equal(bits_of(tensor[0]), bits_of(second[name][-1]))
        assert not torch.equal(bits_of(tensor[0]), bits_of(tensor[1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"intermediate_size": None}}, "`model.intermediate_size` must be set"),
        ({"exchange": {"payload": "fp8"}}, "must be auto: fp8 is one of the precisions"),
    ],
)
def test_wrong_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        layer.check(_config(**changes))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    (tmp_path / "config.json").write_text(_config(exchange={"transport": "nvlink"}).model_dump_json())
    options = ["--layer", "--tokens", "1", "--tokens", "32", "--repeats", "3", "--json", str(tmp_path / "figures.json")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    bench = ["-m", "epmoe", "bench", str(tmp_path / "config.json"), *options]
    done = run([*launch, *bench], PYTHONPATH=os.pathsep.join(sys.path))  # also packages outside site-packages
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "figures.json").read_text())
    assert len(content["results"]) == 2 * (len(Precision) - len(content["left_out"]))
    assert all(row["layer"] > row["exchange"] > 0 for row in content["results"])


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
