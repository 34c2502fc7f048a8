"""Ranks that bring tokens and hold no expert: no row comes to them, and their windows have no room
for one.
"""

from __future__ import annotations

import gc

import pytest
import torch
from checked_round import check_round
from exchanges import given, make_config, make_tokens, node_of
from helpers import assert_close, full_layer, randn
from test_layers import mapped_windows

from epmoe import ExpertParallel, Placement
from epmoe.exchange.memory import MemoryPlan
from epmoe.training import TrainingExchange

E = 12


def placement_on(ranks: list[int]) -> dict:
    """All experts on these ranks, by turns."""
    owners = [ranks[expert % len(ranks)] for expert in range(E)]
    return {"strategy": "explicit", "assignment": owners}


@pytest.fixture(params=["first", "last"])
def holders(request, size) -> list[int]:
    """The ranks that hold experts."""
    return [0] if request.param == "first" else [size - 1]


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("ll_max_tokens", [4, 256])
@pytest.mark.parametrize("payload", ["auto", "fp8"])
def test_rows_and_sums_are_right(make_ep, size, holders, payload, ll_max_tokens, layout):
    ep = make_ep(
        ll_max_tokens,
        experts=E,
        hidden=256,
        dtype="bfloat16",
        max_tokens=24,
        placement=placement_on(holders),
        exchange={"payload": payload},
    )
    for seed in range(2):
        # A rank without experts brings the most tokens, and one with experts none.
        counts = [0 if r in holders else 24 - 3 * r for r in range(size)]
        tokens = [make_tokens(ep.config, r, T, seed=seed) for r, T in enumerate(counts)]
        for aligned in (False, True):
            check_round(ep, tokens, layout, aligned=aligned, phases=bool(seed))


def test_windows_are_as_planned(make_ep, rank, size, holders):
    gc.collect()  # tracebacks of earlier tests hold their windows
    options = {"experts": E, "hidden": 256, "max_tokens": 100, "placement": placement_on(holders)}
    want = MemoryPlan.build(make_config(size, **options), rank)
    ep = make_ep(**options)
    plan = ep.memory_plan()
    assert node_of(ep).window.local.nbytes == plan.window_bytes == plan.windows[rank]
    if ep.device.type == "cpu":
        assert plan == want
        assert sorted(mapped_windows()) == sorted(plan.windows)
    views = ep.exchange.views
    assert {name: view.nbytes for name, view in views.items()} == {
        buffer.name: buffer.nbytes for buffer in plan.buffers
    }


def test_a_layer_serves(make_ep, rank, size, holders):
    """y is that of a group whose ranks all hold experts."""
    found = []
    for placement in ({}, placement_on(holders)):
        ep = make_ep(experts=E, placement=placement)
        layer, _ = full_layer(ep, seed=3)
        with torch.inference_mode():
            found.append(layer(randn(9 + rank, 64, seed=rank).to(ep.device)))
    assert_close(*found, slack=4)


@pytest.mark.parametrize("num_rows", ["exact", 192])
def test_gradients_come_back(make_ep, rank, size, holders, num_rows):
    """Experts that double their rows."""
    ep = make_ep(experts=E, placement=placement_on(holders))
    exchange = TrainingExchange(ep)
    tokens = make_tokens(ep.config, rank, 9 + rank)
    x, ids, weights = given(ep, tokens)
    x.requires_grad_()
    routed = exchange.dispatch(x, ids, weights, num_rows=num_rows)
    y = exchange.combine(2 * routed.rows, routed)
    y.sum().backward()
    factor = 2 * weights.sum(1, keepdim=True)
    assert_close(y, x * factor, slack=4)
    assert_close(x.grad, factor.expand_as(x), slack=4)


def test_experts_come_to_a_rank_by_resume(make_ep, size, holders):
    """The windows of the next group have room for them."""
    ep: ExpertParallel = make_ep(experts=E, placement=placement_on(holders))
    short = min(ep.memory_plan().windows)
    assert short < max(ep.memory_plan().windows)
    ep.resume(ep.group, Placement.build(E, size))
    assert min(ep.memory_plan().windows) > short
    tokens = [make_tokens(ep.config, r, 8) for r in range(size)]
    check_round(ep, tokens, "rank")
    check_round(ep, tokens, "expert")
