"""Models of transformers in static mode: compiled and captured generation; under torchrun with at
least 2 ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import spread_models
from exchanges import nodes_of
from helpers import ON_GPUS, captured, slow
from spread_models import (
    DEVICE,
    both_entry_points,
    needs_ep,
    own_gpus,
    random_ids,
    single_and_spread,
)
from transformers import CompileConfig

import epmoe.integrations.transformers as integration
from epmoe.cli.demo import generate as demo

pytestmark = own_gpus
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
"""On GPUs torch's grouped GEMM takes bf16 only without a look at the host."""
ERROR = 2e-2 if DEVICE == "cuda" else 1e-5
"""the error of logits, relative to the largest one"""
M = 32


@pytest.fixture(autouse=True)
def _static(default_settings, size):
    torch.compiler.reset()
    # inductor may compile while others wait
    options = {"static": True, "max_num_tokens_per_rank": M, "timeout_s": 120.0}
    integration.configure(**options, ranks_per_node=nodes_of(size))


@pytest.fixture
def every_expert(monkeypatch):
    """Each token goes to all 12 experts, which 2, 3 and 4 ranks divide: rounding cannot choose
    another expert, which it does at near ties in bf16. And there are two layers, since compilers
    take their time for each.
    """
    for name, config in demo.MODELS.items():
        monkeypatch.setitem(config, "num_hidden_layers", 2)
        count = "num_experts" if name == "qwen3_moe" else "num_local_experts"
        if count in config:
            monkeypatch.setitem(config, count, 12)
            monkeypatch.setitem(config, "num_experts_per_tok", 12)


def check_tokens(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Equal tokens and logits. After two tokens that are equally likely, within the error, texts
    may differ.
    """
    for got_token, got_logits, token, logits in zip(*got, *want, strict=True):
        limit = ERROR * logits.abs().max()
        assert (got_logits - logits).abs().max() <= limit
        if got_token != token:
            assert logits[token] - logits[got_token] <= 2 * limit
            return


def compiled() -> dict[str, object]:
    """Options of `generate`: on GPUs transformers compiles with inductor and CUDA
    graphs by itself.
    """
    options: dict[str, object] = {"cache_implementation": "static"}
    if DEVICE == "cpu":
        config = CompileConfig(backend="aot_eager", mode="default")
        config._compile_all_devices = True
        options["compile_config"] = config
    return options


def breaks_by_epmoe() -> list[str]:
    return [reason for reason in torch._dynamo.utils.counters["graph_break"] if "epmoe" in reason]


@pytest.mark.parametrize(
    ("name", "entry_point"),
    [
        ("qwen3_moe", "experts_implementation"),
        # The graph of another model around the same layers.
        slow("gpt_oss", "experts_implementation"),
        pytest.param("qwen3_moe", "ep_implementation", marks=needs_ep),
    ],
)
def test_compiled_generation_with_a_static_cache(name, entry_point, rank, size, every_expert):
    """Prompts differ. All ranks take equally many steps, as static mode asks for."""
    single, spread = single_and_spread(name, entry_point, DTYPE)
    prompt = random_ids(5 + 9 * rank, seed=rank)
    want = demo.generate(single, prompt, 6)
    torch._dynamo.utils.counters.clear()
    check_tokens(demo.generate(spread, prompt, 6, **compiled()), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not breaks_by_epmoe()
    (layers,) = integration.shared()
    assert layers.seconds["agree"] == 0
    integration.poll()


def test_ranks_whose_texts_end_at_different_steps(rank, size, every_expert):
    """With the same `max_new_tokens`, as the page says, a static cache has room for the steps of
    the others.
    """
    single, spread = single_and_spread("qwen3_moe", "experts_implementation", DTYPE)
    prompt = random_ids(5 + 9 * rank, seed=rank)
    steps = [2, 6, 4, 3][rank % 4]
    want = demo.generate(single, prompt, 6)

    def ends(ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return torch.full((1,), ids.shape[1] >= prompt.shape[1] + steps, device=ids.device)

    options = {"cache_implementation": "static", "synced_gpus": True, "min_new_tokens": None}
    tokens, logits = demo.generate(spread, prompt, 6, stopping_criteria=[ends], **options)
    assert len(tokens) == steps
    check_tokens((tokens, logits), (want[0][:steps], want[1][:steps]))


def test_one_graph_without_breaks(rank, every_expert):
    """There is a new one after the windows were released, since the old one would write into
    released memory.
    """
    single, spread = single_and_spread("qwen3_moe", "experts_implementation", DTYPE)
    ids = random_ids(7, seed=rank)
    graph = torch.compile(
        lambda ids: spread(ids, use_cache=False).logits, backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        # Twice, with windows of their own.
        want = single(ids, use_cache=False).logits
        for _ in range(2):
            spread(ids, use_cache=False)  # makes the windows
            got = graph(ids)
            assert (got - want).abs().max() <= ERROR * want.abs().max()
            (layers,) = integration.shared()
            assert layers.ep.health().rounds == 4
            integration.close()


@both_entry_points
def test_a_longer_batch_is_an_error_before_anything_is_sent(entry_point, rank):
    layer = spread_models.OneLayer("mixtral", entry_point, DTYPE)
    layer.check(*layer.inputs(M - rank, 2, seed=rank))
    (layers,) = integration.shared()
    rounds = layers.ep.health().rounds
    rows_sent = layers.ep.health().rows_sent
    with (
        torch.no_grad(),
        pytest.raises(
            ValueError, match=f"a rank brings {M + 1} tokens, but static mode takes at most"
        ),
    ):
        layer.spread(*layer.inputs(M + 1, 2, seed=rank))
    assert layers.ep.health().rounds == rounds + 1, "one round, given up"
    assert layers.ep.health().rows_sent == rows_sent
    layer.check(*layer.inputs(rank, 2, seed=rank))


@needs_ep
def test_kernels_that_need_counts_on_the_host(rank, monkeypatch):
    """They run in ordinary mode. In static mode they are an error before anything is sent."""
    monkeypatch.setattr(
        "epmoe.integrations.transformers.ep_implementation.can_group", lambda experts: False
    )
    layer = spread_models.OneLayer("gpt_oss", "ep_implementation", DTYPE)
    inputs = layer.inputs(9 + rank, 4, seed=rank)
    with torch.no_grad(), pytest.raises(ValueError, match="static mode needs experts"):
        layer.spread(*inputs)
    integration.configure(static=False)
    layer.check(*inputs)
    x, ids, weights = inputs
    layer.check(x, ids % 5, weights)  # all on rank 0


@ON_GPUS
@both_entry_points
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_a_captured_layer(name, entry_point, rank, device):
    """Every replay has other tokens and other experts; some have no rows at all on most ranks."""
    layer = spread_models.OneLayer(name, entry_point, DTYPE)
    x, ids, weights = layer.inputs(M, 2, seed=0)
    layer.check(x, ids, weights)
    with torch.no_grad():
        replay, y = captured(lambda: layer.spread(x, ids, weights))
    # Other tokens in the same buffers, now and then all for experts of rank 0.
    for step in range(6):
        inputs = layer.inputs(M, 2, seed=10 * step + rank)
        for buffer, values in zip((x, ids, weights), inputs, strict=True):
            buffer.copy_(values)
        if step % 2:
            ids.remainder_(3)  # experts of rank 0
        # The replay has the bits of an eager call.
        replay()
        with torch.no_grad():
            assert torch.equal(y, layer.spread(x, ids, weights))
        integration.poll()


@ON_GPUS
@pytest.mark.parametrize(
    ("entry_point", "shares_batch"),
    [("experts_implementation", False), pytest.param("ep_implementation", True, marks=needs_ep)],
)
def test_a_captured_forward_pass(entry_point, shares_batch, rank, size, device, every_expert):
    parallel = {"tp_size": size, "ep_size": size} if shares_batch else {}
    single, spread = single_and_spread("qwen3_moe", entry_point, DTYPE, **parallel)
    ids = random_ids(8, seed=0)
    position_ids = torch.arange(8, device=device)[None]

    def forward() -> Tensor:
        return spread(ids, position_ids=position_ids, use_cache=False).logits

    with torch.no_grad():
        replay, logits = captured(forward)
    # Replays of other prompts have the logits of one process.
    for step in range(4):
        ids.copy_(random_ids(8, seed=step if shares_batch else 10 * step + rank))
        replay()
        with torch.no_grad():
            want = single(ids, position_ids=position_ids, use_cache=False).logits
        assert (logits - want).abs().max() <= ERROR * want.abs().max()
        integration.poll()


@ON_GPUS
def test_windows_are_not_made_in_a_capture(device):
    layer = spread_models.OneLayer("mixtral", "experts_implementation", DTYPE)
    inputs = layer.inputs(8, 2, seed=0)
    refused = pytest.raises(RuntimeError, match="call the model once before the capture")
    with torch.no_grad(), refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer.spread(*inputs)
    assert not integration.shared()
