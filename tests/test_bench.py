"""The benchmark, small, over two ranks: both sides' results agree with the expected sum, and every view is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from epmoe.bench import exchange
from epmoe.config import EPConfig

ROOT = Path(__file__).parents[1]
REPEATS = 2


def _config(dtype: str, strategy: str) -> EPConfig:
    return EPConfig(
        model={"num_experts": 7, "num_experts_per_tok": 3, "hidden_size": 64, "dtype": dtype},
        topology={"ep_size": 2},
        placement={"strategy": strategy, "num_redundant_experts": 2},
        capacity={"max_num_tokens_per_rank": 32, "alignment": 4},
    )


def _worker(folder: Path) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    samples: list[None] = []
    for dtype, strategy in (("float32", "linear"), ("bfloat16", "round_robin")):
        config = _config(dtype, strategy)
        results = exchange.run(config, (0, 1, 32), REPEATS, advance=lambda: samples.append(None))
    assert len(samples) == 2 * 3 * REPEATS
    broken = exchange.AllToAll.combine
    exchange.AllToAll.combine = lambda self, rows, sent: broken(self, rows, sent) * 1.5
    with pytest.raises(RuntimeError, match="AllToAll: the round's output is not the weighted sum"):
        exchange.run(config, (4,), 1)
    if dist.get_rank() == 0:
        exchange.write_json(results, folder / "results.json")
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "tests.test_bench", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["tokens"] for row in rows] == [0, 1, 32]
    for row in rows:
        for side in ("epmoe", "gloo", "gloo_kept"):
            assert 0 < max(row[side]["dispatch"], row[side]["combine"]) <= row[side]["pair"]
        assert row["ratio"] == row["gloo"]["pair"] / row["epmoe"]["pair"]


def test_views(tmp_path):
    times = [exchange.Times(1.0, 2.0, 3.0), exchange.Times(10.0, 11.0, 21.0), exchange.Times(4.0, 5.0, 9.0)]
    results = [exchange.Result(tokens, *times) for tokens in (1, 16)]
    assert exchange.table(results).row_count == 6
    assert (results[0].ratio, results[0].ratio_kept) == (7, 3)
    exchange.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_fp8_is_refused():
    config = EPConfig(
        model={"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 128},
        topology={"ep_size": 1},
        exchange={"payload": "fp8"},
    )
    with pytest.raises(ValueError, match="`exchange.payload` and `exchange.combine_payload` must be auto"):
        exchange.run(config)


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
