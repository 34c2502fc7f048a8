"""docs/where.md says what tests and messages say."""

from __future__ import annotations

import re

import pytest
from helpers import ROOT
from where import PAGE, STACKS, TABLE, Cell, render

CELLS = [
    pytest.param(cell, id=f"{feature}, {stack}")
    for feature, row in TABLE.items()
    for stack, cell in zip(STACKS, row, strict=True)
]


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_names_what_exists(cell: Cell) -> None:
    if cell.kind == "yes":
        path, _, name = cell.says.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / path).read_text(encoding="utf-8"), re.MULTILINE)
    elif cell.kind == "no":
        source = (ROOT / "epmoe" / cell.file).read_text(encoding="utf-8")
        assert cell.says in re.sub(r'"\s+f?"', "", source)  # strings of several lines
    else:
        assert cell.says.endswith(".")


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "python tests/where.py writes it"
