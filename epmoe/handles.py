"""What the calls of a round hand on: to the caller, and from one call to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Layout = Literal["expert", "rank"]


class _Fields:
    """Named tensors, some of which a layout has not. Rounds of one form share them: the buffers never move."""

    def __init__(self, attributes: dict[str, Any]):
        self.__dict__ = attributes

    @staticmethod
    def attributes(owner: str, layout: str, fields: dict[str, Tensor | None]) -> dict[str, Any]:
        """What an object with these fields is made of; None is a field that it has not."""
        present = {name: value for name, value in fields.items() if value is not None}
        return present | {"_owner": owner, "_layout": layout, "_names": tuple(fields)}

    def __getattr__(self, name: str) -> Tensor:
        if name in self.__dict__.get("_names", ()):
            raise AttributeError(f"`{self._owner}.{name}` does not exist with layout={self._layout!r} and this payload")
        raise AttributeError(name)


class Received(_Fields):
    """What came, by source: counts int32 [R]; with layout="rank" also x [R,M,D], ids int32 [R,M,K] (physical),
    weights fp32 [R,M,K] and, with an fp8 payload, scales fp32 [R,M,D/128].

    Source r fills slots [0, counts[r]) in its own token order; the rest carry the sentinel and 0, and their x is never
    read. In a used slot, pairs of other ranks keep their ids; pairs without an expert carry the sentinel and 0.
    """


@dataclass(slots=True)
class Form:
    """What all rounds share whose calls agree in D, K, dtypes, layout and where the weights apply."""

    steps: list[int]  # words[bisect_left(steps, T)] are those for T tokens
    words: list[Tensor]  # `Exchange.words_for`
    attributes: dict[str, Any]  # of `Dispatched`
    like: Tensor  # empty, of y's dtype and device: to make y from it costs the host less than from those


@dataclass(slots=True, eq=False)
class Sent:
    """A round whose tokens are on their way, or about to leave: `ep.dispatch_recv` makes a `Dispatched` of it."""

    form: Form
    num_tokens: int
    epoch: int
    words: Tensor
    arguments: tuple[Any, ...]  # of the operator, for both halves
    awaits: ClassVar[tuple[str, ...]] = ("dispatch_recv",)


class Dispatched(_Fields):
    """One open round, valid until `combine` or `combine_send` is called.

    rows [N_cap, D], expert_offsets int32 [e+1], tokens_per_expert int32 [e] and, with an fp8 payload, scales fp32
    [N_cap, D/128] with layout="expert"; `recv` in both layouts. Rows past `expert_offsets[e]` must not be read.
    """

    recv: Received
    num_tokens: int
    epoch: int
    layout: Layout
    dtype: torch.dtype
    hidden_size: int
    awaits: tuple[str, ...] = ("combine", "combine_partial", "combine_send")  # the calls that may come next
    y: Tensor | None = None  # from combine_send to combine_recv

    def __init__(self, sent: Sent):
        super().__init__(sent.form.attributes.copy())
        self.sent, self.num_tokens, self.epoch = sent, sent.num_tokens, sent.epoch
