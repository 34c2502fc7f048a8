"""Each file in examples/ runs and prints what its first lines say."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from launched import ROOT, run_python, torchrun


class Example(NamedTuple):
    ranks: int
    """0: the file starts its own"""
    lines: list[str]
    """that it prints behind the device"""


EXAMPLES = {
    "decode_loop": Example(2, ["8 steps of 1 to 4 tokens"]),
    "several_nodes": Example(4, ["2 nodes of 2 ranks: y is x"]),
    "two_micro_batches": Example(2, ["y of both micro-batches equals that of two ordinary rounds"]),
    "server_loop": Example(2, ["step 1: dropped, rank(s) [1] gave it up", "served steps [0, 2]"]),
    "recover_after_a_kill": Example(0, ["3 ranks play", "2 ranks play", "3 ranks play"]),
    "experts_service": Example(
        0,
        [
            "experts on ranks [2, 3]: answers are right",
            "experts on ranks [2, 3]: answers are right",
            "experts on ranks [2]: answers are right",
            "experts on ranks [2, 3]: answers are right",
        ],
    ),
}
SLOW = {"recover_after_a_kill", "experts_service"}  # 9 s, 20 s


def printed(name: str, ranks: int, **variables: str) -> list[str]:
    """What an example prints."""
    program = f"examples/{name}.py"
    if ranks:
        done = torchrun(ranks, program, **variables)
    else:
        done = run_python(program, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_none_is_forgotten():
    # Tests of their own: test_generate.py and others. `devices` is what they share.
    elsewhere = {"devices", "generate", "rl", "train", "serve", "serve_front", "serve_rank"}
    assert EXAMPLES.keys() | elsewhere == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in EXAMPLES]
)
def test_prints_what_it_says(name):
    ranks, lines = EXAMPLES[name]
    assert printed(name, ranks, CUDA_VISIBLE_DEVICES="") == ["device: cpu", *lines]
    words = (ROOT / "examples" / f"{name}.py").read_text().split('"""')[1]
    assert all(line in words for line in lines)
