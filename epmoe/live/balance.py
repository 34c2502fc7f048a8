"""Which slot should hold which expert, so that all ranks have as much to do: pure computation on
the CPU.

In each of L layers, R ranks have S slots each; slot p, of P = R·S, lies on rank p // S. A slot
holds a logical expert or nothing (−1). An expert has at least one copy, and at most one on a rank.
Its copies share its load as is best for the busiest rank. The balance of a layer is the load of the
busiest rank over the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.config.placement import is_int
from epmoe.native import ops
from epmoe.native.arguments import describe

# The largest number that the native library takes.
_ANY = 2**31 - 1
MAX_MOVES = 64
# Most moves of a step of the search: a plan with fewer left may end before the goal.
MOVES_OF_A_STEP = 3
GOAL = 1.03


class ExpertMove(NamedTuple):
    """A slot gets an expert."""

    layer: int
    expert: int
    slot: int
    dropped: int
    """The expert that the slot held, or −1; another slot holds it, too."""


@dataclass(frozen=True)
class Plan:
    """Moves from one table of slots to a better one."""

    slots: Tensor
    """int32 [L, P] after the moves, or [P] if that was given: the expert in each slot, or −1"""
    moves: list[ExpertMove]
    """in this order one after another: every expert keeps a copy, and no rank ever has
    two of one
    """
    balance_before: list[float]
    """[L] max / mean of the load of ranks, with the best shares of the slots that were given"""
    balance_after: list[float]
    """[L] the same after the moves"""


def balance(
    loads: Tensor,
    slots: Tensor,
    *,
    ep_size: int,
    max_moves: int = MAX_MOVES,
    goal: float = GOAL,
    most_copies: int | None = None,
) -> Plan:
    """Plan few moves that bring the busiest rank of each layer near the mean.

    A greedy search makes moves until the goal is reached or no more are worthwhile. Each step
    copies an expert of a busy rank into a slot that is empty, or whose expert has another copy; or
    it exchanges the expert for a lighter one of another rank, by two or three moves. No step raises
    the load of the busiest rank. A plan of `max_moves` moves may end before the goal; then plans
    one after another lead on. Equal inputs give equal plans.

    Args:
        loads: [L, E], or [E] for one layer: tokens or any other measure of each expert's work,
            finite and at least 0.
        slots: integers [L, P] or [P]: the expert in each slot, or −1.
        ep_size: R
        max_moves: most moves of a layer.
        goal: where moves end: the load of the busiest rank over the mean, at least 1.
        most_copies: most copies that an expert gets, also between two moves: with 1 nothing moves.
            By default as many as there are ranks. Experts that have more keep them.

    Returns:
        The plan for all layers.

    Raises:
        ValueError: an argument is out of range, an expert has no slot or two on a rank; the error
            names it.
    """
    loads_LE = _loads(loads)
    slots_LP = check_slots(slots, loads, ep_size)
    check_limits(max_moves, goal)
    most = _copies(most_copies, ep_size)
    after, moves, balances = ops.balance_plan(loads_LE, slots_LP, ep_size, max_moves, goal, most)
    return Plan(
        slots=after.view(slots.shape),
        moves=[ExpertMove(*row) for row in moves.tolist()],
        balance_before=balances[:, 0].tolist(),
        balance_after=balances[:, 1].tolist(),
    )


def shares_of(loads: Tensor, slots: Tensor, ep_size: int) -> Tensor:
    """Compute the part of its expert's load that each slot takes if rank loads are as equal as they
    can be.

    The load of the busiest rank is the least possible, then that of the next one, and so on: the
    lexicographically optimal base of Fujishige (1980), to 1e-6 of the mean. Copies of an expert
    without load have equal shares.

    Args:
        loads: [L, E] or [E], as `balance` takes them.
        slots: [L, P] or [P], as `balance` takes them.
        ep_size: R

    Returns:
        float64, as `slots`; 0 for an empty slot. The shares of an expert's slots sum to 1.

    Raises:
        ValueError: an argument does not fit, as in `balance`.
    """
    loads_LE = _loads(loads)
    slots_LP = check_slots(slots, loads, ep_size)
    return ops.balance_shares(loads_LE, slots_LP, ep_size).view(slots.shape)


def fresh(
    loads: Tensor,
    ep_size: int,
    slots_per_rank: int,
    *,
    most_copies: int | None = None,
    ranks_per_node: int | None = None,
) -> Tensor:
    """Make a table of slots from loads alone, by the greedy method of DeepSeek's EPLB.

    The next copy is one of the expert with most load per copy. Then the heaviest copies go first,
    each to the rank with the least load that has room and no copy of the expert. With several
    nodes, experts go to nodes first: all copies of an expert are on one node.

    The table wants the shares of `shares_of`, as `Balancer` and `ep.replace` use them. In a stack
    that splits the load of an expert evenly over its copies, the busiest rank may have more than
    with EPLB's table, in which two copies of an expert may lie on one rank.

    Args:
        loads: [L, E] or [E], as `balance` takes them.
        ep_size: R
        slots_per_rank: S, with R·S ≥ E.
        most_copies: most copies of an expert; by default as many as there are ranks.
        ranks_per_node: ranks of a node, a divisor of R; by default all.

    Returns:
        int32 [L, P], or [P]. Slots that no expert may fill are −1.

    Raises:
        ValueError: an argument is out of range; the error names it.
    """
    loads_LE = _loads(loads)
    E = loads.shape[-1]
    _positive("ep_size", ep_size)
    if not is_int(slots_per_rank) or not E <= slots_per_rank * ep_size <= _ANY:
        raise ValueError(
            f"`slots_per_rank` must give {E} experts a slot on {ep_size} ranks, got "
            f"{slots_per_rank!r}"
        )
    node = ep_size if ranks_per_node is None else ranks_per_node
    _positive("ranks_per_node", node)
    if ep_size % node:
        raise ValueError(f"`ranks_per_node` must divide {ep_size} ranks, got {node}")
    slots_LP = ops.balance_fresh(
        loads_LE, ep_size, slots_per_rank, _copies(most_copies, ep_size), node
    )
    return slots_LP if loads.dim() == 2 else slots_LP[0]


def check_slots(
    slots: Tensor, loads: Tensor, ep_size: int, most_copies: int | None = None
) -> Tensor:
    """Check `slots`, as `balance` takes them. Returns them as int32 [L, P] on the CPU.

    Only the shape of `loads` counts. Raises ValueError if the slots do not fit, or an expert has no
    slot, two on a rank, or more than `most_copies`.
    """
    _positive("ep_size", ep_size)
    fits = False
    if isinstance(slots, Tensor) and slots.dtype in (torch.int32, torch.int64):
        *layers, P = slots.shape
        fits = layers == list(loads.shape[:-1]) and P > 0 and P % ep_size == 0
    if not fits:
        leading = "".join(f"{size}, " for size in loads.shape[:-1])
        raise ValueError(
            f"`slots` must be int32 or int64 [{leading}P], where {ep_size} ranks have as many, got "
            f"{describe(slots)}"
        )
    # One table for each layer, on the CPU.
    slots_LP = slots.cpu().reshape(-1, slots.shape[-1]).contiguous()
    # Every slot holds an expert or nothing, and every expert has a slot.
    E = loads.shape[-1]
    if slots_LP.min() < -1 or slots_LP.max() >= E:
        raise ValueError(f"`slots` must hold experts from 0 to {E - 1}, or −1")
    counts_LE = _num_copies(slots_LP, E)
    if (counts_LE == 0).any():
        layer, expert = (counts_LE == 0).nonzero()[0].tolist()
        raise ValueError(f"`slots` must hold every expert: layer {layer} has no expert {expert}")
    # No rank holds an expert twice: sorted, equal ones are neighbours.
    sorted_LRS = slots_LP.view(len(slots_LP), ep_size, -1).sort(dim=2).values
    is_twice = (sorted_LRS.diff(dim=2) == 0) & (sorted_LRS[:, :, 1:] >= 0)
    if is_twice.any():
        layer, rank, i = is_twice.nonzero()[0].tolist()
        raise ValueError(
            f"`slots` must not hold an expert twice on a rank: layer {layer}, rank {rank}, expert "
            f"{int(sorted_LRS[layer, rank, i])}"
        )
    if most_copies is not None and counts_LE.max() > most_copies:
        most = int(counts_LE.max())
        raise ValueError(
            f"`most_copies` must be at least {most}, as an expert has so many, got {most_copies}"
        )
    return slots_LP.int()


def check_limits(max_moves: int, goal: float) -> None:
    if not is_int(max_moves) or not 0 <= max_moves <= _ANY:
        raise ValueError(f"`max_moves` must be an integer of at least 0, got {max_moves!r}")
    if not isinstance(goal, int | float) or not 1 <= goal < math.inf:
        raise ValueError(f"`goal` must be a number of at least 1, got {goal!r}")


def _loads(loads: Tensor) -> Tensor:
    """Check loads. Returns them as float64 [L, E] on the CPU. Raises ValueError."""
    is_table = isinstance(loads, Tensor) and loads.dim() in (1, 2) and bool(loads.numel())
    if not is_table or loads.is_complex():
        raise ValueError(f"`loads` must be numbers [L, E] or [E], got {describe(loads)}")
    loads = loads.detach().to("cpu", torch.float64).contiguous()
    if not (loads >= 0).all() or not loads.sum(dim=-1).isfinite().all():
        raise ValueError("`loads` must be finite and at least 0, and so must their sum")
    return loads.view(-1, loads.shape[-1])


def _num_copies(slots_LP: Tensor, num_experts: int) -> Tensor:
    """Count the copies of each expert, [L, E]."""
    # Column 0 counts the empty slots.
    counts = torch.zeros(len(slots_LP), num_experts + 1, dtype=torch.int64)
    ones = torch.ones_like(slots_LP, dtype=torch.int64)
    return counts.scatter_add_(1, slots_LP.long() + 1, ones)[:, 1:]


def _copies(most_copies: int | None, ep_size: int) -> int:
    if most_copies is None:
        return ep_size
    _positive("most_copies", most_copies)
    return min(most_copies, ep_size)


def _positive(name: str, value: object) -> None:
    if not is_int(value) or not 1 <= value <= _ANY:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}")
