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
# The most elements that a token may have if it travels as fp8. Its row of fp8 elements and scales
# then has 64 KiB, which is the longest row that kernels accept.
_MAX_FP8_HIDDEN_SIZE = 63488


def fits_graphs() -> bool:
    """Whether a graph of torch.compile may hold rounds.

    The partitioner of torch.compile runs some operators a second time in the backward pass, if the
    user sets a memory budget for activations or compiles within a checkpoint. A round must not run
    twice, so the partitioner fails on it. In these two cases the layer runs between graphs.
    """
    from epmoe.local.between_graphs import is_in_checkpoint

    return bool(functorch_config.activation_memory_budget >= 1) and not is_in_checkpoint()


class Opening(NamedTuple):
    """The checked arguments of `dispatch` that say how large its round is."""

    num_tokens: Tensor | None
    """the number of real tokens, a scalar on the device; None: `num_real` is this number"""
    num_real: int
    num_rows: int
    """N, the number of rows to make; or EXACT"""
    aligned: bool
    """whether segments start at multiples of the config's alignment"""


class Pending(NamedTuple):
    """What `dispatch` keeps for `combine` and for the backward pass, besides the rows."""

    round_tag: Tensor
    """fp32 [1] in host memory: see operators.py"""
    ids: Tensor
    """int [T, K], the experts of each token"""
    weights: Tensor
    """[T, K], the weights of these experts"""
    opening: Opening
    row_weights: Tensor | None
    """fp32 [N], the weight of each row, if combine alone applies weights; otherwise None"""
    round: int
    """the number of the open round; 0 where a compiler traces, which knows no number"""


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

    The backward pass of a layer runs one round, whose tag is the number of the layer's forward
    round. All ranks must run the same rounds in the same order: see docs/training.md, "What all
    ranks must do". Gradients have the same bits on every run. Several layers may share one
    `TrainingExchange`. Each layer then gives its own number to `dispatch` as `tag`.

    Args:
        ep: an ExpertParallel of one node, with rows and sums in their own dtype.
        backward: a second ExpertParallel with the same config, which carries the rounds of backward
            passes. These may then overlap with forward rounds. By default `ep` carries them, too.
        payload: the format in which tokens travel forward, the same on all ranks. "auto": the dtype
            of x. "fp8": e4m3 with an fp32 scale for every 128 elements of a token. `Routed.rows`
            are then the rounded values, converted back to the dtype of x. Gradients always travel
            in the dtype of x, and are computed as if the tokens had not been rounded.

    Raises:
        TypeError: an argument is no ExpertParallel.
        ValueError: `payload` is neither "auto" nor "fp8"; the config has another payload than
            "auto", several nodes, or experts that move; or the config of `backward` differs from
            that of `ep`.
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
            """An empty input of dispatch that requires grad. Through it, dispatch gets a node in
            the graph of autograd, even if no token and no weight requires grad on this rank.
            """
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
        """Send each token once to each rank that holds one of its experts. This opens a round.
        Collective.

        A pair (token, expert) with the weight 0 travels like any other, since the weight has a
        gradient. `ExpertParallel.dispatch` says more about `x`, `ids`, `num_tokens`, `tag` and
        `aligned`.

        Args:
            x: T tokens with D elements each: [T, D] fp32, fp16 or bf16.
            ids: the K experts of each token, int32 or int64 [T, K].
            weights: fp32, fp16 or bf16 [T, K]. A pair whose weight is not finite has no row, and
                its weight gets a gradient of 0.
            weights_on: who applies the weights. "combine": combine multiplies the experts' outputs
                by the weights. Its backward pass needs these outputs, and reads them once more.
                "rows": the experts multiply by `row_weights`, and combine only adds. "both":
                combine multiplies the outputs, and the experts multiply the gradients by
                `row_weights`, as `GroupedExperts` do. The sums then have the same bits as in
                serving, and the outputs need not be kept.
            num_rows: N, the number of rows that dispatch returns. "exact": as many rows as have
                arrived. The host waits for this number, and the rows come through the window, so
                there may be up to `capacity.max_expert_rows`. A number, which must be a multiple of
                the alignment: the host waits for nothing. Pairs whose row does not fit are dropped,
                or are an error, as `capacity.on_overflow` says.
            num_tokens: the number of real tokens. Later tokens are padding.
            tag: the number of the layer.
            aligned: whether segments start at multiples of `config.alignment`.

        Returns:
            The open round.

        Raises:
            TypeError: an argument has another type or dtype.
            ValueError: an argument has another value, shape or device.
            RuntimeError: DDP or torch's `fully_shard` has a model with this exchange in a module
                with experts that are not spread, and takes them for alike on all ranks.
            EPError: the round fails, in the ways that `ExpertParallel.dispatch` names.
        """
        # A graph that may not hold a round ends here. The round runs between two graphs.
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
        opening = self.opening(x, num_rows, num_tokens, aligned)
        experts_get_weights = weights_on != "combine"

        # Open the round. Operators take their arguments by position, which costs the host less.
        rows, offsets, counts, row_weights, round_tag = train_dispatch(
            x,
            ids,
            weights,
            opening.num_tokens,
            opening.num_real,
            self.anchor,
            opening.num_rows,
            weights_on == "rows",
            tag,
            opening.aligned,
            self.directions.number,
        )

        # A compiler traces this once for many rounds, so that there is no one number to keep.
        round_number = 0 if compiles else ep.exchange.rounds.count

        # The weights of rows go either to the experts, through the caller, or to combine.
        weights_for_experts = None
        weights_for_combine = None
        if experts_get_weights:
            weights_for_experts = row_weights
        else:
            weights_for_combine = row_weights
        alignment = ep.life.member.config.alignment if opening.aligned else 1
        # Both records take their fields in order: keywords would cost each round 0.7 µs.
        pending = Pending(round_tag, ids, weights, opening, weights_for_combine, round_number)
        return Routed(rows, offsets, counts, weights_for_experts, alignment, pending)

    def opening(
        self,
        x: Tensor,
        num_rows: int | Literal["exact"],
        num_tokens: int | Tensor | None,
        aligned: bool,
    ) -> Opening:
        """Check the arguments of `dispatch` that say how large its round is. Raises the errors that
        `dispatch` names.
        """
        # With fp8, a token is cut into blocks of elements that share a scale.
        hidden_size = x.shape[1]
        block = self._wire.block
        if block and (hidden_size % block or hidden_size > _MAX_FP8_HIDDEN_SIZE):
            raise ValueError(
                f"`x` must be [T, D] with D a multiple of {block} up to {_MAX_FP8_HIDDEN_SIZE} for "
                f"fp8, got {describe(x)}"
            )

        # The config may ask for aligned segments in every round.
        # This is `ep.config`, without the property, which would cost each round more.
        config = self.ep.life.member.config
        aligned = aligned or config.capacity.alignment is not None
        alignment = config.alignment if aligned else 1
        tokens, num_real = token_count(num_tokens, x.shape[0], self.ep.device)
        return Opening(tokens, num_real, self._num_rows(num_rows, alignment), aligned)

    def combine(self, expert_rows: Tensor, routed: Routed) -> Tensor:
        """Sum the outputs of each token's experts: y [T, D] in the dtype of x. This closes the
        round `routed`. Collective.

        `expert_rows` are the experts' outputs [N, D] in the dtype and order of `routed.rows`. Rows
        in the gaps between segments may hold anything. Raises the errors of
        `ExpertParallel.combine`, and EPStateError if `routed` is not the open round.
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
        pending = routed.handle

        # If another round were open, combine would return the sums for the tokens of that round.
        if pending.round and not torch.compiler.is_compiling():
            open_round = self.ep.exchange.rounds.count
            if pending.round != open_round:
                raise EPStateError(
                    f"`routed` must be the open round {open_round}, got round {pending.round}"
                )

        # Operators take their arguments by position, which costs the host less.
        opening = pending.opening
        y: Tensor = train_combine(
            expert_rows,
            pending.row_weights,
            pending.round_tag,
            pending.ids,
            pending.weights,
            opening.num_tokens,
            opening.num_real,
            opening.aligned,
            self.directions.number,
        )
        return y

    @contextmanager
    def giving_up(
        self, tag: int, weights_on: WeightsOn, shape: Callable[[], RoundShape]
    ) -> Iterator[None]:
        """Run a forward round within this context, so that an exception in it does not leave the
        other ranks waiting.

        If the block raises, this rank aborts the round that the block has opened. If the block has
        opened none, this rank takes part in the round without tokens, by `skip`. `shape` returns
        the shape of the round, and is called only then.
        """
        # A compiler that traces this code runs no round, so there is none to give up.
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
        """End a round after an exception on this rank, as `giving_up` describes.

        `exchange` is the exchange that `ep` had when the round's code began, and `before` is its
        count of rounds at that time. From these two the exchange knows whether the code has opened
        the round. Callers that cannot afford the context manager `giving_up` call this themselves.
        """
        try:
            exchange.give_up(before, lambda: self.skip(shape(), weights_on=weights_on, tag=tag))
        finally:
            # The other ranks know of the exception, so this rank owes them no backward rounds.
            self.directions.owed.mark_informed(self.directions)

    def skip(self, shape: RoundShape, *, weights_on: WeightsOn = "combine", tag: int = 0) -> None:
        """Take part in a forward round without tokens, and abort it. `ExpertParallel.skip` does the
        same for a round without gradients, and raises the same errors.

        The arguments must be those with which the other ranks call `dispatch`.
        """
        with self.directions.counting_forward_round():
            self.directions.forward.skip(shape, tag, ON_ROWS if weights_on == "rows" else FORWARD)

    @property
    def number(self) -> int:
        """The number by which operators find this exchange."""
        return self.directions.number

    def __repr__(self) -> str:
        return f"TrainingExchange({self.ep!r})"

    def _num_rows(self, num_rows: int | Literal["exact"], alignment: int) -> int:
        """Check the argument `num_rows` of `dispatch`. Returns the number, or EXACT for "exact"."""
        if num_rows == "exact":
            return EXACT
        is_number = isinstance(num_rows, int) and not isinstance(num_rows, bool)
        if is_number and num_rows >= 0 and num_rows % alignment == 0:
            return num_rows
        must_be = "at least 0"
        if alignment > 1:
            must_be = f"a multiple of {alignment}"
        raise ValueError(f"`num_rows` must be 'exact' or {must_be}, got {num_rows!r}")
