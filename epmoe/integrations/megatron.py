"""Puts epmoe's exchange into Megatron-Core's MoE layers, in place of Megatron's all-to-all.

    spec = get_gpt_layer_local_spec(num_experts=64, moe_grouped_gemm=False)
    spec.submodules.mlp = epmoe.integrations.megatron.exchanged(spec.submodules.mlp)

Router, experts and shared experts stay Megatron's. The experts multiply their outputs by the
router's probabilities, so combine only adds them up. With tensor parallel experts each expert is
cut into ETP parts, one on each rank of a tensor parallel group. epmoe counts each part as an
expert, so a token goes to every rank that has a part of one of its experts.

Letters in names and shapes: S is the sequence length, B the batch size, H the hidden size, and
T = S · B counts the tokens of this rank. E counts the experts of the model, e those of this rank, K
the experts of a token, and N the rows that arrive.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.exchange.handles import RoundShape
from epmoe.group.errors import EPStateError
from epmoe.integrations.entered import Entered
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

# The environment variable that users set where a later batch is longer than the first one.
_LIMIT = "EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK"
# Megatron's experts multiply their outputs by the probabilities that come with the rows.
_WEIGHTS_ON: Literal["rows"] = "rows"
# Settings of Megatron's config that must be off, and why.
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
    """Copy `mlp`, a part of a layer's spec, with `EpmoeMoELayer` in place of Megatron's MoELayer.

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
    """Open the windows of all layers with these `shapes`. Collective.

    `shapes` has the number of experts, the experts of a token, the hidden size and the dtype.
    `hidden_states` [S, B, H] are those of the first forward pass.
    """
    # The exchange needs a CPU backend, which Megatron's group may lack.
    ranks = dist.get_process_group_ranks(tp_ep_group)
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    # The windows get room for as many tokens as the rank with the longest batch brings now.
    tokens = hidden_states.shape[:-1].numel()
    max_tokens = torch.tensor(max(tokens, 1))
    dist.all_reduce(max_tokens, dist.ReduceOp.MAX, group)
    sections = {
        "capacity": {"max_num_tokens_per_rank": int(max_tokens)},
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
    """Dispatches and combines the tokens of one MoE layer of Megatron. It takes the arguments of
    Megatron's own dispatchers.

    Layers with the same sizes share windows, which the first forward pass opens. The windows have
    room for as many tokens as any rank brings in that pass. The environment variable
    EPMOE_CAPACITY__MAX_NUM_TOKENS_PER_RANK sets another number of tokens.

    Megatron's layer calls the stages one after another, from `dispatch_preprocess` to
    `combine_postprocess`, on all ranks. They also work without a layer. A stage raises RuntimeError
    if the stage before it was not called. The constructor raises ValueError if the config asks for
    something that epmoe does not do.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any) -> None:
        for name, reason in _REFUSED.items():
            if getattr(config, name, False):
                raise ValueError(f"`{name}` must be False with epmoe: {reason}")
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        # Megatron's own CUDA graphs keep these attributes from one stage to the next.
        self.cudagraph_attrs = [
            "ids",
            "shared_experts.gate_score",
            "shared_experts.cached_fc1_input",
        ]
        # `dispatch_preprocess` leaves these two to the later stages: the shape [S, B, H] of its
        # input, and the ids of the experts of each token.
        self.hidden_shape: torch.Size | None = None
        self.ids: Tensor | None = None
        # The exchange of the first forward pass, and the round that is open.
        self._exchange: TrainingExchange | None = None
        self._routed: Routed | None = None
        self._tag = 0

    def enter(self, hidden_states: Tensor) -> Entered:
        """Come to the round of a forward pass of `hidden_states` [S, B, H]. After an exception the
        caller calls `give_up`.

        The first pass opens the windows, and is collective. Raises ValueError if they have no room
        for the tokens.
        """
        # With `moe_latent_size` the experts' rows are shorter than the model's.
        H = getattr(self.config, "moe_latent_size", None) or hidden_states.shape[-1]
        T = hidden_states.shape[:-1].numel()
        ep = self._open(hidden_states, H).ep
        max_tokens = ep.config.capacity.max_num_tokens_per_rank
        if max_tokens < T:
            raise ValueError(f"{T} tokens on this rank: set {_LIMIT}, now {max_tokens}, to {T}")
        return Entered.of(ep)

    def give_up(self, entered: Entered | None, hidden_states: Tensor) -> None:
        """After an exception in a forward pass: close its round, or take part in the one that the
        others come to, without tokens. They learn that this rank did.

        `entered` is what `enter` has returned; None if it has not.
        """
        training = self._exchange
        # The windows are not open yet.
        if training is None:
            return
        shape = partial(RoundShape.of, training.ep.config, hidden_states.dtype)
        # Closed windows have no rounds.
        with suppress(EPStateError):
            entered = entered or Entered.of(training.ep)
            training.give_up(entered.exchange, entered.rounds_before, self._tag, _WEIGHTS_ON, shape)

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """List the ids of each token's experts and their probabilities.

        `hidden_states` are [S, B, H]. The bool `routing_map` [T, E] says which experts a token has:
        at most `moe_router_topk` of them. `probs` [T, E] has the probability of each expert.
        Returns the tokens [T, H] and their probabilities [T, K], or [T, K · ETP] with tensor
        parallel experts. The ids stay in `ids`, in ascending order for each token. The first call
        opens the windows and is collective. Shared experts begin their work here.
        """
        self._open(hidden_states, hidden_states.shape[-1])
        self.hidden_shape = hidden_states.shape
        # Find the ids of each token's experts in ascending order. A token with fewer than K experts
        # gets the id E in the remaining places, with the probability 0.
        E = routing_map.shape[1]
        all_E = torch.arange(E, dtype=torch.int32, device=routing_map.device)
        chosen_TE = torch.where(routing_map, all_E, E)
        K = self.config.moe_router_topk
        ids_TK = chosen_TE.topk(K, largest=False, sorted=True).values
        is_chosen_TK = ids_TK < E
        weights_TK = probs.gather(1, ids_TK.clamp(max=E - 1).long())
        weights_TK = weights_TK.masked_fill(~is_chosen_TK, 0.0)
        # Turn each expert into its ETP parts. The group lists the ETP ranks of one tensor parallel
        # group next to each other, and each of these ranks has the same e experts. So part t of
        # expert i is expert i % e of the rank i // e · ETP + t. Places without an expert get −1.
        e = self.num_local_experts
        parts = torch.arange(self.tp_size, dtype=torch.int32, device=ids_TK.device)
        ids_TK1 = ids_TK[..., None]
        ids_TKt = (ids_TK1 // e * self.tp_size + parts) * e + ids_TK1 % e
        self.ids = ids_TKt.masked_fill(~is_chosen_TK[..., None], -1).flatten(1)
        # Shared experts begin here, if they run at the same time as the exchange.
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        weights_TKt = weights_TK[..., None].expand(-1, -1, self.tp_size)
        return hidden_states.reshape(-1, hidden_states.shape[-1]), weights_TKt.flatten(1)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send the tokens [T, H] and their probabilities [T, K] to the ranks of their experts.
        Collective.

        Returns the rows [N, H] that arrived, sorted by local expert, and the probability of each
        row [N]. The rows own their memory. The host waits until their number is known.
        """
        if self._exchange is None or self.ids is None:
            raise RuntimeError("`token_dispatch` without a `dispatch_preprocess` before")
        self._order_shared_experts()
        self._routed = self._exchange.dispatch(
            hidden_states, self.ids, probs, weights_on=_WEIGHTS_ON, tag=self._tag
        )
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(self._routed.rows)
        assert self._routed.row_weights is not None
        return self._routed.rows, self._routed.row_weights.to(probs.dtype)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows and probabilities as they are, with the number of rows of each local
        expert between them: int64 [e] on the host.
        """
        if self._routed is None:
            raise RuntimeError("`dispatch_postprocess` without a `token_dispatch` before")
        return hidden_states, self._routed.tokens_per_expert.long().cpu(), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the rows as they are: Megatron calls this stage of every dispatcher."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Send the experts' weighted outputs [N, H] back, and add them up to [T, H]. Collective."""
        # A round is combined once, so forget it before anything can raise.
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
        """Give the sums [T, H] the shape [S, B, H] of the input.

        Shared experts that run at the same time as the exchange end here: their output is added.
        """
        if self.hidden_shape is None:
            raise RuntimeError("`combine_postprocess` without a `dispatch_preprocess` before")
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is None:
            return output
        return output + self.shared_experts.get_output()

    def _order_shared_experts(self) -> None:
        """Let the shared experts wait for the stream of the exchange between the parts of their
        work. Megatron-Core 0.16 has no such call, so nothing happens there.
        """
        if hasattr(self.shared_experts, "wait_current_stream"):
            self.shared_experts.wait_current_stream()

    def _open(self, hidden_states: Tensor, H: int) -> TrainingExchange:
        """Find the exchange that all layers with these sizes share. The first call opens it and is
        collective. `H` is the length of the experts' rows.
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
    """Megatron's MoELayer with epmoe's exchange. It takes the arguments of MoELayer.

    `moe_token_dispatcher_type` must be "alltoall", because Megatron's checks for that dispatcher
    hold for epmoe, too. Raises ValueError otherwise, or if the config asks for something that epmoe
    does not do.
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
        # Replace the dispatcher that Megatron has made, but keep its groups and shared experts.
        replaced: MoETokenDispatcher = self.token_dispatcher
        groups = SimpleNamespace(
            ep=replaced.ep_group, expt_tp=replaced.tp_group, tp_ep=replaced.tp_ep_group
        )
        self.token_dispatcher = EpmoeTokenDispatcher(self.num_local_experts, config, groups)
        if replaced.shared_experts is not None:
            self.token_dispatcher.set_shared_experts(replaced.shared_experts)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of Megatron's MoELayer. The forward and the backward pass are
        collective. Raises the errors of the exchange.
        """
        # A compiler that traces this code runs no round, so there is none to give up.
        if torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        dispatcher = self.token_dispatcher
        entered: Entered | None = None
        # Not a context manager: a signal handler may raise behind the end of one, too.
        try:
            entered = dispatcher.enter(hidden_states)
            return super().forward(hidden_states, *args, **kwargs)
        except BaseException:
            dispatcher.give_up(entered, hidden_states)
            raise


def close() -> None:
    """Release every `ExpertParallel` that this module has made. Layers that have run cannot run
    again.
    """
    _session.close()
