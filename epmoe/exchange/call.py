"""A call of dispatch as one value."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from epmoe.exchange.handles import Layout


class Call(NamedTuple):
    """The arguments of `ExpertParallel.dispatch`, unchecked; `Templates.of` checks them."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None = None
    num_tokens: int | Tensor | None = None
    layout: Layout = "expert"
    apply_router_weight_on_input: bool = False
    padded_tokens: int | None = None
    tag: int = 0
