"""Training: rows without room, weights that are not finite, numbers of rows, and other ranks' kinds
of rounds.

tests/distributed/test_training_fuzz.py has the gradients of rounds.
"""

from __future__ import annotations

import pytest
import torch
from helpers import ON_GPUS, generator
from torch import Tensor

from epmoe import EPMismatchError, EPOverflowError
from epmoe.training import TrainingExchange

D = 32
E = 9


@pytest.fixture
def exchange(make_ep) -> TrainingExchange:
    return TrainingExchange(make_ep(16, experts=E, top_k=3, hidden=D, max_tokens=40))


def draw(rank: int, T: int, device: torch.device) -> list[Tensor]:
    """x, ids with duplicates and ids that are out of range, weights of which some are 0, and the
    gradient of y.
    """
    g = generator(rank)
    ids = torch.randint(-1, E + 2, (T, 3), generator=g)
    weights = torch.rand(T, 3, generator=g) * (torch.rand(T, 3, generator=g) > 0.2)
    return [
        t.to(device)
        for t in (torch.randn(T, D, generator=g), ids, weights, torch.randn(T, D, generator=g))
    ]


def doubled(
    exchange: TrainingExchange, x: Tensor, ids: Tensor, weights: Tensor, **options: object
) -> tuple:
    """y of experts that double their rows, and the round."""
    routed = exchange.dispatch(x, ids, weights, **options)
    factor = 2.0 if routed.row_weights is None else 2.0 * routed.row_weights[:, None]
    return exchange.combine(routed.rows * factor, routed), routed


@pytest.mark.parametrize("weights_on", ["rows", "combine"])
def test_pairs_without_room_are_dropped_forward_and_backward(make_ep, rank, size, weights_on):
    """y is linear in x and in the weights, so <y, g>, <x, grad x> and <weights, grad weights> are
    equal.
    """
    ep = make_ep(16, experts=E, top_k=3, hidden=D, max_tokens=40, capacity={"on_overflow": "drop"})
    exchange = TrainingExchange(ep)
    x, ids, weights, grad = draw(rank, 40, ep.device)
    x.requires_grad_(), weights.requires_grad_()
    dropped = []
    # Room for all rows, for some and for none.
    for num_rows in (256, 24, 0):
        x.grad = weights.grad = None
        y, routed = doubled(exchange, x, ids, weights, weights_on=weights_on, num_rows=num_rows)
        y.backward(grad)
        product = (y * grad).sum().item()
        for tensor in (x, weights):
            assert abs((tensor * tensor.grad).sum().item() - product) <= 1e-3 * max(
                1.0, abs(product)
            )
        # Pairs whose weight has no gradient are those without room.
        ids_here = (ids >= 0) & (ids < E)
        counts = torch.stack([(ids_here & (weights.grad == 0)).sum(), ids_here.sum()]).cpu()
        torch.distributed.all_reduce(counts)
        dropped.append(counts[0])
        assert int(routed.expert_offsets[-1]) <= num_rows
    assert dropped[0] == 0 < dropped[1] < dropped[2] == counts[1]


@ON_GPUS
@pytest.mark.parametrize("weights_on", ["rows", "combine"])
def test_many_tokens_have_the_gradients_of_few(make_ep, rank, weights_on):
    """Among up to two ranks on GPUs, combine of 1600 tokens sums a rank's own rows where it writes
    y.
    """
    exchange = TrainingExchange(make_ep(16, experts=E, top_k=3, hidden=D, max_tokens=1600))
    x, ids, weights, grad = draw(rank, 1600, exchange.ep.device)

    def round_of(step: int) -> list[Tensor]:
        """y and the gradients of x and of the weights, by calls of `step` tokens."""
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        sums = []
        for begin in range(0, len(x), step):
            part = slice(begin, begin + step)
            y, _ = doubled(
                exchange, inputs[0][part], ids[part], inputs[1][part], weights_on=weights_on
            )
            y.backward(grad[part])
            sums.append(y.detach())
        return [torch.cat(sums), *(each.grad for each in inputs)]

    for got, want in zip(round_of(1600), round_of(100), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("weights_on", ["rows", "combine"])
@pytest.mark.parametrize("T", [5, 40])
def test_a_weight_that_is_not_finite_makes_no_row(exchange, rank, T, weights_on):
    """Forward and backward are those of a call without the pair, whose weight has a
    gradient of 0.
    """
    x, ids, weights, grad = draw(rank, T, exchange.ep.device)
    bad = torch.zeros_like(ids, dtype=torch.bool)
    bad[0, 0] = bad[2, 1] = bad[4, 2] = True

    def run(ids: Tensor, weights: Tensor) -> list[Tensor]:
        x_ = x.clone().requires_grad_()
        weights_ = weights.requires_grad_()
        y, routed = doubled(exchange, x_, ids, weights_, weights_on=weights_on)
        y.backward(grad)
        return [y.detach(), x_.grad, weights_.grad, routed.expert_offsets]

    # Weights of NaN and Inf, beside the same call without these pairs.
    spoiled = weights.masked_scatter(bad, weights.new_tensor([torch.nan, torch.inf, -torch.inf]))
    got = run(ids, spoiled)
    for mine, want in zip(got, run(ids.masked_fill(bad, -1), weights.clone()), strict=True):
        assert torch.equal(mine, want)
    assert not got[2][bad].any()


def test_a_number_of_rows_needs_no_rows_of_the_window(make_ep, exchange, rank):
    """`capacity.max_expert_rows` bounds "exact", and no round with a number, forward
    or backward.
    """
    small = make_ep(
        16, experts=E, top_k=3, hidden=D, max_tokens=40, capacity={"max_expert_rows": 8}
    )
    small = TrainingExchange(small)
    x, ids, weights, grad = draw(rank, 40, small.ep.device)
    x.requires_grad_(), weights.requires_grad_()
    # With a number of rows the small exchange gives the gradients of the large one.
    results = [
        torch.autograd.grad(
            doubled(each, x, ids, weights, num_rows=num_rows)[0], (x, weights), grad
        )
        for each, num_rows in ((exchange, "exact"), (small, 768))
    ]
    assert all(map(torch.equal, *results))
    # Each bound is named in the error of those whom it binds.
    for each, num_rows, key in (
        (small, "exact", "capacity.max_expert_rows"),
        (exchange, 8, "`num_rows` in training"),
    ):
        with pytest.raises(EPOverflowError, match=key):
            doubled(each, x, ids, weights, num_rows=num_rows)
            each.ep.check()
        each.ep.exchange.drop_reports()


def test_another_kind_of_round_is_a_mismatch(exchange, rank):
    ep = exchange.ep
    x, ids, weights, _ = draw(rank, 5, ep.device)
    with pytest.raises(EPMismatchError):
        if rank == 0:
            ep.dispatch(x, ids, weights)
        else:
            exchange.dispatch(x, ids, weights, num_rows=64)
        ep.check()
    if ep.device.type == "cpu":  # the next round is complete, and so is its backward round
        doubled(exchange, x.requires_grad_(), ids, weights, num_rows=64)[0].sum().backward()
        assert x.grad.any()
