"""LoRA of PEFT on experts that are spread over ranks: its factors become DTensors, as the experts are.

weight [E, n, k], Shard(0)    lora_A [E·r, k], Shard(0): rows of this rank's experts
                              lora_B [n, r·E], Shard(0): some rows of all experts, since columns alternate
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_former: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # factors that are no part of a model any more


def spread_adapters(model: nn.Module) -> nn.Module:
    """Make DTensors of the factors that PEFT has for `target_parameters` which are DTensors. Collective.

    It comes after `get_peft_model` or `PeftModel.from_pretrained`, and before DDP, FSDP and the optimizer. All ranks
    take the factors of the first one. Without it a forward pass raises, since each rank has factors of its own.

    Args:
        model: of PEFT.

    Returns:
        The model, which trains as one with spread experts does: see docs/training.md.

    Raises:
        ValueError: the ranks do not divide the experts, or the weights are DTensors of another kind.
        RuntimeError: later, at the step of an optimizer that has been made before.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    _watch_optimizers()
    for wrapper in _wrappers(model):
        weight: Any = wrapper.get_param()
        sharded = [
            (place, ranks)
            for place, ranks in zip(weight.placements, weight.device_mesh.shape, strict=True)
            if not place.is_replicate()
        ]
        if [place for place, _ in sharded] != [Shard(0)] or weight.shape[0] % sharded[0][1]:
            raise ValueError(
                f"`{wrapper.parameter_name}` {list(weight.shape)} must be split evenly, and by experts alone, for "
                f"adapters of PEFT, got {weight.placements} over {tuple(weight.device_mesh.shape)} ranks"
            )
        for linear in (*wrapper.lora_A.values(), *wrapper.lora_B.values()):
            factor = linear.weight
            if not hasattr(factor, "device_mesh"):
                whole = distribute_tensor(factor.detach(), weight.device_mesh, weight.placements)
                linear.weight = nn.Parameter(whole, requires_grad=factor.requires_grad)
                _former[id(factor)] = factor
    return model


def _wrappers(model: nn.Module) -> Iterator[Any]:
    """PEFT's `ParamWrapper`s of DTensors."""
    module: Any
    for module in model.modules():
        is_wrapper = hasattr(module, "lora_A") and hasattr(module, "parameter_name")
        if is_wrapper and hasattr(module.get_param(), "device_mesh"):
            yield module


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_former)


def _refuse_former(optimizer: torch.optim.Optimizer, *_: object) -> None:
    given = (value for group in optimizer.param_groups for value in group["params"])
    if _former and any(_former.get(id(value)) is value for value in given):
        raise RuntimeError("the optimizer has factors of before `spread_adapters`: make it afterwards")
