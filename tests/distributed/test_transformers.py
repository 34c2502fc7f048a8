"""Models of transformers with their experts spread over the ranks; under torchrun with 2, 3 or 4 ranks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism

import epmoe.integrations.transformers as integration
from epmoe.integrations import demo, shared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where transformers puts a model that is spread over ranks."""
FP32_LOGITS = 1e-5 if DEVICE == "cpu" else 1e-4
"""Absolute, of logits up to 5 in size; on GPUs the libraries choose other kernels for other numbers of rows."""
BF16_ROWS = 1.6e-2
"""Relative to the largest value of one layer's output: 2 roundings to 8 bits, before and after the sum over ranks."""
BF16_LOGITS = 2e-2
"""Relative to the largest logit, after 3 layers."""
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(shared, "_settings", {})
    monkeypatch.setattr(shared, "_group", None)
    yield
    integration.close()


def random_ids(num_tokens: int, seed: int) -> Tensor:
    return torch.randint(1, 240, (1, num_tokens), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def load(path: str, **options):
    """The model as one process has it."""
    return AutoModelForCausalLM.from_pretrained(path, **options).to(DEVICE)


def both(name: str, dtype: torch.dtype = torch.float32, **parallel):
    """The model in one process, and spread over all."""
    with demo.saved_model(name, dtype=dtype) as path:
        single = load(path, dtype=dtype)
        if not parallel:
            return single, demo.load_distributed(path, dist.get_world_size(), dtype=dtype)
        config = DistributedConfig(ep_implementation="epmoe", **parallel)
        return single, AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config)


def routers(model) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]


class OneLayer:
    """The experts of a model's last layer: `whole` in this process, `spread` over a mesh [copies, ep] or [ep]."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, mesh=None, **config):
        with pytest.MonkeyPatch.context() as patch:
            for key, value in config.items():
                patch.setitem(demo.MODELS[name], key, value)
            with demo.saved_model(name, dtype=dtype) as path:
                models = [load(path, dtype=dtype) for _ in range(2)]
        self.whole, self.spread = (model.model.layers[-1].mlp.experts for model in models)
        self.num_experts, self.dtype = self.whole.num_experts, dtype
        self.hidden_size = models[0].config.hidden_size
        self.model = models[1]
        if mesh is not None:
            plan = {"": "ep_dispatch_experts"} | dict.fromkeys(dict(self.spread.named_parameters()), "grouped_gemm")
            plan = dict(sorted(plan.items(), reverse=True))  # parameters before the module
            alone = init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("other", "tp"))["tp"]
            apply_expert_parallelism(self.spread, mesh, alone, plan, ep_implementation="epmoe")

    def inputs(self, num_tokens: int, top_k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_tokens, self.hidden_size, generator=generator).to(self.dtype)
        ids = torch.rand(num_tokens, self.num_experts, generator=generator).argsort(1)[:, :top_k]
        weights = 2.5 * torch.rand(num_tokens, top_k, generator=generator).softmax(1)  # DeepSeek's sum, in fp32
        return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)

    def check(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Collective: `spread` gives what `whole` gives."""
        with torch.no_grad():
            got, want = self.spread(x, ids, weights), self.whole(x, ids, weights)
        assert got.dtype == want.dtype == self.dtype
        assert got.shape == want.shape
        if len(x):
            limit = {torch.float32: 1e-5, torch.bfloat16: BF16_ROWS}[self.dtype] * want.abs().max().item()
            assert (got - want).abs().max().item() <= limit


def world_mesh():
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


@pytest.mark.parametrize("name", demo.MODELS)
def test_generation_from_different_prompts_equals_a_single_process(name, rank):
    """Ranks that have finished keep stepping until the last has."""
    single, spread = both(name)
    prompt, new_tokens = random_ids(3 + 9 * rank, seed=rank), 4 + 3 * rank
    tokens, logits = demo.generate(single, prompt, new_tokens)
    got, got_logits = demo.generate(spread, prompt, new_tokens)
    assert torch.equal(got, tokens)
    assert (got_logits - logits).abs().max() <= FP32_LOGITS
    (layers,) = integration.shared()  # all layers of the model
    assert layers.seconds["dispatch"] > 0


@pytest.mark.parametrize("name", demo.MODELS)
def test_bfloat16_logits(name, rank):
    """Teacher-forced, in tokens and in routing: at bfloat16's near ties another rounding takes another expert."""
    single, spread = both(name, torch.bfloat16)
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


@pytest.mark.parametrize("name", demo.MODELS)
def test_a_batch_that_all_ranks_share(name, rank, size):
    """Tensor parallel: each rank sends its slice, decoding leaves all but one with none, and nobody has to agree."""
    plan = {"lm_head": "colwise_gather_output"} if name == "gpt_oss" else None
    single, spread = both(name, tp_size=size, tp_plan=plan, ep_size=size)
    prompt = random_ids(13, seed=0)
    tokens, logits = demo.generate(single, prompt, 8)
    got, got_logits = demo.generate(spread, prompt, 8)
    assert torch.equal(got, tokens)
    assert (got_logits - logits).abs().max() <= FP32_LOGITS
    (layers,) = integration.shared()
    assert layers.seconds["agree"] == 0
    sent = torch.tensor(sum(layers.ep.health().rows_sent))
    dist.all_reduce(sent)
    moe_layers = 2 if name == "deepseek_v3" else 3
    assert sent <= moe_layers * (13 + 7) * min(size, 8)  # each token once to each rank, not once from each


def test_pairs_of_ranks_that_share_a_batch(rank, size):
    if size != 4:
        pytest.skip("needs 4 ranks")
    single, spread = both("qwen3_moe", tp_size=2, fsdp_size=2, ep_size=4)
    prompt = random_ids(5 + 6 * (rank // 2), seed=rank // 2)
    tokens, logits = demo.generate(single, prompt, 5)
    got, got_logits = demo.generate(spread, prompt, 5)
    assert torch.equal(got, tokens)
    assert (got_logits - logits).abs().max() <= FP32_LOGITS


def test_two_groups_of_ranks_each_with_all_experts(rank, size):
    if size != 4:
        pytest.skip("needs 4 ranks")
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("copies", "ep"))
    layer = OneLayer("qwen3_moe", mesh=mesh["ep"])
    layer.check(*layer.inputs(10 + rank, 8, seed=rank))
    assert integration.shared()[0].ep.size == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", demo.MODELS)
def test_one_layer_with_batches_of_any_length(name, dtype, rank, size):
    layer = OneLayer(name, dtype, world_mesh())
    for step in range(2 * size):  # each rank has no tokens twice, also while another has 70
        turn = (rank + step) % size
        layer.check(*layer.inputs((0, 1, 17, 70)[turn], 4, seed=10 * step + rank))


def test_nobody_has_a_token(size):
    layer = OneLayer("mixtral", mesh=world_mesh())
    layer.check(*layer.inputs(0, 2, seed=0))


def test_experts_that_get_no_row(rank):
    layer = OneLayer("gpt_oss", mesh=world_mesh())
    x, ids, weights = layer.inputs(9, 4, seed=rank)
    layer.check(x, ids % 5, weights)  # all on rank 0


def test_prompts_longer_than_the_cap_run_in_rounds(rank, size):
    integration.configure(max_num_tokens_per_rank=8)
    layer = OneLayer("deepseek_v3", mesh=world_mesh())
    for step in range(size):
        turn = (rank + step) % size
        layer.check(*layer.inputs((0, 8, 9, 33)[turn], 6, seed=rank))
    (layers,) = integration.shared()
    assert layers.ep.config.capacity.max_num_tokens_per_rank == 8
    assert layers.seconds["agree"] > 0


def test_a_shared_batch_longer_than_the_cap(rank, size):
    integration.configure(max_num_tokens_per_rank=3)
    plan = {"lm_head": "colwise_gather_output"}
    single, spread = both("gpt_oss", tp_size=size, tp_plan=plan, ep_size=size)
    ids = random_ids(29, seed=0)
    with torch.inference_mode():
        assert (spread(ids).logits - single(ids).logits).abs().max() <= FP32_LOGITS


@pytest.mark.parametrize("name", demo.MODELS)
def test_the_experts_function_with_whole_weights_everywhere(name, rank, size):
    with demo.saved_model(name) as path:
        single, spread = load(path), load(path, experts_implementation="epmoe")
    prompt, new_tokens = random_ids(3 + 9 * rank, seed=rank), 3 + 2 * rank
    tokens, logits = demo.generate(single, prompt, new_tokens)
    got, got_logits = demo.generate(spread, prompt, new_tokens, synced_gpus=True)
    assert torch.equal(got, tokens)
    assert (got_logits - logits).abs().max() <= FP32_LOGITS
    (layers,) = integration.shared()
    assert layers.ep.size == size


@pytest.mark.parametrize("num_experts", [3, 11])
def test_the_experts_function_takes_any_number_of_experts(num_experts, rank):
    layer = OneLayer("qwen3_moe", num_experts=num_experts)
    layer.spread.config._experts_implementation = "epmoe"
    layer.check(*layer.inputs(20 + rank, 3, seed=rank))


def test_the_experts_function_on_a_group_of_its_own(rank, size):
    groups = [dist.new_group([one]) for one in range(size)]
    integration.configure(group=groups[rank])
    layer = OneLayer("qwen3_moe")
    layer.spread.config._experts_implementation = "epmoe"
    layer.check(*layer.inputs(20 + rank, 8, seed=rank))
    assert integration.shared()[0].ep.size == 1


def test_an_error_in_the_experts_of_one_rank_leaves_the_others_in_step(rank, monkeypatch):
    layer = OneLayer("mixtral", mesh=world_mesh())
    inputs = layer.inputs(12, 2, seed=rank)
    with monkeypatch.context() as patch, torch.no_grad():
        if rank == 0:
            patch.setattr(layer.spread, "_apply_gate", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                layer.spread(*inputs)
        else:
            layer.spread(*inputs)
    layer.check(*inputs)


@pytest.mark.skipif(DEVICE != "cpu", reason="the demo runs on the CPU")
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
