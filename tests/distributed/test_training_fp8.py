"""Training whose tokens travel forward as fp8: the bits of a round without fp8, given the values
that have arrived.
"""

from __future__ import annotations

import pytest
import torch
from factors import all_pairs
from helpers import generator, poisoned_memory

import epmoe
from epmoe import EPMismatchError, EPOverflowError, RoundShape
from epmoe.training import TrainingExchange

E = 9
K = 3
MOST = 40
CASES = all_pairs(
    {
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "D": [128, 384, 2560],
        "weights_on": ["rows", "combine"],
        "num_rows": ["exact", 768],
        "T": [(5, 0, 12, 7), (40, 33, 0, 21)],
        "alignment": [None, 8],
        "windows": [1, 2],
        "padding": [None, "int", "tensor"],
        "ll_max_tokens": [16, 256],  # Simple and LL protocol; both in one round
    }
)


def draw(rank: int, T: int, D: int, dtype: torch.dtype, device: torch.device):
    """x with blocks of very different size, zeros and a NaN; ids, weights and the gradient of y."""
    g = generator(rank)
    x = torch.randn(T, D, generator=g) * torch.logspace(-6, 2, D)
    x[::3, :128] = 0.0
    x[1:2, 5] = torch.nan
    ids = torch.randint(-1, E + 2, (T, K), generator=g)
    weights = torch.rand(T, K, generator=g)
    return [
        t.to(device) for t in (x.to(dtype), ids, weights, torch.randn(T, D, generator=g).to(dtype))
    ]


def as_it_arrives(x: torch.Tensor) -> torch.Tensor:
    q, scales = epmoe.quantize_fp8(x, granularity="block")
    return (q.float() * scales.repeat_interleave(128, 1)).to(x.dtype)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(str(v).removeprefix("torch.") for v in case.values())
)
def test_only_the_tokens_are_rounded(make_ep, rank, case):
    D = case["D"]
    dtype = case["dtype"]
    T = case["T"][rank]
    options = {
        "experts": E,
        "top_k": K,
        "hidden": D,
        "max_tokens": MOST,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if case["alignment"]:
        options["capacity"] = {"alignment": case["alignment"]}
    # One exchange, or another one for backward passes.
    eps = [make_ep(case["ll_max_tokens"], **options) for _ in range(case["windows"])]
    device = eps[0].device
    backward = eps[-1] if len(eps) > 1 else None

    # Tokens, the last three of which may be padding.
    x, ids, weights, grad = draw(rank, T, D, dtype, device)
    n = T if case["padding"] is None else max(T - 3, 0)
    tokens = {None: None, "int": n, "tensor": torch.tensor(n, dtype=torch.int32, device=device)}[
        case["padding"]
    ]

    def run(exchange: TrainingExchange, given: torch.Tensor):
        given = given.clone().requires_grad_()
        w = weights.clone().requires_grad_()
        # Forward and backward, into poisoned memory.
        with poisoned_memory():
            routed = exchange.dispatch(
                given,
                ids,
                w,
                weights_on=case["weights_on"],
                num_rows=case["num_rows"],
                num_tokens=tokens,
            )
            rows = routed.rows
            counts = routed.expert_offsets
            factor = 1.5 if routed.row_weights is None else 1.5 * routed.row_weights[:, None]
            y = exchange.combine((rows * factor).to(dtype), routed)
            y.backward(grad)
        used = slice(int(counts[-1]))
        return rows[used].detach(), counts, y.detach(), given.grad, w.grad

    # Tokens as they arrive from fp8, sent in their own dtype, give the same bits.
    want = run(TrainingExchange(eps[0], backward=backward), as_it_arrives(x))
    exchange = TrainingExchange(eps[0], backward=backward, payload="fp8")
    for _ in range(2):
        for got, right in zip(run(exchange, x), want, strict=True):
            assert got.dtype == right.dtype and torch.equal(got.isnan(), right.isnan())
            assert torch.equal(got.nan_to_num(), right.nan_to_num())
    for each in eps:
        each.check()


def test_another_payload_is_a_mismatch(make_ep, rank):
    """Also where a row of the one has as many bytes as a row of the other."""
    ep = make_ep(experts=E, top_k=K, hidden=7168, max_tokens=8, dtype="bfloat16")
    x, ids, weights, _ = draw(rank, 5, 7168, torch.bfloat16, ep.device)
    payload, D = ("fp8", 7168) if rank == 0 else ("auto", 3696)
    with pytest.raises(EPMismatchError):
        TrainingExchange(ep, payload=payload).dispatch(
            x[:, :D].contiguous(), ids, weights, num_rows=64
        )
        ep.check()


def test_rows_without_room_and_rounds_given_up(make_ep, rank, size):
    ep = make_ep(experts=E, top_k=K, hidden=256, max_tokens=MOST)
    exchange = TrainingExchange(ep, payload="fp8")
    x, ids, weights, grad = draw(rank, MOST, 256, torch.float32, ep.device)
    # More rows than were said.
    with pytest.raises(EPOverflowError, match="`num_rows` in training"):
        routed = exchange.dispatch(x, ids, weights, num_rows=8)
        exchange.combine(routed.rows, routed)
        ep.check()
    ep.exchange.drop_reports()
    # One rank skips a round, and the others give it up.
    if rank == size - 1:
        exchange.skip(RoundShape.of(ep.config, torch.float32))
    else:
        exchange.dispatch(x, ids, weights, num_rows=768)
        ep.abort()
    ep.exchange.drop_reports()
    # The next round is whole.
    x.requires_grad_()
    routed = exchange.dispatch(x, ids, weights)
    exchange.combine(routed.rows, routed).backward(grad)
    ep.check()
    assert x.grad.isfinite().all()


def test_wrong_arguments(make_ep, rank):
    ep = make_ep(experts=E, top_k=K, hidden=192, max_tokens=MOST)
    with pytest.raises(ValueError, match="`payload` must be 'auto' or 'fp8', got 'fp4'"):
        TrainingExchange(ep, payload="fp4")
    x, ids, weights, _ = draw(rank, 5, 192, torch.float32, ep.device)
    with pytest.raises(ValueError, match="multiple of 128"):
        TrainingExchange(ep, payload="fp8").dispatch(x, ids, weights)
    fp8 = make_ep(experts=E, top_k=K, hidden=256, max_tokens=MOST, exchange={"payload": "fp8"})
    with pytest.raises(ValueError, match="payload='fp8'"):
        TrainingExchange(fp8)
