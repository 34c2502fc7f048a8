"""Models of transformers that train with their experts spread over the ranks; under torchrun with
at least 2 ranks.

Beside the same model in one process, on the batches of all ranks. Gradients of parameters are
reduced as transformers' own EP implementations leave them: FSDP divides by the ranks, and so does
DDP.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("transformers")

from helpers import long, slow
from spread_models import (
    DEVICE,
    ENTRY_POINTS,
    OneLayer,
    both_entry_points,
    by_turns,
    needs_ep,
    needs_heads,
    own_gpus,
    random_ids,
    single_and_spread,
)
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

import epmoe.integrations.transformers as integration
from epmoe import EPAbortedError
from epmoe.cli.demo import generate as demo

pytestmark = [own_gpus, pytest.mark.usefixtures("default_settings")]
ERROR = 1e-5
"""Relative to the largest value, in fp32."""


def assert_near(got: Tensor, want: Tensor, name: str = "") -> None:
    error = (got - want).abs().max().item()
    largest = want.abs().max().item()
    assert error <= ERROR * largest, f"{name}: {error:.1e} of {largest:.1e}"


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(model, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def loss_of_all(model, batches: list[Tensor]) -> Tensor:
    return torch.stack([loss_of(model, ids) for ids in batches]).mean()


def gradients_of(model) -> dict[str, Tensor]:
    """The gradients of all parameters. DDP's model has them under the names of its module."""
    named = getattr(model, "module", model).named_parameters()
    return {name: whole(parameter.grad) for name, parameter in named}


def compare_gradients(single, spread) -> None:
    expected = gradients_of(single)
    got = gradients_of(spread)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert_near(gradient, expected[name], name)


def own_gradients(spread, ids: Tensor) -> list[Tensor]:
    """Gradients before DDP's reduction, whose order of sums changes after its first step; FSDP's
    stays.
    """
    spread.zero_grad()
    with spread.no_sync() if isinstance(spread, DistributedDataParallel) else nullcontext():
        loss_of(spread, ids).backward()
    return list(gradients_of(spread).values())


def models(name: str, entry_point: str = "ep_implementation"):
    single, spread = single_and_spread(name, entry_point)
    return single, spread if entry_point == "ep_implementation" else DistributedDataParallel(spread)


def mean_over_ranks(loss: Tensor) -> Tensor:
    loss = loss.detach().cpu()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def check_gradients(single, spread, batches: list[Tensor], rank: int) -> None:
    """Compares the gradients of `spread` with those of `single`."""
    loss = loss_of(spread, batches[rank])
    loss.backward()
    want = loss_of_all(single, batches)
    want.backward()
    assert_near(mean_over_ranks(loss), want.detach().cpu())
    compare_gradients(single, spread)


def ragged(size: int) -> list[Tensor]:
    return [random_ids(3 + 11 * r, seed=r) for r in range(size)]


@pytest.mark.parametrize("max_tokens", [8, long(4096)])
@pytest.mark.parametrize(("name", "entry_point"), by_turns(demo.MODELS, ENTRY_POINTS))
def test_gradients_equal_a_single_process(name, max_tokens, entry_point, rank, size):
    """With at most 8 tokens a round, ranks with fewer tokens take part in rounds that others need.
    Twice: same bits.
    """
    integration.configure(max_num_tokens_per_rank=max_tokens)
    single, spread = models(name, entry_point)
    batches = ragged(size)
    check_gradients(single, spread, batches, rank)
    assert all(
        map(torch.equal, own_gradients(spread, batches[rank]), own_gradients(spread, batches[rank]))
    )


@needs_ep
@pytest.mark.parametrize(("max_tokens", "reentrant"), by_turns([8, 4096], [False, True]))
def test_gradient_checkpointing(max_tokens, reentrant, rank, size):
    integration.configure(max_num_tokens_per_rank=max_tokens)
    single, spread = models("qwen3_moe")
    batch = ragged(size)[rank]
    check_gradients(single, spread, ragged(size), rank)
    (layers,) = integration.shared()
    before = layers.ep.exchange.rounds.count
    without = own_gradients(spread, batch)
    after = layers.ep.exchange.rounds.count
    spread.gradient_checkpointing_enable({"use_reentrant": reentrant})
    spread.train()
    if reentrant:
        spread.enable_input_require_grads()
    assert all(map(torch.equal, own_gradients(spread, batch), without))
    # Recomputation runs the forward rounds twice.
    assert 2 * (layers.ep.exchange.rounds.count - after) == 3 * (after - before)


# Entry points differ in the gradients of a step, which test_gradients_equal_a_single_process has.
@pytest.mark.parametrize(
    "entry_point", [pytest.param(ENTRY_POINTS[0], marks=needs_ep), slow(ENTRY_POINTS[1])]
)
def test_the_trainer(entry_point, size, tmp_path):
    """It has a rate that decays, clips gradients, accumulates two batches, and checkpoints
    activations.
    """
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    single, spread = single_and_spread("qwen3_moe", entry_point)  # the Trainer makes DDP's model
    steps = 6
    per_rank = 2
    accumulated = 2
    examples = random_ids(12 * size * per_rank * accumulated * steps, seed=0).view(-1, 12).cpu()
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=per_rank,
        gradient_accumulation_steps=accumulated,
        max_steps=steps,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        gradient_checkpointing=True,
    )
    trainer = Trainer(
        spread, arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in examples]
    )
    # The Trainer over the ranks.
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]

    # The same steps in one process, each with all sequences of all ranks.
    optimizer = torch.optim.AdamW(single.parameters(), lr=1e-3, weight_decay=0.0)
    batches = examples.to(DEVICE).view(steps, -1, 12)
    for step, (batch, entry) in enumerate(zip(batches, logged, strict=True)):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
        optimizer.zero_grad()
        loss = loss_of(single, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        optimizer.step()
        assert abs(entry["loss"] - loss.item()) <= ERROR * loss.item()
        assert abs(entry["grad_norm"] - norm.item()) <= 10 * ERROR * norm.item()


def layer_gradients(layer: OneLayer, which: str, inputs: list[tuple], rank: int) -> list[Tensor]:
    """Gradients of x, of weights and of parameters, for a loss that weights the tokens of each rank
    in its own way.
    """
    experts = getattr(layer, which)
    mine = inputs if which == "single" else [inputs[rank]]
    # Leaves without gradients of an earlier call.
    for x, _, weights in mine:
        x.grad = weights.grad = None
        x.requires_grad_(), weights.requires_grad_()
    experts.zero_grad()
    # One loss over the batches.
    torch.stack(
        [experts(*one).sin().sum() for one in mine if len(one[0]) or which == "spread"]
    ).sum().backward()
    return [
        inputs[rank][0].grad,
        inputs[rank][2].grad,
        *(whole(p.grad) for p in experts.parameters()),
    ]


def check_layer_gradients(
    layer: OneLayer, inputs: list[tuple], rank: int, error: float = ERROR
) -> None:
    """The gradients of `spread` equal those of `single`, and those of x on a rank without tokens
    are empty.
    """
    got = layer_gradients(layer, "spread", inputs, rank)
    want = layer_gradients(layer, "single", inputs, rank)
    for i, (one, expected) in enumerate(zip(got, want, strict=True)):
        # A rank without tokens has empty gradients.
        if i < 2 and not len(inputs[rank][0]):
            assert one.shape == inputs[rank][0 if i == 0 else 2].shape
            continue
        if i >= 2 and layer.entry_point == "experts_implementation":
            dist.all_reduce(one)  # the other ranks' experts have gradients of 0 here
        assert one.dtype == expected.dtype
        assert (one - expected).abs().max() <= error * expected.abs().max()


@both_entry_points
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_with_batches_of_any_length(dtype, entry_point, rank, size):
    """Each rank has no tokens in some steps, also while another has 70, which take
    several rounds.
    """
    integration.configure(max_num_tokens_per_rank=16)
    layer = OneLayer("gpt_oss", entry_point, dtype)
    for step in range(2 * size):
        lengths = [(0, 1, 17, 70)[(r + step) % size % 4] for r in range(size)]
        inputs = [layer.inputs(T, 4, seed=10 * step + r) for r, T in enumerate(lengths)]
        check_layer_gradients(layer, inputs, rank, ERROR if dtype == torch.float32 else 3e-2)


def test_no_rank_has_tokens(rank):
    layer = OneLayer("qwen3_moe", "experts_implementation")
    x, ids, weights = layer.inputs(0, 4, seed=0)
    layer.spread(x.requires_grad_(), ids, weights).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.spread.parameters())


@needs_ep
def test_batch_shared_by_all_ranks(rank, size):
    """Tensor parallel: each rank sends its slice, and gets the gradients of all slices."""
    needs_heads("qwen3_moe")
    single, spread = single_and_spread("qwen3_moe", tp_size=size, ep_size=size)
    ids = random_ids(13, seed=0)
    loss_of(spread, ids).backward()
    loss_of(single, ids).backward()
    compare_gradients(single, spread)


@needs_ep
@pytest.mark.parametrize("sizes", [(1, 4, 2), (2, 2, 4), (2, 2, 2)])
def test_copies_of_experts_and_batches_shared_by_two_ranks(sizes, rank, size):
    """FSDP adds the gradients of an expert's copies, and TP's ranks send a slice each."""
    if size != 4:
        pytest.skip("needs 4 ranks")
    tp, fsdp, ep = sizes
    single, spread = single_and_spread("qwen3_moe", tp_size=tp, fsdp_size=fsdp, ep_size=ep)
    loss_of(spread, ragged(fsdp)[rank // tp]).backward()
    loss_of_all(single, ragged(fsdp)).backward()
    compare_gradients(single, spread)


@needs_ep
def test_experts_whose_kernel_takes_pairs(rank, size, monkeypatch):
    """They have another implementation. Only the first rank has rows; the others' parameters get
    zeros.
    """
    ExpertsInterface.register("another", grouped_mm_experts_forward)
    layer = OneLayer("qwen3_moe", "ep_implementation")
    inputs = [layer.inputs(9 + r, 3, seed=r) for r in range(size)]
    inputs = [(x, ids % (layer.num_experts // size), weights) for x, ids, weights in inputs]
    monkeypatch.setattr(layer.spread.config, "_experts_implementation", "another")
    check_layer_gradients(layer, inputs, rank)


@needs_ep
def test_several_nodes_are_refused(size):
    if size % 2:
        pytest.skip("needs two nodes of the same size")
    integration.configure(ranks_per_node=size // 2)
    layer = OneLayer("mixtral", "ep_implementation")
    with pytest.raises(ValueError, match="training needs a group of one node"):
        layer.spread(*layer.inputs(5, 2, seed=0))


@both_entry_points
def test_error_in_the_experts_of_one_rank_keeps_the_ranks_in_step(
    entry_point, rank, size, monkeypatch
):
    integration.configure(max_num_tokens_per_rank=8)
    layer = OneLayer("mixtral", entry_point)
    inputs = [layer.inputs(5 + 20 * r, 2, seed=r) for r in range(size)]
    # Experts of rank 0 fail, and the others hear of it.
    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(layer.spread, "_apply_gate", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError if rank == 0 else EPAbortedError):
            layer.spread(*inputs[rank])
    check_layer_gradients(layer, inputs, rank)
