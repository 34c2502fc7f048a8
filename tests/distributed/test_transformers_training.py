"""Models of transformers that train with their experts spread over the ranks; under torchrun with at least 2 ranks.

Beside the same model in one process, on the batches of all ranks. Gradients of parameters are reduced as transformers'
own EP implementations leave them: FSDP divides by the ranks, and so does DDP.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

import fp8_models
from spread_models import DEVICE, OneLayer, both_entry_points, needs_ep, own_gpus, random_ids, single_and_spread
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import epmoe.integrations.transformers as integration
from epmoe import EPAbortedError
from epmoe.cli.demo import generate as demo
from epmoe.integrations.transformers import settings

pytestmark = own_gpus
ERROR = 1e-5
"""Relative to the largest value, in fp32."""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(settings, "_settings", settings.Settings())
    yield
    integration.close()


def assert_near(got: Tensor, want: Tensor, name: str = "") -> None:
    error, largest = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= ERROR * largest, f"{name}: {error:.1e} of {largest:.1e}"


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def loss_of_all(model, batches: list[Tensor]) -> Tensor:
    return torch.stack([loss_of(model, ids) for ids in batches]).mean()


def gradients_of(model) -> dict[str, Tensor]:
    """Of all parameters; DDP's model has them under the names of its module."""
    named = getattr(model, "module", model).named_parameters()
    return {name: whole(parameter.grad) for name, parameter in named}


def models(name: str, entry_point: str = "ep_implementation"):
    single, spread = single_and_spread(name, entry_point)
    return single, spread if entry_point == "ep_implementation" else DistributedDataParallel(spread)


def mean_over_ranks(loss: Tensor) -> Tensor:
    loss = loss.detach().cpu()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def check_gradients(single, spread, batches: list[Tensor], rank: int) -> dict[str, Tensor]:
    """Those of `spread`, after a comparison with those of `single`."""
    loss = loss_of(spread, batches[rank])
    loss.backward()
    want = loss_of_all(single, batches)
    want.backward()
    assert_near(mean_over_ranks(loss), want.detach().cpu())
    expected, got = gradients_of(single), gradients_of(spread)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert_near(gradient, expected[name], name)
    return got


def ragged(size: int, step: int = 0) -> list[Tensor]:
    return [random_ids(3 + 11 * ((r + step) % size), seed=100 * step + r) for r in range(size)]


@both_entry_points
@pytest.mark.parametrize("max_tokens", [8, 4096])
@pytest.mark.parametrize("name", demo.MODELS)
def test_gradients_equal_a_single_process(name, max_tokens, entry_point, rank, size):
    """With at most 8 tokens a round, ranks with fewer tokens take part in rounds that others need. Twice: same bits."""
    integration.configure(max_num_tokens_per_rank=max_tokens)
    single, spread = models(name, entry_point)
    batches = ragged(size)
    first = check_gradients(single, spread, batches, rank)
    spread.zero_grad()
    loss_of(spread, batches[rank]).backward()
    for gradient, again in zip(first.values(), gradients_of(spread).values(), strict=True):
        assert torch.equal(gradient, again)
    (layers,) = integration.shared()
    layers.ep.check()


@needs_ep
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("max_tokens", [8, 4096])
def test_gradient_checkpointing(reentrant, max_tokens, rank, size):
    integration.configure(max_num_tokens_per_rank=max_tokens)
    single, spread = models("qwen3_moe")
    without = check_gradients(single, spread, ragged(size), rank)
    spread.zero_grad()
    spread.gradient_checkpointing_enable({"use_reentrant": reentrant})
    spread.train()
    if reentrant:
        spread.enable_input_require_grads()
    loss_of(spread, ragged(size)[rank]).backward()
    for gradient, again in zip(without.values(), gradients_of(spread).values(), strict=True):
        assert torch.equal(gradient, again)


@both_entry_points
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_20_steps_of_adamw(name, entry_point, rank, size):
    integration.configure(max_num_tokens_per_rank=16)
    single, spread = models(name, entry_point)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in (single, spread)]
    losses = []
    for step in range(20):
        batches = ragged(size, step % 2)
        want, loss = loss_of_all(single, batches), loss_of(spread, batches[rank])
        for each, optimizer in zip((want, loss), optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        losses.append((mean_over_ranks(loss).item(), want.item()))
    for got, expected in losses:
        assert abs(got - expected) <= ERROR * expected
    assert losses[-1][1] < losses[1][1] - 0.1


def layer_gradients(layer: OneLayer, which: str, inputs: list[tuple], rank: int) -> list[Tensor]:
    """Of x, of weights and of parameters, for a loss that weights the tokens of each rank in its own way."""
    experts = getattr(layer, which)
    mine = inputs if which == "single" else [inputs[rank]]
    for x, _, weights in mine:
        x.grad = weights.grad = None
        x.requires_grad_(), weights.requires_grad_()
    experts.zero_grad()
    torch.stack([experts(*one).sin().sum() for one in mine if len(one[0]) or which == "spread"]).sum().backward()
    return [inputs[rank][0].grad, inputs[rank][2].grad, *(whole(p.grad) for p in experts.parameters())]


@both_entry_points
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_with_batches_of_any_length(dtype, entry_point, rank, size):
    """Each rank has no tokens in some steps, also while another has 70, which take several rounds."""
    integration.configure(max_num_tokens_per_rank=16)
    layer = OneLayer("gpt_oss", entry_point, dtype)
    for step in range(2 * size):
        lengths = [(0, 1, 17, 70)[(r + step) % size % 4] for r in range(size)]
        inputs = [layer.inputs(T, 4, seed=10 * step + r) for r, T in enumerate(lengths)]
        got = layer_gradients(layer, "spread", inputs, rank)
        want = layer_gradients(layer, "single", inputs, rank)
        for i, (one, expected) in enumerate(zip(got, want, strict=True)):
            if i < 2 and not len(inputs[rank][0]):
                assert one.shape == inputs[rank][0 if i == 0 else 2].shape
                continue
            if i >= 2 and entry_point == "experts_implementation":
                dist.all_reduce(one)  # the other ranks' experts have gradients of 0 here
            assert (one - expected).abs().max() <= (ERROR if dtype == torch.float32 else 3e-2) * expected.abs().max()


def test_no_rank_has_tokens(rank):
    layer = OneLayer("qwen3_moe", "experts_implementation")
    x, ids, weights = layer.inputs(0, 4, seed=0)
    layer.spread(x.requires_grad_(), ids, weights).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.spread.parameters())


@needs_ep
def test_batch_shared_by_all_ranks(rank, size):
    """Tensor parallel: each rank sends its slice, and gets the gradients of all slices."""
    if demo.MODELS["qwen3_moe"]["num_key_value_heads"] % size:
        pytest.skip("needs a number of heads that the ranks divide")
    single, spread = single_and_spread("qwen3_moe", tp_size=size, ep_size=size)
    ids = random_ids(13, seed=0)
    loss_of(spread, ids).backward()
    loss_of(single, ids).backward()
    expected, got = gradients_of(single), gradients_of(spread)
    for name, gradient in got.items():
        assert_near(gradient, expected[name], name)


@needs_ep
def test_error_in_the_experts_of_one_rank_keeps_the_ranks_in_step(rank, size, monkeypatch):
    integration.configure(max_num_tokens_per_rank=8)
    layer = OneLayer("mixtral", "ep_implementation")
    inputs = [layer.inputs(5 + 20 * r, 2, seed=r) for r in range(size)]
    with monkeypatch.context() as patch:
        if rank == 0:

            def broken(gate_up: Tensor) -> Tensor:
                raise MemoryError

            patch.setattr(layer.spread, "_apply_gate", broken)
        with pytest.raises(MemoryError if rank == 0 else EPAbortedError):
            layer.spread(*inputs[rank])
    got, want = layer_gradients(layer, "spread", inputs, rank), layer_gradients(layer, "single", inputs, rank)
    for one, expected in zip(got, want, strict=True):
        assert_near(one, expected)


@needs_ep
def test_quantised_experts_are_refused(size):
    parallel = DistributedConfig(ep_implementation="epmoe", tp_size=1, fsdp_size=size, ep_size=size)
    with fp8_models.saved() as path:
        spread = fp8_models.quantised(path, distributed_config=parallel).to(DEVICE)
    if DEVICE == "cpu":
        pytest.skip("transformers dequantises without a GPU")
    with pytest.raises(RuntimeError, match="quantised experts have no gradients with epmoe"):
        spread(random_ids(9, seed=0))
