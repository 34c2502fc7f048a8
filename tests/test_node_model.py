"""`NodeModel` reproduces the rounds that we have measured."""

from __future__ import annotations

import pytest
from helpers import ROOT

from benchmarks.results import read
from epmoe.bench.node_model import NodeModel, RowBytes, Speeds, Spread
from epmoe.config.config import EPConfig


def deepseek(ranks: int, **sections: dict[str, object]) -> EPConfig:
    return EPConfig(
        model={"num_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168},
        topology={"ep_size": ranks, "ranks_per_node": ranks},
        **sections,
    )


@pytest.mark.parametrize("gpus", [2, 4])
def test_rounds_of_one_node_are_reproduced(gpus):
    """Every expert-major round of ours in BENCHMARKS.md, all T."""
    result = read(ROOT / "benchmarks" / f"h200x{gpus}_exchange.json")
    tokens = [column.tokens for column in result.columns if column.tokens is not None]
    rows = [row.cells for row in result.rows if "epmoe" in str(row.cells[0]) and row.cells[2] == "expert-major"]
    assert len(rows) == 3 and len(tokens) == 6
    for cells in rows:
        out, back = ("auto" if payload == "bf16" else "fp8" for payload in str(cells[1]).split(", "))
        config = deepseek(gpus, exchange={"payload": out, "combine_payload": back})
        model = NodeModel(Speeds(), gpus, Spread.of(config))
        for T, measured in zip(tokens, cells[-6:], strict=True):
            predicted = sum(model.us(T, row) for row in RowBytes.of(config))
            assert predicted == pytest.approx(float(measured), rel=0.25), (cells[1], T)


def test_the_slower_of_wire_and_local_rows_counts():
    """100 tokens of 8 experts that need 6 of 8 ranks; a row takes 0.1 µs on the wire and 0.01 µs in the GPU."""
    model = NodeModel(Speeds(), 8, Spread(8, 6.0))
    assert model.us(100, RowBytes(node=34000, experts=24000)) == pytest.approx(4.2 + 100 * 6 * 7 / 8 / 10)
    assert model.us(100, RowBytes(node=0, experts=24000)) == pytest.approx(4.2 + 100 * (8 + 6) / 100)


def test_a_placement_counts():
    """Experts on two of four ranks."""
    owners = {"strategy": "explicit", "assignment": [0, 1] * 128}
    assert Spread.of(deepseek(4, placement=owners)).ranks == pytest.approx(2, abs=0.02)
