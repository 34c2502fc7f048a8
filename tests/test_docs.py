"""The documents name what exists: links, files, tests and make targets. Pages and their navigation: `make docs`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from helpers import ROOT

from benchmarks.results import read

DOCS = ROOT / "docs"
WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
WRITTEN += sorted(path for path in DOCS.rglob("*.md"))
NAMES = [str(path.relative_to(ROOT)) for path in WRITTEN]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose_of(path: Path) -> str:
    """A document without its blocks of code, in which brackets are not links."""
    return re.sub(r"```.*?```", "", text_of(path), flags=re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name: str) -> None:
    """`tests/test_X.py` and the like, with a letter or a name in place of the file's, are patterns and not files."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(ROOT / name)):
        assert link.startswith(("https://", "#")) or ((ROOT / name).parent / link.partition("#")[0]).exists(), link
    for path in re.findall(r"`((?:epmoe|csrc|tests|docs|configs|launch)/[\w./]*)", prose_of(ROOT / name)):
        if not re.search(r"/(?:test_)?X\b", path) and not path.endswith("test_"):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", NAMES)
def test_tests_and_targets_that_are_named_exist(name: str) -> None:
    text = text_of(ROOT / name)
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        functions = {node.name for node in ast.parse(text_of(ROOT / path)).body if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{path}::{test}"
    sources = "".join(map(text_of, (ROOT / "tests").rglob("test_*.py")))
    known = set(re.findall(r"def (test_\w+)", sources))
    assert set(re.findall(r"`(test_\w+)`", text)) <= known
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_the_public_names_are_in_the_reference() -> None:
    import epmoe

    reference = "\n".join(text_of(path) for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: epmoe\.(\w+)$", reference, re.MULTILINE))
    assert set(epmoe.__all__) - {"__version__"} <= documented


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    four_gpus = read(ROOT / "benchmarks" / "h200x4_exchange.json")
    lines = [dict(four_gpus.line(name)) for name in ("epmoe", "flashinfer", "deepep_ll")]
    row = r"^\| (\d+) \| \*\*([\d.]+)(?: µs)?\*\* \| ([\d.]+) \| ([\d.–]+) \|$"
    shown = re.findall(row, text_of(ROOT / "README.md"), re.MULTILINE)
    assert len(shown) == 5
    for tokens, *figures in shown:
        measured = [line.get(int(tokens)) for line in lines]
        assert figures == ["–" if figure is None else str(figure) for figure in measured]
