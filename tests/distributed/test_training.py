"""Training: gradients of tokens, weights and experts through dispatch and combine, against fp64."""

from __future__ import annotations

import pytest
import torch
from factors import all_pairs
from helpers import TOLERANCE, generator, poisoned_memory, randn
from torch import Tensor

from epmoe import EPMismatchError, EPOverflowError
from epmoe.training import TrainingExchange

D, F, E = 32, 16, 9
CASES = all_pairs(
    {
        "dtype": [torch.float32, torch.bfloat16],
        "weights_on": ["rows", "combine"],
        "num_rows": ["exact", 768],
        "K": [1, 3, 8],
        "T": [(5, 0, 12, 7), (40, 33, 0, 21), (40, 9, 33, 0)],
        "alignment": [None, 8],
        "ids": [torch.int32, torch.int64],
        "copies": [0, 3],
        "windows": [1, 2],
        "padding": [None, "int", "tensor"],
        "ll_max_tokens": [16, 256],  # Simple and LL protocol; both in one round
    }
)


def draw(rank: int, T: int, K: int, seed: int):
    """x, ids with duplicates and ids that are out of range, weights of which some are 0, and the gradient of y."""
    g = generator(1000 * seed + rank)
    ids = torch.randint(-1, E + 2, (T, K), generator=g)
    weights = torch.rand(T, K, generator=g) * (torch.rand(T, K, generator=g) > 0.2)
    return torch.randn(T, D, generator=g), ids, weights, torch.randn(T, D, generator=g)


def expert(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(x @ a) @ b


def experts_of(routed, a: Tensor, b: Tensor, held: list[int]) -> Tensor:
    """Every expert over its segment; NaN in all other rows."""
    out = torch.full_like(routed.rows, torch.nan)
    starts, counts = routed.expert_offsets.tolist(), routed.tokens_per_expert.tolist()
    for i, logical in enumerate(held):
        rows = slice(starts[i], starts[i] + counts[i])
        values = expert(routed.rows[rows], a[logical], b[logical])
        if routed.row_weights is not None:
            values = (values.float() * routed.row_weights[rows, None]).to(values.dtype)
        out = out.index_copy(0, torch.arange(rows.start, rows.stop, device=out.device), values)
    return out


def reference(size: int, T: list[int], K: int, a: Tensor, b: Tensor, dtype, seed: int, real):
    """fp64 y, grad x and grad weights of each rank, and the gradients of all experts."""
    a, b = (p.double().requires_grad_() for p in (a, b))
    ranks = []
    for r in range(size):
        x, ids, weights, grad = draw(r, T[r], K, seed)
        x, weights, grad = x.to(dtype).double().requires_grad_(), weights.double().requires_grad_(), grad.to(dtype)
        y = torch.zeros(T[r], D, dtype=torch.float64)
        for k in range(K):
            for t in range(min(T[r], real(T[r]))):
                if 0 <= ids[t, k] < E:
                    y[t] = y[t] + weights[t, k] * expert(x[t], a[ids[t, k]], b[ids[t, k]])
        (y * grad.double()).sum().backward() if y.requires_grad else None
        zero = torch.zeros_like
        ranks.append(
            (y.detach(), zero(x) if x.grad is None else x.grad, zero(weights) if weights.grad is None else weights.grad)
        )
    return ranks, [zero(p) if p.grad is None else p.grad for p in (a, b)]


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    if want.numel():
        limit = 4 * TOLERANCE[dtype] * max(1.0, want.abs().max().item())
        assert (got.double().cpu() - want).abs().max().item() <= limit


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v).removeprefix("torch.") for v in case.values()))
def test_gradients(make_ep, rank, size, case):
    dtype, K, T = case["dtype"], case["K"], case["T"]
    device_rows = case["num_rows"]
    options = {"experts": E, "top_k": K, "hidden": D, "max_tokens": 40, "dtype": str(dtype).removeprefix("torch.")}
    if case["alignment"]:
        options["capacity"] = {"alignment": case["alignment"]}
    if case["copies"]:
        options["placement"] = {"strategy": "round_robin", "num_redundant_experts": -(-case["copies"] // size) * size}
    eps = [make_ep(case["ll_max_tokens"], **options) for _ in range(case["windows"])]
    ep, device = eps[0], eps[0].device
    exchange = TrainingExchange(ep, backward=eps[-1] if len(eps) > 1 else None)
    held = ep.placement.logical_experts(rank)
    a, b = randn(E, D, F, seed=1) / 4, randn(E, F, D, seed=2) / 4
    a, b = a.to(dtype), b.to(dtype)

    def real(tokens: int) -> int:
        return tokens if case["padding"] is None else max(tokens - 3, 0)

    def run(seed: int):
        x, ids, weights, grad = (t.to(device) for t in draw(rank, T[rank], K, seed))
        x, grad = x.to(dtype).requires_grad_(), grad.to(dtype)
        weights.requires_grad_()
        parameters = [p.to(device, copy=True).requires_grad_() for p in (a, b)]
        n = real(T[rank])
        tokens = {None: None, "int": n, "tensor": torch.tensor(n, dtype=torch.int32, device=device)}[case["padding"]]
        with poisoned_memory():
            routed = exchange.dispatch(
                x,
                ids.to(case["ids"]),
                weights,
                weights_on=case["weights_on"],
                num_rows=device_rows,
                num_tokens=tokens,
                tag=3,
            )
            y = exchange.combine(experts_of(routed, *parameters, held), routed)
            y.backward(grad)
        return (
            y.detach(),
            x.grad,
            weights.grad,
            *(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters),
        )

    for seed in range(2):
        got, again = run(seed), run(seed)
        assert all(torch.equal(first, second) for first, second in zip(got, again, strict=True))
        ranks, wanted = reference(size, [T[r] for r in range(size)], K, a, b, dtype, seed, real)
        for mine, want in zip(got[:3], ranks[rank], strict=True):
            assert_near(mine, want, dtype)
        for mine, want in zip(got[3:], wanted, strict=True):
            total = mine.float().cpu()
            torch.distributed.all_reduce(total)  # of copies, and of experts of other ranks
            assert_near(total, want, dtype)
    for each in eps:
        each.check()
        assert not each.exchange.rounds.state


@pytest.mark.parametrize("weights_on", ["rows", "combine"])
def test_pairs_without_room_are_dropped_forward_and_backward(make_ep, rank, size, weights_on):
    """y is linear in x and in the weights, so <y, g>, <x, grad x> and <weights, grad weights> are equal."""
    options = {"experts": E, "top_k": 3, "hidden": D, "max_tokens": 40}
    ep = make_ep(16, capacity={"on_overflow": "drop"}, **options)
    exchange = TrainingExchange(ep)
    x, ids, weights, grad = (t.to(ep.device) for t in draw(rank, 40, 3, 0))
    x.requires_grad_(), weights.requires_grad_()
    dropped = []
    for num_rows in (256, 24, 0):
        x.grad = weights.grad = None
        routed = exchange.dispatch(x, ids, weights, weights_on=weights_on, num_rows=num_rows)
        factor = 2.0 if routed.row_weights is None else 2.0 * routed.row_weights[:, None]
        y = exchange.combine(routed.rows * factor, routed)
        y.backward(grad)
        product = (y * grad).sum().item()
        for tensor in (x, weights):
            assert abs((tensor * tensor.grad).sum().item() - product) <= 1e-3 * max(1.0, abs(product))
        ids_here = (ids >= 0) & (ids < E)
        counts = torch.stack([(ids_here & (weights.grad == 0)).sum(), ids_here.sum()]).cpu()
        torch.distributed.all_reduce(counts)
        dropped.append(counts[0])
        assert int(routed.expert_offsets[-1]) <= num_rows
    assert dropped[0] == 0 < dropped[1] < dropped[2] == counts[1]


@pytest.mark.parametrize("weights_on", ["rows", "combine"])
@pytest.mark.parametrize("T", [5, 40])
def test_a_weight_that_is_not_finite_makes_no_row(make_ep, rank, T, weights_on):
    """Forward and backward are those of a call without the pair, whose weight has a gradient of 0."""
    exchange = TrainingExchange(make_ep(16, experts=E, top_k=3, hidden=D, max_tokens=40))
    x, ids, weights, grad = (t.to(exchange.ep.device) for t in draw(rank, T, 3, 0))
    bad = torch.zeros_like(ids, dtype=torch.bool)
    bad[0, 0] = bad[2, 1] = bad[4, 2] = True

    def run(ids: Tensor, weights: Tensor) -> list[Tensor]:
        x_, weights_ = x.clone().requires_grad_(), weights.requires_grad_()
        routed = exchange.dispatch(x_, ids, weights_, weights_on=weights_on)
        factor = 2.0 if routed.row_weights is None else 2.0 * routed.row_weights[:, None]
        y = exchange.combine(routed.rows * factor, routed)
        y.backward(grad)
        return [y.detach(), x_.grad, weights_.grad, routed.expert_offsets]

    spoiled = weights.masked_scatter(bad, weights.new_tensor([torch.nan, torch.inf, -torch.inf]))
    got = run(ids, spoiled)
    for mine, want in zip(got, run(ids.masked_fill(bad, -1), weights.clone()), strict=True):
        assert torch.equal(mine, want)
    assert not got[2][bad].any()


def test_more_rows_than_asked_for_is_an_error(make_ep, rank):
    exchange = TrainingExchange(make_ep(experts=E, top_k=3, hidden=D, max_tokens=40))
    x, ids, weights, _ = (t.to(exchange.ep.device) for t in draw(rank, 40, 3, 0))
    with pytest.raises(EPOverflowError, match="`num_rows` in training"):
        routed = exchange.dispatch(x, ids, weights, num_rows=8)
        exchange.combine(routed.rows, routed)
        exchange.ep.check()
    exchange.ep.exchange.drop_reports()


def test_a_number_of_rows_needs_no_rows_of_the_window(make_ep, rank):
    """`capacity.max_expert_rows` bounds "exact", and no round with a number, forward or backward."""
    roomy, small = (
        TrainingExchange(make_ep(16, experts=E, top_k=3, hidden=D, max_tokens=40, capacity=capacity))
        for capacity in ({}, {"max_expert_rows": 8})
    )
    x, ids, weights, grad = (t.to(small.ep.device) for t in draw(rank, 40, 3, 0))
    x.requires_grad_(), weights.requires_grad_()
    results = []
    for exchange, num_rows in ((roomy, "exact"), (small, 768)):
        routed = exchange.dispatch(x, ids, weights, num_rows=num_rows)
        results.append(torch.autograd.grad(exchange.combine(2 * routed.rows, routed), (x, weights), grad))
    assert all(map(torch.equal, *results))
    with pytest.raises(EPOverflowError, match="capacity.max_expert_rows"):
        routed = small.dispatch(x, ids, weights)
        small.combine(routed.rows, routed)
        small.ep.check()
    small.ep.exchange.drop_reports()


def test_another_kind_of_round_is_a_mismatch(make_ep, rank):
    ep = make_ep(experts=E, top_k=3, hidden=D, max_tokens=40)
    exchange = TrainingExchange(ep)
    x, ids, weights, _ = (t.to(ep.device) for t in draw(rank, 5, 3, 0))
    with pytest.raises(EPMismatchError):
        if rank == 0:
            ep.dispatch(x, ids, weights)
        else:
            exchange.dispatch(x, ids, weights, num_rows=64)
        ep.check()
    if ep.device.type == "cpu":  # the next round is complete, and so is its backward round
        x.requires_grad_()
        routed = exchange.dispatch(x, ids, weights, num_rows=64)
        exchange.combine(routed.rows, routed).sum().backward()
        assert x.grad.any()
