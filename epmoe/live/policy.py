"""The default policy of a `Balancer`. Another one is any callable that takes and returns the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from epmoe.live.balance import Plan, balance, shares_of

Policy = Callable[..., Plan]
"""It is called as `few_moves`, on a thread of rank 0, and all ranks carry out the `slots` of its plan."""


def few_moves(loads: Tensor, slots: Tensor, *, goal: float, least_gain: float, **limits: int) -> Plan:
    """Plan as `epmoe.balance` does, for layers above the goal whose moves gain enough. The others keep their slots.

    Args:
        loads: float64 [L, E], since the last plan.
        slots: int32 [L, P]
        goal: the balancer's.
        least_gain: the balancer's.
        **limits: `ep_size` and `most_copies` of the group, and `max_moves` of the balancer.

    Returns:
        The plan for all layers.
    """
    plan = balance(loads, slots, goal=goal, **limits)
    counts = torch.bincount(torch.tensor([m.layer for m in plan.moves], dtype=torch.int64), minlength=len(slots))
    before, after = torch.tensor([plan.balance_before, plan.balance_after], dtype=torch.float64)
    pays = (before > goal) & (before - after >= least_gain * counts)
    kept = torch.where(pays[:, None], plan.slots, slots)
    return replace(
        plan,
        slots=kept,
        shares=shares_of(loads, kept, limits["ep_size"]),
        moves=[move for move in plan.moves if pays[move.layer]],
        balance_after=torch.where(pays, after, before).tolist(),
    )
