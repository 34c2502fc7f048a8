"""Experts that are spread over ranks: their parameters are DTensors [E, …], and each rank computes
with its local rows [e, …].

The mesh of such a DTensor has a dimension "ep", which shards dimension 0. So every tool of torch
knows which rows a rank has. Other dimensions of the mesh are replicas, whose gradients are added.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from epmoe.config.placement import EP

# Importing it takes half a second, which programs without spread experts need not spend.
if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Attributes of modules.
_HOOKED = "_epmoe_spread"
_KEPT = "_epmoe_parameters"


def is_spread(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor of all experts, spread over the ranks of an `ExpertParallel`."""
    mesh = getattr(value, "device_mesh", None)
    return mesh is not None and EP in (mesh.mesh_dim_names or ())


def unspread_rows(module: nn.Module, e: int) -> list[str]:
    """The parameters of a module that have a row for each of this rank's e experts, by their names;
    none if any parameter of the module is spread.
    """
    named = list(module.named_parameters())
    if any(is_spread(value) for _, value in named):
        return []
    return [name for name, value in named if value.dim() >= 2 and len(value) == e]


def local_view(value: Any, averages_over: int = 1) -> Any:
    """This rank's rows [e, …] of a DTensor. Any other value is returned as it is.

    In grad mode, gradients of the rows reach the DTensor, if it requires grad: divided by
    `averages_over`, and added over replicas in an order that does not change.
    """
    # torch has two public ways: one costs 14 µs, and the other makes a view.
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
    """Make the gradient of a DTensor with this spec from the gradient of this rank's rows: divided
    by `averages_over`, and added over replicas. Without a spec it is `grad` itself.
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
        # `from_local` would only check and copy.
        return DTensor(grad, spec, requires_grad=False)
    # Each replica has a part of the sum.
    summands = [Partial() if placement.is_replicate() else placement for placement in placements]
    gradient = DTensor.from_local(
        grad, mesh, summands, run_check=False, shape=spec.shape, stride=spec.stride
    )
    if has_replicas:
        gradient = gradient.redistribute(mesh, placements)
    return gradient


def add_hooks(module: nn.Module, *, views: bool) -> None:
    """Let a module refuse the rows of another rank in state dicts. With `views`, its `forward`
    finds local rows in place of DTensors.
    """
    if _HOOKED in vars(module):
        return
    vars(module)[_HOOKED] = True
    module.register_load_state_dict_pre_hook(_refuse_rows_of_others)
    if views:
        module.register_forward_pre_hook(_to_views)
        module.register_forward_hook(_to_parameters, always_call=True)
        # A `forward` that somebody has set on the module stays: it knows no replica.
        vars(module).setdefault("forward", _ForwardOnReplica(module))


def _refuse_rows_of_others(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    for name, value in module.named_parameters():
        check_same_rank(f"{prefix}{name}", state.get(prefix + name), value)


def check_same_rank(name: str, given: object, value: object) -> None:
    """Raise ValueError if `given`, a DTensor of `torch.load`, has the rows of another rank than
    `value`.
    """
    if is_spread(given) and is_spread(value) and given.device_mesh is not value.device_mesh:
        saved = given.device_mesh.get_coordinate()
        here = value.device_mesh.get_coordinate()
        if saved is not None and here is not None and saved[-1] != here[-1]:
            raise ValueError(
                f"`{name}` has the experts of rank {saved[-1]}, but this is rank {here[-1]}: other "
                "ranks load what `full_state_dict` or `epmoe.checkpoint.save` has saved"
            )


class _KeptParameter(NamedTuple):
    """A DTensor that is out of its place while a forward pass runs."""

    owner: nn.Module
    name: str
    value: Any


def _to_views(module: nn.Module, _: object) -> None:
    """Put local rows in place of DTensors, before a forward pass."""
    kept = []
    for owner in module.modules():
        if isinstance(owner, ParametrizationList):
            continue
        for name, value in owner._parameters.items():
            if is_spread(value):
                kept.append(_KeptParameter(owner, name, value))
    # A stack: a forward that calls its own module finds the views of the outer call and keeps none.
    vars(module).setdefault(_KEPT, []).append(kept)
    for each in kept:
        averages_over = getattr(each.owner, "averages_over", 1)
        each.owner._parameters[each.name] = local_view(each.value, averages_over)
    # A parametrized DTensor, such as one to which PEFT adds a product, gets a last step.
    for owner, steps in _parametrized(module):
        steps.append(_Rows(getattr(owner, "averages_over", 1)))


def _to_parameters(module: nn.Module, *_: object) -> None:
    """Put DTensors back, after a forward pass."""
    calls = vars(module).get(_KEPT, [])
    kept = calls.pop() if calls else ()
    if not calls:
        vars(module).pop(_KEPT, None)
    for each in kept:
        each.owner._parameters[each.name] = each.value
    for _owner, steps in _parametrized(module):
        if isinstance(steps[-1], _Rows):
            del steps[-1]


class _ForwardOnReplica:
    """`forward` of a module, run by a replica, whose parameters stay local rows.

    A checkpoint within it computes again in the backward pass. By then the module itself has its
    DTensors back.
    """

    def __init__(self, module: nn.Module) -> None:
        # Weak, since this is an attribute of the module.
        self._module = weakref.ref(module)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the module's `forward` on a replica of it."""
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
            # Attributes that the call has set, such as a statistic, go to the module.
            for owner, replica in replicas.items():
                for name, value in vars(replica).items():
                    if before[owner].get(name, before) is not value:
                        vars(owner)[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module gets a `forward` of its own."""
        return _ForwardOnReplica, (self._module(),)


def _replicas_of(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Copy each module in a module, with the same values and hooks, as `DataParallel` does. The
    copies have each other as children, and the tensors that are in place of parameters now.
    """
    replicas = dict[nn.Module, nn.Module]()
    for owner in module.modules():
        replica = object.__new__(type(owner))
        replicas[owner] = replica
        vars(replica).update(vars(owner))
        vars(replica)["_parameters"] = dict(owner._parameters)
    # They call their own `forward`, and not this one again.
    del vars(replicas[module])["forward"]
    for owner, replica in replicas.items():
        children = {}
        for name, child in owner._modules.items():
            children[name] = None if child is None else replicas[child]
        vars(replica)["_modules"] = children
    return replicas


def _parametrized(module: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Modules with a parametrized DTensor, each with the steps that make its value."""
    found = []
    for owner in module.modules():
        for steps in getattr(owner, "parametrizations", {}).values():
            if is_spread(steps.original):
                found.append((owner, steps))
    return found


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
        ctx.spec = value._spec
        ctx.averages_over = averages_over
        ctx.set_materialize_grads(False)
        local: Tensor = value._local_tensor.detach()
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return gradient_of_whole(grad, ctx.spec, ctx.averages_over), None
