"""A whole layer as one operator, `epmoe::moe`, which torch.compile and torch.export keep and do not look into.

    x [T,D], routing, order ─ epmoe::moe(layer_id) ─▶ y [T,D]

The operator finds its layer by a number. Weights, placement and windows belong to the layer, so a graph holds none of
them and no memory of an exchange. y is memory of its own: inductor writes into outputs of operators that nobody reads
any longer, and memory of a window may not be written.

`order` is the same tensor for all layers of an `ExpertParallel`. The operator says that it changes `order`, although it
does not touch it. Every pass of a compiler therefore keeps the rounds of one exchange, and keeps their order, which
must be the same on all ranks. The window cannot take its place: functionalisation copies what an operator changes, and
writes it back later, over what other ranks have sent meanwhile.
"""

from __future__ import annotations

import itertools
from typing import Protocol
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


_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
_library = torch.library.Library("epmoe", "FRAGMENT")
_library.define(
    "moe(Tensor x, Tensor routing, Tensor? weights, Tensor? num_tokens, SymInt num_rows, SymInt? padded_tokens, "
    "Tensor(a!) order, SymInt layer_id) -> Tensor"
)


def register(layer: Layer, layer_id: int | None = None) -> int:
    """Give a layer a number, by which `epmoe::moe` finds it.

    Args:
        layer: is not kept alive.
        layer_id: by default the first number that is free.

    Returns:
        The number.

    Raises:
        TypeError: `layer_id` is no int.
        ValueError: `layer_id` is negative, or the number of another layer of this process.
    """
    if layer_id is None:
        # A graph with a number of 0 or 1 would serve no other number, where torch makes one graph for several layers.
        layer_id = next(n for n in itertools.count(2) if n not in _layers)
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
    layer = _layers.get(layer_id)
    if layer is None:
        raise RuntimeError(
            f"no layer of this process has layer_id={layer_id}: a compiled or exported program runs only while a layer "
            "of that number exists"
        )
    rows = None if num_rows == x.shape[0] else num_rows
    return layer.run(x, routing, weights, rows if num_tokens is None else num_tokens, padded_tokens)


_library.impl("moe", _moe, "CompositeExplicitAutograd")


@torch.library.register_fake("epmoe::moe", lib=_library)
def _(
    x: Tensor,
    routing: Tensor,
    weights: Tensor | None,
    num_tokens: Tensor | None,
    num_rows: int,
    padded_tokens: int | None,
    order: Tensor,
    layer_id: int,
) -> Tensor:
    return x.new_empty(x.shape)
