"""Operators with names: eager calls go past the dispatcher, and whoever looks at operators sees
them.
"""

from __future__ import annotations

import torch
from helpers import SeenOperators, randn

from epmoe.training import route


def run() -> torch.Tensor:
    logits = randn(4, 8, seed=1).requires_grad_()
    route(logits, 2, renormalize=True).weights.square().sum().backward()
    return logits.grad


def test_eager_calls_pass_one_operator_a_direction():
    with torch.profiler.profile() as profile:
        run()
    names = [event.name for event in profile.events() if event.name.startswith("epmoe::")]
    assert names == ["epmoe::route", "epmoe::route_backward"]


def test_modes_see_the_names():
    want = run()
    with SeenOperators() as seen:
        got = run()
    assert "epmoe::train_route" in seen.names and torch.equal(got, want)
