"""Refuses DDP and FSDP around experts that have not been spread.

`spread` makes DTensors of the experts' parameters, by which torch knows that ranks have different
experts. A caller may forget this for experts of their own. DDP and FSDP then assume that all ranks
have the same parameters: DDP copies the experts of rank 0 to all ranks, and `fully_shard` makes one
parameter out of parts of the experts of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.parallel import DistributedDataParallel

from epmoe.local.spread import unspread_rows
from epmoe.service import ExpertParallel


class Wrappers:
    """Finds wrappers of torch around a model that uses a `TrainingExchange`, and checks them.

    The exchange must be an attribute of a module. The experts are then parameters of this module
    and of its children. Each wrapper is checked once, since a check walks through all modules.
    """

    def __init__(self, exchange: object, ep: ExpertParallel) -> None:
        self._exchange = exchange
        self._ep = ep
        self._checked = WeakSet[nn.Module]()
        self._modules_with_state = 0

    def check(self) -> None:
        """Raise RuntimeError if DDP or `fully_shard` assumes that all ranks have the same experts.

        Every forward pass of the exchange calls this, so it must be quick if nothing has changed.
        """
        if self._ep.life.member.size == 1:
            return

        # torch tells which DDP wrapper's forward pass is running.
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and wrapper not in self._checked:
            self._check_ddp(wrapper)
            self._checked.add(wrapper)

        # torch does not tell whether a forward pass of FSDP is running, but it keeps a table of the
        # modules that it has sharded. As long as the length of this table stays the same, we take
        # it that no module has been sharded since the last check: comparing numbers is quick.
        if len(_module_state_mapping) != self._modules_with_state:
            self._check_fsdp()
            self._modules_with_state = len(_module_state_mapping)

    def _check_ddp(self, wrapper: DistributedDataParallel) -> None:
        """Raise RuntimeError if DDP has given all ranks the experts of rank 0."""
        for name, _, _ in self._unspread(wrapper.module):
            if name not in wrapper.parameters_to_ignore:
                raise RuntimeError(
                    f"`{name}` has a row for each expert of this rank, and DDP has given all "
                    "ranks those of rank 0: call `epmoe.training.spread(experts, ep)` and "
                    "`ignore_experts(model)` before DDP is made"
                )

    def _check_fsdp(self) -> None:
        """Raise RuntimeError if torch's `fully_shard` has mixed the experts of ranks."""
        sharded = _sharded_parameters()
        for module in list(_module_state_mapping):
            if module in self._checked:
                continue
            for name, owner, own_name in self._unspread(module):
                value = sharded.get((owner, own_name))
                if value is not None and self._mixes_ranks(value):
                    raise RuntimeError(
                        f"`{name}` has a row for each expert of this rank, and torch's "
                        "`fully_shard` makes one parameter of parts of each rank's: call "
                        "`epmoe.training.spread(experts, ep)` and `epmoe.training.fully_shard` in "
                        "place of torch's"
                    )
            self._checked.add(module)

    def _unspread(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
        """Find the parameters of a model that have a row for each expert of this rank and are not
        spread, in the modules that have the exchange as an attribute.

        Yields for each parameter its name in the model, its module, and its name in this module.
        """
        for path, owner in model.named_modules():
            if not any(value is self._exchange for value in vars(owner).values()):
                continue
            prefix = f"{path}." if path else ""
            for name in unspread_rows(owner, self._ep.num_local_experts):
                module_path, _, own_name = name.rpartition(".")
                yield prefix + name, owner.get_submodule(module_path), own_name

    def _mixes_ranks(self, sharded: Tensor) -> bool:
        """Whether `fully_shard` has cut a parameter over several ranks of `ep`. These ranks have
        different experts. A parameter that is cut over replicas, which have the same experts, is
        right.
        """
        if self._ep.group is None:
            return False
        group = set(dist.get_process_group_ranks(self._ep.group))
        over: list[int] = sharded.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        return len(group.intersection(over)) > 1


def _sharded_parameters() -> dict[tuple[nn.Module, str], Tensor]:
    """The parameters that `fully_shard` has sharded, by their modules and names.

    They are read from the state of FSDP, not from the modules: while a forward pass runs, the
    modules have complete parameters in place of the sharded ones.
    """
    from torch.distributed.fsdp import FSDPModule

    found = {}
    for module in list(_module_state_mapping):
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        # Torch 2.13 has a list of groups of parameters, earlier releases one group or None.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if group is None:
                continue
            for parameter in group.fsdp_params:
                info = parameter._module_info
                found[info.module, info.param_name] = parameter.sharded_param
    return found
