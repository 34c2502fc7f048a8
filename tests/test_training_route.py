"""Training: route against the gradients of plain torch in fp64."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, generator, randn
from torch.utils.checkpoint import checkpoint

import epmoe
from epmoe.training import route


def plain_route(logits, ids, scoring="softmax", renormalize=False, factor=1.0, epsilon=0.0):
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(1)
    weights = scores.gather(1, ids.long().clamp(0, logits.shape[1] - 1))
    return factor * (weights / (weights.sum(1, keepdim=True) + epsilon) if renormalize else weights)


def routed(logits, top_k, grad=None, real=None, ids=None, **options):
    """The routing of `real` tokens, by default all, and the gradients of its logits: those of
    route, and in fp64.
    """
    names = ("scoring", "renormalize", "routed_scaling_factor", "renormalize_epsilon")
    formula = {
        name.replace("routed_scaling_", "").replace("renormalize_", ""): options.get(name)
        for name in names
    }
    # Forward and backward by route, and then the same ids in fp64.
    x = logits.clone().requires_grad_()
    wide = logits.double().cpu().requires_grad_()
    got = route(x, top_k, ids=ids, num_tokens=real, **options)
    grad = randn(*got.weights.shape, seed=9) if grad is None else grad
    got.weights.backward(grad.to(x.device))
    want = plain_route(
        wide, got.ids.cpu(), **{name: value for name, value in formula.items() if value is not None}
    )
    want[:real].backward(grad[:real].double())
    return got, x.grad, wide.grad


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_route(device, scoring, renormalize, dtype, groups):
    options = {"scoring": scoring, "renormalize": renormalize, "routed_scaling_factor": 2.5}
    options |= {
        "num_expert_groups": groups,
        "top_groups": -(-groups // 2),
        "bias": randn(16, seed=3).to(device) / 4,
    }
    logits = randn(12, 16, seed=1).to(dtype).to(device)
    got, by_route, by_torch = routed(logits, 4, real=9, **options)
    want = epmoe.route(logits, 4, num_tokens=9, **options)
    assert torch.equal(got.ids, want.ids) and torch.equal(got.weights, want.weights)
    assert_close(by_route, by_torch, slack=2 if dtype == torch.bfloat16 else 1)
    assert not by_route[9:].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_that_are_not_finite_have_no_gradients(device, scoring):
    logits = randn(4, 8, seed=1).to(device)
    logits[0, 3] = torch.nan
    logits[1, 2] = torch.inf
    logits[2] = -torch.inf
    logits.requires_grad_()
    for renormalize in (False, True):
        logits.grad = None
        route(logits, 3, scoring=scoring, renormalize=renormalize).weights.square().sum().backward()
        assert logits.grad.isfinite().all() and logits.grad[3].any() and not logits.grad[0, 3]
        if scoring == "softmax":
            assert not logits.grad[:3].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_route_compiled_and_in_a_checkpoint(dtype):
    logits = torch.randn(5, 8, requires_grad=True)
    bias = torch.randn(8)
    options = {
        "renormalize": True,
        "scoring": "sigmoid",
        "routed_scaling_factor": 2.5,
        "bias": bias,
    }

    def run(logits):
        ids, weights = route(logits, 2, id_dtype=dtype, **options)
        assert ids.dtype == dtype
        return weights.square().sum() + route(logits, 2, ids=ids.flip(1), **options).weights.sum()

    # The gradient of eager calls is that of compiled ones and of a checkpoint.
    (want,) = torch.autograd.grad(run(logits), logits)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for call in (compiled, lambda x: checkpoint(run, x, use_reentrant=False)):
        assert torch.equal(torch.autograd.grad(call(logits), logits)[0], want)


FIRST_ALONE = torch.eye(4)[:1]
ROW = torch.arange(8.0)[None]


@pytest.mark.parametrize(
    ("logits", "top_k", "grad", "scoring", "epsilon"),
    [
        # What renormalised weights say does not vanish with the scores.
        (
            ROW - 60,
            4,
            FIRST_ALONE,
            "sigmoid",
            0.0,
        ),
        (ROW - 95, 4, FIRST_ALONE, "sigmoid", 0.0),
        (randn(6, 8), 3, None, "softmax", 0.5),
        (randn(6, 8) - 46, 3, None, "sigmoid", 1e-20),
        (randn(6, 8), 3, None, "sigmoid", 0.5),
    ],
)
def test_renormalised_weights(device, logits, top_k, grad, scoring, epsilon):
    options = {
        "scoring": scoring,
        "renormalize": True,
        "renormalize_epsilon": epsilon,
        "routed_scaling_factor": 2.5,
    }
    _, by_route, by_torch = routed(logits.to(device), top_k, grad, **options)
    assert by_torch.abs().max() > 0.1
    assert_close(by_route, by_torch)


@pytest.mark.parametrize(
    ("scoring", "epsilon"), [("softmax", 0.0), ("sigmoid", 0.0), ("sigmoid", 1e-20)]
)
def test_gradients_where_one_weight_is_all_but_one(device, scoring, epsilon):
    """Each within 1e-5 of itself."""
    options = {
        "scoring": scoring,
        "renormalize": True,
        "renormalize_epsilon": epsilon,
        "routed_scaling_factor": 2.5,
    }
    _, by_route, by_torch = routed(
        torch.tensor([[9.0, -5.0, -6.0, -7.0, -8.0]], device=device), 3, **options
    )
    torch.testing.assert_close(by_route.double().cpu(), by_torch, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_given_experts(device, scoring, renormalize):
    """Those of a rollout, with weights and gradients of these logits. An id of no expert has no
    weight.
    """
    options = {"scoring": scoring, "renormalize": renormalize, "routed_scaling_factor": 2.5}
    logits = randn(6, 16).to(device).requires_grad_()
    # Ids that a route has chosen give its weights.
    own = route(logits, 4, num_tokens=5, **options)
    again = route(logits, 4, ids=own.ids, num_tokens=5, **options)
    assert torch.equal(again.ids, own.ids)
    assert_close(again.weights.detach(), own.weights.detach().double())
    # Other ids give what plain torch does.
    ids = torch.rand(6, 16, generator=generator(3)).argsort(1)[:, :4].to(device)
    got, by_route, by_torch = routed(logits.detach(), 4, real=5, ids=ids, **options)
    want = plain_route(logits.detach().double().cpu(), ids.cpu(), scoring, renormalize, 2.5)[:5]
    assert_close(got.weights[:5].detach(), want)
    assert_close(by_route, by_torch)
    assert got.ids.dtype == torch.int64 and got.ids[5].eq(16).all() and not got.weights[5].any()
    # Ids of no expert.
    ids[0, 1] = -1
    ids[1, 0] = 16
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
    grad[1] = torch.nan
    grad[3] = torch.nan
    route(logits, 3, scoring=scoring, renormalize=renormalize, num_tokens=3).weights.backward(grad)
    assert logits.grad.isfinite().all() and not logits.grad[1].any() and not logits.grad[3].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_a_count_on_the_device_and_wide_ids(device, scoring, id_dtype):
    logits = randn(6, 8, seed=1).to(device)
    count = torch.tensor(4, dtype=torch.int32, device=device)
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


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_kernel_has_the_gradients_of_the_formula(device, scoring, renormalize):
    """Torch differentiates the formula once more, so gradients of gradients take that."""
    logits = 20 * randn(33, 130, seed=1).to(device)
    logits.requires_grad_()
    options = {"scoring": scoring, "renormalize": renormalize, "routed_scaling_factor": 2.5}
    weights = route(logits, 7, **options).weights
    grad = randn(33, 7, seed=2).to(device)
    (kernel,) = torch.autograd.grad(weights, logits, grad, retain_graph=True)
    (formula,) = torch.autograd.grad(weights, logits, grad, create_graph=True)
    torch.testing.assert_close(kernel, formula, rtol=1e-6, atol=1e-12)
    assert torch.autograd.grad(formula.square().sum(), logits)[0].isfinite().all()
