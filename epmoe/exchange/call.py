"""A call of dispatch as one value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from epmoe.exchange.extra import Extra
from epmoe.native.arguments import aligned_rows, contiguous_rows, token_count

Layout = Literal["expert", "rank"]
"""How rows arrive: expert by expert, or in one slab for each source rank."""


class Call(NamedTuple):
    """The arguments of `ExpertParallel.dispatch`, unchecked; `Templates.of` checks them."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None = None
    num_tokens: int | Tensor | None = None
    layout: Layout = "expert"
    weight_rows: bool = False  # `apply_router_weight_on_input`
    tag: int = 0
    aligned: bool = False
    # A tensor, or an `Extra` where its bytes already lie behind the rows of x.
    extra: Tensor | Extra | None = None

    def operands(self, T: int, device: torch.device) -> Operands:
        """What the operators of dispatch take of this call. Rows that are not contiguous, or of x
        not aligned, are copied.

        `T` is the number of rows of x, which the caller knows from `Templates.of`. Reading it from
        x again would cost 0.15 µs. Raises the errors of `token_count`.
        """
        # One slice costs the host less than reading five attributes.
        x, ids, weights, scales, num_tokens = self[:5]
        tokens = None
        rows = T
        if num_tokens is not None:
            tokens, rows = token_count(num_tokens, T, device)
        ids = contiguous_rows(ids)
        weights = contiguous_rows(weights)
        return new_operands((aligned_rows(x), ids, weights, scales, tokens, rows))


class Operands(NamedTuple):
    """The first arguments of the operators of dispatch. The window, the scratch and a descriptor
    follow.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None
    num_tokens: Tensor | None
    """how many tokens are real, a scalar on the device; None: `num_rows` is this number"""
    num_rows: int

    @property
    def brings_tokens(self) -> bool:
        """Whether the rank brings tokens to the round, as far as its host knows."""
        return self.num_tokens is not None or self.num_rows > 0


# These make a record from a tuple of all its fields. They take 0.2 µs, the constructors 0.6 µs.
new_call: Callable[[tuple[Any, ...]], Call] = partial(tuple.__new__, Call)
new_operands: Callable[[tuple[Any, ...]], Operands] = partial(tuple.__new__, Operands)
