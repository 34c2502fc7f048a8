"""LoRA of PEFT on experts that are spread over ranks: its factors become DTensors, as the experts
are.

weight [E, n, k], Shard(0)    lora_A [E·r, k], Shard(0): rows of this rank's experts
                              lora_B [n, r·E], Shard(0): some rows of all experts, since columns
                              alternate
"""

from __future__ import annotations

from typing import Any

from torch import nn

from epmoe.training.models import former_factors


def spread_adapters(model: nn.Module) -> nn.Module:
    """Make DTensors of the factors that PEFT has for `target_parameters`, if these are DTensors.
    Collective.

    It comes after `get_peft_model` or `PeftModel.from_pretrained`, and before DDP, FSDP and the
    optimizer. All ranks take the factors of the first one. Without it a forward pass raises, since
    each rank has factors of its own.

    Args:
        model: a model of PEFT.

    Returns:
        The model, which trains as one with spread experts does: see docs/training.md.

    Raises:
        ValueError: the ranks do not divide the experts, or the weights are DTensors of another
            kind.
        RuntimeError: later, at the step of an optimizer that has been made before.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    wrapper: Any
    for wrapper in model.modules():
        # PEFT's wrappers of parameters name their parameter; those of modules do not.
        if not (hasattr(wrapper, "lora_A") and hasattr(wrapper, "parameter_name")):
            continue
        weight = wrapper.get_param()
        if not hasattr(weight, "device_mesh"):
            continue

        # Factors can follow a weight that is split by experts alone, into equal parts.
        fits = False
        sharded = [dim for dim, place in enumerate(weight.placements) if not place.is_replicate()]
        if len(sharded) == 1:
            [dim] = sharded
            is_equal = weight.shape[0] % weight.device_mesh.shape[dim] == 0
            fits = is_equal and weight.placements[dim] == Shard(0)
        if not fits:
            raise ValueError(
                f"`{wrapper.parameter_name}` {list(weight.shape)} must be split evenly, and by "
                f"experts alone, for adapters of PEFT, got {weight.placements} over "
                f"{tuple(weight.device_mesh.shape)} ranks"
            )

        # Spread both factors of all adapters. All ranks get those of the first rank.
        for linear in (*wrapper.lora_A.values(), *wrapper.lora_B.values()):
            factor = linear.weight
            if hasattr(factor, "device_mesh"):
                continue
            whole = distribute_tensor(factor.detach(), weight.device_mesh, weight.placements)
            linear.weight = nn.Parameter(whole, requires_grad=factor.requires_grad)
            # So that an optimizer made before, which has the old factor, is refused.
            former_factors[id(factor)] = factor
    return model
