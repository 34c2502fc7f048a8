"""Ranks whose GPUs PCIe connects, forced here: no line of the LL protocol travels."""

from __future__ import annotations

import pytest
from exchanges import assert_round, first_round
from helpers import ON_GPUS

from epmoe.exchange import gpu


@ON_GPUS
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_calls_of_any_size(make_ep, monkeypatch, rank, layout, payload):
    monkeypatch.setattr(gpu, "agree_on_lines", lambda *_: False)
    exchange = {"payload": payload, "combine_payload": payload}
    ep = make_ep(max_tokens=1100, hidden=256, dtype="bfloat16", exchange=exchange)
    assert ep.exchange.plan.sizes["ll_max_tokens"] == 0
    for T in (1, 40, 1100, 7 * rank, 0):
        tokens = first_round(ep, T, layout)
        assert_round(ep, tokens, layout)
    ep.check()
