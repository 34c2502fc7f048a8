"""apply_router_weight_on_input: rows arrive weighted and rounded once, and combine only adds."""

from __future__ import annotations

import pytest
from checked_round import check_round
from exchanges import given, make_tokens, run_round
from factors import all_pairs
from helpers import assert_close, randn
from test_layers import D, E, K, make_layer

from epmoe.local.reference import moe_reference, route_reference

pytestmark = pytest.mark.usefixtures("serving")

PLACEMENT = {"strategy": "round_robin", "num_redundant_experts": 3}
CASES = all_pairs(
    {
        "phases": [False, True],
        "payload": ["float32", "bfloat16", "float16", "fp8"],
        # T, ll_max_tokens, num_sms. With 2 multiprocessors and up to 2 ranks, 40 tokens take the coarse LL kernel. It
        # does not send a rank's own rows.
        "shape": [(5, 256, None), (40, 32, None), (40, 256, None), (40, 256, 2)],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_rows_are_weighted_and_y_is_their_sum(make_ep, rank, size, case):
    fp8, (T, ll_max_tokens, num_sms) = case["payload"] == "fp8", case["shape"]
    dtype, payload = ("bfloat16", "fp8") if fp8 else (case["payload"], "auto")
    options = {"top_k": 6, "hidden": 256, "dtype": dtype, "max_tokens": 40, "placement": PLACEMENT}
    exchange = {"payload": payload, "num_sms": num_sms}
    ep = make_ep(ll_max_tokens, capacity={"alignment": 8}, exchange=exchange, **options)
    for n in range(3):
        tokens = [make_tokens(ep.config, r, T, seed=n, kind="adversarial", padded=r % 3) for r in range(size)]
        real = tokens[rank].real
        check_round(ep, tokens, "expert", num_tokens=real, phases=case["phases"], weighted=True)
        run_round(ep, tokens[rank], num_tokens=real)  # on the same windows, with weights in combine


def test_rank_layout_and_non_bool_are_errors(make_ep, rank, size):
    ep = make_ep()
    tokens = make_tokens(ep.config, rank, 3)
    inputs = given(ep, tokens)
    for dispatch in (ep.dispatch, ep.dispatch_send):
        with pytest.raises(ValueError, match=r"`apply_router_weight_on_input` .* must be False with layout='rank'"):
            dispatch(*inputs, layout="rank", apply_router_weight_on_input=True)
        with pytest.raises(TypeError, match=r"`apply_router_weight_on_input` must be a bool, got str"):
            dispatch(*inputs, apply_router_weight_on_input="yes")


def test_layer(make_ep, rank, size):
    layer, weights = make_layer(make_ep(experts=E, top_k=K, hidden=D), apply_router_weight_on_input=True)
    x = randn(16, D, seed=rank)
    routing = route_reference(x @ layer.router_weight.cpu().T, K)
    want = moe_reference(x, *routing, weights, apply_router_weight_on_input=True)
    assert_close(layer(x.to(layer.ep.device)), want, slack=4)
