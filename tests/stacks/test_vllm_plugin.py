"""What the plugin for vLLM does without a model: the choice, the sizes, the watch."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm_kernels import step

from epmoe.config.config_file import ConfigError
from epmoe.exchange.memory import MemoryPlan
from epmoe.group.errors import EPTimeoutError
from epmoe.integrations.vllm import layer as layers
from epmoe.integrations.vllm import sizes
from epmoe.integrations.vllm.choice import Choice
from epmoe.integrations.vllm.experts import EpmoeExperts, grouped
from epmoe.native.arguments import FP8


@pytest.mark.parametrize("value", [None, False, "", "0"])
def test_not_chosen(value: object) -> None:
    assert Choice.of(value) is None


@pytest.mark.parametrize(
    ("value", "layout", "exchange"),
    [(True, "rank", {}), ("1", "rank", {}), ("layer", "layer", {}), ({"timeout_s": 5}, "rank", {"timeout_s": 5})],
)
def test_chosen(value: object, layout: str, exchange: dict[str, object]) -> None:
    assert Choice.of(value) == Choice(layout, exchange)


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ConfigError, match="`epmoe.layout` must be 'rank' or 'layer', got 'batched'"):
        Choice.of({"layout": "batched"})


def test_a_step_takes_the_smallest_size_that_holds_it() -> None:
    shape = sizes.Shape(4, 2, 4096, torch.float32, 100, "linear", "auto", "rank")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = sizes.Sizes.make(shape, dist.group.WORLD, torch.device("cpu"), Choice(exchange={"timeout_s": 9.0}))
        assert made.tokens == [1, 2, 4, 7, 13, 25, 50, 100]
        for longest, expected in ((0, 1), (1, 1), (3, 4), (14, 25), (50, 50), (51, 100), (100, 100)):
            with step([longest, 0]):
                config = made.for_this_step().config
                assert config.capacity.max_num_tokens_per_rank == expected
        assert config.exchange.timeout_s == 9 and config.exchange.warmup_timeout_s == sizes.TIMEOUT_S
        assert made.for_this_step() is made.exchanges[-1], "outside of a step: the largest"
        assert made.window_bytes() < 2.2 * made.exchanges[-1].memory_plan().window_bytes
    finally:
        made.close()
        dist.destroy_process_group()


def test_experts_that_want_no_gaps_get_no_rows_for_them() -> None:
    for aligned, alignment, rows in ((False, 1, 16), (True, 64, 4096)):
        shape = sizes.Shape(128, 8, 2048, torch.bfloat16, 1, "linear", "auto", "expert", aligned)
        config = sizes._config(shape, 1, 2, {}, {"strategy": "linear"})
        plan = MemoryPlan.build(config, nvlink=True)
        assert (config.alignment, plan.sizes["max_rows"]) == (alignment, rows)


def test_a_failure_on_the_device_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EPTimeoutError("dispatch", 3, [1], [1], "timed out")

    polls = iter([lambda: None, lambda: None, fail])
    killed = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    sizes.watch(SimpleNamespace(poll=lambda: next(polls)()), interval_s=0)
    assert killed == [(os.getpid(), signal.SIGTERM)]


def test_the_exchange_asks_for_no_weight_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `w13_weight`, which vLLM's methods for 4 bits call otherwise."""
    moe = SimpleNamespace(num_experts=4, experts_per_token=2, hidden_dim=128, in_dtype=torch.bfloat16, max_num_tokens=2)
    layer: Any = SimpleNamespace(moe_config=moe, expert_placement_strategy="linear", expert_map=None)
    experts: Any = SimpleNamespace(quant_config=SimpleNamespace(quant_dtype=None), expects_unquantized_inputs=True)
    monkeypatch.setattr(layers, "get_current_vllm_config", SimpleNamespace)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = SimpleNamespace(cpu_group=dist.group.WORLD, device=torch.device("cpu"))
        monkeypatch.setattr(layers, "get_ep_group", lambda: group)
        exchange = layers._make_exchange(layer, experts, Choice("rank"), aligned=False)
        assert exchange.sizes.tokens == [1, 2]
        exchange.sizes.close()
    finally:
        dist.destroy_process_group()


class TritonExperts:
    """What `grouped` reads of vLLM's experts of this name, with fp8 weights in blocks."""

    expects_unquantized_inputs = False

    def __init__(self, scales: torch.dtype = torch.float32) -> None:
        w1_scale, w2_scale = torch.ones(2, 2, 1, dtype=scales), torch.ones(2, 1, 1, dtype=scales)
        self.quant_config = SimpleNamespace(
            quant_dtype=FP8, block_shape=[128, 128], w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=None, w2_bias=None
        )
        self.moe_config = SimpleNamespace(activation=MoEActivation.SILU, is_lora_enabled=False, hidden_dim=128)


W13, W2 = torch.zeros(2, 256, 128, dtype=FP8), torch.zeros(2, 128, 128, dtype=FP8)


def test_grouped_experts_take_scales_in_fp32_only() -> None:
    of: Any = TritonExperts()
    assert grouped(of, W13, W2).gate_up_scales is not None
    packed: Any = TritonExperts(torch.int32)
    with pytest.raises(ConfigError, match="with scales in torch.int32"):
        grouped(packed, W13, W2)
    with pytest.raises(ConfigError, match="does not take weights in the layout of TritonExperts"):
        grouped(of, None, None)


@pytest.mark.parametrize(("layout", "as_fp8"), [("rank", False), ("layer", True)])
def test_rows_for_vllms_deep_gemm_do_not_travel_as_fp8(
    monkeypatch: pytest.MonkeyPatch, layout: Any, as_fp8: bool
) -> None:
    """It wants powers of two as scales, which epmoe's own experts do not."""
    monkeypatch.setattr(layers, "is_deep_gemm_e8m0_used", lambda: True)
    of: Any = TritonExperts()
    assert layers._payload(of.moe_config, of, layout) == ("fp8" if as_fp8 else "auto")


def test_the_layer_tells_the_experts_of_the_round_what_a_layer_of_ours_does() -> None:
    """How many rows an expert has is what few rows, and their kernels, are known by."""
    segments = {"tokens_per_expert": object(), "alignment": 64, "rows_per_expert": 1.5}
    round_ = SimpleNamespace(expert_offsets=object(), segments=segments)
    calls = []
    layer: Any = SimpleNamespace(
        exchange=SimpleNamespace(compute=lambda experts: experts(round_)),
        experts=lambda *arguments, **named: calls.append((arguments, named)),
    )
    rows, scales = torch.zeros(64, 128), torch.zeros(64, 1)
    EpmoeExperts.apply(layer, torch.empty(0), rows, a1q_scale=scales)
    assert calls == [((rows, round_.expert_offsets, scales), segments)]
