"""One operator for a framework's layer of experts, exchange included, which compilers keep and do not look into.

It is not `epmoe::moe` of epmoe/opaque.py, because the layer's parameters are arguments here: compilers must know when
they move, and FSDP collects them anew in each pass. Windows and functions belong to the layer that `number` names. y is
new memory. The operator changes none of its arguments, so that graphs with it become CUDA graphs; a compiler keeps each
round because the model reads its y, and keeps their order because each layer reads the output of the layer before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Forward = Callable[[Any, list[Tensor], Tensor, Tensor, Tensor], Tensor]
"""(layer, its parameters, x [T,D], ids [T,K], weights [T,K]) → y [T,D]"""

_layers: WeakValueDictionary[int, Any] = WeakValueDictionary()
_new_numbers = itertools.count()


class Number:
    """A layer's number, or None once its windows are released, and its function. Copies of the layer have neither."""

    def __init__(self, value: int, forward: Forward) -> None:
        self.value: int | None = value
        self.forward = forward

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def call(layer: Any, forward: Forward, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`forward(layer, parameters, x, ids, weights)`: one operator to a compiler, once the layer has a number."""
    if not torch.compiler.is_compiling():
        return forward(layer, parameters, x, ids, weights)
    number = _number_of(layer)
    if number is None:
        return _outside_of_graphs(layer, forward, parameters, x, ids, weights)
    y: Tensor = torch.ops.epmoe.spread_experts(x, ids, weights, parameters, number)
    return y


def give_number(layer: Any, forward: Forward) -> None:
    """Let compiled calls of `layer` use the operator from now on."""
    if _number_of(layer) is None:
        value = next(_new_numbers)
        _layers[value] = layer
        layer._epmoe_number = Number(value, forward)


def forget_numbers() -> None:
    """Before windows are released: graphs that were compiled with them are not called again."""
    for layer in _layers.values():
        layer._epmoe_number.value = None
    _layers.clear()


def _number_of(layer: Any) -> int | None:
    number = getattr(layer, "_epmoe_number", None)
    return None if number is None else number.value


@torch.compiler.disable(
    reason="epmoe's experts run outside of compiled graphs in their first call, which makes the windows, and without "
    "configure(static=True), since the host looks whether a round follows: call the model once before compiling it"
)
def _outside_of_graphs(
    layer: Any, forward: Forward, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    return forward(layer, parameters, x, ids, weights)


@torch.library.custom_op("epmoe::spread_experts", mutates_args=())
def _spread_experts(x: Tensor, ids: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Tensor:
    layer = _layers[number]
    y: Tensor = layer._epmoe_number.forward(layer, parameters, x, ids, weights)
    return y


@_spread_experts.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, parameters: list[Tensor], number: int) -> Tensor:
    return x.new_empty(x.shape)
