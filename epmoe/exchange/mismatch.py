"""What the ranks of a node called, where their calls do not match: read from what they have
signalled to this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor

from epmoe.exchange.peek import LONG_S, Peek
from epmoe.native.layouts import bits, struct
from epmoe.native.ops import DTYPES

Traits = dict[str, object]
"""What must be equal on all ranks, by name."""
Differences = dict[str, tuple[object, object]]
"""The value of this rank and that of the other one, by name."""


def call_of(D: int, K: int, dtype: int, *, extra: bool, **more: object) -> Traits:
    """Make a call of this hidden size, of K experts per token, of a dtype by its number in
    csrc/types.h, and with `more`.

    `extra`: rows may have one, which D then counts.
    """
    # Other ranks may have written anything.
    dtype_name = f"unknown ({dtype})"
    if 0 <= dtype < len(DTYPES):
        dtype_name = str(DTYPES[dtype]).removeprefix("torch.")
    width = "elements of x and `extra`" if extra else "hidden size (D)"
    return {width: D, "experts per token (K)": K, "dtype": dtype_name, **more}


def calls_of(views: Mapping[str, Tensor], counted: Peek, extra: bool = False) -> list[Traits]:
    """The calls of the last round, [R] by source; [] from a GPU that has failed, and while a graph
    is captured. See `call_of`.

    `counted` reads "recv.counts" of `views`, which only GPUs have.
    """
    counts = views["recv.counts"]
    # CPUs: a header of each source.
    if not counts.numel():
        calls = []
        for written in views["signal.dispatch"].tolist():
            header = struct("RoundHeader").from_buffer_copy(bytes(written))
            trains = bool(header.mode)
            calls.append(call_of(header.D, header.K, header.dtype, extra=extra, training=trains))
        return calls

    # GPUs: the second count word of each source, whose high half is the shape.
    with suppress(RuntimeError):
        (counts,) = counted.read_within(LONG_S) or (counts[:0],)
        return [_of_shape(word >> 32 & 0xFFFFFFFF, extra) for word in counts[:, 1].tolist()]
    return []


def differences(mine: Traits, theirs: Traits) -> Differences:
    """What both say and in which they differ."""
    differing = {}
    for name, value in mine.items():
        if name in theirs and theirs[name] != value:
            differing[name] = (value, theirs[name])
    return differing


def _of_shape(word: int, extra: bool) -> Traits:
    """Read the call in the second count word of a source, `CallShape` in csrc/plan.h."""
    shape = bits("CallShape", word)
    traits: Traits = {"aligned": bool(shape["aligned"]), "training": bool(shape["trains"])}
    # Rounds of training have one layout.
    if not shape["trains"]:
        traits["layout"] = "expert" if shape["expert_major"] else "rank"
        traits["apply_router_weight_on_input"] = bool(shape["weight_rows"])
    # A call has at least one element and one expert, so the bits begin at 1; D counts by fours.
    D = 4 * (shape["D4_less_1"] + 1)
    K = shape["K_less_1"] + 1
    return call_of(D, K, shape["dtype"], extra=extra, **traits)
