"""The documents name what exists: links, files, tests and make targets; and their blocks of code
run.

Pages and their navigation: `make docs`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from launched import run

DOCS = ROOT / "docs"
WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
WRITTEN += sorted(path for path in DOCS.rglob("*.md"))
NAMES = [str(path.relative_to(ROOT)) for path in WRITTEN]
FOLDERS = "epmoe|csrc|tests|docs|configs|launch|benchmarks|examples"
OTHERS = ("example.py", "torch/extension.h")  # files that are no part of the tree


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tracked() -> list[str]:
    """The files of the tree, without what is built."""
    files = (path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.*"))
    return [str(path.relative_to(ROOT)) for path in (*files, *ROOT.glob("*.*"), *ROOT.glob(".*"))]


def prose_of(path: Path) -> str:
    """A document without its blocks of code, in which brackets are not links."""
    return re.sub(r"```.*?```", "", text_of(path), flags=re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name):
    """`tests/test_X.py` and the like, with a letter or a name in place of the file's, are patterns
    and not files.
    """
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(ROOT / name)):
        assert (
            link.startswith(("https://", "#"))
            or ((ROOT / name).parent / link.partition("#")[0]).exists()
        ), link
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)", prose_of(ROOT / name)):
        if not re.search(r"/(?:test_)?X\b", path) and not path.endswith("test_"):
            assert (ROOT / path).exists(), path
    if name != "CHANGELOG.md":
        for path in re.findall(
            r"`([\w./-]+\.(?:py|cpp|h|cuh?|ya?ml|toml|txt|sh))`", prose_of(ROOT / name)
        ):
            known = path in OTHERS or re.search(r"/(?:test_)?X\b", path)
            assert known or any(f"/{file}".endswith(f"/{path}") for file in tracked()), path


def test_the_functions_of_a_round_are_where_the_page_says():
    page = text_of(DOCS / "round.md")
    named = re.findall(r"((?:`[\w.]+`(?:,| and)? )+)\(`([\w./]+)`\)", page.replace("\n", " "))
    assert len(named) > 40
    for names, path in named:
        for name in re.findall(r"(\w+)`", names):
            assert re.search(rf"\b{name}\b", text_of(ROOT / path)), f"{name} ({path})"


@pytest.mark.parametrize(
    "name",
    ["CONTRIBUTING.md", "docs/design.md", "docs/house.md", "docs/kernels.md", "docs/protocol.md"],
)
def test_names_of_the_code_exist(name):
    """Words in backticks that can only be names of the code: with an underscore or a capital."""
    sources = [
        ROOT / path for path in tracked() if path.endswith((".py", ".h", ".cuh", ".cu", ".cpp"))
    ]
    known = set(re.findall(r"\w+", " ".join([*tracked(), *map(text_of, sources)])))
    codes = [code for code in re.findall(r"`([^`\n]+)`", prose_of(ROOT / name)) if "/" not in code]
    names = {word for code in codes for word in re.findall(r"\b\w*[_A-Z]\w*", code)}
    assert len(names) > 8 and names <= known


@cache
def known_tests() -> set[str]:
    sources = "".join(map(text_of, (ROOT / "tests").rglob("test_*.py")))
    return set(re.findall(r"def (test_\w+)", sources))


@pytest.mark.parametrize("name", NAMES)
def test_tests_and_targets_that_are_named_exist(name):
    text = text_of(ROOT / name)
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        functions = {
            node.name
            for node in ast.parse(text_of(ROOT / path)).body
            if isinstance(node, ast.FunctionDef)
        }
        assert test in functions, f"{path}::{test}"
    assert set(re.findall(r"`(test_\w+)`", text)) <= known_tests()
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


def test_the_public_names_are_in_the_reference():
    import epmoe

    reference = "\n".join(text_of(path) for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: epmoe\.(\w+)$", reference, re.MULTILINE))
    assert set(epmoe.__all__) - {"__version__"} <= documented


BLOCK = re.compile(
    r"(?:<!-- (?P<note>(?:(?!-->).)*?) -->\n)?```(?P<language>python|bash)\n(?P<code>.*?)```",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page. The comment in front of it, if any, is its note:

    `not run: WHY`; `run by PATH::TEST`; `run: slow`; `run: long`; `setup: PYTHON`, which runs
    before it, or `slow setup: PYTHON`. Without a note the block runs as it stands.
    """

    page: Path
    line: int
    language: str
    note: str
    code: str

    @property
    def runs(self) -> bool:
        return not self.note.startswith(("not run: ", "run by "))

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        slow = self.note.startswith(("run: slow", "run: long", "slow setup:"))
        return [pytest.mark.slow] * slow + [pytest.mark.long] * self.note.startswith("run: long")

    @property
    def setup(self) -> str:
        return self.note.partition("setup:")[2].strip()


def blocks_of(page: Path) -> list[Block]:
    text = text_of(page)
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["note"] or "",
            found["code"],
        )
        for found in BLOCK.finditer(text)
    ]


PAGES = [ROOT / "README.md", *(path for path in sorted(DOCS.rglob("*.md")))]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def parameters(language: str) -> list[object]:
    return [
        pytest.param(block, id=f"{block.page.name}:{block.line}", marks=block.marks)
        for block in BLOCKS
        if block.language == language and block.runs
    ]


def test_blocks_that_do_not_run_say_why():
    for block in BLOCKS:
        known = r"not run: \w.*|run by tests/\S+::\w+|run: (slow|long)|(slow )?setup:.*|"
        assert re.fullmatch(known, block.note, re.DOTALL), (
            f"{block.page.name}:{block.line}: {block.note}"
        )
        if block.note.startswith("run by "):
            path, test = block.note.removeprefix("run by ").split("::")
            assert f"def {test}(" in text_of(ROOT / path)


@pytest.fixture
def example_names() -> Iterator[dict[str, object]]:
    """What the blocks of the pages take as given: a group of one, a layer, a batch."""
    import epmoe

    # A config, experts, and a batch with its routes.
    torch.manual_seed(0)
    model = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 128, "dtype": "float32"}
    config = epmoe.EPConfig(model=model, topology={"ep_size": 1})
    experts = epmoe.GroupedExperts(torch.randn(8, 64, 128), torch.randn(8, 128, 32))
    x = torch.randn(4, 128)
    ids = torch.arange(8).view(4, 2)
    weights = torch.full((4, 2), 0.5)
    with ExitStack() as stack, torch.inference_mode():
        ep = stack.enter_context(epmoe.ExpertParallel(config))
        layer = epmoe.MoELayer(ep, torch.randn(8, 128), experts)
        yield {
            "torch": torch,
            "epmoe": epmoe,
            "config": config,
            "ep": ep,
            "layer": layer,
            "model": layer,
            "experts": experts,
            "x": x,
            "ids": ids,
            "weights": weights,
            "layer_index": 3,
            "stack": stack,
        }


@pytest.mark.parametrize("block", parameters("python"))
def test_a_block_of_python_runs(block, example_names):
    with ExitStack() as example_names["scope"]:
        exec(block.setup, example_names)
        exec(compile("\n" * block.line + block.code, str(block.page), "exec"), example_names)


@pytest.mark.parametrize("block", parameters("bash"))
def test_a_block_of_bash_runs(block):
    result = run(["bash", "-euc", block.code])
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_bytes_of_the_page_on_choosing_are_those_of_the_plan(
    monkeypatch,
):
    from epmoe import EPConfig, MemoryPlan

    def mib(**values: object) -> float:
        with monkeypatch.context() as variables:
            for key, value in values.items():
                variables.setenv(f"EPMOE_{key}", str(value))
            plan = MemoryPlan.build(EPConfig.load(ROOT / "configs" / "h200x8_deepseek_v3.yaml"))
        return round(plan.total_bytes / 2**20, 1)

    # By M,
    page = text_of(DOCS / "choosing.md")
    tokens = "CAPACITY__MAX_NUM_TOKENS_PER_RANK"
    header, row = (
        re.findall(rf"^\| {name} \|([\d.| ]+)\|$", page, re.MULTILINE)[0]
        for name in ("M", "MiB a rank")
    )
    assert [mib(**{tokens: M.strip()}) for M in header.split("|")] == [
        float(figure) for figure in row.split("|")
    ]
    # by `max_expert_rows`,
    for rows, figure in re.findall(r"^\| (\d+,\d+) \| .* \| ([\d.]+) \|$", page, re.MULTILINE):
        assert mib(CAPACITY__MAX_EXPERT_ROWS=rows.replace(",", "")) == float(figure)
    # by alignment,
    for M in (1024, 128):
        row = re.findall(rf"^\| MiB a rank, M = {M} \|([\d.| ]+)\|$", page, re.MULTILINE)[0]
        expected = [mib(**{tokens: M}, CAPACITY__ALIGNMENT=rows) for rows in (1, 8, 16, 64, 128)]
        assert expected == [float(figure) for figure in row.split("|")]
    # and with fp8.
    fp8 = {"EXCHANGE__PAYLOAD": "fp8"}
    for name, figure in re.findall(r"^\| (fp8 \w+(?: ways)?) \| ([\d.]+) \|$", page, re.MULTILINE):
        assert mib(
            **fp8, **({"EXCHANGE__COMBINE_PAYLOAD": "fp8"} if name == "fp8 both ways" else {})
        ) == float(figure)
