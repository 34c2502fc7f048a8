"""MoELayer in one process, which is a group of one: y, and the nn.Module that users expect, with
its wrong calls.

Over several ranks: tests/distributed/test_layers.py.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from helpers import FLOATS, alone, assert_close, randn
from torch.utils.checkpoint import checkpoint

import epmoe
from epmoe.local.reference import moe_reference, route_reference

pytestmark = pytest.mark.usefixtures("serving")

E = 12
F = 32
D = 64
K = 3
M = 40


ROUTING = {"scoring": "sigmoid", "renormalize": True, "num_expert_groups": 4, "top_groups": 2}


def make_config(**routing):
    routing.setdefault("selection_bias", True)
    return alone(E, K, D, max_tokens=M, routing=routing)


@pytest.fixture
def ep(device):
    with epmoe.ExpertParallel(make_config(**ROUTING), device=device) as ep:
        yield ep


def make_experts(ep, e=E, D=D, dtype=torch.float32):
    w_gate_up = randn(e, 2 * F, D, dtype=dtype, seed=1) / D**0.5
    w_down = randn(e, D, F, dtype=dtype, seed=2) / F**0.5
    return epmoe.GroupedExperts(w_gate_up.to(ep.device), w_down.to(ep.device))


def make_layer(ep, bias=True):
    bias_E = (randn(E, seed=5) * 3).to(ep.device) if bias else None
    return epmoe.MoELayer(ep, randn(E, D).to(ep.device), make_experts(ep), bias=bias_E)


def want(layer, x_TD):
    """The layer's output in fp64; rounding decides no choice of experts."""
    logits_TE = x_TD.float().cpu() @ layer.router_weight.cpu().T
    bias_E = None if layer.bias is None else layer.bias.cpu()
    ids_TK, weights_TK = route_reference(logits_TE, K, bias=bias_E, **ROUTING)
    experts = layer.experts.w_gate_up.cpu(), layer.experts.w_down.cpu()
    return moe_reference(x_TD.cpu(), ids_TK, weights_TK, experts)


def assert_works(layer, dtype=torch.float32):
    x = randn(7, D, dtype=dtype, seed=9).to(layer.ep.device)
    assert_close(layer(x), want(layer, x), slack=4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_equals_the_dense_layer(ep, dtype):
    """Also in a dtype smaller than the config's."""
    layer = make_layer(ep).to(dtype)
    for T in (M, 1, 0):
        x = randn(T, D, dtype=dtype, seed=T).to(ep.device)
        assert_close(layer(x), want(layer, x), slack=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_and_bias_in_another_dtype(ep, dtype):
    """The router keeps it, and the bias is kept in fp32."""
    router, bias, x = (randn(*s, dtype=dtype, seed=5).to(ep.device) for s in ((E, D), (E,), (M, D)))
    layers = [epmoe.MoELayer(ep, router, make_experts(ep), bias=b) for b in (bias, bias.float())]
    assert layers[0].bias.dtype == torch.float32 and torch.equal(
        layers[0](x.float()), layers[1](x.float())
    )
    assert layers[0].float().router_weight.dtype == dtype


@pytest.mark.parametrize(
    "arguments", [["meta"], ["meta", torch.bfloat16], [torch.zeros((), device="meta")]]
)
def test_a_move_takes_everything_along(ep, arguments):
    layer = make_layer(ep).to(*arguments)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    assert layer.router_weight.dtype == layer.bias.dtype == torch.float32
    assert (
        layer.to_empty(device=ep.device).router_weight.device == ep.device
        and layer.order is ep.order
    )


def test_experts_train_again_after_fp64(ep):
    """In fp64 they only serve. What was frozen stays frozen."""
    experts = make_experts(ep)
    experts.w_down.requires_grad_(False)
    experts.double().double()
    assert not any(value.requires_grad for value in experts.parameters())
    experts.float()
    assert experts.w_gate_up.requires_grad and not experts.w_down.requires_grad


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_state_dict_that_is_assigned_keeps_router_and_bias_in_fp32(ep, on_meta):
    layer = make_layer(ep)
    smaller = {
        name: t.bfloat16() if t.is_floating_point() else t for name, t in layer.state_dict().items()
    }
    layer = make_layer(ep).to("meta" if on_meta else ep.device)
    layer.load_state_dict(smaller, assign=True)
    assert (
        layer.router_weight.dtype == layer.bias.dtype == torch.float32
        and layer.router_weight.requires_grad
    )
    assert layer.experts.dtype == torch.bfloat16
    assert_works(layer, torch.bfloat16)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_given_experts_get_the_weights_of_the_layers_own_router(ep, backend):
    """Its gradients reach the router, as those of its own choice do."""
    layer = make_layer(ep)
    x = randn(M, D).to(ep.device)
    call = torch.compile(layer, backend=backend) if backend else layer
    y, routes = layer(x, return_routing=True)
    assert_close(call(x, routing=(routes.ids, None)), y.double())
    # Gradients of the router by its own choice, and by the ids of that choice.
    with torch.inference_mode(False), torch.enable_grad():
        grads = [
            torch.autograd.grad(
                step(x.clone(), routing=routing).square().sum(), layer.router_weight
            )[0]
            for step, routing in ((layer, None), (call, (routes.ids.clone(), None)))
        ]
    assert_close(grads[1], grads[0].double())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_of_recorded_logits_has_gradients_or_raises(ep, reentrant):
    layer = make_layer(ep)
    with torch.inference_mode(False), torch.enable_grad(), epmoe.recording(layer) as record:
        x = randn(7, D).to(ep.device).requires_grad_()
        y = checkpoint(lambda x: layer(1 * x), x, use_reentrant=reentrant)
        [routes] = record[""]
        # A loss of y and of the logits that were recorded.
        loss = y.sum() + routes.logits.logsumexp(1).square().mean()
        if reentrant:
            with pytest.raises(RuntimeError, match="use_reentrant=False"):
                loss.backward()
            return
        loss.backward()
    # The logits have had a part in the gradient.
    with torch.inference_mode(False), torch.enable_grad():
        (alone,) = torch.autograd.grad(layer(x).sum(), layer.router_weight)
    assert not torch.allclose(layer.router_weight.grad, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grouped", [True, False])
def test_autocast_changes_no_choice_of_experts(ep, dtype, grouped):
    """Logits in autocast's dtype would choose other experts."""
    layer = make_layer(ep)
    layer.experts.gemms = ("torch" if grouped else "loop",)
    x = randn(M, D, seed=3).to(ep.device)
    y = layer(x)
    with torch.autocast(ep.device.type, dtype):
        assert torch.equal(layer(x), y)
    assert_close(y, want(layer, x), slack=4)


def test_logits_under_autocast_are_those_of_the_layer(ep):
    """The router takes x as it is given, not as autocast casts it for the experts."""
    layer = make_layer(ep).bfloat16()
    x = randn(M, D, seed=3).to(ep.device)
    for trains in (False, True):
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(trains),
            torch.autocast(ep.device.type, torch.bfloat16),
        ):
            # The logits are those of x in fp32.
            given = x.clone().requires_grad_(trains)
            y, routes = layer(given, return_routing=True)
            assert y.dtype == torch.float32 and y.requires_grad == trains
            assert torch.equal(routes.logits, layer.logits(given))
            if trains:
                y.sum().backward()
    assert given.grad.dtype == torch.float32 and given.grad.any()


def test_a_frozen_layer_needs_no_no_grad(ep):
    layer = make_layer(ep).requires_grad_(False)
    with torch.enable_grad():
        assert not layer(randn(4, D).to(ep.device)).requires_grad
    with torch.inference_mode():
        assert_works(layer)


def test_a_checkpoint_holds_router_and_experts(ep):
    layer = make_layer(ep)
    other = make_layer(ep)
    assert list(layer.state_dict()) == [
        "router_weight",
        "bias",
        "_extra_state",
        "experts.w_gate_up",
        "experts.w_down",
    ]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    # The other layer is emptied, and loads the file.
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    x = randn(7, D).to(ep.device)
    assert torch.equal(other(x), layer(x)) and layer(x).abs().max() > 0


def test_a_deepcopy_has_weights_and_rounds_of_its_own(ep):
    """Of the exchange it has the same one, and nobody records it."""
    layer = make_layer(ep)
    x = randn(7, D).to(ep.device)
    y = layer(x)
    with epmoe.recording(layer):
        twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), y) and not twin.recorders
    assert twin.ep is ep and twin.tag not in (0, layer.tag)
    # Its weights are its own.
    for tensor in twin.state_dict().values():
        tensor.zero_()
    assert twin(x).eq(0).all() and torch.equal(layer(x), y)


def test_a_whole_layer_cannot_be_pickled(ep):
    for save in (pickle.dumps, lambda layer: torch.save(layer, io.BytesIO())):
        with pytest.raises(
            TypeError,
            match=r"it holds windows of this process.*Save a layer by its `state_dict\(\)`",
        ):
            save(make_layer(ep))


@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (7, 1), (0, 4), (4, 0)])
def test_batches_of_sequences(ep, shape):
    """[B, T, D] is B·T tokens."""
    layer = make_layer(ep)
    x = randn(*shape, D).to(ep.device)
    y = layer(x)
    assert y.shape == x.shape and torch.equal(y.view(-1, D), layer(x.view(-1, D)))
    # Also where x lies otherwise in memory,
    turned = randn(shape[1], shape[0], D).to(ep.device).transpose(0, 1)
    assert torch.equal(layer(turned), layer(turned.contiguous()))
    # and with padding.
    real = x.numel() // D // 2
    y = layer(x, num_tokens=real).view(-1, D)
    assert_close(y[:real], want(layer, x.view(-1, D)[:real]), slack=4)
    assert y[real:].eq(0).all()


def test_x_for_experts_of_the_user(ep):
    """The layer knows only the config's dtype of these experts."""
    router = randn(E, D).to(ep.device)
    bias = torch.zeros(E, device=ep.device)
    layer = epmoe.MoELayer(ep, router, lambda rows, offsets, scales: rows, bias=bias)
    want = (
        r"`x` must be float32 or float16 or bfloat16 \[T, 64\] or \[B, T, 64\], got float64 \[4, "
        r"64\]$"
    )
    with pytest.raises(TypeError, match=want):
        layer(randn(4, D).double().to(ep.device))
    for dtype in (torch.float32, torch.bfloat16):
        assert layer(randn(4, D, dtype=dtype).to(ep.device)).dtype == dtype


def test_a_part_left_on_another_device(ep):
    router = randn(E, D).to("meta")
    bias = torch.zeros(E, device=ep.device)
    layers = {
        "router_weight": epmoe.MoELayer(ep, router, make_experts(ep), bias=bias),
        "experts": make_layer(ep),
    }
    # Each layer has another part that is not on the device of the group.
    layers["experts"].experts.to("meta")
    for part, layer in layers.items():
        with pytest.raises(
            ValueError,
            match=f"`{part}` must be on {ep.device}, got meta: move the layer with `.to`",
        ):
            layer(randn(4, D).to(ep.device))


def test_repr_says_what_it_is(ep):
    text = repr(make_layer(ep))
    assert "ExpertParallel(rank 0 of 1, E=12 K=3 D=64 float32" in text
    assert "(experts): GroupedExperts(e=12, D=64, F=32, float32, gemm='torch')" in text


def test_shared_experts_are_added(ep):
    """To rows of tokens only, and a module's parameters are the layer's."""
    shared = torch.nn.Linear(D, D, device=ep.device).requires_grad_(False)
    layer = make_layer(ep)
    both = epmoe.MoELayer(ep, layer.router_weight, layer.experts, bias=layer.bias, shared=shared)
    assert {"shared.weight", "experts.w_down"} <= dict(both.named_parameters()).keys()
    x = randn(M, D).to(ep.device)
    # Batches with padding and without.
    for T, real in ((M, None), (7, None), (M, 5), (0, None)):
        y = both(x[:T], real)
        routed = layer(x[:T], real)
        kept = slice(real or T)
        assert_close(y[kept], (routed[kept].double() + shared(x[:T][kept]).double()), slack=4)
        assert y[kept.stop :].eq(0).all()


def test_an_exception_of_shared_experts_ends_the_round(ep):
    def fails(x):
        raise KeyError("shared")

    layer = make_layer(ep)
    with pytest.raises(KeyError):
        epmoe.MoELayer(ep, layer.router_weight, layer.experts, bias=layer.bias, shared=fails)(
            randn(3, D).to(ep.device)
        )
    layer(randn(3, D).to(ep.device))
