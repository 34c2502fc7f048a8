"""A module's experts in compiled graphs: one operator, `epmoe::module`, exchange included."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from epmoe.native.arguments import wants_gradients
from epmoe.native.opaque import Forward, ModuleLayer

_layers: WeakSet[ModuleLayer] = WeakSet()


def call(
    module: Any, forward: Forward, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """`forward(module, parameters, x, ids, weights)`: one operator to a compiler, after
    `allow_in_graphs`.
    """
    if not torch.compiler.is_compiling():
        return forward(module, parameters, x, ids, weights)
    layer = _layer_of(module)
    # The operator has no gradients.
    if layer is None or wants_gradients((x, weights, *parameters)):
        return _outside_of_graphs(module, forward, parameters, x, ids, weights)
    return layer(x, ids, weights, parameters)


def allow_in_graphs(module: Any, forward: Forward) -> None:
    """Let compiled calls of `module` use the operator from now on."""
    if _layer_of(module) is None:
        module._epmoe_layer = ModuleLayer(module, forward)
        _layers.add(module._epmoe_layer)


def release_graphs() -> None:
    """Before windows are released: graphs that were compiled with them are not called again."""
    for layer in _layers:
        layer.release()
    _layers.clear()


def _layer_of(module: Any) -> ModuleLayer | None:
    """The operator of a module, unless its windows were released."""
    layer: ModuleLayer | None = getattr(module, "_epmoe_layer", None)
    if layer is None or layer.released:
        return None
    return layer


@torch.compiler.disable(
    reason="epmoe's experts run outside of compiled graphs in their first call, which makes the "
    "windows, and without configure(static=True), since the host looks whether a round follows: "
    "call the model once before compiling it"
)
def _outside_of_graphs(
    module: Any, forward: Forward, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    return forward(module, parameters, x, ids, weights)
