"""vLLM's layer of experts with epmoe around the experts of the model's own method."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts, FusedMoEKernel
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from epmoe.config.config_file import ConfigError
from epmoe.integrations.vllm import release
from epmoe.integrations.vllm.choice import Choice, chosen
from epmoe.integrations.vllm.experts import EpmoeExperts, loaded, refuse_loading_again
from epmoe.integrations.vllm.prepare_finalize import EpmoePrepareAndFinalize
from epmoe.integrations.vllm.sizes import Shape, logger, shared
from epmoe.live.layout import EMPTY
from epmoe.native.formats import WIRE_FORMATS, PayloadName, payload_of
from epmoe.native.opaque import ModuleLayer


class Seat:
    """A module in front of a layer of vLLM's experts. If epmoe is chosen, their method takes its
    tokens from epmoe.
    """

    quant_method: FusedMoEMethodBase

    def _get_quant_method(
        self, prefix: str, quant_config: Any, moe_config: FusedMoEConfig
    ) -> FusedMoEMethodBase:
        method: Any = super()._get_quant_method(prefix, quant_config, moe_config)  # type: ignore[misc]
        # vLLM's own method serves where epmoe is not chosen, or cannot serve.
        choice = chosen()
        if choice is None:
            return method
        reason = release.problem()
        if reason:
            raise ConfigError(f"{reason}: leave out `epmoe`, or install one of them")
        reason = _why_not(moe_config)
        if reason:
            _warn(reason)
            return method
        _check(choice, moe_config)
        _become_epmoe(method)
        method.epmoe_choice = choice
        method.epmoe_layer = ModuleLayer(self, _forward, name=prefix)
        return method

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        """The slot of an expert that vLLM loads; −1: not here. Weights that are loaded again follow
        the experts.
        """
        experts = _experts_in_slots(self.quant_method, self)
        if experts is None:
            local: int = super()._map_global_expert_id_to_local_expert_id(expert_id)  # type: ignore[misc]
            return local
        if expert_id not in experts:
            return -1
        return experts.index(expert_id)


class EpmoeRoutedExperts(Seat, RoutedExperts):
    """vLLM's own layer of experts in this seat."""


def seats() -> dict[type[RoutedExperts], type[Seat]]:
    """Make the seat of each layer of vLLM's experts, which vLLM looks up by the name of
    the layer.
    """
    found: dict[type[RoutedExperts], type[Seat]] = {RoutedExperts: EpmoeRoutedExperts}
    with suppress(ImportError):  # before 0.32
        from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

        found[GptOssRoutedExperts] = type(
            "EpmoeGptOssRoutedExperts", (Seat, GptOssRoutedExperts), {}
        )
    return found


def _forward(
    layer: RoutedExperts, parameters: list[Tensor], x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    y: Tensor = layer.quant_method.epmoe_apply(layer, x, weights, ids, None, None)
    # A copy: it may lie in vLLM's workspace.
    return y.clone(memory_format=torch.contiguous_format)


def _become_epmoe(method: FusedMoEMethodBase) -> None:
    """Change the class of a method that vLLM has made to a subclass of its own.

    Neither a wrapper nor a copy would do: vLLM's loaders ask for the class of the method and for
    its name, and a method that is a CustomOp of vLLM's has stored bound methods of this object.
    """
    base: Any = type(method)
    method.__class__ = _with_epmoe(base)


@cache
def _with_epmoe(base: type[FusedMoEMethodBase]) -> type[FusedMoEMethodBase]:
    """Make a subclass of the model's own method, with epmoe in its kernel.

    On CPUs its `apply` is one opaque operator: vLLM lets torch.compile trace the layer there, which
    cannot look into an exchange. On GPUs the whole layer is an operator of vLLM's.

    It is no class beside `base`: with two bases, Python could not change the class of an object.
    """

    class Method(base):
        epmoe_base = base
        epmoe_choice: Choice
        epmoe_layer: ModuleLayer
        epmoe_numel: dict[str, int]
        """elements of a slot that vLLM's loader fills, by parameter, where experts move"""
        moe_kernel: FusedMoEKernel | None

        def create_weights(
            self, layer: RoutedExperts, num_experts: int, *shapes: Any, **named: Any
        ) -> None:
            live = self.epmoe_choice.live
            slots = num_experts if live is None else live["slots_per_rank"]
            super().create_weights(layer, slots, *shapes, **named)
            # The first load fills the first slots.
            if live is not None:
                self.epmoe_numel = _numel_of_slots(layer, slots)
                _expect(self, layer, num_experts)

        def process_weights_after_loading(self, layer: RoutedExperts) -> None:
            if self.epmoe_choice.layout != "layer":
                super().process_weights_after_loading(layer)
                _put_around(self, layer)
            elif not _is_ours(self.moe_kernel):
                _replace_experts(self, layer)
            else:
                # Weights that are loaded again need nothing: vLLM copies them into the memory of
                # these experts.
                refuse_loading_again(layer)

        def apply(
            self,
            layer: RoutedExperts,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            *shared: Any,
            **named: Any,
        ) -> Tensor:
            if x.device.type != "cpu":
                return self.epmoe_apply(layer, x, topk_weights, topk_ids, *shared, **named)
            return self.epmoe_layer(x, topk_ids, topk_weights)

        def epmoe_apply(
            self,
            layer: RoutedExperts,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            *shared: Any,
            **named: Any,
        ) -> Tensor:
            """Compute y [T, D] in one round, or in as many as the longest batch of any
            rank needs.
            """
            kernel = self.moe_kernel
            if not _is_ours(kernel):
                return super().apply(layer, x, topk_weights, topk_ids, *shared, **named)
            assert kernel is not None
            exchange = kernel.prepare_finalize
            exchange.begin()
            try:
                # Without a limit of the user's, a round holds any step.
                sizes = exchange.sizes
                parts = sizes.parts() if sizes.most > sizes.tokens[-1] else []
                if len(parts) <= 1:
                    return super().apply(layer, x, topk_weights, topk_ids, *shared, **named)
                y = torch.empty_like(x)
                for part in parts:
                    exchange.begin()
                    y[part] = super().apply(
                        layer, x[part], topk_weights[part], topk_ids[part], *shared, **named
                    )
                    # Shared experts compute once, with the first part.
                    shared = (None,) * len(shared)
                    named = dict.fromkeys(named)
                return y
            except BaseException:
                # Whatever has raised, vLLM's own experts among it.
                exchange.give_up(layer.apply_router_weight_on_input)
                raise

    # vLLM's loaders of weights look at it.
    Method.__name__ = base.__name__
    return Method


def _numel_of_slots(layer: RoutedExperts, slots: int) -> dict[str, int]:
    """Elements of a slot that vLLM's loader fills, by parameter."""
    numels = {}
    for name, parameter in layer.named_parameters(recurse=False):
        numel = getattr(parameter, "weight_loader_numel", parameter.numel())
        numels[name] = numel // slots
    return numels


def _expect(method: Any, layer: RoutedExperts, experts: int) -> None:
    """So many experts are to be loaded: vLLM's loader counts what it has filled."""
    for name, numel in method.epmoe_numel.items():
        getattr(layer, name).weight_loader_numel = numel * experts


def _experts_in_slots(method: Any, layer: RoutedExperts) -> list[int] | None:
    """The expert in each slot, −1 for none, if experts move and weights are loaded again; otherwise
    None.

    The first call of a load is collective: moves end before it.
    """
    # In the first load, and without epmoe, experts lie as vLLM places them.
    kernel: Any = getattr(method, "moe_kernel", None)
    if not hasattr(method, "epmoe_choice") or not _is_ours(kernel):
        return None
    exchange: Any = kernel.prepare_finalize
    slots: list[int] | None = exchange.sizes.balancing.slots(exchange.tag)
    if slots is not None:
        _expect(method, layer, sum(expert != EMPTY for expert in slots))
    return slots


def _replace_experts(method: Any, layer: RoutedExperts) -> None:
    """Let epmoe's experts compute, in the memory that vLLM has loaded: layout "layer"."""
    choice = method.epmoe_choice
    is_quantized = method.epmoe_base is not UnquantizedFusedMoEMethod
    experts = loaded(layer, is_quantized, choice.batch_invariant)
    takes_fp8 = experts.is_fp8 and WIRE_FORMATS["fp8"].takes(layer.moe_config.hidden_dim)
    payload: PayloadName = "fp8" if takes_fp8 else "auto"
    _let_windows_sleep()
    exchange = _make_exchange(layer, payload, choice, aligned=experts.alignment > 1)
    exchange.sizes.balancing.move(exchange.tag, experts)
    computes = EpmoeExperts(layer.moe_config, experts, exchange)
    method.moe_kernel = FusedMoEKernel(exchange, computes)


def _put_around(method: Any, layer: RoutedExperts) -> None:
    """Put epmoe's exchange around the experts that vLLM has chosen: layout "rank". vLLM keeps its
    own exchange if epmoe's cannot serve.
    """
    choice = method.epmoe_choice
    kernel = method.moe_kernel
    if kernel is None:
        _warn(f"{method.epmoe_base.__name__} has no modular kernel")
        return
    reason = _why_not_around(kernel)
    if reason:
        _warn(reason)
        return
    # Weights that are loaded again find it there.
    if _is_ours(kernel):
        return
    experts = kernel.fused_experts
    if choice.batch_invariant and not experts._supports_batch_invariance():
        raise ConfigError(
            f'{type(experts).__name__} have no batch invariance: choose `epmoe` = "layer"'
        )
    _let_windows_sleep()
    exchange = _make_exchange(layer, _payload(experts), choice)
    method.moe_kernel = FusedMoEKernel(exchange, experts)


def _is_ours(kernel: FusedMoEKernel | None) -> bool:
    """Whether epmoe's exchange stands in a kernel already."""
    if not isinstance(kernel, FusedMoEKernel):
        return False
    return isinstance(kernel.prepare_finalize, EpmoePrepareAndFinalize)


def _check(choice: Choice, moe: FusedMoEConfig) -> None:
    """Raise ConfigError if vLLM's settings, or its experts, do not go with the choice."""
    # vLLM's own balancer moves experts and makes copies of them.
    config = get_current_vllm_config()
    live = choice.live
    if config.parallel_config.enable_eplb:
        if live is not None:
            raise ConfigError("`epmoe` moves experts itself: leave out --enable-eplb")
        if choice.batch_invariant:
            raise ConfigError("`epmoe` needs experts without copies: leave out --enable-eplb")
    if live is None:
        return
    # Where experts move, slots hold all experts of a rank.
    slots = live["slots_per_rank"]
    least = moe.num_local_experts
    if slots < least:
        raise ConfigError(
            f"`epmoe.live.slots_per_rank` must be at least {least}, the experts of a rank, got "
            f"{slots}"
        )
    if _replays_whole_steps(config):
        logger.warning_once(
            "epmoe moves experts only in steps with a prefill: model runner V2 replays the others "
            "as one CUDA graph, before which it calls no plugin. With cudagraph_mode PIECEWISE "
            "they move in all steps"
        )


def _replays_whole_steps(config: Any) -> bool:
    """vLLM sets no forward context around some steps, so that none of the balancer's ticks comes
    before them.
    """
    if not getattr(config, "use_v2_model_runner", False):
        return False
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.has_full_cudagraphs()


def _warn(reason: str) -> None:
    logger.warning_once(
        "epmoe is chosen but not used, since %s: vLLM's own exchange serves", reason
    )


def _why_not(moe: FusedMoEConfig) -> str | None:
    """Say why the exchange of a layer must be vLLM's own; None: epmoe can do it."""
    # Settings of the exchange, of vLLM, and the shape of rows.
    parallel = moe.moe_parallel_config
    if not parallel.use_all2all_kernels:
        return (
            "no experts are exchanged (data parallelism with --enable-expert-parallel exchanges "
            "them)"
        )
    if parallel.all2all_backend != "allgather_reducescatter":
        return f"--all2all-backend is {parallel.all2all_backend}, not allgather_reducescatter"
    if moe.is_lora_enabled:
        return "LoRA needs the adapters of the tokens"
    if get_current_vllm_config().parallel_config.use_ubatching:
        return "dual-batch overlap needs two rounds at the same time"
    if get_current_vllm_config().parallel_config.enable_elastic_ep:
        return "elastic EP changes the group"
    if moe.hidden_dim * moe.in_dtype.itemsize % 16:
        return f"rows of {moe.hidden_dim} elements are no whole 16 bytes"
    return None


def _why_not_around(kernel: FusedMoEKernel) -> str | None:
    """Say why epmoe cannot serve these experts; None: it can."""
    experts = kernel.fused_experts
    if kernel.is_monolithic:
        return f"{type(experts).__name__} routes by itself"
    quant = experts.quant_config
    is_quantized = isinstance(quant.quant_dtype, torch.dtype)
    takes_quantized = is_quantized and not experts.expects_unquantized_inputs
    has_scales_of_rows = quant.block_shape is not None or quant.per_act_token_quant
    has_one_scale = not has_scales_of_rows and quant.a1_scale is None
    if takes_quantized and has_one_scale:
        return "one scale for a whole batch would come from slots without a row too"
    return None


def _make_exchange(
    layer: RoutedExperts, payload: PayloadName, choice: Choice, aligned: bool = False
) -> EpmoePrepareAndFinalize:
    """Find the exchange of a layer. The first layer of a shape makes the windows, collectively."""
    moe = layer.moe_config
    # Layers with the same shape share windows.
    live_layers = 0
    if choice.live is not None:
        compilation = get_current_vllm_config().compilation_config
        live_layers = len(compilation.static_all_moe_layers)
    shape = Shape(
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        dtype=moe.in_dtype,
        max_tokens=moe.max_num_tokens,
        placement=layer.expert_placement_strategy,
        payload=payload,
        layout="rank" if choice.layout == "rank" else "expert",
        aligned=aligned,
        live_layers=live_layers,
    )
    group = get_ep_group()
    sizes = shared(shape, group.cpu_group, group.device, choice)
    # vLLM and epmoe must mean the same rank by an expert.
    ep = sizes.exchanges[0]
    expert_map = shape.first(ep.size).expert_map(ep.rank)
    if layer.expert_map is not None and layer.expert_map.tolist() != expert_map.tolist():
        raise ValueError("vLLM places the experts otherwise than epmoe")
    return EpmoePrepareAndFinalize(sizes, choice.layout, aligned)


def _let_windows_sleep() -> None:
    """Change vLLM's settings: its own sleep mode, in the form that lets the windows sleep, too."""
    model_config = get_current_vllm_config().model_config
    keeps_graphs = not getattr(model_config, "sleep_mode_offload_cudagraph", False)
    if model_config.sleep_mode_backend == "cumem" and keeps_graphs:
        model_config.sleep_mode_backend = "epmoe"


def _payload(experts: FusedMoEExperts) -> PayloadName:
    """The format in which the experts take rows, if dispatch can make it on the way out."""
    quant = experts.quant_config
    has_blocks = isinstance(quant.quant_dtype, torch.dtype) and quant.block_shape
    if experts.expects_unquantized_inputs or not has_blocks:
        return "auto"
    name = payload_of(quant.quant_dtype, quant.block_shape[-1])
    if name is None or not WIRE_FORMATS[name].takes(experts.moe_config.hidden_dim):
        return "auto"
    # vLLM's DeepGEMM may want powers of two as scales, which dispatch does not make.
    return "auto" if is_deep_gemm_e8m0_used() else name
