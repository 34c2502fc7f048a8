"""`TrainingExchange`: dispatch and combine that autograd can differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import RoundShape
from epmoe.group.errors import EPStateError
from epmoe.native.arguments import (
    FLOATS,
    INTS,
    check_tensor,
    describe,
    refuse_tangents,
    token_count,
)
from epmoe.native.formats import TRAINING_FORMATS, PayloadName
from epmoe.service import ExpertParallel
from epmoe.training.operators import train_combine, train_dispatch
from epmoe.training.owed_rounds import Directions
from epmoe.training.rounds import EXACT, FORWARD, ON_ROWS, Rounds
from epmoe.training.wrappers import Wrappers

WeightsOn = Literal["combine", "rows", "both"]
MOVES = (
    "`placement.live` must be unset for training, which needs one placement forward and backward"
)
# Elements of a row: with its scales it has 64 KiB, the longest that a call can say.
_MOST_FP8 = 63488


def fits_graphs() -> bool:
    """Whether a graph of torch.compile may hold rounds. Its partitioner fails where it wants to run
    them twice: within a memory budget, and in a checkpoint.
    """
    from epmoe.local.between_graphs import is_in_checkpoint

    return bool(functorch_config.activation_memory_budget >= 1) and not is_in_checkpoint()


class Pending(NamedTuple):
    """The values of a dispatch, besides its rows, that combine and the backward pass need."""

    round_tag: Tensor
    ids: Tensor
    weights: Tensor
    num_tokens: Tensor | None
    num_real: int
    row_weights: Tensor | None  # where combine alone applies them
    aligned: bool
    round: int  # its number


class Opening(NamedTuple):
    """The checked arguments of a call that open its round, besides tokens."""

    num_tokens: Tensor | None
    """a scalar on the device; None: `num_real` holds"""
    num_real: int
    num_rows: int
    """N, or EXACT"""
    aligned: bool


class Routed(NamedTuple):
    """The rows of an open round, in memory of their own: what `TrainingExchange.dispatch` returns.

    Expert i's segment is rows[expert_offsets[i] : expert_offsets[i + 1]], of which the first
    tokens_per_expert[i] rows are real and the rest, up to `alignment`, is zeros. Rows past
    expert_offsets[e] are zeros.
    """

    rows: Tensor
    """[N, D] in the dtype of x, with gradients"""
    expert_offsets: Tensor
    """int32 [e + 1]"""
    tokens_per_expert: Tensor
    """int32 [e]"""
    row_weights: Tensor | None
    """fp32 [N] with gradients, 0 in gaps and past the last segment; None where combine alone
    applies the weights
    """
    alignment: int
    """in rows: all segments start at its multiples"""
    handle: Pending
    """for `TrainingExchange.combine`"""


class TrainingExchange:
    """Dispatch and combine with gradients, over the windows of an `ExpertParallel`.

    The backward pass of a layer is one round, with the number of its forward round: all ranks run
    the same rounds in the same order, see docs/training.md, "What all ranks must do". Gradients
    have the same bits on every run. Several layers may share one; each dispatch has its number as
    `tag`.

    Args:
        ep: an ExpertParallel of one node, with rows and sums in their own dtype.
        backward: carries the rounds of backward passes, so that these may overlap with forward
            rounds; of the same config. By default `ep`.
        payload: in which tokens travel forward; the same on all ranks. "auto": in the dtype of x.
            "fp8": as e4m3 with an fp32 scale for each 128 elements of a token. `Routed.rows` are
            then the values that have arrived, in the dtype of x. Gradients travel in the dtype of
            x, and are those of the tokens as if nothing had been rounded.

    Raises:
        TypeError: an argument is no ExpertParallel.
        ValueError: `payload` is neither; the config has another payload than "auto", several nodes,
            or experts that move; or `backward` differs.
    """

    def __init__(
        self,
        ep: ExpertParallel,
        *,
        backward: ExpertParallel | None = None,
        payload: PayloadName = "auto",
    ) -> None:
        # Check the arguments, and that the config's windows can carry gradients.
        for name, value in (("ep", ep), ("backward", backward or ep)):
            if not isinstance(value, ExpertParallel):
                raise TypeError(f"`{name}` must be an ExpertParallel, got {describe(value)}")
        if payload not in TRAINING_FORMATS:
            raise ValueError(
                f"`payload` must be {' or '.join(map(repr, TRAINING_FORMATS))}, got {payload!r}"
            )
        for key in ("payload", "combine_payload"):
            configured = getattr(ep.config.exchange, key)
            if configured != "auto":
                raise ValueError(
                    f"`exchange.{key}` must be auto for training, whose gradients need windows for "
                    f"rows of x's dtype, got {configured}; tokens travel as fp8 by "
                    f"TrainingExchange(…, payload='fp8')"
                )
        if ep.config.placement.live:
            raise ValueError(MOVES)
        if ep.config.exchange.idle != "timeout":
            raise ValueError(
                "`exchange.idle` must be timeout for training, where all ranks run the same rounds"
            )
        if backward is not None and backward.config != ep.config:
            raise ValueError("`backward` must have the config of `ep`")

        # Tokens go forward in the format of `payload`, gradients back in the dtype of x.
        self.ep = ep
        self._wire = TRAINING_FORMATS[payload]
        if ep.config.topology.num_nodes > 1:
            raise ValueError("training needs a group of one node: `topology.num_nodes` must be 1")
        self.directions = Directions(Rounds(ep, self._wire), Rounds(backward or ep))
        with torch.inference_mode(False):
            self.anchor = torch.zeros(0, device=ep.device, requires_grad=True)
            """makes a round a part of every graph"""
        self.wrappers = Wrappers(self, ep)

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        *,
        weights_on: WeightsOn = "combine",
        num_rows: int | Literal["exact"] = "exact",
        num_tokens: int | Tensor | None = None,
        tag: int = 0,
        aligned: bool = False,
    ) -> Routed:
        """Send each token once to each rank that holds one of its experts. Collective; opens a
        round.

        Pairs of weight 0 travel, too, since their weight has a gradient.

        Args:
            x: [T, D] fp32, fp16 or bf16; see `ExpertParallel.dispatch`, also for `ids`,
                `num_tokens`, `tag` and `aligned`.
            ids: int32 or int64 [T, K].
            weights: fp32, fp16 or bf16 [T, K]. A pair whose weight is not finite has no row, and
                its weight gets a gradient of 0.
            weights_on: who applies the weights. "combine": combine does, whose backward pass needs
                the experts' outputs, and takes a pass over them. "rows": the experts do, by
                `row_weights`; combine only adds. "both": combine applies them to outputs, and the
                experts apply `row_weights` to gradients, as `GroupedExperts` do: sums have the bits
                of serving, and nobody keeps outputs.
            num_rows: N. "exact": as many rows as have arrived, for which the host waits. They come
                through the window, up to `capacity.max_expert_rows`. A number, multiple of the
                alignment: the host waits for nothing. Pairs whose row lies past the limit are
                dropped, or an error (`capacity.on_overflow`).
            num_tokens: real tokens.
            tag: a number for the layer.
            aligned: segments start at multiples of `config.alignment`.

        Returns:
            The open round.

        Raises:
            TypeError: an argument has another type or dtype.
            ValueError: an argument has another value, shape or device.
            RuntimeError: DDP or torch's `fully_shard` has a model with this exchange in a module
                with experts that are not spread, and takes them for alike on all ranks.
            EPError: what `ExpertParallel.dispatch` raises.
        """
        compiles = torch.compiler.is_compiling()
        if compiles and not fits_graphs():
            options = {"weights_on": weights_on, "num_rows": num_rows, "num_tokens": num_tokens}
            from epmoe.local.between_graphs import between_graphs

            routed: Routed = between_graphs(
                self.dispatch, x, ids, weights, **options, tag=tag, aligned=aligned
            )
            return routed

        # Check the arguments.
        if weights_on not in get_args(WeightsOn):
            raise ValueError(
                f"`weights_on` must be 'combine', 'rows' or 'both', got {weights_on!r}"
            )
        if not compiles:
            self.wrappers.check()
        ep = self.ep
        device = ep.device
        check_tensor("x", x, FLOATS, ("T", "D"), device)
        refuse_tangents(x, weights)
        check_tensor("ids", ids, INTS, (x.shape[0], "K"), device)
        check_tensor("weights", weights, FLOATS, (x.shape[0], ids.shape[1]), device)
        tokens, num_real, rows_at_most, aligned = self.opening(x, num_rows, num_tokens, aligned)
        by_experts = weights_on != "combine"

        # Open the round.
        rows, offsets, counts, row_weights, round_tag = train_dispatch(
            x,
            ids,
            weights,
            tokens,
            num_real,
            self.anchor,
            rows_at_most,
            weights_on == "rows",
            tag,
            aligned,
            self.directions.number,
        )
        number = 0 if compiles else ep.exchange.rounds.count
        kept = None if by_experts else row_weights
        pending = Pending(round_tag, ids, weights, tokens, num_real, kept, aligned, number)
        alignment = ep.config.alignment if aligned else 1

        # Either the caller gets the weights of rows, or combine does.
        given_weights = row_weights if by_experts else None
        return Routed(rows, offsets, counts, given_weights, alignment, pending)

    def opening(
        self,
        x: Tensor,
        num_rows: int | Literal["exact"],
        num_tokens: int | Tensor | None,
        aligned: bool,
    ) -> Opening:
        """Check the arguments of `dispatch`, with its errors, besides ids and weights."""
        block = self._wire.block
        if block and (x.shape[1] % block or x.shape[1] > _MOST_FP8):
            raise ValueError(
                f"`x` must be [T, D] with D a multiple of {block} up to {_MOST_FP8} for fp8, got "
                f"{describe(x)}"
            )
        config = self.ep.config
        aligned = aligned or config.capacity.alignment is not None
        alignment = config.alignment if aligned else 1
        tokens, num_real = token_count(num_tokens, x.shape[0], self.ep.device)
        return Opening(tokens, num_real, self._num_rows(num_rows, alignment), aligned)

    def combine(self, expert_rows: Tensor, routed: Routed) -> Tensor:
        """Sum the outputs of each token's experts: y [T, D] in the dtype of x. Collective; closes
        the round `routed`.

        `expert_rows` are the experts' outputs [N, D] in the dtype and order of `routed.rows`. Rows
        without a pair may hold anything. Errors are those of `ExpertParallel.combine`, and
        EPStateError where the round is not the open one.
        """
        if not isinstance(routed, Routed):
            raise TypeError(f"`routed` must be what dispatch returned, got {describe(routed)}")
        check_tensor(
            "expert_rows",
            expert_rows,
            (routed.rows.dtype,),
            tuple(routed.rows.shape),
            self.ep.device,
        )
        round_tag, ids, weights, num_tokens, num_real, row_weights, aligned, number = routed.handle

        # Another open round than this one would give the sums of its tokens.
        if number and not torch.compiler.is_compiling():
            open_round = self.ep.exchange.rounds.count
            if number != open_round:
                raise EPStateError(
                    f"`routed` must be the open round {open_round}, got round {number}"
                )
        y: Tensor = train_combine(
            expert_rows,
            row_weights,
            round_tag,
            ids,
            weights,
            num_tokens,
            num_real,
            aligned,
            self.directions.number,
        )
        return y

    @contextmanager
    def giving_up(
        self, tag: int, weights_on: WeightsOn, shape: Callable[[], RoundShape]
    ) -> Iterator[None]:
        """Run a forward round within this context, with `ExpertParallel.giving_up`. If the block
        raises, this rank calls `skip` with what `shape` returns and the other two arguments.
        """
        if torch.compiler.is_compiling():
            yield
            return
        exchange = self.ep.exchange
        before = exchange.rounds.count
        try:
            yield
        except BaseException:
            self.give_up(exchange, before, tag, weights_on, shape)
            raise

    def give_up(
        self,
        exchange: Exchange,
        before: int,
        tag: int,
        weights_on: WeightsOn,
        shape: Callable[[], RoundShape],
    ) -> None:
        """Give a round up after an exception, as `giving_up` does. `exchange` is that of `ep` where
        the block began, and `before` its count of rounds there.
        """
        try:
            exchange.give_up(before, lambda: self.skip(shape(), weights_on=weights_on, tag=tag))
        finally:
            self.directions.owed.mark_informed(self.directions)

    def skip(self, shape: RoundShape, *, weights_on: WeightsOn = "combine", tag: int = 0) -> None:
        """Take part in a forward round without tokens, and abort it, as `ExpertParallel.skip` does,
        with its errors.

        Arguments are those of `dispatch` on the other ranks.
        """
        with self.directions.numbering():
            self.directions.forward.skip(shape, tag, ON_ROWS if weights_on == "rows" else FORWARD)

    @property
    def number(self) -> int:
        """The number by which operators find this exchange."""
        return self.directions.number

    def __repr__(self) -> str:
        return f"TrainingExchange({self.ep!r})"

    def _num_rows(self, num_rows: int | Literal["exact"], alignment: int) -> int:
        """The checked `num_rows` of `dispatch` as an int: N, or EXACT."""
        if num_rows == "exact":
            return EXACT
        is_number = isinstance(num_rows, int) and not isinstance(num_rows, bool)
        if is_number and num_rows >= 0 and num_rows % alignment == 0:
            return num_rows
        must_be = "at least 0"
        if alignment > 1:
            must_be = f"a multiple of {alignment}"
        raise ValueError(f"`num_rows` must be 'exact' or {must_be}, got {num_rows!r}")
