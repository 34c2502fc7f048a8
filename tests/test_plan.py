"""`epmoe plan`: its tables on a narrow terminal, and what it advises about
`capacity.max_expert_rows`.
"""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from helpers import ROOT
from typer.testing import CliRunner

from epmoe.cli import app
from epmoe.cli.capacity import LOADS, Capacity, suggestions
from epmoe.cli.console import human_bytes
from epmoe.config.config import EPConfig
from epmoe.exchange.memory import MemoryPlan
from epmoe.local.simulate import simulate_routing

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
DEEPSEEK = ROOT / "configs" / "h200x8_deepseek_v3.yaml"


def plan(*arguments: object, **environment: str) -> str:
    env = {"COLUMNS": "80"} | environment
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env=env)
    assert result.exit_code == 0, result.output
    return result.output


def words(text: str) -> str:
    return " ".join(text.split())


def tiny(**capacity: object) -> EPConfig:
    """4 ranks × 100 tokens × top-3 of 12 experts, of which each rank has 3."""
    return EPConfig(
        model={"num_experts": 12, "num_experts_per_tok": 3, "hidden_size": 64},
        topology={"ep_size": 4},
        capacity={"max_num_tokens_per_rank": 100, "alignment": 1} | capacity,
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_plan_fits_80_columns_and_cuts_no_name(path):
    shown = plan(path)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    used = [buffer for buffer in MemoryPlan.build(EPConfig.load(path)).buffers if buffer.nbytes]
    for buffer in used:
        assert f" {buffer.name} " in shown
        assert f" {buffer.nbytes:,} " in shown


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("columns", ["20", "40"])
def test_the_plan_cuts_no_number_on_a_narrow_terminal(path, columns):
    shown = plan(path, COLUMNS=columns)
    assert "…" not in shown
    largest = MemoryPlan.build(EPConfig.load(path))
    for buffer in largest.buffers:
        if buffer.nbytes:
            assert f" {buffer.name} " in shown and f" {buffer.nbytes:,} " in shown
            assert all(f" {size} " in shown for size in buffer.shape)
    assert f" {largest.total_bytes:,} " in shown


def test_the_plan_of_a_hugging_face_checkpoint(tmp_path, monkeypatch):
    """Its folder is a configuration once the number of ranks is given; one named like a ready
    configuration is none.
    """
    keys = dict(
        num_experts=12,
        num_experts_per_tok=3,
        hidden_size=64,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "dtype": "bfloat16"} | keys)
    )
    # The plan is that of the config it says.
    shown = json.loads(
        plan(tmp_path, "--nproc", 4, "--json", "-", EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK="100")
    )
    want = MemoryPlan.build(
        EPConfig.from_hf(tmp_path, ep_size=4, capacity={"max_num_tokens_per_rank": 100})
    )
    assert [rank["total_bytes"] for rank in shown["ranks"]] == [want.total_bytes] * 4
    # Without a number of ranks there is none.
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert (
        result.exit_code == 2
        and "does not say on how many ranks it runs: give `--nproc`" in words(result.output)
    )
    # A folder that is named like a configuration.
    (tmp_path / "cpu_demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert plan("cpu_demo", "--nproc", 2) == plan("cpu_demo.yaml", "--nproc", 2)


@pytest.mark.parametrize(
    ("nodes", "padding"), [(2, "1.00"), (4, "1.11"), (8, "1.51"), (16, "2.45")]
)
def test_the_plan_of_several_nodes_says_what_padding_costs(tmp_path, nodes, padding):
    """Top-8 of 256 experts."""
    path = tmp_path / "nodes.yaml"
    path.write_text(
        "model: {num_experts: 256, num_experts_per_tok: 8, hidden_size: 1024}\n"
        f"topology: {{ep_size: {2 * nodes}, ranks_per_node: 2}}\n"
        "capacity: {max_num_tokens_per_rank: 64, max_rows_per_node: 48}\n"
    )
    shown = words(plan(path))
    assert f"slabs are {padding} × as long as the rows in them" in shown
    assert "Slabs have 48 rows (`capacity.max_rows_per_node`)" in shown
    assert "rail.received" in shown and "rail per rank" in shown
    assert "`capacity.max_expert_rows` should be set" in shown


def test_the_plan_says_what_max_expert_rows_would_save():
    """DeepSeek-V3 on 8 GPUs: 8·1024·8 rows at worst, an eighth of them if the load is balanced."""
    shown = words(plan(DEEPSEEK))
    assert "By default a rank has 69,632 rows" in shown
    assert "8,192 rows a rank are the mean of balanced routing" in shown
    # As JSON.
    rows = json.loads(plan(DEEPSEEK, "--json", "-"))["expert_rows"]
    assert (rows["worst"], rows["mean"]) == (69632, 8192)
    assert [one["load"] for one in rows["suggestions"]] == list(LOADS)
    # Savings are those of plans with the limit.
    config = EPConfig.load(DEEPSEEK)
    found = suggestions(EPConfig.load(DEEPSEEK))
    assert [one.load for one in found] == list(LOADS) == [1.0, 1.5, 2.0]
    for one in found:
        assert f"{one.rows:,} {one.load:g} × the mean {one.saved_bytes / 2**30:.1f} GiB" in shown
        limited = EPConfig(**config.model_dump() | {"capacity": {"max_expert_rows": one.rows}})
        saved = MemoryPlan.build(config).total_bytes - MemoryPlan.build(limited).total_bytes
        assert one.saved_bytes == 8 * saved  # eight equal ranks
    assert "A round with more rows raises EPOverflowError." in shown
    assert "Pairs beyond it are dropped and counted." in words(
        plan(DEEPSEEK, EPMOE_CAPACITY__ON_OVERFLOW="drop")
    )


def test_a_limit_that_is_set_is_told_as_a_load():
    shown = words(
        plan(DEEPSEEK, EPMOE_CAPACITY__MAX_EXPERT_ROWS="12902", EPMOE_CAPACITY__ALIGNMENT="1")
    )
    assert "`capacity.max_expert_rows` = 12,902 is enough for 1.5 × the mean load" in shown
    assert "max_expert_rows" not in plan("cpu_demo"), "it would save little"


def test_rows_by_hand():
    """A token sends 3·3/12 = 0.75 pairs to a rank, with variance 3 · 1/4 · 3/4 · 9/11."""
    capacity = Capacity.of(tiny())
    assert (capacity.worst, capacity.mean, capacity.padding) == (1200, 300, 0)
    assert capacity.sigma == pytest.approx((400 * 3 * 3 / 16 * 9 / 11) ** 0.5)
    assert capacity.rows(1.0) == 382  # 300 + 6 · 13.57
    assert capacity.rows(2.0) == 716  # 600 + 6 · 13.57 · √2
    assert capacity.rows(10.0) == 1200  # never more than the worst case
    assert Capacity.of(tiny(alignment=8)).rows(1.0) == 382 + 3 * 7
    assert Capacity.of(tiny(alignment=8)).worst == 1224  # 1200 + 3 · 7, rounded up
    for one, load in product((capacity, Capacity.of(tiny(alignment=8))), (0.5, *LOADS)):
        assert one.load(one.rows(load)) == pytest.approx(load, rel=0.01), "the inverse"


def test_balanced_routing_stays_below_the_value_for_a_load_of_1():
    capacity = Capacity.of(tiny())
    placement = tiny().place_experts()
    owners = torch.tensor(placement.owners)
    rounds = [
        simulate_routing("uniform", 400, 12, 3, seed=seed, ep_size=4)[0].long()
        for seed in range(200)
    ]
    rows = torch.stack([owners[ids].flatten().bincount(minlength=4) for ids in rounds]).double()
    assert rows.mean().item() == capacity.mean
    assert rows.std().item() == pytest.approx(capacity.sigma, rel=0.1)
    assert rows.max().item() < capacity.rows(1.0)


def test_the_plan_tells_of_ranks_without_experts(tmp_path):
    """`memory` is that of the rank with most, which holds all experts."""
    path = tmp_path / "service.json"
    path.write_text(
        json.dumps(
            {
                "model": {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 1024},
                "topology": {"ep_size": 3},
                "placement": {"strategy": "explicit", "assignment": [2] * 8},
            }
        )
    )
    config = EPConfig.load(path)
    # Ranks with nothing, and one with all.
    least, _, most = (MemoryPlan.build(config, rank).total_bytes for rank in range(3))
    shown = words(plan(path))
    assert "memory of rank 2" in shown
    totals = {"per rank": most, "without experts": least, "per node": 2 * least + most}
    for what, nbytes in totals.items():
        assert f"total {what} {human_bytes(nbytes)} {nbytes:,}" in shown
