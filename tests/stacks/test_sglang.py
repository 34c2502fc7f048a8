"""SGLang's MoE layers over 2 ranks, their tokens carried by epmoe (docs/testing.md)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from counted import functions_of
from helpers import NO_CUDA, Interrupted, assert_close, distinct_ids, randn
from interrupted_steps import steps_until_whole

if "RANK" not in os.environ:
    pytest.skip("needs SGLang and 2 ranks: make stacks-sglang", allow_module_level=True)
import sglang_host as host
from sglang.srt.layers.moe.moe_runner import runner as sglang_runner
from sglang.srt.layers.moe.token_dispatcher.base import RoutewiseLayout
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import (
    DeepEPv2CombineInput,
    DeepEPv2Dispatcher,
)
from sglang.srt.layers.moe.utils import MoeA2ABackend
from sglang.srt.plugins import hook_registry
from sglang.srt.runtime_context import get_flags
from torch import Tensor, nn

from epmoe import EPAbortedError, EPTimeoutError, quantize_fp8
from epmoe.bench.host import started
from epmoe.integrations import entered, served
from epmoe.integrations.sglang import VARIABLE, runner
from epmoe.integrations.sglang import dispatcher as sglang
from epmoe.integrations.sglang.runner import (
    EpmoeRunnerCore,
    make_runner_core,
    register_experts,
)
from epmoe.local.reference import moe_reference

E = 16
K = 4
D = 256
F = 128
M = 128  # tokens; SGLang's default
DEVICE = torch.device("cuda" if host.CUDA else "cpu")
# In the seat, and in SGLang's layer around it. Other tests hold the rounds below.
FILES = {
    module.__file__
    for module in (
        contextlib,
        entered,
        host.layer_module,
        host.runner_module,
        runner,
        served,
        sglang,
        sglang_runner,
    )
}


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> Iterator[None]:
    os.environ[VARIABLE] = "1"
    os.environ |= {"EPMOE_EXCHANGE__TIMEOUT_S": "60", "EPMOE_EXCHANGE__WARMUP_TIMEOUT_S": "120"}
    host.load_plugins_of_epmoe()
    host.start()
    yield
    sglang.close()


@pytest.fixture(autouse=True)
def _lockstep() -> Iterator[None]:
    """No rank begins a test before all ranks have passed the previous one."""
    with torch.inference_mode():
        yield
        dist.all_reduce(torch.zeros(1, device=DEVICE))


@pytest.fixture(scope="module")
def layer(_sglang: None) -> nn.Module:
    return _layer()


def _layer() -> nn.Module:
    """A layer of SGLang in bf16, with this rank's experts."""
    layer = host.make_layer(E, K, D, F)
    mine = slice(
        dist.get_rank() * layer.num_local_experts, (dist.get_rank() + 1) * layer.num_local_experts
    )
    for parameter, weights in zip((layer.w13_weight, layer.w2_weight), _weights(), strict=True):
        parameter.data.copy_(weights[mine])
    return layer


def _weights() -> tuple[Tensor, Tensor]:
    """All experts' weights, bf16: gate and up [E, 2F, D], down [E, D, F]."""
    gate_up = randn(E, 2 * F, D, seed=1) / D**0.5
    down = randn(E, D, F, seed=2) / F**0.5
    return gate_up.bfloat16(), down.bfloat16()


def _in_block_fp8() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A layer of SGLang in e4m3 with a scale for 128 × 128 weights, and the weights of all experts
    as they are then.
    """
    layer = host.make_layer(E, K, D, F, quant_config=host.block_fp8())
    mine = slice(
        dist.get_rank() * layer.num_local_experts, (dist.get_rank() + 1) * layer.num_local_experts
    )
    dequantized = []
    for name, weights in zip(("w13_weight", "w2_weight"), _weights(), strict=True):
        blocks = weights.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        scales = blocks.abs().amax((2, 4)) / 448
        quantized = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
        getattr(layer, name).data.copy_(quantized.flatten(3).flatten(1, 2)[mine])
        getattr(layer, f"{name}_scale_inv").data.copy_(scales[mine])
        dequantized.append(
            (quantized.double() * scales[:, :, None, :, None]).flatten(3).flatten(1, 2)
        )
    return layer, tuple(dequantized)


def _tokens(
    rank: int, tokens: int, padded: int = 0, ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights of a rank; the last `padded` tokens are those of a CUDA graph that is too
    large.
    """
    x = randn(tokens, D, seed=10 + rank).bfloat16()
    weights = randn(tokens, K, seed=20 + rank).softmax(-1)
    ids = distinct_ids(tokens, E, K, seed=30 + rank) if ids is None else ids
    ids[tokens - padded :] = -1
    return x, ids, weights


def _forward(layer: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    x, ids, weights = (tensor.to(DEVICE) for tensor in (x, ids, weights))
    return layer(x, host.StandardTopKOutput(weights, ids, None))


def test_sglang_loads_the_plugin_and_applies_its_hooks() -> None:
    assert {sglang._FACTORY, sglang._ROUND, sglang._STEP} <= hook_registry.HookRegistry._patched


@pytest.mark.parametrize("tokens", [(1, 0), (32, 33), (M, M)], ids=str)
def test_one_batch_in_parts(layer: nn.Module, tokens: tuple[int, int]) -> None:
    """Tensor parallel attention: every rank brings a part of one batch."""
    mine = _tokens(dist.get_rank(), tokens[dist.get_rank()])
    assert_close(_forward(layer, *mine), moe_reference(*mine, _weights()))


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_nothing_reads_what_lies_between_segments(
    layer: nn.Module, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's steps compute on the rows of gaps and drop them, so y has the same bits whatever
    they hold.
    """
    layer = _in_block_fp8()[0] if quantized else layer
    tokens = _tokens(dist.get_rank(), 9)
    dispatcher = layer.dispatcher
    want = _forward(layer, *tokens)
    dispatch = dispatcher.dispatch

    def poisoned(**arguments: Any) -> Any:
        output = dispatch(**arguments)
        d = dispatcher._round
        # Rows that lie in no segment.
        rows = torch.arange(len(d.rows), device=DEVICE)[:, None]
        gaps = ~(
            (d.expert_offsets[:-1] <= rows) & (rows < output.psum_num_recv_tokens_per_expert)
        ).any(1)
        for tensor in (d.rows, d.scales) if quantized else (d.rows,):
            tensor.view(torch.uint8)[gaps] = 0xFF  # NaN in each dtype
        return output

    monkeypatch.setattr(dispatcher, "dispatch", poisoned)
    assert want.isfinite().all() and torch.equal(_forward(layer, *tokens), want)


@pytest.mark.parametrize("tokens", [(7, 0), (0, 100), (M, 1)], ids=str)
def test_a_batch_on_each_rank(layer: nn.Module, tokens: tuple[int, int]) -> None:
    """Data parallel attention: any number of tokens on each rank, some of which are padding."""
    mine = _tokens(dist.get_rank(), tokens[dist.get_rank()], padded=min(2, tokens[dist.get_rank()]))
    with host.data_parallel(list(tokens)):
        y = _forward(layer, *mine)
    assert_close(y, moe_reference(*mine, _weights()))


@pytest.mark.parametrize(("tokens", "data_parallel"), [((100, 3), True), ((32, 33), False)])
def test_a_decode_beside_a_prefill_counts_on_its_rows(
    layer: nn.Module, tokens: tuple[int, int], data_parallel: bool
) -> None:
    """The experts choose their kernels by the longest batch of all ranks, unless all have parts of
    one batch.
    """
    rank = dist.get_rank()
    x, ids, weights = (tensor.to(DEVICE) for tensor in _tokens(rank, tokens[rank]))
    with host.data_parallel(list(tokens)) if data_parallel else nullcontext():
        rows = layer.dispatcher.dispatch(
            x, host.StandardTopKOutput(weights, ids, None)
        ).hidden_states
    d = layer.dispatcher._round
    layer.dispatcher.combine(
        DeepEPv2CombineInput(torch.zeros_like(rows, dtype=torch.bfloat16), None)
    )
    assert d.segments["rows_per_expert"] == (100 if data_parallel else tokens[rank]) * 2 * K / E


def test_rows_end_behind_the_worst_routing(layer: nn.Module) -> None:
    """Every pair of all ranks goes to one rank, and half of its experts get a single row each: the
    most gaps.
    """
    e = layer.num_local_experts
    rank = dist.get_rank()
    for owner in range(dist.get_world_size()):
        ids = (owner * e + torch.arange(K)).expand(M, K).clone().int()
        if rank == 0:
            ids[0] += K
        mine = _tokens(rank, M, ids=ids)
        assert_close(_forward(layer, *mine), moe_reference(*mine, _weights()))


def test_hands_deepgemm_its_contiguous_layout(layer: nn.Module) -> None:
    """Rows in whole blocks of 128, few of them for few tokens, and nothing that SGLang could weight
    by itself.
    """
    x, ids, weights = (tensor.to(DEVICE) for tensor in _tokens(dist.get_rank(), 3))
    output = layer.dispatcher.dispatch(x, host.StandardTopKOutput(weights, ids, None))
    rows = output.hidden_states.shape[0]
    e = layer.num_local_experts
    assert rows % 128 == 0
    assert rows <= 128 * e < layer.dispatcher._round.rows.shape[0]
    assert output.psum_num_recv_tokens_per_expert.shape == (e,)
    assert output.psum_num_recv_tokens_per_expert.dtype == torch.int32
    assert (output.is_expanded, output.use_masked_gemm, output.topk_weights) == (True, False, None)
    y = layer.dispatcher.combine(DeepEPv2CombineInput(torch.zeros_like(output.hidden_states), None))
    assert y.shape == x.shape and not y.any()


def test_layers_share_one_set_of_windows(
    layer: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """Two layers of the same shapes; for others, one more, whose bytes the log says."""
    assert host.make_layer(E, K, D, F).dispatcher._ep is layer.dispatcher._ep
    with caplog.at_level(logging.INFO, "epmoe"):
        other = host.make_layer(E, K, 2 * D, F).dispatcher._ep
    assert other is not layer.dispatcher._ep
    assert f"window {other.memory_plan().window_bytes:,} bytes" in caplog.text


def test_block_fp8() -> None:
    """Rows of e4m3 with a scale for 128 elements go through SGLang's own steps around the fp8
    GEMMs.
    """
    layer, dequantized = _in_block_fp8()
    x, ids, weights = tokens = _tokens(dist.get_rank(), 40)
    quantized, scales = quantize_fp8(x, granularity="block")
    rows = (quantized.double().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1)
    want = moe_reference(rows, ids, weights, dequantized)
    assert_close(_forward(layer, *tokens), want, slack=4)  # the activation is quantized, too


def test_refuses_before_anything_is_sent(layer: nn.Module) -> None:
    """Too many tokens, and models that weight routes by themselves."""
    x, ids, weights = (tensor.to(DEVICE) for tensor in _tokens(dist.get_rank(), M + 1))
    with pytest.raises(
        ValueError, match="SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK, now 128, to 129"
    ):
        layer.dispatcher.dispatch(x, host.StandardTopKOutput(weights, ids, None))
    with pytest.raises(RuntimeError, match="without a dispatch"):
        layer.dispatcher.combine(DeepEPv2CombineInput(x, None))
    output = layer.dispatcher.dispatch(x[:3], host.StandardTopKOutput(weights[:3], ids[:3], None))
    with pytest.raises(ValueError, match="weights and sums"):
        layer.dispatcher.combine(
            DeepEPv2CombineInput(output.hidden_states, None, RoutewiseLayout.EXPANDED)
        )
    layer.dispatcher._ep.abort()


def test_another_backend_keeps_its_dispatcher(caplog: pytest.LogCaptureFixture) -> None:
    """The factory's own result, with a warning, where it is not DeepEP v2's. Without the hook it is
    DeepEP v2's.
    """
    own = object()
    assert sglang.create_dispatcher(lambda *_, **__: own, None, None) is own
    assert "epmoe is not in use" in caplog.text
    config = host.make_layer(E, K, D, F).moe_runner_config
    original = host.layer_module.create_moe_dispatcher.__wrapped__
    assert isinstance(
        original(config, quant_method=host.layer_module.UnquantizedFusedMoEMethod()),
        DeepEPv2Dispatcher,
    )


@pytest.mark.parametrize("tokens", [(5, 0), (30, 70)], ids=str)
def test_routed_experts_are_those_of_the_tokens(layer: nn.Module, tokens: tuple[int, int]) -> None:
    """`--enable-return-routed-experts`: what SGLang's own capturer keeps are the experts that
    dispatch has sent to.
    """
    rank = dist.get_rank()
    x = randn(tokens[rank], D, seed=rank).bfloat16()
    logits = randn(tokens[rank], E, seed=50 + rank)
    with host.data_parallel(list(tokens)), host.capturer(E, K, M) as capturer:
        routed = host.TopK(K, layer_id=0).forward_native(x.to(DEVICE), logits.to(DEVICE))
        y = layer(x.to(DEVICE), routed)
        assert torch.equal(capturer.device_cache.buffer[: tokens[rank], 0], routed.topk_ids)
    assert_close(y, moe_reference(x, routed.topk_ids.cpu(), routed.topk_weights.cpu(), _weights()))
    assert routed.topk_ids.sort().values.equal(logits.topk(K).indices.sort().values.to(DEVICE))


# Of a round whose experts are SGLang's, of which rows come back as they are: functions of this
# package, and operators.
MOST_OF_A_ROUND = (38, 10)


def test_what_the_host_does_for_a_round(layer: nn.Module) -> None:
    x, ids, weights = (tensor.to(DEVICE) for tensor in _tokens(dist.get_rank(), 9))
    topk = host.StandardTopKOutput(weights, ids, None)
    dispatcher = layer.dispatcher

    def a_round() -> None:
        rows = dispatcher.dispatch(x, topk).hidden_states
        dispatcher.combine(DeepEPv2CombineInput(rows, None))

    for _ in range(3):
        a_round()
    functions = functions_of(a_round)
    operators = started(a_round).operators
    most_functions, most_operators = MOST_OF_A_ROUND
    assert functions <= most_functions
    assert operators <= most_operators


@pytest.fixture
def own_experts() -> Iterator[None]:
    """What EPMOE_SGLANG=layer registers, for layers that are made meanwhile."""
    register_experts()
    yield
    register_experts.cache_clear()
    del sglang_runner._CUSTOM_RUNNER_CORE_FACTORIES["deep_gemm"]


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_experts_of_our_own(
    own_experts: None, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EPMOE_SGLANG=layer: with SGLang's weights as they are, and without its runner."""
    layer, weights = _in_block_fp8() if quantized else (_layer(), _weights())
    assert isinstance(layer.quant_method.runner.runner_core, EpmoeRunnerCore)
    monkeypatch.setattr(host.runner_module.DeepGemmRunnerCore, "run", None)
    mine = _tokens(dist.get_rank(), 9)
    assert_close(_forward(layer, *mine), moe_reference(*mine, weights), slack=8 if quantized else 1)
    layer.moe_runner_config.swiglu_limit = 7.0
    with pytest.raises(ValueError, match=r"takes plain SwiGLU, got \['swiglu_limit'\]"):
        sglang._grouped(layer)
    core = layer.quant_method.runner.runner_core
    with pytest.raises(ValueError, match="takes no LoRA"):
        core.run_from_dispatch(None, None, layer.moe_runner_config, hooks=object())
    # Another plugin's experts, or ours twice.
    register_experts()
    with pytest.raises(ValueError, match="already registered"):
        register_experts.__wrapped__()


@pytest.mark.parametrize("where", ["dispatch", "LoRA", "combine"])
def test_one_rank_fails_alone(own_experts: None, where: str) -> None:
    """The other one hears of it, and both go on: also where SGLang calls a dispatcher without its
    layer.
    """
    layer = _layer()
    x, ids, weights = (tensor.to(DEVICE) for tensor in _tokens(dist.get_rank(), 9))
    topk = host.StandardTopKOutput(weights, ids, None)
    dispatcher = layer.dispatcher
    core = layer.quant_method.runner.runner_core
    config = layer.moe_runner_config

    # Rank 1 brings too many tokens, asks for LoRA, or combines rows of another layout.
    def fails() -> None:
        if where == "dispatch":
            many = [tensor.to(DEVICE) for tensor in _tokens(1, M + 1)]
            dispatcher.dispatch(many[0], host.StandardTopKOutput(many[2], many[1], None))
        rows = dispatcher.dispatch(x, topk)
        hooks = object() if where == "LoRA" else None
        outputs = core.run_from_dispatch(rows, None, config, hooks=hooks)
        dispatcher.combine(outputs._replace(routewise_layout=RoutewiseLayout.EXPANDED))

    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="tokens on this rank|LoRA|weights and sums"):
            fails()
    else:
        with pytest.raises(EPAbortedError, match=r"\[1\]"):
            _forward(layer, x, ids, weights)
    mine = _tokens(dist.get_rank(), 9)
    assert_close(_forward(layer, *mine), moe_reference(*mine, _weights()))


EXPERTS = pytest.mark.parametrize("own", [False, True], ids=["of SGLang", "of our own"])


@EXPERTS
def test_experts_of_one_rank_raise(own: bool, request: pytest.FixtureRequest) -> None:
    """The other rank hears of it, and both go on."""
    if own:
        request.getfixturevalue("own_experts")
    layer = _layer()
    mine = _tokens(dist.get_rank(), 9)
    if dist.get_rank() == 1:
        core = layer.quant_method.runner.runner_core
        name = "run_from_dispatch" if own else "run"
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(MemoryError),
        ):
            patch.setattr(core, name, Mock(side_effect=MemoryError))
            _forward(layer, *mine)
    else:
        with pytest.raises(EPAbortedError, match=r"\[1\]"):
            _forward(layer, *mine)
    assert_close(_forward(layer, *mine), moe_reference(*mine, _weights()))


@EXPERTS
def test_a_handler_raises_at_any_place(own: bool, request: pytest.FixtureRequest) -> None:
    """Whatever raises on one rank, the other one has its sums or hears of it, and both go on."""
    if own:
        request.getfixturevalue("own_experts")
    layer = _layer()
    mine = _tokens(dist.get_rank(), 9)
    want = moe_reference(*mine, _weights())
    assert_close(_forward(layer, *mine), want)
    dispatcher = layer.dispatcher
    enter = dispatcher.enter

    def a_round(arm: Any) -> None:
        def entering() -> Any:
            dispatcher.enter = enter
            arm()
            return enter()

        dispatcher.enter = entering
        assert_close(_forward(layer, *mine), want)

    outcomes = set[tuple[str, ...]]()
    for found in steps_until_whole(dist.get_rank(), a_round, files=FILES):
        outcomes.add(tuple(found))
        assert_close(_forward(layer, *mine), want)
    name = Interrupted.__name__
    # Behind its combine a rank may be interrupted in a round that is whole.
    possible = {("EPAbortedError", name), ("whole", name), ("whole", "whole")}
    assert possible - {("whole", name)} <= outcomes <= possible


def test_a_fork_and_a_sleeper_are_refused(layer: nn.Module) -> None:
    """Both by name, and neither costs the other rank a round."""
    mine = _tokens(dist.get_rank(), 9)
    want = moe_reference(*mine, _weights())
    assert_close(_forward(layer, *mine), want)
    child = os.fork()
    if child == 0:
        try:
            _forward(layer, *mine)
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    ep = layer.dispatcher._ep
    ep.sleep()
    with pytest.raises(RuntimeError, match="sleeps: call `wake`"):
        _forward(layer, *mine)
    ep.wake()
    assert_close(_forward(layer, *mine), want)


def test_layers_without_our_dispatcher_keep_their_experts(
    own_experts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks for the runner of each layer, also of one that sends no tokens to other ranks."""
    layer = _layer()
    config = layer.moe_runner_config
    assert isinstance(make_runner_core(config), EpmoeRunnerCore)
    monkeypatch.setattr(get_flags().moe, "a2a_backend", MoeA2ABackend.NONE)
    assert isinstance(make_runner_core(config), host.runner_module.DeepGemmRunnerCore)
    core = layer.quant_method.runner.runner_core
    layer.dispatcher = None
    with pytest.raises(ValueError, match="got the dispatcher NoneType: set EPMOE_SGLANG=1"):
        core.run_from_dispatch(None, None, config)


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
@EXPERTS
def test_deterministic_inference_is_kept(
    quantized: bool, own: bool, request: pytest.FixtureRequest
) -> None:
    """`--enable-deterministic-inference`: y of a token has the same bits alone and in batches of
    any size.
    """
    if own:
        request.getfixturevalue("own_experts")
    layer = _in_block_fp8()[0] if quantized else _layer()
    x, ids, weights = _tokens(dist.get_rank(), M)
    with host.deterministic():
        whole = _forward(layer, x, ids, weights)
        for first, last in ((0, 1), (5, 6), (3, 40), (M - 1, M)):
            part = slice(first, last) if dist.get_rank() == 0 else slice(M - last, M)
            assert torch.equal(_forward(layer, x[part], ids[part], weights[part]), whole[part])


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("tokens", [1, 32, M])
def test_a_captured_layer(layer: nn.Module, tokens: int) -> None:
    """A CUDA graph of the layer, as SGLang captures a decode step, replayed with other tokens and
    routing.
    """
    x, ids, weights = (tensor.to(DEVICE) for tensor in _tokens(dist.get_rank(), tokens))
    run: Callable[[], Tensor] = lambda: layer(x, host.StandardTopKOutput(weights, ids, None))  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for seed in (100, 200):
        other = _tokens(seed + dist.get_rank(), tokens, padded=tokens // 4)
        for tensor, values in zip((x, ids, weights), other, strict=True):
            tensor.copy_(values)
        graph.replay()
        assert_close(y, moe_reference(*other, _weights()))


def test_a_step_raises_what_kernels_have_reported(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's next step fails if a rank did not arrive, also where steps are replays
    of a graph.
    """
    ep = layer.dispatcher._ep

    def late() -> None:
        raise EPTimeoutError("combine", 7, [1], [1], "did not arrive")

    monkeypatch.setattr(ep, "poll", late)
    with pytest.raises(EPTimeoutError):
        host.ModelRunner.forward(None, None)
