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
    them, or as many as it has slots. If a plan ends at `max_moves`, further plans lead on, about as
    far as `fresh`. Then the gain of all these plans counts.

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
    layers = torch.tensor([move.layer for move in plan.moves], dtype=torch.int64)
    counts_L = torch.bincount(layers, minlength=len(slots))
    before_L = torch.tensor(plan.balance_before, dtype=torch.float64)
    after_L = torch.tensor(plan.balance_after, dtype=torch.float64)
    # Where further plans lead on, they end at the balance of a fresh table.
    end_L = after_L.clone()
    leads_on = (after_L > goal) & (counts_L > limits["max_moves"] - MOVES_OF_A_STEP)
    if leads_on.any():
        target = fresh(loads[leads_on], R, S, most_copies=limits["most_copies"])
        even = balance(loads[leads_on], target, ep_size=R, max_moves=0).balance_after
        end_L[leads_on] = end_L[leads_on].minimum(torch.tensor(even, dtype=torch.float64))
    # A layer keeps its slots where its moves do not pay.
    pays = (before_L > goal) & (before_L - end_L >= least_gain * counts_L.clamp(max=S))
    kept = torch.where(pays[:, None], plan.slots, slots)
    return replace(
        plan,
        slots=kept,
        moves=[move for move in plan.moves if pays[move.layer]],
        balance_after=torch.where(pays, after_L, before_L).tolist(),
    )
