"""The handles of a round: what each call returns to the caller and needs back for the next call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, SupportsIndex
from weakref import ReferenceType

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.exchange.extra import Extra
from epmoe.native.arguments import describe_fields

Layout = Literal["expert", "rank"]


class HoldsWindows:
    """What cannot leave its process: pickling and copying, also by deepcopy, raise TypeError."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it holds windows of this process; "
            "each process makes its own ExpertParallel. Save a layer by its `state_dict()`"
        )


class RoundShape(NamedTuple):
    """The shape that calls of a round share on all ranks, besides the tag. Dtypes of ids and
    weights may differ.
    """

    hidden_size: int
    """D"""
    top_k: int
    """K"""
    dtype: torch.dtype
    """of x"""
    ids_dtype: torch.dtype = torch.int32
    weights_dtype: torch.dtype = torch.float32
    layout: Layout = "expert"
    weight_rows: bool = False
    """`apply_router_weight_on_input`"""
    aligned: bool = False
    extra: Extra | None = None
    """dtype and shape of what travels behind each row"""

    @classmethod
    def of(cls, config: EPConfig, dtype: torch.dtype | None = None) -> RoundShape:
        """The shape of a round with the config's D and K, and x in `dtype`, by default the
        config's.
        """
        model = config.model
        return cls(model.hidden_size, model.num_experts_per_tok, dtype or model.torch_dtype)


class _OfLayout(HoldsWindows):
    """A value of a round that only one layout has. Reading it in the other layout raises
    AttributeError.
    """

    __slots__ = ("_extra",)

    _name: ClassVar[str]  # as callers know it
    _lacking: ClassVar[Layout]  # the layout that has only some
    _extra: Callable[[], Tensor] | None

    @property
    def extra(self) -> Tensor | None:
        """[…, *shape], for each row the `extra` of its token; None in rounds without. Up to 12
        bytes a token it is a view, as valid as the rows; above, each look makes a copy. What it
        holds where no token is, is undefined, as in the rows. Raises AttributeError with the other
        layout.
        """
        return None if self._extra is None else self._extra()

    def __getattr__(self, name: str) -> object:
        # Python asks here only where the slot of the name is empty, or where there is none.
        is_value = name in type(self).__slots__ or name in ("extra", "_extra")
        if not is_value:
            raise AttributeError(name)
        name = name.removeprefix("_")
        raise AttributeError(f"`{self._name}.{name}` does not exist with layout={self._lacking!r}")


class Slabs(NamedTuple):
    """Values of `Received` that exist with layout="rank" only."""

    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    read_extra: Callable[[], Tensor] | None
    """returns `Received.extra`; None in rounds without"""


class Received(_OfLayout):
    """The rows that arrived, by source rank: `recv` of a `Dispatched`.

    Source r fills slots [0, counts[r]) of its slab in its own token order. In these slots a pair of
    another rank keeps its id, and a pair without an expert carries the sentinel and weight 0. All
    other slots carry the sentinel and weight 0, and their x must not be read.

    With layout="expert" only `counts` exists; reading another attribute raises AttributeError.

    Attributes:
        counts: int32 [R], rows from each source. R and sources count seats here, with
            `topology.max_ranks`.
        x: [R, M, D] in the dtype of the call's x, or float8_e4m3fn with an fp8 payload.
        scales: fp32 [R, M, ⌈D/128⌉] with an fp8 payload, otherwise None.
        ids: int32 [R, M, K], physical experts.
        weights: fp32 [R, M, K].
        extra: [R, M, …] as the sources gave it, or None.
    """

    __slots__ = ("counts", "ids", "scales", "weights", "x")

    _name = "recv"
    _lacking = "expert"
    counts: Tensor
    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor

    def __init__(self, counts: Tensor, slabs: Slabs | None) -> None:
        """`slabs` is None with layout="expert"."""
        self.counts = counts
        # Without slabs these slots stay empty, and `_OfLayout.__getattr__` refuses to read them.
        if slabs is not None:
            self.x = slabs.x
            self.scales = slabs.scales
            self.ids = slabs.ids
            self.weights = slabs.weights
            self._extra = slabs.read_extra

    def __repr__(self) -> str:
        # With layout="expert" only the counts are there.
        names = ("counts", "x", "scales", "ids", "weights")
        fields = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return describe_fields(self, fields)


@dataclass(slots=True)
class ExpertMajor:
    """Values of `Dispatched` that exist with layout="expert" only."""

    rows: Tensor
    scales: Tensor | None
    expert_offsets: Tensor
    tokens_per_expert: Tensor
    read_extra: Callable[[], Tensor] | None
    """returns `Dispatched.extra`; None in rounds without"""


@dataclass(slots=True)
class RoundTemplate:
    """The views and settings that rounds of one shape share, since the buffers never move."""

    shape: RoundShape
    descriptor: Tensor | None  # of `Descriptors.of`; None over several nodes

    # Values of `Dispatched`.
    layout: Layout
    dtype: torch.dtype  # of y
    hidden_size: int
    recv: Received
    expert_major: ExpertMajor | None  # None with layout="rank"

    # Of a round: `small_alignment` where the call brings at most `small_alignment_tokens`, whatever
    # the other ranks bring, and otherwise `alignment`.
    small_alignment_tokens: int
    small_alignment: int
    alignment: int

    rows_per_token: float  # rows of an expert for each token of a rank, on average: R · K / P
    # A y [0, D]: `new_empty` of it costs the host less than `torch.empty`, and an abort needs
    # some y.
    like: Tensor
    rounds: ReferenceType[Any]  # the `RoundState` of the exchange that has made it
    rank: int


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
    descriptor: Tensor | None  # int64, host: the template's, or one of training
    arguments: tuple[Any, ...]  # of the operators of dispatch; empty once the tokens are received
    most_tokens: int | None  # of any rank, where `at_most` says it

    def __repr__(self) -> str:
        return describe_fields(self, {}, self.summary())

    def summary(self) -> str:
        """The text that `repr` gives of the round."""
        template = self.template
        D = template.shape.hidden_size
        layout = template.shape.layout
        dtype = str(template.like.dtype).removeprefix("torch.")
        # The exchange may be gone.
        rounds = template.rounds()
        state = f"round {self.epoch} released"
        if rounds is not None:
            state = rounds.describe(self.epoch)
        return (
            f"rank {template.rank}, {state}, T={self.num_tokens}, D={D} {dtype}, layout={layout!r}"
        )


class Dispatched(_OfLayout):
    """An open round, whose rows this rank's experts must compute: what `ep.dispatch` and
    `ep.dispatch_recv` return.

    All tensors are views of the exchange's buffers. They are valid until `combine`,
    `combine_partial` or `combine_send` is called. With layout="rank" the first five do not exist:
    reading one raises AttributeError.

    Attributes:
        rows: [N_cap, D], expert by expert, in the dtype of the call's x, or float8_e4m3fn with an
            fp8 payload. N_cap is `capacity.max_expert_rows` or the worst case, rounded up to the
            alignment; on a rank without experts it is 0. Rows past `expert_offsets[e]` must not be
            read; rows of gaps are undefined, or zeros with `capacity.gap_rows: zero`.
        scales: fp32 [N_cap, ⌈D/128⌉] with an fp8 payload, otherwise None.
        extra: [N_cap, …], for each row the `extra` of its token, in rounds with one, otherwise
            None. Rows and scales then have gaps between them, of which it is a view up to 12 bytes
            a token.
        expert_offsets: int32 [e + 1], the first row of each expert's segment, gaps included.
        tokens_per_expert: int32 [e], rows of each segment without its gap.
        alignment: in rows: all segments start at its multiples; 1 where there are no gaps. It may
            be smaller where this call brings few tokens.
        recv: what arrived from each source rank.
        num_tokens: T of this rank's call, padding included.
        epoch: the round's number, from 1.
        layout: "expert" or "rank".
        dtype: the dtype of y and of the rows that combine takes: that of the call's x, or the
            config's if x is fp8.
        hidden_size: D of the call.
    """

    __slots__ = (
        "alignment",
        "dtype",
        "epoch",
        "expert_offsets",
        "hidden_size",
        "layout",
        "num_tokens",
        "recv",
        "rows",
        "scales",
        "sent",
        "tokens_per_expert",
    )

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
        self.sent = sent
        self.num_tokens = tokens
        self.epoch = sent.epoch
        # Segments of few tokens have small gaps.
        if tokens <= template.small_alignment_tokens:
            self.alignment = template.small_alignment
        else:
            self.alignment = template.alignment
        self.layout = template.layout
        self.dtype = template.dtype
        self.hidden_size = template.hidden_size
        # Views of the buffers, which rounds of this shape share.
        self.recv = template.recv
        # With layout="rank" these slots stay empty, and `_OfLayout.__getattr__` refuses to read
        # them.
        expert_major = template.expert_major
        if expert_major is not None:
            self.rows = expert_major.rows
            self.scales = expert_major.scales
            self.expert_offsets = expert_major.expert_offsets
            self.tokens_per_expert = expert_major.tokens_per_expert
            self._extra = expert_major.read_extra

    @property
    def segments(self) -> dict[str, Any]:
        """What `GroupedExperts` take of the round besides rows, offsets and scales: `experts(…,
        **d.segments)`.
        """
        return {
            "tokens_per_expert": self.tokens_per_expert,
            "alignment": self.alignment,
            "rows_per_expert": self.rows_per_expert,
        }

    @property
    def rows_per_expert(self) -> float:
        """Rows of an expert on average, as far as this rank can tell."""
        # Another rank may bring more tokens than this one, where `at_most` says how many.
        sent = self.sent
        tokens = max(self.num_tokens, sent.most_tokens or 0)
        return tokens * sent.template.rows_per_token

    def __repr__(self) -> str:
        names = ["recv"]
        if self.layout == "expert":
            names = ["rows", "scales", "expert_offsets", "tokens_per_expert"]
        fields = {name: getattr(self, name) for name in names}
        return describe_fields(self, fields, self.sent.summary())
