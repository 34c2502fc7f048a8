"""A whole MoE layer over an `ExpertParallel`: router, exchange and experts, for serving and for
training.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epmoe.checkpoint import state_dicts
from epmoe.checkpoint.adapters import StoredAdapter, read_adapter
from epmoe.checkpoint.put_adapter import put_on_all_ranks
from epmoe.checkpoint.safetensors_folder import GateBias, SafetensorsFolder
from epmoe.config.config import EPConfig
from epmoe.exchange.extra import Extra
from epmoe.exchange.handles import RoundShape, Rows
from epmoe.group.errors import EPStateError
from epmoe.layer_checks import adapter_room, check_parts
from epmoe.live.moves import SlotWeights
from epmoe.local.adapters import NO_ADAPTER, ExpertAdapters, LoRA
from epmoe.local.contexts import take_context_inputs
from epmoe.local.experts import GroupedExperts, is_called_alone, parameter
from epmoe.local.gemm.gemm import Segments
from epmoe.local.logits import router_logits
from epmoe.local.quantize import zero_padding_rows_
from epmoe.local.recording import Routes, record
from epmoe.local.side_stream import SideStream, record_point
from epmoe.local.spread import is_spread
from epmoe.local.stage import without_autocast
from epmoe.local.weight_formats import product_dtype, take_rows
from epmoe.native import opaque
from epmoe.native.arguments import (
    FLOATS,
    FP8,
    INTS,
    check_tensor,
    describe,
    dtype_name,
    refuse_tangents,
)
from epmoe.native.layouts import constant
from epmoe.service import ExpertParallel
from epmoe.training import whole_layer
from epmoe.training.exchange import TrainingExchange, WeightsOn, fits_graphs
from epmoe.training.models import check_spread, problem_with, spread
from epmoe.training.route import counted


class MoELayer(nn.Module):
    """Router, exchange and experts of one layer. Any number of layers share one `ExpertParallel`
    and its windows.

    A call has gradients by torch's own rule: in grad mode, if x or a parameter requires grad. Any
    other call only serves. Both kinds of call return the same bits of y if they use the same GEMM.
    All ranks must make the same kind of call. docs/training.md says what calls with gradients need,
    and how experts train over several ranks.

    Casts (`to`, `bfloat16`, `half`) change the dtype of the experts only. The choice of experts
    needs the router's precision, so `router_weight`, `bias` and `logit_bias` keep their dtypes. A
    move to another device moves everything. Logits are computed in the dtype of `router_weight`,
    also under autocast. Under autocast, an x in another dtype than that of the experts is cast to
    theirs, and y is cast back. Without autocast, such an x is a TypeError. A deepcopy copies the
    weights and shares `ep`.

    Args:
        ep: the `ExpertParallel` whose ranks hold the experts.
        router_weight: fp32, fp16 or bf16 [E, D]. The layer makes a parameter of it.
        experts: maps rows [N, D], expert_offsets int32 [e+1] and scales (fp32 [N, ⌈D/128⌉] with an
            fp8 payload, otherwise None) to outputs [N, D] in x's dtype, as `GroupedExperts` does.
        bias: fp32, fp16 or bf16 [E], added to the scores for the choice of experts only. The layer
            keeps it as a buffer in fp32. It must be given if the config sets
            `routing.selection_bias`, and must be None otherwise.
        logit_bias: [E] in the dtype of `router_weight`, a parameter, added to the logits, as
            gpt-oss's router does. It must be given if the config sets `routing.logit_bias`, and
            must be None otherwise.
        shared: maps the tokens [T, D] to a tensor that is added to y [T, D], such as the output of
            shared experts. On a GPU a call without gradients runs it on a stream of its own, at the
            same time as the exchange and the routed experts.
        layer_id: the number by which compiled and exported programs name the layer; by default the
            first number that is free. Modulo 32768 it is the `tag` of the layer's rounds. By
            default, the layers of an `ep` take tags in the order in which they are made, which must
            be the same on all ranks.
        num_rows: the number of rows of a call with gradients: see `TrainingExchange.dispatch`.
        exchange: carries calls with gradients over `ep`; by default the layer makes a
            `TrainingExchange`.
        adapters: the number of LoRA adapters of the experts that the layer makes room for. The
            layer then only serves, and its parameters do not require grad. `capacity.extra_bytes`
            must be at least 4, since every token brings the number of its adapter to the round.
        adapter_rank: the largest rank of an adapter.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: `router_weight`, `bias` or `experts` has another shape than the config says; the
            experts compute something else than the section `experts` of the config says; experts
            of the caller's own class require grad, but are not spread; or another layer has this
            `layer_id` or its tag.
    """

    bias: Tensor | None
    logit_bias: Tensor | None
    order: Tensor
    adapters: ExpertAdapters | None
    """The adapters of this rank's experts: see `load_adapter`."""

    def __init__(
        self,
        ep: ExpertParallel,
        router_weight: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        *,
        bias: Tensor | None = None,
        logit_bias: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        layer_id: int | None = None,
        num_rows: int | Literal["exact"] = "exact",
        exchange: TrainingExchange | None = None,
        adapters: int | None = None,
        adapter_rank: int = 16,
    ) -> None:
        # Check the arguments, before anything is made of them.
        check_parts(
            ep,
            router_weight,
            experts,
            bias=bias,
            logit_bias=logit_bias,
            shared=shared,
            exchange=exchange,
        )
        grouped = experts if isinstance(experts, GroupedExperts) else None
        room = None
        if adapters is not None:
            room = adapter_room(ep, experts, adapters, adapter_rank, exchange)

        super().__init__()
        # The router's product is batch invariant if the experts are.
        self._invariant = grouped is not None and grouped.batch_invariant
        self.ep = ep
        self.experts = experts
        self.adapters = room
        self.shared = shared
        self.num_rows = num_rows
        self._on_input = ep.config.experts.weights_on_input
        self.recorders: list[Callable[[Routes], object]] = []
        """Functions that the layer calls with the `Routes` of each of its calls."""
        self.contexts = 0
        """The number of contexts, of `replay` and `adapters_of`, in which this layer is now. A
        context that has ended counts as long as a graph of autograd keeps it for a checkpoint.
        """
        self._jitter = ep.config.routing.jitter_noise
        self._routing = ep.config.routing.options | {"top_k": ep.config.model.num_experts_per_tok}
        self._hidden_size = ep.config.model.hidden_size
        # The router of calls that are one node of autograd. The first such call makes it.
        self._router: whole_layer.Router | None = None

        # Make the exchange of calls with gradients, or keep the reason why there can be none.
        self._exchange = exchange
        self._why_no_gradients = _ADAPTERS_ONLY_SERVE
        if exchange is None and room is None:
            try:
                self._exchange = TrainingExchange(ep)
            except ValueError as error:
                self._why_no_gradients = str(error)

        # Experts that train are spread over the ranks.
        if grouped is not None and room is None and _can_train(ep, grouped):
            spread(grouped, ep)

        # The dtypes that x may have if the experts are not `GroupedExperts`, whose dtype is known.
        widest = ep.config.model.torch_dtype
        narrower = [dtype for dtype in FLOATS if dtype.itemsize < widest.itemsize]
        self._dtypes_of_config = [widest, *narrower]
        # The dtype of x in the last call. If x is wrong in a later call, this rank needs the dtype
        # in which the other ranks run the round: see `_dtype_of`.
        self._dtype: torch.dtype | None = None

        # Parameters and buffers.
        self._router_dtype = router_weight.dtype
        self.router_weight = parameter(router_weight)
        self.register_buffer("bias", None if bias is None else bias.float())
        self.register_buffer("order", ep.order, persistent=False)
        self.register_parameter("logit_bias", None if logit_bias is None else parameter(logit_bias))
        is_quantized = grouped is not None and grouped.is_quantized
        if room is not None or is_quantized:
            # Such a layer only serves.
            self.requires_grad_(False)
        self.layer_id = opaque.register(self, layer_id)
        self.tag = ep.new_tag(None if layer_id is None else layer_id & constant("kMaxTag"), self)
        self._follow()

    @classmethod
    def from_full(
        cls,
        ep: ExpertParallel,
        router_weight: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        **options: Any,
    ) -> Self:
        """Make a layer from the weights of all E logical experts. Only the experts that the
        placement gives to this rank, copies included, are copied to the device of `ep`.

        `router_weight` is [E, D], `w_gate_up` [E, 2F, D] and `w_down` [E, D, F], for D elements of
        a token and F of an expert's activation. Tensors may be on any device. The weights of the
        experts, their scales and their biases must have a row for each of the E experts; otherwise
        it raises ValueError. `options` are other arguments of `MoELayer` and `GroupedExperts`,
        which also say what else it raises. Options of the experts that are not given are those of
        the config's section `experts`.
        """
        E = ep.placement.num_experts
        layer_options = {
            name: _on(ep.device, value) for name, value in _pop_layer_options(options).items()
        }
        local_experts = _experts_to_load(ep, layer_options.get("layer_id"))

        # Take this rank's rows of each tensor that has a row for each expert.
        weights = {"w_gate_up": w_gate_up, "w_down": w_down} | ep.config.experts.options | options
        for name, value in weights.items():
            if not isinstance(value, Tensor):
                continue
            if value.shape[:1] != (E,):
                raise ValueError(
                    f"`{name}` must have a row for each of {E} experts, got {list(value.shape)}"
                )
            weights[name] = take_rows(value, local_experts).to(ep.device)
        return cls(ep, _on(ep.device, router_weight), GroupedExperts(**weights), **layer_options)

    @classmethod
    def from_safetensors(
        cls,
        ep: ExpertParallel,
        folder: SafetensorsFolder,
        block: str,
        *,
        router_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """Make a layer from a Hugging Face checkpoint. This rank reads the router and only its own
        experts.

        Shared experts are not read. Load their module as the model does, and give it as `shared`.
        If the checkpoint has experts with scales, such as fp8 or MXFP4, a layer that trains needs a
        `dtype`. It raises the errors of `MoELayer`, `GroupedExperts` and `SafetensorsFolder`.

        Args:
            ep: see `MoELayer`.
            folder: with the checkpoint.
            block: the name of the MoE block in the model, such as "model.layers.3.mlp".
            router_dtype: the dtype of the router, by default that of `SafetensorsFolder.router`.
            dtype: the dtype of the experts, such as fp32 or bf16 for weights that train. By default
                the experts are as in the checkpoint: see `SafetensorsFolder.experts`.
            options: other arguments of `MoELayer` and of `GroupedExperts`, such as `shared` or
                `gemm`. Options of the experts that are not given are those of the config.

        Returns:
            The layer on the device of `ep`, in the dtypes of the checkpoint, or in those that the
            caller asks for.
        """
        # Read the router.
        router: dict[str, Any] = {
            name: _on(ep.device, value)
            for name, value in folder.router(block, _gate_bias(ep.config)).items()
        }
        # Refuse a bias that the config does not mention, unless the caller replaces it by `bias`.
        is_unexpected = router["bias"] is not None and not ep.config.routing.selection_bias
        if is_unexpected and "bias" not in options:
            raise ValueError(
                f"{folder.path}: the router of `{block}` has a bias of the choice, so the config "
                "must say `routing: {selection_bias: true}`"
            )
        for name in ("router_weight", "logit_bias"):
            if router_dtype is not None and router[name] is not None:
                router[name] = router[name].to(router_dtype)

        # Read this rank's experts. Options of the caller come before those of the config.
        layer_options = _pop_layer_options(options)
        local_experts = _experts_to_load(ep, layer_options.get("layer_id"))
        weights: dict[str, Any] = folder.experts(block, local_experts, ep.device, dtype)
        experts = GroupedExperts(**weights | ep.config.experts.options | options)
        return cls(ep, experts=experts, **router | layer_options)

    def full_state_dict(self, *, cpu_offload: bool = False) -> dict[str, Any]:
        """A state dict of this layer with all E logical experts. Collective. See
        `epmoe.checkpoint.full_state_dict`.
        """
        return state_dicts.full_state_dict(self, cpu_offload=cpu_offload)

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's experts, and the router, from a state dict with all E logical experts.
        See `epmoe.checkpoint.load_full_state_dict`.
        """
        state_dicts.load_full_state_dict(self, state_dict)

    def get_extra_state(self) -> Tensor:
        """The logical experts whose weights a state dict of this layer holds: int32 [e], the
        experts of this rank, or [E] if the experts are DTensors. torch puts it into `state_dict`.
        """
        return torch.tensor(self._held_experts, dtype=torch.int32, device=self.router_weight.device)

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a state dict which is being loaded holds the experts of this rank. Raises
        ValueError if it holds others.
        """
        if not state.is_meta:
            state_dicts.check_held(state, self.ep, self._held_experts)

    @property
    def _held_experts(self) -> list[int]:
        """The logical expert of each row of the experts' parameters."""
        if isinstance(self.experts, nn.Module) and any(map(is_spread, self.experts.parameters())):
            return list(range(self.ep.placement.num_experts))
        return self.ep.logical_experts(self.tag)

    def load_adapter(
        self, number: int, folder: str | os.PathLike[str], block: str, *, experts_only: bool = False
    ) -> None:
        """Read a LoRA adapter that PEFT has saved, and put it in place of the adapter `number`.
        Collective.

        Each rank reads the adapter of the whole block, and keeps the part of its own experts. No
        adapter changes on any rank unless all ranks have read the same one. docs/serving.md says
        what happens to adapters when experts move or the group changes.

        Args:
            number: from 0 to `adapters` − 1. A token chooses this adapter by `adapter_ids`.
            folder: has PEFT's `adapter_config.json` and `adapter_model.safetensors`. The adapter's
                `target_parameters` are the experts' `gate_up_proj`, `down_proj` or both, or the
                adapter names the modules of single experts.
            block: the name of the MoE block in the model, such as "model.layers.3.mlp".
            experts_only: see `epmoe.checkpoint.load_adapter`.

        Raises:
            ValueError: on all ranks, if on one of them the layer has no room for adapters, or
                `epmoe.checkpoint.load_adapter` or `ExpertAdapters.put_local` refuses the adapter,
                or if ranks have read different adapters.
            EPStateError: experts are moving on a rank.
            RuntimeError: another thread is in a call of the `ExpertParallel` of a rank.
            EPTimeoutError: some ranks have ended, or have not made this call within
                `exchange.warmup_timeout_s`. The error names them.
        """
        put_on_all_ranks(
            self,
            "load_adapter",
            number,
            block,
            lambda sizes, interleaved: read_adapter(
                folder, block, sizes, interleaved, experts_only
            ),
        )

    def put_adapter(self, number: int, adapter: LoRA | None) -> None:
        """Put an adapter in place of the adapter `number`; None removes the adapter `number`.
        Collective.

        `adapter` has the factors of all E logical experts, and must be the same on all ranks.
        Raises the errors of `load_adapter`, and TypeError for a factor that is no float tensor.
        """
        put_on_all_ranks(
            self,
            "put_adapter",
            number,
            "",
            lambda sizes, _: StoredAdapter.from_lora(adapter, sizes),
        )

    def forward(
        self,
        x: Tensor,
        num_tokens: int | Tensor | None = None,
        *,
        routing: tuple[Tensor, Tensor | None] | None = None,
        return_routing: bool = False,
        adapter_ids: Tensor | None = None,
    ) -> Any:
        """Run the layer on this rank's tokens. Returns y in the shape and dtype of x.

        Collective: every rank must call it, also a rank without tokens.

        Args:
            x: T tokens [T, D], or B·T tokens [B, T, D], in the dtype of the experts.
            num_tokens: the number of real tokens, an int or an int32 scalar tensor on the device.
                Later tokens are padding, whose y is zeros. If x is [B, T, D], tokens are counted
                in the order of [B·T, D].
            routing: ids int32 or int64 [T, K] and weights [T, K] in place of the router's, such as
                those of a rollout. The weights may require grad. If the weights are None, the
                router weighs the experts of `ids`.
            return_routing: whether to return the `Routes`, too. Only eager calls can.
            adapter_ids: int16, int32 or int64 [T] or [B, T], the adapter of each token, in a layer
                with `adapters`. −1, or any other number that no adapter has, means no adapter. By
                default no token has one.

        Returns:
            y, or y and the `Routes`.

        Raises:
            EPError: the round fails, in the ways that `ExpertParallel.dispatch` and
                `ExpertParallel.combine` name.
            TypeError: x has another type or dtype. This and the next two errors are raised before
                any token is sent.
            ValueError: x does not fit the config.
            RuntimeError: something requires grad in grad mode, but this layer only serves.

        If this rank raises any exception, also one of the experts or of a refused argument, the
        round ends for all ranks, and none of them waits. The other ranks get an EPAbortedError that
        names this rank, or sums without the experts of this rank (`exchange.on_abort`).
        """
        # Refuse what a graph of a compiler cannot hold.
        compiles = torch.compiler.is_compiling()
        # In torch 2.11, `is_exporting()` is True whenever Dynamo traces. This flag of torch is True
        # only in an export.
        exports = compiles and torch.compiler._is_exporting_flag
        if exports and self.contexts:
            raise RuntimeError(
                "torch.export takes no call within contexts such as `replay`, whose program would "
                "keep what they give"
            )
        if compiles and return_routing:
            raise ValueError(
                "`return_routing` needs an eager call: an operator of a graph returns y only"
            )

        # Contexts such as `replay` give other tensors to each call, which a graph would keep. So
        # the call runs between two graphs.
        if compiles and self.contexts:
            from epmoe.local.between_graphs import between_graphs

            return between_graphs(
                self.forward, x, num_tokens, routing=routing, adapter_ids=adapter_ids
            )

        if torch.is_grad_enabled() and self._has_gradients(x):
            # A call with gradients. It runs between two graphs if inductor cannot compile it: its
            # number of rows must be known, and the round must not run twice.
            if compiles and (self.num_rows == "exact" or not fits_graphs()):
                if exports:
                    raise RuntimeError(
                        "torch.export takes a call with gradients only where `num_rows` is a "
                        "number: export under torch.no_grad() or torch.inference_mode()"
                    )
                from epmoe.local.between_graphs import between_graphs

                y, routes = between_graphs(self._with_gradients, x, num_tokens, routing)
            else:
                y, routes = self._with_gradients(x, num_tokens, routing)
        elif compiles:
            # A compiled call without gradients. One operator runs all that follows the router.
            routed = self._routed(x, routing, self.experts)
            y = opaque.moe(self, *routed, num_tokens, adapter_ids)
        else:
            # An eager call without gradients.
            if getattr(x, "is_cuda", False):
                self._refuse_capture()
            # This does what `ExpertParallel.giving_up` does, whose context would cost each layer
            # 3 µs.
            ep = self.ep
            exchange = ep.exchange
            before = exchange.rounds.count
            try:
                if self.contexts:
                    context_inputs = take_context_inputs(self, x)
                    routing = context_inputs.routing if routing is None else routing
                    adapter_ids = context_inputs.adapter_ids if adapter_ids is None else adapter_ids
                experts = self.experts
                routed = self._routed(x, routing, experts)
                y, routes = self._serve(experts, *routed, num_tokens, adapter_ids)
            except BaseException:
                given_ids = None if routing is None else routing[0]
                ep.give_up(exchange, before, self.tag, partial(self._shape, x, given_ids))
                raise

        # Return y in the shape of x, and in its dtype, which autocast may have changed.
        if y.dim() != x.dim():
            y = y.view(x.shape)
        if y.dtype is not x.dtype:
            y = y.to(x.dtype)
        return (y, routes) if return_routing else y

    def logits(self, x: Tensor) -> Tensor:
        """Compute the router's logits [T, E] of tokens [T, D], in the dtype of `router_weight`.
        They have gradients by torch's own rule.
        """
        return self._logits(x, self.router_weight)

    def _logits(self, x: Tensor, router_weight: Tensor) -> Tensor:
        """Do what `logits` does. The caller has read the parameter `router_weight` already, which
        costs some time in a module of torch.
        """
        if torch.is_autocast_enabled(x.device.type):
            with without_autocast(x.device):
                return self._logits(x, router_weight)
        if self._invariant:
            return router_logits(x, router_weight, self.logit_bias, invariant=True)
        return F.linear(x.to(router_weight.dtype), router_weight, self.logit_bias)

    def run(
        self,
        x_TD: Tensor,
        routing: Tensor,
        weights_TK: Tensor | None,
        num_tokens: int | Tensor | None,
        extra: Tensor | None = None,
    ) -> Tensor:
        """Run all that follows the router, without gradients. Collective. It raises the errors of
        `forward`. The operator of compiled layers calls it.

        Args:
            x_TD: tokens in the dtype of the experts.
            routing: ids [T, K]; or, if there are no weights, logits [T, E], from which
                `ExpertParallel.route` chooses the experts.
            weights_TK: the weights of the ids, or None.
            num_tokens: see `forward`.
            extra: the adapter of each token: `adapter_ids` of `forward`.

        Returns:
            y [T, D] in the dtype of x.
        """
        if x_TD.is_cuda:
            self._refuse_capture()
        # If this rank raises, it ends the round for the other ranks, which need its shape.
        ids = None if weights_TK is None else routing
        with self.ep.giving_up(self.tag, partial(self._shape, x_TD, ids)):
            y_TD, _ = self._serve(self.experts, x_TD, routing, weights_TK, num_tokens, extra)
            return y_TD

    def _refuse_capture(self, *, trains: bool = False) -> None:
        """Raise RuntimeError if a CUDA graph is being captured, and the experts cannot be captured.

        Callers call it before anything is launched or counted, so that later rounds work as if
        there had been no call.
        """
        # Most calls are no captures, so look for a capture before looking at the experts.
        if torch.compiler.is_compiling():
            return
        if not torch.cuda.is_current_stream_capturing():
            return
        if isinstance(self.experts, GroupedExperts):
            self.experts.refuse_capture(trains=trains)

    def _serve(
        self,
        experts: Callable[..., Tensor],
        x_TD: Tensor,
        routing: Tensor,
        weights_TK: Tensor | None,
        num_tokens: int | Tensor | None,
        adapter_ids: Tensor | None,
    ) -> tuple[Tensor, Routes]:
        """Choose experts, unless `weights_TK` are given, and run the round, without gradients.
        Arguments are those of `run`. Returns y [T, D], and the choice of experts.
        """
        # If the layer has adapters, every token brings the number of its adapter to the round.
        adapters = self.adapters
        extra = None
        if adapters is not None or adapter_ids is not None:
            extra = self._adapters_of_tokens(x_TD, adapter_ids)
        shared_experts = self.shared

        # Choose experts.
        ids_TK = routing
        logits_TE = None
        if weights_TK is None:
            logits_TE = routing
            ids_TK, weights_TK = self.ep.route(routing, bias=self.bias, num_tokens=num_tokens)
        routes = Routes(ids_TK, weights_TK, logits_TE, None)
        if self.recorders:
            record(self.recorders, routes)

        # Bring tokens to their experts. The tokens are ready at the point `start` of the stream.
        start = None if shared_experts is None else record_point(x_TD.device)
        dispatched = self.ep.dispatch(
            x_TD,
            ids_TK,
            weights_TK,
            num_tokens=num_tokens,
            tag=self.tag,
            apply_router_weight_on_input=self._on_input,
            aligned=isinstance(experts, GroupedExperts) and experts.alignment > 1,
            extra=extra,
        )
        # Launch the shared experts after dispatch, so that dispatch's blocks get multiprocessors
        # first.
        shared = None
        if shared_experts is not None:
            shared = SideStream(start, shared_experts, x_TD)

        # Run the experts. `added` is what the adapters of the rows add to the experts' products.
        added = None
        if adapters is not None and dispatched.extra is not None:
            added = adapters.of_rows(dispatched.extra)
        arrived = dispatched.arrived
        assert type(arrived) is Rows
        rows_ND = arrived.rows
        offsets = arrived.expert_offsets
        scales = arrived.scales
        if not torch.is_grad_enabled() and is_called_alone(experts):
            segments = Segments(
                offsets,
                arrived.tokens_per_expert,
                dispatched.alignment,
                dispatched.rows_per_expert,
            )
            out_ND = experts.serve(rows_ND, scales, segments, added)
        elif isinstance(experts, GroupedExperts):
            out_ND = experts(rows_ND, offsets, scales, **dispatched.segments, added=added)
        else:
            out_ND = experts(rows_ND, offsets, scales)

        # Bring the sums back.
        y_TD = self.ep.combine(out_ND, dispatched)
        if shared is not None:
            y_TD += shared.result()
            # Shared experts have an output for padding, too.
            if num_tokens is not None:
                zero_padding_rows_(y_TD, num_tokens)
        return y_TD, routes

    def _with_gradients(
        self,
        x: Tensor,
        num_tokens: int | Tensor | None,
        routing: tuple[Tensor, Tensor | None] | None,
    ) -> tuple[Tensor, Routes]:
        """Run a call with gradients. Returns y in the shape of x, and the choice of experts."""
        exchange = self._exchange
        if exchange is None:
            raise RuntimeError(
                "this MoELayer only serves, but x or a parameter requires grad: run under "
                f"torch.inference_mode() or torch.no_grad(); {self._why_no_gradients}"
            )
        if getattr(x, "is_cuda", False):
            self._refuse_capture(trains=True)
        if torch.compiler.is_compiling():
            outcome = self._run_stages(exchange, x, num_tokens, routing)
        else:
            # This does what `TrainingExchange.giving_up` does, whose context would cost each layer
            # 3 µs.
            node_exchange = exchange.ep.exchange
            before = node_exchange.rounds.count
            try:
                one_node = self._as_one_node(exchange, x, num_tokens, routing)
                if one_node is None:
                    outcome = self._run_stages(exchange, x, num_tokens, routing)
                else:
                    outcome = one_node
            except BaseException:
                given_ids = None if routing is None else routing[0]
                shape = partial(self._shape, x, given_ids, trains=True)
                exchange.give_up(node_exchange, before, self.tag, self._weights_on, shape)
                raise

        # Record the choice of experts, and add the output of shared experts.
        y_TD = outcome.y_TD
        routes = outcome.routes
        if self.recorders:
            record(self.recorders, routes)

        shared = self.shared
        if shared is not None:
            y_TD = self._with_shared(shared, y_TD, outcome.x_TD, num_tokens)
        if x.dim() == y_TD.dim():
            return y_TD, routes
        # FSDP puts hooks on y. If y were a view, an operation in place of the caller would make a
        # new node of autograd for y, without these hooks. To autograd, `_unsafe_view` is no view.
        return torch.ops.aten._unsafe_view(y_TD, x.shape), routes

    def _as_one_node(
        self,
        exchange: TrainingExchange,
        x: Tensor,
        num_tokens: int | Tensor | None,
        routing: tuple[Tensor, Tensor | None] | None,
    ) -> _Outcome | None:
        """Run the layer as one node of autograd, which costs the host least.

        Returns None, and runs nothing, if the layer cannot be one node in this call. This is so if
        a mode of torch or a hook watches the layer's stages, if the caller or a context gives the
        routing, if the weights multiply the experts' inputs, or if x must be cast.
        """
        if routing is not None or self.contexts or self._on_input:
            return None
        experts = self.experts
        router_weight = self.router_weight
        logit_bias = self.logit_bias
        if not whole_layer.is_one_node(experts, x, router_weight, logit_bias):
            return None
        if router_weight.dtype is not self._router_dtype:
            self._refuse_router_dtype(router_weight)
        x_TD = self._checked(x, experts, router_weight)
        if x_TD.dtype is not experts.dtype:
            return None

        # Run it. The first call makes the router, which later calls use again.
        self._keep_dtype(x_TD.dtype)
        router = self._router
        if router is None:
            router = whole_layer.Router.of(self.ep.choice, self._invariant)
            self._router = router
        y_TD, routes = whole_layer.run(
            exchange,
            router,
            self.bias,
            router_weight,
            logit_bias,
            experts,
            x_TD,
            num_tokens=num_tokens,
            num_rows=self.num_rows,
            tag=self.tag,
        )
        return _Outcome(x_TD, y_TD, routes)

    def _run_stages(
        self,
        exchange: TrainingExchange,
        x: Tensor,
        num_tokens: int | Tensor | None,
        routing: tuple[Tensor, Tensor | None] | None,
    ) -> _Outcome:
        """Run the layer stage by stage. Each stage is one or more nodes of autograd."""
        # Refuse calls for which this layer has no right gradients.
        experts = self.experts
        router_weight = self.router_weight
        refuse_tangents(x, router_weight)
        check_spread(self.ep, experts)
        if router_weight.dtype != self._router_dtype:
            self._refuse_router_dtype(router_weight)

        # Contexts such as `replay` may give the routing, and an x for the experts. The backward
        # pass must then reach this x, so the experts take it. The router takes the caller's x,
        # which may need no gradient.
        scored_TD = self._checked(x, experts, router_weight)
        x_TD = scored_TD
        if self.contexts:
            context_inputs = take_context_inputs(self, x)
            if context_inputs.x is not x:
                x = context_inputs.x
                x_TD = self._checked(x, experts, router_weight)
            routing = context_inputs.routing if routing is None else routing
        x_TD = self._as_experts_take(x_TD, experts)
        y_TD, routes = self._run_round(exchange, scored_TD, x_TD, num_tokens, routing)
        return _Outcome(x_TD, y_TD, routes)

    def _refuse_router_dtype(self, router_weight: Tensor) -> NoReturn:
        """Raise the TypeError for a router whose weight is not in the dtype of when the layer was
        made.
        """
        raise TypeError(
            f"`router_weight` must be {dtype_name(self._router_dtype)}, as the layer was "
            f"made, got {dtype_name(router_weight.dtype)}: FSDP's mixed precision "
            f"casts it, and the choice of experts needs its precision; "
            "`epmoe.training.fully_shard` leaves it as it is"
        )

    @property
    def _weights_on(self) -> WeightsOn:
        """Who applies the weights in a call with gradients: see `TrainingExchange.dispatch`."""
        if self._on_input:
            return "rows"
        # GroupedExperts multiply the gradients by the weights, so that the outputs need not be kept
        # for the backward pass. Other experts do not.
        return "both" if isinstance(self.experts, GroupedExperts) else "combine"

    def _run_round(
        self,
        exchange: TrainingExchange,
        scored_TD: Tensor,
        x_TD: Tensor,
        num_tokens: int | Tensor | None,
        routing: tuple[Tensor, Tensor | None] | None,
    ) -> tuple[Tensor, Routes]:
        """Route `scored_TD`, the tokens as the router takes them, and run the round of `x_TD`, the
        tokens as the experts take them.
        """
        # Choose experts, and weigh them. If the caller gives ids without weights, only weigh them.
        given_TK = None
        weights_TK = None
        if routing is not None:
            given_TK, weights_TK = routing
        logits_TE: Tensor | None = None
        if routing is None or weights_TK is None:
            with without_autocast(x_TD.device):
                logits_TE = router_logits(
                    scored_TD, self.router_weight, self.logit_bias, invariant=self._invariant
                )
            ids_TK, weights_TK = counted(
                exchange.number,
                logits_TE,
                ids=given_TK,
                bias=self.bias,
                num_tokens=num_tokens,
                **self._routing,
            )
            # A pair (token, expert) with the weight 0 does not travel, as in serving: the id −1
            # stands for no expert. Such a pair has no gradients either.
            sent_TK = ids_TK.masked_fill(weights_TK == 0, -1)
        else:
            # The caller gives ids and weights. Dispatch checks them.
            ids_TK = routing[0]
            sent_TK = ids_TK

        # Bring tokens to their experts.
        weights_on = self._weights_on
        routed = exchange.dispatch(
            x_TD,
            sent_TK,
            weights_TK,
            weights_on=weights_on,
            num_rows=self.num_rows,
            num_tokens=num_tokens,
            tag=self.tag,
        )

        # Multiply the experts' inputs by the weights, if the model does so.
        rows_ND = routed.rows
        if weights_on == "rows" and routed.row_weights is not None:
            rows_ND = (rows_ND.float() * routed.row_weights[:, None]).to(rows_ND.dtype)

        # Run the experts, and bring their sums back.
        options = {}
        if weights_on == "both":
            options["row_weights"] = routed.row_weights
        out_ND = self.experts(rows_ND, routed.expert_offsets, None, **options)
        y_TD = exchange.combine(out_ND, routed)
        return y_TD, Routes(ids_TK, weights_TK, logits_TE, routed.tokens_per_expert)

    def _with_shared(
        self,
        shared: Callable[[Tensor], Tensor],
        y_TD: Tensor,
        x_TD: Tensor,
        num_tokens: int | Tensor | None,
    ) -> Tensor:
        """Add the output of `shared` to y, with gradients. The rows of padding stay zeros."""
        if num_tokens is None:
            return y_TD + shared(x_TD)
        # Padding may hold anything, also NaN, from which shared experts would compute gradients of
        # NaN. So they get zeros in its place.
        is_padding_T1 = (torch.arange(len(x_TD), device=x_TD.device) >= num_tokens)[:, None]
        sum_TD = y_TD + shared(x_TD.masked_fill(is_padding_T1, 0))
        return sum_TD.masked_fill(is_padding_T1, 0)

    def extra_repr(self) -> str:
        return repr(self.ep)

    def _has_gradients(self, x: object) -> bool:
        """Whether a call in grad mode needs a backward pass.

        x has not been checked yet. If it is no tensor, the parameters decide, as they do on the
        other ranks, so that this rank ends the right kind of round.
        """
        # Ask x and the router first, which spares most calls a walk through all modules.
        if getattr(x, "requires_grad", False) or self.router_weight.requires_grad:
            return True
        return any(value.requires_grad for value in self.parameters())

    def _shape(self, x: object, ids: object, trains: bool = False) -> RoundShape:
        """The shape of the round that the other ranks open for this call. x and `ids` of this rank
        may be wrong, and are used only as far as they can be right.
        """
        model = self.ep.config.model
        extra = None
        if self.adapters is not None:
            extra = Extra(torch.int32, ())
        # K is the number of columns of given ids, if these can be ids.
        top_k = model.num_experts_per_tok
        if isinstance(ids, Tensor) and ids.dim() == 2 and 1 <= ids.shape[1] <= top_k:
            top_k = ids.shape[1]
        return RoundShape(
            model.hidden_size,
            top_k,
            self._dtype_of(x),
            weight_rows=self._on_input,
            aligned=self._aligned and not trains,
            extra=extra,
        )

    def _adapters_of_tokens(self, x_TD: Tensor, adapter_ids: Tensor | None) -> Tensor:
        """Check `adapter_ids`, and return the adapter of each token, int32 [T]. Raises the errors
        of `forward`, and EPStateError if an adapter has been lost.
        """
        if self.adapters is None:
            raise ValueError(
                "`adapter_ids` must be None, since the layer was made without `adapters`"
            )
        T = len(x_TD)
        device = x_TD.device
        if adapter_ids is None:
            return torch.full((T,), NO_ADAPTER, dtype=torch.int32, device=device)
        lost = self.adapters.lost
        if lost:
            raise EPStateError(
                f"adapter(s) {sorted(lost)} are not whole any more, since the group has changed or "
                "a call has failed: load them again on all ranks, or clear them"
            )
        if isinstance(adapter_ids, Tensor):
            adapter_ids = adapter_ids.flatten()
        check_tensor("adapter_ids", adapter_ids, (torch.int16, *INTS), (T,), device)
        return adapter_ids.clamp(NO_ADAPTER, self.adapters.count).to(torch.int32)

    @property
    def _aligned(self) -> bool:
        """Whether the experts want segments that start at multiples of a number of rows."""
        experts = self.experts
        return isinstance(experts, GroupedExperts) and experts.alignment > 1

    def _routed(
        self, x: Tensor, routing: tuple[Tensor, Tensor | None] | None, experts: object
    ) -> _RoutedTokens:
        """Prepare a call without gradients for its round: check the tokens, and compute the logits,
        unless the caller gives the routing.
        """
        router_weight = self.router_weight
        scored_TD = self._checked(x, experts, router_weight)
        x_TD = self._as_experts_take(scored_TD, experts)
        if routing is None:
            return _RoutedTokens(x_TD, self._logits(scored_TD, router_weight), None)
        ids, weights = routing
        if weights is None:
            logits_TE = self._logits(scored_TD, router_weight)
            ids, weights = counted(0, logits_TE, ids=ids, bias=self.bias, **self._routing)
        return _RoutedTokens(x_TD, ids, weights)

    def _checked(self, x: Tensor, experts: object, router_weight: Tensor) -> Tensor:
        """Check x, and return it as [T, D] for the router. Under autocast it may be in a dtype that
        the experts do not take.

        Raises the TypeErrors and ValueErrors of `forward`. The checks here are quick, since every
        call runs them; `_explain_misfit` finds out what is wrong.
        """
        device = self.ep.device
        grouped = experts if isinstance(experts, GroupedExperts) else None
        on_device = router_weight.device == device
        if grouped is not None:
            down = grouped.held()[1]
            on_device = on_device and down.device == device
            takes_dtype = isinstance(x, Tensor) and x.dtype is product_dtype(down)
            stage = grouped.stage
            if stage.alignment > 1 and (down.dtype is FP8 or stage.batch_invariant):
                self._check_alignment(grouped)
        else:
            takes_dtype = isinstance(x, Tensor) and x.dtype in self._dtypes_of_config

        # A call that fits needs no further checks.
        fits = takes_dtype and on_device and x.dim() in (2, 3) and x.shape[-1] == self._hidden_size
        if not fits or x.device != device:
            self._explain_misfit(x, grouped, router_weight)

        # In training, some routers want noise on x.
        x_TD = x.flatten(0, -2)
        if self._jitter and self.training and not torch.is_inference_mode_enabled():
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self._jitter, 1 + self._jitter)
        return x_TD

    def _check_alignment(self, experts: GroupedExperts) -> None:
        """Raise ValueError unless segments start at the multiples that the experts' GEMM wants. The
        caller has found out that no other GEMM could take its place.
        """
        needed = experts.stage.needed_alignment
        if self.ep.config.alignment % needed:
            raise ValueError(
                f"`capacity.alignment` must be a multiple of {needed}, or unset, got "
                f"{self.ep.config.alignment}: the experts' GEMM, {experts.gemm}, takes segments "
                "that start there"
            )

    def _explain_misfit(
        self, x: Tensor, experts: GroupedExperts | None, router_weight: Tensor
    ) -> None:
        """Raise the error that says why x, or the device of the layer, does not fit. Returns
        without an error if only the dtype of x does not fit, and autocast casts x.
        """
        D = self._hidden_size
        device = self.ep.device
        dtypes = self._dtypes(experts)

        # The type, dtype and shape of x.
        is_tensor = isinstance(x, Tensor)
        has_dtype = is_tensor and x.dtype in dtypes
        has_shape = is_tensor and x.dim() in (2, 3) and x.shape[-1] == D
        is_cast = has_shape and x.dtype in FLOATS and torch.is_autocast_enabled(device.type)
        if not has_shape or not (has_dtype or is_cast):
            names = " or ".join(dtype_name(dtype) for dtype in dtypes)
            why = ""
            if experts is not None and has_shape:
                why = f": the experts take {names}"
            error = ValueError if has_dtype else TypeError
            raise error(f"`x` must be {names} [T, {D}] or [B, T, {D}], got {describe(x)}{why}")

        # The devices of x and of the layer.
        if x.device != device:
            raise ValueError(f"`x` must be on {device}, got {x.device}")
        where = router_weight.device
        if where != device:
            raise ValueError(
                f"`router_weight` must be on {device}, got {where}: move the layer with `.to`"
            )
        if experts is not None and experts.w_down.device != device:
            raise ValueError(
                f"`experts` must be on {device}, got {experts.w_down.device}: move the layer with "
                "`.to` or `.to_empty`"
            )

    def _as_experts_take(self, x_TD: Tensor, experts: object) -> Tensor:
        """Cast tokens that `_checked` has returned to the dtype of the experts. Only under autocast
        they may have another dtype.
        """
        dtypes = self._dtypes(experts)
        if x_TD.dtype not in dtypes:
            x_TD = x_TD.to(dtypes[0])
        self._keep_dtype(x_TD.dtype)
        return x_TD

    def _keep_dtype(self, dtype: torch.dtype) -> None:
        """Note the dtype of the tokens of a call, for `_dtype_of`."""
        # An assignment to an attribute of an `nn.Module` would take 2 µs more. The old value is not
        # compared first, since dynamo would then put a guard on it.
        object.__setattr__(self, "_dtype", dtype)

    def _dtypes(self, experts: object) -> list[torch.dtype]:
        """The dtypes that x may have. The first is the widest."""
        return [experts.dtype] if isinstance(experts, GroupedExperts) else self._dtypes_of_config

    def _dtype_of(self, x: object) -> torch.dtype:
        """The dtype of the tokens that the other ranks probably bring to this layer's round. It is
        that of x, unless x is wrong; otherwise that of the last call.
        """
        dtypes = self._dtypes(self.experts)
        if isinstance(x, Tensor) and x.dtype in dtypes:
            return x.dtype
        return self._dtype or dtypes[0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Tensors of the router keep their dtypes. With assign=True, torch would take over those of
        # the state dict.
        for name in ("router_weight", "bias", "logit_bias"):
            value = getattr(self, name)
            loaded = state_dict.get(prefix + name)
            if value is not None and isinstance(loaded, Tensor):
                state_dict[prefix + name] = loaded.to(value.dtype)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # torch calls this for every cast and every move of the module. The experts, which are
        # children, are cast and moved.
        if recurse:
            for child in self.children():
                child._apply(fn)

        # Parameters and buffers of the router only move.
        def keeping_dtype(tensor: Tensor) -> Tensor:
            after = fn(tensor)
            return after if after.dtype == tensor.dtype else tensor.to(after.device)

        super()._apply(keeping_dtype, recurse=False)
        self.order = self.ep.order
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__new__(type(self))
        # The copy shares the exchange, which belongs to the group of ranks.
        for shared in (self.ep, self.order, self._exchange):
            memo[id(shared)] = shared
        memo[id(self)] = twin
        attributes = self.__dict__ | {"recorders": [], "contexts": 0}
        twin.__dict__.update(copy.deepcopy(attributes, memo))
        # A copy is a layer of its own, with another number.
        twin.layer_id = opaque.register(twin)
        twin.tag = self.ep.new_tag(owner=twin)
        twin._follow()
        return twin

    def _follow(self) -> None:
        """Register the experts and adapters with `ep`, so that their weights follow when experts
        move between ranks or the group changes.
        """
        if self.adapters is not None:
            self.ep.followers.add(self.adapters)
        if isinstance(self.experts, GroupedExperts):
            self.ep.live.register(self.tag, _weights_of(self))


class _RoutedTokens(NamedTuple):
    """Tokens of a call without gradients, and how they choose experts."""

    x_TD: Tensor
    routing: Tensor
    """ids [T, K]; or, if there are no weights, logits [T, E]"""
    weights_TK: Tensor | None


class _Outcome(NamedTuple):
    """What a call with gradients returns, before shared experts are added."""

    x_TD: Tensor
    """the tokens in the form in which the experts have taken them, perhaps cast"""
    y_TD: Tensor
    routes: Routes


_ADAPTERS_ONLY_SERVE = (
    "layers with `adapters` have no gradients; PEFT trains adapters of `GroupedExperts` itself"
)


def _pop_layer_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of `MoELayer` from `options`, and return them. What is left is for
    `GroupedExperts`.
    """
    return {name: options.pop(name) for name in signature(MoELayer).parameters if name in options}


def _can_train(ep: ExpertParallel, experts: GroupedExperts) -> bool:
    """Whether these experts may train where they are placed."""
    if experts.dtype not in FLOATS or experts.is_quantized:
        return False
    # Tensors that were made in inference mode cannot have gradients.
    if experts.w_down.is_inference():
        return False
    return problem_with(ep) is None


def _gate_bias(config: EPConfig) -> GateBias:
    """What the `gate.bias` of a checkpoint is added to. The config says so; its name does not."""
    if config.routing.logit_bias:
        return "logits"
    if config.routing.selection_bias:
        return "choice"
    return None


def _weights_of(layer: MoELayer) -> SlotWeights:
    """Make the function that `ExpertParallel.replace` takes as `weights`. It holds the layer by a
    weak reference, so that `ep` does not keep the layer alive.
    """
    return partial(_weights_in_slot, weakref.ref(layer))


def _weights_in_slot(reference: weakref.ref[MoELayer], tag: int, local: int) -> list[Tensor]:
    """The weights and adapters of a layer's expert in the local slot `local`."""
    layer = reference()
    if layer is None:
        raise EPStateError(f"the layer with tag {tag} is gone, so its experts cannot move")
    assert isinstance(layer.experts, GroupedExperts)
    weights = [tensor.detach()[local] for tensor in layer.experts.parameters()]
    if layer.adapters is not None:
        weights += layer.adapters.of_expert(local)
    return weights


def _experts_to_load(ep: ExpertParallel, layer_id: int | None) -> list[int]:
    """The logical experts whose weights to load for a layer that is about to be made.

    `layer_id` is the argument of `MoELayer`. An empty slot, which no token reaches, gets expert 0.
    """
    # A `layer_id` of another type is refused later, by the constructor of the layer.
    tag = ep.next_tag
    if isinstance(layer_id, int):
        tag = layer_id & constant("kMaxTag")
    return [max(expert, 0) for expert in ep.logical_experts(tag)]


def _on(device: torch.device, value: Any) -> Any:
    """Move a tensor to `device`. Anything else stays as it is, for the constructor to refuse."""
    return value.to(device) if isinstance(value, Tensor) else value
