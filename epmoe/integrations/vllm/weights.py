"""Versions of a trainer's weights in vLLM: the backend "epmoe" of its weight transfer.

    rank of a trainer    WeightSender(model, folder).send(7, dense)
                             │ folder
    vLLM                 init_weight_transfer_engine({"folder": folder}), once
                         start_weight_update(), update_weights({"version": 7}),
                         finish_weight_update("7")
    rank of vLLM             its experts one by one, and dense weights ─▶ vLLM's own loaders

vLLM chooses it by `--weight-transfer-config '{"backend": "epmoe"}'`, with any exchange of tokens.
vLLM runs no step meanwhile, so all ranks change between the same two steps without words of ours.
They look at a version before they change anything: what does not fit is refused on all ranks, and
the former weights serve on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from epmoe.group.collective import naming
from epmoe.group.peers import Peers
from epmoe.group.waiting import as_on_this_thread
from epmoe.integrations.vllm import release
from epmoe.integrations.vllm.experts import EpmoeExperts
from epmoe.integrations.vllm.sizes import TIMEOUT_S, named_exchanges
from epmoe.live.finite import NotFiniteError, nonfinite_rows
from epmoe.live.versions import (
    PLAIN,
    Experts,
    Version,
    check_all_experts,
    map_version,
    newest_version,
    own_folder,
    shared_memory,
    what_is_there,
)
from epmoe.native.arguments import FLOATS, dtype_name

# Between two looks into the folder.
_LOOK_S = 0.005
_PLAIN_WEIGHTS = {"w13_weight", "w2_weight"}
# Parts of a `MoELayer` beside its experts, by their names in vLLM's block.
_PARTS = {
    "router_weight": ("gate.weight", "router.weight"),
    "bias": ("gate.e_score_correction_bias",),
    "logit_bias": ("router.bias", "gate.bias"),
}


@dataclass
class FolderInfo(WeightTransferInitInfo):
    """What `init_weight_transfer_engine` takes."""

    folder: str
    """of the trainer's `WeightSender`s, on the machine of both"""


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """What `update_weights` takes."""

    version: int
    """the number of `WeightSender.send`"""
    timeout_s: float = 60.0
    """how long to wait for the version, in seconds"""
    check_finite: bool = True
    """whether a version with NaN or Inf is refused"""


class _Expert(NamedTuple):
    """An expert of this rank in a version, in halves as checkpoints have them."""

    number: int
    gate: Tensor
    up: Tensor
    down: Tensor


class VersionEngine(WeightTransferEngine[FolderInfo, VersionInfo]):
    """Loads a version of a trainer into the parameters of vLLM, as vLLM has laid them out.

    Each call is one of all ranks of vLLM, which make no step meanwhile. A trainer has any number of
    ranks; its `MoELayer`s have the names of vLLM's blocks, and its dense weights those of the
    checkpoint or, for parts of a `MoELayer`, their own.
    """

    init_info_cls = FolderInfo
    update_info_cls = VersionInfo
    supports_draft_weight_update = False
    _folder: Path | None = None
    _process: int
    """that has taken the folder"""

    def init_transfer_engine(self, init_info: FolderInfo) -> None:
        """Take the folder, which is made where it is not there yet.

        Raises ValueError in a release that epmoe was not tried with, and where vLLM's ranks have
        stages of a pipeline, or copies of experts; and PermissionError if another user owns the
        folder, or can write into it.
        """
        problem = release.problem()
        if problem:
            raise ValueError(problem)
        for flag, is_set in (
            ("--enable-eplb", self.parallel_config.enable_eplb),
            ("--pipeline-parallel-size", self.parallel_config.pipeline_parallel_size > 1),
        ):
            if is_set:
                raise ValueError(f"the weight transfer of epmoe does not go with {flag}")
        self._folder = own_folder(init_info.folder)
        self._process = os.getpid()

    def start_weight_update(self) -> None:
        """Nothing: weights change in `update_weights`, once all ranks have looked at them."""

    def finish_weight_update(self) -> None:
        """Nothing: `update_weights` has changed all weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """`receive_weights` of a mapping with the attributes of `VersionInfo`."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Wait for a version, and load it. Collective: one step of all ranks.

        If this raises before a weight has changed, the former ones serve on: TimeoutError where the
        version has not come, FileNotFoundError where it has gone, NotFiniteError where it has NaN
        or Inf, and ValueError if it does not fit, or while the weights sleep; RuntimeError or
        ValueError on the other ranks. In a fork of vLLM's process it is a ValueError, too.
        EPTimeoutError names ranks that are missing. After an error of vLLM's loaders on a rank,
        which is raised on all, weights are mixed: call this again, or end vLLM.

        What a signal handler raises ends the call on all ranks and changes no weight, or it is
        raised on its rank alone, once all ranks have loaded the version.
        """
        folder = self._folder
        if folder is None:
            raise ValueError("`init_weight_transfer_engine` names the folder: call it first")
        if self._process != os.getpid():
            raise ValueError(
                f"the weight transfer belongs to process {self._process}, of which this process is "
                "a fork"
            )
        # Rank 0 waits for the version, and the others for rank 0.
        peers = Peers.of(get_ep_group().cpu_group, TIMEOUT_S + update_info.timeout_s)
        update = _Update(self, peers, folder, update_info)
        with naming("update_weights", []), peers.together(as_on_this_thread(update.load)):
            update.look()

    def shutdown(self) -> None:
        """Nothing: no version stays mapped between two calls."""

    def _layers(self, version: Version) -> dict[str, RoutedExperts]:
        """Find vLLM's layers of experts by the names of the trainer's. Raises ValueError if they do
        not fit.
        """
        modules = {}
        for name, module in self.model.named_modules():
            if isinstance(module, RoutedExperts):
                modules[name] = module
        layers = {}
        for name in version.experts:
            found = [of_vllm for of_vllm in modules if of_vllm.startswith(f"{name}.")]
            if len(found) != 1:
                raise ValueError(
                    f"version {version.number} has experts of {name!r}, and vLLM has none there: "
                    f"its layers are {sorted(modules)[:3]} and so on"
                )
            layers[name] = modules[found[0]]
            _check_layer(version, name, layers[name])
        if len(layers) < len(modules):
            raise ValueError(
                f"version {version.number} has experts of {len(layers)} layers, and vLLM of "
                f"{len(modules)}"
            )
        return layers

    def _load(self, version: Version, layers: dict[str, RoutedExperts]) -> None:
        """Load a version by vLLM's loaders, which lay weights out as its kernels want them, in the
        memory that CUDA graphs have.
        """
        names = {name for name, _ in self.model.named_parameters()}
        dense = []
        for name, value in version.dense.items():
            in_checkpoint = _in_checkpoint(name, version, names)
            if in_checkpoint is not None:
                dense.append((in_checkpoint, value))
        try:
            initialize_layerwise_reload(self.model)
            with torch.no_grad():
                for name, layer in layers.items():
                    for expert in _own_experts(version.experts[name], layer):
                        _load_expert(layer, expert)
                if dense:
                    self.model.load_weights(dense)
        finally:
            # Layers without new weights get their former ones back.
            finalize_layerwise_reload(self.model, self.model_config)


class _Update:
    """The steps of `receive_weights` on this rank: all ranks look at the version, and then all of
    them load it.
    """

    _version: Version
    _layers: dict[str, RoutedExperts]

    def __init__(
        self, engine: VersionEngine, peers: Peers, folder: Path, wanted: VersionInfo
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._folder = folder
        self._wanted = wanted

    def look(self) -> None:
        """Wait for the version, and map it. Collective. Raises what `receive_weights` raises before
        a weight has changed.
        """
        # Their memory is not there, where vLLM's sleep mode has taken it.
        if any(ep.asleep for ep in named_exchanges().values()):
            raise ValueError(
                "the weights sleep: wake them up (`wake_up`, tags `weights`) before "
                "`update_weights`"
            )
        _await_version(self._peers, self._folder, self._wanted)
        memory = shared_memory(self._engine.device)
        self._version = map_version(self._folder, self._wanted.version, memory)
        self._layers = self._engine._layers(self._version)
        if self._wanted.check_finite:
            _check_finite(self._version, self._layers)

    def load(self) -> None:
        """Load the version, once all ranks have looked. Collective. It runs on another thread,
        where no signal handler can interrupt vLLM's loaders. Raises what they raise on any rank.
        """
        with self._peers.together():
            self._engine._load(self._version, self._layers)
            # Copies have ended before the memory of the trainer is unmapped.
            if self._engine.device.type == "cuda":
                torch.cuda.synchronize(self._engine.device)


def _await_version(peers: Peers, folder: Path, wanted: VersionInfo) -> None:
    """Wait until the version is whole. Raises TimeoutError, on all ranks."""
    deadline = time.monotonic() + wanted.timeout_s
    if peers.rank == 0:
        while newest_version(folder) < wanted.version and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
    newest = peers.all_gather(newest_version(folder))[0]
    if newest < wanted.version:
        raise TimeoutError(
            f"version {wanted.version} of the weights did not come into {folder} within "
            f"{wanted.timeout_s} s: {what_is_there(folder)}"
        )


def _check_layer(version: Version, name: str, layer: RoutedExperts) -> None:
    """Raise ValueError if vLLM's layer has other experts, or weights in a format of its own."""
    moe = layer.moe_config
    check_all_experts(version, name, moe.num_experts)
    # As the checkpoint was laid out, before vLLM's kernels laid it out anew.
    parameters = get_layerwise_info(layer).restore_metadata[0]
    gate_up = parameters.get("w13_weight")
    if gate_up is None or gate_up.dtype not in FLOATS or parameters.keys() != _PLAIN_WEIGHTS:
        described = {key: dtype_name(value.dtype) for key, value in parameters.items()}
        raise ValueError(
            f"experts of {name!r} in vLLM must be plain weights without biases, got {described}: "
            "let vLLM load another checkpoint"
        )
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    is_ours = isinstance(getattr(kernel, "fused_experts", None), EpmoeExperts)
    if layer.w13_weight.is_cpu and not is_ours:
        raise ValueError(
            "vLLM's own experts for CPUs pack weights once, and not again where they change: "
            'choose `epmoe` = "layer"'
        )
    width = gate_up.shape[1] // 2 * moe.moe_parallel_config.tp_size
    for part in version.experts[name]:
        _, F2, D = part.weights["w_gate_up"].shape
        has_others = part.weights.keys() - {"w_gate_up", "w_down"}
        fits = (2 * width, gate_up.shape[2]) == (F2, D)
        if not fits or part.computes != PLAIN or has_others:
            raise ValueError(
                f"experts of {name!r} must have {width} × {gate_up.shape[2]} weights of plain "
                f"SwiGLU, got {F2 // 2} × {D}, {part.computes} and {sorted(part.weights)}"
            )


def _check_finite(version: Version, layers: dict[str, RoutedExperts]) -> None:
    """Raise NotFiniteError, which says where the first value is that is not finite in vLLM."""
    for name, layer in layers.items():
        dtype = get_layerwise_info(layer).restore_metadata[0]["w13_weight"].dtype
        for expert in _own_experts(version.experts[name], layer):
            for part in (expert.gate, expert.up, expert.down):
                if nonfinite_rows(part[None], dtype):
                    _refuse_values(version, f"expert {expert.number} of {name!r}")
    for name, value in version.dense.items():
        if nonfinite_rows(value[None], value.dtype):
            _refuse_values(version, f"`dense[{name!r}]`")


def _refuse_values(version: Version, where: str) -> None:
    raise NotFiniteError(f"version {version.number} has values that are not finite: {where}")


def _own_experts(parts: list[Experts], layer: RoutedExperts) -> Iterator[_Expert]:
    """The experts of this rank. The trainer's ranks may have copies of them."""
    seen = set()
    for part in parts:
        gate_up_e2FD = part.weights["w_gate_up"]
        down_eDF = part.weights["w_down"]
        for row, number in enumerate(part.held):
            is_here = number >= 0 and layer._map_global_expert_id_to_local_expert_id(number) >= 0
            if not is_here or number in seen:
                continue
            seen.add(number)
            gate, up = gate_up_e2FD[row].chunk(2)
            yield _Expert(number, gate, up, down_eDF[row])


def _load_expert(layer: RoutedExperts, expert: _Expert) -> None:
    """As a model of vLLM's loads the tensors of a checkpoint."""
    for parameter, shard, value in (
        ("w13_weight", "w1", expert.gate),
        ("w13_weight", "w3", expert.up),
        ("w2_weight", "w2", expert.down),
    ):
        weight = getattr(layer, parameter)
        weight.weight_loader(
            weight, value, f"experts.{parameter}", shard_id=shard, expert_id=expert.number
        )


def _in_checkpoint(name: str, version: Version, names: set[str]) -> str | None:
    """The name of a dense weight in a checkpoint, which names some parts of a `MoELayer`
    differently; None: the checkpoint has no such weight.
    """
    block, _, part = name.rpartition(".")
    if block not in version.experts:
        return name
    if part == "_extra_state":
        return None
    for of_vllm in _PARTS.get(part, ()):
        if f"{block}.{of_vllm}" in names:
            return f"{block}.{of_vllm}"
    return name
