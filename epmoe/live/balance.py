"""Plans which slot should hold which expert, so that all ranks have the same amount of work. It is
pure computation on the CPU.

There are L layers with E experts each, and R ranks. For each layer a rank has S slots, so that
there are P = R·S slots, and slot p lies on rank p // S. A slot holds a logical expert, or nothing
(−1). An expert has at least one copy, and at most one copy on a rank. The copies of an expert share
its load in the way that is best for the busiest rank. The balance of a layer is the load of the
busiest rank divided by the mean load.
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

# The largest integer that the native library takes.
_MAX_INT = 2**31 - 1
# By default a plan has at most this many moves in a layer.
MAX_MOVES = 64
# A step of the search makes at most this many moves. So a plan ends before the goal if it has
# fewer moves left than the next step needs.
MOVES_OF_A_STEP = 3
# By default moves end where the busiest rank has this many times the mean load.
GOAL = 1.03


class ExpertMove(NamedTuple):
    """A slot gets another expert than it held."""

    layer: int
    expert: int
    """the expert that the slot holds after the move"""
    slot: int
    dropped: int
    """the expert that the slot held before the move, which also has another slot; or −1"""


@dataclass(frozen=True)
class Plan:
    """Moves from one table of slots to a better one."""

    slots: Tensor
    """int32 [L, P], or [P] if the table was given so: the expert in each slot after the moves, or
    −1
    """
    moves: list[ExpertMove]
    """the moves in the order in which they are made. In between, every expert keeps a copy, and no
    rank has two copies of an expert.
    """
    balance_before: list[float]
    """[L] the load of the busiest rank over the mean before the moves, with the best shares"""
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

    A greedy search makes moves until it reaches the goal or finds no more useful move. A step of
    the search either copies an expert of a busy rank into a slot that is empty, or whose expert has
    another copy. Or it exchanges an expert of a busy rank for a lighter one of another rank, by two
    or three moves. No step raises the load of the busiest rank. A plan of `max_moves` moves may end
    before the goal; further plans, made from the slots of this one, then come nearer. Equal inputs
    give equal plans.

    Args:
        loads: [L, E], or [E] for one layer: tokens or any other measure of each expert's work,
            finite and at least 0.
        slots: integers [L, P] or [P]: the expert in each slot, or −1.
        ep_size: R, the number of ranks.
        max_moves: most moves of a layer.
        goal: moves of a layer end at this ratio of the busiest rank's load to the mean; at
            least 1.
        most_copies: how many copies an expert gets at most, also between two moves, so that with 1
            nothing moves. By default it is the number of ranks. Experts that have more copies keep
            them.

    Returns:
        The plan for all layers.

    Raises:
        ValueError: an argument is out of range, or an expert has no slot, or two slots on a rank;
            the error names it.
    """
    loads_LE = _check_loads(loads)
    slots_LP = check_slots(slots, loads, ep_size)
    check_limits(max_moves, goal)
    copy_limit = _copy_limit(most_copies, ep_size)
    slots_after_LP, moves, balances_L2 = ops.balance_plan(
        loads_LE, slots_LP, ep_size, max_moves, goal, copy_limit
    )
    # A row of `moves` has the fields of an ExpertMove, one of `balances_L2` before and after.
    return Plan(
        slots=slots_after_LP.view(slots.shape),
        moves=[ExpertMove(*row) for row in moves.tolist()],
        balance_before=balances_L2[:, 0].tolist(),
        balance_after=balances_L2[:, 1].tolist(),
    )


def shares_of(loads: Tensor, slots: Tensor, ep_size: int) -> Tensor:
    """Compute how the copies of each expert should share its load, so that the loads of ranks are
    as equal as possible.

    The load of the busiest rank is as small as possible. Among such shares, the load of the next
    busiest rank is as small as possible, and so on. This is the lexicographically optimal base of
    Fujishige (1980), to 1e-6 of the mean. Copies of an expert without load have equal shares.

    Args:
        loads: [L, E] or [E]: the work of each expert, finite and at least 0.
        slots: integers [L, P] or [P]: the expert in each slot, or −1.
        ep_size: R, the number of ranks.

    Returns:
        float64 in the shape of `slots`: the part of its expert's load that each slot takes, and 0
        for an empty slot. The shares of an expert's slots sum to 1.

    Raises:
        ValueError: an argument is out of range, or an expert has no slot, or two slots on a rank.
    """
    loads_LE = _check_loads(loads)
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

    First it decides how many copies each expert gets: the next copy always goes to the expert with
    the most load per copy. Then it places the copies, the heaviest first, each on the rank with the
    least load that has room and no copy of this expert yet. With several nodes, it first gives each
    expert a node, on which all its copies lie.

    The table is made for the shares of `shares_of`, which `Balancer` and `ep.replace` use. A stack
    may instead split the load of an expert evenly over its copies. Its busiest rank may then have
    more load than with EPLB's table, which may have two copies of an expert on one rank.

    Args:
        loads: [L, E] or [E]: the work of each expert, finite and at least 0.
        ep_size: R, the number of ranks.
        slots_per_rank: S, with R·S ≥ E.
        most_copies: most copies of an expert; by default the number of ranks.
        ranks_per_node: the number of ranks of a node, a divisor of R; by default R.

    Returns:
        int32 [L, P], or [P] for one layer. Slots that no expert may fill are −1.

    Raises:
        ValueError: an argument is out of range; the error names it.
    """
    loads_LE = _check_loads(loads)
    E = loads.shape[-1]
    _check_positive("ep_size", ep_size)
    if not is_int(slots_per_rank) or not E <= slots_per_rank * ep_size <= _MAX_INT:
        raise ValueError(
            f"`slots_per_rank` must give {E} experts a slot on {ep_size} ranks, got "
            f"{slots_per_rank!r}"
        )
    node_size = ep_size if ranks_per_node is None else ranks_per_node
    _check_positive("ranks_per_node", node_size)
    if ep_size % node_size:
        raise ValueError(f"`ranks_per_node` must divide {ep_size} ranks, got {node_size}")
    copy_limit = _copy_limit(most_copies, ep_size)
    slots_LP = ops.balance_fresh(loads_LE, ep_size, slots_per_rank, copy_limit, node_size)
    return slots_LP if loads.dim() == 2 else slots_LP[0]


def check_slots(
    slots: Tensor, loads: Tensor, ep_size: int, most_copies: int | None = None
) -> Tensor:
    """Check a table of slots, [L, P] or [P], and return it as int32 [L, P] on the CPU.

    Of `loads` only the shape counts, which says how many layers and experts there are. Raises
    ValueError if the table has another shape or dtype, or an expert has no slot, two slots on a
    rank, or more than `most_copies` slots.
    """
    _check_positive("ep_size", ep_size)
    fits = False
    if isinstance(slots, Tensor) and slots.dtype in (torch.int32, torch.int64):
        *leading_shape, P = slots.shape
        has_layers = leading_shape == list(loads.shape[:-1])
        fits = has_layers and P > 0 and P % ep_size == 0
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
    """Raise ValueError if a limit of `balance` is out of range."""
    if not is_int(max_moves) or not 0 <= max_moves <= _MAX_INT:
        raise ValueError(f"`max_moves` must be an integer of at least 0, got {max_moves!r}")
    if not isinstance(goal, int | float) or not 1 <= goal < math.inf:
        raise ValueError(f"`goal` must be a number of at least 1, got {goal!r}")


def _check_loads(loads: Tensor) -> Tensor:
    """Check loads, [L, E] or [E], and return them as float64 [L, E] on the CPU.

    Raises ValueError if they have another shape, or a value is negative, Inf or NaN.
    """
    is_table = isinstance(loads, Tensor) and loads.dim() in (1, 2) and bool(loads.numel())
    if not is_table or loads.is_complex():
        raise ValueError(f"`loads` must be numbers [L, E] or [E], got {describe(loads)}")
    loads = loads.detach().to("cpu", torch.float64).contiguous()
    if not (loads >= 0).all() or not loads.sum(dim=-1).isfinite().all():
        raise ValueError("`loads` must be finite and at least 0, and so must their sum")
    return loads.view(-1, loads.shape[-1])


def _num_copies(slots_LP: Tensor, num_experts: int) -> Tensor:
    """Count the copies of each expert, int64 [L, E]."""
    # Empty slots are −1. One more column in front counts them, and is cut off.
    counts = torch.zeros(len(slots_LP), num_experts + 1, dtype=torch.int64)
    ones = torch.ones_like(slots_LP, dtype=torch.int64)
    return counts.scatter_add_(1, slots_LP.long() + 1, ones)[:, 1:]


def _copy_limit(most_copies: int | None, ep_size: int) -> int:
    """How many copies an expert may have: never more than there are ranks."""
    if most_copies is None:
        return ep_size
    _check_positive("most_copies", most_copies)
    return min(most_copies, ep_size)


def _check_positive(name: str, value: object) -> None:
    """Raise ValueError unless the argument `name` is an integer that the native library takes."""
    if not is_int(value) or not 1 <= value <= _MAX_INT:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}")
