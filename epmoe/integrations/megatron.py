"""Megatron-Core's MoE layers with epmoe's exchange, in place of its all-to-all.

    spec = get_gpt_layer_local_spec(num_experts=64, moe_grouped_gemm=False)
    spec.submodules.mlp = epmoe.integrations.megatron.exchanged(spec.submodules.mlp)

Router, experts and shared experts stay Megatron's. The experts apply the probabilities, so that
combine only adds. With tensor parallel experts (ETP) a token goes to every rank that has a part of
its expert: each part counts as an expert.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.exchange.handles import RoundShape
from epmoe.integrations.session import TRAINING_DEADLINES, Session, make_config
from epmoe.native.package import __version__
from epmoe.service import ExpertParallel
from epmoe.training import Routed, TrainingExchange

try:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
except ImportError as error:
    raise ImportError(
        f"epmoe.integrations.megatron needs Megatron-Core 0.16 or 0.19: {error}"
    ) from error

__all__ = ["EpmoeMoELayer", "EpmoeTokenDispatcher", "close", "exchanged"]

logger = logging.getLogger(__name__)

_LIMIT = "EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK"
_REFUSED = {
    "moe_pad_expert_input_to_capacity": (
        "epmoe sends the tokens that are there, without padding to the capacity"
    ),
    "moe_router_padding_for_quantization": (
        "epmoe sends no padding; Megatron's experts pad their own rows"
    ),
    "overlap_moe_expert_parallel_comm": "its schedule cuts the graph between dispatch and combine",
}

_session: Session[ExpertParallel] = Session()


def exchanged(mlp: Any) -> Any:
    """A new `mlp` of a layer's spec, with `EpmoeMoELayer` for Megatron's MoELayer.

    `mlp` is a ModuleSpec (0.16) or a partial (0.19) of MoELayer, as Megatron's functions for specs
    make it. Raises TypeError for anything else, such as a layer without experts.
    """
    if isinstance(mlp, ModuleSpec) and mlp.module is MoELayer:
        return dataclasses.replace(mlp, module=EpmoeMoELayer)
    if isinstance(mlp, functools.partial) and mlp.func is MoELayer:
        return functools.partial(EpmoeMoELayer, *mlp.args, **mlp.keywords)
    raise TypeError(f"`mlp` must be a ModuleSpec or a partial of Megatron's MoELayer, got {mlp!r}")


def _open_windows(
    tp_ep_group: dist.ProcessGroup,
    hidden_states: Tensor,
    shapes: tuple[int, int, int, torch.dtype],
    ep_size: int,
) -> ExpertParallel:
    """Make the windows of layers with these shapes: E, K, H and the dtype. Collective."""
    # The exchange needs a CPU backend, which Megatron's group may lack.
    ranks = dist.get_process_group_ranks(tp_ep_group)
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    # Room for the longest batch of a rank now.
    tokens = hidden_states.shape[:-1].numel()
    most = torch.tensor(max(tokens, 1))
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    sections = {
        "capacity": {"max_num_tokens_per_rank": int(most)},
        "exchange": TRAINING_DEADLINES,
    }
    config = make_config(*shapes, ep_size, sections, from_environment=True)
    ep = ExpertParallel(config, group, hidden_states.device)
    plan = ep.memory_plan()
    logger.info(
        f"epmoe {__version__} carries the tokens of Megatron's MoE layers: window "
        f"{plan.window_bytes:,} bytes, scratch {plan.scratch_bytes:,} bytes; {ep}"
    )
    return ep


class EpmoeTokenDispatcher(MoETokenDispatcher):
    """Dispatch and combine of one MoE layer of Megatron, with Megatron's arguments.

    Layers with the same sizes share windows, which the first forward pass opens. They have room for
    as many tokens as a rank brings then, or for as many as the environment says by
    EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK.

    The stages also work without a layer, one after another from `dispatch_preprocess` to
    `combine_postprocess`, each on all ranks. A stage without the one before it is a RuntimeError.
    Raises ValueError if the config has what epmoe does not do.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any) -> None:
        for name, reason in _REFUSED.items():
            if getattr(config, name, False):
                raise ValueError(f"`{name}` must be False with epmoe: {reason}")
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.cudagraph_attrs = [
            "ids",
            "shared_experts.gate_score",
            "shared_experts.cached_fc1_input",
        ]
        self.hidden_shape: torch.Size | None = None
        self.ids: Tensor | None = None
        self._exchange: TrainingExchange | None = None
        self._routed: Routed | None = None
        self._tag = 0

    @contextmanager
    def taking_part(self, hidden_states: Tensor) -> Iterator[None]:
        """Take part in a forward pass of [S, B, H] within this context. An exception gives its
        round up, so that the other ranks learn of it.
        """
        # Experts may compute in a smaller space than the model's.
        H = getattr(self.config, "moe_latent_size", None) or hidden_states.shape[-1]
        T = hidden_states.shape[:-1].numel()
        exchange = self._open(hidden_states, H)
        most = exchange.ep.config.capacity.max_num_tokens_per_rank
        shape = functools.partial(RoundShape.of, exchange.ep.config, hidden_states.dtype)
        with exchange.giving_up(self._tag, "combine", shape):
            if most < T:
                raise ValueError(f"{T} tokens on this rank: set {_LIMIT}, now {most}, to {T}")
            yield

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sort the ids of each token's experts in ascending order, whatever the order of the
        probabilities.

        The first call opens the windows and is collective. Takes hidden_states [S, B, H], a bool
        routing_map [T, E], of which a row has at most `moe_router_topk` true ones, and probs [T,
        E]. Returns tokens [T, H] and their probabilities [T, K], or [T, K · ETP].
        """
        self._open(hidden_states, hidden_states.shape[-1])
        self.hidden_shape = hidden_states.shape
        # The K lowest ids of each token; E where a token has fewer experts.
        E = routing_map.shape[1]
        all_E = torch.arange(E, dtype=torch.int32, device=routing_map.device)
        chosen_TE = torch.where(routing_map, all_E, E)
        K = self.config.moe_router_topk
        ids_TK = chosen_TE.topk(K, largest=False, sorted=True).values
        is_chosen_TK = ids_TK < E
        weights_TK = probs.gather(1, ids_TK.clamp(max=E - 1).long())
        weights_TK = weights_TK.masked_fill(~is_chosen_TK, 0.0)
        # Part t of expert i is the expert (i // e · ETP + t) · e + i % e, since ranks of the group
        # go by ETP first.
        e = self.num_local_experts
        parts = torch.arange(self.tp_size, dtype=torch.int32, device=ids_TK.device)
        ids_TK1 = ids_TK[..., None]
        ids_TKt = (ids_TK1 // e * self.tp_size + parts) * e + ids_TK1 % e
        self.ids = ids_TKt.masked_fill(~is_chosen_TK[..., None], -1).flatten(1)
        # Shared experts begin, where they run at the same time.
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        weights_TKt = weights_TK[..., None].expand(-1, -1, self.tp_size)
        return hidden_states.reshape(-1, hidden_states.shape[-1]), weights_TKt.flatten(1)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens [T, H] and probabilities [T, K] to their experts. Returns rows [N, H] by
        local expert and their probabilities [N].

        Collective. Rows own their memory, and the host waits for their number.
        """
        if self._exchange is None or self.ids is None:
            raise RuntimeError("`token_dispatch` without a `dispatch_preprocess` before")
        self._order_shared_experts()
        self._routed = self._exchange.dispatch(
            hidden_states, self.ids, probs, weights_on="rows", tag=self._tag
        )
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(self._routed.rows)
        assert self._routed.row_weights is not None
        return self._routed.rows, self._routed.row_weights.to(probs.dtype)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and probabilities as they are, and int64 [e] on the host, the rows of each local
        expert.
        """
        if self._routed is None:
            raise RuntimeError("`dispatch_postprocess` without a `token_dispatch` before")
        return hidden_states, self._routed.tokens_per_expert.long().cpu(), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows as they are."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sum weighted outputs [N, H] → [T, H]. Collective."""
        # A round is combined once.
        routed = self._routed
        self._routed = None
        if self._exchange is None or routed is None:
            raise RuntimeError("`token_combine` without a `token_dispatch` before")
        self._order_shared_experts()
        output = self._exchange.combine(hidden_states, routed)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums [T, H] → [S, B, H], with the shared experts' output where they run at
        the same time.
        """
        if self.hidden_shape is None:
            raise RuntimeError("`combine_postprocess` without a `dispatch_preprocess` before")
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is None:
            return output
        return output + self.shared_experts.get_output()

    def _order_shared_experts(self) -> None:
        """Shared experts of 0.19 wait for the exchange's stream between their parts; those of 0.16
        cannot.
        """
        if hasattr(self.shared_experts, "wait_current_stream"):
            self.shared_experts.wait_current_stream()

    def _open(self, hidden_states: Tensor, H: int) -> TrainingExchange:
        """Find the exchange of all layers with these sizes. The first call makes it and is
        collective.
        """
        if self._exchange is not None:
            return self._exchange
        E = self.config.num_moe_experts * self.tp_size
        K = self.config.moe_router_topk * self.tp_size
        shapes = (E, K, H, hidden_states.dtype)
        make = partial(_open_windows, self.tp_ep_group, hidden_states, shapes)
        ep = _session.share(shapes, self.tp_ep_group, hidden_states.device, make)
        self._exchange = TrainingExchange(ep)
        self._tag = ep.new_tag()
        return self._exchange


class EpmoeMoELayer(MoELayer):
    """Megatron's MoELayer, its tokens carried by epmoe. It takes the arguments of MoELayer.

    Raises ValueError if `moe_token_dispatcher_type` is not "alltoall", whose checks of the other
    settings hold here, or if the config has what epmoe does not do.
    """

    token_dispatcher: EpmoeTokenDispatcher

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.moe_token_dispatcher_type != "alltoall":
            raise ValueError(
                "`moe_token_dispatcher_type` must be 'alltoall' with epmoe, which takes its place, "
                f"got {config.moe_token_dispatcher_type!r}"
            )
        if config.transformer_impl == "inference_optimized":
            raise ValueError(
                "`transformer_impl` must not be 'inference_optimized': epmoe takes part in "
                "training only"
            )
        super().__init__(config, *args, **kwargs)
        # In place of the dispatcher that Megatron has made, with its groups.
        theirs: MoETokenDispatcher = self.token_dispatcher
        groups = SimpleNamespace(
            ep=theirs.ep_group, expt_tp=theirs.tp_group, tp_ep=theirs.tp_ep_group
        )
        self.token_dispatcher = EpmoeTokenDispatcher(self.num_local_experts, config, groups)
        if theirs.shared_experts is not None:
            self.token_dispatcher.set_shared_experts(theirs.shared_experts)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """MoELayer's own, forward and backward collective. Raises the errors of the exchange."""
        with self.token_dispatcher.taking_part(hidden_states):
            return super().forward(hidden_states, *args, **kwargs)


def close() -> None:
    """Release every `ExpertParallel` made here. Layers that have run are of no use then."""
    _session.close()
