"""`examples/rl.py`: log-probabilities of rollout and trainer have the same bits, and the reward
rises.
"""

from __future__ import annotations

import re

import pytest
from launched import torchrun


def rewards(dtype: str, steps: int, ranks: int = 4, device: str = "cpu") -> list[float]:
    visible = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    words = ["--steps", str(steps), "--dtype", dtype]
    done = torchrun(ranks, "examples/rl.py", *words, **visible)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"device: {device}")
    found = re.findall(
        rf"step \d+: reward (\S+), (\d+) of {32 * ranks} log-probabilities differ\n", done.stdout
    )
    assert len(found) == steps and not any(int(differing) for _, differing in found), done.stdout
    return [float(reward) for reward, _ in found]


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        ("float32", 4),
        pytest.param("bfloat16", 4, marks=pytest.mark.slow),
        # The trainer is one rank, whose experts are not spread.
        pytest.param("bfloat16", 2, marks=pytest.mark.slow),
    ],
)
def test_few_steps(dtype, ranks):
    first, *_, last = rewards(dtype, 4, ranks)
    assert last > first + 0.1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_50_steps(dtype):
    found = rewards(dtype, 50)
    assert sum(found[-10:]) / 10 > sum(found[:2]) / 2 + 0.3
