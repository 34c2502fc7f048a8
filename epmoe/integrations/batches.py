"""Sends batches of any length through an `ExpertParallel`.

A round takes at most M tokens of a rank, where M is `capacity.max_num_tokens_per_rank`. A longer
batch is cut into several rounds, and every rank takes part in as many rounds as the longest batch
of any rank needs.

    x [T,D] ─ rounds of at most M tokens ─▶ dispatch ─▶ rows [n,D] ─ experts ─▶ combine ─▶ y [T,D]

T is the number of tokens of this rank, D the hidden size, and n the number of rows that arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.exchange.handles import Dispatched, RoundShape
from epmoe.group.errors import EPMismatchError, EPTimeoutError
from epmoe.local.gemm.gemm import Segments
from epmoe.local.quantize import dequantize_rows
from epmoe.native.arguments import check_forward_only
from epmoe.service import ExpertParallel
from epmoe.training import TrainingExchange
from epmoe.training.exchange import Routed


class Arrived(NamedTuple):
    """The rows that a round has brought to this rank, sorted by expert.

    The rows of one expert are its segment. On GPUs there may be rows behind the last segment, which
    may hold anything; on the CPU there are no such rows.
    """

    rows: Tensor
    """[n, D] in `dtype`, or fp8 with an fp8 payload; n may be 0"""
    scales: Tensor | None
    """fp32 [n, D/128], the scales of fp8 rows; None where the rows are not fp8"""
    segments: Segments
    """where the rows of each expert lie"""
    dtype: torch.dtype
    """the dtype in which the experts return their outputs"""

    def plain(self) -> Tensor:
        """The rows in `dtype`: fp8 rows are dequantized."""
        if self.scales is None:
            return self.rows
        return dequantize_rows(self.rows, self.scales, self.dtype)


class Computation(NamedTuple):
    """What a rank computes in the rounds of a call.

    `aligned` and `trains` must be the same on all ranks; each rank has `experts` of its own.
    """

    experts: Callable[[Arrived], Tensor]
    """computes the experts' outputs [n, D] of the rows of a round"""
    aligned: bool = False
    """whether segments start at multiples of a number of rows: the argument `aligned` of
    `ExpertParallel.dispatch`
    """
    trains: bool = False
    """whether the outputs have gradients: then the backward pass takes as many rounds as the
    forward pass, and rows travel without quantization
    """


class _Call(NamedTuple):
    """The arguments of `SharedExpertParallel.run` that all rounds of a call share."""

    computation: Computation
    tag: int
    dtype: torch.dtype
    """the dtype of x"""
    longest: int | None
    """the number of tokens that no rank exceeds; None where the ranks do not know it, so that each
    round carries whether a rank needs another round
    """


def _add_timeout_hint(error: BaseException) -> None:
    """Add to the message of a timeout the mistake that users of `generate` make most often. Other
    errors stay as they are.
    """
    if isinstance(error, EPTimeoutError):
        error.args = (
            f"{error}. If the missing ranks have ended `generate` sooner: give it "
            "`synced_gpus=True` on all ranks, so that they keep stepping, and with a static cache "
            "the same `max_new_tokens`",
        )


@contextmanager
def _timeouts_with_hint() -> Iterator[None]:
    """Add the hint of `_add_timeout_hint` to a timeout that the block raises."""
    try:
        yield
    except EPTimeoutError as error:
        _add_timeout_hint(error)
        raise


class SharedExpertParallel:
    """The `ExpertParallel` of all layers with the same shapes on one group.

    Attributes:
        ep: the `ExpertParallel`.
        static: whether every call is one round, of at most M tokens a rank; see `configure`.
        seconds: the time that each stage has taken so far, in seconds of the clock. The time that
            this rank waited for other ranks is included. The stage "agree" is the wait for the
            answer whether a rank needs more rounds. On GPUs these are times of the host, and
            "agree" is the only stage in which the host waits for a kernel.
    """

    def __init__(
        self,
        config: EPConfig,
        group: dist.ProcessGroup | None,
        device: torch.device,
        static: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open the `ExpertParallel`. Collective.

        `config`, `group` and `device` are the arguments of `ExpertParallel`; `static` and `clock`
        are those of `configure`.
        """
        stages = ("set up", "agree", "dispatch", "experts", "combine")
        self.seconds = dict.fromkeys(stages, 0.0)
        self._now = clock
        with self._timed("set up"):
            self.ep = ExpertParallel(config, group, device)
        self.static = static
        self._exchange: TrainingExchange | None = None
        self._tags: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._max_tokens = config.capacity.max_num_tokens_per_rank

    @property
    def exchange(self) -> TrainingExchange:
        """The exchange for rounds with gradients, which the first use makes.

        Raises ValueError in static mode, or if the configuration cannot train.
        """
        if self.static:
            raise ValueError(
                "static mode serves and does not train: train with `configure(static=False)`, or "
                "call the model under torch.no_grad()"
            )
        if self._exchange is None:
            self._exchange = TrainingExchange(self.ep)
        return self._exchange

    def tag_of(self, layer: object) -> int:
        """The tag that the rounds of `layer` carry, by which ranks notice that they call different
        layers.

        The first call for a layer numbers it, so all ranks must first call their layers in the same
        order.
        """
        tag = self._tags.get(layer)
        if tag is None:
            tag = self.ep.new_tag()
            self._tags[layer] = tag
        return tag

    @cached_property
    def held(self) -> slice:
        """The slice of a module's experts that this rank holds: a rank holds neighbouring ones."""
        owned = self.ep.placement.local_experts(self.ep.rank)
        first = owned[0] if owned else 0
        return slice(first, first + len(owned))

    def run(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        computation: Computation,
        tag: int = 0,
        longest: int | None = None,
    ) -> Tensor:
        """Compute the weighted sums [T, D] of the experts' outputs for this rank's tokens.
        Collective.

        x_TD holds T tokens of D values; ids_TK and weights_TK hold the K experts of each token and
        their weights. `tag` is the argument of `ExpertParallel.dispatch`. `longest` is a number of
        tokens that no rank exceeds, and it is the same on every rank. If `longest` is None, each
        round carries whether a rank needs another round, and the host reads the answer once the
        round is launched. Over several nodes the ranks instead agree on the longest batch before
        the first round, through host memory, because a slab for another node must have the same
        length on all ranks.

        Raises ValueError in static mode if `longest` is more than M or if the call trains, and
        RuntimeError in a stream capture without `longest`. These errors come before anything is
        sent. Later errors are those of `Exchange.largest`, `ExpertParallel.dispatch`,
        `ExpertParallel.combine` and `computation.experts`.

        Any exception closes the open round. The other ranks may still need more rounds: this rank
        then takes part in them without tokens and without its experts, so that all ranks count the
        same rounds. It waits for the other ranks in these rounds as in any other. A second
        exception, such as another Ctrl-C, ends this, too.
        """
        M = self._max_tokens
        T = x_TD.shape[0]
        # `self.exchange` raises where this rank cannot train: now, before anything is sent.
        if computation.trains:
            _ = self.exchange
        batch = (x_TD, ids_TK, weights_TK)
        own_rounds = self._rounds_for(T)
        rounds_before = self.ep.exchange.rounds.count
        outputs = list[Tensor]()
        # Find how many tokens a rank brings at most. The number of rounds follows from it.
        call = _Call(computation, tag, x_TD.dtype, longest)
        given_longest = longest
        if longest is None:
            longest = self._longest_batch(T, call)
        if longest is None and x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a call in a stream capture cannot look whether another rank needs more rounds: "
                "`configure(static=True)` takes one round a call and looks at nothing"
            )
        # Static mode takes one round, however many tokens the ranks bring. There `longest` is what
        # this rank assumes, and only the caller's number holds on all ranks. A rank whose batch is
        # too long raises within the `try` below, so that it skips the round of the others.
        agreed_longest = longest
        too_long = None
        if self.static:
            agreed_longest = given_longest
            if longest is not None and longest > M:
                too_long = longest
                longest = M
        # Run rounds until no rank has tokens left. Nothing is called between the agreement and this
        # block, so a signal handler raises within it.
        try:
            call = call._replace(longest=longest)
            if too_long is not None:
                raise ValueError(
                    f"a rank brings {too_long} tokens, but static mode takes at most "
                    f"max_num_tokens_per_rank = {M} a call: configure more, or send a prompt in "
                    "chunks (`prefill_chunk_size` of transformers' generate)"
                )
            with self.ep.at_most(agreed_longest):
                while not outputs or self._has_more_rounds(len(outputs), call.longest):
                    rounds_done = len(outputs)
                    x, ids, weights = batch
                    # A single round needs no slices: three slices cost the host 5 µs. In a round
                    # that only other ranks need, the slices of this rank are empty.
                    if own_rounds > 1 or outputs:
                        start = rounds_done * M
                        x, ids, weights = (tensor[start : start + M] for tensor in batch)
                    has_more = rounds_done + 1 < own_rounds
                    outputs.append(self._round(x, ids, weights, call, has_more))
        except EPMismatchError:  # all ranks raise it
            raise
        except BaseException as error:
            _add_timeout_hint(error)
            self._skip_remaining_rounds(rounds_before, call._replace(longest=longest))
            raise
        # Join the outputs. In training, rounds without tokens of this rank count, too: their
        # backward rounds start from the outputs.
        if computation.trains:
            own_rounds = len(outputs)
        return outputs[0] if own_rounds == 1 else torch.cat(outputs[:own_rounds])

    def poll(self) -> None:
        """Raise what kernels have reported so far. It never waits."""
        with _timeouts_with_hint():
            self.ep.poll()

    def close(self) -> None:
        self.ep.close()

    def _rounds_for(self, num_tokens: int) -> int:
        """How many rounds a batch of `num_tokens` takes. It is at least 1, because a rank without
        tokens still takes part.
        """
        return max(1, -(-num_tokens // self._max_tokens))

    def _longest_batch(self, num_tokens: int, call: _Call) -> int | None:
        """Find how many tokens the rank with the longest batch brings. This rank brings
        `num_tokens`.

        Returns None where the ranks learn it from their rounds only. `run` calls this before the
        first round, if the caller has given no `longest`. Over several nodes the call waits for all
        ranks. If an exception interrupts the wait, such as a Ctrl-C, this rank still takes part in
        the rounds of the others, without tokens.
        """
        if self.static:
            return max(num_tokens, self._max_tokens)
        if self.ep.size == 1:
            return num_tokens
        # Over several nodes the ranks agree now. On one node `largest` is None, and each round
        # carries the answer.
        with self._timed("agree"), _timeouts_with_hint():
            largest = self.ep.exchange.largest(num_tokens)
            if largest is None:
                return None
            try:
                return largest()
            except EPTimeoutError:
                raise
            except BaseException:
                # The other ranks go on with their rounds. Calling `largest` again resumes the
                # interrupted wait.
                with suppress(RuntimeError):
                    rounds_before = self.ep.exchange.rounds.count
                    self._skip_remaining_rounds(rounds_before, call._replace(longest=largest()))
                raise

    def _has_more_rounds(self, rounds_done: int, longest: int | None) -> bool:
        """Whether the ranks take another round after the first `rounds_done` rounds of a call."""
        if longest is not None:
            return rounds_done < self._rounds_for(longest)
        with self._timed("agree"):
            return self.ep.exchange.has_more_rounds()

    def _round(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, call: _Call, has_more: bool
    ) -> Tensor:
        """Run one round of at most M tokens of this rank. Returns their weighted sums [T, D].

        `has_more` says whether this rank needs another round. The times of the stages are added to
        `seconds`. The clock is read by plain calls between the stages, because context managers
        would cost a layer 8 µs.
        """
        ep = self.ep
        now = self._now
        experts, aligned, trains = call.computation
        max_tokens_per_rank = self._max_tokens_per_rank(call.longest)
        exchange = ep.exchange
        rounds_before = exchange.rounds.count
        try:
            # Dispatch. Where the longest batch is not known, the round also carries `has_more`.
            start = now()
            dispatch: Callable[..., Dispatched | Routed] = ep.dispatch
            if trains:
                dispatch = self.exchange.dispatch
            if call.longest is None:
                send = partial(dispatch, x_TD, ids_TK, weights_TK, tag=call.tag, aligned=aligned)
                routed = exchange.sending(has_more, send)
            else:  # a partial would cost the host 0.1 µs
                routed = dispatch(x_TD, ids_TK, weights_TK, tag=call.tag, aligned=aligned)
            # Run the experts, over as many rows as may have arrived.
            dispatched_at = now()
            max_tokens = (ep.size - 1) * max_tokens_per_rank + x_TD.shape[0]
            max_pairs = max_tokens * ids_TK.shape[1]
            outputs = experts(self._arrived_rows(routed, max_pairs))
            if not trains:
                check_forward_only(outputs)
            # Combine.
            computed_at = now()
            if isinstance(routed, Routed):
                y = self.exchange.combine(outputs, routed)
            else:
                y = ep.combine(outputs, routed)
        except BaseException:
            # Abort the round if it has opened, so that the other ranks get through it.
            exchange.give_up(rounds_before)
            raise
        self.seconds["dispatch"] += dispatched_at - start
        self.seconds["experts"] += computed_at - dispatched_at
        self.seconds["combine"] += now() - computed_at
        return y

    def _skip_remaining_rounds(self, rounds_before: int, call: _Call) -> None:
        """Take part without tokens in the rounds that other ranks still need, after an exception
        has ended this rank's call.

        `rounds_before` is the exchange's count of rounds when the call began. The call takes at
        least one round, so this rank skips that round if it has not opened one. Errors of the
        exchange are dropped, because the caller raises an exception already.
        """
        rounds = self.ep.exchange.rounds
        longest = call.longest
        rounds_done = rounds.count - rounds_before
        # No rank waits for this one after a failure of the exchange. Nor does this thread have
        # anything to skip where another thread has opened the latest round.
        belongs_to_other_thread = rounds_done > 0 and not rounds.opened_after(rounds_before)
        if self.ep.exchange.failed or belongs_to_other_thread:
            return
        # Skip one round after the other, each with the shape that the other ranks bring.
        with suppress(RuntimeError), self.ep.at_most(longest):
            while not rounds_done or self._has_more_rounds(rounds_done, longest):
                skip: Callable[..., object]
                if call.computation.trains:
                    skip = self.exchange.skip
                    shape = RoundShape.of(self.ep.config, call.dtype)
                else:
                    skip = self.ep.skip
                    shape = self.ep.last_shape
                shape = shape._replace(aligned=call.computation.aligned)
                skip_round = partial(skip, shape, tag=call.tag)
                if longest is None:
                    has_more = False  # the remaining tokens of this rank are given up
                    self.ep.exchange.sending(has_more, skip_round)
                else:
                    skip_round()
                rounds_done += 1

    def _max_tokens_per_rank(self, longest: int | None) -> int:
        """The most tokens that a rank brings to one round, if no batch exceeds `longest`."""
        if longest is None:
            return self._max_tokens
        return min(longest, self._max_tokens)

    def _arrived_rows(self, routed: Dispatched | Routed, max_pairs: int) -> Arrived:
        """View the rows that a dispatch has brought, as the experts take them.

        All ranks together have sent at most `max_pairs` pairs of a token and an expert. On the CPU
        the view holds the rows that arrived and no others. On GPUs the host does not know how many
        rows arrived, so the view also holds as much padding as `max_pairs` rows need. In rounds
        with gradients the exchange has counted the rows already.
        """
        # Rounds with gradients have no gaps between segments.
        if isinstance(routed, Routed):
            segments = Segments(offsets=routed.expert_offsets, tokens=None, alignment=1)
            return Arrived(routed.rows, None, segments, routed.rows.dtype)
        dispatched = routed
        ep = self.ep
        if ep.device.type == "cpu":
            num_rows = int(dispatched.expert_offsets[-1])
        else:
            # Each segment may start behind a gap. The largest alignment counts, because another
            # rank may bring more tokens and so a larger alignment than this rank.
            alignment = 1 if dispatched.alignment == 1 else ep.config.alignment
            max_rows = max_pairs + ep.num_local_experts * (alignment - 1)
            num_rows = min(dispatched.rows.shape[0], -(-max_rows // alignment) * alignment)
        scales = None if dispatched.scales is None else dispatched.scales[:num_rows]
        segments = Segments(dispatched.expert_offsets, *dispatched.segments.values())
        return Arrived(dispatched.rows[:num_rows], scales, segments, dispatched.dtype)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to the seconds of `stage`."""
        start = self._now()
        yield
        self.seconds[stage] += self._now() - start
