"""What the host starts for a call of a layer: numbers of operators, which no machine changes."""

from __future__ import annotations

import pytest
import torch
from helpers import alone, full_layer

import epmoe
from epmoe.bench.host import started

T = 64
D = 64

# A step has at most so many. Each more costs a host some microseconds in every layer.
MOST_OF_A_STEP = {"exact": 61, 256: 52}
MOST_OF_A_SERVING_CALL = 19


@pytest.fixture
def layer():
    config = alone(16, 4, D, "bfloat16", T, routing={"renormalize": True})
    with epmoe.ExpertParallel(config, device=torch.device("cpu")) as ep:
        yield full_layer(ep)[0].requires_grad_()


@pytest.mark.parametrize("num_rows", MOST_OF_A_STEP)
def test_operators_of_a_training_step(layer, num_rows):
    layer.num_rows = num_rows
    x_TD = torch.randn(T, D).to(torch.bfloat16).requires_grad_()
    grad_TD = torch.randn_like(x_TD)
    inputs = (x_TD, *layer.parameters())

    def step():
        return torch.autograd.grad(layer(x_TD), inputs, grad_TD)

    step()
    assert started(step).operators <= MOST_OF_A_STEP[num_rows]


def test_operators_of_a_serving_call(layer):
    x_TD = torch.randn(T, D).to(torch.bfloat16)

    def call():
        with torch.inference_mode():
            return layer(x_TD)

    call()
    assert started(call).operators <= MOST_OF_A_SERVING_CALL


def test_no_wrapper_of_an_operator_runs_in_a_step(layer, monkeypatch):
    """Compilers alone need `torch.library`, whose wrappers take longer than what they call."""
    x_TD = torch.randn(T, D).to(torch.bfloat16).requires_grad_()

    def refuse(*_arguments, **_options):
        raise AssertionError("an eager step went through torch.library")

    monkeypatch.setattr("torch._library.utils.fill_defaults", refuse)
    monkeypatch.setattr("torch._library.utils.is_out", refuse)
    layer(x_TD).sum().backward()
    assert x_TD.grad is not None


def test_outermost_operators_are_counted():
    x = torch.randn(4, 4)
    assert started(lambda: torch.nn.functional.linear(x, x)).operators == 1
    assert started(lambda: x.sum() + 1).operators == 2
