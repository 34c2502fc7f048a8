"""The benchmarks, small, over two ranks: all sides' results agree with the expected sum, and every view is written."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import ROOT, run, torchrun

from epmoe.bench import cpu, floor, gpu, sides
from epmoe.bench.facts import commit, facts
from epmoe.bench.report import Job
from epmoe.bench.sample import Sample, wire_bytes
from epmoe.bench.sides import Fused, Side
from epmoe.bench.timing import Times
from epmoe.config.config import EPConfig
from epmoe.service import ExpertParallel

REPEATS = 2
TOKENS = (0, 1, 32)
SIDES = {
    "ranks": ["epmoe", "gloo", "gloo, kept buffers"],
    "nodes": ["epmoe", "epmoe, fp8 out", "pairs", "pairs, kept buffers"],
}
GPU_CONTENDERS = [contender for contender in gpu.Contender if contender is not gpu.Contender.FLOOR]


def _config(dtype: str, strategy: str, **changes: dict) -> EPConfig:
    sections = {
        "model": {"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": 128, "dtype": dtype},
        "topology": {"ep_size": 2},
        "placement": {"strategy": strategy, "num_redundant_experts": 2},
        "capacity": {"max_num_tokens_per_rank": 32, "alignment": 4},
    }
    return EPConfig(**sections | changes)


def _two_nodes(hidden: int = 128, **exchange: object) -> EPConfig:
    model = {"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": hidden, "dtype": "float32"}
    return _config("float32", "linear", model=model, topology={"ep_size": 2, "ranks_per_node": 1}, exchange=exchange)


def _worker(folder: Path) -> None:
    """What each rank runs, in a folder that says for which test."""
    dist.init_process_group("gloo")
    one_node = (_config("float32", "linear"), _config("bfloat16", "round_robin"))
    samples: list[None] = []
    for config in [_two_nodes()] if folder.name == "nodes" else one_node:
        report = cpu.run(Job(config, TOKENS, REPEATS, advance=lambda: samples.append(None)))
        assert len(samples) == 3 * REPEATS
        samples.clear()
        if folder.name == "ranks":
            _gpu_sides(config)
            _rows_are_counted(config)
    if folder.name == "nodes":
        measured = [row["side"] for row in cpu.run(Job(_two_nodes(hidden=64), (4,), 1)).results]
        assert measured == [side for side in SIDES["nodes"] if "fp8" not in side]
    back = sides.AllToAll.back
    sides.AllToAll.back = lambda self, handle: back(self, handle) * 1.5
    with pytest.raises(RuntimeError, match=f"{SIDES[folder.name][-2]}: the round's output is not the weighted sum"):
        cpu.run(Job(config, (4,), 1))
    if dist.get_rank() == 0:
        report.write_json(folder / "results.json")
    dist.destroy_process_group()


def _gpu_sides(config: EPConfig) -> None:
    """The contenders of GPUs, here on the CPU. Each checks itself, and its rounds are equal bit for bit."""

    def measure(side: Side, repeats: int, group: dist.ProcessGroup) -> Times:
        rounds = []
        for _ in range(2):
            handle = side.out()
            left = [tensor.clone() for tensor in side.arrived(handle)]
            rounds.append([*left, side.back(handle).clone()])
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*rounds, strict=True))
        return Times(1.0, 2.0, 3.0)

    gpu.measure, gpu.host_us = measure, lambda side, group: (4.0, 5.0)
    results = gpu.run(Job(config, TOKENS, REPEATS), contenders=GPU_CONTENDERS).content["results"]
    assert [(r["tokens"], r["side"], r["payload"]) for r in results] == [
        (T, contender, payload)
        for T in TOKENS
        for payload in gpu.Payload
        for contender in (GPU_CONTENDERS if payload == "plain" else ["rank-major", "fused"])
    ]


def _rows_are_counted(config: EPConfig) -> None:
    with ExpertParallel(config) as ep:
        sample = Sample(config, ep.rank, 32, "zipf")
        side = Fused(ep, sample)
        handle = side.out()
        assert handle.recv.counts.tolist() == sample.rows_RR[:, ep.rank].tolist()
        side.back(handle)


@pytest.mark.parametrize("where", [pytest.param("ranks", marks=pytest.mark.slow), "nodes"])
def test_the_figures_of_two(where, tmp_path):
    folder = tmp_path / where
    folder.mkdir()
    done = torchrun(2, __file__, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((folder / "results.json").read_text())["results"]
    assert [(row["tokens"], row["side"]) for row in rows] == [(T, side) for T in TOKENS for side in SIDES[where]]
    for T in TOKENS:
        *_, fresh, kept = of_T = [row for row in rows if row["tokens"] == T]
        for row in of_T:
            assert 0 < max(row["dispatch"], row["combine"]) <= row["round"]
            assert (row["ratio"], row["ratio_kept"]) == (fresh["round"] / row["round"], kept["round"] / row["round"])


@pytest.mark.slow
def test_the_command_measures_several_nodes(tmp_path):
    path, figures = tmp_path / "two.json", tmp_path / "figures.json"
    path.write_text(_two_nodes().model_dump_json())
    command = [sys.executable, "-m", "epmoe", "bench", str(path), "--tokens", "8", "--repeats", "1"]
    done = run([*command, "--json", str(figures)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(side in done.stdout for side in SIDES["nodes"])
    content = json.loads(figures.read_text())
    assert content["benchmark"] == "rail" and content["config"]["topology"]["ranks_per_node"] == 1


@pytest.mark.parametrize("key", ["payload", "combine_payload"])
def test_fp8_is_refused(key):
    with pytest.raises(ValueError, match="must be auto: gloo sends no fp8 rows"):
        cpu.run(Job(_two_nodes(**{key: "fp8"}), TOKENS))


def test_views(tmp_path):
    times = [Times(1.0, 2.0, 3.0), Times(10.0, 11.0, 21.0), Times(4.0, 5.0, 9.0)]
    report = cpu.report({T: dict(zip(SIDES["ranks"], times, strict=True)) for T in (1, 16)}, several_nodes=False)
    assert report.table("tiny: 2 ranks").row_count == 6
    figures = report.content["results"][0]
    assert (figures["ratio"], figures["ratio_kept"]) == (7, 3)
    for name, start in (("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")):
        report.plot(tmp_path / name, "tiny: 2 ranks")
        assert (tmp_path / name).read_bytes().startswith(start)


def test_the_facts_beside_the_figures(tmp_path):
    """The facts of the run come before the figures."""
    report = cpu.report({16: dict.fromkeys("abc", Times(1.0, 2.0, 3.0))}, several_nodes=True)
    report.write_json(tmp_path / "figures.json", facts(report.benchmark, _config("float32", "linear"), "uniform", 3))
    content = json.loads((tmp_path / "figures.json").read_text())
    assert list(content)[:4] == ["benchmark", "config", "routing", "ranks"]
    assert list(content)[-4:] == ["units", "plotted", "left_out", "results"] and content["benchmark"] == "rail"


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


def test_views_of_gpus(tmp_path):
    sample = Sample(_config("bfloat16", "linear", placement={}), 0, 16)
    results = [
        gpu.result(sample, side, gpu.Payload.PLAIN, Times(4.0, 5.0, us), 8.0) | figures | {"tokens": T}
        for T in (1, 16)
        for side, us, figures in (("floor", 8.0, {"blocks": 64}), ("fused", 10.0, {"host": (6.0, 7.0)}))
    ]
    report = gpu.report(results)
    assert report.table().row_count == 4
    report.write_json(tmp_path / "figures.json")
    floor_row, ours = json.loads((tmp_path / "figures.json").read_text())["results"][:2]
    assert (floor_row["side"], floor_row["floor_percent"], floor_row["blocks"]) == ("floor", 100, 64)
    moved = ours["wire_bytes_out"] + ours["wire_bytes_back"]
    assert ours["wire_bytes_out"] == 256 * int(sample.remote_RR.sum(dim=1).max())
    assert ours["wire_gbps"] == pytest.approx(moved / 10_000)
    assert (ours["payload"], ours["floor_percent"]) == ("plain", 80)
    report.plot(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_bytes_of_a_row():
    assert wire_bytes(7168, torch.bfloat16, "auto") == 14336
    assert wire_bytes(7168, torch.bfloat16, "fp8") == 7168 + 4 * 56
    assert wire_bytes(128, torch.bfloat16, "fp8") == 144  # whole 16 bytes


def test_rows_that_the_floor_moves():
    """Three ranks in one process: every row arrives once, in order of source rank."""
    config = _config("float32", "linear", topology={"ep_size": 3})
    traffic_RR = Sample(config, 0, 32).rows_RR.fill_diagonal_(0)
    sources = [torch.randint(1, 255, (int(traffic_RR[r].sum()), 16), dtype=torch.uint8) for r in range(3)]
    arrived = [torch.zeros(int(traffic_RR[:, r].sum()), 16, dtype=torch.uint8) for r in range(3)]
    for rank, source in enumerate(sources):
        targets = [arrived[r].data_ptr() + 16 * int(traffic_RR[:rank, r].sum()) for r in range(3)]
        for origin, target in floor.moves(source, rank, traffic_RR[rank].tolist(), targets).tolist():
            ctypes.memmove(target, origin, 16)
    for rank in range(3):
        rows = [source.split(traffic_RR[r].tolist())[rank] for r, source in enumerate(sources)]
        assert torch.equal(arrived[rank], torch.cat(rows))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("eager", [[], ["--eager"]], ids=["captured", "eager"])
def test_two_gpus(tmp_path, eager):
    model = {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 128, "dtype": "bfloat16"}
    exchange = {"transport": "nvlink", "timeout_s": 20.0}
    config = _config("bfloat16", "linear", model=model, placement={}, exchange=exchange)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    options = ["--tokens", "1", "--tokens", "32", "--repeats", "3", "--json", str(tmp_path / "figures.json")]
    peers = ["--peers", str(ROOT / "benchmarks" / "peers" / "nccl.py")]
    bench = ["-m", "epmoe", "bench", str(tmp_path / "config.json"), *options, *peers, *eager]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*launch, *bench], PYTHONPATH=os.pathsep.join(sys.path))  # also packages outside site-packages
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert len(rows) == 2 * (6 + 3 + 3)  # NCCL carries plain rows alone
    assert all(row["round"] > 0 for row in rows)


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
