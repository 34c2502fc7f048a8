"""Training: experts against the gradients of plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, poisoned_memory, randn
from torch.utils.checkpoint import checkpoint

import epmoe
from epmoe.training import GroupedExperts

OFFSETS = [0, 3, 3, 16, 16]  # an expert without rows; gaps of segments are rows of zeros
N, E, D = 24, 4, 32


def experts_of(dtype, device, **options) -> GroupedExperts:
    F = options.pop("F", 16)
    return GroupedExperts(
        *(randn(*shape, seed=s).to(dtype).to(device) / 4 for s, shape in enumerate([(E, 2 * F, D), (E, D, F)])),
        **options,
    )


def plain(experts, rows, offsets, weights):
    """In fp64, with gradients, of the real rows."""
    gate_up, down = (p.detach().double().cpu().requires_grad_() for p in experts.parameters())
    rows, weights = rows.detach().double().cpu().requires_grad_(), weights.detach().double().cpu().requires_grad_()
    outs = []
    for i in range(E):
        h = rows[offsets[i] : offsets[i + 1]] @ gate_up[i].T
        gate, up = (h[:, ::2], h[:, 1::2]) if experts.interleaved else h.chunk(2, 1)
        if experts.limit is not None:
            gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        act = gate * torch.sigmoid(experts.alpha * gate) * (up + experts.up_offset)
        outs.append(weights[offsets[i] : offsets[i + 1], None] * act @ down[i].T)
    return torch.cat(outs), (rows, weights, gate_up, down)


@pytest.mark.parametrize(
    "options", [{}, {"F": 6}, {"interleaved": True, "limit": 1.0, "alpha": 1.702, "up_offset": 1.0}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(device, dtype, options):
    experts, real = experts_of(dtype, device, **options), OFFSETS[-1]
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    rows, weights, grad = randn(N, D, seed=5).to(dtype), randn(N, seed=6), randn(N, D, seed=7).to(dtype)
    rows[real:], weights[real:], grad[real:] = torch.nan, torch.nan, torch.nan  # nobody may read these
    want, leaves = plain(experts, rows, OFFSETS, weights)
    (want * grad[:real].double()).sum().backward()
    results = []
    for call in (experts, experts, lambda *inputs: checkpoint(experts, *inputs, use_reentrant=False)):
        x, w = rows.to(device, copy=True).requires_grad_(), weights.to(device, copy=True).requires_grad_()
        experts.zero_grad()
        with poisoned_memory():
            out = call(x, offsets, w)
            out.backward(grad.to(device))
        assert_close(out[:real].detach(), want.detach(), slack=4)
        results.append([x.grad[:real], w.grad[:real], *(p.grad.clone() for p in experts.parameters())])
    for got, again, kept, leaf in zip(*results, leaves, strict=True):
        assert torch.equal(got, again) and torch.equal(got, kept)
        assert_close(got, leaf.grad[: len(got)], dtype, slack=4)
    assert not experts.w_down.grad[1].any() and not experts.w_gate_up.grad[1].any(), "no rows, no gradients"


def test_no_rows_and_no_experts(device):
    for shape, e in (((0, D), E), ((5, D), 0)):
        experts = GroupedExperts(torch.randn(e, 32, D, device=device), torch.randn(e, D, 16, device=device))
        rows = torch.randn(shape, device=device, requires_grad=True)
        experts(
            rows, torch.zeros(e + 1, dtype=torch.int32, device=device), torch.ones(shape[0], device=device)
        ).sum().backward()
        assert rows.grad.shape == shape


def test_experts_compiled():
    experts, offsets = experts_of(torch.bfloat16, "cpu"), torch.tensor(OFFSETS, dtype=torch.int32)
    rows, weights = torch.randn(N, D).bfloat16(), torch.rand(N)
    results = []
    for call in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        experts.zero_grad()
        call(rows, offsets, weights)[: OFFSETS[-1]].sum().backward()
        results.append([p.grad.clone() for p in experts.parameters()])
    assert all(map(torch.equal, *results))


def test_the_experts_of_inference_do_not_train_in_silence():
    experts = epmoe.GroupedExperts(torch.randn(2, 8, 16), torch.randn(2, 16, 4))
    experts.w_down.requires_grad_()
    with pytest.raises(RuntimeError, match=r"epmoe\.training\.GroupedExperts"):
        experts(torch.randn(3, 16), torch.tensor([0, 1, 3], dtype=torch.int32))
    with pytest.raises(TypeError, match="`w_down` must be"):
        GroupedExperts(torch.randn(2, 8, 16).to(torch.float8_e4m3fn), torch.randn(2, 16, 4).to(torch.float8_e4m3fn))
