"""epmoe in FlashInfer ≥ 0.7.4: a communication backend of its expert-parallel layers.

Importing this module registers "epmoe" by `flashinfer.moe_ep.register_communication`, which is
public, so that a layer takes it in place of FlashInfer's own:

    import epmoe.integrations.flashinfer
    layer = MoEEpLayer(…, backend=SplitConfig(comm="epmoe", kernel=…))

    hidden_states, ids, weights ─ dispatch ─▶ rows [R·t, D], ids and weights [R·t, K] ─ kernel
    outputs [R·t, D], weighted and summed ─ combine ─▶ [T, D]

All layers with the same sizes share one `ExpertParallel`, which the first of them makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.config.config import EPConfig
from epmoe.exchange.handles import Dispatched, RoundShape
from epmoe.group.errors import EPStateError
from epmoe.integrations.entered import Entered
from epmoe.integrations.session import Session, make_config
from epmoe.native.arguments import FP8, describe
from epmoe.native.formats import PayloadName
from epmoe.service import ExpertParallel

try:
    from flashinfer.moe_ep import (
        BootstrapConfig,
        MoEEpCommParams,
        MoEEpCommunication,
        MoEEpDispatchResult,
        register_communication,
    )
except ImportError as error:
    raise ImportError(
        f"epmoe.integrations.flashinfer needs FlashInfer 0.7.4, with its module `moe_ep`: {error}"
    ) from error

__all__ = ["EpmoeCommunication", "EpmoeConfig", "close"]

TIMEOUT_S = 300.0
"""A rank may compile its kernels while the others wait, which takes minutes."""
_PAYLOADS: dict[str | None, PayloadName] = {
    None: "auto",
    "BF16": "auto",
    "FP16": "auto",
    "DeepSeekFp8": "fp8",
}
"""The payload of epmoe for each of FlashInfer's formats of rows, by its name."""


@dataclass(frozen=True)
class EpmoeConfig:
    """In place of the name "epmoe", with settings: `comm=EpmoeConfig({"timeout_s": 30})`.

    Attributes:
        exchange: keys of the section `exchange` of `EPConfig`, above all `timeout_s`. `payload`
            follows from the format in which FlashInfer's kernel takes rows.
    """

    exchange: Mapping[str, Any] = field(default_factory=dict)
    backend_name: ClassVar[str] = "epmoe"


class _Windows:
    """An `ExpertParallel`, and the layers that use it and are still there."""

    def __init__(self, ep: ExpertParallel) -> None:
        self.ep = ep
        self.users = WeakSet[EpmoeCommunication]()

    def poll(self) -> None:
        self.ep.poll()

    def close(self) -> None:
        self.ep.close()


_session: Session[_Windows] = Session()


@register_communication("epmoe")
class EpmoeCommunication(MoEEpCommunication):
    """FlashInfer's rank-major dispatch and combine, over `layout="rank"` of an `ExpertParallel`.

    Ids of experts of other ranks arrive as `invalid_expert_id`, and so do all ids of rows without a
    token. Rows are views of the window. Where `runtime_max_tokens_per_rank` is smaller than
    `max_tokens_per_rank`, they are copies, without the slots between.
    """

    def __init__(
        self, bootstrap: BootstrapConfig, params: MoEEpCommParams, config: EpmoeConfig | None = None
    ) -> None:
        """Collective where no layer with these sizes is there yet. Takes FlashInfer's arguments.

        Raises ValueError for a format of rows that epmoe does not have, for a `payload` in
        `config`, and where `bootstrap` and its group differ, and what `ExpertParallel` raises.
        """
        super().__init__(bootstrap, params)
        self._windows: _Windows | None = _share(bootstrap, params, config or EpmoeConfig())
        self._windows.users.add(self)
        ep = self._windows.ep
        self._tag = ep.new_tag()
        # The shape of a call, for a rank that raises before its dispatch.
        dtype = FP8 if ep.config.exchange.payload == "fp8" else params.token_dtype
        self._shape = RoundShape.of(ep.config, dtype)._replace(layout="rank")
        self._round: Dispatched | None = None
        self._tokens_per_rank = params.max_tokens_per_rank

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Whether this machine has CPUs alone, or a GPU from sm_80 on."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Send this rank's tokens [T, D], with their ids and weights [T, K]. Returns what arrived,
        [R·t, …], where t is `runtime_max_tokens_per_rank`. Collective.

        Without weights each pair counts as 1. Rows in fp8 and their scales fp32 [T, D/128] may come
        as bytes, and then arrive as bytes.

        Raises ValueError for `eplb_local_stats` and for more tokens than t; RuntimeError where the
        last round had no combine, and gives that round up; and what `ExpertParallel.dispatch`
        raises.
        """
        ep = self._ep()
        entered: Entered | None = None
        # Not a context manager: a signal handler may raise behind the end of one, too.
        try:
            if self._is_open(ep):
                raise RuntimeError(
                    "dispatch without a combine of the last round, which is given up"
                )
            entered = Entered.of(ep)
            if eplb_local_stats is not None:
                raise ValueError("epmoe gathers no statistics: leave out `eplb_local_stats`")
            t = self._resolve_runtime_max_tokens_per_rank(runtime_max_tokens_per_rank)
            self._check_rows(hidden_states, t)
            x_TD, scales = self._rows(hidden_states, hidden_states_scale)
            weights_TK = topk_weights
            if weights_TK is None:
                weights_TK = torch.ones_like(topk_ids, dtype=torch.float32)
            with ep.at_most(t):
                d = ep.dispatch(
                    x_TD, topk_ids, weights_TK, scales=scales, layout="rank", tag=self._tag
                )
            self._round = d
            self._tokens_per_rank = t
            result = self._received(d, t, hidden_states, hidden_states_scale)
            return result if topk_weights is not None else replace(result, topk_weights=None)
        except BaseException:
            self._give_up(ep, entered)
            raise

    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """Sum outputs [R·t, D] or [R, t, D] over the experts of each token, weighted → [T, D].
        Collective.

        They are in the dtype of the rows, and after rows in fp8 in `MoEEpCommParams.dtype`.
        `output` is contiguous. Raises RuntimeError without a dispatch before, and what
        `ExpertParallel.combine_partial` raises.
        """
        ep = self._ep()
        d = self._round
        if d is None:
            raise RuntimeError("combine without a dispatch before")
        try:
            y = ep.combine_partial(self._slabs(expert_output), d, out=output)
            self._round = None
            return y
        except BaseException:
            # Nothing is open, and nothing happens, where the round is whole.
            self._abort(ep)
            raise

    def destroy(self) -> None:
        """Release the windows with the last layer that uses them. May be called again.

        With a round open this rank gives it up: the other ranks hear of it at once. In a fork the
        windows of its parent stay as they are.
        """
        try:
            self._leave()
        except BaseException:
            # A signal handler has raised. FlashInfer's layer calls this once: leave all the same.
            self._leave()
            raise

    def _leave(self) -> None:
        """Do what `destroy` does, or what an earlier call of this method has left undone."""
        windows = self._windows
        if windows is None:
            return
        windows.users.discard(self)
        if not windows.users:
            _session.release(windows)
        else:
            # Other layers go on with these windows, which may be closed, asleep or a parent's.
            with suppress(EPStateError):
                if self._is_open(windows.ep):
                    windows.ep.abort()
        self._round = None
        self._windows = None

    def _ep(self) -> ExpertParallel:
        if self._windows is None:
            raise RuntimeError("this communication has been destroyed")
        return self._windows.ep

    def _is_open(self, ep: ExpertParallel) -> bool:
        """Whether the round of the last dispatch has no end yet."""
        d = self._round
        return d is not None and ep.exchange.rounds.handle is d

    def _abort(self, ep: ExpertParallel) -> None:
        """Abort the open round: the other ranks learn that this one did."""
        ep.abort()
        self._round = None

    def _give_up(self, ep: ExpertParallel, entered: Entered | None) -> None:
        """After an exception in dispatch: close its round, or take part in the one that the others
        come to, without tokens. They learn that this rank did.
        """
        # It has no rounds while it sleeps.
        with suppress(EPStateError):
            if self._is_open(ep):
                self._abort(ep)
                return
            entered = entered or Entered.of(ep)
            entered.give_up(self._tag, lambda: self._shape)

    def _check_rows(self, hidden_states: Tensor, most: int) -> None:
        """Raise ValueError for more tokens than `most`, and for rows of another size."""
        T = hidden_states.shape[0]
        D = hidden_states.shape[-1]
        if most < T:
            raise ValueError(f"{T} tokens on this rank, but no rank may bring more than {most}")
        if self.params.hidden_size != D:
            raise ValueError(
                f"rows of {D} elements are not the layer's, of {self.params.hidden_size}: epmoe "
                "takes no kernel that packs its rows (`mxfp8_dispatch`)"
            )

    def _rows(self, hidden_states: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Take the rows and scales of a dispatch, which FlashInfer may give as bytes."""
        if self._shape.dtype is not FP8:
            if scale is not None:
                raise ValueError(
                    "`hidden_states_scale` needs `MoEEpCommParams.dispatch_format` DeepSeekFp8"
                )
            return hidden_states, None
        if scale is None:
            raise ValueError("rows in DeepSeekFp8 need `hidden_states_scale`")
        is_bytes = hidden_states.dtype == torch.uint8
        x_TD = hidden_states.view(FP8) if is_bytes else hidden_states
        return x_TD, scale.view(torch.float32)

    def _received(
        self, d: Dispatched, t: int, hidden_states: Tensor, scale: Tensor | None
    ) -> MoEEpDispatchResult:
        """View the first t slots of each source, as FlashInfer's kernels take them."""
        received = d.recv
        ids = received.ids[:, :t].flatten(0, 1)
        first = self.ep_rank * self.num_local_experts
        is_elsewhere = (ids < first) | (ids >= first + self.num_local_experts)
        scales = None
        if scale is not None:
            assert received.scales is not None
            scales = received.scales[:, :t].flatten(0, 1).view(scale.dtype)
        return MoEEpDispatchResult(
            hidden_states=received.x[:, :t].flatten(0, 1).view(hidden_states.dtype),
            topk_ids=ids.masked_fill(is_elsewhere, self.params.invalid_expert_id),
            topk_weights=received.weights[:, :t].flatten(0, 1),
            tokens_per_rank=t,
            hidden_states_scale=scales,
        )

    def _slabs(self, expert_output: Tensor) -> Tensor:
        """Bring outputs into the form that combine takes, [R, M, D]. It reads only slots with a
        token.
        """
        t = self._tokens_per_rank
        most = self.params.max_tokens_per_rank
        if expert_output.numel() != self.ep_size * t * self.params.hidden_size:
            raise ValueError(
                f"`expert_output` must be [{self.ep_size * t}, {self.params.hidden_size}], got "
                f"{describe(expert_output)}"
            )
        outputs = expert_output.reshape(self.ep_size, t, self.params.hidden_size)
        if t == most:
            return outputs
        slabs = outputs.new_empty(self.ep_size, most, outputs.shape[-1])
        slabs[:, :t] = outputs
        return slabs


def close() -> None:
    """Release the windows of all layers, which are of no use then."""
    _session.close()


def _share(bootstrap: BootstrapConfig, params: MoEEpCommParams, config: EpmoeConfig) -> _Windows:
    """Find the windows of all layers with these sizes. The first call makes them and is
    collective.
    """
    if "payload" in config.exchange:
        raise ValueError("`payload` follows from the kernel's dispatch format: leave it out")
    settings = {"timeout_s": TIMEOUT_S, **config.exchange, "payload": _payload(params)}
    device = _device(bootstrap)

    make = partial(_open_windows, bootstrap, params, settings, device)
    sizes = (
        params.num_experts,
        params.top_k,
        params.max_tokens_per_rank,
        params.hidden_size,
        params.token_dtype,
        tuple(sorted(settings.items())),
    )
    return _session.share(sizes, bootstrap.process_group, device, make)


def _open_windows(
    bootstrap: BootstrapConfig,
    params: MoEEpCommParams,
    settings: dict[str, Any],
    device: torch.device,
    ep_size: int,
) -> _Windows:
    """Make the windows of layers with these sizes. Collective."""
    _check_group(bootstrap, ep_size)
    config = _config(params, ep_size, settings)
    return _Windows(ExpertParallel(config, bootstrap.process_group, device))


def _payload(params: MoEEpCommParams) -> PayloadName:
    """The format of rows on the way. Raises ValueError for one that epmoe does not have."""
    name = getattr(params.dispatch_format, "name", None)
    if name not in _PAYLOADS:
        known = ", ".join(filter(None, _PAYLOADS))
        raise ValueError(f"epmoe carries rows in {known}, got the dispatch format {name}")
    return _PAYLOADS[name]


def _device(bootstrap: BootstrapConfig) -> torch.device:
    """The GPU that FlashInfer has bound to this rank; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    ordinal = bootstrap.device
    return torch.device("cuda", torch.cuda.current_device() if ordinal is None else ordinal)


def _check_group(bootstrap: BootstrapConfig, ep_size: int) -> None:
    """Raise ValueError if `bootstrap` says another rank than its group of `ep_size` ranks."""
    rank = dist.get_rank(bootstrap.process_group) if dist.is_initialized() else 0
    if (bootstrap.rank, bootstrap.world_size) != (rank, ep_size):
        raise ValueError(
            f"`BootstrapConfig` says rank {bootstrap.rank} of {bootstrap.world_size}, but its "
            f"group says rank {rank} of {ep_size}"
        )


def _config(params: MoEEpCommParams, ep_size: int, settings: dict[str, Any]) -> EPConfig:
    """Make the configuration of these sizes, with keys of the section `exchange`."""
    capacity = {
        "max_num_tokens_per_rank": params.max_tokens_per_rank,
        # Slots are R·M; expert-major rows, up to R·M·K, then need no memory.
        "max_expert_rows": 1,
        "on_overflow": "drop",
    }
    return make_config(
        params.num_experts,
        params.top_k,
        params.hidden_size,
        params.token_dtype,
        ep_size,
        {"capacity": capacity, "exchange": settings},
    )
