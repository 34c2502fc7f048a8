"""A backward pass that waits for other ranks: Ctrl-C ends it at once, another thread is refused, a forked child too."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from helpers import ON_THE_CPU, randn
from test_signals import ctrl_c
from test_training_layers import D, E, K, T, make_layers
from torch import Tensor

import epmoe
from epmoe import EPAbortedError, MoELayer


def forward(layer: MoELayer, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """x and the loss of one call."""
    x = randn(T + rank, D, seed=10 * seed + rank).requires_grad_()
    return x, layer(x).square().sum()


def gradients(layer: MoELayer, rank: int, seed: int) -> list[Tensor]:
    """Those of x and of the parameters, in a step that nothing disturbs."""
    layer.zero_grad()
    x, loss = forward(layer, rank, seed)
    loss.backward()
    return [x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@pytest.fixture
def layer(make_ep) -> MoELayer:
    ep = make_ep(experts=E, top_k=K, hidden=D, routing={"renormalize": True}, exchange={"on_abort": "raise"})
    return make_layers(ep, num_layers=1)[0]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(map(torch.equal, got, want))


@ON_THE_CPU
def test_ctrl_c_ends_a_backward_pass(layer, rank, size, device):
    """The other ranks learn it from their own backward pass. The next step is whole on all ranks."""
    if size == 1:
        pytest.skip("one rank waits for nobody")
    want = gradients(layer, rank, 0)
    _, loss = forward(layer, rank, 1)
    if rank == 0:
        with ctrl_c():
            loss.backward()
    dist.barrier()
    if rank != 0:
        with pytest.raises(EPAbortedError, match=r"rank\(s\) \[0\] aborted the round"):
            loss.backward()
    assert_equal(gradients(layer, rank, 0), want)


@ON_THE_CPU
def test_another_thread_is_refused_during_a_backward_pass(layer, rank, size, device):
    """Its call costs the backward pass nothing."""
    if size == 1:
        pytest.skip("one rank waits for nobody")
    want = gradients(layer, rank, 0)
    layer.zero_grad()
    x, loss = forward(layer, rank, 0)
    refused: list[str] = []

    def call() -> None:
        time.sleep(0.3)  # the backward pass waits by now
        try:
            with torch.no_grad():
                layer(x)
        except RuntimeError as error:
            refused.append(str(error))
        go.set()

    go = threading.Event()
    if rank == 0:
        threading.Thread(target=call).start()
        released = threading.Thread(target=lambda: (go.wait(), store.set("go", "")))
        released.start()
    store = dist.distributed_c10d._get_default_store()
    if rank != 0:
        store.wait(["go"])
    loss.backward()
    if rank == 0:
        released.join()
        assert len(refused) == 1 and "another thread is in a call" in refused[0]
    assert_equal([x.grad, *(parameter.grad for parameter in layer.parameters())], want)
    dist.barrier()
    store.delete_key("go")


@ON_THE_CPU
def test_a_forked_child_runs_no_backward_pass(layer, rank, device):
    want = gradients(layer, rank, 0)
    layer.zero_grad()
    x, loss = forward(layer, rank, 0)
    if (child := os.fork()) == 0:
        code = 1
        try:
            loss.backward()
        except epmoe.EPStateError as error:
            code = 0 if "of which this process is a fork" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    loss.backward()
    assert_equal([x.grad, *(parameter.grad for parameter in layer.parameters())], want)
