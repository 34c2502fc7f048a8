"""The models behind `epmoe plan --compare`: the figures of BENCHMARKS.md, the page, and the
command.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from statistics import median

import pytest
from helpers import ROOT
from typer.testing import CliRunner

from benchmarks.results import read
from epmoe.bench.node_model import NodeModel, RowBytes, Speeds, Spread
from epmoe.bench.parallelism import _FEW_ROWS, BATCHES, GPUS, Comparison, Cost, better_than_ep
from epmoe.cli import app
from epmoe.config.config import EPConfig

PAGE = (ROOT / "docs/parallelism.md").read_text()
MODELS = {
    "Qwen3-30B-A3B": "h200x2_qwen3_30b",
    "DeepSeek-V3": "h200x8_deepseek_v3",
    "Mixtral-8x7B": "h200x8_mixtral",
}


@cache
def comparison(model: str, gpu: str, gpus: int, fp8: bool) -> Comparison:
    config = EPConfig.load(ROOT / "configs" / f"{MODELS[model]}.yaml")
    return Comparison(
        EPConfig(**config.model_dump() | {"topology": {"ep_size": gpus}}), GPUS[gpu], fp8
    )


def run(*arguments: str, code: int = 0, **environment: str) -> str:
    result = CliRunner().invoke(
        app, ["plan", *arguments, "--compare"], env={"COLUMNS": "80"} | environment
    )
    assert result.exit_code == code, result.output
    return result.output


LAYOUTS = {"**epmoe**": "EP", "**epmoe**, DeepGEMM": "EP", "tensor parallel, all-reduce": "TP"}


def measured() -> list[tuple[str, str, bool, str, int, float]]:
    """Model, GPU, fp8, layout, T and µs of each of these layers in BENCHMARKS.md.

    On H200 our layers with at most 8 rows an expert were measured with DeepGEMM, which does not
    compute them any more.
    """
    found = []
    for gpu, model in itertools.product(("h100", "h200"), ("Qwen3-30B-A3B", "DeepSeek-V3")):
        name = (
            model.removesuffix("-30B-A3B").replace("-", "_").replace("DeepSeek", "deepseek").lower()
        )
        result = read(ROOT / "benchmarks" / f"{gpu}x2_layer_{name}.json")
        tokens = [column.tokens for column in result.columns if column.tokens is not None]
        experts = comparison(model, gpu, 2, True)
        for row in result.rows:
            who, precision = map(str, row.cells[:2])
            for T, us in zip(tokens, row.cells[-len(tokens) :], strict=True):
                few = 2 * T * experts.K / experts.E <= _FEW_ROWS
                if who in LAYOUTS and us is not None and not (few and gpu == "h200"):
                    found.append((model, gpu, precision == "fp8", LAYOUTS[who], T, float(us)))
    return found


def test_layers_that_were_measured():
    """Every layer within 15 %: the constants were fitted to them. The page says how far off they
    are.
    """
    cases = measured()
    for layout, count in (("EP", 54), ("TP", 44)):
        errors = [
            abs(comparison(model, gpu, 2, fp8).costs(T)[layout].us / us - 1)
            for model, gpu, fp8, measured_layout, T, us in cases
            if measured_layout == layout
        ]
        assert len(errors) == count and max(errors) <= 0.15
        found = (
            f"{count} layers of {layout}: at most {max(errors):.0%}, median {median(errors):.0%}"
        )
        assert found in " ".join(PAGE.split())


def test_one_gpu_and_uneven_loads():
    """On one GPU nothing is sent. A load of 2 doubles the rows of EP alone."""
    one = comparison("DeepSeek-V3", "h200", 1, True).costs(128)
    assert len({cost.read_bytes for cost in one.values()}) == 1
    assert one["EP"].sent_bytes == one["TP"].sent_bytes == 0
    of_eight = comparison("DeepSeek-V3", "h200", 8, True)
    even = of_eight.costs(4096)
    uneven = of_eight.costs(4096, load=2.0)
    assert uneven["EP"].experts_us == pytest.approx(2 * even["EP"].experts_us, rel=0.05)
    assert (uneven["TP"], uneven["replicas"]) == (even["TP"], even["replicas"])


def test_when_ep_is_wrong():
    def costs(**us: float) -> dict[str, Cost]:
        return {name: Cost(value, 0, 0, 0, 0, 0) for name, value in us.items()}

    assert better_than_ep(costs(EP=100, TP=90, replicas=200)) is None
    assert better_than_ep(costs(EP=100, TP=80, replicas=200)) == "TP"
    assert better_than_ep(costs(EP=100, TP=80, replicas=70)) == "replicas"


@pytest.mark.parametrize(("gpu", "gpus"), [("h100", 2), ("h200", 8)])
def test_the_page_shows_what_the_model_gives(gpu, gpus):
    for model in MODELS:
        for T in BATCHES:
            costs = comparison(model, gpu, gpus, True).costs(T)
            us = " | ".join(f"{cost.us:.0f}" for cost in costs.values())
            traffic = " | ".join(
                f"{cost.read_bytes / 1e6:.0f}"
                + f", {cost.sent_bytes / 1e6:.2f}" * (name != "replicas")
                for name, cost in costs.items()
            )
            line = (
                f"| {gpus} × {gpu.upper()}, {model} | {T} | {us} | {traffic} | "
                f"{better_than_ep(costs) or '–'} |"
            )
            assert line in PAGE


def test_the_command():
    shown = run("h200x2_qwen3_30b", "--gpu", "h100", EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK="4096")
    assert max(map(len, shown.splitlines())) <= 80
    assert "2 × H100, fp8 experts" in shown and "2 × H100, bfloat16 experts" in shown
    assert "TP was measured on two H100 only" in " ".join(shown.split())
    shown = run("h200x8_deepseek_v3", "--gpu", "h100", EPMOE_TOPOLOGY__EP_SIZE="2")
    assert "EP is the wrong choice at T = 1 (138 µs with replicas)." in shown
    found = json.loads(run("h200x2_qwen3_30b", "--gpu", "h100", "--load", "1.5", "--json", "-"))
    assert (found["gpu"], found["gpus"], found["load"]) == ("h100", 2, 1.5)
    assert found["constants"]["collective_us"] == 11.5 and len(found["cases"]) == 2 * len(BATCHES)
    assert found["cases"][0]["EP"].keys() == set(Cost._fields)
    assert found["borders"]["fp8"] == {"few_rows": 4, "few_rows_by_tma": 512}


def test_the_command_says_which_kernels_take_how_many_tokens():
    """Those for few rows take neither fp16 nor such a D, and of batch_invariant experts TMA's take
    all calls.
    """
    for gpu, key, value, kernels in (
        (
            "h200",
            "MODEL__DTYPE",
            "bfloat16",
            "few_rows up to T = 32, then few_rows_by_tma up to T = 384, then ",
        ),
        ("h200", "EXPERTS__BATCH_INVARIANT", "true", "invariant_few_rows up to T = 384, then "),
        ("h200", "MODEL__DTYPE", "float16", ""),
        ("h200", "MODEL__HIDDEN_SIZE", "2080", ""),
    ):
        shown = run("h200x2_qwen3_30b", "--gpu", gpu, **{f"EPMOE_{key}": value})
        assert f"With EP experts take {kernels}a grouped GEMM." in " ".join(shown.split())


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ("cpu_demo", {}, "`model.dtype` must be bfloat16 or float16, got float32"),
        (
            "h200x8_mixtral",
            {"EPMOE_TOPOLOGY__RANKS_PER_NODE": "4"},
            "the comparison is of one node",
        ),
    ],
)
def test_what_the_model_does_not_know(config, environment, message):
    assert message in " ".join(run(config, code=2, **environment).split())


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
    rows = [
        row.cells
        for row in result.rows
        if "epmoe" in str(row.cells[0]) and row.cells[2] == "expert-major"
    ]
    assert len(rows) == 3 and len(tokens) == 6
    for cells in rows:
        out, back = (
            "auto" if payload == "bf16" else "fp8" for payload in str(cells[1]).split(", ")
        )
        config = deepseek(gpus, exchange={"payload": out, "combine_payload": back})
        model = NodeModel(Speeds(), gpus, Spread.of(config))
        for T, measured in zip(tokens, cells[-6:], strict=True):
            predicted = sum(model.us(T, row) for row in RowBytes.of(config))
            assert predicted == pytest.approx(float(measured), rel=0.25), (cells[1], T)


def test_the_slower_of_wire_and_local_rows_counts():
    """100 tokens of 8 experts that need 6 of 8 ranks; a row takes 0.1 µs on the wire and 0.01 µs in
    the GPU.
    """
    model = NodeModel(Speeds(), 8, Spread(8, 6.0))
    assert model.us(100, RowBytes(node=34000, experts=24000)) == pytest.approx(
        4.2 + 100 * 6 * 7 / 8 / 10
    )
    assert model.us(100, RowBytes(node=0, experts=24000)) == pytest.approx(
        4.2 + 100 * (8 + 6) / 100
    )


def test_a_placement_counts():
    """Experts on two of four ranks."""
    owners = {"strategy": "explicit", "assignment": [0, 1] * 128}
    assert Spread.of(deepseek(4, placement=owners)).ranks == pytest.approx(2, abs=0.02)
