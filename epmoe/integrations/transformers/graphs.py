"""Lets torch.compile see a module's experts as one operator, `epmoe::module`, which includes the
exchange.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from epmoe.native.arguments import wants_gradients
from epmoe.native.opaque import Forward, ModuleLayer

# The operators of all modules that compiled calls may use, to release them with the windows.
_layers: WeakSet[ModuleLayer] = WeakSet()


def call(
    module: Any, forward: Forward, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Call `forward(module, parameters, x, ids, weights)`. While torch.compile traces the call, the
    compiler sees one operator instead, if `allow_in_graphs` has been called for the module.
    """
    if not torch.compiler.is_compiling():
        return forward(module, parameters, x, ids, weights)
    layer = _layer_of(module)
    # The operator has no gradients, so calls with gradients leave the compiled graph.
    if layer is None or wants_gradients((x, weights, *parameters)):
        return _outside_of_graphs(module, forward, parameters, x, ids, weights)
    return layer(x, ids, weights, parameters)


def allow_in_graphs(module: Any, forward: Forward) -> None:
    """Let compiled calls of `module` use the operator from now on. `forward` is the function that
    `call` gets for this module.
    """
    if _layer_of(module) is None:
        module._epmoe_layer = ModuleLayer(module, forward)
        _layers.add(module._epmoe_layer)


def release_graphs() -> None:
    """Release the operators of all modules, before their windows are released. Graphs that were
    compiled with these operators are not called again.
    """
    for layer in _layers:
        layer.release()
    _layers.clear()


def _layer_of(module: Any) -> ModuleLayer | None:
    """The operator of a module, or None if it has none or its windows were released."""
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
    """Call `forward` outside of the compiled graph: the compiler breaks the graph here."""
    return forward(module, parameters, x, ids, weights)
