"""`batch_invariant` experts and layers of one rank, and where the mode is refused; more ranks:
tests/distributed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from expert_inputs import BF16, FP8, OFFSETS, D, E, F, assert_right, inputs, real_rows, weights
from helpers import alone, assert_close, poison_, randn

import epmoe
from epmoe.local.gemm import blocks
from epmoe.local.gemm.blocks import ROWS, Blocks
from epmoe.local.gemm.table import choose

CPU = torch.device("cpu")
INVARIANT = {"batch_invariant": True}


def built(dtype: torch.dtype, **options: object) -> epmoe.GroupedExperts:
    return epmoe.GroupedExperts(**weights(dtype, CPU), batch_invariant=True, **options)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, FP8])
def test_a_row_has_the_same_bits_wherever_it_lies(dtype):
    experts = built(dtype)
    assert experts.gemm == "blocks" and experts.batch_invariant and experts.alignment == 1
    assert_right(experts)  # and gaps may be NaN
    rows, offsets = inputs(experts.dtype, CPU)
    wanted = experts(rows, offsets)
    for row in real_rows().nonzero().flatten().tolist()[::7]:
        expert = sum(row >= end for end in OFFSETS[1:])
        for before in (0, 1, ROWS - 1):
            x = torch.cat([poison_(rows.new_empty(before, D)), rows[row : row + 1]])
            ends = torch.tensor([0] * (expert + 1) + [len(x)] * (E - expert), dtype=torch.int32)
            assert torch.equal(experts(x, ends)[-1], wanted[row])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_gradients_and_the_bits_of_serving(dtype):
    """Gradients are those of other experts, but for roundings; outputs are those of serving."""
    rows, offsets = inputs(dtype, CPU)
    real = real_rows()
    found = []
    for experts in (built(dtype), epmoe.GroupedExperts(**weights(dtype, CPU))):
        # With gradients and without, the bits are those of serving.
        x = rows.where(real[:, None], 0).requires_grad_()
        y = experts(x, offsets)
        y[: OFFSETS[-1]].square().sum().backward()
        with torch.no_grad():
            same = torch.equal(experts(x, offsets)[: OFFSETS[-1]], y[: OFFSETS[-1]])
        assert same or not experts.batch_invariant
        found.append([x.grad[: OFFSETS[-1]], experts.w_gate_up.grad, experts.w_down.grad])
    for got, want in zip(*found, strict=True):
        scale = want.abs().max()
        assert_close(got / scale, (want / scale).double(), dtype, slack=30)


@pytest.mark.usefixtures("forget_graphs")
@pytest.mark.parametrize("trained", [False, True])
def test_a_layer_and_its_router(trained):
    """Bits of logits and y, compiled or eager, with gradients or without."""
    config = alone(E, 2, D, max_tokens=40, routing={"logit_bias": True}, experts=INVARIANT)
    gate_up = randn(E, 2 * F, D, seed=1)
    down = randn(E, D, F, seed=2)
    with epmoe.ExpertParallel(config, device=CPU) as ep, torch.set_grad_enabled(trained):
        layer = epmoe.MoELayer.from_full(
            ep, randn(E, D, seed=3), gate_up, down, logit_bias=randn(E, seed=4)
        )
        x = randn(40, D, seed=5)
        # What the whole batch gives.
        y = layer(x)
        assert y.requires_grad == trained
        logits = layer.logits(x)
        call = torch.compile(layer, backend="aot_eager", dynamic=True)
        # Parts of it have the same bits.
        for first, T in ((0, 1), (3, 17), (0, 39)):
            part = x[first : first + T]
            assert torch.equal(layer.logits(part), logits[first : first + T])
            for got in (layer(part), call(part)):
                assert torch.equal(got, y[first : first + T])
        if trained:
            layer.logits(x).sum().backward()
            assert_close(layer.router_weight.grad, x.sum(0).expand(E, D).double(), slack=8)


def test_what_cannot_promise_it_is_refused(monkeypatch):
    """No GEMM for these weights: of float64, or on a CPU whose products depend on the place of a
    row.
    """
    gate_up = torch.zeros(E, 2 * F, D)
    down = torch.zeros(E, D, F)
    # float64.
    with pytest.raises(
        ValueError, match="`batch_invariant` must be False for these experts: .*float64"
    ):
        epmoe.GroupedExperts(gate_up.double(), down.double(), batch_invariant=True)
    # GPUs without kernels for it.
    problem = Blocks().problem_with(SimpleNamespace(), SimpleNamespace(device=torch.device("cuda")))
    assert "torch's GEMMs on cuda choose the order of sums by the number of rows" in str(problem)
    # A CPU on which the place of a row matters.
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    monkeypatch.setattr(blocks, "place_matters", blocks.place_matters.__wrapped__)
    with pytest.raises(
        ValueError, match=rf"torch's product of \[{ROWS}, {D}\] and \[{D}, {2 * F}\].*other bits"
    ):
        choose("auto", gate_up, down, batch_invariant=True)
    assert choose("auto", gate_up, down) == ("torch",)


@pytest.mark.parametrize(
    "placement", [{"num_redundant_experts": 2}, {"live": True, "slots_per_rank": 8}]
)
def test_copies_are_refused(placement):
    """Which copy of an expert a token takes depends on its place in the batch, and with it the
    order of its sum.
    """
    with pytest.raises(
        ValueError, match=r"`experts.batch_invariant` must be false where experts have copies"
    ):
        alone(placement=placement, experts=INVARIANT)
