"""SGLang's MoE layers over 2 ranks with experts that move (docs/serving.md)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

if "RANK" not in os.environ:
    pytest.skip("needs SGLang and 2 ranks: make stacks-sglang", allow_module_level=True)
import sglang_host as host
import sglang_live as live
from helpers import assert_close, randn
from sglang_live import Runner

from epmoe.integrations.sglang import dispatcher as sglang
from epmoe.local.reference import moe_reference

STEPS = 40  # of each half of a phase


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> Iterator[None]:
    live.start()
    yield
    sglang.close()


@pytest.fixture(scope="module")
def moving(_sglang: None) -> Runner:
    return Runner(live.Model())


@pytest.fixture
def still(_sglang: None) -> Runner:
    """Our own experts, where SGLang has loaded them."""
    hooked = host.layer_module.create_moe_dispatcher
    host.layer_module.create_moe_dispatcher = partial(sglang.create_dispatcher, hooked.__wrapped__)
    try:
        return Runner(live.Model())
    finally:
        host.layer_module.create_moe_dispatcher = hooked


def busiest(runners: list[Runner], before: torch.Tensor) -> torch.Tensor:
    """Of each runner, the rows of the busiest rank over the mean, since `before`."""
    everyones = torch.zeros(dist.get_world_size(), len(runners))
    everyones[dist.get_rank()] = rows(runners) - before
    dist.all_reduce(everyones)
    return everyones.max(0).values / everyones.mean(0)


def rows(runners: list[Runner]) -> torch.Tensor:
    return torch.tensor([float(sum(runner.ep.health().rows_by_layer)) for runner in runners])


def test_experts_move_while_prompts_drift(
    moving: Runner, still: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokens are those without moves, and the ranks get even loads: by the counts of rounds,
    the balancer plans.
    """
    caplog.set_level(logging.INFO, "epmoe")
    for first in live.PHASES:
        # In the first half of a phase the experts move, and in the second one loads are even.
        for half in range(2):
            before = rows([still, moving])
            for step in range(STEPS):
                tokens = live.prompts(first, step)
                assert torch.equal(moving.step(tokens), still.step(tokens))
            if half:
                of_still, of_moving = busiest([still, moving], before).tolist()
                print(
                    f"busiest rank over the mean: {of_still:.3f} without moves, {of_moving:.3f} "
                    "with them"
                )
                assert of_moving < 1.05 < 1.1 < of_still
    assert ("epmoe moves" in caplog.text) == (dist.get_rank() == 0)
    dist.all_reduce(moved := torch.tensor(moving.ep.live.moved))
    assert moved > 1


def test_weights_that_are_loaded_again_follow_the_experts(moving: Runner) -> None:
    """Where experts have moved to, in the middle of a move, too; and all copies get them."""
    for seed, steps in ((300, 11), (500, STEPS)):
        for step in range(steps):
            moving.step(live.prompts(live.PHASES[seed > 300], step))
        weights = live.checkpoint(seed)
        moving.model.load(weights)
        for layer, shards in zip(moving.model.layers, weights, strict=True):
            x = randn(live.BATCH, live.D, seed=3).bfloat16()
            logits = randn(live.BATCH, live.E, seed=4)
            with torch.inference_mode(), live.data_parallel():
                routed = host.TopK(live.K, layer_id=0).forward_native(
                    x.to(live.DEVICE), logits.to(live.DEVICE)
                )
                y = layer(x.to(live.DEVICE), routed)
            plain = torch.cat((shards["w1"], shards["w3"]), 1), shards["w2"]
            assert_close(
                y, moe_reference(x, routed.topk_ids.cpu(), routed.topk_weights.cpu(), plain)
            )


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"ep_dispatch_algorithm": "static"}, "--ep-dispatch-algorithm"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
    ],
)
def test_what_moves_or_needs_still_experts_is_refused(settings: dict[str, Any], flag: str) -> None:
    section = host.get_exec().deterministic if "deterministic" in flag else host.get_exec().moe
    with (
        section.override(**settings),
        pytest.raises(ValueError, match=f"do not go with {flag}: leave out"),
    ):
        host.make_layer(live.E + live.REDUNDANT, live.K, 2 * live.D, live.F)


def test_a_model_that_names_no_experts_is_refused() -> None:
    with pytest.raises(
        ValueError, match="SGLang knows of no experts that could move in this model"
    ):
        host.make_layer(live.E, live.K, live.D, live.F, uses_expert_location=False)
