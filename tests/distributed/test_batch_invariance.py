"""`experts.batch_invariant`: y of a token has the same bits in any batch, on any rank, with and without padding."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.distributed as dist
from helpers import poison_, randn
from torch import Tensor

from epmoe import MoELayer

E, K, D, F, M, TOKENS = 13, 4, 128, 96, 40, 200
CASES = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16", "exchange": {"payload": "fp8", "combine_payload": "fp8"}},
    "fp16": {"dtype": "float16", "placement": {"strategy": "round_robin"}},
}


@pytest.fixture(params=CASES)
def layer(make_ep, device, request) -> MoELayer:
    if device.type != "cpu":
        pytest.skip("tests/distributed/test_layers.py has the test for GPUs")
    ep = make_ep(experts=E, top_k=K, hidden=D, max_tokens=M, timeout_s=60.0, **CASES[request.param])
    dtype = ep.config.model.torch_dtype
    gate_up, down = randn(E, 2 * F, D, seed=1) / D**0.5, randn(E, D, F, seed=2) / F**0.5
    return MoELayer.from_full(ep, randn(E, D, seed=3), gate_up.to(dtype), down.to(dtype), batch_invariant=True)


def drawn(random: Random, tokens: Tensor) -> tuple[Tensor, int, Tensor]:
    """x [T, D] of drawn tokens, how many of them are real, and their numbers. Padding is NaN."""
    T = random.choice((0, 1, random.randint(0, M), M))
    real = random.choice((T, random.randint(0, T)))
    numbers = torch.tensor([random.randrange(TOKENS) for _ in range(real)], dtype=torch.int64)
    x = poison_(torch.empty(T, D, dtype=tokens.dtype))
    x[:real] = tokens[numbers]
    return x, real, numbers


def differing(layer: MoELayer, rank: int, rounds: int) -> int:
    """Elements of y that have other bits than where rank 0 brings the token alone, over drawn batches on all ranks."""
    tokens = randn(TOKENS, D, seed=9).to(layer.ep.config.model.torch_dtype)
    wanted = torch.zeros_like(tokens)
    for i in range(TOKENS):
        mine = range(i, i + (rank == 0))
        wanted[mine] = layer(tokens[mine])
    dist.broadcast(wanted, 0)
    random = Random(rank)
    wrong = 0
    for _ in range(rounds):
        x, real, numbers = drawn(random, tokens)
        y = layer(x, num_tokens=real)
        wrong += int((y[:real] != wanted[numbers]).sum()) + int(y[real:].count_nonzero())
    return wrong


@pytest.mark.usefixtures("serving")
def test_y_of_a_token_depends_on_no_other_token(layer, rank):
    assert differing(layer, rank, 40) == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("serving")
def test_100_000_drawn_batches(layer, rank, size):
    assert differing(layer, rank, -(-100_000 // (len(CASES) * size))) == 0
