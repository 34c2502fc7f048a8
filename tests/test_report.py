"""The HTML report: one self-contained file, which shows failed checks."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from epmoe.cli.report import write_report
from epmoe.cli.result import Check, Result
from epmoe.placement import Placement


def result(**changes: object) -> Result:
    fields: dict = {
        "name": "tiny",
        "facts": {"experts": "5"},
        "checks": [Check("error", "1e-7", True)],
        "placement": Placement.build(5, 2, "round_robin"),
        "traffic": [[3, 4], [5, 6]],
        "load": [1, 20, 3, 40, 5],
        "seconds": {"dispatch": 0.02, "combine": 0.01},
        "rounds": 2,
        "health": {"timeouts": 0, "duplicate_ids": 7},
        "texts": [("<b>prompt</b>", "a & b")],
    }
    return Result(**(fields | changes))


def test_the_report_needs_no_other_file(tmp_path: Path) -> None:
    write_report([result()], tmp_path / "report.html", {"ranks": "2"})
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert len(sources) == 3
    for source in sources:
        kind, data = source.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")


def test_the_report_shows_checks_and_counters(tmp_path: Path) -> None:
    failed = Check("logit error", "0.5 (limit 1e-05)", False)
    write_report([result(), result(name="other", checks=[failed])], tmp_path / "report.html", {"ranks": "2"})
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<li class="ok">✓ error: 1e-7</li>' in html
    assert '<li class="bad">✗ logit error: 0.5 (limit 1e-05)</li>' in html
    assert "duplicate ids 7" in html and "timeouts" not in html
    assert "&lt;b&gt;prompt&lt;/b&gt;" in html and "a &amp; b" in html


@pytest.mark.parametrize("ranks", [1, 16])
def test_any_number_of_ranks_and_no_traffic_at_all(tmp_path: Path, ranks: int) -> None:
    idle = result(
        placement=Placement.build(16, ranks),
        traffic=[[0] * ranks] * ranks,
        load=[0] * 16,
        seconds={"dispatch": 0.0},
        rounds=0,
        texts=(),
    )
    write_report([idle], tmp_path / "report.html", {})
    assert "Rows from rank to rank" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_sums_by_rank() -> None:
    assert result().rank_rows() == [(7, 8, 9, [1, 3, 5]), (11, 10, 60, [20, 40])]
    assert result().rows_moved == 9
    assert result().passed
    assert not result(checks=[Check("error", "1", False)]).passed
