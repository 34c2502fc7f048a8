"""`NetworkModel` reproduces what others have published and what we have measured; its command prints it."""

from __future__ import annotations

import re
from functools import cache
from statistics import median

import pytest
from helpers import ROOT

from benchmarks.network_model import main, table
from benchmarks.results import read
from epmoe.bench.network_model import Hardware, NetworkModel, RowBytes, Spread
from epmoe.config.config import EPConfig

BF16 = RowBytes(14336, 14336, 14336)
FP8 = RowBytes(7392, 7392, 7392)
H800 = Hardware(nvlink_gb_per_s=150.0)
PUBLISHED = re.compile(
    r"^\| (\w.*) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE
)
CALIBRATION = PUBLISHED.findall((ROOT / "docs/multinode-model.md").read_text())
# For each kind of published figure: the design, whether tokens need 4 of 8 groups, the hardware, and the rows.
KINDS = {
    "DeepEP V1, low latency": ("direct_us", False, Hardware(), FP8),
    "DeepEP V1, normal": ("pipelined_us", True, H800, FP8),
    "DeepEP V2": ("pipelined_us", False, Hardware(), FP8),
    "HybridEP": ("pipelined_us", False, Hardware(), BF16),
}


def deepseek(nodes: int, ranks: int = 8, grouped: bool = False, **sections: dict[str, object]) -> EPConfig:
    groups = {"scoring": "sigmoid", "num_expert_groups": 8, "top_groups": 4}
    return EPConfig(
        model={"num_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168},
        routing=groups if grouped else {},
        topology={"ep_size": nodes * ranks, "ranks_per_node": ranks},
        **sections,
    )


@cache
def spread(nodes: int, grouped: bool = False) -> Spread:
    return Spread.of(deepseek(nodes, grouped=grouped))


def test_published_figures_are_reproduced():
    """And the page shows what the model gives."""
    assert {kind for kind, *_ in CALIBRATION} == KINDS.keys() and len(CALIBRATION) >= 13
    errors = []
    for kind, tokens, nodes, *figures in CALIBRATION:
        design, grouped, hardware, out = KINDS[kind]
        model = NetworkModel(hardware, int(nodes), 8, spread(int(nodes), grouped))
        for row, published, shown in zip((out, BF16), figures[::2], figures[1::2], strict=True):
            predicted = getattr(model, design)(int(tokens), row)
            assert abs(predicted - number(shown)) <= 0.005 * predicted, (kind, nodes)
            errors.append(abs(predicted / number(published) - 1))
    assert max(errors) <= 0.20 and median(errors) <= 0.06


@pytest.mark.parametrize("gpus", [2, 4])
def test_rounds_of_one_node_are_reproduced(gpus):
    """Every expert-major round of ours in BENCHMARKS.md, all T."""
    result = read(ROOT / "benchmarks" / f"h200x{gpus}_exchange.json")
    tokens = [column.tokens for column in result.columns if column.tokens is not None]
    rows = [row.cells for row in result.rows if "epmoe" in str(row.cells[0]) and row.cells[2] == "expert-major"]
    assert len(rows) == 3 and len(tokens) == 6
    for cells in rows:
        out, back = ("auto" if payload == "bf16" else "fp8" for payload in str(cells[1]).split(", "))
        config = deepseek(1, gpus, exchange={"payload": out, "combine_payload": back})
        model = NetworkModel.of(config, Hardware())
        for T, measured in zip(tokens, cells[-6:], strict=True):
            predicted = sum(sum(model.two_levels(T, row, slots=T)) for row in RowBytes.of(config))
            assert predicted == pytest.approx(float(measured), rel=0.25), (cells[1], T)


def test_terms_by_hand():
    """4 nodes of 8 ranks, 100 tokens that need 3 nodes and 6 ranks: see docs/multinode-model.md."""
    model = NetworkModel(Hardware(), 4, 8, Spread(8, 6.0, 3.0))
    row = RowBytes(network=44500, node=34000, experts=24000)  # 1 µs, 0.1 µs and 0.01 µs a row
    ours = model.two_levels(100, row, 120)
    assert (ours.start_us, ours.network_us) == (4 + 20 + 1.5 * 3, pytest.approx(3 * 120))
    assert ours.node_us == pytest.approx(4.2 + 100 * 6 * 7 / 8 / 10)  # the wire
    assert sum(ours) == pytest.approx(28.5 + 360 + 4.2 + 52.5)
    assert model.node_us(100, RowBytes(0, 0, 24000)) == pytest.approx(4.2 + 100 * (8 + 6) / 100)  # local rows
    assert model.pipelined_us(100, row) == pytest.approx(30 + 225 + 52.5 / 8)
    assert model.direct_us(100, row) == pytest.approx(30 + 100 * 8 * 3 / 4)


@pytest.mark.parametrize(("nodes", "padding"), [(2, 1.00), (4, 1.11), (8, 1.51), (16, 2.45)])
def test_padded_slabs_cost_more_with_more_nodes(nodes, padding):
    assert nodes / spread(nodes).nodes == pytest.approx(padding, abs=0.01)


def test_a_placement_counts():
    """Experts on two of four ranks; and a copy of every expert on the other node, so that a token needs one node."""
    owners = {"strategy": "explicit", "assignment": [0, 1] * 128}
    assert Spread.of(deepseek(1, 4, placement=owners)).ranks == pytest.approx(2, abs=0.02)
    copies = Spread.of(deepseek(2, 4, placement={"num_redundant_experts": 256}))
    assert copies.nodes == 1 and 2 < copies.ranks < 4


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_terms_add_up():
    config = deepseek(4, 4)
    rows = [[float(cell) for cell in line.strip("| ").split("|")] for line in [*table(config, Hardware())][2:]]
    assert [row[0] for row in rows] == [1, 8, 16, 64, 128, 256, 512, 1024]
    for _, dispatch, *out, combine, start, network, node, pipelined, direct in rows:
        assert dispatch == pytest.approx(sum(out), abs=0.3)
        assert combine == pytest.approx(start + network + node, abs=0.3)
        assert 60 <= pipelined < dispatch + combine + 60 and direct >= 60


def test_one_node_has_no_network():
    (*_, last) = table(deepseek(1), Hardware())
    _, dispatch, start, network, node, *_ = (float(cell) for cell in last.strip("| ").split("|"))
    assert (start, network) == (0, 0) and dispatch == node


def test_the_command_takes_the_constants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the speed of the network: half the time of its rows."""
    monkeypatch.setenv("EPMOE_TOPOLOGY__EP_SIZE", "16")
    monkeypatch.setenv("EPMOE_TOPOLOGY__RANKS_PER_NODE", "4")

    def network_us(*options: str) -> float:
        main(["cpu_bench", *options])
        return float(capsys.readouterr().out.splitlines()[-1].split("|")[4])

    assert network_us("--network_gb_per_s", "89") == pytest.approx(network_us() / 2, rel=0.001)
