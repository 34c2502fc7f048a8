"""What layers have chosen: for auxiliary losses, updates of biases, and replays of a rollout's routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Routes(NamedTuple):
    """What a call of a layer has chosen."""

    ids: Tensor
    """int32 or int64 [T, K], logical experts; padding has E. A call with gradients has −1 where the weight is 0."""
    weights: Tensor
    """fp32 [T, K], with gradients in a call with gradients"""
    logits: Tensor | None
    """[T, E] in the dtype of the router, with gradients in a call with gradients; None where the routing was given"""
    tokens_per_expert: Tensor | None
    """int32 [e], rows that this rank's experts have got from all ranks; None in a call without gradients, whose memory
    the next round overwrites"""


@contextmanager
def recording(module: nn.Module) -> Iterator[dict[str, list[Routes]]]:
    """Record the calls of a model's layers within it: by the name of the layer, the `Routes` of each call.

    The tensors are those of the calls. A CUDA graph that is captured within it writes into them in each replay, also
    afterwards. Compiled layers without gradients are recorded, too.

    Args:
        module: a model, or a layer, whose name is then "".

    Yields:
        The record.
    """
    layers: dict[str, Any] = {name: each for name, each in module.named_modules() if hasattr(each, "recorder")}
    record: dict[str, list[Routes]] = {name: [] for name in layers}
    before = {name: layer.recorder for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.recorder = record[name].append
    try:
        yield record
    finally:
        for name, layer in layers.items():
            layer.recorder = before[name]
