"""Checkpoints of models whose experts are spread over ranks. A checkpoint that one group has saved
can be loaded by a group of any other size.

A checkpoint has tensors [E, …] of all E logical experts. Each rank holds its own rows of such a
tensor. If the experts can train, the tensor is a DTensor; otherwise this module wraps the rows in a
`Rows`. torch's functions for state dicts find both, also in models that are compiled or wrapped.
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
from epmoe.group.waiting import import_undisturbed
from epmoe.live.sleeping import refuse_without_memory
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import is_spread
from epmoe.local.weight_formats import take_rows
from epmoe.service import ExpertParallel
from epmoe.training.models import eps_of, expert_parallels

# A message names at most this many experts.
_MOST_NAMED = 16
# How to save or load with some of all ranks. An error of a call without `group` says it.
_GIVE_GROUP = "where only a part of all ranks calls, these give their `group`"
# The import of these modules takes some seconds, which programs without checkpoints should not
# spend. torch imports the second one when it makes the first state dict.
_TORCH_STATE_DICTS = ("torch.distributed.checkpoint.state_dict", "torch._dynamo")
# The keys of an optimizer's state begin with this prefix.
_OPTIMIZER = "optimizer."


class _Layer(NamedTuple):
    """What says which experts a layer has on each rank."""

    ep: ExpertParallel
    tag: int


class _ExpertsHook:
    """A hook that makes the entries of experts in a state dict stand for all E experts.

    torch calls it after `state_dict` of each module that has an `ExpertParallel`. The hook puts
    `Rows` in place of parameters that have only this rank's experts, and a list of all experts in
    place of the list of this rank's experts. It remembers what it has replaced. The entries are
    looked up by `id`, since their keys change when a model is wrapped.
    """

    def __init__(self) -> None:
        self.rows: dict[int, _Layer] = {}
        """the layer of each `Rows`, by the `id` of the `Rows`"""
        self.lists: dict[int, Tensor] = {}
        """this rank's list of experts, by the `id` of the list of all experts in the state dict"""
        self.experts: set[nn.Module] = set()
        """modules of experts whose `ExpertParallel` is known. If several modules around the experts
        have one, that of the nearest module counts.
        """
        self.is_over = False
        """whether the state dict is made. From then on this hook leaves every state dict alone."""

    def __call__(self, owner: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        """Replace the entries of the experts below `owner` in a state dict.

        `prefix` is what precedes the names of the owner's entries. torch gives the hook a fourth
        argument, which is not needed.
        """
        if self.is_over:
            return
        ep = eps_of(owner)[0]
        layer = _Layer(ep, getattr(owner, "tag", 0))
        # A `MoELayer` has an entry that lists this rank's experts. Let it list all experts.
        if hasattr(owner, "router_weight"):
            key = f"{prefix}_extra_state"
            experts = torch.arange(ep.placement.num_experts, dtype=torch.int32)
            self.lists[id(experts)] = state[key]
            state[key] = experts
        # torch runs the hooks of inner modules first, so experts that an inner module has claimed
        # are left alone.
        for path, module in owner.named_modules():
            is_experts = isinstance(module, GroupedExperts) or path == "experts"
            if not is_experts or module in self.experts:
                continue
            self.experts.update(module.modules())
            for name, _ in module.named_parameters():
                self._wrap_parameter(f"{prefix}{path}.{name}", state, layer)

    def _wrap_parameter(self, key: str, state: dict[str, Any], layer: _Layer) -> None:
        """Put `Rows` in place of the entry `key`, unless the entry stands for all experts already.

        A DTensor does, and so does a plain tensor with the rows of all experts in their order.
        Raises ValueError if the tensor does not have one row for each of this rank's experts.
        """
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
        # This import takes most of a second, which programs without checkpoints should not spend.
        from epmoe.checkpoint.rows import Rows

        rows = Rows(value, held, E)
        state[key] = rows
        self.rows[id(rows)] = layer


def full_state_dict(module: nn.Module, *, cpu_offload: bool = False) -> dict[str, Any]:
    """Make the state dict that a group of one rank would have, with all E logical experts.

    Collective over the group of each layer. It is like torch's `get_model_state_dict` with
    `StateDictOptions(full_state_dict=True, cpu_offload=…)`, and it knows the experts.

    Args:
        module: a layer or a model.
        cpu_offload: if True, only rank 0 of the first replica gets tensors, and they are on the
            CPU. All other ranks get {}. If False, every rank gets all tensors, on the device of its
            layer.

    Returns:
        The state dict. Tensors of experts are [E, …]. A tensor that this rank holds completely
        shares the memory of the module, as in torch's `state_dict()`. In a group of one rank these
        are all tensors.

    Raises:
        ValueError: a parameter of a layer's experts does not have one row for each of this rank's
            experts; or some `GroupedExperts` belong to no `ExpertParallel`, so that nobody knows
            which experts they are.
        EPStateError: the `ExpertParallel` of a layer is closed; or the memory of the weights is
            gone, as `SleepingWeights.offload` leaves it; or experts are moving on a rank,
            which the error names on the other ranks. Call `ExpertParallel.apply` on all ranks
            first.
        EPTimeoutError: some ranks have ended, or did not call within `exchange.warmup_timeout_s`.
            The error names these ranks.
    """
    eps = expert_parallels(module)
    with naming("full_state_dict", eps), together(eps) as steps:
        if any(ep.size > 1 and ep.group is None for ep in eps):
            raise EPStateError("this ExpertParallel is closed: its ranks have no group any more")
        state, hook = _state_of(module)
        is_first = all(_is_first(ep) for ep in eps)
        peers = steps[0] if steps else Peers.of(None)
        on_cpu = cpu_offload and is_first
        run_uninterrupted(steps, partial(_gather_all, state, hook, peers, cpu_offload, on_cpu))
    return state if is_first or not cpu_offload else {}


def _gather_all(
    state: dict[str, Any], hook: _ExpertsHook, peers: Peers, cpu_offload: bool, on_cpu: bool
) -> None:
    """Replace each entry of which this rank has a part by the complete tensor. Collective.

    With `cpu_offload` only rank 0 of a group gets useful values of experts. `on_cpu` says that this
    rank returns the tensors to its caller on the CPU.
    """
    for key, value in state.items():
        complete = value
        if id(value) in hook.rows:
            layer = hook.rows[id(value)]
            complete = gather(value.local, layer.ep, layer.tag, cpu_offload=cpu_offload)
        elif hasattr(value, "full_tensor"):
            with peers.waiting():
                complete = whole_tensor(value)
        if on_cpu and isinstance(complete, Tensor):
            complete = complete.cpu()
        state[key] = complete


def _is_first(ep: ExpertParallel) -> bool:
    """Whether this rank is rank 0 of its group, and its group is the first of all replicas."""
    # The mesh of `ep` has a dimension for each kind of replica, and one for the ranks of the group.
    coordinate = None if ep.mesh is None else ep.mesh.get_coordinate()
    return ep.rank == 0 and not any(coordinate or ())


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of a state dict of all experts.

    The state dict may come from `full_state_dict` in a group of any size. No rank waits for
    another.

    Args:
        module: a layer or a model.
        state_dict: the result of `full_state_dict`, or another dict with the same keys and shapes.
            A dict that was made by hand needs no entries `_extra_state`. Every rank needs the whole
            dict. With `torch.load(file, mmap=True)` a rank reads only the rows that it takes.

    Raises:
        ValueError: `state_dict` does not hold all experts; or the module has one of the faults for
            which `full_state_dict` raises ValueError.
        RuntimeError: keys are missing or unexpected, or shapes differ. torch raises it.
    """
    expected, hook = _state_of(module)
    local = dict(state_dict)
    # A dict that was made by hand has no list of its experts. Then its tensors have all experts,
    # which the length of the tensors will confirm below.
    for key, value in expected.items():
        if id(value) in hook.lists:
            local.setdefault(key, value)
    for key in expected.keys() & local.keys():
        value = expected[key]
        stored = local[key]
        # The dict must have all experts.
        if id(value) in hook.lists:
            if stored.tolist() != value.tolist():
                raise ValueError(
                    f"`{key}` must list all {len(value)} experts, got {_listed(stored.tolist())}"
                )
            local[key] = hook.lists[id(value)]
        elif (id(value) in hook.rows or is_spread(value)) and len(stored) != len(value):
            raise ValueError(f"`{key}` must hold all {len(value)} experts, got {len(stored)}")
        # Take this rank's part of each tensor.
        if id(value) in hook.rows:
            local[key] = take_rows(stored, value.held)
        elif hasattr(value, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            # Every rank has the whole tensor, so that none has to send it: no source rank.
            stored = stored.to(value.device)
            local[key] = distribute_tensor(
                stored, value.device_mesh, value.placements, src_data_rank=None
            )
    _set_state(module, local)


def sharded_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Make a state dict for torch.distributed.checkpoint, in which tensors of experts are [E, …].

    This rank has its own rows of these tensors. `save`, `async_save` and `load` of torch take the
    dict, also as a part of a larger dict. If several ranks hold an expert, torch writes one copy.
    The tensors share the memory of the module, so reading into them loads the module.

    With an `optimizer` of the module's parameters, the dict also has its state, under keys such as
    `optimizer.state.experts.w_down.exp_avg`. Reading does not give this state to the optimizer;
    `epmoe.checkpoint.load` does.

    Raises ValueError for the faults for which `full_state_dict` does, and if the optimizer's state
    of an expert parameter is a tensor but not a DTensor.
    """
    return _state_of(module, optimizer)[0]


def save(
    module: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a layer or a model by torch.distributed.checkpoint. Collective.

    Every rank writes its own share. The folder may have a checkpoint already. At any moment it then
    has the former checkpoint or the new one, even if a rank dies: the new files are written beside
    the former ones, and the last step is the rename of one file.

    Args:
        module: a layer or a model.
        folder: a path that all ranks see.
        optimizer: an optimizer of the module's parameters, whose state is saved, too.
        group: the ranks that call. It needs a backend for CPU tensors. By default all ranks call.

    Raises:
        ValueError: `folder` is not a path; or `sharded_state_dict` raises it for the module or the
            optimizer.
        RuntimeError: a rank cannot write. All ranks raise it, and the folder stays as it was.
        EPError: EPStateError or EPTimeoutError, as `full_state_dict` raises them. Ranks may also
            finish their writes at times that differ by `exchange.warmup_timeout_s`.
    """
    eps = expert_parallels(module)
    remedy = _GIVE_GROUP if group is None else ""
    with naming("save", eps, remedy=remedy), all_ranks(eps, group) as peers:
        folders.save(partial(sharded_state_dict, module, optimizer), folder, peers)


def load(
    module: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load a checkpoint that any number of ranks has saved with `save`. Collective.

    Every rank reads its own experts only. The arguments are those of `save`. If an `optimizer` is
    given, its state is loaded, too. A module on the meta device needs memory first, by `to_empty`.

    Raises ValueError if `sharded_state_dict` does. All ranks raise ValueError if `folder` has no
    checkpoint, or its checkpoint has other keys or shapes or lacks the optimizer. Raises
    EPStateError and EPTimeoutError as `save` does; ranks may finish their reads at times that
    differ by `exchange.warmup_timeout_s`.
    """
    import_undisturbed(*_TORCH_STATE_DICTS)
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_optimizer_state_dict,
    )

    eps = expert_parallels(module)
    remedy = _GIVE_GROUP if group is None else ""
    with naming("load", eps, remedy=remedy), all_ranks(eps, group) as peers, peers.together():
        # Wait until every rank has its state dict. If a rank cannot make one, all ranks raise here,
        # before anything of the module has changed.
        state, hook = _state_of(module, optimizer)
        peers.all_gather(None)
        # Most tensors of the dict share the memory of the module, and this read fills them.
        folders.load(state, folder, peers)
        # Values that are not tensors, and the state of the optimizer, have to be handed over.
        module_state = {}
        optimizer_state = {}
        for key, value in state.items():
            if key.startswith(_OPTIMIZER):
                optimizer_state[key.removeprefix(_OPTIMIZER)] = value
            elif id(value) in hook.lists:
                # The module wants the list of this rank's experts.
                module_state[key] = hook.lists[id(value)]
            else:
                # A `Rows` has this rank's rows in `local`. Any other value is loaded as it is.
                module_state[key] = getattr(value, "local", value)
        _set_state(module, module_state)
        if optimizer is not None:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            set_optimizer_state_dict(module, optimizer, optimizer_state, options=options)


def check_held(state: Tensor, ep: ExpertParallel, want: Sequence[int]) -> None:
    """Raise ValueError unless a state dict has the weights of this rank's experts.

    `state` is the list of logical experts in the state dict, int32 [e]; `want` is the list of the
    experts that this rank holds. Layers call it when they load a state dict.
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
) -> tuple[dict[str, Any], _ExpertsHook]:
    """Make the state dict of a module, and of an optimizer, with tensors [E, …] of all experts.

    Also returns the hook that knows which entries it has replaced. No rank waits for another. Keys
    of the optimizer's state begin with `_OPTIMIZER`.
    """
    import_undisturbed(*_TORCH_STATE_DICTS)
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    refuse_without_memory(module)
    # The hook is there for this one state dict: another call of `state_dict` has this rank's rows.
    hook = _ExpertsHook()
    handles = []
    try:
        for each in module.modules():
            if eps_of(each):
                handles.append(each.register_state_dict_post_hook(hook))
        state = dict(get_model_state_dict(module))
    finally:
        # A signal handler that raises right behind a registration keeps its handle from the list.
        # The hook that stays does nothing from here on.
        hook.is_over = True
        for handle in handles:
            handle.remove()
    if dist.is_initialized() and dist.get_world_size() > 1:
        _check_experts_are_known(module, hook)

    # The optimizer's state of experts must stand for all experts, too.
    if optimizer is not None:
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        experts = set()
        for key, value in state.items():
            if is_spread(value) or id(value) in hook.rows:
                experts.add(key)
        optimizer_state: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=flat)
        for key, value in optimizer_state.items():
            # A key is "state.", the name of the parameter, and a field such as "exp_avg".
            name, _, _field = key.removeprefix("state.").rpartition(".")
            if name in experts:
                value = _checked_optimizer_value(key, value)
            state[_OPTIMIZER + key] = value
    return state, hook


def _check_experts_are_known(module: nn.Module, hook: _ExpertsHook) -> None:
    """Raise ValueError if some `GroupedExperts` of a model belong to no `ExpertParallel`.

    Their parameters are those of one rank, and nothing would say which experts these are.
    """
    for name, experts in module.named_modules():
        if not isinstance(experts, GroupedExperts) or experts in hook.experts:
            continue
        if not is_spread(experts.w_down):
            raise ValueError(
                f"`{name}` must belong to an ExpertParallel: GroupedExperts are the experts of one "
                "rank, and nothing says of which. Call `epmoe.training.spread`, or let a module "
                "around them have the ExpertParallel"
            )


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Load a state dict by torch's `set_model_state_dict`.

    It also works for a module that a model has under several names, which torch's function does not
    handle. The keys of a state dict leave out the parts that wrappers such as `torch.compile` and
    DDP add to names. torch puts these parts back into the first name of a module only. Here they
    are put back into its other names.
    """
    from torch.distributed.checkpoint.state_dict import _get_fqns, set_model_state_dict

    first_paths = {path for path, _ in module.named_modules()}
    for path, owner in module.named_modules(remove_duplicate=False):
        if path in first_paths:
            continue
        # The name that the state dict has for this module, and the name that torch would look for.
        [plain] = _get_fqns(module, path)
        [wrapped] = _get_fqns(module, path, skip_ddp_prefix=False, skip_compiler_prefix=False)
        if plain == wrapped:
            continue
        for name in (*owner._parameters, *owner._buffers, "_extra_state"):
            key = f"{plain}.{name}"
            if key in state:
                state[f"{wrapped}.{name}"] = state.pop(key)
    set_model_state_dict(module, state)


def _checked_optimizer_value(key: str, value: Any) -> Any:
    """Check one value of an optimizer's state of an expert parameter.

    It must be a DTensor of all experts, or a single number; otherwise this raises ValueError. If
    the DTensor has partial sums, they are added up, since torch cannot save them.
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
    """Gather a parameter of all E experts from the ranks of a group. Collective.

    `local` [e, …] has the rows of this rank, and `tag` is that of the layer. Returns [E, …]. With
    `cpu_offload` the result is on the CPU, and only rank 0 gets useful values.
    """
    peers = peers_of(ep)
    E = ep.placement.num_experts
    # With `cpu_offload` the other ranks only send. A buffer of one row is enough for that.
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
    """Name experts in a message: the first of them, and how many more there are."""
    listed = str(list(experts[:_MOST_NAMED]))
    more = len(experts) - _MOST_NAMED
    if more > 0:
        listed += f" and {more} more"
    return listed
