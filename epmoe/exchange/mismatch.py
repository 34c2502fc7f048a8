"""What the ranks of a node called, where their calls do not match: read from what they have signalled to this rank."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from epmoe.native.ops import DTYPES

Traits = dict[str, object]
"""By name, what must be equal on all ranks."""
Differences = dict[str, tuple[object, object]]
"""By name, the value of this rank and that of the other one."""

# Of int32 in `RoundHeader`, csrc/plan.h.
HEADER_D, HEADER_MODE = 2, 13


def call_of(D: int, K: int, dtype: int, **more: object) -> Traits:
    """A call of this hidden size, of K experts per token, of a dtype by its number in csrc/types.h, and with `more`."""
    name = str(DTYPES[dtype]).removeprefix("torch.") if 0 <= dtype < len(DTYPES) else f"unknown ({dtype})"
    return {"hidden size (D)": D, "experts per token (K)": K, "dtype": name, **more}


def calls_of(views: Mapping[str, Tensor]) -> list[Traits]:
    """[R] of the last round, by source; [] from a GPU that has failed, and while a graph is captured."""
    if not views["recv.counts"].numel():
        headers = views["signal.dispatch"].view(torch.int32).tolist()
        return [call_of(*row[HEADER_D : HEADER_D + 3], training=bool(row[HEADER_MODE])) for row in headers]
    counts = views["recv.counts"]
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    with suppress(RuntimeError):
        if counts.is_cuda:  # the current stream may wait for a rank
            with torch.cuda.stream(torch.cuda.Stream(counts.device)):
                counts = counts.cpu()
        return [_of_shape(word >> 32 & 0xFFFFFFFF) for word in counts[:, 1].tolist()]
    return []


def differences(mine: Traits, theirs: Traits) -> Differences:
    """What differs of what both calls have."""
    return {name: (mine[name], theirs[name]) for name in mine if name in theirs and mine[name] != theirs[name]}


def _of_shape(word: int) -> Traits:
    """From the second count word of a source: `DispatchKernel::call_without_rows` in csrc/cuda/dispatch/block.cuh."""
    D, K, dtype = (word & 0x3FFF) + 1 << 2, (word >> 15 & 0x1F) + 1, word >> 20 & 3
    aligned, training = bool(word >> 14 & 1), bool(word >> 24 & 1)
    if training:
        return call_of(D, K, dtype, aligned=aligned, training=True)
    layout, weight_rows = "expert" if word >> 22 & 1 else "rank", bool(word >> 23 & 1)
    return call_of(
        D, K, dtype, aligned=aligned, training=False, layout=layout, apply_router_weight_on_input=weight_rows
    )
