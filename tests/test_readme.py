"""README's example runs over ranks, and the configuration of the first page is a ready one. The
rest: test_docs.py.
"""

from __future__ import annotations

import re

from launched import ROOT, torchrun

from epmoe.config.config import EPConfig

START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path):
    example = tmp_path / "example.py"
    example.write_text(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0])
    run = torchrun(4, example)
    assert run.returncode == 0, run.stderr
    for rank in range(4):
        assert f"rank {rank}: y [{5 * rank}, 256]" in run.stdout


def test_the_page_is_short_and_shows_how_to_begin():
    assert len(README.split()) <= 950
    assert {"make demo", "make test"} <= set(re.findall(r"^make \w+", README, re.MULTILINE))
    words = " ".join(README.split())
    assert "Hopper" in words and "MegaMoE of sgl-deep-gemm 0.2.5, October 2026" in words


def test_both_pages_install_alike():
    """Also on a machine without GPUs, whose torch has an index of its own."""
    shown = [
        [
            line.partition("#")[0].split()
            for line in re.findall(r"^pip install [^\"\n]*$", page, re.M)
        ]
        for page in (README, START)
    ]
    readme, start = shown
    assert readme == start[: len(readme)] and len(readme) == 2
    indexes = [
        set(re.findall(r"--extra-index-url (https://\S+?)`?\s", page)) for page in (README, START)
    ]
    assert indexes[0] == indexes[1] != set()


def test_the_configuration_shown_is_the_ready_one(tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(re.findall(r"```yaml\n(.*?)```", START, re.DOTALL)[0])
    assert EPConfig.load(shown) == EPConfig.load(ROOT / "configs" / "cpu_demo.yaml")
