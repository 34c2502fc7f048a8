"""`experts.batch_invariant`: y of a token and its gradient have the same bits in any batch, on any rank, with and
without padding."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from expert_inputs import quantized
from helpers import ON_GPUS, captured, poison_, randn
from torch import Tensor

from epmoe import GroupedExperts, MoELayer
from epmoe.local.spread import local_view

E, K, D, F, M, TOKENS = 13, 4, 128, 96, 40, 200
CASES = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16", "exchange": {"payload": "fp8", "combine_payload": "fp8"}},
    "fp16": {"dtype": "float16", "placement": {"strategy": "round_robin"}},
}

TRAINED = {"fp32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"}}

PAYLOADS = ("auto", "fp8")  # on GPUs


def built(make_ep, device, case: dict, experts: int) -> MoELayer:
    if device.type != "cpu":
        pytest.skip("GPUs have tests of their own below")
    ep = make_ep(experts=experts, top_k=K, hidden=D, max_tokens=M, timeout_s=60.0, **case)
    dtype = ep.config.model.torch_dtype
    gate_up, down = randn(experts, 2 * F, D, seed=1) / D**0.5, randn(experts, D, F, seed=2) / F**0.5
    return MoELayer.from_full(ep, randn(experts, D, seed=3), gate_up.to(dtype), down.to(dtype), batch_invariant=True)


@pytest.fixture(params=CASES)
def layer(make_ep, device, request) -> MoELayer:
    return built(make_ep, device, CASES[request.param], E)


@pytest.fixture(params=TRAINED)
def trained(make_ep, device, request, size) -> MoELayer:
    return built(make_ep, device, TRAINED[request.param], 4 * size)


def drawn(random: Random, tokens: Tensor, most: int) -> tuple[Tensor, int, Tensor]:
    """x [T, D] of drawn tokens, how many of them are real, and their numbers. Padding is NaN."""
    T = random.choice((0, 1, random.randint(0, most), most))
    real = random.choice((T, random.randint(0, T)))
    numbers = torch.tensor([random.randrange(TOKENS) for _ in range(real)], dtype=torch.int64)
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


def differing(layer: MoELayer, rank: int, rounds: int, trains: bool = False) -> int:
    """Elements of y that have other bits than where rank 0 brings the token alone, over drawn batches on all ranks.

    With `trains` also of gradients of tokens. y then has the bits of serving, and gradients of weights are those of an
    equal pass."""
    model, most = layer.ep.config.model, layer.ep.config.capacity.max_num_tokens_per_rank
    drawn_of = [randn(TOKENS, model.hidden_size, seed=seed).to(model.torch_dtype) for seed in (9, 10)[: 1 + trains]]
    tokens, *grads = (each.to(layer.ep.device) for each in drawn_of)
    wanted = torch.zeros(1 + trains, *tokens.shape, dtype=tokens.dtype)
    for i in range(TOKENS):
        mine = slice(i, i + (rank == 0))
        alone = passed(layer, tokens[mine], mine.stop - i, grads[0][mine] if trains else None)
        wanted[:, mine] = torch.stack(alone).cpu()
    dist.broadcast(wanted, 0)
    wanted = wanted.to(tokens.device)
    random, wrong = Random(rank), 0
    weights = [weight for weight in layer.parameters() if weight.requires_grad and trains]
    for _ in range(rounds):
        x, real, numbers = drawn(random, tokens, most)
        grad = None
        if trains:
            grad = poison_(torch.empty_like(x))
            grad[:real] = grads[0][numbers]
        of_weights = []
        for _ in range(1 + trains):
            for weight in weights:
                weight.grad = None
            found = passed(layer, x, real, grad)
            of_weights.append([weight.grad for weight in weights])
        for got, want in zip(found, wanted, strict=True):
            wrong += int((got[:real] != want[numbers]).sum()) + int(got[real:].count_nonzero())
        if trains:
            with torch.no_grad():
                wrong += int((layer(x, num_tokens=real) != found[0]).sum())
            wrong += sum(not torch.equal(*map(local_view, both)) for both in zip(*of_weights, strict=True))
    return wrong


@pytest.mark.usefixtures("serving")
def test_y_of_a_token_depends_on_no_other_token(layer, rank):
    assert differing(layer, rank, 40) == 0


def test_gradients_of_a_token_depend_on_no_other_token(trained, rank):
    assert differing(trained, rank, 20, trains=True) == 0


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


class OnGpus:
    """Batches on GPUs, eager and in replayed graphs, whose y is compared on the device.

    Both protocols and both alignments of segments come, as T goes up to 1500.
    """

    most = 1500
    captured = (1, 3, 8, 17, 64, 200, 700, 1100, most)

    def __init__(self, make_ep, device: torch.device, payload: str, invariant: bool) -> None:
        E, D, F = 16, 512, 256
        ep = make_ep(
            experts=E, top_k=K, hidden=D, dtype="bfloat16", max_tokens=self.most, timeout_s=60.0,
            exchange={"payload": payload, "combine_payload": payload}, capacity={"gap_rows": "undefined"},
        )  # fmt: skip
        held = ep.placement.logical_experts(ep.rank)
        shapes = {"gate_up": (2 * F, D), "down": (D, F)}
        weights = {}
        for i, (name, (n, k)) in enumerate(shapes.items()):
            drawn = (randn(E, n, k, seed=i)[held] / k**0.5).to(device)
            if payload == "fp8":
                weights[f"w_{name}"], weights[f"{name}_scales"] = quantized(drawn)
            else:
                weights[f"w_{name}"] = drawn.bfloat16()
        self.layer = MoELayer(ep, randn(E, D, seed=3).to(device), GroupedExperts(**weights, batch_invariant=invariant))
        self.tokens = randn(TOKENS, D, seed=9).bfloat16().to(device)
        self.numbers = torch.zeros(self.most, dtype=torch.int64, device=device)
        self.real = torch.zeros((), dtype=torch.int32, device=device)
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        self.wanted = torch.zeros_like(self.tokens)
        for i in range(TOKENS):
            mine = slice(i, i + (ep.rank == 0))
            self.wanted[mine] = self.layer(self.tokens[mine])
        alone = self.wanted.cpu()
        dist.broadcast(alone, 0)
        self.wanted.copy_(alone)
        self.replays = {T: captured(partial(self.play, T, self.real))[0] for T in self.captured}

    def play(self, T: int, real: int | Tensor) -> None:
        """A round of the drawn tokens, whose padding is NaN."""
        numbers = self.numbers[:T]
        padding = (torch.arange(T, device=numbers.device) >= real)[:, None]
        x = self.tokens[numbers].masked_fill(padding, torch.nan)
        y = self.layer(x, real)
        wanted = self.wanted[numbers].masked_fill(padding, 0)
        self.differing += (y.view(torch.int16) != wanted.view(torch.int16)).sum()

    def count(self, rounds: int) -> int:
        """Elements of y that differ in so many rounds, for each of which every rank draws a batch of its own."""
        random, generator = Random(self.layer.ep.rank), torch.Generator(self.numbers.device)
        generator.manual_seed(self.layer.ep.rank)
        for _ in range(rounds):
            replays = random.random() < 0.5
            some = (0, 1, random.randint(0, 40), random.randint(0, self.most))
            T = random.choice(self.captured if replays else some)
            real = random.choice((T, random.randint(0, T)))
            self.numbers.random_(TOKENS, generator=generator)
            if replays:
                self.real.fill_(real)
                self.replays[T]()
                self.layer.ep.poll()
            else:
                self.play(T, real)
        return int(self.differing)


@ON_GPUS
@pytest.mark.usefixtures("serving")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batches", [1000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_y_of_a_token_depends_on_no_other_token_on_gpus(make_ep, device, size, payload, batches):
    if payload == "fp8":
        pytest.importorskip("deep_gemm")
    assert OnGpus(make_ep, device, payload, invariant=True).count(-(-batches // (len(PAYLOADS) * size))) == 0


@ON_GPUS
@pytest.mark.usefixtures("serving")
def test_other_bits_are_counted_on_gpus(make_ep, device):
    pytest.importorskip("deep_gemm")
    assert OnGpus(make_ep, device, "fp8", invariant=False).count(100) > 0


@ON_GPUS
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batches", [200, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.long])])
def test_gradients_of_a_token_depend_on_no_other_token_on_gpus(make_ep, device, rank, size, batches):
    """bf16: with experts of sizes in one tile and in several, and up to 1500 tokens of a rank."""
    E, D, F = 16, 512, 256
    ep = make_ep(experts=E, top_k=K, hidden=D, dtype="bfloat16", max_tokens=1500, timeout_s=60.0)
    gate_up, down = randn(E, 2 * F, D, seed=1) / D**0.5, randn(E, D, F, seed=2) / F**0.5
    layer = MoELayer.from_full(ep, randn(E, D, seed=3), gate_up.bfloat16(), down.bfloat16(), batch_invariant=True)
    assert layer.experts.gemm == "hopper"
    assert differing(layer, rank, -(-batches // size), trains=True) == 0
