"""Models of transformers with their experts spread over the ranks; under torchrun with 2 ranks or more."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from helpers import RANKS_SHARE_GPUS
from spread_models import DEVICE, OneLayer, both, random_ids

import epmoe.integrations.transformers as integration
from epmoe.integrations import demo, shared

pytestmark = pytest.mark.skipif(RANKS_SHARE_GPUS, reason="transformers gives each rank the GPU of its number")
needs_ep = pytest.mark.skipif(not hasattr(integration, "EpmoeEP"), reason="EP implementations need transformers 5.23")
both_ways = pytest.mark.parametrize(
    "way", [pytest.param("ep_implementation", marks=needs_ep), "experts_implementation"]
)
"""Each rank with its share of the expert weights, or with all of them and its share of the work."""
FP32_LOGITS = 1e-5 if DEVICE == "cpu" else 1e-4
"""Absolute, of logits up to 5 in size, which fp32 on the CPU gives to within 3e-6 of fp64. On GPUs the two sides also
sum in different orders: transformers decodes with `batched_mm` there, and libraries choose kernels by rows.
"""
BF16_LOGITS = 2e-2
"""Relative to the largest logit, after 3 layers."""
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(shared, "_settings", {})
    monkeypatch.setattr(shared, "_group", None)
    yield
    integration.close()


def check_generation(single, spread, prompt: Tensor, new_tokens: int, synced_gpus: bool | None = None) -> None:
    tokens, logits = demo.generate(single, prompt, new_tokens)
    got, got_logits = demo.generate(spread, prompt, new_tokens, synced_gpus=synced_gpus)
    assert torch.equal(got, tokens)
    assert (got_logits - logits).abs().max() <= FP32_LOGITS


def need_shared_heads(name: str, size: int) -> None:
    if demo.MODELS[name]["num_key_value_heads"] % size:
        pytest.skip("the ranks must share the heads evenly")


def routers(model) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]


@both_ways
@pytest.mark.parametrize("name", demo.MODELS)
def test_generation_from_different_prompts_equals_a_single_process(name, way, rank, size):
    """Ranks that have finished keep stepping until the last has: unasked, where torch's FSDP holds the weights."""
    single, spread = both(name, way)
    prompt, new_tokens = random_ids(3 + 9 * rank, seed=rank), 4 + 3 * rank
    check_generation(single, spread, prompt, new_tokens, synced_gpus=True if way == "experts_implementation" else None)
    (layers,) = integration.shared()  # all layers of the model
    assert layers.ep.size == size
    assert layers.seconds["dispatch"] > 0


@both_ways
@pytest.mark.parametrize("name", demo.MODELS)
def test_bfloat16_logits(name, way, rank):
    """Teacher-forced, in tokens and in routing: at bfloat16's near ties another rounding takes another expert."""
    single, spread = both(name, way, torch.bfloat16)
    routings: list[tuple] = []
    for router in routers(single):
        router.register_forward_hook(lambda module, args, output: routings.append(output))
    for router in routers(spread):
        router.register_forward_hook(lambda module, args, output: routings.pop(0))
    ids = random_ids(40 + 5 * rank, seed=rank)
    with torch.no_grad():  # torch's FSDP refuses inference_mode
        want, got = single(ids).logits.float(), spread(ids).logits.float()
    assert not routings
    assert (got - want).abs().max() <= BF16_LOGITS * want.abs().max()


@needs_ep
@pytest.mark.parametrize("name", demo.MODELS)
def test_a_batch_that_all_ranks_share(name, rank, size):
    """Tensor parallel: each rank sends its slice, decoding leaves all but one with none, and nobody has to agree."""
    need_shared_heads(name, size)
    plan = {"lm_head": "colwise_gather_output"} if name == "gpt_oss" else None
    single, spread = both(name, tp_size=size, tp_plan=plan, ep_size=size)
    prompt = random_ids(13, seed=0)
    check_generation(single, spread, prompt, 8)
    (layers,) = integration.shared()
    assert layers.seconds["agree"] == 0
    sent = torch.tensor(sum(layers.ep.health().rows_sent))
    dist.all_reduce(sent)
    moe_layers = 2 if name == "deepseek_v3" else 3
    assert sent <= moe_layers * (13 + 7) * min(size, 8)  # each token once to each rank, not once from each


@needs_ep
def test_pairs_of_ranks_that_share_a_batch(rank, size):
    if size != 4:
        pytest.skip("needs 4 ranks")
    single, spread = both("qwen3_moe", tp_size=2, fsdp_size=2, ep_size=4)
    prompt = random_ids(5 + 6 * (rank // 2), seed=rank // 2)
    check_generation(single, spread, prompt, 5)


@needs_ep
def test_two_groups_of_ranks_each_with_all_experts(rank, size):
    if size != 4:
        pytest.skip("needs 4 ranks")
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("copies", "ep"))
    layer = OneLayer("qwen3_moe", "ep_implementation", mesh=mesh["ep"])
    layer.check(*layer.inputs(10 + rank, 8, seed=rank))
    assert integration.shared()[0].ep.size == 2


@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", demo.MODELS)
def test_one_layer_with_batches_of_any_length(name, dtype, way, rank, size):
    layer = OneLayer(name, way, dtype)
    for step in range(2 * size):  # each rank has no tokens twice, also while another has 70
        turn = (rank + step) % size
        layer.check(*layer.inputs((0, 1, 17, 70)[turn % 4], 4, seed=10 * step + rank))


@both_ways
def test_nobody_has_a_token(way):
    layer = OneLayer("mixtral", way)
    layer.check(*layer.inputs(0, 2, seed=0))


@both_ways
def test_experts_that_get_no_row(way, rank):
    layer = OneLayer("gpt_oss", way)
    x, ids, weights = layer.inputs(9, 4, seed=rank)
    layer.check(x, ids % 5, weights)  # all on rank 0


@both_ways
def test_prompts_longer_than_the_cap_run_in_rounds(way, rank, size):
    integration.configure(max_num_tokens_per_rank=8)
    layer = OneLayer("deepseek_v3", way)
    for step in range(size):
        turn = (rank + step) % size
        layer.check(*layer.inputs((0, 8, 9, 33)[turn % 4], 6, seed=rank))
    (layers,) = integration.shared()
    assert layers.ep.config.capacity.max_num_tokens_per_rank == 8
    assert layers.seconds["agree"] > 0


@needs_ep
def test_a_shared_batch_longer_than_the_cap(rank, size):
    need_shared_heads("gpt_oss", size)
    integration.configure(max_num_tokens_per_rank=3)
    plan = {"lm_head": "colwise_gather_output"}
    single, spread = both("gpt_oss", tp_size=size, tp_plan=plan, ep_size=size)
    ids = random_ids(29, seed=0)
    with torch.inference_mode():
        assert (spread(ids).logits - single(ids).logits).abs().max() <= FP32_LOGITS


@pytest.mark.parametrize("num_experts", [3, 11])
def test_the_experts_function_takes_any_number_of_experts(num_experts, rank):
    layer = OneLayer("qwen3_moe", "experts_implementation", num_experts=num_experts)
    layer.check(*layer.inputs(20 + rank, 3, seed=rank))


def test_the_experts_function_on_a_group_of_its_own(rank, size):
    groups = [dist.new_group([one]) for one in range(size)]
    integration.configure(group=groups[rank])
    layer = OneLayer("qwen3_moe", "experts_implementation")
    layer.check(*layer.inputs(20 + rank, 8, seed=rank))
    assert integration.shared()[0].ep.size == 1


@both_ways
def test_an_error_in_the_experts_of_one_rank_leaves_the_others_in_step(way, rank, monkeypatch):
    layer = OneLayer("mixtral", way)
    inputs = layer.inputs(12, 2, seed=rank)
    with monkeypatch.context() as patch, torch.no_grad():
        if rank == 0:
            patch.setattr(layer.spread, "_apply_gate", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                layer.spread(*inputs)
        else:
            layer.spread(*inputs)
    layer.check(*inputs)


@pytest.mark.parametrize("name", demo.MODELS)
def test_the_demo(name, size):
    result = demo.run_model(name, max_new_tokens=8)
    assert result.tokens_equal
    assert result.max_logit_error <= FP32_LOGITS
    assert len(result.texts) == len(result.prompts) == len(result.seconds) == size
    pairs = sum(len(demo.make_tokenizer().encode(prompt).ids) + 7 for prompt in result.prompts)
    config = demo.MODELS[name]
    layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    assert sum(result.tokens_per_expert) == pairs * layers * config["num_experts_per_tok"]
    assert sum(map(sum, result.traffic)) <= sum(result.tokens_per_expert)
    assert 0 < result.rows_moved < sum(map(sum, result.traffic))
