"""Wrappers of torch around own experts that nobody has spread. They take the parameters of all
ranks for alike: DDP gives all ranks those of rank 0, and `fully_shard` makes one parameter of parts
of each rank's.
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
    """Checks torch's wrappers of models in which an exchange is an attribute of a module. Each
    wrapper is checked once.
    """

    def __init__(self, exchange: object, ep: ExpertParallel) -> None:
        self._exchange = exchange
        self._ep = ep
        self._checked = WeakSet[nn.Module]()
        self._modules_with_state = 0

    def check(self) -> None:
        """Raise RuntimeError if a wrapper of torch takes experts for equal on all ranks: the DDP
        whose forward pass runs, or `fully_shard` of a model.
        """
        if self._ep.size == 1:
            return

        # DDP says which wrapper's forward pass runs.
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and wrapper not in self._checked:
            self._check_ddp(wrapper)
            self._checked.add(wrapper)

        # FSDP2 says to nobody that a forward pass runs, but torch knows what it has sharded. A
        # number that has not changed stands for modules that have not, at little cost a call.
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
        """Parameters with a row for each expert beside the exchange: their names in the model,
        their modules, and their names there.
        """
        for path, owner in model.named_modules():
            if not any(value is self._exchange for value in vars(owner).values()):
                continue
            prefix = f"{path}." if path else ""
            for name in unspread_rows(owner, self._ep.num_local_experts):
                module_path, _, own_name = name.rpartition(".")
                yield prefix + name, owner.get_submodule(module_path), own_name

    def _mixes_ranks(self, sharded: Tensor) -> bool:
        """Whether a parameter is cut over several ranks of the group. These have different experts,
        but replicas have the same.
        """
        if self._ep.group is None:
            return False
        group = set(dist.get_process_group_ranks(self._ep.group))
        over: list[int] = sharded.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        return len(group.intersection(over)) > 1


def _sharded_parameters() -> dict[tuple[nn.Module, str], Tensor]:
    """The parameters that `fully_shard` has sharded, by modules and names. While a forward pass
    runs, modules themselves have complete parameters.
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
