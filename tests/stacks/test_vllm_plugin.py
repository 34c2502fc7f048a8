"""What the plugin for vLLM does without a model: the choice, the sizes, the watch."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers import alone
from vllm import device_allocator
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.platforms import current_platform
from vllm_kernels import step

import epmoe
from epmoe.config.config_file import ConfigError
from epmoe.exchange.memory import MemoryPlan
from epmoe.group.errors import EPStateError, EPTimeoutError
from epmoe.integrations.served import ServedExperts
from epmoe.integrations.vllm import layer as layers
from epmoe.integrations.vllm import sizes, sleep
from epmoe.integrations.vllm import weights as versions
from epmoe.integrations.vllm.choice import Choice
from epmoe.integrations.vllm.experts import EpmoeExperts, loaded, refuse_loading_again
from epmoe.integrations.vllm.prepare_finalize import EpmoePrepareAndFinalize
from epmoe.native.arguments import FP8, MXFP4


@pytest.mark.parametrize("value", [None, False, "", "0"])
def test_not_chosen(value: object) -> None:
    assert Choice.of(value) is None


@pytest.mark.parametrize(
    ("value", "layout", "exchange"),
    [
        *(
            (True, "rank", {}),
            ("1", "rank", {}),
            ("layer", "layer", {}),
            ({"timeout_s": 5}, "rank", {"timeout_s": 5}),
        ),
        (
            {"layout": "layer", "live": None, "metrics_port": None, "batch_invariant": None},
            "layer",
            {},
        ),
    ],
)
def test_chosen(value: object, layout: str, exchange: dict[str, object]) -> None:
    assert Choice.of(value) == Choice(layout, exchange)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("batched", "`epmoe.layout` must be 'rank' or 'layer', got 'batched'"),
        (
            {"max_num_tokens_per_rank": 0},
            "`epmoe.max_num_tokens_per_rank` must be a positive integer, got 0",
        ),
        ({"batch_invariant": 1}, "`epmoe.batch_invariant` must be true or false, got 1"),
        (
            {"layout": "layer", "live": 8},
            "`epmoe.live` must be a mapping with an integer `slots_per_rank`, got 8",
        ),
        ({"live": {"slots_per_rank": 8}}, '`epmoe.live` must come with `layout` "layer"'),
        (
            {"layout": "layer", "live": {"slots_per_rank": 8}, "batch_invariant": True},
            "`epmoe.live` must be left out with batch invariance",
        ),
    ],
)
def test_a_wrong_choice_is_named(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Choice.of(value)


def test_batch_invariance_is_what_vllms_flag_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert Choice.of("layer") == Choice("layer", batch_invariant=True)
    assert Choice.of({"batch_invariant": False}) == Choice()


def test_vllms_experts_without_batch_invariance_are_refused() -> None:
    experts = TritonExperts()
    experts._supports_batch_invariance = lambda: False

    class Unlike:
        moe_kernel = None

        def process_weights_after_loading(self, _: object) -> None:
            self.moe_kernel = SimpleNamespace(fused_experts=experts, is_monolithic=False)

    method: Any = layers._with_epmoe(Unlike)()
    method.epmoe_choice = Choice("rank", batch_invariant=True)
    with pytest.raises(
        ConfigError, match='TritonExperts have no batch invariance: choose `epmoe` = "layer"'
    ):
        method.process_weights_after_loading(None)


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Iterator[sizes.Sizes]:
    """The exchanges of one rank for steps of up to 100 tokens, of the `Choice` that a test asks
    for.
    """
    shape = sizes.Shape(4, 2, 128, torch.float32, 100, "linear", "auto", "expert")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made = sizes.Sizes.make(
            shape, dist.group.WORLD, torch.device("cpu"), getattr(request, "param", Choice())
        )
        yield made
        made.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("made", [Choice(exchange={"timeout_s": 9.0})], indirect=True)
def test_a_step_takes_the_smallest_size_that_holds_it(made: sizes.Sizes) -> None:
    assert made.tokens == [1, 2, 4, 7, 13, 25, 50, 100]
    for longest, expected in ((0, 1), (1, 1), (3, 4), (14, 25), (50, 50), (51, 100), (100, 100)):
        with step([longest, 0]):
            ep, most = made.for_this_step()
            assert (ep.config.capacity.max_num_tokens_per_rank, most) == (expected, longest)
    # Sequence parallel: each rank has a part of its replica's tokens.
    with step([16, 21], ranks_per_batch=2):
        assert made.for_this_step() == (made.exchanges[made.tokens.index(13)], 11)
    assert (
        ep.config.exchange.timeout_s == 9 and ep.config.exchange.warmup_timeout_s == sizes.TIMEOUT_S
    )
    assert made.for_this_step() == (made.exchanges[-1], 100), "outside of a step: the largest"
    assert made.window_bytes() < 2.2 * made.exchanges[-1].memory_plan().window_bytes


@pytest.mark.parametrize("made", [Choice(max_num_tokens_per_rank=40)], indirect=True)
def test_a_step_longer_than_the_windows_takes_several_rounds(made: sizes.Sizes) -> None:
    assert made.tokens[-2:] == [20, 40] and len(made.parts()) == 3
    for longest, rounds, tokens in ((0, 1, 1), (40, 1, 40), (41, 2, 40), (100, 3, 40)):
        with step([0, longest]):
            assert len(parts := made.parts()) == rounds
            ep, most = made.for_this_step()
            assert (ep.config.capacity.max_num_tokens_per_rank, most) == (tokens, min(longest, 40))
            assert sum(len(range(100)[part]) for part in parts) >= longest


def test_a_decode_beside_a_prefill_counts_on_its_rows(made: sizes.Sizes) -> None:
    """The experts choose their kernels by the longest batch of all ranks."""
    exchange = EpmoePrepareAndFinalize(made, "layer")
    x = torch.zeros(3, 128)
    ids = torch.tensor([[0, 1]] * 3).int()
    weights = torch.ones(3, 2)
    with step([3, 80]):
        rows, *_ = exchange.prepare(x, weights, ids, 4, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)
    rows_per_expert = []
    exchange.compute(
        lambda round_: rows_per_expert.append(round_.segments["rows_per_expert"]) or rows
    )
    exchange.finalize(torch.empty(3, 128))
    assert rows_per_expert == [80 * 2 / 4]


def test_what_another_plugin_calls_before_steps_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "set_additional_forward_context"
    made = sizes.Sizes(1)
    other = Mock()
    made.balancing = Mock()
    monkeypatch.setitem(vars(current_platform), name, other)
    made.close()
    assert vars(current_platform)[name] is other


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


def test_a_look_passes_over_what_sleeps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay of a graph of an earlier group is told by an error of the same kind."""
    with epmoe.ExpertParallel(alone()) as ep:
        ep.sleep()
        (look := sizes.Sizes(16, [ep], [16])).poll()
        ep.wake()
        monkeypatch.setattr(
            ep.exchange, "check", Mock(side_effect=EPStateError("a replay did nothing"))
        )
        with pytest.raises(EPStateError, match="a replay did nothing"):
            look.poll()


def test_sleep_and_wake_go_on_where_one_exchange_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = Mock()
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    with epmoe.ExpertParallel(alone()) as first, epmoe.ExpertParallel(alone()) as second:
        monkeypatch.setattr(sleep, "named_exchanges", lambda: {"0-1": first, "0-2": second})
        backend = sleep.SleepWithWindows()
        for call, name in ((backend.suspend, "sleep"), (backend.resume, "wake")):
            with monkeypatch.context() as patch, pytest.raises(EPStateError, match="once"):
                patch.setattr(second, name, Mock(side_effect=EPStateError("once")))
                call()
            assert first.asleep != second.asleep and allocator.sleep.called == (name == "wake")
            call()
            assert first.asleep == second.asleep == (name == "sleep")


def test_versions_are_refused_while_windows_sleep_and_in_a_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The memory of the weights sleeps, too; and a fork has none of the group's threads."""
    # vLLM's engine of versions, for a group of one.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = SimpleNamespace(cpu_group=dist.group.WORLD)
    monkeypatch.setattr(versions, "get_ep_group", lambda: group)
    engine: Any = versions.VersionEngine.__new__(versions.VersionEngine)
    engine.parallel_config = SimpleNamespace(enable_eplb=False, pipeline_parallel_size=1)
    engine.init_transfer_engine(versions.FolderInfo(str(tmp_path / "versions")))
    try:
        with epmoe.ExpertParallel(alone()) as ep:
            monkeypatch.setattr(versions, "named_exchanges", lambda: {"0-1": ep})
            ep.sleep()
            with pytest.raises(ValueError, match="the weights sleep: wake them up"):
                engine.receive_weights(versions.VersionInfo(1))
            # Awake, it waits for the version.
            ep.wake()
            with pytest.raises(TimeoutError, match="version 1 of the weights did not come"):
                engine.receive_weights(versions.VersionInfo(1, timeout_s=0.01))
        # In another process it refuses.
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ValueError, match="belongs to process"):
            engine.receive_weights(versions.VersionInfo(1))
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_the_exchange_asks_for_no_weight_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `w13_weight`, which vLLM's methods for 4 bits call otherwise."""
    # A layer with the fields that an exchange reads, and no weights.
    moe = SimpleNamespace(
        num_experts=4,
        experts_per_token=2,
        hidden_dim=128,
        in_dtype=torch.bfloat16,
        max_num_tokens=2,
    )
    layer: Any = SimpleNamespace(
        moe_config=moe, expert_placement_strategy="linear", expert_map=None
    )
    model = SimpleNamespace(sleep_mode_backend="cumem")
    monkeypatch.setattr(
        layers, "get_current_vllm_config", lambda: SimpleNamespace(model_config=model)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = SimpleNamespace(cpu_group=dist.group.WORLD, device=torch.device("cpu"))
        monkeypatch.setattr(layers, "get_ep_group", lambda: group)
        layers._let_windows_sleep()
        exchange = layers._make_exchange(layer, "auto", Choice("rank"), aligned=False)
        assert exchange.sizes.tokens == [1, 2] and model.sleep_mode_backend == "epmoe"
        exchange.sizes.close()
    finally:
        dist.destroy_process_group()


class TritonExperts:
    """What the plugin reads of vLLM's experts of this name, with fp8 weights in blocks."""

    expects_unquantized_inputs = False
    quant_config = SimpleNamespace(
        quant_dtype=FP8, block_shape=[128, 128], per_act_token_quant=False, a1_scale=None
    )
    moe_config = SimpleNamespace(hidden_dim=128)


def layer_of(
    weight: torch.dtype, name: str, scale: torch.dtype, rows: int, columns: int, **more: Any
) -> Any:
    """What the plugin reads of vLLM's layer with weights of D = F = 128, and a scale for so many of
    them.
    """
    parts = {"moe_config": SimpleNamespace(activation=MoEActivation.SWIGLUOAI)}
    for part, n in (("w13", 256), ("w2", 128)):
        parts[f"{part}_weight"] = torch.zeros(2, n, 64 if weight is torch.uint8 else 128).to(weight)
        parts[f"{part}_{name}"] = torch.ones(2, n // rows, 128 // columns).to(scale)
    return SimpleNamespace(**parts | more)


FP8_LAYER = (FP8, "weight_scale_inv", torch.float32)
MXFP4_LAYER = (torch.uint8, "weight_scale", torch.uint8)


NVFP4_LAYER = (torch.uint8, "weight_scale", FP8)


def nvfp4_layer(names: tuple[str, str], **more: Any) -> Any:
    """Of vLLM's methods for modelopt and compressed-tensors, by their names of two tensors."""
    layer = layer_of(*NVFP4_LAYER, 1, 16)
    weight, tensor_scale = names
    made = torch.nn.Module()
    made.moe_config = layer.moe_config
    for part, shape in (("w13", (2, 2)), ("w2", (2,))):
        scale = torch.arange(1.0, 1 + 2 * len(shape)).view(shape)
        tensors = {
            weight: getattr(layer, f"{part}_weight"),
            "weight_scale": getattr(layer, f"{part}_weight_scale"),
            tensor_scale: scale,
            "input_scale": torch.ones(2),
        }
        for name, tensor in tensors.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            made.register_parameter(f"{part}_{name}", parameter)
    return made


MODELOPT = ("weight", "weight_scale_2")
COMPRESSED = ("weight_packed", "weight_global_scale")


@pytest.mark.parametrize("names", [MODELOPT, COMPRESSED])
def test_loaded_weights_in_nvfp4_are_taken_as_they_are(names: tuple[str, str]) -> None:
    layer = nvfp4_layer(names)
    codes = getattr(layer, f"w2_{names[0]}").data_ptr()
    ours = loaded(layer, quantized=True)
    assert ours.weight_format is not None and ours.weight_format.name == "NVFP4"
    # vLLM hands weights to a kernel by these names.
    assert ours.w_down.data_ptr() == codes == layer.w2_weight.data_ptr()
    scales = torch.tensor([[1.0, 2, 1], [3, 4, 2]])
    want = scales.reciprocal() if names is COMPRESSED else scales
    assert ours.tensor_scales is not None and torch.equal(ours.tensor_scales, want)
    if names is COMPRESSED:
        with pytest.raises(ConfigError, match="cannot load weights in NVFP4 of compressed-tensors"):
            refuse_loading_again(layer)
        return
    # What vLLM loads again is what experts have.
    refuse_loading_again(layer)
    layer.w13_weight_scale_2.data[1, 0] = 7
    layer.w2_weight_scale_2.data[0] = 8
    assert torch.equal(ours.tensor_scales, torch.tensor([[1.0, 2, 8], [7, 4, 2]]))


def test_loaded_weights_are_taken_as_they_are() -> None:
    for layer, dtype in (
        (layer_of(*FP8_LAYER, 128, 128), FP8),
        (layer_of(*MXFP4_LAYER, 1, 32), MXFP4),
    ):
        ours = loaded(layer, quantized=True)
        assert ours.w_down.dtype == dtype and ours.w_down.data_ptr() == layer.w2_weight.data_ptr()
        assert (ours.interleaved, ours.limit, ours.alpha, ours.up_offset) == (True, 7.0, 1.702, 1.0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            layer_of(FP8, "weight_scale_inv", torch.int32, 128, 128),
            "torch.float8_e4m3fn weights with scales in torch.int32",
        ),
        (layer_of(*FP8_LAYER, 64, 64), "these experts: `gate_up_scales` must be"),
        (layer_of(*MXFP4_LAYER, 1, 16), "these experts: `gate_up_scales` must be"),
        (
            layer_of(*NVFP4_LAYER, 1, 16),
            "torch.uint8 weights with scales in torch.float8_e4m3fn",
        ),
        (
            layer_of(torch.bfloat16, "weight_scale", torch.float32, 1, 128),
            "torch.bfloat16 weights with scales in",
        ),
        (layer_of(*MXFP4_LAYER, 1, 32, swiglu_limit=10.0), "SwiGLU with a limit, an alpha"),
        (
            SimpleNamespace(moe_config=SimpleNamespace(activation=MoEActivation.SILU)),
            "experts without weights",
        ),
        (
            SimpleNamespace(moe_config=SimpleNamespace(activation=MoEActivation.GELU)),
            "the activation gelu",
        ),
    ],
)
def test_weights_that_layout_layer_does_not_take_are_named(layer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"does not take {message}"):
        loaded(layer, quantized=True)


def test_rows_for_vllms_deep_gemm_do_not_travel_as_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants powers of two as scales, which epmoe's own experts do not."""
    of: Any = TritonExperts()
    monkeypatch.setattr(layers, "is_deep_gemm_e8m0_used", lambda: False)
    assert layers._payload(of) == "fp8"
    monkeypatch.setattr(layers, "is_deep_gemm_e8m0_used", lambda: True)
    assert layers._payload(of) == "auto"


def test_the_layer_tells_the_experts_of_the_round_what_a_layer_of_ours_does() -> None:
    """How many rows an expert has is what few rows, and their kernels, are known by."""
    segments = {"tokens_per_expert": object(), "alignment": 64, "rows_per_expert": 1.5}
    round_ = SimpleNamespace(
        expert_offsets=object(), segments=segments, dtype=torch.float32, hidden_size=128
    )
    calls = []
    layer: Any = SimpleNamespace(
        exchange=SimpleNamespace(compute=lambda experts: experts(round_)),
        _serve=ServedExperts(lambda *arguments, **named: calls.append((arguments, named))),
    )
    rows = torch.zeros(64, 128)
    scales = torch.zeros(64, 1)
    EpmoeExperts.apply(layer, torch.empty(0), rows, a1q_scale=scales)
    assert calls == [((rows, round_.expert_offsets, scales), segments)]
