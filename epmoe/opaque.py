"""Layers as operators, which torch.compile and torch.export keep and do not look into.

    x [T,D], routing, order ─ epmoe::moe(layer_id) ─▶ y [T,D]                       a `MoELayer`
    x [T,D], ids, weights, parameters ─ epmoe::module(layer_id) ─▶ y [T,D]          a host framework's module

An operator finds its layer by a number. Placement and windows belong to the layer, so a graph holds no memory of an
exchange. y is memory of its own: inductor writes into outputs of operators that nobody reads any longer, and memory of
a window may not be written.

`order` is the same tensor for all layers of an `ExpertParallel`. `epmoe::moe` says that it changes `order`, although it
does not touch it. Every pass of a compiler therefore keeps the rounds of one exchange, and keeps their order, which
must be the same on all ranks. The window cannot take its place: functionalisation copies what an operator changes, and
writes it back later, over what other ranks have sent meanwhile.

`epmoe::module` changes nothing, so that graphs with it become CUDA graphs. A compiler keeps each round because the
framework's model reads its y, and keeps their order because each layer reads the output of the layer before. The
module's parameters are arguments: compilers must know when they move, and FSDP collects them anew in each pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from epmoe.native.arguments import describe, token_count


class Layer(Protocol):
    """What `epmoe::moe` runs."""

    @property
    def layer_id(self) -> int:
        """The number that `register` has returned."""

    @property
    def order(self) -> Tensor:
        """`ExpertParallel.order`, in a module as a buffer: other changed inputs keep a graph out of CUDA graphs."""

    def run(
        self,
        x_TD: Tensor,
        routing: Tensor,
        weights_TK: Tensor | None,
        num_tokens: int | Tensor | None,
        padded_tokens: int | None = None,
    ) -> Tensor:
        """A round. It raises what the exchange has reported.

        Args:
            x_TD: tokens [T, D].
            routing: logits [T, E] if `weights_TK` is None, otherwise ids [T, K].
            weights_TK: [T, K], or None.
            num_tokens: real tokens.
            padded_tokens: as of `ExpertParallel.dispatch`.

        Returns:
            y [T, D], contiguous, in the dtype of x and in memory of its own.
        """


Forward = Callable[[Any, list[Tensor], Tensor, Tensor, Tensor], Tensor]
"""(module, its parameters, x [T,D], ids [T,K], weights [T,K]) → y [T,D] in memory of its own"""


class ModuleLayer:
    """A module of a host framework, which `epmoe::module` runs. Copies of the module do not copy it.

    Args:
        module: holds this object, and is not kept alive by it.
        forward: what the operator runs.
        name: the number follows from it, so that graphs that the framework keeps on disk find the layer in another
            process. A later layer of the same name takes its place. By default, the number is a new one.

    Attributes:
        released: whether `release` was called. Graphs that look at it do not match any more then.
    """

    def __init__(self, module: object, forward: Forward, name: str | None = None) -> None:
        self.module, self.forward, self.released = weakref.ref(module), forward, False
        number = None if name is None else int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
        if number is not None:
            _layers.pop(number, None)
        self.layer_id = register(self, number)

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
        """`forward` of the module, as an operator."""
        y: Tensor = torch.ops.epmoe.module(x_TD, ids_TK, weights_TK, parameters, self.layer_id)
        return y

    def release(self) -> None:
        """Take the number away: programs that name it raise RuntimeError."""
        self.released = True
        if _layers.get(self.layer_id) is self:
            del _layers[self.layer_id]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


_layers: WeakValueDictionary[int, Layer | ModuleLayer] = WeakValueDictionary()
# A graph with a number of 0 or 1 would serve no other number, where torch makes one graph for several layers. Numbers
# are not used again: a CUDA graph that was recorded with a number holds the windows of its layer.
_new_numbers = itertools.count(2)
_library = torch.library.Library("epmoe", "FRAGMENT")
_library.define(
    "moe(Tensor x, Tensor routing, Tensor? weights, Tensor? num_tokens, SymInt num_rows, SymInt? padded_tokens, "
    "Tensor(a!) order, SymInt layer_id) -> Tensor"
)
_library.define("module(Tensor x, Tensor ids, Tensor weights, Tensor[] parameters, SymInt layer_id) -> Tensor")


def register(layer: Layer | ModuleLayer, layer_id: int | None = None) -> int:
    """Give a layer a number, by which an operator finds it.

    Args:
        layer: is not kept alive.
        layer_id: by default the next number that no layer has had.

    Returns:
        The number.

    Raises:
        TypeError: `layer_id` is no int.
        ValueError: `layer_id` is negative, or the number of another layer of this process.
    """
    if layer_id is None:
        layer_id = next(n for n in _new_numbers if n not in _layers)
    if isinstance(layer_id, bool) or not isinstance(layer_id, int):
        raise TypeError(f"`layer_id` must be an int, got {describe(layer_id)}")
    if layer_id < 0 or layer_id in _layers:
        why = "at least 0" if layer_id < 0 else "the number of no other layer of this process"
        raise ValueError(f"`layer_id` must be {why}, got {layer_id}")
    _layers[layer_id] = layer
    return layer_id


def moe(
    layer: Layer,
    x_TD: Tensor,
    routing: Tensor,
    weights_TK: Tensor | None,
    num_tokens: int | Tensor | None,
    padded_tokens: int | None = None,
) -> Tensor:
    """`layer.run` as an operator, with its arguments: what a layer calls where `torch.compiler.is_compiling()`."""
    scalar, num_rows = token_count(num_tokens, x_TD.shape[0], x_TD.device)
    inputs = x_TD, routing, weights_TK, scalar, num_rows, padded_tokens
    return torch.ops.epmoe.moe(*inputs, layer.order, layer.layer_id)


def _moe(
    x: Tensor,
    routing: Tensor,
    weights: Tensor | None,
    num_tokens: Tensor | None,
    num_rows: int,
    padded_tokens: int | None,
    order: Tensor,
    layer_id: int,
) -> Tensor:
    rows = None if num_rows == x.shape[0] else num_rows
    num_real = rows if num_tokens is None else num_tokens
    return cast(Layer, _find(layer_id)).run(x, routing, weights, num_real, padded_tokens)


def _module(x: Tensor, ids: Tensor, weights: Tensor, parameters: list[Tensor], layer_id: int) -> Tensor:
    layer = cast(ModuleLayer, _find(layer_id))
    return layer.forward(layer.module(), parameters, x, ids, weights)


def _find(layer_id: int) -> Layer | ModuleLayer:
    layer = _layers.get(layer_id)
    if layer is None:
        raise RuntimeError(
            f"no layer of this process has layer_id={layer_id}: a compiled or exported program runs only while a layer "
            "of that number exists"
        )
    return layer


for _name, _implementation in (("moe", _moe), ("module", _module)):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"epmoe::{_name}", lambda x, *arguments: x.new_empty(x.shape), lib=_library)
