"""Batches of any length through an `ExpertParallel`, in as many rounds as the longest batch of any
rank needs.

    x [T,D] ─ rounds of at most M tokens ─▶ dispatch ─▶ rows [n,D] ─ experts ─▶ combine ─▶ y [T,D]
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
    """The rows of a round, expert by expert. Rows past the last segment may hold anything; on the
    CPU there are none.
    """

    rows: Tensor
    """[n, D] in `dtype`, or fp8 with an fp8 payload; n may be 0"""
    scales: Tensor | None
    """fp32 [n, D/128] of fp8 rows, else None"""
    segments: Segments
    dtype: torch.dtype
    """of outputs"""

    def plain(self) -> Tensor:
        """The rows in `dtype`."""
        if self.scales is None:
            return self.rows
        return dequantize_rows(self.rows, self.scales, self.dtype)


class Computation(NamedTuple):
    """The work of a rank in the rounds of a call. All but `experts` is the same on all ranks."""

    experts: Callable[[Arrived], Tensor]
    """The rows of a round → outputs [n,D]"""
    aligned: bool = False
    """Segments start at multiples of a number of rows: `aligned` of `ExpertParallel.dispatch`."""
    trains: bool = False
    """Outputs have gradients: the backward pass takes as many rounds then, and rows are plain."""


class _Call(NamedTuple):
    computation: Computation
    tag: int
    dtype: torch.dtype
    """of x"""
    longest: int | None
    """No rank brings more tokens. None: each round carries whether a rank has more."""


def _hint(error: BaseException) -> None:
    """Add to the message of a timeout what a user of `generate` meets most often."""
    if isinstance(error, EPTimeoutError):
        error.args = (
            f"{error}. If the missing ranks have ended `generate` sooner: give it "
            "`synced_gpus=True` on all ranks, so that they keep stepping, and with a static cache "
            "the same `max_new_tokens`",
        )


@contextmanager
def _hinting() -> Iterator[None]:
    """Adds the hint to a timeout that is raised within it."""
    try:
        yield
    except EPTimeoutError as error:
        _hint(error)
        raise


class SharedExpertParallel:
    """The `ExpertParallel` of all layers with the same shapes on one group.

    Attributes:
        ep: the `ExpertParallel`.
        static: whether every call is one round, of at most M tokens a rank; see `configure`.
        seconds: of each stage so far by the clock, waiting for other ranks included. "agree" is the
            wait for the answer whether a rank has more rounds. On GPUs this is the time of the
            host, which waits for no kernel otherwise.
    """

    def __init__(
        self,
        config: EPConfig,
        group: dist.ProcessGroup | None,
        device: torch.device,
        static: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Collective; takes the arguments of `ExpertParallel`, and `static` and `clock` of
        `configure`.
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
        """The exchange of rounds with gradients. Raises ValueError in static mode, or if the config
        cannot train.
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
        """The tag of a layer's rounds. Layers number themselves in the order of their
        first calls.
        """
        tag = self._tags.get(layer)
        if tag is None:
            tag = self.ep.new_tag()
            self._tags[layer] = tag
        return tag

    @cached_property
    def held(self) -> slice:
        """This rank's experts, which lie in one block of a module's."""
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
        """Compute the weighted expert outputs [T, D] of this rank's tokens. Collective.

        `tag` is that of `ExpertParallel.dispatch`. `longest` is the same on every rank: no rank
        brings more tokens. If it is None, each round carries whether a rank has more, and the host
        looks for that once the round is launched. Over several nodes the ranks agree on the longest
        batch through host memory before the first round instead, since a slab for another node has
        the same length on all ranks.

        Raises ValueError in static mode if `longest` is more than M or the call trains,
        RuntimeError in a stream capture without `longest`, all before anything is sent, and what
        `Exchange.largest`, `ExpertParallel.dispatch`, `ExpertParallel.combine` and `experts` raise.
        An exception closes the round, wherever it comes from. In the rounds that other ranks still
        need, this rank then takes part without tokens and without its experts, so that the ranks
        stay in step. It waits for them as ever; a second exception, such as another Ctrl-C, ends
        that too.
        """
        M = self._max_tokens
        T = x_TD.shape[0]
        # What this rank alone may be refused raises before anything is sent.
        if computation.trains:
            _ = self.exchange
        # How many tokens a rank brings at most, and so how many rounds there are.
        call = _Call(computation, tag, x_TD.dtype, longest)
        if longest is None:
            longest = self._longest_batch(T, call)
        if longest is None and x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a call in a stream capture cannot look whether another rank needs more rounds: "
                "`configure(static=True)` takes one round a call and looks at nothing"
            )
        # Static mode takes one round, whatever ranks bring: then only the caller knows more.
        known = longest
        too_long = None
        if self.static:
            known = call.longest
            if longest is not None and longest > M:
                too_long = longest
                longest = M
        call = call._replace(longest=longest)
        batch = (x_TD, ids_TK, weights_TK)
        own_rounds = self._rounds(T)
        rounds_before = self.ep.exchange.rounds.count
        # Rounds, until no rank has tokens left.
        outputs = list[Tensor]()
        try:
            if too_long is not None:
                raise ValueError(
                    f"a rank brings {too_long} tokens, but static mode takes at most "
                    f"max_num_tokens_per_rank = {M} a call: configure more, or send a prompt in "
                    "chunks (`prefill_chunk_size` of transformers' generate)"
                )
            with self.ep.at_most(known):
                while not outputs or self._has_more_rounds(len(outputs), call.longest):
                    taken = len(outputs)
                    x, ids, weights = batch
                    # One round needs no slices, three of which cost the host 5 µs.
                    if own_rounds > 1 or outputs:
                        x, ids, weights = (tensor[taken * M : (taken + 1) * M] for tensor in batch)
                    has_more = taken + 1 < own_rounds
                    outputs.append(self._round(x, ids, weights, call, has_more))
        except EPMismatchError:  # all ranks raise it
            raise
        except BaseException as error:
            _hint(error)
            self._see_out(rounds_before, call)
            raise
        # Join the outputs. In training those without tokens, too: they have a backward round.
        if computation.trains:
            own_rounds = len(outputs)
        return outputs[0] if own_rounds == 1 else torch.cat(outputs[:own_rounds])

    def poll(self) -> None:
        """Raise what kernels have reported so far. It never waits."""
        with _hinting():
            self.ep.poll()

    def close(self) -> None:
        self.ep.close()

    def _rounds(self, num_tokens: int) -> int:
        """Rounds that a batch of `num_tokens` takes, at least 1: a rank without tokens still takes
        part.
        """
        return max(1, -(-num_tokens // self._max_tokens))

    def _longest_batch(self, num_tokens: int, call: _Call) -> int | None:
        """Find the most tokens that a rank brings. This rank brings `num_tokens`. None: not known
        yet.

        After an exception other than those of the exchange, such as a Ctrl-C, this rank sees the
        rounds out.
        """
        if self.static:
            return max(num_tokens, self._max_tokens)
        if self.ep.size == 1:
            return num_tokens
        # Over several nodes the ranks agree; on one, each round carries the answer.
        with self._timed("agree"), _hinting():
            largest = self.ep.exchange.largest(num_tokens)
            if largest is None:
                return None
            try:
                return largest()
            except EPTimeoutError:
                raise
            except BaseException:
                with suppress(RuntimeError):
                    self._see_out(self.ep.exchange.rounds.count, call._replace(longest=largest()))
                raise

    def _has_more_rounds(self, taken: int, longest: int | None) -> bool:
        """All ranks take more rounds after `taken` ones."""
        if longest is not None:
            return taken < self._rounds(longest)
        with self._timed("agree"):
            return self.ep.exchange.has_more_rounds()

    def _round(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, call: _Call, has_more: bool
    ) -> Tensor:
        """Run a round of at most M tokens. Returns their sums [T, D]. `has_more`: this rank needs
        another round.

        Its steps stand in line, with the clock between them: context managers would cost a layer
        8 µs.
        """
        ep = self.ep
        now = self._now
        experts, aligned, trains = call.computation
        most = self._most_tokens(call.longest)
        exchange = ep.exchange
        before = exchange.rounds.count
        try:
            # Dispatch. Where the longest batch is not known, the round says who has more.
            began = now()
            sends: Callable[..., Dispatched | Routed] = ep.dispatch
            if trains:
                sends = self.exchange.dispatch
            if call.longest is None:
                dispatch = partial(sends, x_TD, ids_TK, weights_TK, tag=call.tag, aligned=aligned)
                routed = exchange.sending(has_more, dispatch)
            else:  # a partial would cost the host 0.1 µs
                routed = sends(x_TD, ids_TK, weights_TK, tag=call.tag, aligned=aligned)
            # Experts, over as many rows as may have come.
            arrived = now()
            most_tokens = (ep.size - 1) * most + x_TD.shape[0]
            outputs = experts(self._arrived(routed, most_tokens * ids_TK.shape[1]))
            if not trains:
                check_forward_only(outputs)
            # Combine.
            computed = now()
            if isinstance(routed, Routed):
                y = self.exchange.combine(outputs, routed)
            else:
                y = ep.combine(outputs, routed)
        except BaseException:
            exchange.give_up(before)
            raise
        self.seconds["dispatch"] += arrived - began
        self.seconds["experts"] += computed - arrived
        self.seconds["combine"] += now() - computed
        return y

    def _see_out(self, rounds_before: int, call: _Call) -> None:
        """After an exception, take part in the rounds that other ranks still need, after the first
        `rounds_before` and at least one.

        It raises nothing of the exchange, since the caller has an exception already.
        """
        # Nobody waits for more where the exchange has failed, or the last round did not open.
        rounds = self.ep.exchange.rounds
        longest = call.longest
        taken = rounds.count - rounds_before
        if self.ep.exchange.failed or taken and not rounds.opened_after(rounds_before):
            return
        # Skip round after round, in the shape that the other ranks bring.
        with suppress(RuntimeError), self.ep.at_most(longest):
            while not taken or self._has_more_rounds(taken, longest):
                skips: Callable[..., object]
                if call.computation.trains:
                    skips = self.exchange.skip
                    shape = RoundShape.of(self.ep.config, call.dtype)
                else:
                    skips = self.ep.skip
                    shape = self.ep.last_shape
                shape = shape._replace(aligned=call.computation.aligned)
                skip = partial(skips, shape, tag=call.tag)
                if longest is None:
                    self.ep.exchange.sending(False, skip)
                else:
                    skip()
                taken += 1

    def _most_tokens(self, longest: int | None) -> int:
        """Most tokens of a rank in a round."""
        if longest is None:
            return self._max_tokens
        return min(longest, self._max_tokens)

    def _arrived(self, routed: Dispatched | Routed, most_pairs: int) -> Arrived:
        """View the rows that arrived, if all sources together have sent at most `most_pairs` pairs
        of a token and an expert.

        On the CPU these rows only. On GPUs the host does not know how many they are: as much
        padding follows them as the host must expect. In rounds with gradients the exchange has
        counted them.
        """
        if isinstance(routed, Routed):
            segments = Segments(routed.expert_offsets, None, 1)
            return Arrived(routed.rows, None, segments, routed.rows.dtype)
        d = routed
        ep = self.ep
        if ep.device.type == "cpu":
            n = int(d.expert_offsets[-1])
        else:
            # All pairs, and gaps before each expert, whatever alignment the other ranks bring.
            alignment = 1 if d.alignment == 1 else ep.config.alignment
            most = most_pairs + ep.num_local_experts * (alignment - 1)
            n = min(d.rows.shape[0], -(-most // alignment) * alignment)
        scales = None if d.scales is None else d.scales[:n]
        segments = Segments(d.expert_offsets, *d.segments.values())
        return Arrived(d.rows[:n], scales, segments, d.dtype)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        """Adds the time within it to a stage."""
        start = self._now()
        yield
        self.seconds[stage] += self._now() - start
