"""Refuses to read a number in Python that covers only this rank's experts.

A norm or a sum over spread experts is a DTensor, of which each rank has the part for its own
experts. `item()`, `float()` and `bool()` of torch return this part without a word. If ranks decide
by it, they decide differently: one rank may skip a step of the optimizer that the others take.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from epmoe.local.spread import is_spread

_REMEDY = (
    "has this rank's part of a number of all experts, by which ranks would decide apart: read "
    "`full_tensor()` of it, on all ranks, or clip by `epmoe.training.clip_grad_norm_`"
)


@cache
def refuse_scalars_of_a_rank() -> None:
    """From now on, let `item()`, `float()`, `int()` and `bool()` raise RuntimeError for a DTensor
    over experts of which this rank has only a part.

    All four call one operator of torch. There is no public way to replace this operator for
    DTensors. But the dispatcher of DTensor has a table of handlers for operators, and this function
    enters one there.
    """
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _read_scalar


def _read_scalar(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Return the value of a DTensor of one element. Raises RuntimeError if it is a number over
    experts, of which this rank has only a part.
    """
    value = args[0]
    is_whole = all(placement.is_replicate() for placement in value.placements)
    if is_spread(value) and not is_whole:
        raise RuntimeError(f"a DTensor with the placements {value.placements} {_REMEDY}")
    return op_call(value._local_tensor)
