"""Tables of quotas, by which a source chooses among the copies of an expert.

Each layer has two tables: one for calls of few tokens, where all sources choose the same copy of an expert, since its
weights take as long to read for one row as for many; and one for calls of many tokens, where copies share the load.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.live.balance import choices, shares_of
from epmoe.live.layout import EMPTY

_NUMBERS = 2**16  # that the copies of an expert share: `copy_by_quota` in csrc/copies.h


def tables(slots: Tensor, loads: Tensor, source: int, ep_size: int, most_copies: int, width: int) -> Tensor:
    """The tables of one source rank, int32 [layers, 2, E, width], for few tokens and for many.

    They are for slots [layers, P] and loads [layers, E]. `width` makes them whole lines.
    """
    slots = at_most(most_copies, slots)  # an expert that moves has more between two waves
    choose = partial(
        choices, slots, shares_of(loads, slots, ep_size), source,
        ep_size=ep_size, num_experts=loads.shape[-1], most_copies=most_copies,
    )  # fmt: skip
    table = torch.stack([quotas(*choose(one_copy=one_copy)) for one_copy in (True, False)], dim=1)
    return F.pad(table, (0, width - table.shape[-1]), value=-1)


def at_most(copies: int, slots: Tensor) -> Tensor:
    """`slots` [L, P] with the first so many copies of each expert; slots of others are empty."""
    if slots.shape[1] <= copies:
        return slots
    experts, order = slots.sort(dim=1, stable=True)
    surplus = F.pad(experts[:, copies:] == experts[:, :-copies], (copies, 0))
    return slots.masked_fill(torch.zeros_like(surplus).scatter(1, order, surplus), EMPTY)


def quotas(slots: Tensor, thresholds: Tensor) -> Tensor:
    """What `copy_by_quota` in csrc/copies.h reads, int32 [..., C], for the `Choices` slots and thresholds [..., C].

    The high 16 bits hold the last number that a copy takes, the low ones its slot. Copies without a number come last.
    """
    ends = (thresholds * _NUMBERS + 2**31 >> 32).clamp(0, _NUMBERS)
    starts = torch.cat([torch.zeros_like(ends[..., :1]), ends[..., :-1]], dim=-1)
    order = (ends <= starts).to(torch.int8).sort(dim=-1, stable=True).indices
    last = torch.where(ends > starts, ends - 1, _NUMBERS - 1).gather(-1, order)
    entries = last << 16 | slots.long().clamp(min=0).gather(-1, order)
    return torch.where(entries >= 2**31, entries - 2**32, entries).int()
