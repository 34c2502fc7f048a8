"""The report's heat maps: who sends to whom, and who waits for whom."""

from __future__ import annotations

from pathlib import Path

from test_report import Elements, result, written

from epmoe.cli import charts
from epmoe.cli.result import Balancing, Result
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
    heat = Elements(charts.traffic(three))
    assert heat.text.endswith("0rows on the wire8"), "the colours are of rows on the wire alone"
    cells = [one for tag, one in heat.tags if tag == "td" and "title" in one]
    assert ["own" in one.get("class", "") for one in cells] == [i == j for i in range(3) for j in range(3)]
    assert [one.get("style") for one in cells[3:6]] == ["--v:100%", None, "--v:12%"]
    page = Elements(written(tmp_path, three))
    titles = [title for title in page.titles("td") if " to " in title]
    assert len(titles) == 9 and titles[0] == "rank 0 to itself: 900 rows" and titles[3] == "rank 1 to rank 0: 8 rows"
    assert "17 rows cross to another rank" in page.text and "1,600 rows stay on their rank" in page.text
    assert page.of_class("ramp"), "a colour bar"


def test_who_waits_for_whom(tmp_path: Path) -> None:
    three = three_ranks(waited=[[0, 2, 0.5], [0.25, 0, 1], [0, 0.004, 0]])
    assert three.late == (1, 2.004)
    heat = Elements(charts.waits(three))
    cells = [one for tag, one in heat.tags if tag == "td" and "title" in one]
    assert [title.partition(": ")[2] for title in heat.titles("td")] == [
        "0", "2 s", "500 ms", "250 ms", "0", "1 s", "0", "4 ms", "0",
    ]  # fmt: skip
    assert [one.get("style") for one in cells[:3]] == [None, "--v:100%", "--v:25%"]
    page = Elements(written(tmp_path, three))
    assert "Who waits for whom" in page.text and "waited longest for rank 1: 2.00 s" in page.text
    assert {"rank 1 for rank 0: 250 ms", "rank 2 for itself: 0"} <= {*page.titles("td")}
    assert three_ranks().late is None and "Nobody has waited" in written(tmp_path, three_ranks())
    one_rank = {"traffic": [[5]], "dropped": [0], "waited": [[0.0]], "stages": [{}], "elapsed": [0.0], "texts": ()}
    alone = result(placement=Placement.build(5, 1), **one_rank)
    assert "Who waits" not in written(tmp_path, alone), "one rank has nobody to wait for"


def test_the_colours_span_the_values_and_16_ranks_have_numbers() -> None:
    heat = Elements(charts.traffic(three_ranks(traffic=[[0, 900, 950], [1000, 0, 900], [925, 1000, 0]])))
    assert heat.text.endswith("900rows on the wire1,000")
    levels = [one["style"] for tag, one in heat.tags if tag == "td" and "--v" in one.get("style", "")]
    assert levels[:3] == ["--v:0%", "--v:50%", "--v:100%"]
    for ranks, labelled in ((16, True), (17, False)):
        page = Elements(charts.traffic(three_ranks(traffic=[[1234] * ranks] * ranks)))
        assert ("1,2341,234" in page.text) == labelled and bool(page.of_class("small")) != labelled


def test_loads_of_ranks_while_experts_move(tmp_path: Path) -> None:
    rows = [[30] * 12 + [11] * 12, [10] * 12 + [10] * 12, [5] * 12 + [9] * 12]
    balancing = Balancing(rows, [(2, 3), (12, 1), (13, 0), (24, 1)])
    assert balancing.num_moves == 5 and balancing.ends == (2.0, 1.1)
    chart = charts.balance(balancing)
    lines = [Elements(line).text for line in chart.split("<tr>")[1:]]
    assert lines[0] == "rank" + "".join(f"{n}" for n in range(1, 24, 2))
    assert [line[:5] for line in lines[1:4]] == ["02.00", "10.67", "20.33"]
    assert lines[4].startswith("most2.00") and lines[4].endswith("1.10")
    assert lines[5].startswith("moves300001000001")
    assert lines[5].endswith("0.33×load of a rank, over the mean2.00×")
    page = Elements(written(tmp_path, three_ranks(balancing=balancing)))
    assert "5 experts have moved; the busiest rank took 2.00 × the mean in the first quarter, 1.10 ×" in page.text
    assert "rank 1, rounds 1 to 2: 0.67× the mean" in page.titles("td")
    assert "Load of the slots" in page.text and "busiest slot" in page.text
    assert {attributes.get("scope") for tag, attributes in page.tags if tag == "th"} == {"col", "row"}
    assert "while experts move" not in written(tmp_path, three_ranks())


def test_a_run_of_one_round_or_of_many_ranks_or_without_tokens(tmp_path: Path) -> None:
    assert charts.balance(Balancing([[1], [3]], [])).count('scope="col"') == 1
    many = charts.balance(Balancing([[n] * 5 for n in range(64)], []))
    assert "cells small" in many and many.count('scope="col"') == 5
    nothing = Balancing([[0], [0], [0]], [])
    assert nothing.ends == (1.0, 1.0) and "0 experts have moved" in nothing.outcome
    assert written(tmp_path, three_ranks(balancing=nothing))
