"""LoRA adapters that PEFT trains on experts which are spread over ranks. The factors of the
adapters become DTensors, as the weights of the experts are.

For E experts with weights [n, k] and adapters of rank r, PEFT has these parameters, which DTensors
split by their first dimension:

weight [E, n, k], Shard(0)    a rank has the weights of its experts
lora_A [E·r, k], Shard(0)     a rank has the rows of its experts
lora_B [n, r·E], Shard(0)     a rank has some rows of all experts, since an expert's columns are not
                              next to each other
"""

from __future__ import annotations

from typing import Any

from torch import nn

from epmoe.training.models import former_factors


def spread_adapters(model: nn.Module) -> nn.Module:
    """Make DTensors of the LoRA factors that PEFT has added for `target_parameters`, if these
    parameters are DTensors. Collective.

    Call it after `get_peft_model` or `PeftModel.from_pretrained`, and before you make DDP, FSDP and
    the optimizer. All ranks take the factors of the first rank. A model with spread experts whose
    factors are no DTensors raises in the forward pass, since every rank has drawn factors of its
    own.

    Args:
        model: a model of PEFT.

    Returns:
        The model. It trains as any model with spread experts does: see docs/training.md.

    Raises:
        ValueError: the ranks do not divide the experts, or the weights are DTensors of another
            kind.
        RuntimeError: later, at the step of an optimizer that has been made before.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    wrapper: Any
    for wrapper in model.modules():
        # PEFT wraps modules and single parameters. Only a wrapper of a parameter, as experts need
        # it, has a `parameter_name`.
        if not (hasattr(wrapper, "lora_A") and hasattr(wrapper, "parameter_name")):
            continue
        weight = wrapper.get_param()
        if not hasattr(weight, "device_mesh"):
            continue

        # The factors can be split as the weight is, if the weight is split along one dimension of
        # the mesh, by experts, into equal parts.
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

        # Spread both factors of every adapter. `distribute_tensor` takes the values of the first
        # rank for all ranks.
        for linear in (*wrapper.lora_A.values(), *wrapper.lora_B.values()):
            factor = linear.weight
            if hasattr(factor, "device_mesh"):
                continue
            whole = distribute_tensor(factor.detach(), weight.device_mesh, weight.placements)
            linear.weight = nn.Parameter(whole, requires_grad=factor.requires_grad)
            # An optimizer made earlier still has the old factor. Keep the factor, so that a step of
            # such an optimizer is refused.
            former_factors[id(factor)] = factor
    return model
