"""Each file in examples/ runs and prints what its first lines say."""

from __future__ import annotations

import pytest
from launched import ROOT, run_python, torchrun

EXAMPLES = {  # ranks (0: the file starts its own), and lines that it prints
    "decode_loop": (2, ["8 steps of 1 to 4 tokens"]),
    "several_nodes": (4, ["2 nodes of 2 ranks: y is x"]),
    "two_micro_batches": (2, ["y of both micro-batches equals that of two ordinary rounds"]),
    "server_loop": (2, ["step 1: dropped, rank(s) [1] gave it up", "served steps [0, 2]"]),
    "recover_after_a_kill": (0, ["3 ranks play", "2 ranks play", "3 ranks play"]),
}
SLOW = {"recover_after_a_kill"}  # 9 s


def test_none_is_forgotten():
    # Tests of their own: test_generate.py and others.
    elsewhere = {"generate", "rl", "train", "serve", "serve_front", "serve_rank"}
    assert EXAMPLES.keys() | elsewhere == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in EXAMPLES]
)
def test_prints_what_it_says(name):
    ranks, lines = EXAMPLES[name]
    program = f"examples/{name}.py"
    done = torchrun(ranks, program) if ranks else run_python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == lines
    assert all(line in (ROOT / program).read_text().split('"""')[1] for line in lines)
