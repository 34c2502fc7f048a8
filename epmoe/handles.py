"""The handles of a round: what each call returns to the caller and needs back for the next call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Layout = Literal["expert", "rank"]


class _Fields:
    """Named values, some of which exist in the other layout only: reading one of these raises AttributeError.

    All rounds of one `RoundTemplate` have the same values, since the buffers never move.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__ = attributes

    @staticmethod
    def attributes(
        owner: str, layout: Layout, present: Mapping[str, object], absent: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The `__dict__` of an object that callers know as `owner`; `absent` names what `layout` does not have."""
        return dict(present) | {"_owner": owner, "_layout": layout, "_absent": absent}

    def __getattr__(self, name: str) -> object:
        if name in self.__dict__.get("_absent", ()):
            raise AttributeError(f"`{self._owner}.{name}` does not exist with layout={self._layout!r}")
        raise AttributeError(name)


class Received(_Fields):
    """The rows that arrived, by source rank: `recv` of a `Dispatched`.

    Source r fills slots [0, counts[r]) of its slab in its own token order. In these slots a pair of another rank keeps
    its id, and a pair without an expert carries the sentinel and weight 0. All other slots carry the sentinel and
    weight 0, and their x must not be read.

    With layout="expert" only `counts` exists; reading another attribute raises AttributeError.

    Attributes:
        counts: int32 [R], rows from each source.
        x: [R, M, D] in the dtype of the call's x, or float8_e4m3fn with an fp8 payload.
        scales: fp32 [R, M, ⌈D/128⌉] with an fp8 payload, otherwise None.
        ids: int32 [R, M, K], physical experts.
        weights: fp32 [R, M, K].
    """

    counts: Tensor
    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor


@dataclass(slots=True)
class RoundTemplate:
    """What rounds share whose calls agree in D, K, dtypes, layout, and in where the weights apply."""

    steps: list[int]  # a call of T tokens takes descriptors[bisect_left(steps, T)]
    descriptors: list[Tensor]  # of `Exchange.descriptors_for`
    attributes: dict[str, Any]  # of `Dispatched`
    hidden_size: int  # D
    like: Tensor  # empty, in y's dtype and device: `new_empty` of it costs the host less than `torch.empty`


@dataclass(slots=True, eq=False)
class Sent:
    """A round whose tokens are under way: what `ep.dispatch_send` returns, for `ep.dispatch_recv`.

    Attributes:
        num_tokens: T of this rank's call, padding included.
        epoch: the round's number, from 1.
    """

    template: RoundTemplate
    num_tokens: int
    epoch: int
    descriptor: Tensor  # int64, host: `DESCRIPTOR` in epmoe/exchange.py
    arguments: tuple[Any, ...]  # of the operators of dispatch; empty once the tokens are received

    def new_y(self) -> Tensor:
        """The round's y [T, D], not yet written."""
        return self.template.like.new_empty(self.num_tokens, self.template.hidden_size)


class Dispatched(_Fields):
    """An open round, whose rows this rank's experts must compute: what `ep.dispatch` and `ep.dispatch_recv` return.

    All tensors are views of the exchange's buffers. They are valid until `combine`, `combine_partial` or `combine_send`
    is called. With layout="rank" the first four do not exist: reading one raises AttributeError.

    Attributes:
        rows: [N_cap, D], expert by expert, in the dtype of the call's x, or float8_e4m3fn with an fp8 payload. N_cap is
            `capacity.max_expert_rows` or the worst case. Rows past `expert_offsets[e]` must not be read.
        scales: fp32 [N_cap, ⌈D/128⌉] with an fp8 payload, otherwise None.
        expert_offsets: int32 [e + 1], the first row of each expert's segment, gaps of `capacity.alignment` included.
        tokens_per_expert: int32 [e], rows of each segment without its gap.
        recv: what arrived from each source rank.
        num_tokens: T of this rank's call, padding included.
        epoch: the round's number, from 1.
        layout: "expert" or "rank".
        dtype: of the call's x, of the rows that combine takes, and of y.
        hidden_size: D of the call.
    """

    rows: Tensor
    scales: Tensor | None
    expert_offsets: Tensor
    tokens_per_expert: Tensor
    recv: Received
    num_tokens: int
    epoch: int
    layout: Layout
    dtype: torch.dtype
    hidden_size: int
    sent: Sent

    def __init__(self, sent: Sent) -> None:
        """The round that `sent` opened."""
        super().__init__(sent.template.attributes.copy())
        self.sent, self.num_tokens, self.epoch = sent, sent.num_tokens, sent.epoch
