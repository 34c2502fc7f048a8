"""The default policy of a `Balancer`. Another one is any callable that takes and
returns the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from epmoe.live.balance import MOVES_OF_A_STEP, Plan, balance, fresh

Policy = Callable[..., Plan]
"""It is called as `few_moves`, on a thread of rank 0, and all ranks carry out the `slots` of its
plan.
"""


def few_moves(
    loads: Tensor, slots: Tensor, *, goal: float, least_gain: float, **limits: int
) -> Plan:
    """Plan as `epmoe.balance` does, for layers above the goal whose moves gain enough. The others
    keep their slots.

    Moves to different ranks run at once, so a plan costs as much as the moves to one rank: all of
    them, or as many as it has slots. Where a plan ends at `max_moves`, further ones lead on, about
    as far as `fresh`: then the gain of the whole way counts.

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
    R = limits["ep_size"]
    S = slots.shape[1] // R
    counts = torch.bincount(
        torch.tensor([m.layer for m in plan.moves], dtype=torch.int64), minlength=len(slots)
    )
    before, after = torch.tensor([plan.balance_before, plan.balance_after], dtype=torch.float64)
    end = after.clone()
    leads_on = (after > goal) & (counts > limits["max_moves"] - MOVES_OF_A_STEP)
    if leads_on.any():
        target = fresh(loads[leads_on], R, S, most_copies=limits["most_copies"])
        even = balance(loads[leads_on], target, ep_size=R, max_moves=0).balance_after
        end[leads_on] = end[leads_on].minimum(torch.tensor(even, dtype=torch.float64))
    pays = (before > goal) & (before - end >= least_gain * counts.clamp(max=S))
    kept = torch.where(pays[:, None], plan.slots, slots)
    return replace(
        plan,
        slots=kept,
        moves=[move for move in plan.moves if pays[move.layer]],
        balance_after=torch.where(pays, after, before).tolist(),
    )
