"""Training a model whose experts are on different ranks with torch's tools: DTensors, DDP, FSDP,
optimizers and the clipping of gradients.

Ranks have different experts, but the same other parameters. DDP or FSDP averages the gradients of
these other parameters over the ranks. The gradient of an expert needs no such average: the rank
that holds the expert has computed it from the tokens of all ranks, so it is the sum over all ranks
already. It only has to be divided by the number of ranks.

Letters: E experts of a layer, e experts of this rank.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from epmoe.config.placement import EP
from epmoe.local.experts import GroupedExperts
from epmoe.local.spread import add_hooks, check_same_rank, is_spread, unspread_rows
from epmoe.service import ExpertParallel
from epmoe.training.exchange import MOVES, TrainingExchange
from epmoe.training.scalars import refuse_scalars_of_a_rank


def problem_with(ep: ExpertParallel) -> str | None:
    """The reason why experts cannot train where the placement puts them, or None if they can."""
    placement = ep.placement
    E = ep.placement.num_experts
    if ep.live.can_move:
        return MOVES
    if placement.num_physical_experts > E:
        return (
            "`placement.num_redundant_experts` must be 0 for training: each copy of an expert "
            "would get the gradient of its own tokens alone"
        )
    # A DTensor splits its rows as torch.chunk does: each rank has as many as the first rank, except
    # that the last ranks may have fewer.
    chunk = -(-E // ep.size)
    owners = tuple(expert // chunk for expert in range(E))
    if placement.owners != owners:
        return (
            "`placement` must be that of torch.chunk for training, as DTensors are: a number of "
            f"experts that the ranks divide, with strategy 'linear', or strategy 'explicit' with "
            f"assignment {list(owners)}"
        )
    return None


def spread(module: nn.Module, ep: ExpertParallel) -> nn.Module:
    """Make DTensors [E, …] of a module's parameters [e, …], where E is the number of all experts
    and e that of this rank's experts. The memory stays the same, and this rank keeps its own rows.

    By the DTensors, DDP, optimizers, checkpoints and other tools of torch know that ranks have
    different experts. A `MoELayer` spreads its `GroupedExperts` itself. In a group of one rank
    nothing changes.

    Args:
        module: experts whose parameters have a row for each expert of this rank, in the order of
            these experts.
        ep: the `ExpertParallel` whose ranks hold the experts. If it has a mesh (…, "ep"), gradients
            are added over the replicas in the other dimensions of the mesh.

    Returns:
        The module.

    Raises:
        ValueError: the placement has copies of experts, experts that move, or another split than
            that of torch.chunk; or a parameter has another number of rows than e; or a buffer has
            e rows.
    """
    # Check that a DTensor can express the placement. One rank has all experts, and needs none.
    problem = problem_with(ep)
    if problem is not None:
        raise ValueError(problem)
    mesh = ep.mesh
    e = ep.num_local_experts
    if mesh is None or mesh.size() == 1:
        return module
    if mesh.device_type != ep.device.type:
        raise ValueError(
            f"the mesh of the ExpertParallel must be of {ep.device.type} devices, got "
            f"{mesh.device_type}"
        )

    # Check all parameters and buffers before any of them is changed.
    for name, value in module.named_parameters():
        if is_spread(value):
            if value.device_mesh != mesh:
                raise ValueError(f"`{name}` must be spread over {mesh}, got {value.device_mesh}")
        elif value.shape[:1] != (e,):
            raise ValueError(
                f"`{name}` must have a row for each of {e} experts of this rank, got "
                f"{list(value.shape)}"
            )
    own_buffers = [name for name, value in module.named_buffers() if value.shape[:1] == (e,)]
    if own_buffers:
        raise ValueError(
            f"`{own_buffers[0]}` must be a parameter, which need not require grad: DDP makes "
            "buffers alike"
        )

    from torch.distributed.tensor import DTensor, Replicate, Shard

    # Replace each parameter [e, …] by a DTensor [E, …] around the same memory. Modules that share
    # a parameter share its DTensor.
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    made = dict[nn.Parameter, nn.Parameter]()
    for owner in module.modules():
        for name, rows in owner._parameters.items():
            if rows is None or is_spread(rows):
                continue
            if rows not in made:
                whole = DTensor.from_local(
                    rows.detach(),
                    mesh,
                    placements,
                    run_check=False,
                    stride=rows.stride(),
                    shape=torch.Size((ep.placement.num_experts, *rows.shape[1:])),
                )
                made[rows] = nn.Parameter(whole, requires_grad=rows.requires_grad)
            owner._parameters[name] = made[rows]

    # From now on, refuse uses of these parameters that would be wrong, such as an optimizer that
    # mixes up ranks. GroupedExperts look for views of parameters themselves, at less cost.
    _watch_optimizers()
    refuse_scalars_of_a_rank()
    add_hooks(module, views=not isinstance(module, GroupedExperts))
    return module


def expert_parallels(module: nn.Module) -> list[ExpertParallel]:
    """The `ExpertParallel`s that the modules of a model have, each once. They are in the order of
    the modules, which is the same on all ranks.
    """
    found = {id(ep): ep for owner in module.modules() for ep in eps_of(owner)}
    return list(found.values())


def eps_of(module: nn.Module) -> list[ExpertParallel]:
    """The `ExpertParallel`s that a module has as attributes, directly or through a
    `TrainingExchange`.
    """
    found = []
    for value in vars(module).values():
        ep = value.ep if isinstance(value, TrainingExchange) else value
        if isinstance(ep, ExpertParallel):
            found.append(ep)
    return found


def ignore_experts(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Tell `DistributedDataParallel(module)` to leave the experts alone. Without this call, DDP
    refuses a model whose ranks have different experts.

    From now on the gradients of the experts are divided by the number of ranks, since DDP divides
    all other gradients by it.

    Args:
        module: exactly the module that DDP will wrap.
        process_group: the process group of DDP; by default all ranks.

    Returns:
        The module.

    Raises:
        ValueError: the experts, with their replicas, are spread over other ranks than those of
            `process_group`.
    """
    names = [
        name for name, value in module.named_parameters(remove_duplicate=False) if is_spread(value)
    ]
    # DDP itself goes by the names of parameters, but its reducer by the paths of modules. The two
    # differ in a wrapper such as `checkpoint_wrapper`, which leaves itself out of names. So ignore
    # both.
    for path, owner in module.named_modules():
        names += [f"{path}.{name}" for name, value in owner._parameters.items() if is_spread(value)]

    _average(module, dist.get_process_group_ranks(process_group))
    ignored = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    return module


def fully_shard(module: nn.Module, **options: Any) -> nn.Module:
    """Shard all parameters but those of the experts by torch's `fully_shard`. Experts stay on their
    ranks.

    Each layer with a router is sharded by itself, so that `mp_policy` does not cast the router: the
    choice of experts needs its precision. From now on the gradients of the experts are divided by
    the number of ranks, since FSDP divides all other gradients by it.

    Args:
        module: a block or a model, also a model whose blocks have been sharded by this function.
        options: arguments of torch's `fully_shard`. The default mesh has all ranks, on devices of
            the kind that has the experts.

    Returns:
        The module.

    Raises:
        ValueError: the experts, with their replicas, are spread over other ranks than those of the
            mesh.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    # Leave the experts out, and divide their gradients as FSDP divides the others.
    mesh = options.get("mesh")
    ranks = dist.get_process_group_ranks(None) if mesh is None else _ranks_of(mesh)
    _average(module, ranks)

    # By default torch takes the GPUs of a machine that has some, also for a model on CPUs.
    devices = _devices_of_experts(module)
    if mesh is None and len(devices) == 1:
        options["mesh"] = init_device_mesh(devices.pop(), (len(ranks),))
    ignored = {value for value in module.parameters() if is_spread(value)}
    ignored.update(options.get("ignored_params") or ())
    options["ignored_params"] = ignored

    # Shard the layers with a router first, each by itself, without a cast. FSDP wants one dtype in
    # each module that it shards, so the children of such a layer, such as shared experts, are
    # sharded by themselves, too. They are cast as the policy says. The list is made before the
    # first layer is changed, since sharding changes modules.
    policy = options.get("mp_policy")
    is_mixed = len({value.dtype for value in module.parameters() if value not in ignored}) > 1
    with_router = [owner for owner in module.modules() if hasattr(owner, "router_weight")]
    for owner in with_router:
        if isinstance(owner, FSDPModule):
            continue
        children = list[nn.Module]()
        dtypes = {value.dtype for value in owner.parameters(recurse=False)}
        for child in owner.children():
            sharded = [value for value in child.parameters() if value not in ignored]
            if sharded and not isinstance(child, FSDPModule):
                children.append(child)
                dtypes.update(value.dtype for value in sharded)
        is_within = owner is not module
        if len(dtypes) > 1 or (is_within and policy is not None):
            for child in children:
                shard(child, **options)
        if is_within and (policy is not None or is_mixed):
            reduce_dtype = None if policy is None else policy.reduce_dtype
            uncast = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
            shard(owner, **options | {"mp_policy": uncast})

    # Shard all the rest.
    shard(module, **options)
    return module


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip the gradients of all parameters of a model as torch's `clip_grad_norm_` does, with the
    same norm on all ranks. Collective over the ranks of the experts.

    The gradients must be complete. Each parameter counts once in the norm: an expert on the rank
    that holds it, and any other parameter although all ranks have it, sharded or not.

    Args:
        module: a model.
        max_norm: the largest norm that stays as it is.
        norm_type: the p of the norm; infinity for the largest magnitude.
        error_if_nonfinite: whether a norm of NaN or Inf is an error.

    Returns:
        The norm before, a scalar on the device of the gradients.

    Raises:
        RuntimeError: the norm is NaN or Inf, with `error_if_nonfinite`.
    """
    # Collect this rank's gradients by their layout. Plain tensors, shards of FSDP and experts have
    # different layouts, and their norms are computed in different ways.
    by_layout = dict[Any, list[Tensor]]()
    device = None
    parameter: Any
    for parameter in module.parameters():
        layout = None
        if hasattr(parameter, "device_mesh"):
            layout = parameter.device_mesh, parameter.placements
        # Make an entry for the layout even if this rank has no gradients in it. Other ranks may
        # have some, and the computation of the norm is collective.
        gradients = by_layout.setdefault(layout, [])
        device = device or parameter.device
        if parameter.grad is not None:
            gradients.append(getattr(parameter.grad, "_local_tensor", parameter.grad))

    # Compute the norm of each layout over all ranks, and from these the norm of all gradients.
    norms = [_norm(gradients, norm_type, layout, device) for layout, gradients in by_layout.items()]
    total = torch.stack(norms).norm(norm_type) if norms else torch.zeros(())
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradients must be finite, got {total.item()}")

    # Scale the gradients as torch does, with the same 1e-6. The factor stays on the device, so that
    # the host need not wait for it.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradients in by_layout.values():
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
    return total


def unspread(ep: ExpertParallel, experts: object, *, frozen: bool = False) -> list[str]:
    """The names of parameters of experts that are not spread, although ranks have different
    experts. torch's tools would take these parameters for equal on all ranks.

    Only parameters that require grad count, unless `frozen`: then all do.
    """
    # A single rank has all experts, and needs no DTensors, unless it has copies of experts. Each
    # call with gradients asks this, so it reads no property of `ep`.
    member = ep.life.member
    placement = member.placement
    alone = member.size == 1 and placement.num_physical_experts == placement.num_experts
    if alone or not isinstance(experts, nn.Module):
        return []
    return [
        name
        for name, value in experts.named_parameters()
        if not is_spread(value) and (frozen or value.requires_grad)
    ]


def check_spread(ep: ExpertParallel, experts: object) -> None:
    """Raise RuntimeError if experts are not spread. Calls with gradients call this: torch's tools
    must know by then that ranks have different experts.
    """
    plain = unspread(ep, experts, frozen=True)
    if plain:
        remedy = (
            "call `epmoe.training.spread(layer.experts, ep)` once, or `spread_adapters(model)` for "
            "PEFT"
        )
        why = problem_with(ep) or remedy
        raise RuntimeError(
            f"`experts` must have DTensors only in calls with gradients, got `{plain[0]}`: {why}"
        )


former_factors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
"""Factors of adapters that `spread_adapters` has replaced by DTensors, by their Python ids. An
optimizer that still has one of them is refused.
"""


@cache
def _watch_optimizers() -> None:
    """From now on, check every optimizer of this process before each of its steps."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise RuntimeError for an optimizer that would be wrong for spread experts, and ValueError
    for state of other experts. torch calls it before each step of an optimizer.

    It also sets `foreach` of some groups to False. On GPUs torch chooses `foreach` by default,
    which fails if the parameters of a group are DTensors over several meshes.
    """
    values = [value for group in optimizer.param_groups for value in group["params"]]
    # Refuse factors that a DTensor has replaced: a step would change tensors that no model uses.
    if any(former_factors.get(id(value)) is value for value in values):
        raise RuntimeError(
            "the optimizer has factors of before `spread_adapters`: make it afterwards"
        )
    experts = [value for value in values if is_spread(value)]
    if not experts:
        return

    # Refuse optimizers that mix up ranks, and their subclasses.
    for base in type(optimizer).__mro__:
        why = _UNFIT.get(base.__name__)
        if why:
            raise RuntimeError(
                f"{type(optimizer).__name__} {why}: give experts an optimizer of their own, such "
                "as AdamW"
            )

    # Refuse state that belongs to other experts than the parameter.
    for value in experts:
        for name, state in optimizer.state.get(value, {}).items():
            check_same_rank(name, state, value)

    # Find groups in which torch would choose `foreach`, and choose otherwise.
    for group in optimizer.param_groups:
        meshes = {getattr(value, "device_mesh", None) for value in group["params"]}
        torch_may_choose = "foreach" in group and group["foreach"] is None
        if len(meshes) > 1 and torch_may_choose and not group.get("fused"):
            group["foreach"] = False


_UNFIT = {
    "Adafactor": (
        "scales updates by norms of one rank's experts, since `item()` of a DTensor is of its "
        "local part"
    ),
    "ZeroRedundancyOptimizer": "gives the experts of all ranks to one of them",
}
"""Optimizers of torch that are wrong for spread experts, by class name, with the reason."""


def _devices_of_experts(module: nn.Module) -> set[str]:
    """The kinds of devices that have the experts of a model, such as "cuda"."""
    found = {value.device_mesh.device_type for value in module.parameters() if is_spread(value)}
    for owner in module.modules():
        ep = vars(owner).get("ep")
        if isinstance(ep, ExpertParallel):
            found.add(ep.device.type)
    return found


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh, in one list."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _average(module: nn.Module, ranks: list[int]) -> None:
    """From now on, divide the gradients of the experts by the number of `ranks`, the global ranks
    over which DDP or FSDP averages all other gradients.

    Sets `averages_over` of each module with spread experts. Raises ValueError if experts are spread
    over other ranks, or are not spread.
    """
    from torch.distributed.fsdp import FSDPModule

    for owner in module.modules():
        # Refuse experts that torch's tools would take for equal on all ranks.
        ep = vars(owner).get("ep")
        experts = getattr(owner, "experts", None)
        if isinstance(ep, ExpertParallel) and unspread(ep, experts, frozen=True):
            raise ValueError(
                problem_with(ep) or "the experts must be spread: call `epmoe.training.spread` once"
            )
        _check_own_experts(owner)

        # Experts must be spread over exactly the ranks that average.
        for name, value in owner._parameters.items():
            if not is_spread(value):
                continue
            mesh = value.device_mesh
            odd = sorted(set(ranks).symmetric_difference(_ranks_of(mesh)))
            if odd:
                where = "is one of the first only" if odd[0] in ranks else "is none of the first"
                raise ValueError(
                    f"`{name}` must be spread over the {len(ranks)} ranks that average gradients, "
                    f"got {mesh.size()}, and rank {odd[0]} {where}: give "
                    'ExpertParallel a mesh ("replicate", "ep") of all of them, so that replicas of '
                    "experts stay alike"
                )
            # If FSDP has sharded the module itself, it averages over replicas of the experts. The
            # rest of the division is left.
            by_fsdp = mesh.size() // mesh[EP].size() if isinstance(owner, FSDPModule) else 1
            owner.averages_over = len(ranks) // by_fsdp  # type: ignore[assignment]


def _check_own_experts(owner: nn.Module) -> None:
    """Raise ValueError if a module with a `TrainingExchange` has experts that are not spread. DDP
    and FSDP would take them for equal on all ranks.
    """
    for value in vars(owner).values():
        if not isinstance(value, TrainingExchange) or value.ep.size == 1:
            continue
        names = unspread_rows(owner, value.ep.num_local_experts)
        if names:
            raise ValueError(
                f"`{names[0]}` has a row for each expert of this rank, and must be spread: call "
                "`epmoe.training.spread(experts, ep)` once"
            )


def _norm(
    gradients: list[Tensor], norm_type: float, layout: Any, device: torch.device | None
) -> Tensor:
    """The norm of gradients over all ranks, fp32. `gradients` are this rank's parts of them, and
    `layout` is the mesh and the placements of these parts, or None for gradients that every rank
    has as a whole. Collective over the mesh.
    """
    norm = nn.utils.get_total_norm(gradients, norm_type).to(device, torch.float32)
    if layout is None:
        return norm
    mesh, placements = layout

    # Reduce over the ranks: the infinite norm is the largest magnitude of all ranks, and any other
    # norm is the root of the sum of powers.
    is_max = math.isinf(norm_type)
    reduced = norm if is_max else norm**norm_type
    operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    for dim, placement in enumerate(placements):
        # Replicas have the same parts, which count once, so this dimension is not reduced.
        if placement.is_replicate():
            continue
        group = mesh.get_group(dim)
        # A group with gloo as its only backend reduces tensors in host memory only.
        if reduced.device.type not in {device.type for device in group._device_types}:
            reduced = reduced.cpu()
        dist.all_reduce(reduced, operation, group=group)
    reduced = reduced.to(norm.device)
    return reduced if is_max else reduced ** (1 / norm_type)
