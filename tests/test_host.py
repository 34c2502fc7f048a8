"""What the host does for a call: numbers of operators and functions, which no machine changes."""

from __future__ import annotations

import pytest
import torch
from counted import functions_of
from helpers import alone, full_layer

import epmoe
from epmoe.bench.host import started
from epmoe.training import TrainingExchange

T = 64
D = 64

# A call has at most so many operators, and calls of functions of this package. Each more costs a
# host some microseconds in every layer.
MOST_OF_A_STEP = {"exact": 53, 256: 43}
MOST_OF_A_SERVING_CALL = 19
MOST_OF_A_ROUND = 3
MOST_OF_A_ROUND_WITH_GRADIENTS = 23
MOST_OF_EXPERTS = 12
MOST_OF_EXPERTS_WITH_GRADIENTS = 25
MOST_FUNCTIONS_OF_A_STEP = 196
MOST_FUNCTIONS_OF_A_SERVING_CALL = 76


@pytest.fixture
def layer():
    config = alone(16, 4, D, "bfloat16", T, routing={"renormalize": True})
    with epmoe.ExpertParallel(config, device=torch.device("cpu")) as ep:
        yield full_layer(ep)[0].requires_grad_()


@pytest.fixture
def x_TD():
    return torch.randn(T, D).to(torch.bfloat16)


def serving(layer, x_TD):
    def call():
        with torch.inference_mode():
            return layer(x_TD)

    call()
    return call


def training(layer, x_TD):
    x_TD = x_TD.clone().requires_grad_()
    grad_TD = torch.randn_like(x_TD)
    inputs = (x_TD, *layer.parameters())

    def step():
        return torch.autograd.grad(layer(x_TD), inputs, grad_TD)

    step()
    return step


@pytest.mark.parametrize("num_rows", MOST_OF_A_STEP)
def test_operators_of_a_training_step(layer, x_TD, num_rows):
    layer.num_rows = num_rows
    assert started(training(layer, x_TD)).operators <= MOST_OF_A_STEP[num_rows]


def test_operators_of_a_serving_call(layer, x_TD):
    assert started(serving(layer, x_TD)).operators <= MOST_OF_A_SERVING_CALL


def test_functions_of_a_training_step(layer, x_TD):
    layer.num_rows = 256
    assert functions_of(training(layer, x_TD)) <= MOST_FUNCTIONS_OF_A_STEP


def test_functions_of_a_serving_call(layer, x_TD):
    assert functions_of(serving(layer, x_TD)) <= MOST_FUNCTIONS_OF_A_SERVING_CALL


def test_operators_of_a_round(layer, x_TD):
    ep = layer.ep
    ids_TK, weights_TK = ep.route(torch.randn(T, 16))

    def a_round():
        d = ep.dispatch(x_TD, ids_TK, weights_TK)
        return ep.combine(d.rows, d)

    a_round()
    assert started(a_round).operators <= MOST_OF_A_ROUND


def test_operators_of_a_round_with_gradients(layer, x_TD):
    ids_TK, weights_TK = layer.ep.route(torch.randn(T, 16))
    exchange = TrainingExchange(layer.ep)
    x_TD.requires_grad_()

    def a_round():
        routed = exchange.dispatch(x_TD, ids_TK, weights_TK, weights_on="both", num_rows=256)
        y_TD = exchange.combine(routed.rows, routed)
        return torch.autograd.grad(y_TD, [x_TD], x_TD.detach())

    a_round()
    assert started(a_round).operators <= MOST_OF_A_ROUND_WITH_GRADIENTS


def test_operators_of_experts(layer):
    experts = layer.experts
    e = layer.ep.num_local_experts
    rows_ND = torch.randn(T, D).to(torch.bfloat16)
    offsets = torch.arange(e + 1, dtype=torch.int32) * (T // e)

    def served():
        with torch.inference_mode():
            return experts(rows_ND, offsets)

    def trained():
        out_ND = experts(trained_ND, offsets)
        return torch.autograd.grad(out_ND, [trained_ND, *experts.parameters()], rows_ND)

    trained_ND = rows_ND.clone().requires_grad_()
    for call, most in ((served, MOST_OF_EXPERTS), (trained, MOST_OF_EXPERTS_WITH_GRADIENTS)):
        call()
        assert started(call).operators <= most


def test_no_wrapper_of_an_operator_runs_in_a_step(layer, x_TD, monkeypatch):
    """Compilers alone need `torch.library`, whose wrappers take longer than what they call."""
    x_TD.requires_grad_()

    def refuse(*_arguments, **_options):
        raise AssertionError("an eager step went through torch.library")

    monkeypatch.setattr("torch._library.utils.fill_defaults", refuse)
    monkeypatch.setattr("torch._library.utils.is_out", refuse, raising=False)
    layer(x_TD).sum().backward()
    assert x_TD.grad is not None


def test_outermost_operators_are_counted():
    x = torch.randn(4, 4)
    assert started(lambda: torch.nn.functional.linear(x, x)).operators == 1
    assert started(lambda: x.sum() + 1).operators == 2
