"""The experts of a model that belong to one rank, and torch's tools around them: DDP, FSDP, the norm of gradients.

All ranks have the other parameters, and DDP or FSDP averages their gradients over ranks. A gradient of an expert is the
sum over all ranks that have sent it tokens, and complete on the rank that holds the expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from epmoe.local.experts import GroupedExperts
from epmoe.service import ExpertParallel
from epmoe.training.exchange import TrainingExchange


class ExpertLayer(NamedTuple):
    """`GroupedExperts` of a model. Keys are those of the model's state dict."""

    ep: ExpertParallel
    experts: GroupedExperts
    prefix: str
    """in front of the names of the experts' parameters"""
    extra: str
    """the key of `MoELayer.get_extra_state`"""
    tag: int
    owner: nn.Module
    """the module that has `ep`"""

    @property
    def names(self) -> list[str]:
        """The names of the tensors [e, …], behind `prefix`."""
        return [name for name, _ in self.experts.named_parameters()]

    @property
    def held(self) -> list[int]:
        """The logical expert of each row; −1 for an empty slot."""
        return self.ep.logical_experts(self.tag)


def expert_layers(module: nn.Module) -> list[ExpertLayer]:
    """All `GroupedExperts` of a model, in its order. A module that occurs twice is there twice.

    Their `ExpertParallel` is that of the nearest module around them which has one, or a `TrainingExchange`, as an
    attribute, as a `MoELayer` has.

    Args:
        module: the model.

    Returns:
        The experts and what surrounds them.

    Raises:
        TypeError: a module has an `ep` and experts of another kind.
        ValueError: no module around some `GroupedExperts` has one, or they are not the experts of this rank.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    layers = []
    for name, experts in modules.items():
        around, _, own = name.rpartition(".")
        if not isinstance(experts, GroupedExperts):
            if own == "experts" and isinstance(getattr(modules[around], "ep", None), ExpertParallel):
                raise TypeError(f"`{name}` must be GroupedExperts, got {type(experts).__name__}")
            continue
        ep, path = next(_around(modules, name), (None, ""))
        if ep is None:
            raise ValueError(
                f"`{name}` must belong to an ExpertParallel: GroupedExperts are the experts of one rank, and nothing "
                "says of which. Let a module around them have the ExpertParallel or TrainingExchange as an attribute"
            )
        if (held := len(experts.w_down)) != ep.num_local_experts:
            raise ValueError(
                f"`{name}` must be the {ep.num_local_experts} of this rank, got {held}: after `resume`, give the layer "
                "its new experts first"
            )
        extra = f"{path}._extra_state" if path else "_extra_state"
        owner = modules[path]
        layers.append(ExpertLayer(ep, experts, f"{name}.", extra, getattr(owner, "tag", 0), owner))
    return layers


def expert_parallels(module: nn.Module) -> list[ExpertParallel]:
    """The `ExpertParallel`s of a model's modules, in the order of their first modules, the same on all ranks."""
    return list({id(ep): ep for each in module.modules() for ep in _of(each)}.values())


def ignore_experts(module: nn.Module) -> nn.Module:
    """Mark the experts of a model, so that `DistributedDataParallel(module)` leaves them to their ranks.

    DDP would copy rank 0's experts to all ranks, and average gradients of different experts. The gradients of the
    experts are divided by the number of ranks from now on, as DDP divides the others: the group of the experts is that
    of DDP.

    Args:
        module: the model that DDP will wrap.

    Returns:
        The model.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: see `expert_layers`.
    """
    layers = expert_layers(module)
    names = [layer.prefix + name for layer in layers for name in layer.names]
    ignored = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    _average(layers)
    return module


def fully_shard(module: nn.Module, **options: Any) -> nn.Module:
    """torch's `fully_shard` of all but the experts, which stay with their ranks.

    It also shards each layer with a router by itself, so that `mp_policy` does not cast routers: the choice of experts
    needs their precision. The gradients of the experts are divided by the number of ranks from now on, as FSDP divides
    the others: the group of the experts is that of the mesh.

    Args:
        module: a block or a model, also one whose blocks were sharded so.
        options: arguments of torch's `fully_shard`.

    Returns:
        The module.

    Raises:
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: see `expert_layers`.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    layers = expert_layers(module)
    ignored = {parameter for layer in layers for parameter in layer.experts.parameters()}
    options["ignored_params"] = ignored | set(options.get("ignored_params") or ())
    policy = options.get("mp_policy")
    for owner in {id(layer.owner): layer.owner for layer in layers if hasattr(layer.owner, "router_weight")}.values():
        if owner is module or policy is None or isinstance(owner, FSDPModule):
            continue
        for child in owner.children():
            if any(parameter not in ignored for parameter in child.parameters()):
                shard(child, **options)
        uncast = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
        shard(owner, **options | {"mp_policy": uncast})
    shard(module, **options)
    _average(layers)
    return module


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """torch's `clip_grad_norm_` over all parameters of a model, with one norm on all ranks.

    Each expert counts once, on one of the ranks that hold it. The other parameters count as all ranks have them,
    sharded or not. Collective over the group of the experts.

    Args:
        module: the model, whose gradients are complete.
        max_norm: the largest norm.
        norm_type: p of the p-norm, or infinity.
        error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite.

    Returns:
        The norm before, a scalar on the device of the gradients.

    Raises:
        RuntimeError: see `error_if_nonfinite`.
        TypeError: a layer has other experts than `GroupedExperts`.
        ValueError: see `expert_layers`; or the layers have several groups.
    """
    layers = expert_layers(module)
    if len(groups := {id(layer.ep.group) for layer in layers}) > 1:
        raise ValueError(f"the layers of a model must have one group, got {len(groups)}")
    ours = {parameter for layer in layers for parameter in layer.experts.parameters()}
    gradients = [p.grad for p in module.parameters() if p.grad is not None and p not in ours]
    total = nn.utils.get_total_norm(gradients, norm_type)
    total = total.full_tensor() if hasattr(total, "full_tensor") else total
    of_experts = dict[nn.Parameter, Tensor]()
    counted = list[Tensor]()
    for layer in layers:
        mine = [i for i, x in enumerate(layer.held) if x >= 0 and layer.ep.holder(x, layer.tag) == (layer.ep.rank, i)]
        for p in layer.experts.parameters():
            if p.grad is not None and p not in of_experts:
                of_experts[p] = p.grad
                counted.append(p.grad[mine] if len(mine) < len(p.grad) else p.grad)
    if layers:
        ep = layers[0].ep
        norm = nn.utils.get_total_norm(counted, norm_type).to(ep.device, torch.float32)
        norm = _over_ranks(norm, norm_type, ep)
        total = torch.stack([total.to(norm), norm]).norm(norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of the gradients must be finite, got {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in (*gradients, *of_experts.values()):
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        local.mul_(factor.to(local.device))
    return total


def _around(modules: dict[str, nn.Module], name: str) -> Iterator[tuple[ExpertParallel, str]]:
    """ExpertParallels of modules around one, the nearest first, and the names of these modules."""
    while name:
        name = name.rpartition(".")[0]
        for ep in _of(modules[name]):
            yield ep, name


def _of(module: nn.Module) -> Iterator[ExpertParallel]:
    """The `ExpertParallel`s that a module has as attributes."""
    for value in vars(module).values():
        if isinstance(value, TrainingExchange):
            yield value.ep
        elif isinstance(value, ExpertParallel):
            yield value


def _average(layers: list[ExpertLayer]) -> None:
    """From now on, gradients of the experts are divided by the number of ranks."""
    for layer in layers:
        layer.experts.averages_over = layer.ep.size


def _over_ranks(norm: Tensor, norm_type: float, ep: ExpertParallel) -> Tensor:
    """The norm of all ranks' parts, each of which has this norm."""
    if ep.size == 1:
        return norm
    kept = norm if math.isinf(norm_type) else norm**norm_type
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    assert ep.group is not None
    if norm.device not in ep.group._device_types:
        kept = kept.cpu()
    dist.all_reduce(kept, operation, group=ep.group)
    kept = kept.to(norm.device)
    return kept if math.isinf(norm_type) else kept ** (1 / norm_type)
