"""What a `Balancer` asks for a plan. A policy is any callable like `few_moves`, which is the default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epmoe.live.balance import Plan, balance, shares_of


@dataclass(frozen=True)
class Limits:
    """What a plan keeps to: the group's limits, and those of the `Balancer`, which a policy may read in its own way."""

    ep_size: int
    """R"""
    most_copies: int
    """most copies of an expert"""
    goal: float
    """of a layer: the load of the busiest rank over the mean, below which nothing needs to move"""
    max_moves: int
    """most moves of a layer"""
    least_gain: float
    """what each move of a layer should take off that ratio"""


Policy = Callable[[Tensor, Tensor, Limits], Plan]
"""(loads float64 [L, E], slots int32 [L, P], limits) → a plan. It runs on a thread of rank 0.

All ranks carry out the `slots` of the plan. Its balance before and after go into `Balancer.history`.
"""


def few_moves(loads: Tensor, slots: Tensor, limits: Limits) -> Plan:
    """The plan of `epmoe.balance` in layers above the goal whose moves gain enough. The others keep their slots."""
    plan = balance(
        loads, slots, ep_size=limits.ep_size, max_moves=limits.max_moves, goal=limits.goal,
        most_copies=limits.most_copies,
    )  # fmt: skip
    counts = torch.bincount(torch.tensor([m.layer for m in plan.moves], dtype=torch.int64), minlength=len(slots))
    before, after = torch.tensor([plan.balance_before, plan.balance_after], dtype=torch.float64)
    pays = (before > limits.goal) & (before - after >= limits.least_gain * counts)
    kept = torch.where(pays[:, None], plan.slots, slots)
    return replace(
        plan,
        slots=kept,
        shares=shares_of(loads, kept, limits.ep_size),
        moves=[move for move in plan.moves if pays[move.layer]],
        balance_after=torch.where(pays, after, before).tolist(),
    )
