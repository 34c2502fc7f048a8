"""SGLang's dispatcher of `--moe-a2a-backend deepep_v2`, in place of DeepEP's.

    x, ids, weights ─ dispatch ─▶ rows [n,D], psum [e] ─ SGLang's DeepGEMM runner ─▶ rows [n,D]
    rows [n,D] ─ combine ─▶ y [T,D]

SGLang makes a dispatcher for each MoE layer. All dispatchers with the same shapes share one
`ExpertParallel`, which the first of them makes while the model is built: before memory is measured
for the KV cache, and before any CUDA graph.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epmoe.config.config import ConfigError, EPConfig
from epmoe.exchange.handles import Dispatched
from epmoe.group.errors import EPStateError
from epmoe.integrations.balancing import Balancing, section_of
from epmoe.integrations.entered import Entered
from epmoe.integrations.served import ServedExperts
from epmoe.integrations.session import Session, make_config
from epmoe.local.experts import GroupedExperts
from epmoe.native.arguments import FP8
from epmoe.native.formats import PayloadName, payload_of
from epmoe.native.package import __version__
from epmoe.service import ExpertParallel

try:
    # Before its dispatchers: these modules import one another.
    import sglang.srt.layers.moe.fused_moe_triton.layer  # noqa: F401
    from sglang.srt.eplb.expert_location import (
        ExpertLocationMetadata,
        get_global_expert_location_metadata,
    )
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
    from sglang.srt.layers.moe.token_dispatcher import deepep_v2
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInput
    from sglang.srt.layers.moe.topk import TopKOutput
    from sglang.srt.layers.moe.utils import get_deepep_v2_fp8_scale_format
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_exec, get_parallel
except ImportError as error:
    raise ImportError(
        "epmoe.integrations.sglang needs SGLang 0.5.23, with its plugins and its DeepEP v2 "
        f"backend: {error}"
    ) from error

__all__ = ["EpmoeDispatcher", "close", "create_dispatcher", "poll", "register_hooks"]

logger = logging.getLogger(__name__)

# In rows: segments of DeepGEMM's contiguous layout start at multiples.
_ALIGNMENT = 128
# SGLang may compile DeepGEMM's kernels in the first round, for up to 20 minutes, while other ranks
# wait in `combine`. Later, a rank that is late is one that compiles a single kernel: SGLang's own
# watchdog gives it 300 s.
_DEADLINES = {"warmup_timeout_s": 3600.0, "timeout_s": 300.0}
_LIMIT = "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
_FACTORY = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
_LOADER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader"
# Settings of SGLang's experts that `GroupedExperts` here would leave out.
_OTHERS = (
    "gemm1_alpha",
    "gemm1_beta",
    "gemm1_clamp_limit",
    "swiglu_limit",
    "apply_router_weight_on_input",
)
_ROUND = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.forward_impl"
_STEP = "sglang.srt.model_executor.model_runner.ModelRunner.forward"

_session: Session[Balancing] = Session()


def register_hooks(live: dict[str, Any] | None) -> None:
    """Have SGLang call `create_dispatcher` for each layer, `forward` for its rounds, `poll` before
    each step, and `load` for the weights of experts that move.
    """
    HookRegistry.register(_FACTORY, partial(create_dispatcher, live=live), HookType.AROUND)
    HookRegistry.register(_ROUND, forward, HookType.AROUND)
    if live is not None:
        HookRegistry.register(_LOADER, load, HookType.AROUND)
    HookRegistry.register(_STEP, poll, HookType.BEFORE)


def create_dispatcher(
    original: Any, moe_runner_config: Any, quant_method: Any, live: dict[str, Any] | None = None
) -> BaseDispatcher:
    """Create a dispatcher in place of SGLang's factory: ours if SGLang would take that of DeepEP
    v2. Collective.

    With `live` experts move. Raises ValueError if the layer needs what epmoe does not have, and
    what `ExpertParallel` raises.
    """
    # SGLang's own dispatcher checks the layer, and holds no memory yet.
    theirs = original(moe_runner_config, quant_method=quant_method)
    if not isinstance(theirs, deepep_v2.DeepEPv2Dispatcher):
        logger.warning(
            "epmoe is not in use: it takes the place of --moe-a2a-backend deepep_v2 only"
        )
        return theirs
    return EpmoeDispatcher(_share(theirs, moe_runner_config, _payload(theirs), live))


def _payload(theirs: deepep_v2.DeepEPv2Dispatcher) -> PayloadName:
    """The format of rows that the experts take. Raises ValueError for one that epmoe
    does not have.
    """
    if not theirs.use_fp8_dispatch:
        return "auto"
    name = payload_of(FP8, theirs._impl.activation_scale_block_size)
    if name is None or get_deepep_v2_fp8_scale_format().ue8m0:
        raise ValueError(
            "epmoe sends fp8 rows with one fp32 scale for 128 elements; this layer's experts take "
            "UE8M0 scales (MXFP8, or DeepGEMM on Blackwell): unset EPMOE_SGLANG"
        )
    return name


def _share(
    theirs: deepep_v2.DeepEPv2Dispatcher,
    layer: Any,
    payload: PayloadName,
    live: dict[str, Any] | None,
) -> Balancing:
    """Find the exchange of all layers with these shapes. The first call makes it and is
    collective.
    """
    tp_group = get_parallel().tp_group

    def make(ep_size: int) -> Balancing:
        config = _config(theirs, layer, ep_size, payload, live)
        ep = ExpertParallel(config, tp_group.cpu_group, tp_group.device)
        plan = ep.memory_plan()
        logger.info(
            f"epmoe {__version__} carries the tokens of SGLang's MoE layers, payload {payload}: "
            f"window {plan.window_bytes:,} bytes, scratch {plan.scratch_bytes:,} bytes; {ep}"
        )
        return Balancing(ep, live, logger)

    shapes = (layer.num_experts, layer.top_k, layer.hidden_size, payload, live is None)
    return _session.share(shapes, tp_group.cpu_group, tp_group.device, make)


def _config(
    theirs: deepep_v2.DeepEPv2Dispatcher,
    layer: Any,
    R: int,
    payload: PayloadName,
    live: dict[str, Any] | None,
) -> EPConfig:
    """Make the configuration of such layers. Raises ValueError and ConfigError if SGLang's
    settings, or variables of the environment, do not fit.
    """
    E = layer.num_experts
    K = layer.top_k
    e = layer.num_local_experts
    M = theirs.num_max_dispatch_tokens_per_rank
    if R * e != E:
        raise ValueError(
            f"every rank must have the same number of experts, got {e} of {E} on each of {R} ranks"
        )
    # What SGLang settles. Rows of gaps stay undefined: its GEMMs and the steps between them take
    # each row by itself.
    settled = {"max_num_tokens_per_rank": M, "alignment": _ALIGNMENT}
    sections = {
        "capacity": {**settled, "max_expert_rows": _most_rows(R * M * min(K, e), e)},
        "exchange": {**_DEADLINES, "payload": payload},
    }
    # Where experts move, epmoe counts logical ones.
    if live is not None:
        location = _location(layer.layer)
        E = location.num_logical_experts
        sections["placement"] = section_of(live, location.num_layers, slots_per_rank=e)
    config = make_config(
        E, K, layer.hidden_size, torch.bfloat16, R, sections, from_environment=True
    )
    # Variables of the environment may have overridden what is SGLang's to choose.
    capacity_is_settled = config.capacity.model_copy(update=settled) == config.capacity
    if config.exchange.payload != payload or not capacity_is_settled:
        raise ConfigError(
            f"SGLang settles `exchange.payload` = {payload}, `capacity.alignment` = {_ALIGNMENT} "
            f"and, by {_LIMIT}, `capacity.max_num_tokens_per_rank` = {M}: unset their variables "
            "EPMOE_…"
        )
    return config


def _location(layer: Any) -> ExpertLocationMetadata:
    """The ranks to which SGLang loads experts: logical ones and, by --ep-num-redundant-experts,
    copies of the first ones. epmoe begins with the same. Raises ValueError if experts cannot move.
    """
    moe = get_exec().moe
    location = get_global_expert_location_metadata()
    settings = {
        "--enable-eplb": moe.enable_eplb,
        # --init-expert-location sets it, too
        "--ep-dispatch-algorithm": moe.ep_dispatch_algorithm is not None,
        "--enable-deterministic-inference": get_exec().deterministic.enable_deterministic_inference,
    }
    named = [flag for flag, is_set in settings.items() if is_set]
    if named:
        raise ValueError(
            f"experts that epmoe moves do not go with {', '.join(named)}: leave out one or the "
            "other"
        )
    if location is None or not layer.uses_expert_location:
        raise ValueError(
            "SGLang knows of no experts that could move in this model: set EPMOE_SGLANG=layer"
        )
    return location


class EpmoeDispatcher(BaseDispatcher):
    """Dispatch and combine of one MoE layer of SGLang. The host waits for no device, so a CUDA
    graph can hold both.
    """

    def __init__(self, balancing: Balancing) -> None:
        super().__init__()
        self._balancing = balancing
        self._ep = balancing.ep
        self._tag = self._ep.new_tag()
        self._round: Dispatched | None = None
        self._experts: ServedExperts | None = None
        # What every call of the layer reads.
        self._most = self._ep.config.capacity.max_num_tokens_per_rank
        self._num_local_experts = self._ep.num_local_experts

    def dispatch(
        self, hidden_states: Tensor, topk_output: TopKOutput
    ) -> deepep_v2.DeepEPv2DispatchOutput:
        """Send tokens bf16 [T, D] with their ids and weights [T, K], ids −1 for none. Returns
        expert-major rows for DeepGEMM.

        Rows and scales are views of the window, valid until `combine`. Weights are left to
        `combine`.

        Raises ValueError if T is larger than SGLang's limit for a rank, and what
        `ExpertParallel.dispatch` raises.
        """
        x_TD = hidden_states
        ids_TK = topk_output.topk_ids
        weights_TK = topk_output.topk_weights
        T = x_TD.shape[0]
        ep = self._ep
        exchange = ep.exchange
        rounds = exchange.rounds
        entered = Entered(ep, exchange, rounds.count)
        # In place: the context managers `at_most` and `giving_up` would cost each layer 5 µs.
        longest_before = rounds.most_tokens
        try:
            together, longest = self._most_tokens(T)
            rounds.most_tokens = longest
            if self._most < T:
                raise ValueError(f"{T} tokens on this rank: set {_LIMIT}, now {self._most}, to {T}")
            d = ep.dispatch(x_TD, ids_TK, weights_TK, tag=self._tag)
            self._round = d
        except BaseException:
            # SGLang's layers with LoRA call this without `forward`.
            self.give_up(entered)
            raise
        finally:
            rounds.most_tokens = longest_before
        # The host does not know how many rows arrive: n is what it must expect.
        e = self._num_local_experts
        K = ids_TK.shape[1]
        n = min(_most_rows(max(together, 1) * min(K, e), e), d.rows.shape[0])
        # Slices, because SGLang empties the tensors that it is given once it has read them.
        scales = None if d.scales is None else d.scales[:n]
        # SGLang's DeepGEMM wants the end of each segment.
        psum = None
        if self._experts is None:
            psum = d.expert_offsets[:-1] + d.tokens_per_expert
        return deepep_v2.DeepEPv2DispatchOutput(
            d.rows[:n], scales, None, None, psum, is_expanded=True, expert_alignment=_ALIGNMENT
        )

    def compute(self, layer: Any, dispatched: deepep_v2.DeepEPv2DispatchOutput) -> CombineInput:
        """Compute outputs [n, D] of the open round's rows by `GroupedExperts`, whose memory is that
        of the layer's weights.

        Raises ValueError in the first call if they are other experts than those.
        """
        # Make them in the first call, and where weights were loaded again.
        serve = self._experts
        if serve is None or serve.experts.held()[0].data_ptr() != layer.w13_weight.data_ptr():
            experts = _grouped(layer)
            serve = ServedExperts(experts)
            self._experts = serve
            self._balancing.move(self._tag, experts)
        d = self._round
        assert d is not None
        outputs = serve(dispatched.hidden_states, dispatched.hidden_states_scale, d)
        return deepep_v2.DeepEPv2CombineInput(outputs, None)

    def enter(self) -> Entered:
        """The round that comes next. Raises EPStateError while the group sleeps."""
        return Entered.of(self._ep)

    def give_up(self, entered: Entered | None) -> None:
        """After an exception in a round: close it, or take part in the one that the others come to,
        without tokens. They learn that this rank did.

        `entered` is what `enter` has returned before it; None: it has not.
        """
        # It has no rounds while it sleeps.
        with suppress(EPStateError):
            entered = entered or self.enter()
            entered.give_up(self._tag)
        self._round = None

    def abort(self) -> None:
        """Abort the open round, if any: the other ranks learn that this one did."""
        self._ep.abort()
        self._round = None

    def combine(self, combine_input: CombineInput) -> Tensor:
        """Sum the experts' outputs, weighted: bf16 [T, D].

        Raises ValueError for a model that weights and sums routes by itself, RuntimeError without a
        dispatch before, and what `ExpertParallel.combine` raises.
        """
        d = self._round
        if d is None:
            raise RuntimeError("combine without a dispatch before")
        try:
            if combine_input.routewise_layout is not None:
                raise ValueError(
                    "epmoe weights and sums the outputs itself; this model wants to: unset "
                    "EPMOE_SGLANG"
                )
            y_TD = self._ep.combine(combine_input.hidden_states, d)
            self._round = None
            return y_TD
        except BaseException:
            self.abort()
            raise

    def slots(self) -> list[int] | None:
        """The experts of this layer on this rank, as `Balancing.slots` says them. Collective in the
        first call.
        """
        return self._balancing.slots(self._tag)

    def _most_tokens(self, own: int) -> tuple[int, int | None]:
        """The most tokens in this call of all ranks together, and of one rank, if SGLang's host
        knows them. None: only this rank's tokens are known.
        """
        # Of the member itself: the property would cost each layer a call.
        R = self._ep.life.member.size
        M = self._most
        parallel = get_parallel()
        in_parts = parallel.attn_cp_size != 1
        # One batch: every rank has all of it, or parts that differ by at most a token.
        if parallel.attn_dp_size == 1:
            together = R * M if in_parts else min(own * R + R - 1, R * M)
            return together, None
        # A batch for each replica, whose ranks have all of it or parts.
        counts = get_dp_global_num_tokens()
        is_known = not in_parts and counts and len(counts) == parallel.attn_dp_size
        if not is_known or own > max(counts):
            return R * M, M
        return min(sum(counts) * (R // len(counts)), R * M), min(max(counts), M)


def forward(original: Any, layer: Any, *arguments: Any, **named: Any) -> Tensor:
    """Run a layer from its dispatch to its combine, in place of SGLang's `forward_impl`. Whatever
    raises between the two, SGLang's own experts among it, gives the round up.
    """
    dispatcher = getattr(layer, "dispatcher", None)
    if not isinstance(dispatcher, EpmoeDispatcher):
        y_TD: Tensor = original(layer, *arguments, **named)
        return y_TD
    entered: Entered | None = None
    try:
        entered = dispatcher.enter()
        y_TD = original(layer, *arguments, **named)
        return y_TD
    except BaseException:
        dispatcher.give_up(entered)
        raise


def load(
    original: Any,
    layer: Any,
    param: Any,
    loaded_weight: Any,
    weight_name: str,
    shard_id: str,
    expert_id: int | None,
) -> None:
    """Load weights of an expert, in place of SGLang's loader. If experts move, they go into the
    slots that have this expert.
    """
    dispatcher = getattr(layer, "dispatcher", None)
    slots = None
    if isinstance(dispatcher, EpmoeDispatcher):
        slots = dispatcher.slots()
    if slots is None:
        original(layer, param, loaded_weight, weight_name, shard_id, expert_id)
        return
    for slot, expert in enumerate(slots):
        if expert == expert_id:
            layer._weight_loader_impl(param, loaded_weight, weight_name, shard_id, slot)


def _grouped(layer: Any) -> GroupedExperts:
    """Make `GroupedExperts` in the memory of a layer's weights. Raises ValueError for other
    experts.
    """
    config = layer.moe_runner_config
    odd = [name for name in _OTHERS if getattr(config, name, None)]
    if hasattr(layer, "w13_weight_bias"):
        odd.append("biases")
    if odd or config.activation != "silu" or not config.is_gated:
        raise ValueError(
            f"EPMOE_SGLANG=layer takes plain SwiGLU, got {odd or config.activation}: set "
            "EPMOE_SGLANG=1"
        )
    return GroupedExperts(
        layer.w13_weight,
        layer.w2_weight,
        gate_up_scales=getattr(layer, "w13_weight_scale_inv", None),
        down_scales=getattr(layer, "w2_weight_scale_inv", None),
        batch_invariant=get_exec().deterministic.enable_deterministic_inference,
    ).requires_grad_(False)


def _most_rows(pairs: int, experts: int) -> int:
    """Most rows of so many pairs over so many experts, each expert's in whole blocks
    of 128 rows.
    """
    # Each expert that has a pair fills a block; whole blocks take the rest.
    used = min(pairs, experts)
    return _ALIGNMENT * (used + (pairs - used) // _ALIGNMENT)


def poll(*_: object, **__: object) -> None:
    """Before each step: raise what the kernels of earlier steps have reported. Replays of CUDA
    graphs cannot raise.
    """
    _session.poll()


def close() -> None:
    """Release every `ExpertParallel` made here. Dispatchers made before are of no use then."""
    _session.close()
