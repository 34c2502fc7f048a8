"""Layers as operators, which torch.compile and torch.export keep as they are.

    a `MoELayer`         x [T,D], routing, order ─ epmoe::moe(layer_id) ─▶ y [T,D]
    a host's module      x [T,D], ids, weights, parameters ─ epmoe::module(layer_id) ─▶ y [T,D]

An operator finds its layer by a number. Placement and windows belong to the layer, so a graph holds
no memory of an exchange. An operator returns its output y in new memory, never in a window: the
compiler inductor reuses the memory of outputs that are read no more, and would write into the
window.

Rounds must run in the same order on all ranks, and a compiler must neither drop nor reorder them.
For that all layers of an `ExpertParallel` share one tensor, `order`. The schema of `epmoe::moe`
says that the operator changes `order`, although it does not touch it. A compiler therefore keeps
the operators and their order. The window cannot serve in place of `order`: functionalisation copies
a tensor that an operator changes and writes the copy back later, over rows that other ranks have
sent meanwhile.

The schema of `epmoe::module` says that it changes nothing, so that graphs with it can become CUDA
graphs. A compiler keeps each round since the framework's model reads its y, and keeps their order
since each layer reads the output of the layer before. The module's parameters are arguments of the
operator: a compiler must know when they move, and FSDP collects them anew in each pass.
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
    """Objects by number, so that the operators of a graph find them. It keeps no object alive.

    New numbers begin at 2. torch can make one graph for several values of a number, but gives 0 and
    1 graphs of their own. A number is not used again after its object is gone, since a CUDA graph
    that was recorded with the number still uses the windows of that object.

    `gone` is the text of the error for a number without an object, with `{}` for the number.
    """

    def __init__(self, gone: str) -> None:
        self._gone = gone
        self._objects: WeakValueDictionary[int, _Named] = WeakValueDictionary()
        self._new_numbers = itertools.count(2)

    def __contains__(self, number: int) -> bool:
        return number in self._objects

    def add(self, named: _Named, number: int | None = None) -> int:
        """Register an object under `number`, by default under a new number. Returns the number."""
        if number is None:
            number = next(n for n in self._new_numbers if n not in self._objects)
        self._objects[number] = named
        return number

    def find(self, number: int) -> _Named:
        """The object of a number. Raises RuntimeError if it is gone."""
        # A compiler may have made the number symbolic, as it does with attributes of modules under
        # FSDP2. `int` makes it a plain number, so that each object gets a graph of its own.
        number = int(number)
        named = self._objects.get(number)
        if named is None:
            raise RuntimeError(self._gone.format(number))
        return named

    def drop(self, number: int, named: _Named) -> None:
        """Forget an object, unless another one has its number by now."""
        if self._objects.get(number) is named:
            del self._objects[number]


class Layer(Protocol):
    """A layer that `epmoe::moe` can run."""

    layer_id: int
    """The number that `register` has returned for the layer."""
    order: Tensor
    """`ExpertParallel.order`. A module registers it as a buffer. A graph that changes an input
    which is no buffer could not become a CUDA graph.
    """

    def run(
        self,
        x_TD: Tensor,
        routing: Tensor,
        weights_TK: Tensor | None,
        num_tokens: int | Tensor | None,
        extra: Tensor | None = None,
    ) -> Tensor:
        """Run a round.

        The letters are `T` tokens, `D` the hidden size, `E` logical experts and `K` experts per
        token. Raises the errors that the exchange has reported.

        Args:
            x_TD: the tokens.
            routing: logits [T, E] if `weights_TK` is None, otherwise ids [T, K].
            weights_TK: the weights of the ids, or None.
            num_tokens: how many of the rows are tokens; None: all.
            extra: a further tensor [T, …] that the layer takes for each token, or None.

        Returns:
            The output y [T, D], contiguous, in the dtype of x and in memory of its own.
        """


Forward = Callable[[Any, list[Tensor], Tensor, Tensor, Tensor], Tensor]
"""A function (module, its parameters, x [T, D], ids [T, K], weights [T, K]) → y [T, D]. It returns
y in memory of its own.
"""


class ModuleLayer:
    """A module of a host framework, which the operator `epmoe::module` runs by calling `forward`.

    The module holds this object, and this object does not keep the module alive. A copy of the
    module has None in its place.

    With a `name`, the number of the layer is a hash of the name. Graphs that the framework has
    saved on disk then find the layer in another process. A later layer of the same name replaces
    this one.

    `released` becomes True by `release`. A compiled graph that has read it as False is not used any
    more then.
    """

    def __init__(self, module: object, forward: Forward, name: str | None = None) -> None:
        self.module = weakref.ref(module)
        self.forward = forward
        self.released = False
        number = None
        if name is not None:
            digest = blake2b(name.encode(), digest_size=7).digest()
            number = int.from_bytes(digest)
        self.layer_id = _layers.add(self, number)

    def __call__(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, parameters: Sequence[Tensor] = ()
    ) -> Tensor:
        y: Tensor = torch.ops.epmoe.module(x_TD, ids_TK, weights_TK, parameters, self.layer_id)
        return y

    def release(self) -> None:
        """Give the number up. Programs that contain it raise RuntimeError from now on."""
        self.released = True
        _layers.drop(self.layer_id, self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Pickling and copying call this: they get None in place of this object.
        return type(None), ()


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
    """Give a layer a number, by which the operator `epmoe::moe` finds it.

    Args:
        layer: the layer, which is not kept alive.
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
    """Run a layer by the operator `epmoe::moe`, with the arguments of `Layer.run`.

    Layers call it while a compiler traces them (`torch.compiler.is_compiling()`).
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
    # Turn the two arguments of the operator back into one: see `token_count`.
    tokens: int | Tensor | None = num_tokens
    if num_tokens is None and num_rows != x.shape[0]:
        tokens = num_rows
    layer: Layer = _layers.find(layer_id)
    return layer.run(x, routing, weights, tokens, extra)


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
