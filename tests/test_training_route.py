"""Training: route against the gradients of plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, generator, randn
from torch.utils.checkpoint import checkpoint

import epmoe
from epmoe.training import route


def plain_route(logits, ids, scoring, renormalize, factor, epsilon=0.0):
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(1)
    weights = scores.gather(1, ids.long().clamp(0, logits.shape[1] - 1))
    return factor * (weights / (weights.sum(1, keepdim=True) + epsilon) if renormalize else weights)


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


@pytest.mark.parametrize("least", [-60.0, -95.0])
def test_sigmoids_near_zero_have_gradients(device, least):
    """What renormalised weights say does not vanish with the scores."""
    logits = (least + torch.arange(8.0)[None]).to(device).requires_grad_()
    got = route(logits, 4, scoring="sigmoid", renormalize=True)
    got.weights[:, 0].sum().backward()
    wide = logits.detach().double().cpu().requires_grad_()
    plain_route(wide, got.ids.cpu(), "sigmoid", True, 1.0)[:, 0].sum().backward()
    assert_close(logits.grad, wide.grad)


@pytest.mark.parametrize(
    ("scoring", "epsilon", "offset"), [("softmax", 0.5, 0), ("sigmoid", 1e-20, -46), ("sigmoid", 0.5, 0)]
)
def test_gradients_with_an_epsilon(device, scoring, epsilon, offset):
    logits = (randn(6, 8) + offset).to(device).requires_grad_()
    options = {"scoring": scoring, "renormalize": True, "renormalize_epsilon": epsilon, "routed_scaling_factor": 2.5}
    got = route(logits, 3, **options)
    grad = randn(6, 3, seed=1).to(device)
    got.weights.backward(grad)
    wide = logits.detach().double().cpu().requires_grad_()
    plain_route(wide, got.ids.cpu(), scoring, True, 2.5, epsilon).backward(grad.double().cpu())
    assert wide.grad.abs().max() > 0.1
    assert_close(logits.grad, wide.grad)


@pytest.mark.parametrize(("scoring", "epsilon"), [("softmax", 0.0), ("sigmoid", 0.0), ("sigmoid", 1e-20)])
def test_gradients_where_one_weight_is_all_but_one(device, scoring, epsilon):
    """Each within 1e-5 of itself."""
    logits = torch.tensor([[9.0, -5.0, -6.0, -7.0, -8.0]], device=device, requires_grad=True)
    options = {"scoring": scoring, "renormalize": True, "renormalize_epsilon": epsilon, "routed_scaling_factor": 2.5}
    got, grad = route(logits, 3, **options), randn(1, 3, seed=1).to(device)
    got.weights.backward(grad)
    wide = logits.detach().double().cpu().requires_grad_()
    plain_route(wide, got.ids.cpu(), scoring, True, 2.5, epsilon).backward(grad.double().cpu())
    torch.testing.assert_close(logits.grad.double().cpu(), wide.grad, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_given_experts(device, scoring, renormalize):
    """Those of a rollout, with weights and gradients of these logits. An id of no expert has no weight."""
    options = {"scoring": scoring, "renormalize": renormalize, "routed_scaling_factor": 2.5}
    logits = randn(6, 16).to(device).requires_grad_()
    own = route(logits, 4, num_tokens=5, **options)
    again = route(logits, 4, ids=own.ids, num_tokens=5, **options)
    assert torch.equal(again.ids, own.ids)
    assert_close(again.weights.detach(), own.weights.detach().double())
    ids = torch.rand(6, 16, generator=generator(3)).argsort(1)[:, :4].to(device)
    grad = randn(6, 4, seed=1).to(device)
    got = route(logits, 4, ids=ids, num_tokens=5, **options)
    got.weights.backward(grad)
    wide = logits.detach().double().cpu().requires_grad_()
    want = plain_route(wide, ids.cpu(), scoring, renormalize, 2.5)[:5]
    want.backward(grad[:5].double().cpu())
    assert_close(got.weights[:5].detach(), want.detach())
    assert_close(logits.grad, wide.grad)
    assert got.ids.dtype == torch.int64 and got.ids[5].eq(16).all() and not got.weights[5].any()
    ids[0, 1], ids[1, 0] = -1, 16
    weights = route(logits, 4, ids=ids, **options).weights
    assert not weights[0, 1] and not weights[1, 0] and weights.isfinite().all()
    with pytest.raises(ValueError, match="`ids` must be"):
        route(logits, 4, ids=ids[1:])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_of_weights_that_nobody_has_are_not_read(device, scoring, renormalize):
    """Those of padding, and of experts whose score is not finite, may be NaN."""
    logits = randn(4, 8, seed=1).to(device)
    logits[1, :] = torch.nan
    logits.requires_grad_()
    grad = torch.ones(4, 3, device=device)
    grad[1], grad[3] = torch.nan, torch.nan
    route(logits, 3, scoring=scoring, renormalize=renormalize, num_tokens=3).weights.backward(grad)
    assert logits.grad.isfinite().all() and not logits.grad[1].any() and not logits.grad[3].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_a_count_on_the_device_and_wide_ids(device, scoring, id_dtype):
    logits, count = randn(6, 8, seed=1).to(device), torch.tensor(4, dtype=torch.int32, device=device)
    grads = []
    for num_tokens in (4, count):
        x = logits.clone().requires_grad_()
        got = route(x, 2, scoring=scoring, num_tokens=num_tokens, id_dtype=id_dtype)
        assert got.ids.dtype == id_dtype
        (grad,) = torch.autograd.grad(got.weights.square().sum(), x)
        grads.append(grad)
    assert torch.equal(*grads) and grads[0][:4].any(1).all() and not grads[0][4:].any()


def test_no_tokens(device):
    logits = torch.zeros(0, 8, device=device, requires_grad=True)
    route(logits, 2).weights.sum().backward()
    assert logits.grad.shape == (0, 8)
