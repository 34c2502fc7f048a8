"""Training in graphs of autograd that are not a plain chain: every rank gets through, and nothing
is wrong silently.
"""

from __future__ import annotations

import pytest
import torch
from helpers import randn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from epmoe import EPMismatchError, EPStateError, Placement
from epmoe.training import TrainingExchange

D = 32
E = 6
K = 2
T = 7


def leaf(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return randn(*shape, seed=seed).to(device).requires_grad_()


class Layer(torch.nn.Module):
    """Experts that scale their rows, by one parameter each; the weights of the router are given."""

    def __init__(
        self,
        exchange: TrainingExchange,
        tag: int = 1,
        num_rows: int = 128,
        weights_on: str = "rows",
    ) -> None:
        super().__init__()
        self.exchange = exchange
        self.tag = tag
        self.num_rows = num_rows
        self.weights_on = weights_on
        self.scale = torch.nn.Parameter(
            torch.linspace(0.5, 1.5, exchange.ep.num_local_experts).to(exchange.ep.device)
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routed = self.exchange.dispatch(
            x, ids, weights, weights_on=self.weights_on, num_rows=self.num_rows, tag=self.tag
        )
        # Each row finds its expert; rows past the last segment are none.
        numbers = torch.arange(len(routed.rows), dtype=torch.int32, device=x.device)
        expert = torch.searchsorted(routed.expert_offsets, numbers, right=True) - 1
        real = numbers < routed.expert_offsets[-1]
        factor = torch.cat([self.scale, self.scale.new_zeros(1)])[expert.where(real, -1)]
        # The expert: its rows times its parameter.
        rows = routed.rows.where(real[:, None], 0.0) * factor[:, None]
        if routed.row_weights is not None:
            rows = rows * routed.row_weights[:, None]
        return self.exchange.combine(rows, routed)


@pytest.fixture
def exchange(make_ep) -> TrainingExchange:
    return TrainingExchange(make_ep(experts=E, top_k=K, hidden=D, max_tokens=16, timeout_s=10.0))


@pytest.fixture
def inputs(exchange, rank):
    device = exchange.ep.device
    ids = torch.stack(
        [
            torch.randperm(E, generator=torch.Generator().manual_seed(rank * 99 + t))[:K]
            for t in range(T)
        ]
    )
    return (
        leaf(T, D, seed=rank, device=device),
        ids.to(device),
        leaf(T, K, seed=50 + rank, device=device),
    )


def closed(exchange: TrainingExchange) -> bool:
    exchange.ep.check()
    return not exchange.ep.exchange.rounds.state


def gradients(loss: torch.Tensor, *leaves: torch.Tensor, **options: bool) -> list[torch.Tensor]:
    return [grad.clone() for grad in torch.autograd.grad(loss, leaves, **options)]


def test_the_experts_alone_train_and_nobody_does(exchange, inputs):
    """No round is left open for a backward pass, or by one that needs no gradients of tokens."""
    layer = Layer(exchange)
    x, ids, weights = inputs
    for tokens, factors, rounds in ((x.detach(), weights.detach(), 2), (x, weights, 1)):
        before = exchange.ep.exchange.rounds.count
        with torch.set_grad_enabled(rounds == 2):
            # The second time without grad mode: one round, none for a backward pass.
            y = layer(tokens, ids, factors)
        if rounds == 2:
            y.square().sum().backward()
        assert exchange.ep.exchange.rounds.count == before + rounds and closed(exchange)
    assert layer.scale.grad.any() and x.grad is None


def test_weights_that_nobody_uses_have_gradients_of_0(exchange, inputs):
    x, ids, weights = inputs
    routed = exchange.dispatch(x, ids, weights, weights_on="rows", num_rows=128)
    exchange.combine(routed.rows * 2, routed).sum().backward()
    assert (
        torch.equal(x.grad, torch.full_like(x, 2.0 * K))
        and not weights.grad.any()
        and closed(exchange)
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("weights_on", ["rows", "combine"])
def test_checkpoints_compute_the_same_bits(exchange, inputs, reentrant, weights_on):
    x, ids, weights = inputs
    layers = [Layer(exchange, tag, weights_on=weights_on) for tag in (1, 2)]
    leaves = x, weights, *(layer.scale for layer in layers)

    def run(call):
        h = x
        for layer in layers:
            h = h + call(layer, h, ids, weights)
        for tensor in leaves:
            tensor.grad = None
        # The rounds of the backward pass are counted.
        before = exchange.ep.exchange.rounds.count
        h.square().sum().backward()
        return [
            tensor.grad.clone() for tensor in leaves
        ], exchange.ep.exchange.rounds.count - before

    # A checkpoint plays the rounds again: twice as many, with the same bits.
    plain, rounds = run(lambda layer, *inputs: layer(*inputs))
    again, more = run(lambda layer, *inputs: checkpoint(layer, *inputs, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, again)) and (rounds, more) == (2, 4) and closed(exchange)
    if reentrant:
        return
    # A policy that keeps the rounds plays none again.
    saved = {torch.ops.epmoe.train_dispatch.default, torch.ops.epmoe.train_combine.default}

    def policy(ctx, operator, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    kept, rounds = run(
        lambda layer, *inputs: checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)
    )
    assert all(map(torch.equal, plain, kept)) and rounds == 2 and closed(exchange)


@pytest.mark.parametrize("num_rows", [128, "exact"])
def test_compiled(exchange, inputs, num_rows):
    x, ids, weights = inputs
    layer = Layer(exchange, num_rows=num_rows)
    leaves = x, weights, layer.scale
    want = gradients(layer(x, ids, weights).square().sum(), *leaves)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        got = gradients(compiled(x, ids, weights).square().sum(), *leaves)
        assert all(map(torch.equal, got, want)) and closed(exchange)


def test_a_rank_without_experts_and_one_without_tokens(make_ep, rank, size):
    # Rank 0 has all experts, and rank 1 no tokens.
    placement = Placement(num_experts=E, ep_size=size, owners=(0,) * E)
    ep = make_ep(experts=E, top_k=K, hidden=D)
    ep.resume(placement=placement)
    exchange = TrainingExchange(ep)
    tokens = 0 if rank == 1 else T
    x = leaf(tokens, D, seed=rank, device=ep.device)
    weights = leaf(tokens, K, seed=9, device=ep.device)
    ids = torch.tensor([[0, 1]], device=ep.device).expand(tokens, K).contiguous()
    # As many rows as arrive, and a number of them.
    for num_rows in ("exact", 128):
        x.grad = None
        routed = exchange.dispatch(x, ids, weights, weights_on="rows", num_rows=num_rows)
        # No gradient flows on other ranks.
        rows = routed.rows * 3 if rank == 0 else torch.zeros_like(routed.rows)
        exchange.combine(rows, routed).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3.0 * K)) and closed(exchange)


def test_a_backward_pass_after_resume_is_refused(make_ep, rank, size):
    ep = make_ep(experts=E, top_k=K, hidden=D)
    exchange = TrainingExchange(ep)
    x = leaf(T, D, seed=rank, device=ep.device)
    weights = leaf(T, K, seed=9, device=ep.device)
    loss = Layer(exchange)(x, torch.zeros(T, K, dtype=torch.int32, device=ep.device), weights).sum()
    ep.resume()
    with pytest.raises(EPStateError, match="before `resume`"):
        loss.backward()
    assert closed(exchange)


def test_misuse_is_an_error(exchange, inputs):
    x, ids, weights = inputs
    routed = exchange.dispatch(x, ids, weights, num_rows=128)
    # While the round is open,
    with pytest.raises(EPStateError, match="still open"):
        exchange.dispatch(x, ids, weights, num_rows=128)
    with pytest.raises(ValueError, match=r"`expert_rows` must be float32 \[128, 32\]"):
        exchange.combine(routed.rows[:5], routed)
    # behind it,
    y = exchange.combine(routed.rows, routed)
    with pytest.raises(EPStateError, match="needs an open round"):
        exchange.combine(routed.rows, routed)
    with pytest.raises(RuntimeError, match="does not|autograd|differentia"):
        gradients(gradients(y.sum(), x, create_graph=True)[0].sum(), x)
    # and with other numbers of rows.
    for num_rows in (-1, True, "all"):
        with pytest.raises(ValueError, match="`num_rows` must be"):
            exchange.dispatch(x, ids, weights, num_rows=num_rows)
    assert closed(exchange)


@pytest.mark.parametrize("compiles", [False, True])
def test_backward_passes_in_another_order_on_one_rank_are_a_mismatch(
    exchange, inputs, rank, compiles
):
    """All ranks hear of it, before there are gradients of two micro-batches in one round."""
    x, ids, weights = inputs
    layer = Layer(exchange)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    # Two micro-batches. Rank 0 goes back through the other one.
    losses = [call(x * scale, ids, weights).sum() for scale in (1.0, 2.0)]
    with pytest.raises(EPMismatchError, match="micro-batch"):
        losses[rank == 0].backward()
        exchange.ep.check()
    assert x.grad is None or not x.grad.any()  # hosts of GPUs run ahead: zeros
    # The next one is whole.
    if x.device.type == "cpu":
        layer(x, ids, weights).sum().backward()
        assert x.grad.any() and closed(exchange)
