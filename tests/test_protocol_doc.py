"""docs/protocol.md against the code: its map of the window names every buffer of the plan and who
uses it.
"""

from __future__ import annotations

import re

import pytest
from helpers import ROOT, alone

from epmoe.exchange.memory import MemoryPlan

COLUMNS = (
    "buffer",
    "region",
    "used by",
    "writer",
    "reader",
    "arrival",
    "re-armed by",
    "next write after",
)
REGIONS = {  # by the cell of the column: the region with nvlink, and without
    "window": ("window", "window"),
    "scratch": ("scratch", "scratch"),
    "window (CUDA), scratch (CPU)": ("window", "scratch"),
}
TEXT = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")


def plan_of(nvlink: bool) -> MemoryPlan:
    """A small plan that has every buffer: with fp8 both ways, no scales are empty."""
    config = alone(
        hidden=256, topology={"ep_size": 4}, exchange={"payload": "fp8", "combine_payload": "fp8"}
    )
    return MemoryPlan.build(config, nvlink=nvlink)


def window_map() -> dict[str, dict[str, str]]:
    """The rows of all tables under "The window map", by the name of the buffer."""
    (section,) = re.findall(r"^## The window map$(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    rows: dict[str, dict[str, str]] = {}
    for line in re.findall(r"^\|.*\|$", section, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(COLUMNS), line
        if cells == list(COLUMNS) or set("".join(cells)) <= set("-:"):
            continue
        name = re.fullmatch(r"`([\w.]+)`", cells[0])
        assert name, line
        assert name[1] not in rows, f"{name[1]} has two rows"
        rows[name[1]] = dict(zip(COLUMNS, cells, strict=True))
    return rows


def devices_that_use(buffer: str) -> set[str]:
    """The devices whose sources name the buffer's field of `ExchangePlan`."""
    field = re.compile(rf"\bplan\.{buffer.replace('.', '_')}\b")
    folders = {"CPU": ROOT / "csrc/cpu", "CUDA": ROOT / "csrc/cuda"}
    return {
        device
        for device, folder in folders.items()
        if any(field.search(path.read_text(encoding="utf-8")) for path in folder.rglob("*.*"))
    }


@pytest.mark.parametrize("nvlink", [True, False])
def test_the_map_has_the_buffers_of_the_plan(nvlink):
    buffers = {buffer.name: buffer for buffer in plan_of(nvlink).buffers}
    rows = window_map()
    assert set(rows) == set(buffers)
    assert {name: REGIONS[row["region"]][not nvlink] for name, row in rows.items()} == {
        name: buffer.region for name, buffer in buffers.items()
    }


def test_the_map_says_which_device_uses_a_buffer():
    claimed = {
        name: set(re.findall(r"\b(?:CPU|CUDA)\b", row["used by"]))
        for name, row in window_map().items()
    }
    assert claimed == {name: devices_that_use(name) for name in claimed}


def test_a_device_has_the_buffers_that_it_uses():
    for device, nvlink in (("CPU", False), ("CUDA", True)):
        plan = plan_of(nvlink)
        assert not [
            name
            for name, row in window_map().items()
            if device in row["used by"] and not plan[name].nbytes
        ]


def test_only_ll_lines_are_re_armed():
    """What the window begins with as empty lines is what a reader re-arms."""
    plan = plan_of(nvlink=True)
    starts = {lines.start for lines in plan.empty_lines}
    empty = {
        buffer.name
        for buffer in plan.buffers
        if buffer.region == "window" and buffer.offset in starts
    }
    assert {
        name for name, row in window_map().items() if row["re-armed by"].startswith("the reader")
    } == empty
