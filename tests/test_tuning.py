"""The tuning table: read strictly, and the launch it names for a number of tokens reaches the kernels."""

from __future__ import annotations

import json
from bisect import bisect_left
from types import SimpleNamespace

import pytest
import torch
from helpers import alone

import epmoe
from epmoe.config.tuning import Launch, Tuning, TuningRow
from epmoe.exchange.memory import MemoryPlan
from epmoe.native.layouts import place

ROW = {"tokens": 8, "hidden_size": 64, "ranks": 1, "dispatch_senders": 3, "combine_senders": 2}


@pytest.fixture
def table(tmp_path):
    """Writes a table and returns its path."""

    def write(*rows: dict, name: str = "table.json", **keys: object) -> str:
        path = tmp_path / name
        path.write_text(json.dumps({"rows": rows, **keys}))  # JSON is YAML too
        return str(path)

    return write


def make_ep(tuning: str | None, max_tokens: int = 64) -> epmoe.ExpertParallel:
    return epmoe.ExpertParallel(alone(max_tokens=max_tokens, exchange={"tuning": tuning}))


def launched(ep: epmoe.ExpertParallel, T: int, D: int = 64) -> list[int]:
    """The launch of a round of T tokens, as both operators get it."""
    x = torch.randn(T, D)
    d = ep.dispatch(x, torch.zeros(T, 1, dtype=torch.int32), torch.ones(T, 1))
    assert torch.equal(ep.combine(d.rows, d), x)
    return d.sent.descriptor[[place("ExchangePlan", name) for name in Launch.model_fields]].tolist()


@pytest.mark.parametrize("name", ["table.json", "table.yaml"])
def test_a_call_is_launched_as_its_row_says(table, name):
    rows = [
        ROW | {"tokens": 32, "dispatch_senders": 16, "combine_senders": 5, "combine_team": 1},
        ROW,
        ROW | {"tokens": 64, "ranks": 2, "dispatch_senders": 99},
        ROW | {"tokens": 64, "hidden_size": 32, "combine_team": 7},
    ]
    with make_ep(table(*rows, name=name)) as ep:
        for T in (0, 1, 8):
            assert launched(ep, T) == [3, 2, 0]
        for T in (9, 32):
            assert launched(ep, T) == [16, 5, 1]
        assert launched(ep, 33) == [0, 0, 0]  # past the last row
        assert launched(ep, 33, D=32) == [3, 2, 7]
        assert len(ep._exchange.descriptors._made) == 4  # one for each launch, not for each call


def test_without_a_table_the_kernels_choose():
    with make_ep(None) as ep:
        assert launched(ep, 5) == [0, 0, 0]
        plan = MemoryPlan.build(ep.config).as_ints()
        _, descriptors = ep._exchange.descriptors.of(64, True, False, False)
        descriptor = descriptors[0]
        assert descriptor.dtype == torch.int64 and descriptor[: len(plan)].tolist() == plan
        assert descriptor[len(plan) :].tolist()[:2] == [True, False]  # expert_major, weight_rows


def test_steps_ascend_whatever_the_order_of_rows():
    tuning = Tuning(rows=[ROW | {"tokens": tokens, "dispatch_senders": tokens} for tokens in (16, 2, 128)])
    steps, launches = tuning.steps(64, 1)
    assert steps == [2, 16, 128]
    senders = [launches[bisect_left(steps, T)]["dispatch_senders"] for T in (0, 2, 3, 16, 17, 128, 129)]
    assert senders == [2, 2, 16, 16, 128, 128, 0]
    assert tuning.steps(64, 8) == ([], [dict.fromkeys(Launch.model_fields, 0)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"combine_teams": 2}, r"`rows\[1\].combine_teams` is not a known key; did you mean `combine_team`\?"),
        ({"tokens": -1}, r"`rows\[1\].tokens` must be greater than or equal to 0, got -1"),
        ({"combine_team": True}, r"`rows\[1\].combine_team` must be a valid integer, got True"),
        ({}, r"`rows\[1\]` must be the only one for these tokens, hidden_size and ranks"),
    ],
)
def test_a_wrong_row_is_named(table, row, message):
    path = table(ROW, ROW | row)
    with pytest.raises(epmoe.ConfigError, match=message) as error:
        make_ep(path)
    assert path in str(error.value)


def test_a_wrong_file_is_named(table, tmp_path):
    with pytest.raises(epmoe.ConfigError, match=r"nowhere\.yaml: no such configuration file"):
        make_ep(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(epmoe.ConfigError, match=r"table\.json: `row` is not a known key; did you mean `rows`\?"):
        make_ep(table(ROW, row=[]))
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(epmoe.ConfigError, match=r"list\.yaml: must hold a list `rows:`, got \[1, 2\]"):
        make_ep(str(tmp_path / "list.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(epmoe.ConfigError, match=r"empty\.yaml: `rows` must be set"):
        make_ep(str(tmp_path / "empty.yaml"))
    with pytest.raises(epmoe.ConfigError, match=r"`exchange.tuning` must be a valid string, got 5"):
        make_ep(5)


def test_another_table_holds_from_the_next_round_on():
    with make_ep(None) as ep:
        assert launched(ep, 8) == [0, 0, 0]
        ep.retune(Tuning(rows=(TuningRow(**ROW),)))
        assert launched(ep, 8) == [3, 2, 0]
        assert launched(ep, 9) == [0, 0, 0]


def test_the_fastest_launch_is_found(monkeypatch, tmp_path):
    """With invented times: the search ends at the best value of each parameter, and its file can be loaded."""
    from epmoe.bench import tune
    from epmoe.bench.report import Job

    def fused(ep, sample):
        return SimpleNamespace(ep=ep, sample=sample, check=lambda: None)

    def round_us(side, repeats, group):
        descriptor = side.ep.exchange.descriptors.of(64, True, False, False)[1][0]
        senders, _, team = (int(descriptor[place("ExchangePlan", name)]) for name in Launch.model_fields)
        return 100 + abs((team or 8) - 4) + abs((senders or 99) - 99)

    tried = []
    monkeypatch.setattr(tune.memory, "LL_MAX_TOKENS", 8)
    monkeypatch.setattr(tune, "Fused", fused)
    monkeypatch.setattr(tune, "round_us", round_us)
    monkeypatch.setattr(tune, "Sample", lambda *args: args)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=100))
    monkeypatch.setattr(tune, "ExpertParallel", lambda config, group: make_ep(None))
    config = make_ep(None).config
    report = tune.run(Job(config, [4, 16], ranks=object(), advance=lambda: tried.append(1)))
    assert len(tried) == tune.launches([4, 16])
    report.write_json(tmp_path / "table.json")
    ll, simple = Tuning.load(tmp_path / "table.json").rows
    assert ll == TuningRow(tokens=4, hidden_size=ll.hidden_size, ranks=1)  # LL has no warp teams
    assert (simple.tokens, simple.combine_team, simple.dispatch_senders) == (16, 4, 0)
    assert [(row["round"], row["untuned"]) for row in report.results] == [(104, 104), (100, 104)]
    assert report.table().row_count == 2
    report.plot(tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
