"""The handles of a round: what each call returns to the caller and needs back for the next call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, SupportsIndex

import torch
from torch import Tensor

from epmoe.exchange.extra import Extra
from epmoe.native.arguments import describe_fields

Layout = Literal["expert", "rank"]


class HoldsWindows:
    """What cannot leave its process: pickling and copying, also by deepcopy, raise TypeError."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it holds windows of this process; each process makes "
            "its own ExpertParallel. Save a layer by its `state_dict()`"
        )


class _Fields(HoldsWindows):
    """Named values, some of which one layout lacks: reading one of these raises AttributeError.

    All rounds of one `RoundTemplate` have the same values, since the buffers never move.
    """

    _name: ClassVar[str]  # as callers know it
    _lacking: ClassVar[Layout]  # the layout that lacks some of the annotated attributes
    _extra: Callable[[], Tensor] | None

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.__dict__ = attributes

    @property
    def extra(self) -> Tensor | None:
        """[…, *shape], for each row the `extra` of its token; None in rounds without. Up to 12 bytes a token it is a
        view, as valid as the rows; above, each look makes a copy. What it holds where no token is, is undefined, as in
        the rows. Raises AttributeError with the other layout."""
        read: Callable[[], Tensor] | None = self._extra
        return None if read is None else read()

    def __getattr__(self, name: str) -> object:
        if name in type(self).__annotations__ or name in ("extra", "_extra"):
            name = name.removeprefix("_")
            raise AttributeError(f"`{self._name}.{name}` does not exist with layout={self._lacking!r}")
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
        extra: [R, M, …] as the sources gave it, or None.
    """

    _name = "recv"
    _lacking = "expert"
    counts: Tensor
    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor

    def __repr__(self) -> str:
        return describe_fields(self, {name: value for name, value in self.__dict__.items() if name != "_extra"})


@dataclass(slots=True)
class RoundTemplate:
    """What rounds share whose calls agree in D, K, dtypes, layout, and in where the weights apply."""

    shape: tuple[Any, ...]  # D, K, dtypes of x, ids and weights, layout, where weights apply, whether aligned, `extra`
    descriptor: Tensor  # of `Descriptors.of`
    attributes: dict[str, Any]  # of `Dispatched`; `_rounds`, a weak reference, and `_rank` serve `repr`
    small_alignment_tokens: int  # of the memory plan
    alignment: int  # of the round, where the call brings more tokens
    small_alignment: int  # and where it brings at most so many, whatever the other ranks bring
    hidden_size: int  # D
    rows_per_token: float  # rows of an expert for each token of a rank, on average: R · K / P
    like: Tensor  # a y [0, D]: `new_empty` of it costs the host less than `torch.empty`, and an abort needs some y
    extra: Extra | None = None  # what travels behind each row


@dataclass(slots=True, eq=False, repr=False)
class Sent(HoldsWindows):
    """A round whose tokens are under way: what `ep.dispatch_send` returns, for `ep.dispatch_recv`.

    Attributes:
        num_tokens: T of this rank's call, padding included.
        epoch: the round's number, from 1.
    """

    template: RoundTemplate
    num_tokens: int
    epoch: int
    descriptor: Tensor | None  # int64, host: see descriptors.py; None over several nodes
    arguments: tuple[Any, ...]  # of the operators of dispatch; empty once the tokens are received

    def __repr__(self) -> str:
        return describe_fields(self, {}, self.summary())

    def summary(self) -> str:
        attributes = self.template.attributes
        rounds = attributes["_rounds"]()
        state = f"round {self.epoch} released" if rounds is None else rounds.describe(self.epoch)
        shape = f"T={self.num_tokens}, D={self.template.hidden_size} {str(attributes['dtype']).removeprefix('torch.')}"
        return f"rank {attributes['_rank']}, {state}, {shape}, layout={attributes['layout']!r}"


class Dispatched(_Fields):
    """An open round, whose rows this rank's experts must compute: what `ep.dispatch` and `ep.dispatch_recv` return.

    All tensors are views of the exchange's buffers. They are valid until `combine`, `combine_partial` or `combine_send`
    is called. With layout="rank" the first five do not exist: reading one raises AttributeError.

    Attributes:
        rows: [N_cap, D], expert by expert, in the dtype of the call's x, or float8_e4m3fn with an fp8 payload. N_cap is
            `capacity.max_expert_rows` or the worst case, rounded up to the alignment. Rows past `expert_offsets[e]`
            must not be read; rows of gaps are undefined, or zeros with `capacity.gap_rows: zero`.
        scales: fp32 [N_cap, ⌈D/128⌉] with an fp8 payload, otherwise None.
        extra: [N_cap, …], for each row the `extra` of its token, in rounds with one, otherwise None. Rows and scales
            then have gaps between them, of which it is a view up to 12 bytes a token.
        expert_offsets: int32 [e + 1], the first row of each expert's segment, gaps included.
        tokens_per_expert: int32 [e], rows of each segment without its gap.
        alignment: in rows: all segments start at its multiples; 1 where there are no gaps. It may be smaller where this
            call brings few tokens.
        recv: what arrived from each source rank.
        num_tokens: T of this rank's call, padding included.
        epoch: the round's number, from 1.
        layout: "expert" or "rank".
        dtype: the dtype of y and of the rows that combine takes: that of the call's x, or the config's if x is fp8.
        hidden_size: D of the call.
    """

    _name = "dispatched"
    _lacking = "rank"
    rows: Tensor
    scales: Tensor | None
    expert_offsets: Tensor
    tokens_per_expert: Tensor
    recv: Received
    num_tokens: int
    epoch: int
    alignment: int
    layout: Layout
    dtype: torch.dtype
    hidden_size: int
    sent: Sent

    def __init__(self, sent: Sent) -> None:
        """The round that `sent` opened."""
        template = sent.template
        tokens = sent.num_tokens
        self.__dict__ = template.attributes.copy()
        self.sent = sent
        self.num_tokens = tokens
        self.epoch = sent.epoch
        self.alignment = template.small_alignment if tokens <= template.small_alignment_tokens else template.alignment

    @property
    def segments(self) -> dict[str, Any]:
        """What `GroupedExperts` take of the round besides rows, offsets and scales: `experts(…, **d.segments)`."""
        return {
            "tokens_per_expert": self.tokens_per_expert,
            "alignment": self.alignment,
            "rows_per_expert": self.num_tokens * self.sent.template.rows_per_token,
        }

    def __repr__(self) -> str:
        names = ("rows", "scales", "expert_offsets", "tokens_per_expert") if self.layout == "expert" else ("recv",)
        return describe_fields(self, {name: getattr(self, name) for name in names}, self.sent.summary())
