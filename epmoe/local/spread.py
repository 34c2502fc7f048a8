"""Experts that are spread over ranks: their parameters are DTensors of all E experts, [E, …], and
each rank computes with its own e rows, [e, …].

The mesh of such a DTensor has a dimension "ep", which shards dimension 0 of the tensor. All tools
of torch, such as optimizers and checkpoints, therefore know which rows a rank has. The mesh may
have other dimensions for replicas, over which gradients are added.

A module that computes with plain tensors can use such parameters: `add_hooks` puts the local rows
in place of the DTensors while the module's `forward` runs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from epmoe.config.placement import EP

# This import takes half a second, which programs without spread experts should not spend.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The attribute of a module that says that the hooks have been added.
_HOOKED = "_epmoe_spread"
# The attribute of a module that keeps its DTensors while its forward pass runs.
_KEPT = "_epmoe_parameters"


def is_spread(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor of all experts whose mesh has the dimension "ep"."""
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and EP in (mesh.mesh_dim_names or ())


def unspread_rows(module: nn.Module, e: int) -> list[str]:
    """The names of a module's parameters that look like the experts of one rank.

    Such a parameter is a plain tensor of at least two dimensions, with a row for each of this
    rank's e experts. If any parameter of the module is a DTensor of all experts, the result is [].
    """
    named = list(module.named_parameters())
    if any(is_spread(value) for _, value in named):
        return []
    return [name for name, value in named if value.dim() >= 2 and len(value) == e]


def local_view(value: Any, averages_over: int = 1) -> Any:
    """Return this rank's rows [e, …] of a DTensor. Any other value is returned as it is.

    In grad mode, if the DTensor requires grad, autograd brings the gradient of the rows to the
    DTensor. The gradient is divided by `averages_over` and added over replicas, always in the same
    order.
    """
    # Of the two public ways to get the local tensor, one takes 14 µs and the other makes a view.
    local = getattr(value, "_local_tensor", None)
    if local is None:
        return value
    if not (torch.is_grad_enabled() and value.requires_grad):
        return local
    # With a budget below 1, torch's partitioner asks each value of a graph for its size. A mesh,
    # which a graph with a DTensor holds, has none. So the call runs between two graphs.
    if torch.compiler.is_compiling() and functorch_config.activation_memory_budget < 1:
        from epmoe.local.between_graphs import between_graphs

        return between_graphs(_LocalView.apply, value, averages_over)
    return _LocalView.apply(value, averages_over)


def gradient_of_whole(grad: Tensor | None, spec: Any, averages_over: int) -> Tensor | None:
    """Make the gradient of a DTensor from `grad`, the gradient of this rank's rows.

    It is divided by `averages_over` and added over replicas. `spec` is the DTensor's; if it is
    None, the parameter is a plain tensor, and `grad` is returned as it is.
    """
    if grad is None or spec is None:
        return grad
    from torch.distributed.tensor import DTensor, Partial

    mesh = spec.mesh
    placements = spec.placements
    if averages_over != 1:
        # Do not divide in place: the tensor may be the gradient of another tensor, too.
        grad = grad / averages_over
    has_replicas = any(placement.is_replicate() for placement in placements)
    if not (has_replicas or torch.is_grad_enabled() or torch.compiler.is_compiling()):
        # Nothing has to be added or traced, and `from_local` would only cost a check and a copy.
        return DTensor(grad, spec, requires_grad=False)
    # Each replica has a partial sum. `redistribute` adds these up.
    summands = [Partial() if placement.is_replicate() else placement for placement in placements]
    gradient = DTensor.from_local(
        grad, mesh, summands, run_check=False, shape=spec.shape, stride=spec.stride
    )
    if has_replicas:
        gradient = gradient.redistribute(mesh, placements)
    return gradient


def add_hooks(module: nn.Module, *, views: bool) -> None:
    """Add the hooks that a module with spread experts needs.

    `load_state_dict` of the module then refuses the rows of another rank. With `views`, `forward`
    of the module finds this rank's rows in place of the DTensors. A second call changes nothing.
    """
    if _HOOKED in vars(module):
        return
    vars(module)[_HOOKED] = True
    module.register_load_state_dict_pre_hook(_refuse_rows_of_others)
    if views:
        module.register_forward_pre_hook(_to_views)
        module.register_forward_hook(_to_parameters, always_call=True)
        # If other code has set a `forward` on the module itself, it stays, because it would not
        # know the replica that `_ForwardOnReplica` calls.
        vars(module).setdefault("forward", _ForwardOnReplica(module))


def _refuse_rows_of_others(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """Raise ValueError before a module loads the rows of another rank. torch calls it as a hook.

    `prefix` precedes the names of the module's entries in `state`. torch gives the hook four more
    arguments, which are not needed.
    """
    for name, value in module.named_parameters():
        check_same_rank(f"{prefix}{name}", state.get(prefix + name), value)


def check_same_rank(name: str, given: object, value: object) -> None:
    """Raise ValueError if a DTensor that is to be loaded has the rows of another rank.

    `given` may come from a file that another rank has saved; `value` is the parameter of this rank,
    called `name`. Values that are not spread DTensors are not checked.
    """
    if is_spread(given) and is_spread(value) and given.device_mesh is not value.device_mesh:
        # The last coordinate of a rank in the mesh is that of the dimension "ep".
        saved = given.device_mesh.get_coordinate()
        here = value.device_mesh.get_coordinate()
        if saved is not None and here is not None and saved[-1] != here[-1]:
            raise ValueError(
                f"`{name}` has the experts of rank {saved[-1]}, but this is rank {here[-1]}: other "
                "ranks load what `full_state_dict` or `epmoe.checkpoint.save` has saved"
            )


class _KeptParameter(NamedTuple):
    """A DTensor that is kept here while a forward pass runs with local rows in its place."""

    owner: nn.Module
    name: str
    value: Any


def _to_views(module: nn.Module, _: object) -> None:
    """Put this rank's rows in place of DTensors. torch calls it before a forward pass of `module`.

    The second argument, the inputs of the call, is not needed.
    """
    # Find the DTensors. Those of a parametrization are the inputs of its steps, see below.
    kept = []
    for owner in module.modules():
        if isinstance(owner, ParametrizationList):
            continue
        for name, value in owner._parameters.items():
            if is_spread(value):
                kept.append(_KeptParameter(owner, name, value))
    # Keep the DTensors on a stack. If a forward pass calls its own module again, the inner call
    # finds the rows that the outer call has put there, and pushes an empty list.
    vars(module).setdefault(_KEPT, []).append(kept)
    for each in kept:
        averages_over = getattr(each.owner, "averages_over", 1)
        each.owner._parameters[each.name] = local_view(each.value, averages_over)
    # If a DTensor is parametrized, as PEFT does to add a product to it, its value is computed by
    # steps. A last step takes this rank's rows of the result.
    for owner, steps in _parametrized(module):
        steps.append(_TakeLocalRows(getattr(owner, "averages_over", 1)))


def _to_parameters(module: nn.Module, *_: object) -> None:
    """Put the DTensors back. torch calls it after a forward pass, also after one that has raised.

    The inputs and outputs of the call, which torch gives as further arguments, are not needed.
    """
    calls = vars(module).get(_KEPT, [])
    kept = calls.pop() if calls else ()
    if not calls:
        vars(module).pop(_KEPT, None)
    for each in kept:
        each.owner._parameters[each.name] = each.value
    for _owner, steps in _parametrized(module):
        if isinstance(steps[-1], _TakeLocalRows):
            del steps[-1]


class _ForwardOnReplica:
    """A `forward` for a module that runs the module's own `forward` on a replica.

    If there is an activation checkpoint within the module, it runs a part of the forward pass again
    in the backward pass. By then the module has its DTensors back. The replica still has this
    rank's rows as its parameters, and the checkpoint refers to the replica.
    """

    def __init__(self, module: nn.Module) -> None:
        # The module has this object as an attribute, so the reference back is a weak one.
        self._module = weakref.ref(module)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the module's `forward` on a replica of it."""
        module = self._module()
        assert module is not None
        forward = type(module).forward
        # No replica is needed where no Python code will run again: in compiled code, and in a
        # forward pass without gradients.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return forward(module, *arguments, **options)
        replicas = _replicas_of(module)
        before = {owner: dict(vars(replica)) for owner, replica in replicas.items()}
        try:
            return forward(replicas[module], *arguments, **options)
        finally:
            # If the call has set attributes, such as a statistic, copy them to the module. `before`
            # itself stands for an attribute that was not there, since no attribute can be it.
            for owner, replica in replicas.items():
                for name, value in vars(replica).items():
                    if before[owner].get(name, before) is not value:
                        vars(owner)[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy of the module, such as by `deepcopy`, get a `forward` of its own."""
        return _ForwardOnReplica, (self._module(),)


def _replicas_of(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Make a replica of a module and of each module in it, as `DataParallel` does.

    The replicas have the same attributes and hooks as the modules, and the tensors that are in
    place of the modules' parameters now. The children of a replica are replicas.
    """
    replicas = dict[nn.Module, nn.Module]()
    for owner in module.modules():
        replica = object.__new__(type(owner))
        replicas[owner] = replica
        vars(replica).update(vars(owner))
        vars(replica)["_parameters"] = dict(owner._parameters)
    # The replica must run the `forward` of its class, and not `_ForwardOnReplica` again.
    del vars(replicas[module])["forward"]
    for owner, replica in replicas.items():
        children = {}
        for name, child in owner._modules.items():
            children[name] = None if child is None else replicas[child]
        vars(replica)["_modules"] = children
    return replicas


def _parametrized(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Find the parametrized DTensors in a module.

    Returns pairs of the module that has the DTensor, and the list of steps that compute its value.
    """
    found = []
    for owner in module.modules():
        for steps in getattr(owner, "parametrizations", {}).values():
            if is_spread(steps.original):
                found.append((owner, steps))
    return found


class _TakeLocalRows(nn.Module):
    """The last step of a parametrization: it takes this rank's rows [e, …] of the result."""

    def __init__(self, averages_over: int) -> None:
        super().__init__()
        self.averages_over = averages_over

    def forward(self, whole: Tensor) -> Tensor:
        rows: Tensor = local_view(whole, self.averages_over)
        return rows


class _LocalView(torch.autograd.Function):
    """This rank's rows of a DTensor, whose gradient becomes a gradient of the DTensor."""

    @staticmethod
    def forward(ctx: Any, value: Any, averages_over: int) -> Tensor:
        ctx.spec = value._spec
        ctx.averages_over = averages_over
        ctx.set_materialize_grads(False)
        local: Tensor = value._local_tensor.detach()
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient_of_whole(grad, ctx.spec, ctx.averages_over), None
