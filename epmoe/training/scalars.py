"""Numbers of experts that Python reads: a DTensor's `item()`, `float()` and `bool()`.

Of a norm or a sum over experts each rank has its own part, and torch gives Python this part. Ranks
that decide by it decide apart: one skips a step that the others take.
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
    """From now on Python reads no part of a number of experts: `item()`, `float()`, `int()` and
    `bool()` raise RuntimeError.

    All of them reach one operator. torch has no public way to say what a DTensor does there, but
    its dispatcher has a table of operators that are done otherwise.
    """
    from torch.distributed.tensor import DTensor

    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _read_scalar


def _read_scalar(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """The value that a DTensor of one element has on this rank."""
    value = args[0]
    is_whole = all(placement.is_replicate() for placement in value.placements)
    if is_spread(value) and not is_whole:
        raise RuntimeError(f"a DTensor with the placements {value.placements} {_REMEDY}")
    return op_call(value._local_tensor)
