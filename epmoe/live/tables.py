"""Tables of quotas, by which a source rank chooses a copy of an expert for each token.

Each layer has two tables. The first is for calls of few tokens: all source ranks choose the same
copy of an expert, since a GEMM takes as long to read the weights for one row as for many. The
second is for calls of many tokens: the copies of an expert share its tokens.

Letters of shapes: L layers, E experts of a layer, R ranks, and P slots of a layer on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.live.layout import EMPTY
from epmoe.native import ops


def tables(
    slots: Tensor, loads: Tensor, source: int, ep_size: int, most_copies: int, width: int
) -> Tensor:
    """Make the tables of one source rank, int32 [L, 2, E, width]. Index 0 is the table for few
    tokens, 1 the table for many tokens. csrc/copies.h says what an entry means.

    `slots` is int32 [L, P], and `loads` float64 [L, E]. `width` is the number of entries of an
    expert, filled up so that each row is whole lines of 16 bytes.
    """
    # Between two waves an expert that moves may have more copies than allowed: use the first ones.
    slots = at_most(most_copies, slots)
    return ops.balance_quotas(loads, slots, ep_size, source, width)


def in_seats(quotas: Tensor, seats: Sequence[int], slots_per_rank: int) -> Tensor:
    """Renumber the slots in tables of quotas, from slots of ranks to slots of seats.

    `tables` numbers slots by rank, but rounds number them by seat, and a group may have empty
    seats. `seats` has the seat of each rank. The shares stay as they are, since empty seats send no
    tokens. Unused entries of a row may name any slot.
    """
    # The lower 16 bits of an entry are the slot. Unused entries may name a rank that is not there.
    slots = quotas & 0xFFFF
    ranks = (slots // slots_per_rank).clamp(max=len(seats) - 1)
    # By rank: how far its slots move.
    shifts = quotas.new_tensor([seat - rank for rank, seat in enumerate(seats)]) * slots_per_rank
    new_slots = (slots + shifts[ranks.long()]) & 0xFFFF
    # The upper 16 bits stay.
    return (quotas & ~0xFFFF) | new_slots


def at_most(copies: int, slots: Tensor) -> Tensor:
    """Keep the first `copies` copies of each expert in a table `slots` [L, P], and make the slots
    of its further copies empty.
    """
    if slots.shape[1] <= copies:
        return slots
    # After a stable sort the copies of an expert are neighbours, in the order of their slots. A
    # copy is one too many if the entry `copies` places before it is the same expert.
    experts, order = slots.sort(dim=1, stable=True)
    is_surplus_sorted = F.pad(experts[:, copies:] == experts[:, :-copies], (copies, 0))
    # Bring the marks back into the order of slots.
    is_surplus = torch.zeros_like(is_surplus_sorted).scatter(1, order, is_surplus_sorted)
    return slots.masked_fill(is_surplus, EMPTY)
