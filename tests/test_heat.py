"""The report's heat maps: who sends to whom, and who waits for whom."""

from __future__ import annotations

from pathlib import Path

from test_report import Elements, result, written

from epmoe.cli import charts
from epmoe.cli.result import Result
from epmoe.config.placement import Placement


def three_ranks(**changes: object) -> Result:
    nothing = [[0] * 3] * 3
    fields = {"placement": Placement.build(5, 3), "traffic": nothing, "waited": nothing, "stages": [{}] * 3}
    return result(**fields | {"elapsed": [0.0] * 3, "dropped": [0] * 3, "texts": ()} | changes)


def test_rows_to_oneself_stand_apart_from_rows_on_the_wire(tmp_path: Path) -> None:
    traffic = [[900, 4, 0], [8, 700, 1], [2, 2, 0]]
    three = three_ranks(traffic=traffic)
    assert (three.rows_moved, three.rows_kept) == (17, 1600)
    assert three.bytes_dispatched == 17 * (128 * 2 + 2 * 8) and three.bytes_combined == 17 * 128 * 2
    heat = charts.heat(three)
    assert heat.top == "8", "the colours are of rows on the wire alone"
    assert [[cell.own for cell in row] for row in heat.rows] == [[i == j for j in range(3)] for i in range(3)]
    assert [cell.level for cell in heat.rows[1]] == [1.0, 0.0, 0.125]
    page = Elements(written(tmp_path, three))
    cells = [attributes for tag, attributes in page.tags if tag == "td" and " to " in attributes.get("title", "")]
    assert len(cells) == 9
    for own in page.of_class("own")[:3]:
        assert "to itself" in own["title"] and "--v" not in own.get("style", "")
    assert "rank 1 to rank 0: 8 rows" in [cell["title"] for cell in cells]
    assert "17 rows cross to another rank" in page.text and "1,600 rows stay on their rank" in page.text
    assert page.of_class("ramp"), "a colour bar"


def test_who_waits_for_whom(tmp_path: Path) -> None:
    three = three_ranks(waited=[[0, 2, 0.5], [0.25, 0, 1], [0, 0.004, 0]])
    assert three.late == (1, 2.004)
    assert [[cell.text for cell in row] for row in charts.waits(three).rows] == [
        ["0", "2 s", "500 ms"], ["250 ms", "0", "1 s"], ["0", "4 ms", "0"],
    ]  # fmt: skip
    assert [cell.level for cell in charts.waits(three).rows[0]] == [0, 1, 0.25]
    page = Elements(written(tmp_path, three))
    assert "Who waits for whom" in page.text and "waited longest for rank 1: 2.00 s" in page.text
    titles = [attributes.get("title", "") for tag, attributes in page.tags if tag == "td"]
    assert "rank 1 for rank 0: 250 ms" in titles and "rank 2 for itself: 0" in titles
    assert three_ranks().late is None and "Nobody has waited" in written(tmp_path, three_ranks())
    alone = result(
        placement=Placement.build(5, 1),
        traffic=[[5]],
        dropped=[0],
        waited=[[0.0]],
        stages=[{}],
        elapsed=[0.0],
        texts=(),
    )
    assert "Who waits" not in written(tmp_path, alone), "one rank has nobody to wait for"


def test_the_colours_span_the_values_and_16_ranks_have_numbers() -> None:
    heat = charts.heat(three_ranks(traffic=[[0, 900, 950], [1000, 0, 900], [925, 1000, 0]]))
    assert (heat.low, heat.top) == ("900", "1,000")
    assert [cell.level for cell in heat.rows[0]] == [0, 0, 0.5] and heat.rows[1][0].level == 1
    for ranks, labelled in ((16, True), (17, False)):
        assert charts.heat(three_ranks(traffic=[[1] * ranks] * ranks)).labelled == labelled
