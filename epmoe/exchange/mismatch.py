"""What the ranks of a node called, where their calls do not match: read from what they have
signalled to this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from epmoe.exchange.peek import LONG_S, Peek
from epmoe.native.layouts import bits, struct
from epmoe.native.ops import DTYPES

Traits = dict[str, object]
"""What must be equal on all ranks, by name."""
Differences = dict[str, tuple[object, object]]
"""The value of this rank and that of the other one, by name."""


def call_of(D: int, K: int, dtype: int, *, extra: bool, **more: object) -> Traits:
    """A call of this hidden size, of K experts per token, of a dtype by its number in csrc/types.h,
    and with `more`.

    `extra`: rows may have one, which D then counts.
    """
    name = (
        str(DTYPES[dtype]).removeprefix("torch.")
        if 0 <= dtype < len(DTYPES)
        else f"unknown ({dtype})"
    )
    return {
        "elements of x and `extra`" if extra else "hidden size (D)": D,
        "experts per token (K)": K,
        "dtype": name,
        **more,
    }


def calls_of(views: Mapping[str, Tensor], counted: Peek, extra: bool = False) -> list[Traits]:
    """[R] of the last round, by source; [] from a GPU that has failed, and while a graph is
    captured. See `call_of`.

    `counted` reads "recv.counts" of `views`, which only GPUs have.
    """
    counts = views["recv.counts"]
    if not counts.numel():
        headers = map(
            struct("RoundHeader").from_buffer_copy, map(bytes, views["signal.dispatch"].tolist())
        )
        return [
            call_of(each.D, each.K, each.dtype, extra=extra, training=bool(each.mode))
            for each in headers
        ]
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return []
    with suppress(RuntimeError):
        (counts,) = counted.read_within(LONG_S) or (counts[:0],)
        return [_of_shape(word >> 32 & 0xFFFFFFFF, extra) for word in counts[:, 1].tolist()]
    return []


def differences(mine: Traits, theirs: Traits) -> Differences:
    return {
        name: (mine[name], theirs[name])
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    }


def _of_shape(word: int, extra: bool) -> Traits:
    """The call in the second count word of a source, `CallShape` in csrc/plan.h."""
    shape = bits("CallShape", word)
    traits: Traits = {"aligned": bool(shape["aligned"]), "training": bool(shape["trains"])}
    if not shape["trains"]:
        traits["layout"] = "expert" if shape["expert_major"] else "rank"
        traits["apply_router_weight_on_input"] = bool(shape["weight_rows"])
    return call_of(
        4 * shape["D4_less_1"] + 4, shape["K_less_1"] + 1, shape["dtype"], extra=extra, **traits
    )
