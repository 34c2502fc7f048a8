"""A whole layer as one operator, `epmoe::moe`, which torch.compile and torch.export keep and do not look into.

    x [T,D], routing, order ─ epmoe::moe(layer_id) ─▶ y [T,D]

The operator finds its layer by a number. Placement and windows belong to the layer, so a graph holds no memory of an
exchange. y is memory of its own: inductor writes into outputs of operators that nobody reads any longer, and memory of
a window may not be written.

`order` is the same tensor for all layers of an `ExpertParallel`. The operator says that it changes `order`, although it
does not touch it. Every pass of a compiler therefore keeps the rounds of one exchange, and keeps their order, which
must be the same on all ranks. The window cannot take its place: functionalisation copies what an operator changes, and
writes it back later, over what other ranks have sent meanwhile.

`MoELayer` owns its weights and has an `order`. A module of a host framework, `ModuleLayer`, has no `order`: the model
reads each y, and each layer reads the output of the layer before. Where a framework moves or collects weights, they are
arguments of the operator, `parameters`, so that compilers know of it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol
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
    def order(self) -> Tensor | None:
        """`ExpertParallel.order`, in a module as a buffer: other changed inputs keep a graph out of CUDA graphs."""

    @property
    def run(self) -> Callable[..., Tensor]:
        """The layer itself. It raises what the exchange has reported.

        Args, by position:
            x_TD: tokens [T, D].
            routing: logits [T, E] if `weights_TK` is None, otherwise ids [T, K].
            weights_TK: [T, K], or None.
            num_tokens: real tokens: an int, an int32 scalar tensor, or None for T.
            padded_tokens: as of `ExpertParallel.dispatch`.
            *parameters: as `moe` was given them.

        Returns:
            y [T, D], contiguous, in the dtype of x and in memory of its own.
        """


Forward = Callable[[Any, list[Tensor], Tensor, Tensor, Tensor], Tensor]
"""(module, its parameters, x [T,D], ids [T,K], weights [T,K]) → y [T,D] in memory of its own"""


class ModuleLayer:
    """A module of a host framework as a layer. Copies of the module do not copy it.

    Args:
        module: holds this object, and is not kept alive by it.
        forward: what the operator runs.
        name: the number follows from it, so that graphs that the framework keeps on disk find the layer in another
            process. A later layer of the same name takes its place. By default, the number is a new one.

    Attributes:
        released: whether `release` was called. Graphs that look at it do not match any more then.
    """

    order = None

    def __init__(self, module: object, forward: Forward, name: str | None = None) -> None:
        self._module, self._forward, self.released = weakref.ref(module), forward, False
        number = None if name is None else int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
        if number is not None:
            _layers.pop(number, None)
        self.layer_id = register(self, number)

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, num_tokens: object, padded_tokens: object, *parameters: Tensor
    ) -> Tensor:
        """`forward` of the module."""
        return self._forward(self._module(), list(parameters), x, ids, weights)

    def release(self) -> None:
        """Take the number away: programs that name it raise RuntimeError."""
        self.released = True
        _layers.pop(self.layer_id, None)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
# A graph with a number of 0 or 1 would serve no other number, where torch makes one graph for several layers. Numbers
# are not used again: a CUDA graph that was recorded with a number holds the windows of its layer.
_new_numbers = itertools.count(2)
_library = torch.library.Library("epmoe", "FRAGMENT")
_library.define(
    "moe(Tensor x, Tensor routing, Tensor? weights, Tensor? num_tokens, SymInt num_rows, SymInt? padded_tokens, "
    "Tensor[] parameters, Tensor(a!)? order, SymInt layer_id) -> Tensor"
)


def register(layer: Layer, layer_id: int | None = None) -> int:
    """Give a layer a number, by which `epmoe::moe` finds it.

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
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """`layer.run` as an operator, with its arguments: what a layer calls where `torch.compiler.is_compiling()`."""
    scalar, num_rows = token_count(num_tokens, x_TD.shape[0], x_TD.device)
    inputs = x_TD, routing, weights_TK, scalar, num_rows, padded_tokens, list(parameters)
    return torch.ops.epmoe.moe(*inputs, layer.order, layer.layer_id)


def _moe(
    x: Tensor,
    routing: Tensor,
    weights: Tensor | None,
    num_tokens: Tensor | None,
    num_rows: int,
    padded_tokens: int | None,
    parameters: list[Tensor],
    order: Tensor | None,
    layer_id: int,
) -> Tensor:
    layer = _layers.get(layer_id)
    if layer is None:
        raise RuntimeError(
            f"no layer of this process has layer_id={layer_id}: a compiled or exported program runs only while a layer "
            "of that number exists"
        )
    rows = None if num_rows == x.shape[0] else num_rows
    return layer.run(x, routing, weights, rows if num_tokens is None else num_tokens, padded_tokens, *parameters)


_library.impl("moe", _moe, "CompositeExplicitAutograd")
torch.library.register_fake("epmoe::moe", lambda x, *arguments: x.new_empty(x.shape), lib=_library)
