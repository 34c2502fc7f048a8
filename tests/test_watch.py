"""`epmoe run --watch`: what it makes of two looks at the ranks, and how it shows that with and without a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launched import torchrun
from rich.console import Console
from test_rounds import IDS, WEIGHTS, X, make_ep

from epmoe.cli import watch
from epmoe.cli.watch import Sample, View
from epmoe.config.config import EPConfig
from epmoe.exchange.health import COUNTERS, Health

CONFIG = EPConfig(
    model={"num_experts": 5, "num_experts_per_tok": 2, "hidden_size": 128, "dtype": "bfloat16"},
    topology={"ep_size": 3},
)
PLACEMENT = CONFIG.place_experts()  # 2, 2 and 1 experts


def sample(time: float, rounds: int, tokens: list[int], sent: list[int], waited: list[float]) -> Sample:
    counts = dict.fromkeys(COUNTERS, 0)
    ranks = {"rows_sent": sent, "waited_s": waited, "aborted_rounds": [0] * len(sent), "rows_by_layer": [sum(tokens)]}
    return Sample(time, Health(rounds, **counts, tokens_per_expert=tokens, **ranks))


BEFORE = [sample(10.0 * r, 5, [1] * n, [3, 3, 3], [0.0] * 3) for r, n in enumerate((2, 2, 1))]
AFTER = [
    sample(2.0, 25, [1, 9], [99, 5, 7], [0.0, 0.0, 1.0]),
    sample(12.0, 24, [61, 1], [3, 99, 3], [0.0, 0.0, 0.6]),
    sample(22.0, 25, [13], [7, 9, 99], [0.2, 0.0, 0.0]),
]


def test_rates_between_two_looks():
    view = View.between(BEFORE, AFTER, PLACEMENT)
    assert (view.rounds, view.rounds_per_s) == (24, 10.0)
    assert view.pairs == [0, 4, 30, 0, 6]
    assert view.rows == [3, 0, 5], "rows that stay on their rank do not travel"
    assert view.waited == pytest.approx([0.05, 0.0, 0.4])
    line = view.line(CONFIG)
    assert line.startswith("round 24: 10 rounds/s, 20 tokens/s, 8 rows/s between ranks (4.1 KiB/s), ")
    assert line.endswith("40% of the time waiting for rank 2, hot experts #2 3.8×, #4 0.8×, #1 0.5×")


def test_nothing_has_happened():
    view = View.between(BEFORE, BEFORE, PLACEMENT)
    assert view.line(CONFIG) == "round 5: 0 rounds/s, 0 tokens/s, 0 rows/s between ranks (0 B/s)"
    assert view.table(PLACEMENT).row_count == 3


def test_a_sample_survives_the_store():
    assert Sample.loads(AFTER[2].dumps().encode()) == AFTER[2]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_of_one_rank(monkeypatch, terminal):
    screen = Console(force_terminal=terminal, width=80, record=True, highlight=False)
    monkeypatch.setattr(watch, "console", screen)
    monkeypatch.setattr(watch, "INTERVAL_S", 0.02)
    with make_ep() as ep:
        with watch.watching(ep):
            for _ in range(3):
                d = ep.dispatch(X, IDS, WEIGHTS)
                ep.combine(d.rows, d)
        text = screen.export_text()
    if terminal:
        assert "others wait" in text and "#0 8.0×" in text and "…" not in text
    else:
        (line,) = text.splitlines()
        assert line.startswith("round 3: ") and line.endswith("hot experts #0 8.0×")


def test_an_exception_ends_it(monkeypatch):
    monkeypatch.setattr(watch, "console", Console(quiet=True))
    with make_ep() as ep, pytest.raises(LookupError), watch.watching(ep):
        raise LookupError


def test_two_ranks_without_a_terminal(tmp_path: Path) -> None:
    config = tmp_path / "tiny.json"
    sections = CONFIG.model_dump(mode="json") | {"topology": {"ep_size": 2}}
    config.write_text(json.dumps(sections))
    run = torchrun(2, "-m", "epmoe", "run", config, "--steps", 3, "--tokens", 5, "--watch")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "round 3: " in run.stdout and "round 4: " not in run.stdout, "it ends at the last round"
    assert "rounds/s" in run.stdout and "✓ error against" in run.stdout
