"""Experts that are spread over ranks: parameters [E, …] as DTensors, and this rank's part [e, …],
with gradients.

A DTensor says to every tool of torch whose rows a rank has: its mesh has a dimension "ep", by which
dimension 0 is sharded. Other dimensions of the mesh have replicas, whose gradients are added.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from epmoe.config.placement import EP

# Importing it takes half a second, which programs without spread experts need not spend.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HOOKED, _KEPT = "_epmoe_spread", "_epmoe_parameters"  # attributes of modules


def is_spread(value: object) -> TypeGuard[DTensor]:
    """Whether a tensor has all experts of an `ExpertParallel`, of which this rank has its own."""
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and EP in (mesh.mesh_dim_names or ())


def unspread_rows(module: nn.Module, e: int) -> list[str]:
    """Names of parameters with a row for each of e experts of this rank, in a module of which
    nothing is spread.
    """
    named = list(module.named_parameters())
    if any(is_spread(value) for _, value in named):
        return []
    return [name for name, value in named if value.dim() >= 2 and len(value) == e]


def local_view(value: Any, averages_over: int = 1) -> Any:
    """This rank's rows [e, …] of a DTensor; any other value as it is. Where autograd wants it,
    gradients of the rows reach the DTensor, divided by `averages_over`, and added over replicas in
    an order that does not change.
    """
    # Of the two public ways, one costs 14 µs, and the other makes a view.
    local = getattr(value, "_local_tensor", None)
    if local is None:
        return value
    if not (torch.is_grad_enabled() and value.requires_grad):
        return local
    # torch's partitioner cannot tell the size of a mesh, which a graph with a DTensor holds.
    if torch.compiler.is_compiling() and functorch_config.activation_memory_budget < 1:
        from epmoe.local.between_graphs import between_graphs

        return between_graphs(_LocalView.apply, value, averages_over)
    return _LocalView.apply(value, averages_over)


def gradient_of_whole(grad: Tensor | None, spec: Any, averages_over: int) -> Tensor | None:
    """The gradient of a DTensor with this spec, from that of this rank's rows, divided by
    `averages_over`, and added over replicas. Without a spec it is `grad` itself.
    """
    if grad is None or spec is None:
        return grad
    from torch.distributed.tensor import DTensor, Partial

    mesh = spec.mesh
    placements = spec.placements
    if averages_over != 1:
        # Not in place: it may be the gradient of another tensor, too.
        grad = grad / averages_over
    has_replicas = any(placement.is_replicate() for placement in placements)
    if not (has_replicas or torch.is_grad_enabled() or torch.compiler.is_compiling()):
        # What `from_local` would check and copy is known.
        return DTensor(grad, spec, requires_grad=False)
    given = [Partial() if placement.is_replicate() else placement for placement in placements]
    whole = DTensor.from_local(
        grad, mesh, given, run_check=False, shape=spec.shape, stride=spec.stride
    )
    return whole if given == list(placements) else whole.redistribute(mesh, placements)


def add_hooks(module: nn.Module, *, views: bool) -> None:
    """Refuse another rank's rows in state dicts; with `views`, let the module's `forward` find this
    rank's rows in the places of DTensors.
    """
    if _HOOKED in vars(module):
        return
    vars(module)[_HOOKED] = True
    module.register_load_state_dict_pre_hook(_refuse_rows_of_others)
    if views:
        module.register_forward_pre_hook(_to_views)
        module.register_forward_hook(_to_parameters, always_call=True)
        # One that somebody has put in its place knows the module itself, and no replica.
        vars(module).setdefault("forward", _ForwardOnReplica(module))


def _refuse_rows_of_others(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    for name, value in module.named_parameters():
        check_same_rank(f"{prefix}{name}", state.get(prefix + name), value)


def check_same_rank(name: str, given: object, value: object) -> None:
    """Raises ValueError where `given` is a DTensor with the rows of another rank than `value`, by
    `torch.load`.
    """
    if is_spread(given) and is_spread(value) and given.device_mesh is not value.device_mesh:
        saved = given.device_mesh.get_coordinate()
        here = value.device_mesh.get_coordinate()
        if saved is not None and here is not None and saved[-1] != here[-1]:
            raise ValueError(
                f"`{name}` has the experts of rank {saved[-1]}, but this is rank {here[-1]}: other "
                "ranks load what `full_state_dict` or `epmoe.checkpoint.save` has saved"
            )


def _to_views(module: nn.Module, _: object) -> None:
    kept = [
        (owner, name, value)
        for owner in module.modules()
        for name, value in owner._parameters.items()
        if is_spread(value) and not isinstance(owner, ParametrizationList)
    ]
    # A stack: a forward that calls its own module finds the views of the outer call and keeps none.
    vars(module).setdefault(_KEPT, []).append(kept)
    for owner, name, value in kept:
        owner._parameters[name] = local_view(value, getattr(owner, "averages_over", 1))
    # Such as a weight to which PEFT adds a product.
    for parametrized, made in _parametrized(module):
        made.append(_Rows(getattr(parametrized, "averages_over", 1)))


def _to_parameters(module: nn.Module, *_: object) -> None:
    calls = vars(module).get(_KEPT, [])
    kept = calls.pop() if calls else ()
    if not calls:
        vars(module).pop(_KEPT, None)
    for owner, name, value in kept:
        owner._parameters[name] = value
    for _owner, made in _parametrized(module):
        if isinstance(made[-1], _Rows):
            del made[-1]


class _ForwardOnReplica:
    """`forward` of a module, for a replica, whose parameters stay this rank's rows. A checkpoint in
    it computes again in the backward pass, when the module itself has its DTensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # whose attribute this is

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        module = self._module()
        assert module is not None
        forward = type(module).forward
        # Compiled checkpoints run no Python again, and without gradients nothing is computed again.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(module, *arguments, **options)
        replicas = _replicas_of(module)
        before = {owner: dict(vars(replica)) for owner, replica in replicas.items()}
        try:
            return forward(replicas[module], *arguments, **options)
        finally:
            # What the call has noted, such as a statistic, is the module's.
            for owner, replica in replicas.items():
                for name, value in vars(replica).items():
                    if before[owner].get(name, before) is not value:
                        vars(owner)[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """That of a copy of the module belongs to the copy."""
        return _ForwardOnReplica, (self._module(),)


def _replicas_of(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """A copy of each module in a module, with the same values and hooks, as `DataParallel` makes
    them. The copies have each other, and what is in the places of parameters now.
    """
    replicas = dict[nn.Module, nn.Module]()
    for owner in module.modules():
        replica = replicas[owner] = object.__new__(type(owner))
        vars(replica).update(vars(owner))
        vars(replica)["_parameters"] = dict(owner._parameters)
    # They call their own `forward`, and not this one again.
    del vars(replicas[module])["forward"]
    for owner, replica in replicas.items():
        modules = {
            name: None if child is None else replicas[child]
            for name, child in owner._modules.items()
        }
        vars(replica)["_modules"] = modules
    return replicas


def _parametrized(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    made = (
        (owner, each)
        for owner in module.modules()
        for each in getattr(owner, "parametrizations", {}).values()
    )
    return [(owner, each) for owner, each in made if is_spread(each.original)]


class _Rows(nn.Module):
    """This rank's rows [e, …] of a parametrized DTensor."""

    def __init__(self, averages_over: int) -> None:
        super().__init__()
        self.averages_over = averages_over

    def forward(self, whole: Tensor) -> Tensor:
        rows: Tensor = local_view(whole, self.averages_over)
        return rows


class _LocalView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any, averages_over: int) -> Tensor:
        ctx.spec, ctx.averages_over = value._spec, averages_over
        ctx.set_materialize_grads(False)
        local: Tensor = value._local_tensor.detach()
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient_of_whole(grad, ctx.spec, ctx.averages_over), None
