"""A layer as an operator: torch.export, its number, its schema and fake."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from helpers import distinct_ids, randn
from test_compile import D, E, K, M, assert_same_bits, compiled, config, make_layer

import epmoe
from epmoe import opaque

pytestmark = pytest.mark.usefixtures("serving")


@pytest.fixture
def ep(device):
    with epmoe.ExpertParallel(config(), device=device) as ep, torch.no_grad():
        yield ep


class AllReal(torch.nn.Module):
    """A layer whose caller says that no row is padding, by a number that follows T."""

    def __init__(self, layer: epmoe.MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, num_tokens=x.shape[0])


@pytest.mark.parametrize("strict", [False, True])
def test_export(ep, strict):
    layer = make_layer(ep, layer_id=77)
    tokens = torch.export.Dim("T", min=2, max=M)
    x = randn(5, D).to(ep.device)
    program, all_real = (
        torch.export.export(exported, (x,), dynamic_shapes=({0: tokens},), strict=strict)
        for exported in (layer, AllReal(layer))
    )
    # Exported, saved and loaded, for any T.
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for exported in (program, program.run_decompositions(), loaded, all_real):
        for T in (2, 3, 7, M):
            x = randn(T, D, seed=T).to(ep.device)
            assert_same_bits(exported.module()(x), layer(x))
    assert_same_bits(compiled(loaded.module(), "aot_eager")(x), layer(x))
    # The layer is gone, and one of the same number takes its place.
    del layer
    gc.collect()
    with pytest.raises(RuntimeError, match="no layer of this process has layer_id=77"):
        loaded.module()(x)
    other = make_layer(ep, seed=9, layer_id=77)  # as in another process
    with torch.no_grad():
        other.router_weight.copy_(program.state_dict["router_weight"])
    assert_same_bits(loaded.module()(x), other(x))


def test_numbers_of_layers(ep):
    layers = [make_layer(ep) for _ in range(3)]
    ids = [layer.layer_id for layer in layers]
    assert len(set(ids)) == 3 and min(ids) >= 2
    assert copy.deepcopy(layers[0]).layer_id not in ids
    # Numbers that are taken, or none.
    for wrong, error in (
        (ids[0], ValueError),
        (-1, ValueError),
        (True, TypeError),
        ("a", TypeError),
    ):
        with pytest.raises(error, match="`layer_id` must be"):
            make_layer(ep, layer_id=wrong)
        with pytest.raises(error, match="`layer_id` must be"):
            E, D = layers[0].router_weight.shape
            weights = torch.ones(E, D), torch.ones(E, 8, D), torch.ones(E, D, 4)
            epmoe.MoELayer.from_full(ep, *weights, bias=torch.zeros(E), layer_id=wrong)
    # Copies and casts keep what orders them.
    for layer in (copy.deepcopy(layers[0]), layers[1].bfloat16(), layers[2].to(ep.device)):
        assert layer.order is ep.order and "order" not in layer.state_dict()


def test_a_module_of_a_host_framework(device):
    """Its parameters are arguments of the operator, and its number follows from its name."""

    class Module:
        pass

    module = Module()
    parameters = [randn(D).to(device), randn(D, seed=1).to(device)]
    forward = lambda _, parameters, x, ids, weights: x * parameters[0] + parameters[1]  # noqa: E731
    # Layers of the same name have the same number.
    layers = [
        opaque.ModuleLayer(module, forward, name)
        for name in ("model.0", "model.1", "model.0", None)
    ]
    assert (
        layers[0].layer_id == layers[2].layer_id != layers[1].layer_id
        and copy.copy(layers[0]) is None
    )
    args = (
        randn(6, D).to(device),
        distinct_ids(6, E, K).to(device),
        torch.full((6, K), 0.25, device=device),
    )
    # Each runs compiled, until it is released.
    for layer in layers[1:]:
        torch.library.opcheck(torch.ops.epmoe.module.default, (*args, parameters, layer.layer_id))
        y = compiled(layer, "inductor")(*args, parameters)
        assert torch.equal(y, args[0] * parameters[0] + parameters[1])
        layer.release()
        with pytest.raises(
            RuntimeError, match=f"no layer of this process has layer_id={layer.layer_id}"
        ):
            layer(*args, parameters)


def test_opcheck(ep):
    layer = make_layer(ep)
    x = randn(6, D).to(ep.device)
    real = torch.tensor(4, dtype=torch.int32, device=ep.device)
    ids = distinct_ids(6, E, K).to(ep.device)
    weights = torch.full((6, K), 0.25, device=ep.device)
    for routing in ((randn(6, E).to(ep.device), None), (ids, weights)):
        for num_tokens in (None, real):
            args = (x, *routing, num_tokens, 6, ep.order, layer.layer_id)
            torch.library.opcheck(torch.ops.epmoe.moe.default, args)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_with_gradients_says_what_to_do(ep, strict):
    """Rows that inductor cannot count are no part of a program."""
    layer = make_layer(ep)
    with (
        torch.enable_grad(),
        pytest.raises(Exception, match=r"torch.export takes .* export under torch.no_grad"),
    ):
        torch.export.export(layer, (randn(5, D).to(ep.device),), strict=strict)
