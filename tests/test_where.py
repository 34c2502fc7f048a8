"""docs/where.md says what tests and messages say."""

from __future__ import annotations

import re

import pytest
import tried
from helpers import ROOT
from where import PAGE, README, STACKS, TABLE, in_readme, render

from epmoe.native.build import TRIED_TORCH

CELLS = [
    pytest.param(cell, id=f"{feature}, {stack}")
    for feature, row in TABLE.items()
    for stack, cell in zip(STACKS, row, strict=True)
]


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_names_what_exists(cell):
    if cell.sign == "yes":
        path, _, name = cell.says.partition("::")
        assert re.search(
            rf"^def {name}\(", (ROOT / "tests" / path).read_text(encoding="utf-8"), re.MULTILINE
        )
    elif cell.file:
        source = (ROOT / "epmoe" / cell.file).read_text(encoding="utf-8")
        assert cell.says in re.sub(r'"\s+f?"', "", source)  # strings of several lines
    else:
        assert cell.says.endswith(".")


def test_the_newest_torch_that_was_tried_is_the_one_that_users_are_told():
    torches = {
        tuple(map(int, re.findall(r"torch (\d+)\.(\d+)", line)[0])) for line in tried.lines()
    }
    assert max(torches) == TRIED_TORCH[1] and min(torches) >= TRIED_TORCH[0]


def test_the_page_is_the_table():
    assert PAGE.read_text(encoding="utf-8") == render(), "python tests/where.py writes it"


def test_readme_shows_the_same_cells():
    readme = README.read_text(encoding="utf-8")
    assert readme == in_readme(readme), "python tests/where.py writes it"
    assert "| serves | yes | yes |" in readme
