"""Training: experts and route against the gradients of plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, generator, poisoned_memory, randn
from torch.utils.checkpoint import checkpoint

import epmoe
from epmoe.training import GroupedExperts, route

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


def plain_route(logits, ids, scoring, renormalize, factor):
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(1)
    weights = scores.gather(1, ids.long().clamp(0, logits.shape[1] - 1))
    return factor * (weights / weights.sum(1, keepdim=True) if renormalize else weights)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_route(device, scoring, renormalize, dtype, groups):
    options = {
        "scoring": scoring,
        "renormalize": renormalize,
        "num_expert_groups": groups,
        "top_groups": -(-groups // 2),
    }
    options |= {"routed_scaling_factor": 2.5, "bias": randn(16, seed=3).to(device) / 4, "num_tokens": 9}
    logits = randn(12, 16, seed=1).to(dtype).to(device).requires_grad_()
    got, want = route(logits, 4, **options), epmoe.route(logits.detach(), 4, **options)
    assert torch.equal(got.ids, want.ids) and torch.equal(got.weights, want.weights)
    grad = torch.randn(12, 4, generator=generator(9)).to(device)
    got.weights.backward(grad)
    wide = logits.detach().double().cpu().requires_grad_()
    plain_route(wide, got.ids.cpu(), scoring, renormalize, 2.5)[:9].backward(grad[:9].double().cpu())
    assert_close(logits.grad, wide.grad, slack=2 if dtype == torch.bfloat16 else 1)
    assert not logits.grad[9:].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_that_are_not_finite_have_no_gradients(device, scoring):
    logits = randn(4, 8, seed=1).to(device)
    logits[0, 3], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    logits.requires_grad_()
    for renormalize in (False, True):
        logits.grad = None
        route(logits, 3, scoring=scoring, renormalize=renormalize).weights.square().sum().backward()
        assert logits.grad.isfinite().all() and logits.grad[3].any() and not logits.grad[0, 3]
        if scoring == "softmax":
            assert not logits.grad[:3].any()


def test_route_compiled_and_in_a_checkpoint():
    logits = torch.randn(5, 8, requires_grad=True)

    def run(logits):
        return route(logits, 2, renormalize=True).weights.square().sum()

    (want,) = torch.autograd.grad(run(logits), logits)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for call in (compiled, lambda x: checkpoint(run, x, use_reentrant=False)):
        assert torch.equal(torch.autograd.grad(call(logits), logits)[0], want)
