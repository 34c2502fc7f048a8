"""Finds what differs between the calls of a round that do not match.

Each rank signals the shape of its call to all ranks. After a mismatch this rank reads the signals
of all ranks in its own window, and the error says which values differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor

from epmoe.exchange.peek import LONG_S, Peek
from epmoe.native.layouts import bits, struct
from epmoe.native.ops import DTYPES

Traits = dict[str, object]
"""The properties of a call that must be equal on all ranks, by the name that users know."""
Differences = dict[str, tuple[object, object]]
"""By name, a property in which two calls differ: the value of this rank, and that of the other."""


def call_of(D: int, K: int, dtype: int, *, extra: bool, **more: object) -> Traits:
    """Describe a call by its properties.

    Args:
        D: the hidden size; with `extra` the elements of a row with its extra bytes.
        K: experts per token.
        dtype: the number of the dtype of x in csrc/types.h.
        extra: whether rows may have extra bytes.
        more: further properties by name.

    Returns:
        The properties under the names that users know.
    """
    # The number comes from another rank, which may have written anything.
    dtype_name = f"unknown ({dtype})"
    if 0 <= dtype < len(DTYPES):
        dtype_name = str(DTYPES[dtype]).removeprefix("torch.")
    width = "elements of x and `extra`" if extra else "hidden size (D)"
    return {width: D, "experts per token (K)": K, "dtype": dtype_name, **more}


def calls_of(views: Mapping[str, Tensor], counted: Peek, extra: bool = False) -> list[Traits]:
    """Read the calls of all ranks in the last round from this rank's window.

    Args:
        views: the buffers of this rank by name.
        counted: reads the buffer "recv.counts", which only GPUs use.
        extra: whether rows may have extra bytes.

    Returns:
        The properties of each rank's call, by seat. The list is empty if the GPU has failed or does
        not answer.
    """
    counts = views["recv.counts"]
    # On the CPU, each rank has written a header.
    if not counts.numel():
        calls = []
        for written in views["signal.dispatch"].tolist():
            header = struct("RoundHeader").from_buffer_copy(bytes(written))
            trains = bool(header.mode)
            calls.append(call_of(header.D, header.K, header.dtype, extra=extra, training=trains))
        return calls

    # On a GPU, the high half of the second count word of each rank is the shape of its call.
    with suppress(RuntimeError):
        (counts,) = counted.read_within(LONG_S) or (counts[:0],)
        return [_of_shape(word >> 32 & 0xFFFFFFFF, extra) for word in counts[:, 1].tolist()]
    return []


def differences(mine: Traits, theirs: Traits) -> Differences:
    """The properties that both calls have, and whose values differ."""
    differing = {}
    for name, value in mine.items():
        if name in theirs and theirs[name] != value:
            differing[name] = (value, theirs[name])
    return differing


def _of_shape(word: int, extra: bool) -> Traits:
    """Read the properties of a call from its shape, a `CallShape` of csrc/plan.h."""
    shape = bits("CallShape", word)
    traits: Traits = {"aligned": bool(shape["aligned"]), "training": bool(shape["trains"])}
    # Only rounds of serving have a choice of layouts: those of training have one.
    if not shape["trains"]:
        traits["layout"] = "expert" if shape["expert_major"] else "rank"
        traits["apply_router_weight_on_input"] = bool(shape["weight_rows"])
    # The bits hold D / 4 − 1 and K − 1, since D is a multiple of 4 and neither of them is 0.
    D = 4 * (shape["D4_less_1"] + 1)
    K = shape["K_less_1"] + 1
    return call_of(D, K, shape["dtype"], extra=extra, **traits)
