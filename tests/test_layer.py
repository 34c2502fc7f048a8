"""MoELayer in one process, which is a group of one; over several ranks: tests/distributed/test_layers.py."""

from __future__ import annotations

import pytest
import torch
from helpers import FLOATS, assert_close, poison_, randn

import epmoe
from epmoe.local.reference import moe_reference, route_reference

E, F, D, K, M = 12, 32, 128, 3, 40


@pytest.fixture
def ep(device):
    config = epmoe.EPConfig(
        model={"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "dtype": "float32"},
        routing={"scoring": "sigmoid", "renormalize": True, "num_expert_groups": 4, "top_groups": 2},
        topology={"ep_size": 1},
        capacity={"max_num_tokens_per_rank": M},
    )
    with epmoe.ExpertParallel(config, device=device) as ep:
        yield ep


def layer_and_weights(ep, dtype=torch.float32, bias=None):
    w_gate_up, w_down = (randn(E, 2 * F, D, seed=1) / D**0.5).to(dtype), (randn(E, D, F, seed=2) / F**0.5).to(dtype)
    experts = epmoe.GroupedExperts(w_gate_up.to(ep.device), w_down.to(ep.device))
    return epmoe.MoELayer(ep, randn(E, D).to(ep.device), experts, bias=bias), (w_gate_up, w_down)


def want(ep, x, layer, weights):
    routing = ep.config.routing
    ids, w = route_reference(
        x.float().cpu() @ layer.router_weight.cpu().T,
        K,
        bias=None if layer.bias is None else layer.bias.cpu(),
        **routing.model_dump(exclude={"nan_rows"}),
    )
    return moe_reference(x.cpu(), ids, w, weights)


@pytest.mark.parametrize("dtype", FLOATS)
def test_equals_the_dense_layer(ep, dtype):
    """Also in a dtype smaller than the config's."""
    layer, weights = layer_and_weights(ep, dtype, bias=(randn(E, seed=5) * 3).to(ep.device))
    for T in (M, 1, 0):
        x = randn(T, D, dtype=dtype, seed=T).to(ep.device)
        assert_close(layer(x), want(ep, x, layer, weights), slack=4)


def test_padding_yields_zeros_whatever_it_holds(ep):
    layer, weights = layer_and_weights(ep)
    x = randn(M, D).to(ep.device)
    poison_(x[7:])
    for num_tokens in (7, torch.tensor(7, dtype=torch.int32, device=ep.device)):
        y = layer(x, num_tokens=num_tokens)
        assert_close(y[:7], want(ep, x[:7], layer, weights))
        assert y[7:].eq(0).all()


def test_is_a_module(ep):
    layer, _ = layer_and_weights(ep, bias=torch.zeros(E, device=ep.device))
    assert set(layer.state_dict()) == {"router_weight", "bias", "experts.w_gate_up", "experts.w_down"}
    x = randn(4, D).to(ep.device)
    assert torch.equal(torch.nn.Sequential(layer, layer)(x), layer(layer(x)))


def test_bad_router_weight(ep):
    with pytest.raises(ValueError, match=r"`router_weight` must be \[12, 128\], got \[128, 12\]"):
        epmoe.MoELayer(ep, torch.zeros(D, E), lambda rows, ends, scales: rows)
