"""Checkpoints of models whose experts are spread over ranks: what one group saves, a group of any other size loads.

A rank's `state_dict` holds that rank's experts. The functions here go by logical experts instead. They take a
`MoELayer`, or a model that holds some, or other modules with `GroupedExperts`; also in DistributedDataParallel, or
sharded by FSDP2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from epmoe.checkpoint import folders
from epmoe.group.collective import all_ranks, naming, peers_of, together
from epmoe.group.errors import EPStateError
from epmoe.service import ExpertParallel
from epmoe.training.models import ExpertLayer, expert_layers, expert_parallels

_MOST_NAMED = 16  # experts in a message
_OPTIMIZER = "optimizer."  # in front of the keys of an optimizer's state


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
        ValueError: nothing says to which `ExpertParallel` some `GroupedExperts` belong.
        EPStateError: the `ExpertParallel` of a layer is closed. Or experts move on a rank, which the others name: call
            `ExpertParallel.apply` on all ranks before.
        EPTimeoutError: ranks ended or did not come within `exchange.warmup_timeout_s`. It names them.
    """
    module = _unwrapped(module)
    eps = expert_parallels(module)
    with naming("full_state_dict", eps):
        with together(eps):
            layers = expert_layers(module)
            state = module.state_dict()
            for layer in layers:
                if layer.ep.size > 1 and layer.ep.group is None:
                    raise EPStateError("this ExpertParallel is closed: its ranks have no group any more")
                layer.ep.logical_experts(layer.tag)  # raises here, where all ranks hear of it, while experts move
        # Whole tensors in place of FSDP's shards.
        state = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
        for layer in layers:
            for name in layer.names:
                state[layer.prefix + name] = gather(state[layer.prefix + name], layer, cpu_offload)
            if layer.extra in state:
                state[layer.extra] = torch.arange(layer.ep.placement.num_experts, dtype=torch.int32)
    if not cpu_offload:
        return state
    if any(layer.ep.rank for layer in layers):
        return {}
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of what `full_state_dict` returned, in a group of any size.

    No rank waits for another, unless FSDP has sharded the module. Every rank needs the whole dict:
    `torch.load(file, mmap=True)` reads of a file what the rank takes.

    Args:
        module: a layer or a model.
        state_dict: what `full_state_dict` returned, or a dict with the same keys and shapes.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: `state_dict` does not hold all experts; see also `full_state_dict`.
        RuntimeError: torch's, for missing or unexpected keys and for shapes.
    """
    module = _unwrapped(module)
    local = dict(state_dict)
    own = module.state_dict()
    for layer in expert_layers(module):
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
    for key, value in own.items():
        if key in local and hasattr(value, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            local[key] = distribute_tensor(local[key].to(value.device), value.device_mesh, value.placements)
    module.load_state_dict(local)


def sharded_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The state dict with a key for each logical expert of this rank, such as `experts.7.w_down`.

    It is what torch.distributed.checkpoint takes (`save`, `async_save`, `load`), also within a larger dict. Of an
    expert that several ranks hold, torch writes one copy.

    Args:
        module: a layer or a model.
        optimizer: optimises parameters of the module. Its state then has keys such as
            `optimizer.state.experts.7.w_down.exp_avg`.

    Returns:
        Tensors that share the memory of the module: what is read into them is loaded. An expert that the rank holds
        twice has one tensor; `load` fills the other, and gives the optimizer its state.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: nothing says to which `ExpertParallel` some `GroupedExperts` belong.
    """
    module = _unwrapped(module)
    return _shard(expert_layers(module), _state_of(module, optimizer))


def save(module: nn.Module, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Save a layer or a model by torch.distributed.checkpoint. Every rank calls it and writes its share.

    Where the folder has a checkpoint, it has this one or the new one at any moment, whichever rank dies: files are
    written beside those that are there, and one rename of a file is the last step.

    Args:
        module: a layer or a model.
        folder: which all ranks see; a path.
        optimizer: optimises parameters of the module. Its state is saved, too.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: nothing says to which `ExpertParallel` some `GroupedExperts` belong; or `folder` is no path.
        RuntimeError: a rank cannot write; on all ranks. The folder stays as it was.
        EPStateError: see `full_state_dict`.
        EPTimeoutError: see `full_state_dict`. Ranks may be as far apart when they have written.
    """
    eps = expert_parallels(module)
    with naming("save", eps), all_ranks(eps) as peers:
        with peers.together():
            state = sharded_state_dict(module, optimizer)
        folders.save(state, folder, peers)


def load(module: nn.Module, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load what ranks of any number have saved with `save`. Every rank calls it and reads its own experts only.

    Args:
        module: a layer or a model, with memory: `to_empty` first if it is on the meta device.
        folder: as for `save`.
        optimizer: optimises parameters of the module. Its state is loaded, too.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: nothing says to which `ExpertParallel` some `GroupedExperts` belong. Or, on all ranks, `folder` has
            no checkpoint, or one without the optimizer, with another number of experts, or with other keys or shapes.
        EPStateError: see `full_state_dict`.
        EPTimeoutError: see `full_state_dict`. Ranks may be as far apart when they have read.
    """
    module = _unwrapped(module)
    eps = expert_parallels(module)
    with naming("load", eps), all_ranks(eps) as peers:
        with peers.together():
            layers = expert_layers(module)
            state = _state_of(module, optimizer)
            sharded = _shard(layers, state)
            beyond = {named(layer.ep.placement.num_experts) for _, _, layer, named in _of_experts(layers, state)}
        folders.load(sharded, folder, peers, beyond)
    for key, rows, layer, named in _of_experts(layers, state):
        for row, x in zip(rows, layer.held, strict=True):
            if x >= 0:
                row.copy_(sharded[named(x)])  # which is the row itself, but for a second copy of x
        sharded[key] = rows
    state |= {key: sharded[key] for key in state if key in sharded}
    of_optimizer = {key: state.pop(key) for key in list(state) if key.startswith(_OPTIMIZER)}
    module.load_state_dict(state)  # for what the modules do when they load
    if optimizer is not None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        flat = {key.removeprefix(_OPTIMIZER): value for key, value in of_optimizer.items()}
        set_optimizer_state_dict(module, optimizer, flat, options=StateDictOptions(flatten_optimizer_state_dict=True))


def check_held(state: Tensor, ep: ExpertParallel, tag: int) -> None:
    """Raises ValueError unless `state` [e] lists the experts of this rank in a layer, whose weights come with it."""
    want = ep.logical_experts(tag)
    if (got := state.tolist()) != want:
        raise ValueError(
            f"the state dict has the weights of the logical experts {_named(got)}, but rank {ep.rank} of {ep.size} "
            f"holds {_named(want)}: other ranks load what `full_state_dict` or `epmoe.checkpoint.save` has saved"
        )


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _state_of(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The state dict of a module, and under other keys that of its optimizer."""
    state = dict(module.state_dict())
    if optimizer is not None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        of_optimizer = get_optimizer_state_dict(module, optimizer, options=flat)
        state |= {_OPTIMIZER + key: value for key, value in of_optimizer.items()}
    return state


def _of_experts(
    layers: list[ExpertLayer], state: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, ExpertLayer, Callable[[int], str]]]:
    """The tensors [e, …] of a state: the key, the tensor, the layer, and the key of a logical expert."""
    for layer in layers:
        for name in layer.names:
            whole = layer.prefix + name
            of_optimizer = f"{_OPTIMIZER}state.{whole}."
            for key in [whole, *(key for key in state if key.startswith(of_optimizer))]:
                value = state[key]
                if isinstance(value, Tensor) and value.dim() and len(value) == len(layer.held):
                    before, _, behind = key.partition(whole)
                    yield key, value, layer, f"{before}{layer.prefix}{{}}.{name}{behind}".format


def _shard(layers: list[ExpertLayer], state: Mapping[str, Any]) -> dict[str, Any]:
    sharded = dict(state)
    for layer in layers:
        sharded.pop(layer.extra, None)  # the keys say which experts these are
    for key, rows, layer, named in _of_experts(layers, state):
        del sharded[key]
        for row, x in zip(rows, layer.held, strict=True):
            if x >= 0:
                sharded.setdefault(named(x), row)
    return sharded


def gather(local: Tensor, layer: ExpertLayer, cpu_offload: bool) -> Tensor:
    """All experts [E, …] from those of each rank [e, …]. With `cpu_offload`, ranks other than 0 get nothing of use."""
    ep = layer.ep
    peers = peers_of(ep)
    num_experts = ep.placement.num_experts
    rows = num_experts if ep.rank == 0 or not cpu_offload else 1  # one is enough to send from
    full = torch.empty(rows, *local.shape[1:], dtype=local.dtype)
    for x in range(num_experts):
        owner, index = ep.holder(x, layer.tag)
        row = full[x % rows]
        if owner == ep.rank:
            row.copy_(local[index])
        (peers.to_first if cpu_offload else peers.broadcast)(row, owner)
    return full if cpu_offload else full.to(local.device)


def _named(experts: Sequence[int]) -> str:
    more = len(experts) - _MOST_NAMED
    return f"{list(experts[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")
