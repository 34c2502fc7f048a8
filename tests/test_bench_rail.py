"""`epmoe bench` over several nodes, here two of one rank: all sides agree with the expected sum."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from launched import run, torchrun

from epmoe.bench import cpu, sides
from epmoe.bench.report import Job
from epmoe.config.config import EPConfig

REPEATS = 2
TOKENS = (0, 1, 32)
SIDES = ["epmoe, padded", "epmoe, exact", "epmoe, fp8 out", "pairs", "pairs, kept buffers"]


def _config(hidden: int = 128, **exchange: object) -> EPConfig:
    return EPConfig(
        model={"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": hidden, "dtype": "float32"},
        topology={"ep_size": 2, "ranks_per_node": 1},
        placement={"num_redundant_experts": 2},
        capacity={"max_num_tokens_per_rank": 32},
        exchange=exchange,
    )


def _worker(folder: Path) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    samples: list[None] = []
    report = cpu.run(Job(_config(), TOKENS, REPEATS, advance=lambda: samples.append(None)))
    assert len(samples) == len(TOKENS) * REPEATS
    measured = [row["side"] for row in cpu.run(Job(_config(hidden=64), (4,), 1)).content["results"]]
    assert measured == [side for side in SIDES if "fp8" not in side]
    back = sides.AllToAll.back
    sides.AllToAll.back = lambda self, handle: back(self, handle) * 1.5
    with pytest.raises(RuntimeError, match="pairs: the round's output is not the weighted sum"):
        cpu.run(Job(_config(), (4,), 1))
    if dist.get_rank() == 0:
        report.write_json(folder / "results.json")
    dist.destroy_process_group()


def test_two_nodes(tmp_path: Path) -> None:
    done = torchrun(2, __file__, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(row["tokens"], row["side"]) for row in rows] == [(T, side) for T in TOKENS for side in SIDES]
    for row in rows:
        assert 0 < max(row["dispatch"], row["combine"]) <= row["round"]
    by_side = {row["side"]: row for row in rows if row["tokens"] == 32}
    ours = by_side["epmoe, padded"]
    assert ours["ratio"] == by_side["pairs"]["round"] / ours["round"]
    assert ours["ratio_kept"] == by_side["pairs, kept buffers"]["round"] / ours["round"]


@pytest.mark.slow
def test_the_command_measures_several_nodes(tmp_path: Path) -> None:
    path, figures = tmp_path / "two.json", tmp_path / "figures.json"
    path.write_text(_config().model_dump_json())
    command = [sys.executable, "-m", "epmoe", "bench", str(path), "--tokens", "8", "--repeats", "1"]
    done = run([*command, "--json", str(figures)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(side in done.stdout for side in SIDES)
    content = json.loads(figures.read_text())
    assert content["benchmark"] == "rail" and content["config"]["topology"]["ranks_per_node"] == 1


@pytest.mark.parametrize("key", ["payload", "combine_payload"])
def test_fp8_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="must be auto: gloo sends no fp8 rows"):
        cpu.run(Job(_config(**{key: "fp8"}), TOKENS))


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
