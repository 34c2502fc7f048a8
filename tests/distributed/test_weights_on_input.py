"""apply_router_weight_on_input: rows arrive weighted and rounded once, and combine only adds."""

from __future__ import annotations

import pytest
import torch
from exchanges import (
    dequantised,
    expected_rows,
    expected_slabs,
    gains,
    make_tokens,
    poison,
    quantised,
    run_experts,
    run_round,
)
from helpers import assert_close, randn

from epmoe import GroupedExperts, MoELayer
from epmoe.local.reference import moe_reference, route_reference

PLACEMENT = {"strategy": "round_robin", "num_redundant_experts": 3}


@pytest.mark.parametrize("phases", [False, True])
@pytest.mark.parametrize("payload", ["float32", "bfloat16", "float16", "fp8"])
# With 2 multiprocessors and up to 2 ranks, 40 tokens take the coarse LL kernel. It does not send a rank's own rows.
@pytest.mark.parametrize(
    ("tokens_of_all", "ll_max_tokens", "num_sms"), [(5, 256, None), (40, 32, None), (40, 256, None), (40, 256, 2)]
)
def test_rows_are_weighted_and_y_is_their_sum(
    make_ep, rank, size, tokens_of_all, ll_max_tokens, num_sms, payload, phases
):
    fp8 = payload == "fp8"
    ep = make_ep(
        ll_max_tokens,
        top_k=6,
        hidden=256,
        dtype="bfloat16" if fp8 else payload,
        max_tokens=40,
        placement=PLACEMENT,
        capacity={"alignment": 8},
        exchange={"payload": "fp8" if fp8 else "auto", "num_sms": num_sms},
    )
    gain = gains(ep.config, 256).double()
    for n in range(3):
        tokens = [
            make_tokens(ep.config, r, tokens_of_all, seed=n, kind="adversarial", padded=r % 3) for r in range(size)
        ]
        mine = tokens[rank]
        x, ids, weights = (t.to(ep.device) for t in (mine.x, mine.ids, mine.weights))
        options = {"num_tokens": mine.real, "apply_router_weight_on_input": True}
        poison(ep)
        if phases:
            d = ep.dispatch_recv(ep.dispatch_send(x, ids, weights, **options))
        else:
            d = ep.dispatch(x, ids, weights, **options)

        slabs = expected_slabs(ep.config, ep.placement, tokens, rank)
        want = expected_rows(ep.config, ep.placement, slabs, rank)
        weight_of_row = torch.ones(len(want.rows), 1)  # gap rows stay zeros
        paired = want.row_of_pair >= 0
        weight_of_row[want.row_of_pair[paired].long(), 0] = slabs.weights[paired]
        used = len(want.rows)
        if fp8:
            rows, scales = quantised(want.rows)
            assert torch.equal(d.rows[:used].cpu().float(), rows.float())
            torch.testing.assert_close(d.scales[:used].cpu(), scales * weight_of_row, rtol=1e-6, atol=0)
        else:
            assert torch.equal(d.rows[:used].cpu(), (want.rows.float() * weight_of_row).to(want.rows.dtype))

        rows = run_experts(ep, d)
        if phases:
            ep.combine_send(rows, d)
            y = ep.combine_recv(d)
        else:
            y = ep.combine(rows, d)
        live_ids, live_weights = mine.live(ep.config.model.num_experts)
        real = mine.x[: mine.real]
        real = dequantised(*quantised(real), torch.float32) if fp8 else real
        want_y = moe_reference(
            real, live_ids, live_weights, lambda rows, e: rows * gain[e], apply_router_weight_on_input=True
        )
        assert_close(y[: mine.real], want_y)
        assert y[mine.real :].eq(0).all()
        run_round(ep, mine, num_tokens=mine.real)  # on the same windows, with weights in combine


def test_rank_layout_and_non_bool_are_errors(make_ep, rank, size):
    ep = make_ep()
    tokens = make_tokens(ep.config, rank, 3)
    inputs = [t.to(ep.device) for t in (tokens.x, tokens.ids, tokens.weights)]
    for dispatch in (ep.dispatch, ep.dispatch_send):
        with pytest.raises(ValueError, match=r"`apply_router_weight_on_input` .* must be False with layout='rank'"):
            dispatch(*inputs, layout="rank", apply_router_weight_on_input=True)
        with pytest.raises(TypeError, match=r"`apply_router_weight_on_input` must be a bool, got str"):
            dispatch(*inputs, apply_router_weight_on_input="yes")


def test_layer(make_ep, rank, size):
    E, F, D, K = 13, 24, 64, 4
    ep = make_ep(experts=E, top_k=K, hidden=D)
    w_gate_up, w_down = randn(E, 2 * F, D, seed=1) / D**0.5, randn(E, D, F, seed=2) / F**0.5
    local = ep.placement.local_experts(rank)
    experts = GroupedExperts(w_gate_up[local].to(ep.device), w_down[local].to(ep.device))
    layer = MoELayer(ep, randn(E, D).to(ep.device), experts, apply_router_weight_on_input=True)
    x = randn(16, D, seed=rank)
    ids, weights = route_reference(x @ layer.router_weight.cpu().T, K)
    want = moe_reference(x, ids, weights, (w_gate_up, w_down), apply_router_weight_on_input=True)
    assert_close(layer(x.to(ep.device)), want, slack=4)
