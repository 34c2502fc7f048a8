"""A layer as one node of autograd: what its parts give one by one, and who still sees the parts."""

from __future__ import annotations

import pytest
import torch
from helpers import SeenOperators, full_layer, randn
from torch.distributed.tensor import DTensor

import epmoe
from epmoe.training import whole_layer

T = 9
D = 64


@pytest.fixture
def layer(make_ep):
    made, _ = full_layer(make_ep(experts=6, top_k=2, hidden=D))
    return made.requires_grad_()


def tokens(layer: epmoe.MoELayer) -> torch.Tensor:
    x_TD = randn(T, D, seed=100 + layer.ep.rank).to(layer.ep.device)
    x_TD[3] = torch.nan  # a sanitised row, which has no gradients
    return x_TD.requires_grad_()


def gradients(layer, *, routes_too: bool = False, **call: object):
    """y, and the gradients of x and of all parameters."""
    x_TD = tokens(layer)
    y_TD, routes = layer(x_TD, return_routing=True, **call)
    loss = (y_TD * randn(T, D, seed=5).to(y_TD.device)).nan_to_num().sum()
    if routes_too:
        loss = loss + routes.weights.square().sum() + routes.logits.nan_to_num().square().sum()
    inputs = [x_TD, *layer.parameters()]
    return y_TD.detach(), torch.autograd.grad(loss, inputs)


def local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part, which comparisons can read: a number of a DTensor is one of all ranks."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def by_parts(monkeypatch) -> None:
    monkeypatch.setattr(whole_layer, "is_one_node", lambda *_: False)


@pytest.mark.parametrize("routes_too", [False, True])
@pytest.mark.parametrize("num_tokens", [None, 4, 0])
def test_one_node_gives_what_its_parts_give(layer, monkeypatch, routes_too, num_tokens):
    y_TD, whole = gradients(layer, routes_too=routes_too, num_tokens=num_tokens)
    by_parts(monkeypatch)
    want_TD, parts = gradients(layer, routes_too=routes_too, num_tokens=num_tokens)
    torch.testing.assert_close(y_TD, want_TD, rtol=0, atol=0, equal_nan=True)
    for got, want in zip(map(local, whole), map(local, parts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    layer.ep.check()


@pytest.mark.parametrize(
    "trained", ["router_weight", "experts.w_gate_up", "experts.w_down", "nothing but x"]
)
def test_frozen_parts_have_no_gradients(layer, monkeypatch, trained):
    wanted = []
    for name, value in layer.named_parameters():
        value.requires_grad_(name == trained)
        if name == trained:
            wanted.append(value)
    x_TD = tokens(layer)

    def found():
        y_TD = layer(x_TD).nan_to_num()
        return torch.autograd.grad(y_TD.square().sum(), [x_TD, *wanted])

    # At once, and by parts.
    whole = found()
    by_parts(monkeypatch)
    for got, want in zip(map(local, whole), map(local, found()), strict=True):
        assert torch.equal(got, want)
    layer.ep.check()


def test_a_loss_of_routes_alone_needs_no_round(layer):
    x_TD = tokens(layer)
    _, routes = layer(x_TD, return_routing=True)
    before = layer.ep.health().rounds
    loss = routes.weights.square().sum()
    [grad_ED] = torch.autograd.grad(loss, [layer.router_weight])
    assert grad_ED.any() and layer.ep.health().rounds == before
    layer(x_TD).nan_to_num().sum().backward()
    layer.ep.check()


def test_hooks_of_experts_see_every_call(layer):
    seen = []
    hook = layer.experts.register_forward_hook(lambda *_: seen.append("forward"))
    layer(tokens(layer)).nan_to_num().sum().backward()
    hook.remove()
    assert seen == ["forward"]


def test_a_mode_sees_the_parts(layer):
    with SeenOperators() as seen:
        layer(tokens(layer)).nan_to_num().sum().backward()
    parts = {"epmoe::train_dispatch", "epmoe::train_experts", "epmoe::train_combine"}
    assert parts <= seen.names
    layer.ep.check()


def test_gradients_have_no_gradients(layer):
    x_TD = tokens(layer)
    loss = layer(x_TD).nan_to_num().square().sum()
    [grad_TD] = torch.autograd.grad(loss, [x_TD], create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad_TD.sum().backward()
    layer.ep.check()
