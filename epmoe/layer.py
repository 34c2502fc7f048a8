"""A whole MoE layer over an `ExpertParallel`: router, exchange and experts, in six calls."""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epmoe import checkpoint, opaque
from epmoe.exchange.health import EPStateError
from epmoe.exchange.moves import Weights
from epmoe.exchange.round_state import MAX_TAG
from epmoe.local.beside import Beside, mark
from epmoe.local.experts import GroupedExperts, without_autocast
from epmoe.local.quantize import zero_padding_rows_
from epmoe.native.arguments import FLOATS, check_tensor, describe, dtype_name
from epmoe.safetensors_folder import SafetensorsFolder
from epmoe.service import ExpertParallel

_log = logging.getLogger("epmoe")


class MoELayer(nn.Module):
    """Router, exchange and experts of one layer. Any number of layers share one `ExpertParallel` and its windows.

    Casts (`to`, `bfloat16`, `half`) reach the experts only, because the choice of experts needs the router's precision:
    `router_weight` and `bias` keep their dtypes. Moves reach both. Logits are computed in the dtype of `router_weight`,
    also under autocast. A deepcopy copies the weights and shares `ep`. As the exchange is forward only, gradients are
    refused.

    Args:
        ep: of the group whose ranks hold the experts.
        router_weight: fp32, fp16 or bf16 [E, D].
        experts: maps rows [N, D], expert_offsets int32 [e+1] and scales (fp32 [N, D/128] with an fp8 payload, otherwise
            None) to outputs [N, D] in x's dtype, as `GroupedExperts` does.
        bias: fp32 [E], added to the scores for the choice of experts only. `routing.selection_bias` asks for it.
        logit_bias: [E] in the dtype of `router_weight`, added to the logits, as gpt-oss's router does.
            `routing.logit_bias` asks for it.
        shared: maps the tokens [T, D] to what is added to y [T, D], such as shared experts. On a GPU it runs on a
            stream of its own beside the exchange and the routed experts, and is captured with them.
        apply_router_weight_on_input: as of `ExpertParallel.dispatch`.
        layer_id: the number by which compiled and exported programs name the layer, by default the first free one. It
            is the `tag` of the layer's rounds, modulo 32768; by default, layers of an `ep` number themselves in the
            order in which they are made, which must be the same on all ranks.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: `router_weight`, `bias` or `experts` has another shape than the config says, or `layer_id` is the
            number of another layer.
    """

    router_weight: Tensor
    bias: Tensor | None
    logit_bias: Tensor | None
    order: Tensor

    def __init__(
        self,
        ep: ExpertParallel,
        router_weight: Tensor,
        experts: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        *,
        bias: Tensor | None = None,
        logit_bias: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        apply_router_weight_on_input: bool = False,
        layer_id: int | None = None,
    ) -> None:
        if not isinstance(ep, ExpertParallel):
            raise TypeError(f"`ep` must be an ExpertParallel, got {describe(ep)}")
        E, D = want = (ep.config.model.num_experts, ep.config.model.hidden_size)
        if not isinstance(router_weight, Tensor) or router_weight.dtype not in FLOATS:
            check_tensor("router_weight", router_weight, FLOATS, want)
        if router_weight.shape != want:
            raise ValueError(f"`router_weight` must be {list(want)}, got {list(router_weight.shape)}")
        if not callable(experts):
            raise TypeError(f"`experts` must be callable on (rows, expert_offsets, scales), got {describe(experts)}")
        if isinstance(experts, GroupedExperts) and (got := experts.w_down.shape[:2]) != (ep.num_local_experts, D):
            held = f"the {ep.num_local_experts} of this rank, with D={D}"
            raise ValueError(f"`experts` must be {held}, got {got[0]} with D={got[1]}")
        if bias is not None:
            check_tensor("bias", bias, (torch.float32,), (E,))
        elif ep.config.routing.selection_bias:
            raise ValueError("`bias` must be given, since `routing.selection_bias` says that the router has one")
        if logit_bias is not None:
            check_tensor("logit_bias", logit_bias, (router_weight.dtype,), (E,), router_weight.device)
        elif ep.config.routing.logit_bias:
            raise ValueError("`logit_bias` must be given, since `routing.logit_bias` says that the logits have one")
        if shared is not None and not callable(shared):
            raise TypeError(f"`shared` must be callable on x [T, D], got {describe(shared)}")
        if not isinstance(apply_router_weight_on_input, bool):
            got_type = describe(apply_router_weight_on_input)
            raise TypeError(f"`apply_router_weight_on_input` must be a bool, got {got_type}")
        super().__init__()
        self.ep, self.experts, self.shared = ep, experts, shared
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self._propagates = ep.config.routing.nan_rows == "propagate"
        self.register_buffer("router_weight", router_weight)
        self.register_buffer("bias", bias)
        self.register_buffer("order", ep.order, persistent=False)
        self.register_buffer("logit_bias", logit_bias)  # last: torch.export miscounts buffers behind absent ones
        self.layer_id = opaque.register(self, layer_id)
        self.tag = ep.new_tag() if layer_id is None else layer_id & MAX_TAG
        if ep.live is not None and isinstance(experts, GroupedExperts):
            ep.live.weights[self.tag] = _weights_of(self)

    @classmethod
    def from_full(
        cls,
        ep: ExpertParallel,
        router_weight: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        *,
        bias: Tensor | None = None,
        logit_bias: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        apply_router_weight_on_input: bool = False,
        layer_id: int | None = None,
        **experts: Any,
    ) -> Self:
        """A layer from the weights of all E logical experts, of which it copies this rank's to the device of `ep`.

        Args:
            ep: as of `MoELayer`, like `apply_router_weight_on_input` and `layer_id`.
            router_weight: [E, D], on any device.
            w_gate_up: [E, 2F, D], on any device, and otherwise as of `GroupedExperts`.
            w_down: [E, D, F], likewise.
            bias: [E], on any device, like `logit_bias`.
            logit_bias: see `MoELayer`.
            shared: see `MoELayer`.
            apply_router_weight_on_input: see `MoELayer`.
            layer_id: see `MoELayer`.
            experts: other arguments of `GroupedExperts`. Tensors, which are scales and biases, have a row for each of
                the E experts.

        Returns:
            The layer, whose experts are those of the placement, with copies.

        Raises:
            TypeError: as of `MoELayer` and `GroupedExperts`.
            ValueError: likewise, or a tensor has not E rows.
        """
        E, held = ep.placement.num_experts, _held(ep, layer_id)
        full = {"w_gate_up": w_gate_up, "w_down": w_down} | experts
        for name, value in full.items():
            if isinstance(value, Tensor):
                if value.shape[:1] != (E,):
                    raise ValueError(f"`{name}` must have a row for each of {E} experts, got {list(value.shape)}")
                full[name] = value[held].to(ep.device)
        return cls(
            ep, _on(ep.device, router_weight), GroupedExperts(**full), bias=_on(ep.device, bias),
            logit_bias=_on(ep.device, logit_bias), shared=shared,
            apply_router_weight_on_input=apply_router_weight_on_input, layer_id=layer_id,
        )  # fmt: skip

    @classmethod
    def from_safetensors(
        cls,
        ep: ExpertParallel,
        folder: SafetensorsFolder,
        block: str,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        apply_router_weight_on_input: bool = False,
        layer_id: int | None = None,
        **experts: Any,
    ) -> Self:
        """A layer from a Hugging Face checkpoint, of which this rank reads the router and its own experts only.

        Shared experts are not read: load their module as the model does, and give it as `shared`.

        Args:
            ep: as of `MoELayer`, like `apply_router_weight_on_input` and `layer_id`.
            folder: with the checkpoint.
            block: the name of the MoE block in the model, such as "model.layers.3.mlp".
            shared: see `MoELayer`.
            apply_router_weight_on_input: see `MoELayer`.
            layer_id: see `MoELayer`.
            experts: other arguments of `GroupedExperts`, such as `gemm` or `interleaved`.

        Returns:
            The layer on the device of `ep`, in the dtypes of the checkpoint; see `SafetensorsFolder.router`.

        Raises:
            TypeError: as of `MoELayer` and `GroupedExperts`.
            ValueError: likewise, or the checkpoint has no such block, or it has another format.
        """
        router: dict[str, Any] = {name: _on(ep.device, value) for name, value in folder.router(block).items()}
        held: dict[str, Any] = folder.experts(block, _held(ep, layer_id), ep.device)
        return cls(
            ep, experts=GroupedExperts(**held, **experts), **router, shared=shared,
            apply_router_weight_on_input=apply_router_weight_on_input, layer_id=layer_id,
        )  # fmt: skip

    def full_state_dict(self, *, cpu_offload: bool = False) -> dict[str, Any]:
        """`epmoe.checkpoint.full_state_dict` of this layer: all E logical experts. Collective."""
        return checkpoint.full_state_dict(self, cpu_offload=cpu_offload)

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """`epmoe.checkpoint.load_full_state_dict` of this layer: takes this rank's experts of all E."""
        checkpoint.load_full_state_dict(self, state_dict)

    def get_extra_state(self) -> Tensor:
        """int32 [e], a part of `state_dict`: the logical experts whose weights the state dict holds."""
        return torch.tensor(self.ep.logical_experts(self.tag), dtype=torch.int32, device=self.router_weight.device)

    def set_extra_state(self, state: Tensor) -> None:
        """Raises ValueError where a state dict is loaded that holds other experts than those of this rank."""
        if not state.is_meta:
            checkpoint.check_held(state, self.ep, self.tag)

    def forward(self, x: Tensor, num_tokens: int | Tensor | None = None, padded_tokens: int | None = None) -> Tensor:
        """x [T, D] of this rank's tokens, or [B, T, D] of B·T tokens → y of the same shape and dtype.

        Collective: every rank calls, also without tokens. Rows at and past `num_tokens`, an int or an int32 scalar
        tensor on the device, are padding and yield zeros; with [B, T, D] it counts rows [B·T, D]. `padded_tokens` is
        that of `ExpertParallel.dispatch`: with several nodes, as many rows as the largest call of this round has.

        Raises what `ExpertParallel.dispatch` and `ExpertParallel.combine` raise, and before anything is sent TypeError
        or ValueError unless x fits the config, and the dtype of `GroupedExperts`, and RuntimeError if anything requires
        grad in grad mode. An exception, also one of the experts or of a refused argument, gives the round up on this
        rank. The other ranks get an EPAbortedError that names it, or sums without its experts (`exchange.on_abort`),
        and none of them waits.
        """
        if torch.compiler.is_compiling():
            x_TD, logits_TE = self._logits(x)
            return opaque.moe(self, x_TD, logits_TE, None, num_tokens, padded_tokens).view(x.shape)
        with self._giving_up():
            x_TD, logits_TE = self._logits(x)
        return self.run(x_TD, logits_TE, None, num_tokens, padded_tokens).view(x.shape)

    def run(
        self,
        x_TD: Tensor,
        routing: Tensor,
        weights_TK: Tensor | None,
        num_tokens: int | Tensor | None,
        padded_tokens: int | None = None,
    ) -> Tensor:
        """The layer behind its router. Collective.

        Args:
            x_TD: tokens [T, D].
            routing: logits [T, E] for `ExpertParallel.route` if `weights_TK` is None, otherwise ids [T, K].
            weights_TK: [T, K], or None.
            num_tokens: as of `forward`, whose errors it raises.
            padded_tokens: likewise.

        Returns:
            y [T, D] in the dtype of x.
        """
        with self._giving_up():
            ids_TK, propagates = routing, weights_TK is None and self._propagates
            if weights_TK is None:
                ids_TK, weights_TK = self.ep.route(routing, bias=self.bias, num_tokens=num_tokens)
            start = None if self.shared is None else mark(x_TD.device)
            d = self.ep.dispatch(
                x_TD, ids_TK, weights_TK, num_tokens=num_tokens, padded_tokens=padded_tokens, tag=self.tag,
                apply_router_weight_on_input=self.apply_router_weight_on_input, aligned=self._aligned,
            )  # fmt: skip
            # Not before dispatch, whose blocks get multiprocessors first.
            shared = None if self.shared is None else Beside(start, self.shared, x_TD)
            segments = {} if self._grouped is None else d.segments
            expert_rows_ND = self.experts(d.rows, d.expert_offsets, d.scales, **segments)
            y_TD = self.ep.combine(expert_rows_ND, d)
            if shared is not None:
                y_TD += shared.result()
                if num_tokens is not None:
                    zero_padding_rows_(y_TD, num_tokens)
        if propagates:
            model, scoring = self.ep.config.model, self.ep.config.routing.scoring
            real = ids_TK[:, :1] < model.num_experts  # padding has the id E
            largest = routing.amax(1, keepdim=True)  # NaN where any logit is; −Inf alone costs an expert only itself
            y_TD.masked_fill_(real & (largest.isnan() if scoring == "sigmoid" else ~largest.isfinite()), torch.nan)
        return y_TD

    @torch.inference_mode()
    def warmup(self, tokens: Iterable[int]) -> None:
        """Run rounds of random tokens before serving, so that no later call or capture compiles a kernel. Collective.

        A line of the logger "epmoe" says how far it is. On a GPU each number of tokens is captured, too.

        Args:
            tokens: of this rank: the T of the calls to come; as many numbers on all ranks.
        """
        wanted = list(tokens)
        for i, T in enumerate(wanted):
            start = time.perf_counter()
            D, dtype = self.ep.config.model.hidden_size, self._dtypes()[0]
            x = torch.randn(T, D, device=self.ep.device).to(dtype)
            self(x)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)  # what a graph captures may not load anything
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    self(x)
            _log.info("%d of %d: %d tokens in %.1f s", i + 1, len(wanted), T, time.perf_counter() - start)

    def extra_repr(self) -> str:
        """What `repr` says of the exchange."""
        return repr(self.ep)

    @property
    def _grouped(self) -> GroupedExperts | None:
        """The experts, if they are ours."""
        return self.experts if isinstance(self.experts, GroupedExperts) else None

    @property
    def _aligned(self) -> bool:
        """Whether the experts want segments that start at multiples of a number of rows."""
        return self._grouped is not None and self._grouped.alignment > 1

    def _giving_up(self) -> AbstractContextManager[None]:
        """`ExpertParallel.giving_up` of this layer's rounds."""
        return self.ep.giving_up(
            self.tag, apply_router_weight_on_input=self.apply_router_weight_on_input, aligned=self._aligned
        )

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] and its logits [T, E]. Raises what `forward` does before anything is sent."""
        self._check(x)
        self._check_forward_only(x)
        x_TD = x.flatten(0, -2)
        with without_autocast(x.device):
            return x_TD, F.linear(x_TD.to(self.router_weight.dtype), self.router_weight, self.logit_bias)

    def _check(self, x: Tensor) -> None:
        model, device, ours = self.ep.config.model, self.ep.device, self._grouped
        if ours is not None and ours.is_fp8 and self.ep.config.alignment % ours.alignment:
            raise ValueError(  # in bf16 torch's GEMM takes the segments
                f"`capacity.alignment` must be a multiple of {ours.alignment}, or unset, got "
                f"{self.ep.config.alignment}: the experts' GEMM is DeepGEMM's, whose segments start there"
            )
        dtypes = self._dtypes()
        is_tensor, D = isinstance(x, Tensor), model.hidden_size
        if not is_tensor or x.dtype not in dtypes or x.dim() not in (2, 3) or x.shape[-1] != D:
            names = " or ".join(dtype_name(dtype) for dtype in dtypes)
            error = ValueError if is_tensor and x.dtype in dtypes else TypeError
            why = f": the experts take {names}" if ours is not None and is_tensor and error is TypeError else ""
            raise error(f"`x` must be {names} [T, {D}] or [B, T, {D}], got {describe(x)}{why}")
        if x.device != device:
            raise ValueError(f"`x` must be on {device}, got {x.device}")
        if self.router_weight.device != device:
            where = self.router_weight.device
            raise ValueError(f"`router_weight` must be on {device}, got {where}: move the layer with `.to`")

    def _dtypes(self) -> list[torch.dtype]:
        """Of x."""
        if self._grouped is not None:
            return [self._grouped.dtype]
        widest = self.ep.config.model.torch_dtype
        return [widest, *(dtype for dtype in FLOATS if dtype.itemsize < widest.itemsize)]

    def _check_forward_only(self, x: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        for name, value in (("x", x), *self.named_buffers(), *self.named_parameters()):
            if value.requires_grad:
                raise RuntimeError(
                    f"MoELayer is forward only, but `{name}` requires grad: run under torch.inference_mode() or "
                    "torch.no_grad()"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: getattr(self, name) for name in ("router_weight", "bias", "logit_bias")}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = getattr(self, name)
            if after is not None and after.dtype != tensor.dtype:
                setattr(self, name, tensor.to(after.device))
        self.order = self.ep.order
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__new__(type(self))
        memo |= {id(self): twin, id(self.ep): self.ep, id(self.order): self.order}
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin.layer_id, twin.tag = opaque.register(twin), self.ep.new_tag()
        return twin


def _weights_of(layer: MoELayer) -> Weights:
    """As of `ExpertParallel.replace`. It does not keep the layer alive."""
    reference = weakref.ref(layer)

    def weights(tag: int, local: int) -> list[Tensor]:
        layer = reference()
        if layer is None:
            raise EPStateError(f"the layer with tag {tag} is gone, so its experts cannot move")
        assert isinstance(layer.experts, GroupedExperts)
        return [tensor[local] for tensor in layer.experts.parameters()]

    return weights


def _held(ep: ExpertParallel, layer_id: int | None) -> list[int]:
    """The logical experts to load for a layer that is about to be made. An empty slot gets any: nobody uses it."""
    tag = ep.next_tag if layer_id is None else layer_id & MAX_TAG
    return [max(expert, 0) for expert in ep.logical_experts(tag)]


def _on(device: torch.device, value: Any) -> Any:
    """A tensor on `device`; anything else as it is, for the constructor to refuse."""
    return value.to(device) if isinstance(value, Tensor) else value
