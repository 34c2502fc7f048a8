"""The default policy of a `Balancer`. Any callable that takes the same arguments and returns a plan
can be a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from epmoe.live.balance import MOVES_OF_A_STEP, Plan, balance, fresh

Policy = Callable[..., Plan]
"""A function with the arguments of `few_moves`. A thread of rank 0 calls it, and all ranks carry
out the `slots` of its plan.
"""


def few_moves(
    loads: Tensor, slots: Tensor, *, goal: float, least_gain: float, **limits: int
) -> Plan:
    """Plan as `epmoe.balance` does, but only for layers that are above the goal and whose moves
    gain enough. The other layers keep their slots.

    A layer's moves must gain at least `least_gain` for each move. Moves to different ranks run at
    the same time, so at most S moves count, as many as a rank has slots. If a plan ends because it
    has `max_moves` moves, further plans can come nearer to the goal, about as near as `fresh`. Then
    the gain of all these plans together counts.

    Args:
        loads: float64 [L, E]: the rows of each layer and expert since the last plan.
        slots: int32 [L, P]: the expert in each slot, or −1.
        goal: the goal of the balancer.
        least_gain: the least gain of the balancer.
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
    # A layer whose plan ended for lack of moves will get further plans. Expect that these reach
    # the balance of a fresh table. With `max_moves=0`, `balance` only computes that.
    end_L = after_L.clone()
    has_used_up_moves_L = counts_L > limits["max_moves"] - MOVES_OF_A_STEP
    goes_on_L = (after_L > goal) & has_used_up_moves_L
    if goes_on_L.any():
        remaining_loads = loads[goes_on_L]
        fresh_slots = fresh(remaining_loads, R, S, most_copies=limits["most_copies"])
        fresh_plan = balance(remaining_loads, fresh_slots, ep_size=R, max_moves=0)
        reachable = torch.tensor(fresh_plan.balance_after, dtype=torch.float64)
        end_L[goes_on_L] = end_L[goes_on_L].minimum(reachable)
    # If the moves of a layer do not gain enough, the layer keeps its slots.
    needed_gain_L = least_gain * counts_L.clamp(max=S)
    pays_L = (before_L > goal) & (before_L - end_L >= needed_gain_L)
    return replace(
        plan,
        slots=torch.where(pays_L[:, None], plan.slots, slots),
        moves=[move for move in plan.moves if pays_L[move.layer]],
        balance_after=torch.where(pays_L, after_L, before_L).tolist(),
    )
