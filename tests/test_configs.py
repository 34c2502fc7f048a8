"""Every file in configs/ loads, gives each rank the same number of experts, and has its model's shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from epmoe.config.config import EPConfig

FOLDER = Path(__file__).parents[1] / "configs"
SHAPES = {  # R, E, K, D
    "cpu_demo": (4, 16, 4, 256),
    "cpu_bench": (4, 64, 8, 1024),
    "h200x8_deepseek_v3": (8, 256, 8, 7168),
    "h200x8_qwen3_235b": (8, 128, 8, 4096),
    "h200x2_qwen3_30b": (2, 128, 8, 2048),
    "h200x4_gpt_oss_120b": (4, 128, 4, 2880),
    "h200x8_mixtral": (8, 8, 2, 4096),
    "h200x8_llama4_maverick": (8, 128, 1, 5120),
    "h200x8_qwen3_next_80b": (8, 512, 10, 2048),
    "h200x8_deepseek_v4_flash": (8, 256, 6, 4096),
    "h200x8_kimi_k2": (8, 384, 8, 7168),
}


def test_no_configuration_is_missed():
    assert {path.stem for path in FOLDER.iterdir()} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_loads(name):
    config = EPConfig.load(FOLDER / f"{name}.yaml")
    model = config.model
    shape = (config.topology.ep_size, model.num_experts, model.num_experts_per_tok, model.hidden_size)
    assert shape == SHAPES[name]
    placement = config.place_experts()
    assert {placement.num_local_experts(rank) for rank in range(shape[0])} == {shape[1] // shape[0]}


def test_deepseek_routing():
    routing = EPConfig.load(FOLDER / "h200x8_deepseek_v3.yaml").routing
    assert (routing.scoring, routing.renormalize, routing.routed_scaling_factor) == ("sigmoid", True, 2.5)
    assert (routing.num_expert_groups, routing.top_groups) == (8, 4)
