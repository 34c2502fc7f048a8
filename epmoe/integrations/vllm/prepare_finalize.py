"""The exchange as vLLM's modular kernel wants it: `prepare` is dispatch, `finalize` is combine.

    layout   the experts get                                     combine
    rank     rows [R·M, D] with all ids and weights of a token   adds rows that experts have summed
    layer    one row for each pair, for `GroupedExperts`         applies the weights and sums

Slots that hold no row carry the id of an expert of another rank, which vLLM's expert map reads as
−1. Rows that a block-scaled fp8 kernel takes are quantized before they travel; any other
quantization happens on arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)

from epmoe.exchange.exchange import Exchange
from epmoe.exchange.handles import Dispatched, RoundShape
from epmoe.group.errors import EPStateError
from epmoe.integrations.vllm.choice import VllmLayout
from epmoe.integrations.vllm.sizes import Sizes
from epmoe.service import ExpertParallel


class _Entered(NamedTuple):
    """A round that this rank has come to."""

    ep: ExpertParallel
    exchange: Exchange
    longest: int
    """tokens that a rank brings to it at most"""
    rounds_before: int
    shape: RoundShape


class EpmoePrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Dispatch and combine of epmoe around vLLM's experts, in a `layout` of the module's table.

    `aligned`: segments start at multiples of a number of rows, for the GEMM.
    """

    def __init__(self, sizes: Sizes, layout: VllmLayout, aligned: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.layout = layout
        self.aligned = aligned
        # Of the last call of `prepare`, for `give_up`.
        self._entered: _Entered | None = None
        # The open round, and the outputs of `GroupedExperts`, which need no buffer of vLLM's.
        self._dispatched: Dispatched | None = None
        self._outputs: Tensor | None = None
        self._local_ids = False
        self._quantize = MoEPrepareAndFinalizeNoDPEPModular()
        ep = sizes.exchanges[0]
        self._num_ranks = ep.size
        self.tag = ep.new_tag()
        # Where weights come on input, and elsewhere: what other ranks bring to a round.
        shape = RoundShape.of(ep.config)
        if layout == "rank":
            shape = shape._replace(layout="rank")
        else:
            shape = shape._replace(aligned=aligned)
        self._shape = shape
        # In layout `rank` the weights are applied on arrival: dispatch has one row for all experts
        # of a token.
        self._shape_on_input = shape._replace(weight_rows=layout != "rank")
        # Ids that nobody reads, and by number of rows as many of them.
        self._no_id = torch.empty(1, 1, dtype=torch.int32, device=ep.device)
        self._no_ids: dict[int, Tensor] = {}

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """vLLM's experts for CPUs take local ids and no expert map; all others take global ids and
        the map.
        """
        self._local_ids = type(fused_experts).__module__.rpartition(".")[2] == "cpu_moe"

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        return torch.int32

    def max_num_tokens_per_rank(self) -> None:
        """None: the experts get rows [N, D], not a slab for each expert."""

    def num_dispatchers(self) -> int:
        return self._num_ranks

    def output_is_reduced(self) -> bool:
        return True

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> mk.PrepareResultType:
        """Send this rank's tokens a1 [T, D]. Returns the rows of its experts, their scales, counts,
        ids and weights.
        """
        self._dispatched = None
        self._outputs = None
        entered = self._enter(apply_router_weight_on_input)
        self._entered = entered
        shape = entered.shape
        # In place: the context manager `at_most` would cost each layer 2 µs.
        rounds = entered.exchange.rounds
        longest_before = rounds.most_tokens
        try:
            rounds.most_tokens = entered.longest
            dispatched = entered.ep.dispatch(
                a1,
                topk_ids,
                topk_weights,
                layout=shape.layout,
                apply_router_weight_on_input=shape.weight_rows,
                tag=self.tag,
                aligned=shape.aligned,
            )
        finally:
            rounds.most_tokens = longest_before
        self._dispatched = dispatched
        return self._received(
            dispatched, expert_map, apply_router_weight_on_input, quant_config, defer_input_quant
        )

    def compute(self, experts: Callable[[Dispatched], Tensor]) -> None:
        """The outputs of `experts` for the open round, which finalize then takes as they lie."""
        assert self._dispatched is not None, "the experts need a prepare before them"
        self._outputs = experts(self._dispatched)

    def finalize(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        """The outputs of this rank's experts → output [T, D], the sums of this rank's tokens."""
        dispatched = self._dispatched
        outputs = self._outputs
        assert self._entered is not None and dispatched is not None, (
            "finalize needs a prepare before it"
        )
        self._dispatched = None
        self._outputs = None
        ep = self._entered.ep
        if outputs is None:
            ep.combine_partial(self._reduced(*arguments, **named), dispatched, out=output)
        else:
            ep.combine(outputs, dispatched, out=output)

    def begin(self) -> None:
        """Before all that vLLM does in a round, so that `give_up` knows how far it has come."""
        self._entered = None

    def give_up(self, on_input: bool) -> None:
        """After an exception behind `begin`, wherever it comes from: this rank closes its round, or
        takes part in the one that the others come to, without tokens. They learn that it did.

        `on_input`: weights come on input. It raises nothing of the exchange.
        """
        # It has no rounds while it sleeps, and once it is closed.
        with suppress(EPStateError):
            entered = self._entered or self._enter(on_input)
            with entered.ep.at_most(entered.longest):
                entered.ep.give_up(
                    entered.exchange, entered.rounds_before, self.tag, lambda: entered.shape
                )

    def _enter(self, on_input: bool) -> _Entered:
        """The round that comes next."""
        ep, longest = self.sizes.for_this_step()
        exchange = ep.exchange
        shape = self._shape_on_input if on_input else self._shape
        return _Entered(ep, exchange, longest, exchange.rounds.count, shape)

    def _received(
        self,
        dispatched: Dispatched,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> mk.PrepareResultType:
        """View what arrived as vLLM's experts take it."""
        # Layout "layer": rows of pairs, whose ids nobody reads.
        if self.layout == "layer":
            N = len(dispatched.rows)
            ids = self._no_ids.get(N)
            if ids is None:
                ids = self._no_id.expand(N, 1)
                self._no_ids[N] = ids
            return dispatched.rows, dispatched.scales, None, ids, ids
        # Layout "rank": a slot for each token of each source.
        received = dispatched.recv
        rows = received.x.flatten(0, 1)
        ids = received.ids.flatten(0, 1)
        weights = received.weights.flatten(0, 1)
        scales = None if received.scales is None else received.scales.flatten(0, 1)
        # Weights on input come with one expert a token, and can multiply the scales of its row.
        if scales is not None and apply_router_weight_on_input:
            scales = scales * weights
        # Rows that have travelled as they are: vLLM applies weights and quantizes, where it would.
        elif scales is None:
            rows, scales, *_ = self._quantize.prepare(
                rows,
                weights,
                ids,
                0,
                None,
                apply_router_weight_on_input,
                quant_config,
                defer_input_quant,
            )
        # Local ids: a pair of another rank becomes one of the first expert, with the weight 0.
        if self._local_ids:
            assert expert_map is not None
            local_ids = expert_map[ids]
            weights = weights * (local_ids >= 0)
            ids = local_ids.clamp(min=0)
        return rows, scales, None, ids, weights

    def _reduced(
        self,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Tensor:
        """Bring the outputs of vLLM's experts into the form that combine takes, [R, M, D]."""
        reduce = weight_and_reduce_impl
        if isinstance(reduce, TopKWeightAndReduceDelegate):
            reduce = TopKWeightAndReduceContiguous()
        rows = reduce.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )
        return rows.view(self._num_ranks, -1, rows.shape[-1])
