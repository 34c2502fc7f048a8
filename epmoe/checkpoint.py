"""Checkpoints of models whose experts are spread over ranks: what one group saves, a group of any other size loads.

A rank's `state_dict` holds that rank's experts. The functions here go by logical experts instead. They take a
`MoELayer`, or a model that holds some.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epmoe.collective import eps_of, everyone, naming, peers_of, together
from epmoe.exchange.health import EPStateError
from epmoe.local.experts import GroupedExperts
from epmoe.service import ExpertParallel

_MOST_NAMED = 16  # experts in a message


class _Layer(NamedTuple):
    """A layer of a model. Keys are those of the model's state dict."""

    ep: ExpertParallel
    prefix: str
    names: list[str]
    """Of the tensors [e, …], behind `prefix`."""
    extra: str
    """The key of `get_extra_state`."""
    tag: int

    @property
    def held(self) -> list[int]:
        """−1 for an empty slot."""
        return self.ep.logical_experts(self.tag)


def full_state_dict(module: nn.Module, *, cpu_offload: bool = False) -> dict[str, Any]:
    """The state dict with all E logical experts, which is that of a group of one rank.

    Collective over the group of each layer, by whose CPU backend the experts travel one by one. The arguments are those
    of torch's `StateDictOptions(full_state_dict=True, cpu_offload=…)`.

    Args:
        module: a layer or a model.
        cpu_offload: only rank 0 of the group gets tensors, on the CPU, and the other ranks get {}. Otherwise every rank
            gets them, on the device of its layer.

    Returns:
        Tensors of experts are [E, …]. The others may share the memory of the module.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        EPStateError: the `ExpertParallel` of a layer is closed. Or experts move on a rank, which the others name: call
            `ExpertParallel.apply` on all ranks before.
        EPTimeoutError: ranks ended or did not come within `exchange.warmup_timeout_s`. It names them.
    """
    eps = eps_of(module)
    with naming("full_state_dict", eps):
        with together(eps):
            layers, state = _layers(module), module.state_dict()
            for layer in layers:
                if layer.ep.size > 1 and layer.ep.group is None:
                    raise EPStateError("this ExpertParallel is closed: its ranks have no group any more")
                _ = layer.held  # raises while experts move
        for layer in layers:
            for name in layer.names:
                state[layer.prefix + name] = _gather(state[layer.prefix + name], layer, cpu_offload)
            if layer.extra in state:
                state[layer.extra] = torch.arange(layer.ep.placement.num_experts, dtype=torch.int32)
    if not cpu_offload:
        return state
    if any(layer.ep.rank for layer in layers):
        return {}
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of what `full_state_dict` returned, in a group of any size.

    No rank waits for another. Every rank needs the whole dict: `torch.load(file, mmap=True)` reads of a file what the
    rank takes.

    Args:
        module: a layer or a model.
        state_dict: of `full_state_dict`, or with the same keys and shapes.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: `state_dict` does not hold all experts.
        RuntimeError: torch's, for missing or unexpected keys and for shapes.
    """
    local, own = dict(state_dict), module.state_dict()
    for layer in _layers(module):
        E = layer.ep.placement.num_experts
        if layer.extra in local and (got := local[layer.extra].tolist()) != list(range(E)):
            raise ValueError(f"`state_dict` must hold all {E} experts under {layer.prefix!r}, got {_named(got)}")
        if layer.extra in own:
            local[layer.extra] = own[layer.extra]
        for name in layer.names:
            if (key := layer.prefix + name) in local:
                if len(local[key]) != E:
                    raise ValueError(f"`{key}` must hold all {E} experts, got {len(local[key])}")
                local[key] = local[key][layer.held]
    module.load_state_dict(local)


def sharded_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict with a key for each logical expert of this rank, such as `experts.7.w_down`.

    It is what torch.distributed.checkpoint takes (`save`, `async_save`, `load`), also within a larger dict. Of an
    expert that several ranks hold, torch writes one copy.

    Args:
        module: a layer or a model.

    Returns:
        Tensors that share the memory of the module: what is read into them is loaded. An expert that the rank holds
        twice has one tensor; `load` fills the other.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
    """
    return _shard(_layers(module), module.state_dict())


def save(module: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Save a layer or a model by torch.distributed.checkpoint. Every rank calls it and writes its share.

    Args:
        module: a layer or a model.
        folder: which all ranks see.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        EPStateError: as of `full_state_dict`.
        EPTimeoutError: likewise; ranks may be as far apart when they have written.
    """
    import torch.distributed.checkpoint as dcp  # takes most of a second

    eps = eps_of(module)
    with naming("save", eps), everyone(eps) as peers:
        with peers.together():
            state = sharded_state_dict(module)
        with peers.waiting():
            dcp.save(state, checkpoint_id=folder, process_group=peers.group)


def load(module: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Load what ranks of any number have saved with `save`. Every rank calls it and reads its own experts only.

    Args:
        module: a layer or a model, with memory: `to_empty` first if it is on the meta device.
        folder: as of `save`.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        EPStateError: as of `full_state_dict`.
        EPTimeoutError: likewise; ranks may be as far apart when they have read.
        CheckpointException: torch's, for missing keys and for shapes, on all ranks.
    """
    import torch.distributed.checkpoint as dcp

    eps = eps_of(module)
    with naming("load", eps), everyone(eps) as peers:
        with peers.together():
            layers, state = _layers(module), module.state_dict()
            sharded = _shard(layers, state)
        with peers.waiting():
            dcp.load(sharded, checkpoint_id=folder, process_group=peers.group)
    for layer in layers:
        for name in layer.names:
            for row, x in zip(state[layer.prefix + name], layer.held, strict=True):
                if x >= 0:
                    row.copy_(sharded[_key(layer, x, name)])  # which is the row itself, but for a second copy of x
    state |= {key: value for key, value in sharded.items() if key in state}
    module.load_state_dict(state)  # for what the modules do when they load


def check_held(state: Tensor, ep: ExpertParallel, tag: int) -> None:
    """Raises ValueError unless `state` [e] lists the experts of this rank in a layer, whose weights come with it."""
    want = ep.logical_experts(tag)
    if (got := state.tolist()) != want:
        raise ValueError(
            f"the state dict has the weights of the logical experts {_named(got)}, but rank {ep.rank} of {ep.size} "
            f"holds {_named(want)}: other ranks load what `full_state_dict` or `epmoe.checkpoint.save` has saved"
        )


def _layers(module: nn.Module) -> list[_Layer]:
    layers = []
    for name, layer in module.named_modules(remove_duplicate=False):
        ep, prefix = getattr(layer, "ep", None), f"{name}." if name else ""
        if isinstance(ep, ExpertParallel) and isinstance(experts := getattr(layer, "experts", None), nn.Module):
            if not isinstance(experts, GroupedExperts):
                raise TypeError(f"`{prefix}experts` must be GroupedExperts, got {type(experts).__name__}")
            if (held := len(experts.w_down)) != ep.num_local_experts:
                raise ValueError(
                    f"`{prefix}experts` must be the {ep.num_local_experts} of this rank, got {held}: after `resume`, "
                    "give the layer its new experts first"
                )
            names = [name for name, _ in experts.named_parameters()]
            layers.append(_Layer(ep, f"{prefix}experts.", names, f"{prefix}_extra_state", getattr(layer, "tag", 0)))
    return layers


def _shard(layers: list[_Layer], state: Mapping[str, Any]) -> dict[str, Any]:
    sharded = dict(state)
    for layer in layers:
        sharded.pop(layer.extra, None)  # the keys say which experts these are
        for name in layer.names:
            rows = sharded.pop(layer.prefix + name)
            for row, x in zip(rows, layer.held, strict=True):
                if x >= 0:
                    sharded.setdefault(_key(layer, x, name), row)
    return sharded


def _key(layer: _Layer, logical: int, name: str) -> str:
    return f"{layer.prefix}{logical}.{name}"


def _gather(local: Tensor, layer: _Layer, cpu_offload: bool) -> Tensor:
    """All experts [E, …] from those of each rank [e, …]. With `cpu_offload`, ranks other than 0 get nothing of use."""
    ep, placement, peers = layer.ep, layer.ep.placement, peers_of(layer.ep)
    rows = placement.num_experts if ep.rank == 0 or not cpu_offload else 1  # one is enough to send from
    full = torch.empty(rows, *local.shape[1:], dtype=local.dtype)
    for x in range(placement.num_experts):
        (owner, index), row = ep.holder(x, layer.tag), full[x % rows]
        if owner == ep.rank:
            row.copy_(local[index])
        (peers.to_first if cpu_offload else peers.broadcast)(row, owner)
    return full if cpu_offload else full.to(local.device)


def _named(experts: Sequence[int]) -> str:
    more = len(experts) - _MOST_NAMED
    return f"{list(experts[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")
