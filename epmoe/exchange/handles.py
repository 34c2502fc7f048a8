"""The handles of a round: what each call returns to the caller and needs back for the next call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn, SupportsIndex, final
from weakref import ReferenceType

import torch
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.exchange.call import Layout, Operands
from epmoe.exchange.extra import Extra
from epmoe.native.arguments import describe_fields


class HoldsWindows:
    """A base class of objects that hold windows, and so cannot leave their process.

    Pickling and copying them, also by `copy.deepcopy`, raises TypeError.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it holds windows of this process; "
            "each process makes its own ExpertParallel. Save a layer by its `state_dict()`"
        )


class RoundShape(NamedTuple):
    """The properties of a call by which this rank finds the `RoundTemplate` of a round.

    In one round they must be equal on all ranks, except for the dtypes of ids and weights. The tag
    of the layer must be equal, too, but is not a part of the shape.
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
    """whether each expert's segment of rows begins at a multiple of the alignment"""
    extra: Extra | None = None
    """dtype and shape of what travels behind each row"""

    @classmethod
    def of(cls, config: EPConfig, dtype: torch.dtype | None = None) -> RoundShape:
        """The shape of a round with the hidden size and the experts per token of the config.

        x has `dtype`, by default the dtype of the config.
        """
        model = config.model
        return cls(
            hidden_size=model.hidden_size,
            top_k=model.num_experts_per_tok,
            dtype=dtype or model.torch_dtype,
        )


class Rows(NamedTuple):
    """The rows that a round has brought to the experts of this rank, expert by expert.

    In a round of serving they are views of the exchange's buffers, which all rounds of one shape
    share. A round of training puts them into memory of its own.
    """

    rows: Tensor
    """[N, D], in the format in which rows travel; in the dtype of x where `Rounds.out` returns them
    """
    expert_offsets: Tensor
    """int32 [e + 1], the first row of each expert, and behind the last expert the end of its rows
    """
    tokens_per_expert: Tensor
    """int32 [e]"""
    row_weights: Tensor | None = None
    """fp32 [N], 0 in gaps and past the last segment. Only forward rounds of training have them."""
    products: Tensor | None = None
    """fp32 [N], the dot product of each row with the expert's output for this row, if the kernel of
    a backward round has computed it on the way. It has then also multiplied `rows` by their
    weights.
    """
    scales: Tensor | None = None
    """fp32 [N, ⌈D/128⌉] with an fp8 payload, otherwise None"""
    read_extra: Callable[[], Tensor] | None = None
    """returns `Dispatched.extra`; None in rounds without"""


class Slabs(NamedTuple):
    """The rows that a round has brought to this rank, by source rank. `Received` describes them."""

    x: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    read_extra: Callable[[], Tensor] | None
    """returns `Received.extra`; None in rounds without"""


@final
class Missing:
    """Stands for the record of rows that rounds of another layout have. Reading a value of it
    raises AttributeError, which names the value and the layout.
    """

    def __init__(self, owner: str, layout: Layout) -> None:
        """`owner` is what users call the object that lacks the values."""
        self._owner = owner
        self._layout = layout

    def __getattr__(self, name: str) -> NoReturn:
        name = name.removeprefix("read_")
        raise AttributeError(f"`{self._owner}.{name}` does not exist with layout={self._layout!r}")


def _field(path: str) -> Any:
    """Make a property that reads the attribute at `path`, such as "sent.epoch".

    The property calls no function of Python, so reading it costs the host 0.05 µs.
    """
    return property(attrgetter(path))


def _extra(rows: Rows | Slabs | Missing) -> Tensor | None:
    """Do what `Dispatched.extra` does."""
    read_extra = rows.read_extra
    return None if read_extra is None else read_extra()


class Received(HoldsWindows):
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

    __slots__ = ("_slabs", "counts")

    counts: Tensor
    x: Tensor = _field("_slabs.x")
    scales: Tensor | None = _field("_slabs.scales")
    ids: Tensor = _field("_slabs.ids")
    weights: Tensor = _field("_slabs.weights")

    def __init__(self, counts: Tensor, slabs: Slabs | Missing) -> None:
        """Make the value of all rounds of a shape."""
        self.counts = counts
        self._slabs = slabs

    @property
    def extra(self) -> Tensor | None:
        """[R, M, …], for each row the `extra` of its token: see `Dispatched.extra`."""
        return _extra(self._slabs)

    def __repr__(self) -> str:
        # With layout="expert" only the counts are there.
        names = ["counts"]
        if isinstance(self._slabs, Slabs):
            names += ["x", "scales", "ids", "weights"]
        return describe_fields(self, {name: getattr(self, name) for name in names})


@dataclass(slots=True)
class RoundTemplate:
    """The views and settings that all rounds of one shape share.

    They can be shared since the buffers of an exchange never move. `Templates` makes one template
    for each shape.
    """

    shape: RoundShape
    descriptor: Tensor | None  # of `Descriptors.of`; None over several nodes

    # Values of `Dispatched`.
    dtype: torch.dtype  # of y
    recv: Received
    rows: Rows | Missing

    # A round takes `small_alignment` if this rank's call brings at most `small_alignment_tokens`
    # tokens, however many the other ranks bring. Otherwise it takes `alignment`.
    small_alignment_tokens: int
    small_alignment: int
    alignment: int

    rows_per_token: float  # rows of an expert for each token of a rank, on average: R · K / P
    # An empty y [0, D], of the dtype and device of the round's y. Its `new_empty` makes a y in less
    # time of the host than `torch.empty`, and an abort passes it as a y that nobody writes.
    like: Tensor
    rounds: ReferenceType[Any]  # the `RoundState` of the exchange that has made the template
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
    descriptor: Tensor | None  # int64 on the host: that of the template, or one of training
    operands: Operands  # deleted once the tokens are received, since they hold the caller's tensors
    # The largest number of tokens that any rank brings, if the caller has said it by `at_most`.
    most_tokens: int | None

    def __repr__(self) -> str:
        return describe_fields(self, {}, self.summary())

    def summary(self) -> str:
        """Describe the round in one line, for `repr`."""
        template = self.template
        D = template.shape.hidden_size
        layout = template.shape.layout
        dtype = str(template.dtype).removeprefix("torch.")
        # The template does not keep the exchange alive, so its rounds may be gone.
        rounds = template.rounds()
        state = f"round {self.epoch} released"
        if rounds is not None:
            state = rounds.describe(self.epoch)
        return (
            f"rank {template.rank}, {state}, T={self.num_tokens}, D={D} {dtype}, layout={layout!r}"
        )


class Dispatched(HoldsWindows):
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

    __slots__ = ("alignment", "arrived", "sent")

    alignment: int
    arrived: Rows | Missing
    sent: Sent
    rows: Tensor = _field("arrived.rows")
    scales: Tensor | None = _field("arrived.scales")
    expert_offsets: Tensor = _field("arrived.expert_offsets")
    tokens_per_expert: Tensor = _field("arrived.tokens_per_expert")
    recv: Received = _field("sent.template.recv")
    num_tokens: int = _field("sent.num_tokens")
    epoch: int = _field("sent.epoch")
    layout: Layout = _field("sent.template.shape.layout")
    dtype: torch.dtype = _field("sent.template.dtype")
    hidden_size: int = _field("sent.template.shape.hidden_size")

    def __init__(self, sent: Sent) -> None:
        """Make the handle of the round that `sent` has opened, once its tokens are received."""
        template = sent.template
        self.sent = sent
        self.arrived = template.rows
        # In a call of few tokens, the gaps between segments are small.
        if sent.num_tokens <= template.small_alignment_tokens:
            self.alignment = template.small_alignment
        else:
            self.alignment = template.alignment

    @property
    def extra(self) -> Tensor | None:
        """The extra bytes of each row's token, as [N_cap, *shape of the bytes]; None in rounds
        without.

        If a token has up to 12 bytes, this is a view that is valid as long as the rows are. With
        more bytes, each access makes a copy. Rows without a token have undefined values here, too.
        Raises AttributeError in a round of the other layout.
        """
        return _extra(self.arrived)

    @property
    def segments(self) -> dict[str, Any]:
        """The keyword arguments that `GroupedExperts` take besides rows, offsets and scales.

        Use them as `experts(…, **dispatched.segments)`.
        """
        return {
            "tokens_per_expert": self.tokens_per_expert,
            "alignment": self.alignment,
            "rows_per_expert": self.rows_per_expert,
        }

    @property
    def rows_per_expert(self) -> float:
        """How many rows an expert has on average, as far as this rank can tell.

        It assumes that each rank brings as many tokens as this one, or as many as `at_most` says if
        these are more.
        """
        sent = self.sent
        tokens = max(self.num_tokens, sent.most_tokens or 0)
        return tokens * sent.template.rows_per_token

    def __repr__(self) -> str:
        names = ["recv"]
        if self.layout == "expert":
            names = ["rows", "scales", "expert_offsets", "tokens_per_expert"]
        fields = {name: getattr(self, name) for name in names}
        return describe_fields(self, fields, self.sent.summary())
