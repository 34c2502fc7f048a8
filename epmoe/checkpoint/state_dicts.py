"""Checkpoints of models whose experts are spread over ranks. A group of any size loads what another
group has saved.

A checkpoint has tensors [E, …] of all experts. A rank has its own rows of them: in a DTensor if the
experts can train, otherwise in `Rows`. torch's functions for state dicts find both, also in models
that are compiled or wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from epmoe.checkpoint import folders
from epmoe.checkpoint.whole import whole_tensor
from epmoe.group.collective import all_ranks, naming, peers_of, together
from epmoe.group.errors import EPStateError
from epmoe.group.peers import Peers, run_uninterrupted
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import is_spread
from epmoe.local.weight_formats import take_rows
from epmoe.service import ExpertParallel
from epmoe.training.models import eps_of, expert_parallels

# Experts that a message names.
_MOST_NAMED = 16
_PART_OF_THE_WORLD = "where only a part of all ranks calls, these give their `group`"
# Keys of an optimizer's state begin with it.
_OPTIMIZER = "optimizer."


class _Layer(NamedTuple):
    """The layer whose experts have some `Rows`."""

    ep: ExpertParallel
    tag: int


class _Named:
    """Finds the experts in a state dict, and puts `Rows` in place of their parameters.

    It is a hook that runs after `state_dict` of each module that has an `ExpertParallel`.
    """

    def __init__(self) -> None:
        self.rows: dict[int, _Layer] = {}
        """the layer of each `Rows`, by the id of the `Rows`"""
        self.lists: dict[int, Tensor] = {}
        """this rank's list of experts, by the id of the list of all experts"""
        self.experts: set[nn.Module] = set()
        """modules of experts whose ExpertParallel is known: that of the nearest module around"""
        self.is_over = False
        """whether the state dict is made: state dicts of others have this rank's rows"""

    def __call__(self, owner: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        """Name the experts of a module, in its part of a state dict."""
        if self.is_over:
            return
        ep = eps_of(owner)[0]
        layer = _Layer(ep, getattr(owner, "tag", 0))
        # A layer lists its experts: here, all of them.
        if hasattr(owner, "router_weight"):
            key = f"{prefix}_extra_state"
            experts = torch.arange(ep.placement.num_experts, dtype=torch.int32)
            self.lists[id(experts)] = state[key]
            state[key] = experts
        for path, module in owner.named_modules():
            is_experts = isinstance(module, GroupedExperts) or path == "experts"
            if not is_experts or module in self.experts:
                continue
            self.experts.update(module.modules())
            for name, _ in module.named_parameters():
                self._name_parameter(f"{prefix}{path}.{name}", state, layer)

    def _name_parameter(self, key: str, state: dict[str, Any], layer: _Layer) -> None:
        """Put `Rows` in place of a parameter, unless it has all experts."""
        ep = layer.ep
        held = ep.logical_experts(layer.tag)
        E = ep.placement.num_experts
        value = state[key]
        has_all_experts = ep.size == 1 and held == list(range(E))
        if is_spread(value) or has_all_experts:
            return
        if value.shape[:1] != (len(held),):
            raise ValueError(
                f"`{key}` must have a row for each of the {len(held)} experts of this "
                f"rank, got {list(value.shape)}: after `resume`, give the layer its new "
                f"experts first"
            )
        # Imported here: it takes most of a second.
        from epmoe.checkpoint.rows import Rows

        rows = Rows(value, held, E)
        state[key] = rows
        self.rows[id(rows)] = layer


def full_state_dict(module: nn.Module, *, cpu_offload: bool = False) -> dict[str, Any]:
    """Make the state dict that a group of one rank would have, with all E logical experts.

    Collective over the group of each layer. The arguments are those of torch's
    `StateDictOptions(full_state_dict=True, cpu_offload=…)`.

    Args:
        module: a layer or a model.
        cpu_offload: only rank 0 of the group gets tensors, on the CPU, and the other ranks get {},
            those of its replicas, too. Otherwise every rank gets them, on the device of its layer.

    Returns:
        Tensors of experts are [E, …]. What this rank has whole shares the memory of the module, as
        in torch's `state_dict()`: with one rank that is everything.

    Raises:
        ValueError: a parameter of a layer's experts has not a row for each of them; or nothing says
            of which rank some `GroupedExperts` are.
        EPStateError: the `ExpertParallel` of a layer is closed. Or experts move on a rank, which
            the others name: call `ExpertParallel.apply` on all ranks before.
        EPTimeoutError: ranks ended or did not come within `exchange.warmup_timeout_s`. It names
            them.
    """
    eps = expert_parallels(module)
    with naming("full_state_dict", eps), together(eps) as steps:
        if any(ep.size > 1 and ep.group is None for ep in eps):
            raise EPStateError("this ExpertParallel is closed: its ranks have no group any more")
        state, named = _state_of(module)
        is_first = all(_is_first(ep) for ep in eps)
        peers = steps[0] if steps else Peers.of(None)
        on_cpu = cpu_offload and is_first
        run_uninterrupted(steps, partial(_gather_all, state, named, peers, cpu_offload, on_cpu))
    return state if is_first or not cpu_offload else {}


def _gather_all(
    state: dict[str, Any], named: _Named, peers: Peers, cpu_offload: bool, on_cpu: bool
) -> None:
    """Replace tensors of which ranks have parts by complete ones. Collective. With `cpu_offload`
    only the first rank gets useful values.
    """
    for key, value in state.items():
        complete = value
        if id(value) in named.rows:
            layer = named.rows[id(value)]
            complete = gather(value.local, layer.ep, layer.tag, cpu_offload=cpu_offload)
        elif hasattr(value, "full_tensor"):
            with peers.waiting():
                complete = whole_tensor(value)
        if on_cpu and isinstance(complete, Tensor):
            complete = complete.cpu()
        state[key] = complete


def _is_first(ep: ExpertParallel) -> bool:
    """Whether this rank is the first one of its group and of all replicas of it."""
    coordinate = None if ep.mesh is None else ep.mesh.get_coordinate()
    return ep.rank == 0 and not any(coordinate or ())


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of a state dict that `full_state_dict` returned, in a group of any
    size.

    No rank waits for another.

    Args:
        module: a layer or a model.
        state_dict: that of `full_state_dict`, or another one with the same keys and shapes; one
            made by hand needs no `_extra_state`. Every rank needs the whole dict:
            `torch.load(file, mmap=True)` reads only what the rank takes.

    Raises:
        ValueError: `state_dict` does not hold all experts; and as `full_state_dict`.
        RuntimeError: torch's, for missing or unexpected keys and for shapes.
    """
    expected, named = _state_of(module)
    local = dict(state_dict)
    # A dict made by hand lists no experts: its tensors [E, …] are of all of them.
    for key, value in expected.items():
        if id(value) in named.lists:
            local.setdefault(key, value)
    for key in expected.keys() & local.keys():
        value = expected[key]
        stored = local[key]
        if id(value) in named.lists:
            if stored.tolist() != value.tolist():
                raise ValueError(
                    f"`{key}` must list all {len(value)} experts, got {_listed(stored.tolist())}"
                )
            local[key] = named.lists[id(value)]
        elif (id(value) in named.rows or is_spread(value)) and len(stored) != len(value):
            raise ValueError(f"`{key}` must hold all {len(value)} experts, got {len(stored)}")
        if id(value) in named.rows:
            local[key] = take_rows(stored, value.held)
        elif hasattr(value, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            stored = stored.to(value.device)
            local[key] = distribute_tensor(
                stored, value.device_mesh, value.placements, src_data_rank=None
            )
    _set_state(module, local)


def sharded_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Make a state dict with tensors [E, …] of all logical experts. This rank has its own rows of
    them.

    It is what torch.distributed.checkpoint takes (`save`, `async_save`, `load`), also within a
    larger dict. Of an expert that several ranks hold, torch writes one copy. Tensors share the
    memory of the module: what is read into them is loaded.

    State of the `optimizer`, which optimises parameters of the module, has keys such as
    `optimizer.state.experts.w_down.exp_avg`. `load` gives it to the optimizer. Raises the
    ValueErrors of `full_state_dict`, and ValueError if the optimizer has state of experts that
    is no DTensor.
    """
    return _state_of(module, optimizer)[0]


def save(
    module: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a layer or a model by torch.distributed.checkpoint. Every rank calls it and writes its
    share.

    Where the folder has a checkpoint, it has this one or the new one at any moment, whichever rank
    dies: files are written beside those that are there, and one rename of a file is the last step.

    Args:
        module: a layer or a model.
        folder: which all ranks see; a path.
        optimizer: optimises parameters of the module. Its state is saved, too.
        group: the ranks that call, with a CPU backend; by default all ranks.

    Raises:
        ValueError: see `sharded_state_dict`; or `folder` is no path.
        RuntimeError: a rank cannot write; on all ranks. The folder stays as it was.
        EPError: EPStateError or EPTimeoutError of `full_state_dict`. Ranks may be as far apart when
            they have written.
    """
    eps = expert_parallels(module)
    remedy = _PART_OF_THE_WORLD if group is None else ""
    with naming("save", eps, remedy=remedy), all_ranks(eps, group) as peers:
        folders.save(partial(sharded_state_dict, module, optimizer), folder, peers)


def load(
    module: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load what ranks of any number have saved with `save`. Every rank calls it and reads its own
    experts only.

    Arguments are those of `save`. A module on the meta device gets memory by `to_empty` first. With
    an optimizer its state is loaded, too. Errors are those of `sharded_state_dict`, and the
    EPErrors of `save`: ranks may be as far apart when they have read. ValueError, on all ranks,
    means also that `folder` has no checkpoint, or one without the optimizer, or with other keys or
    shapes.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_optimizer_state_dict,
    )

    eps = expert_parallels(module)
    remedy = _PART_OF_THE_WORLD if group is None else ""
    with naming("load", eps, remedy=remedy), all_ranks(eps, group) as peers, peers.together():
        # All ranks can, or nothing is touched.
        state, named = _state_of(module, optimizer)
        peers.all_gather(None)
        # Values that are read into tensors of the module are loaded by that.
        folders.load(state, folder, peers)
        # The rest, and the state of the optimizer.
        of_module = {}
        of_optimizer = {}
        for key, value in state.items():
            if key.startswith(_OPTIMIZER):
                of_optimizer[key.removeprefix(_OPTIMIZER)] = value
            elif id(value) in named.lists:
                of_module[key] = named.lists[id(value)]
            else:
                # The tensor in `Rows`, or the value itself.
                of_module[key] = getattr(value, "local", value)
        _set_state(module, of_module)
        if optimizer is not None:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            set_optimizer_state_dict(module, optimizer, of_optimizer, options=options)


def check_held(state: Tensor, ep: ExpertParallel, want: Sequence[int]) -> None:
    """Raise ValueError unless `state` lists the experts that this rank holds, `want`. Weights of
    these experts come with it.
    """
    got = state.tolist()
    if got != want:
        raise ValueError(
            f"the state dict has the weights of the logical experts {_listed(got)}, but rank "
            f"{ep.rank} of {ep.size} holds {_listed(want)}: other ranks load what "
            f"`full_state_dict` or `epmoe.checkpoint.save` has saved"
        )


def _state_of(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Any], _Named]:
    """Make the state dict of a module with tensors of all experts. The state of an optimizer is in
    it under keys of its own.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    named = _Named()
    hooks = []
    try:
        for each in module.modules():
            if eps_of(each):
                hooks.append(each.register_state_dict_post_hook(named))
        state = dict(get_model_state_dict(module))
    finally:
        # A signal handler that raises right behind a registration keeps its handle from the list.
        # The hook that stays does nothing from here on.
        named.is_over = True
        for hook in hooks:
            hook.remove()
    if dist.is_initialized() and dist.get_world_size() > 1:
        _check_all_named(module, named)

    # Experts have state in DTensors, too.
    if optimizer is not None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        experts = set()
        for key, value in state.items():
            if is_spread(value) or id(value) in named.rows:
                experts.add(key)
        of_optimizer: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=flat)
        for key, value in of_optimizer.items():
            name, _, _field = key.removeprefix("state.").rpartition(".")
            if name in experts:
                value = _checked(key, value)
            state[_OPTIMIZER + key] = value
    return state, named


def _check_all_named(module: nn.Module, named: _Named) -> None:
    """Raise ValueError if nothing says which rank's experts some `GroupedExperts` are."""
    for name, experts in module.named_modules():
        if not isinstance(experts, GroupedExperts) or experts in named.experts:
            continue
        if not is_spread(experts.w_down):
            raise ValueError(
                f"`{name}` must belong to an ExpertParallel: GroupedExperts are the experts of one "
                "rank, and nothing says of which. Call `epmoe.training.spread`, or let a module "
                "around them have the ExpertParallel"
            )


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Load a state dict by torch's `set_model_state_dict`, also into modules that a model has under
    several names.

    A state dict has no names of wrappers such as `torch.compile` and DDP. torch puts them back into
    the first name of a module alone, and misses the others.
    """
    from torch.distributed.checkpoint.state_dict import _get_fqns, set_model_state_dict

    first_paths = {path for path, _ in module.named_modules()}
    for path, owner in module.named_modules(remove_duplicate=False):
        if path in first_paths:
            continue
        [plain] = _get_fqns(module, path)
        [wrapped] = _get_fqns(module, path, skip_ddp_prefix=False, skip_compiler_prefix=False)
        if plain == wrapped:
            continue
        for name in (*owner._parameters, *owner._buffers, "_extra_state"):
            key = f"{plain}.{name}"
            if key in state:
                state[f"{wrapped}.{name}"] = state.pop(key)
    set_model_state_dict(module, state)


def _checked(key: str, value: Any) -> Any:
    """Check an optimizer's state of experts: it must be a DTensor of all experts, or a number.
    Raises ValueError otherwise. Returns it without partial sums.
    """
    if hasattr(value, "device_mesh"):
        if any(placement.is_partial() for placement in value.placements):
            from torch.distributed.tensor import Replicate

            placements = [
                Replicate() if placement.is_partial() else placement
                for placement in value.placements
            ]
            return value.redistribute(placements=placements)
    elif isinstance(value, Tensor) and value.numel() > 1:
        raise ValueError(
            f"`{key}` of the optimizer must be a DTensor, as its parameter, got "
            f"{list(value.shape)}: a checkpoint would keep that of one rank"
        )
    return value


def gather(local: Tensor, ep: ExpertParallel, tag: int, *, cpu_offload: bool) -> Tensor:
    """Gather the rows [e, …] of all ranks to all experts [E, …]. With `cpu_offload` only rank 0
    gets useful values, on the CPU.
    """
    peers = peers_of(ep)
    E = ep.placement.num_experts
    # Other ranks only send, for which one row is enough.
    only_sends = cpu_offload and ep.rank > 0
    num_rows = 1 if only_sends else E
    full = torch.empty(num_rows, *local.shape[1:], dtype=local.dtype)
    for expert in range(E):
        owner, index = ep.holder(expert, tag)
        row = full[expert % num_rows]
        if owner == ep.rank:
            row.copy_(local[index])
        if cpu_offload:
            peers.to_first(row, owner)
        else:
            peers.broadcast(row, owner)
    return full if cpu_offload else full.to(local.device)


def _listed(experts: Sequence[int]) -> str:
    """Experts in a message."""
    listed = str(list(experts[:_MOST_NAMED]))
    more = len(experts) - _MOST_NAMED
    if more > 0:
        listed += f" and {more} more"
    return listed
