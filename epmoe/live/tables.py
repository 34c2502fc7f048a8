"""Tables of quotas, by which a source chooses among the copies of an expert.

Each layer has two tables: one for calls of few tokens, where all sources choose the same copy of an
expert, since its weights take as long to read for one row as for many; and one for calls of many
tokens, where copies share the load.
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
    """Make the tables of one source rank, int32 [layers, 2, E, width], for few tokens and for many:
    see csrc/copies.h.

    They are for slots int32 [layers, P] and loads float64 [layers, E]. `width` makes them whole
    lines.
    """
    # An expert that moves has more between two waves.
    slots = at_most(most_copies, slots)
    return ops.balance_quotas(loads, slots, ep_size, source, width)


def in_seats(quotas: Tensor, seats: Sequence[int], slots_per_rank: int) -> Tensor:
    """Tables of the slots of `seats`, the seat of each rank, made of tables of the slots of ranks.

    Shares are those of the ranks: empty seats bring no tokens. Entries behind the last number name
    any slot.
    """
    # The lower half of an entry is a slot, whose rank becomes its seat.
    slots = quotas & 0xFFFF
    ranks = (slots // slots_per_rank).clamp(max=len(seats) - 1)
    further = quotas.new_tensor([seat - rank for rank, seat in enumerate(seats)]) * slots_per_rank
    return quotas & ~0xFFFF | slots + further[ranks.long()] & 0xFFFF


def at_most(copies: int, slots: Tensor) -> Tensor:
    """`slots` [L, P] with the first so many copies of each expert; slots of others are empty."""
    if slots.shape[1] <= copies:
        return slots
    experts, order = slots.sort(dim=1, stable=True)
    surplus = F.pad(experts[:, copies:] == experts[:, :-copies], (copies, 0))
    return slots.masked_fill(torch.zeros_like(surplus).scatter(1, order, surplus), EMPTY)
