"""The benchmarks in one process: what they refuse, their views, facts and figures. Over ranks:
tests/distributed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from launched import run

from epmoe.bench import cpu, floor, gpu, layer, layer_sides, peers
from epmoe.bench.facts import commit, facts
from epmoe.bench.layer_sides import Precision
from epmoe.bench.report import Job
from epmoe.bench.sample import Payload, Sample, wire_bytes
from epmoe.bench.timing import Times
from epmoe.config.config import EPConfig
from epmoe.local.weight_formats import bits_of

CPU = torch.device("cpu")


def _config(ranks: int = 2, **changes: dict) -> EPConfig:
    sections = {
        "model": {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "hidden_size": 256,
            "intermediate_size": 128,
        },
        "topology": {"ep_size": ranks},
        "capacity": {"max_num_tokens_per_rank": 32, "alignment": 4},
    }
    return EPConfig(
        **{name: sections.get(name, {}) | changes.get(name, {}) for name in sections | changes}
    )


@pytest.mark.parametrize(
    ("benchmark", "changes", "message"),
    [
        (cpu.run, {"exchange": {"payload": "fp8"}}, "must be auto: gloo sends no fp8 rows"),
        (cpu.run, {"exchange": {"combine_payload": "fp8"}}, "must be auto: gloo sends no fp8 rows"),
        (
            layer.run,
            {"model": {"intermediate_size": None}},
            "`model.intermediate_size` must be set",
        ),
        (layer.run, {"exchange": {"payload": "fp8"}}, "must be auto: fp8 is one of the precisions"),
    ],
)
def test_wrong_configurations(benchmark, changes, message):
    with pytest.raises(ValueError, match=message):
        benchmark(Job(_config(**changes), (1,)))


@pytest.mark.parametrize(
    ("model", "precision", "reason"),
    [
        (
            {"dtype": "float32"},
            Precision.FP8,
            "it computes in bfloat16, and `model.dtype` is float32",
        ),
        (
            {"intermediate_size": 96},
            Precision.FP8,
            "D and F must be multiples of 128, got 256 and 96",
        ),
        ({}, Precision.PLAIN_DEEP_GEMM, "DeepGEMM is for GPUs"),
        ({}, Precision.FP8, None),
        ({"intermediate_size": 96}, Precision.MXFP4, None),
        ({"intermediate_size": 80}, Precision.NVFP4, None),
        (
            {"intermediate_size": 80},
            Precision.MXFP4,
            "D and F must be multiples of 32, got 256 and 80",
        ),
        (
            {"dtype": "float32"},
            Precision.MXFP4,
            "it computes in bfloat16, and `model.dtype` is float32",
        ),
        ({"dtype": "float32", "intermediate_size": 96}, Precision.PLAIN, None),
    ],
)
def test_what_cannot_be_measured(model, precision, reason):
    assert layer_sides.problem_with(precision, _config(model=model), CPU) == reason


@pytest.mark.parametrize(
    "precision", [Precision.PLAIN, Precision.FP8, Precision.MXFP4, Precision.NVFP4]
)
def test_copies_of_an_expert_have_its_weights(precision):
    """Expert 0 of rank 0 has its copy, physical expert 7, on rank 1."""
    config = _config(placement={"strategy": "round_robin", "num_redundant_experts": 2})
    first, second = (
        layer_sides.random_experts(config, rank, CPU, precision).state_dict() for rank in range(2)
    )
    for name, tensor in first.items():
        assert torch.equal(bits_of(tensor[0]), bits_of(second[name][-1]))
        assert not torch.equal(bits_of(tensor[0]), bits_of(tensor[1]))


def _gpu_report(T: int = 16):
    sample = Sample(_config(model={"hidden_size": 128}), 0, T)
    results = [
        gpu.result(sample, side, Payload.PLAIN, Times(4.0, 5.0, us), 8.0)
        | figures
        | {"tokens": tokens}
        for tokens in (1, T)
        for side, us, figures in (
            ("floor", 8.0, {"blocks": 64}),
            ("fused", 10.0, {"host": (6.0, 7.0)}),
        )
    ]
    return gpu.report(results), sample


def _cpu_report():
    times = [Times(1.0, 2.0, 3.0), Times(10.0, 11.0, 21.0), Times(4.0, 5.0, 9.0)]
    return cpu.report(
        {T: dict(zip("abc", times, strict=True)) for T in (1, 16)}, several_nodes=True
    )


def _layer_report():
    figures = {"rows": 512, "floor": 15.0, "layer": 30.0}
    results = [
        {"tokens": T, "precision": Precision.FP8, "side": "a peer"} | figures for T in (1, 16)
    ]
    return layer.report(results, {Precision.PLAIN_DEEP_GEMM: "it is not installed"}, "bfloat16")


@pytest.mark.parametrize(
    ("report", "rows"),
    [(_cpu_report(), 6), (_gpu_report()[0], 4), (_layer_report(), 2)],
    ids=["cpu", "gpu", "layer"],
)
def test_views(tmp_path, report, rows):
    assert report.table("tiny: 2 ranks").row_count == rows
    # Plots of both formats.
    for name, start in (("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")):
        report.plot(tmp_path / name, "tiny: 2 ranks")
        assert (tmp_path / name).read_bytes().startswith(start)
    # Facts, then figures.
    report.write_json(tmp_path / "figures.json", facts(report.benchmark, _config(), "uniform", 3))
    content = json.loads((tmp_path / "figures.json").read_text())
    assert list(content)[:4] == ["benchmark", "config", "routing", "ranks"], "the facts come first"
    assert (
        list(content)[-4:] == ["units", "plotted", "left_out", "results"]
        and len(content["results"]) == rows
    )


def test_what_the_views_say():
    figures = _cpu_report().results[0]
    assert (figures["ratio"], figures["ratio_kept"]) == (7, 3)
    # What was left out, and what a peer does not say.
    view = _layer_report().table()
    assert "plain, DeepGEMM was left out: it is not installed" in str(view.caption)
    assert list(view.columns[6].cells) == ["–", "–"], "the experts of a peer alone"
    # Bytes and shares of the floor.
    report, sample = _gpu_report()
    floor_row, ours = report.results[:2]
    assert (floor_row["side"], floor_row["floor_percent"], floor_row["blocks"]) == (
        "floor",
        100,
        64,
    )
    assert ours["wire_bytes_out"] == 256 * int(sample.remote_RR.sum(dim=1).max())
    assert ours["wire_gbps"] == pytest.approx(
        (ours["wire_bytes_out"] + ours["wire_bytes_back"]) / 10_000
    )
    assert (ours["payload"], ours["floor_percent"]) == ("plain", 80)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not on the PATH")
def test_the_commit_of_a_checkout(tmp_path):
    assert commit(tmp_path) is None
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True)
    head = commit(tmp_path)
    assert head and len(head) == 40
    (tmp_path / "file").write_text("a")
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True)
    assert commit(tmp_path) == f"{head}-dirty"


def test_bytes_of_a_row():
    assert wire_bytes(7168, torch.bfloat16, "auto") == 14336
    assert wire_bytes(7168, torch.bfloat16, "fp8") == 7168 + 4 * 56
    assert wire_bytes(128, torch.bfloat16, "fp8") == 144  # whole 16 bytes


def test_rows_that_the_floor_moves():
    """Three ranks in one process: every row arrives once, in order of source rank."""
    traffic_RR = Sample(_config(3), 0, 32).rows_RR.fill_diagonal_(0)
    sources = [
        torch.randint(1, 255, (int(traffic_RR[r].sum()), 16), dtype=torch.uint8) for r in range(3)
    ]
    arrived = [torch.zeros(int(traffic_RR[:, r].sum()), 16, dtype=torch.uint8) for r in range(3)]
    # Each rank copies its rows to the others.
    for rank, source in enumerate(sources):
        targets = [arrived[r].data_ptr() + 16 * int(traffic_RR[:rank, r].sum()) for r in range(3)]
        for origin, target in floor.moves(
            source, rank, traffic_RR[rank].tolist(), targets
        ).tolist():
            ctypes.memmove(target, origin, 16)
    for rank in range(3):
        rows = [source.split(traffic_RR[r].tolist())[rank] for r, source in enumerate(sources)]
        assert torch.equal(arrived[rank], torch.cat(rows))


def test_every_driver_names_what_to_install():
    every = peers.load(ROOT / "benchmarks" / "peers")
    assert len({peer.name for peer in every}) == len(every) == 12 and all(
        peer.install for peer in every
    )


@pytest.mark.parametrize(
    ("path", "message"), [(".", "holds no driver"), ("driver.py", "is no Python file")]
)
def test_a_folder_without_drivers(tmp_path, path, message):
    with pytest.raises(ValueError, match=message):
        peers.load(tmp_path / path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "options", [[], ["--eager"], ["--layer"]], ids=["captured", "eager", "layer"]
)
def test_two_gpus(tmp_path, options):
    config = _config(model={"num_experts": 8}, exchange={"transport": "nvlink", "timeout_s": 20.0})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    tokens = [
        "--tokens",
        "1",
        "--tokens",
        "32",
        "--repeats",
        "3",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    with_peers = ["--peers", str(ROOT / "benchmarks" / "peers" / "nccl.py")]
    bench = ["-m", "epmoe", "bench", str(tmp_path / "config.json"), *tokens, *with_peers, *options]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    # Also packages outside site-packages.
    done = run([*launch, *bench], PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stdout + done.stderr
    # A row of each side and payload at each T.
    content = json.loads((tmp_path / "figures.json").read_text())
    rows = content["results"]
    if options == ["--layer"]:
        assert len(rows) == 2 * (len(Precision) - len(content["left_out"]))
        assert all(row["layer"] > row["exchange"] > 0 for row in rows)
    else:
        assert len(rows) == 2 * (6 + 3 + 3)  # NCCL carries plain rows alone
        assert all(row["round"] > 0 for row in rows)
