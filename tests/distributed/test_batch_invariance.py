"""`experts.batch_invariant`: y of a token and its gradient have the same bits in any batch, on any
rank, with and without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from expert_inputs import quantized
from helpers import ON_GPUS, captured, poison_, randn, slow
from torch import Tensor

from epmoe import MoELayer
from epmoe.local.spread import local_view
from epmoe.local.weight_formats import bits_of

E = 13
K = 4
D = 128
F = 96
M = 40
TOKENS = 200
CASES = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16", "exchange": {"payload": "fp8", "combine_payload": "fp8"}},
    "fp16": {"dtype": "float16", "placement": {"strategy": "round_robin"}},
}

TRAINED = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
}

PAYLOADS = ("auto", "fp8")  # on GPUs


def built(make_ep, device, case: dict, experts: int) -> MoELayer:
    if device.type != "cpu":
        pytest.skip("GPUs have tests of their own below")
    ep = make_ep(experts=experts, top_k=K, hidden=D, max_tokens=M, timeout_s=60.0, **case)
    dtype = ep.config.model.torch_dtype
    gate_up = randn(experts, 2 * F, D, seed=1) / D**0.5
    down = randn(experts, D, F, seed=2) / F**0.5
    return MoELayer.from_full(
        ep, randn(experts, D, seed=3), gate_up.to(dtype), down.to(dtype), batch_invariant=True
    )


@pytest.fixture(params=CASES)
def layer(make_ep, device, request) -> MoELayer:
    return built(make_ep, device, CASES[request.param], E)


@pytest.fixture(params=TRAINED)
def trained(make_ep, device, request, size) -> MoELayer:
    return built(make_ep, device, TRAINED[request.param], 4 * size)


def drawn(
    random: Random, tokens: Tensor, most: int, sizes: Sequence[int]
) -> tuple[Tensor, int, Tensor]:
    """x [T, D] of drawn tokens, how many of them are real, and their numbers. Padding is NaN."""
    # Few tokens, many, or none; some of them padding.
    T = random.choice((0, 1, random.randint(0, 40), random.randint(0, most), most, *sizes))
    real = random.choice((T, random.randint(0, T)))
    numbers = torch.tensor(
        [random.randrange(TOKENS) for _ in range(real)], dtype=torch.int64, device=tokens.device
    )
    # Real tokens come first, padding is NaN.
    x = poison_(tokens.new_empty(T, tokens.shape[1]))
    x[:real] = tokens[numbers]
    return x, real, numbers


def passed(layer: MoELayer, x: Tensor, real: int, grad: Tensor | None) -> tuple[Tensor, ...]:
    """y of a forward pass, and, for the gradient `grad` of y, the gradient of x."""
    if grad is None:
        return (layer(x, num_tokens=real),)
    x = x.clone().requires_grad_()
    y = layer(x, num_tokens=real)
    y.backward(grad)
    return y.detach(), x.grad


def differing(
    layer: MoELayer, rank: int, rounds: int, *, trains: bool = False, replayed: Sequence[int] = ()
) -> int:
    """Elements of y that have other bits than where rank 0 brings the token alone, over drawn
    batches on all ranks.

    With `trains` also of gradients of tokens. y then has the bits of serving, and gradients of
    weights are those of an equal pass. Of batches of the sizes in `replayed`, half are replays of
    graphs. All is counted on the device.
    """
    model = layer.ep.config.model
    most = layer.ep.config.capacity.max_num_tokens_per_rank
    drawn_of = [
        randn(TOKENS, model.hidden_size, seed=seed).to(model.torch_dtype)
        for seed in (9, 10)[: 1 + trains]
    ]
    tokens, *grads = (each.to(layer.ep.device) for each in drawn_of)
    wanted = torch.zeros(1 + trains, *tokens.shape, dtype=tokens.dtype)
    # What each token gives where rank 0 brings it alone.
    for i in range(TOKENS):
        mine = slice(i, i + (rank == 0))
        alone = passed(layer, tokens[mine], mine.stop - i, grads[0][mine] if trains else None)
        wanted[:, mine] = torch.stack(alone).cpu()
    dist.broadcast(wanted, 0)
    wanted = wanted.to(tokens.device)
    # Graphs for some sizes of batches.
    graphs = {}
    for T in replayed:
        static = (
            tokens.new_zeros(T, tokens.shape[1]),
            torch.zeros((), dtype=torch.int32, device=tokens.device),
        )
        graphs[T] = *static, *captured(partial(layer, *static))
    random = Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=tokens.device)
    weights = [weight for weight in layer.parameters() if weight.requires_grad and trains]
    # Drawn batches, each played once, or twice where gradients of weights are compared.
    for _ in range(rounds):
        x, real, numbers = drawn(random, tokens, most, replayed)
        grad = None
        if trains:
            grad = poison_(torch.empty_like(x))
            grad[:real] = grads[0][numbers]
        of_weights = []
        for _ in range(1 + trains):
            for weight in weights:
                weight.grad = None
            if len(x) in graphs and random.random() < 0.5:
                static_x, static_real, replay, y = graphs[len(x)]
                static_x.copy_(x)
                static_real.fill_(real)
                replay()
                layer.ep.poll()
                found = (y,)
            else:
                found = passed(layer, x, real, grad)
            of_weights.append([weight.grad for weight in weights])
        # Real tokens have the bits that they have alone, padding is zeros.
        for got, want in zip(found, wanted, strict=True):
            wrong += (bits_of(got[:real]) != bits_of(want[numbers])).sum()
            wrong += got[real:].count_nonzero()
        if trains:
            # Serving has the bits of training, and both passes the same gradients of weights.
            with torch.no_grad():
                wrong += (layer(x, num_tokens=real) != found[0]).sum()
            wrong += sum(
                not torch.equal(*map(local_view, both)) for both in zip(*of_weights, strict=True)
            )
    return int(wrong)


@pytest.mark.usefixtures("serving")
def test_y_of_a_token_depends_on_no_other_token(layer, rank):
    assert differing(layer, rank, 40) == 0


@pytest.mark.parametrize("batches", [8, slow(20)])
def test_gradients_of_a_token_depend_on_no_other_token(trained, rank, batches):
    assert differing(trained, rank, batches, trains=True) == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("serving")
def test_100_000_drawn_batches(layer, rank, size):
    assert differing(layer, rank, -(-100_000 // (len(CASES) * size))) == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_20_000_drawn_batches_with_gradients(trained, rank, size):
    assert differing(trained, rank, -(-20_000 // (len(TRAINED) * size)), trains=True) == 0


REPLAYED = (1, 3, 8, 17, 64, 200, 700, 1100, 1500)
"""Both protocols and both alignments of segments come."""


def on_gpus(make_ep, device: torch.device, payload: str, invariant: bool = True) -> MoELayer:
    E = 16
    D = 512
    F = 256
    ep = make_ep(
        experts=E,
        top_k=K,
        hidden=D,
        dtype="bfloat16",
        max_tokens=REPLAYED[-1],
        timeout_s=60.0,
        exchange={"payload": payload, "combine_payload": payload},
        capacity={"gap_rows": "undefined"},
    )
    # Weights in fp8 where rows travel in fp8, else in bf16.
    gate_up = randn(E, 2 * F, D, seed=0) / D**0.5
    down = randn(E, D, F, seed=1) / F**0.5
    if payload == "fp8":
        gate_up, gate_up_scales = quantized(gate_up)
        down, down_scales = quantized(down)
        scales = {"gate_up_scales": gate_up_scales, "down_scales": down_scales}
    else:
        gate_up = gate_up.bfloat16()
        down = down.bfloat16()
        scales = {}
    return MoELayer.from_full(
        ep, randn(E, D, seed=3), gate_up, down, **scales, batch_invariant=invariant
    )


@ON_GPUS
@pytest.mark.usefixtures("serving")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "batches", [1000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.long])]
)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_y_of_a_token_depends_on_no_other_token_on_gpus(
    make_ep, device, rank, size, payload, batches
):
    rounds = -(-batches // (len(PAYLOADS) * size))
    assert differing(on_gpus(make_ep, device, payload), rank, rounds, replayed=REPLAYED) == 0


@ON_GPUS
@pytest.mark.usefixtures("serving")
def test_other_bits_are_counted_on_gpus(make_ep, device, rank):
    assert (
        differing(on_gpus(make_ep, device, "fp8", invariant=False), rank, 100, replayed=REPLAYED)
        > 0
    )


@ON_GPUS
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "batches", [200, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_gradients_of_a_token_depend_on_no_other_token_on_gpus(
    make_ep, device, rank, size, batches
):
    """bf16: with experts of sizes in one tile and in several, and up to 1500 tokens of a rank."""
    E = 16
    D = 512
    F = 256
    ep = make_ep(experts=E, top_k=K, hidden=D, dtype="bfloat16", max_tokens=1500, timeout_s=60.0)
    gate_up = randn(E, 2 * F, D, seed=1) / D**0.5
    down = randn(E, D, F, seed=2) / F**0.5
    layer = MoELayer.from_full(
        ep, randn(E, D, seed=3), gate_up.bfloat16(), down.bfloat16(), batch_invariant=True
    )
    assert layer.experts.gemm == "hopper"
    assert differing(layer, rank, -(-batches // size), trains=True) == 0
