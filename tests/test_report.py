"""The HTML report: one file that loads nothing, says what was run, and shows failed checks and heat
maps.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from epmoe.cli import charts
from epmoe.cli.console import without_folder
from epmoe.cli.report import about, caution, headline, write_report
from epmoe.cli.result import STAGES, Balancing, Baseline, Check, Result, imbalance, mean_stages
from epmoe.cli.tables import rank_table, show, stage_table, summarise, summary_table
from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement

CONFIG = EPConfig(
    model={"num_experts": 5, "num_experts_per_tok": 2, "hidden_size": 128, "dtype": "bfloat16"},
    topology={"ep_size": 2},
)
ABOUT = {
    "Command": "epmoe run tiny.yaml --report report.html",
    "Configuration": "tiny.yaml",
    "Machine": "A Processor 9000 · 2 cores",
    "When": "9 May 2026, 07:29 UTC, took 57 s",
    "Versions": "epmoe 0.1.0 · python 3.11.7",
}


def result(**changes: object) -> Result:
    fields: dict = {
        "name": "tiny",
        "facts": {"experts": "5"},
        "config": CONFIG,
        "checks": [Check("error", "1e-7", True)],
        "placement": Placement.build(5, 2, "round_robin"),
        "traffic": [[3, 4], [5, 6]],
        "load": [1, 20, 3, 40, 5],
        "dropped": [0, 0],
        "stages": [{"dispatch": 0.02, "combine": 0.01}, {"dispatch": 0.04, "combine": 0.03}],
        "elapsed": [0.03, 0.07],
        "rounds": 2,
        "health": {"timeouts": 0, "duplicate_ids": 7},
        "waited": [[0.0, 0.25], [0.5, 0.0]],
        "texts": [("<b>prompt</b>", "a & b"), ("Once", "upon")],
    }
    return Result(**(fields | changes))


BASELINE = Baseline(
    texts=["a & b", "a time"],
    stages=[{"attention": 0.002, "loop": 0.001}, {"attention": 0.004, "loop": 0.003}],
    elapsed=[0.003, 0.007],
    logit_errors=[[1e-7, 2e-6], [0.0, 3e-7]],
)


def written(tmp_path: Path, *results: Result) -> str:
    write_report(results, tmp_path / "report.html", ABOUT)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Every start tag of a page with its attributes, and the text of the page without its style and
    script.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attributes}))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in ("style", "script"):
            self.text += data

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [
            attributes for _, attributes in self.tags if name in attributes.get("class", "").split()
        ]

    def titles(self, tag: str = "") -> list[str]:
        return [
            attributes["title"]
            for name, attributes in self.tags
            if "title" in attributes and tag in ("", name)
        ]


def test_the_report_needs_no_other_file(tmp_path):
    """And it is small; every header says what it heads."""
    html = written(
        tmp_path, *[result(name=f"model {n}", baseline=BASELINE if n else None) for n in range(4)]
    )
    assert len(html) < 200_000
    # Headers say what they head, and no tag loads or leads anywhere else.
    tags = Elements(html).tags
    assert {attributes.get("scope") for tag, attributes in tags if tag == "th"} == {"col", "row"}
    for tag, attributes in tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:,")), attributes
        if tag == "a":
            assert f'id="{attributes["href"][1:]}"' in html, "a link within the page leads nowhere"
    # Neither do style and script.
    assert (
        "http:" not in html
        and "https:" not in html
        and "@import" not in html
        and "url(" not in html
    )
    assert "default-src 'none'" in html, "the browser refuses whatever the page would load"


def test_the_report_says_what_was_run_where_when_and_with_which_versions(tmp_path):
    text = Elements(written(tmp_path, result())).text
    for said in (*ABOUT, *ABOUT.values(), "bfloat16", "K = 2"):
        assert said in text
    assert "9 rows there, as many sums back" in text
    assert "hidden_size: 128" in text and "ep_size: 2" in text
    assert (
        "1.74× the mean: rank 1, 60 pairs" in text and "2.90× the mean: expert 3, 40 tokens" in text
    )


def test_the_result_is_one_line(tmp_path):
    # Models that agree with one process, one that does not, and a result without a baseline.
    models = [result(name="a", baseline=BASELINE), result(name="b", baseline=BASELINE)]
    alike = "2 processes generate the same tokens as one; logits agree within 2.0e-06"
    failed = result(
        name="c", checks=[Check("same tokens", "no", False), Check("error ≤ 1e-05", "0.5", False)]
    )
    passed = result(checks=[Check("error ≤ 1e-05", "7e-07", True)])
    for results, line, kind in (
        (models, f"2 of 2 models: {alike}", "good"),
        (models[:1], f"a: {alike}", "good"),
        (
            [*models, failed],
            "1 of 3 failed: c (same tokens: no; error 0.5 (limit 1e-05))",
            "failed",
        ),
        ([passed], "tiny, 2 rounds on 2 ranks: error 7e-07 (limit 1e-05)", "good"),
        ([result(checks=[])], "tiny, 2 rounds on 2 ranks: nothing was checked", "none"),
    ):
        assert headline(results) == line and f'<h1 class="{kind}">' in written(tmp_path, *results)


def test_the_report_shows_checks_and_counters(tmp_path):
    failed = Check("logit error", "0.5 (limit 1e-05)", False)
    html = written(tmp_path, result(), result(name="other", checks=[failed]))
    assert '<li class="ok">✓ error: 1e-7</li>' in html
    assert '<li class="bad">✗ logit error: 0.5 (limit 1e-05)</li>' in html
    assert "duplicate ids 7" in html and "timeouts" not in html
    assert "&lt;b&gt;prompt&lt;/b&gt;" in html and "a &amp; b" in html


def test_one_process_stands_beside_the_ranks(tmp_path):
    text = Elements(written(tmp_path, result(baseline=BASELINE))).text
    assert text.count("a & b") == 2 and "a time" in text and "upon" in text
    assert text.count("✓ same") == 1 and text.count("✗ differs") == 1
    assert "2.0e-06" in text and "3.0e-07" in text, "largest logit difference of each rank"
    assert "3.00 ms" in text and "7.00 ms" in text and "30.0 ms" in text and "70.0 ms" in text, (
        "times of both"
    )


@pytest.mark.parametrize("baseline", [None, BASELINE])
def test_every_stage_in_the_report_is_defined(tmp_path, baseline):
    html = written(tmp_path, result(baseline=baseline))
    shown = set(re.findall(r'data-stage="([^"]*)"', html))
    assert shown == {"dispatch", "combine"} | ({"attention", "loop"} if baseline else set())
    text = Elements(html).text
    for stage, definition in STAGES.items():
        assert (f"{stage}{definition}" in text) == (stage in shown)
        assert definition.endswith(".") and definition.count(". ") == 0, "one sentence"


def test_the_time_of_a_model_is_all_in_named_stages():
    """Measured: a model of one process, whose stages are timed apart from its total."""
    pytest.importorskip("transformers")
    from epmoe.cli.demo.generate import run_model

    outcome = run_model("mixtral", max_new_tokens=4)
    assert outcome.passed and outcome.rows_moved == 0 and len(outcome.load) == 24
    for seconds, elapsed in (
        *zip(outcome.stages, outcome.elapsed, strict=True),
        *zip(outcome.baseline.stages, outcome.baseline.elapsed, strict=True),
    ):
        assert set(seconds) <= set(STAGES)
        assert sum(seconds.values()) == pytest.approx(elapsed, rel=0.02)
        assert min(seconds.values()) >= 0
    # One process has no stages of an exchange.
    assert {"attention", "route", "experts", "other layers", "loop"} == set(
        outcome.baseline.stages[0]
    )
    assert {"set up", "dispatch", "combine"} <= set(outcome.stages[0])


def test_the_means_of_stages_add_up_to_the_mean_time():
    assert result().seconds == {"dispatch": pytest.approx(0.03), "combine": pytest.approx(0.02)}
    assert sum(result().seconds.values()) == pytest.approx(sum(result().elapsed) / 2)
    assert list(mean_stages([{"loop": 1.0, "gather": 2.0}, {"gather": 4.0}])) == ["gather", "loop"]
    assert mean_stages([{"loop": 1.0}, {}]) == {"loop": 0.5}
    page = Elements(charts.stages(result(baseline=BASELINE)))
    assert [bar["aria-label"] for bar in page.of_class("track")] == [
        "one process: 5.00 ms",
        "rank 0: 30.0 ms",
        "rank 1: 70.0 ms",
    ]
    titles = page.titles()
    assert titles[0] == "one process, attention: 3.00 ms, 60% of 5.00 ms" and len(titles) == 6
    shares = [int(re.findall(r"(\d+)% of", title)[0]) for title in titles]
    assert [sum(shares[bar : bar + 2]) for bar in (0, 2, 4)] == [100, 100, 100]


def test_what_ranks_have_sent_and_computed():
    fp8 = EPConfig(
        **CONFIG.model_dump() | {"exchange": {"payload": "fp8", "combine_payload": "fp8"}}
    )
    assert result(config=fp8).bytes_dispatched == 9 * (128 + 4 + 2 * 8)
    assert result(config=fp8).bytes_combined == 9 * (128 + 4)
    out = EPConfig(**CONFIG.model_dump() | {"exchange": {"payload": "fp8"}})
    assert result(config=out).bytes_combined == result().bytes_combined > 9 * (128 + 4)
    one = result()
    assert (one.pairs, one.loads, one.rows_moved) == ([9, 60], [[1, 3, 5], [20, 40]], 9)
    assert [row[:-1] for row in rank_table(one).rows] == [
        ("0", "7", "8", "9", "#4: 5"),
        ("1", "11", "10", "60", "#3: 40"),
    ]
    assert one.passed and not result(checks=[Check("error", "1", False)]).passed


def test_imbalance_is_the_largest_load_over_the_mean():
    assert imbalance([1, 20, 3, 40, 5]) == pytest.approx(40 / 13.8)
    assert imbalance([9, 60]) == pytest.approx(60 / 34.5)
    assert imbalance([7, 7, 7]) == 1 and imbalance([0, 0]) is None
    page = Elements(charts.loads(result()))
    assert page.titles()[::2] == [
        "expert 0 on rank 0: 1 tokens, 0.07× the mean",
        "expert 4 on rank 0: 5 tokens, 0.36× the mean",
        "expert 3 on rank 1: 40 tokens, 2.90× the mean",
    ]
    assert "mean 14" in page.text and "rank 1" in page.text


@pytest.mark.parametrize("ranks", [1, 16, 64])
def test_any_number_of_ranks_and_no_traffic_at_all(tmp_path, ranks):
    empty = {
        "traffic": [[0] * ranks] * ranks,
        "load": [0] * 256,
        "dropped": [0] * ranks,
        "elapsed": [0.0] * ranks,
    }
    placement = Placement.build(256, ranks)
    idle = result(
        placement=placement, stages=[{"dispatch": 0.0}] * ranks, rounds=0, texts=(), **empty
    )
    html = written(tmp_path, idle)
    assert "Who sends to whom" in html
    assert len(html) < 500_000


@pytest.mark.parametrize(
    ("top", "labels"),
    [
        (0.0, ["0", "1"]),
        (1.0, ["0", "1"]),
        (193, ["0", "50", "100", "150", "200"]),
        (3, ["0", "1", "2", "3"]),
    ],
)
def test_axes_have_round_numbers(top, labels):
    end, ticks = charts.axis(top, lambda value: f"{value:g}", whole=True)
    assert end >= top and [label for _, label in ticks] == labels
    assert (ticks[0][0], ticks[-1][0]) == (0, 100)


def test_no_path_of_the_machine_is_repeated(monkeypatch):
    monkeypatch.setattr(
        "sys.argv",
        ["epmoe", "run", "/home/me/a b.yaml", "--report=/srv/out/r.html", "--steps", "3"],
    )
    monkeypatch.setenv("EPMOE_EXCHANGE__RAIL", "/opt/tables/t.json")
    # Names of files stay, and their folders go, from the environment, too.
    run = about(Path("/home/me/a b.yaml"), datetime.now(UTC))
    assert (
        run["Command"]
        == "EPMOE_EXCHANGE__RAIL=t.json epmoe run 'a b.yaml' --report=r.html --steps 3"
    )
    assert run["Configuration"] == "a b.yaml"
    assert (
        without_folder("../up/x.yaml") == "x.yaml"
        and without_folder("configs/x.yaml") == "configs/x.yaml"
    )
    assert re.fullmatch(r"epmoe .* · python .* · torch .*", run["Versions"])
    assert f"{len(os.sched_getaffinity(0))} core" in run["Machine"]


def test_a_reader_is_told_that_ranks_share_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert caution([result(placement=Placement.build(8, 4))]).startswith(
        "4 processes take turns on 2 cores: "
    )
    assert "One process, which generates one text, has the machine" in caution(
        [result(baseline=BASELINE)]
    )
    on_gpus = EPConfig(**CONFIG.model_dump() | {"exchange": {"transport": "nvlink"}})
    assert caution([result(config=on_gpus)]) == ""


def test_dropped_pairs_are_the_cause(tmp_path, capsys):
    limited = EPConfig(
        **CONFIG.model_dump() | {"capacity": {"max_expert_rows": 64, "on_overflow": "drop"}}
    )
    one = result(config=limited, dropped=[11, 20], checks=[Check("error ≤ 1e-05", "0.9", False)])
    assert [row[3] for row in rank_table(one).rows] == ["9/20", "60/80"]
    cause = (
        "31 of 100 pairs were dropped, most on rank 1 (20): `capacity.max_expert_rows` = 64 is too "
        "small"
    )
    text = Elements(written(tmp_path, one)).text
    assert cause in text and "kept/pairs" in text and "60/80" in text
    show(one)
    shown = " ".join(capsys.readouterr().out.split())
    assert cause in shown and "60/80" in shown and "…" not in shown
    assert "dropped" not in Elements(written(tmp_path, result())).text and result().cause == ""


def test_waiting_is_told_apart_from_dispatch(tmp_path, capsys):
    one = result(waited=[[0.0, 0.01], [0.03, 0.0]])
    assert one.waiting == 0.02
    show(one)
    told = "of it waiting ≥ 20.0 ms 10.0 ms to 30.0 ms 10.0 ms 40%"
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in " ".join(re.sub("<[^>]*>", " ", written(tmp_path, one)).split())


def test_the_terminal_and_the_report_have_the_same_tables(tmp_path, capsys):
    """Word for word; and on a terminal of 80 columns the tables are whole."""
    results = [result(name=name, baseline=BASELINE, texts=()) for name in ("deepseek_v3", "failed")]
    results[1] = replace(results[1], checks=[Check("error", "<b>", False)])
    # What the terminal shows, and the page as words.
    for one in results:
        show(one)
    summarise(results)
    shown = capsys.readouterr().out
    page = re.sub("<[^>]*>", " ", written(tmp_path, *results))
    # Both have each row.
    words = " ".join(shown.split())
    page_words = " ".join(unescape(page).split())
    for one in results:
        for table in (rank_table(one), stage_table(one)):
            assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
            for row in table.rows:
                row_words = " ".join(" ".join(row).split())
                assert row_words in words and row_words in page_words
    for row in summary_table(results).rows:
        assert " ".join(row) in words and " ".join(row) in page_words


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_bars_have_contrast(tmp_path, scheme):
    """WCAG 2: 4.5 for text, 3 for bars."""
    light, dark = written(tmp_path, result()).split("@media (prefers-color-scheme: dark)")[:2]
    colours = dict(
        re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{3,6});", dark if scheme == "dark" else light)
    )

    def contrast(one: str, other: str) -> float:
        lights = sorted(map(luminance, (colours[one], colours[other])))
        return (lights[1] + 0.05) / (lights[0] + 0.05)

    # Each stage has a colour.
    stages = [name for name in colours if name.startswith("st-") and name != "st-ink"]
    assert {name[3:].replace("-", " ") for name in stages} == set(STAGES)
    # Texts with what they stand on, and bars.
    texts = {
        **{
            "ink": "card page code",
            "muted": "card page code",
            "link": "card",
            "limit": "card",
            "tip-ink": "tip",
        },
        **{
            "good": "good-bg card",
            "failed": "failed-bg card",
            "heat-ink": "heat-0 heat-1",
            "st-ink": " ".join(stages),
        },
    }
    pairs = [(text, ground, 4.5) for text, grounds in texts.items() for ground in grounds.split()]
    pairs += [(bar, "card", 3.0) for bar in ("bar-0", "bar-1", "limit", *stages)]
    assert [(*pair, contrast(*pair[:2])) for pair in pairs if contrast(*pair[:2]) < pair[2]] == []


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    values = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values
    ]
    return sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def three_ranks(**changes: object) -> Result:
    nothing = [[0] * 3] * 3
    fields = {
        "placement": Placement.build(5, 3),
        "traffic": nothing,
        "waited": nothing,
        "stages": [{}] * 3,
    }
    return result(**fields | {"elapsed": [0.0] * 3, "dropped": [0] * 3, "texts": ()} | changes)


def test_rows_to_oneself_stand_apart_from_rows_on_the_wire(tmp_path):
    traffic = [[900, 4, 0], [8, 700, 1], [2, 2, 0]]
    three = three_ranks(traffic=traffic)
    assert (three.rows_moved, three.rows_kept) == (17, 1600)
    assert three.bytes_dispatched == 17 * (128 * 2 + 2 * 8) and three.bytes_combined == 17 * 128 * 2
    # The colours of the heat map,
    heat = Elements(charts.traffic(three))
    assert heat.text.endswith("0rows on the wire8"), "the colours are of rows on the wire alone"
    cells = [one for tag, one in heat.tags if tag == "td" and "title" in one]
    assert ["own" in one.get("class", "") for one in cells] == [
        i == j for i in range(3) for j in range(3)
    ]
    assert [one.get("style") for one in cells[3:6]] == ["--v:100%", None, "--v:12%"]
    # and what the page says.
    page = Elements(written(tmp_path, three))
    titles = [title for title in page.titles("td") if " to " in title]
    assert (
        len(titles) == 9
        and titles[0] == "rank 0 to itself: 900 rows"
        and titles[3] == "rank 1 to rank 0: 8 rows"
    )
    assert (
        "17 rows cross to another rank" in page.text
        and "1,600 rows stay on their rank" in page.text
    )
    assert page.of_class("ramp"), "a colour bar"


def test_who_waits_for_whom(tmp_path):
    three = three_ranks(waited=[[0, 2, 0.5], [0.25, 0, 1], [0, 0.004, 0]])
    assert three.late == (1, 2.004)
    # The colours of the heat map,
    heat = Elements(charts.waits(three))
    cells = [one for tag, one in heat.tags if tag == "td" and "title" in one]
    assert [title.partition(": ")[2] for title in heat.titles("td")] == [
        "0",
        "2 s",
        "500 ms",
        "250 ms",
        "0",
        "1 s",
        "0",
        "4 ms",
        "0",
    ]
    assert [one.get("style") for one in cells[:3]] == [None, "--v:100%", "--v:25%"]
    # and what the page says,
    page = Elements(written(tmp_path, three))
    assert "Who waits for whom" in page.text and "waited longest for rank 1: 2.00 s" in page.text
    assert {"rank 1 for rank 0: 250 ms", "rank 2 for itself: 0"} <= {*page.titles("td")}
    assert three_ranks().late is None and "Nobody has waited" in written(tmp_path, three_ranks())
    # unless there is nobody to wait for.
    one_rank = {
        "traffic": [[5]],
        "dropped": [0],
        "waited": [[0.0]],
        "stages": [{}],
        "elapsed": [0.0],
        "texts": (),
    }
    alone = result(placement=Placement.build(5, 1), **one_rank)
    assert "Who waits" not in written(tmp_path, alone), "one rank has nobody to wait for"


def test_the_colours_span_the_values_and_16_ranks_have_numbers():
    heat = Elements(
        charts.traffic(three_ranks(traffic=[[0, 900, 950], [1000, 0, 900], [925, 1000, 0]]))
    )
    assert heat.text.endswith("900rows on the wire1,000")
    levels = [
        one["style"] for tag, one in heat.tags if tag == "td" and "--v" in one.get("style", "")
    ]
    assert levels[:3] == ["--v:0%", "--v:50%", "--v:100%"]
    for ranks, labelled in ((16, True), (17, False)):
        page = Elements(charts.traffic(three_ranks(traffic=[[1234] * ranks] * ranks)))
        assert ("1,2341,234" in page.text) == labelled and bool(page.of_class("small")) != labelled


def test_loads_of_ranks_while_experts_move(tmp_path):
    rows = [[30] * 12 + [11] * 12, [10] * 12 + [10] * 12, [5] * 12 + [9] * 12]
    balancing = Balancing(rows, [(2, 3), (12, 1), (13, 0), (24, 1)])
    assert balancing.num_moves == 5 and balancing.ends == (2.0, 1.1)
    # Rounds two by two, of each rank, the most, and the moves.
    chart = charts.balance(balancing)
    lines = [Elements(line).text for line in chart.split("<tr>")[1:]]
    assert lines[0] == "rank" + "".join(f"{n}" for n in range(1, 24, 2))
    assert [line[:5] for line in lines[1:4]] == ["02.00", "10.67", "20.33"]
    assert lines[4].startswith("most2.00") and lines[4].endswith("1.10")
    assert lines[5].startswith("moves300001000001")
    assert lines[5].endswith("0.33×load of a rank, over the mean2.00×")
    # What the page says, but only where experts move.
    page = Elements(written(tmp_path, three_ranks(balancing=balancing)))
    assert (
        "5 experts have moved; the busiest rank took 2.00 × the mean in the first quarter, 1.10 ×"
        in page.text
    )
    assert "rank 1, rounds 1 to 2: 0.67× the mean" in page.titles("td")
    assert "Load of the slots" in page.text and "busiest slot" in page.text
    assert {attributes.get("scope") for tag, attributes in page.tags if tag == "th"} == {
        "col",
        "row",
    }
    assert "while experts move" not in written(tmp_path, three_ranks())


def test_a_run_of_one_round_or_of_many_ranks_or_without_tokens(tmp_path):
    assert charts.balance(Balancing([[1], [3]], [])).count('scope="col"') == 1
    many = charts.balance(Balancing([[n] * 5 for n in range(64)], []))
    assert "cells small" in many and many.count('scope="col"') == 5
    nothing = Balancing([[0], [0], [0]], [])
    assert nothing.ends == (1.0, 1.0) and "0 experts have moved" in nothing.outcome
    assert written(tmp_path, three_ranks(balancing=nothing))
