"""Layers as operators, which torch.compile and torch.export keep and do not look into.

    a `MoELayer`         x [T,D], routing, order ─ epmoe::moe(layer_id) ─▶ y [T,D]
    a host's module      x [T,D], ids, weights, parameters ─ epmoe::module(layer_id) ─▶ y [T,D]

An operator finds its layer by a number. Placement and windows belong to the layer, so a graph holds
no memory of an exchange. An operator returns y in new memory: inductor writes into outputs that
nobody reads any longer, and memory of a window may not be written.

`order` is the same tensor for all layers of an `ExpertParallel`. `epmoe::moe` says that it changes
`order`, although it does not touch it. Every pass of a compiler therefore keeps the rounds of one
exchange, and keeps their order, which must be the same on all ranks. The window cannot take its
place: functionalisation copies what an operator changes, and writes it back later, over what other
ranks have sent meanwhile.

`epmoe::module` changes nothing, so that graphs with it become CUDA graphs. A compiler keeps each
round because the framework's model reads its y, and keeps their order because each layer reads the
output of the layer before. The module's parameters are arguments: compilers must know when they
move, and FSDP collects them anew in each pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from epmoe.native.arguments import describe, token_count

_Named = TypeVar("_Named")


class Registry(Generic[_Named]):
    """Objects under numbers, by which operators of graphs find them. It keeps no object alive.

    A graph with a number of 0 or 1 would serve no other number, where torch makes one graph for
    several. New numbers therefore begin at 2. They are not used again: a CUDA graph that was
    recorded with one holds the windows behind it. `find` raises `gone`, with the number for `{}`.
    """

    def __init__(self, gone: str) -> None:
        self._gone = gone
        self._objects: WeakValueDictionary[int, _Named] = WeakValueDictionary()
        self._new_numbers = itertools.count(2)

    def __contains__(self, number: int) -> bool:
        return number in self._objects

    def add(self, named: _Named, number: int | None = None) -> int:
        """Put an object under `number`, by default a new one, and return the number."""
        if number is None:
            number = next(n for n in self._new_numbers if n not in self._objects)
        self._objects[number] = named
        return number

    def find(self, number: int) -> _Named:
        """The object under a number. Raises RuntimeError once it is gone.

        A compiler may have made the number symbolic, as it does with attributes of modules under
        FSDP2. `int` then makes one graph for each object.
        """
        number = int(number)
        named = self._objects.get(number)
        if named is None:
            raise RuntimeError(self._gone.format(number))
        return named

    def drop(self, number: int, named: _Named) -> None:
        if self._objects.get(number) is named:
            del self._objects[number]


class Layer(Protocol):
    """A layer that `epmoe::moe` can run."""

    layer_id: int
    """The number that `register` has returned."""
    order: Tensor
    """`ExpertParallel.order`. A module has it as a buffer: other changed inputs keep a graph out of
    CUDA graphs.
    """

    def run(
        self,
        x_TD: Tensor,
        routing: Tensor,
        weights_TK: Tensor | None,
        num_tokens: int | Tensor | None,
        extra: Tensor | None = None,
    ) -> Tensor:
        """Run a round for tokens [T, D]. `routing` are logits [T, E] if `weights_TK` is None,
        otherwise ids [T, K], and `extra` is what else the layer takes for each token. Returns y [T,
        D], contiguous, in the dtype of x and in memory of its own. Raises what the exchange has
        reported.
        """


Forward = Callable[[Any, list[Tensor], Tensor, Tensor, Tensor], Tensor]
"""(module, its parameters, x [T,D], ids [T,K], weights [T,K]) → y [T,D] in memory of its own"""


class ModuleLayer:
    """A module of a host framework, which `epmoe::module` runs as `forward`. Copies of the module
    do not copy it.

    The module holds this object, and is not kept alive by it. The number follows from `name`, if
    given, so that graphs that the framework keeps on disk find the layer in another process. A
    later layer of the same name takes its place. Graphs that look at `released` do not match any
    more after `release`.
    """

    def __init__(self, module: object, forward: Forward, name: str | None = None) -> None:
        self.module = weakref.ref(module)
        self.forward = forward
        self.released = False
        number = (
            None if name is None else int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
        )
        self.layer_id = _layers.add(self, number)

    def __call__(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, parameters: Sequence[Tensor] = ()
    ) -> Tensor:
        y: Tensor = torch.ops.epmoe.module(x_TD, ids_TK, weights_TK, parameters, self.layer_id)
        return y

    def release(self) -> None:
        """Take the number away: programs that name it raise RuntimeError."""
        self.released = True
        _layers.drop(self.layer_id, self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copies of the module have None in its place


_layers = Registry[Any](
    "no layer of this process has layer_id={}: a compiled or exported program runs only while a "
    "layer of that number exists"
)
_library = torch.library.Library("epmoe", "FRAGMENT")
_library.define(
    "moe(Tensor x, Tensor routing, Tensor? weights, Tensor? num_tokens, SymInt num_rows, "
    "Tensor(a!) order, SymInt layer_id, Tensor? extra=None) -> Tensor"
)
_library.define(
    "module(Tensor x, Tensor ids, Tensor weights, Tensor[] parameters, SymInt layer_id) -> Tensor"
)


def register(layer: Layer, layer_id: int | None = None) -> int:
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
    if layer_id is not None:
        if isinstance(layer_id, bool) or not isinstance(layer_id, int):
            raise TypeError(f"`layer_id` must be an int, got {describe(layer_id)}")
        if layer_id < 0 or layer_id in _layers:
            why = "at least 0" if layer_id < 0 else "the number of no other layer of this process"
            raise ValueError(f"`layer_id` must be {why}, got {layer_id}")
    return _layers.add(layer, layer_id)


def moe(
    layer: Layer,
    x_TD: Tensor,
    routing: Tensor,
    weights_TK: Tensor | None,
    num_tokens: int | Tensor | None,
    extra: Tensor | None = None,
) -> Tensor:
    """Run a layer as an operator, with the arguments of `run`. A layer calls it if
    `torch.compiler.is_compiling()`.
    """
    scalar, num_rows = token_count(num_tokens, x_TD.shape[0], x_TD.device)
    return torch.ops.epmoe.moe(
        x_TD, routing, weights_TK, scalar, num_rows, layer.order, layer.layer_id, extra
    )


def _moe(
    x: Tensor,
    routing: Tensor,
    weights: Tensor | None,
    num_tokens: Tensor | None,
    num_rows: int,
    order: Tensor,
    layer_id: int,
    extra: Tensor | None = None,
) -> Tensor:
    """The operator `epmoe::moe`: find the layer, and run it."""
    rows = None if num_rows == x.shape[0] else num_rows
    layer: Layer = _layers.find(layer_id)
    return layer.run(x, routing, weights, rows if num_tokens is None else num_tokens, extra)


def _module(
    x: Tensor, ids: Tensor, weights: Tensor, parameters: list[Tensor], layer_id: int
) -> Tensor:
    """The operator `epmoe::module`: find the layer, and run its module."""
    layer: ModuleLayer = _layers.find(layer_id)
    return layer.forward(layer.module(), parameters, x, ids, weights)


for _name, _implementation in (("moe", _moe), ("module", _module)):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"epmoe::{_name}", lambda x, *arguments, **options: x.new_empty(x.shape), lib=_library
    )
