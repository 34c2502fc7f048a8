"""BENCHMARKS.md, its plots and README's table are what the JSON files of benchmarks/ render to, in
a schema.
"""

from __future__ import annotations

import json
import re

import pytest
from launched import ROOT

from benchmarks import render, results
from benchmarks.peers.mega_moe_ring import Kernel
from benchmarks.results import FOLDER, Asked, Published, load, read
from epmoe.bench import gpu
from epmoe.bench.facts import facts
from epmoe.bench.sample import Sample
from epmoe.bench.timing import Times
from epmoe.config.config import EPConfig

MODEL = {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 128}
FILES = sorted(FOLDER.glob("*.json"))


def test_what_is_committed_is_what_the_files_render_to(tmp_path):
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder in (first, second):
        render.write(folder)
    # Pages are as committed.
    for file in (render.README, render.MARKDOWN):
        text = (first / file).read_text(encoding="utf-8")
        assert (ROOT / file).read_text(encoding="utf-8") == text, "run `make benchmarks-report`"
    best = re.findall(r"^\| (\d+) \|.*\*\*[\d.]+\*\*", render.readme(), re.MULTILINE)
    assert list(map(int, best)) == [1, 16, 64, 128, 512, 4096], (
        "README's table, with the best in bold"
    )
    # Plots come out equal each time.
    for plot in render.PLOTS.values():
        drawn = (first / plot.file).read_bytes()
        assert (
            f"({plot.file})" in text
            and drawn == (second / plot.file).read_bytes()
            and len(drawn) < 200_000
        )
        assert (ROOT / plot.file).read_bytes().startswith(b"\x89PNG")


def test_the_page_on_parallelism_shows_what_was_measured():
    """Layers of both kinds on two H100, at the T of its table."""
    page = (ROOT / "docs/parallelism.md").read_text(encoding="utf-8")
    whose = {"**epmoe**": "EP", "tensor parallel, all-reduce": "TP"}
    for model in ("qwen3", "deepseek_v3"):
        result = read(FOLDER / f"h100x2_layer_{model}.json")
        tokens = [column.name for column in result.columns]
        shown = [tokens.index(T) for T in ("T = 1", "16", "128", "512", "1024", "4096")]
        # Rows of the result, as the page has them.
        lines = []
        for row in result.rows:
            if row.cells[0] in whose:
                figures = " | ".join(f"{row.cells[index]}" for index in shown)
                lines.append(f"| {whose[row.cells[0]]} | {figures} |")
        assert len(lines) == 4 and all(line in page for line in lines)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_comes_from(path):
    result = read(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["commit"] and content["command"]
    text = render.markdown([[result]])
    for fact in (
        result.title,
        result.machine,
        str(result.date),
        result.commit,
        result.torch,
        result.command,
    ):
        assert fact in text
    assert any(column.unit for column in result.columns) and result.rows


@pytest.mark.parametrize(
    ("limit", "measured", "row"),
    [
        ("at most", [2, 3], None),
        ("at least", [2, 3], None),
        ("at least", [1, 3], "a round: at least 2 / 3 µs | 1 / 3 | the wire |"),
        ("at most", [2, 4], "a round: at most 2 / 3 µs | 2 / 4 | the wire |"),
    ],
)
def test_a_miss_stays_visible(limit, measured, row):
    asked = Asked(
        what="a round", limit=limit, asked=(2, 3), measured=measured, unit="µs", bound_by="the wire"
    )
    text = render.markdown([[load()[0].model_copy(update={"asked": (asked,)})]])
    assert f"Of 1 targets of these results {int(row is None)} were reached" in text
    assert row in text if row else "| a round" not in text


def test_the_page_is_short_and_shows_every_result():
    text = render.markdown(render.sections())
    assert text.count("\n") <= 140
    assert sorted(name for names in render.SECTIONS for name in names) == [
        path.stem for path in FILES
    ]
    tables = [results[0].title for results in render.sections()]
    assert [text.count(f"\n## {title}\n") for title in tables] == [1] * len(tables)


def test_results_of_several_models_share_a_table():
    models = [
        result
        for result in load()
        if result.title == "Two H100: a whole layer, windows of M = 4096"
    ]
    text = render.markdown([models])
    assert text.count("| model |") == 1 and len(models) == 3
    assert all(
        result.command in text and f"| {result.model} | **epmoe** |" in text for result in models
    )
    assert "| gpt-oss-120b | **epmoe** | bf16, MXFP4 | 46.4 | – | – | – | 343 |" in text
    detail = next(row for result in models for row in result.rows if row.detail)
    assert f"| {detail.cells[0]} | {detail.cells[1]} | {detail.cells[2]} |" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [{"cells": [1, 2]}]}, "row 1 has 2 cells for 8 columns"),
        ({"commit": "newest"}, "commit"),
        ({"command": ""}, "command"),
        ({"columns": [{"name": "T"}] * 8}, "two columns have the same name"),
        ({"colour": "blue"}, "colour"),
        (
            {"asked": [{"what": "", "limit": "at most", "asked": [1], "measured": [], "unit": ""}]},
            "`asked` has 1 figures",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change, message):
    content = json.loads((FOLDER / "cpu_exchange.json").read_text(encoding="utf-8"))
    Published.model_validate(content)
    with pytest.raises(ValueError, match=message):
        Published.model_validate(content | change)


def test_figures_of_epmoe_bench_become_a_result(tmp_path, monkeypatch):
    sample = Sample(
        EPConfig(model=MODEL, topology={"ep_size": 2}, capacity={"max_num_tokens_per_rank": 16}),
        0,
        16,
    )
    # Figures of two sides, of which one has no figure at T = 1.
    measured = [
        gpu.result(sample, side, gpu.Payload.PLAIN, Times(4.0, 5.0, us), 8.0) | {"tokens": T}
        for T in (1, 16)
        for side, us in (("floor", 8.0), ("fused", 100.4 if T == 16 else 9.94))
        if (T, side) != (1, "floor")
    ]
    report = gpu.report(measured, {"DeepEP, plain": "needs deep_ep"})
    report.write_json(
        tmp_path / "figures.json",
        facts("gpu", sample.config, "uniform", 3) | {"command": "epmoe bench x"},
    )
    (tmp_path / "result.json").write_text(
        json.dumps({"title": "Two cards: the exchange", "notes": []})
    )
    monkeypatch.setattr(
        "sys.argv", ["", str(tmp_path / "figures.json"), str(tmp_path / "result.json"), "round"]
    )
    # They come behind the title that is there.
    results.main()
    result = read(tmp_path / "result.json")
    assert (result.title, result.notes) == ("Two cards: the exchange", ())
    # And into the page.
    text = render.markdown([[result]])
    assert (
        "| side | payload | what | T = 1, µs |" not in text
        and "| side | payload | what | T = 1 | 16 |" in text
    )
    assert "| fused | plain | round | 9.9 | 100 |\n| floor | plain | round | – | 8.0 |" in text


@pytest.mark.parametrize(
    # R, E, K, D, F, T; what the library of the wheel gave to its compiler and to the launch.
    (
        "shape",
        "chosen",
    ),
    [
        ((2, 128, 8, 2048, 768, 16), (64, 64, 0, 0, 4, 202712, 0, 0, 1, 1)),
        ((2, 256, 8, 7168, 2048, 512), (64, 8, 0, 0, 4, 214208, 0, 1, 0, 0)),
        ((2, 128, 8, 2048, 768, 4096), (128, 64, 4029, 34304, 4, 220120, 2, 0, 0, 0)),
        ((8, 256, 8, 7168, 2048, 4096), (128, 32, 4014, 18944, 3, 186464, 4, 1, 0, 0)),
    ],
)
def test_mega_moe_is_launched_as_its_wheel_launches_it(shape, chosen):
    names = [
        "TILE_M",
        "WAVE",
        "LAG",
        "RING_TOKENS",
        "STAGES",
        "SHARED_BYTES",
        "STORES",
        "EARLY_COMBINE",
        "COUNTS",
        "EARLY",
    ]
    constants = Kernel(*shape).constants
    assert tuple(constants[name] for name in names) == chosen
