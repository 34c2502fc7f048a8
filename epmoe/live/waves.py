"""The order in which experts move from one table of slots to another, so that every expert keeps a
copy in use.

A table has L layers of P slots; slot p lies on rank p // S and holds a logical expert, or −1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.live.layout import EMPTY

_NO_ROOM = "experts cannot change places: leave a slot of the ranks empty, or with a second copy"


class SlotMove(NamedTuple):
    """The weights of an expert go from one slot to another."""

    layer: int
    expert: int
    slot: int
    source: int
    """a slot that holds the expert"""


class Wave(NamedTuple):
    """Moves that run at the same time: nobody uses their slots meanwhile."""

    moves: list[SlotMove]
    slots: Tensor
    """int32 [L, P] after these moves"""


def in_place(before: Tensor, after: Tensor, slots_per_rank: int) -> Tensor:
    """`after` with each rank's slots in an order in which experts that stay on the rank stay where
    they are.
    """
    L, P = before.shape
    olds, result = (
        table.view(L, P // slots_per_rank, slots_per_rank) for table in (before, after.clone())
    )
    for layer, rank in (olds != result).any(dim=2).nonzero().tolist():
        old = olds[layer, rank].tolist()
        new = result[layer, rank].tolist()
        stays = {expert for expert in new if expert != EMPTY and expert in old}
        rest = iter([expert for expert in new if expert not in stays])
        placed = [expert if expert in stays else next(rest) for expert in old]
        result[layer, rank] = torch.tensor(placed, dtype=result.dtype)
    return result.view(L, P)


def plan_waves(before: Tensor, after: Tensor, slots_per_rank: int) -> list[Wave]:
    """Waves that lead from `before` to `after`.

    A wave overwrites a slot only if it is empty or another slot, which the wave leaves alone, holds
    its expert. Where experts without another copy change places, one of them makes a detour by a
    slot that may be overwritten. Raises ValueError where no slot is free for a detour.

    Every expert has a slot in `before`, and `after` is as `in_place` gives it. The last wave leads
    to `after`, up to the order of the slots of a rank. Where nothing moves there is no wave.
    """
    now = before.clone()
    after = after.clone()
    waves = list[Wave]()
    detours = [set[int]() for _ in before]
    while layers := (now != after).any(dim=1).nonzero().flatten().tolist():
        moves = [
            move
            for i in layers
            for move in _wave_of(i, now[i], after[i], slots_per_rank, detours[i])
        ]
        for move in moves:
            now[move.layer, move.slot] = move.expert
        # What is left becomes empty.
        if not moves:
            now = after.clone()
            if waves:
                waves[-1] = Wave(waves[-1].moves, now)
            else:
                waves.append(Wave([], now))
            break
        waves.append(Wave(moves, now.clone()))
        if len(waves) > 4 * now.shape[1]:
            raise ValueError(_NO_ROOM)
    return waves


def _wave_of(layer: int, now: Tensor, after: Tensor, S: int, detours: set[int]) -> list[SlotMove]:
    """The moves of one layer. `detours` gets the slot of a detour, and slots of a rank in `after`
    may change places.
    """
    held = now.tolist()
    target = after.tolist()
    holders: dict[int, set[int]] = {}
    for slot, expert in enumerate(held):
        if expert != EMPTY:
            holders.setdefault(expert, set()).add(slot)
    pushes: dict[int, int] = {}  # by rank

    def may_be_overwritten(slot: int, left: int = 1) -> bool:
        return slot not in sources and (held[slot] == EMPTY or len(holders[held[slot]]) > left)

    def move(expert: int, slot: int) -> None:
        if held[slot] != EMPTY:
            holders[held[slot]].discard(slot)
        source = min(holders[expert] - taken, key=lambda s: (pushes.get(s // S, 0), s))
        pushes[source // S] = pushes.get(source // S, 0) + 1
        taken.add(slot)
        sources.add(source)
        moves.append(SlotMove(layer, expert, slot, source))

    moves: list[SlotMove] = []
    # Slots that the wave overwrites, and reads.
    taken, sources = set[int](), set[int]()
    wrong = [slot for slot, expert in enumerate(target) if expert not in (EMPTY, held[slot])]
    # With two copies left, an expert outlives its rank.
    for left in (2, 1):
        for slot in sorted(wrong, key=lambda s: s in detours):
            if may_be_overwritten(slot, left):
                move(target[slot], slot)
        if moves:
            return moves
    # A detour for what it holds.
    for slot in wrong:
        expert = held[slot]
        ranks = {holder // S for holder in holders[expert]}
        wanted = {s // S: s for s in range(len(held)) if target[s] == expert}
        free = [s for s in range(len(held)) if may_be_overwritten(s) and s // S not in ranks]
        if free:
            detour = min(free, key=lambda s: (s // S not in wanted, target[s] != EMPTY, s))
            there = wanted.get(detour // S)
            # No detour: its rank may have it in any slot.
            if there is not None:
                after[there], after[detour] = target[detour], expert
            else:
                detours.add(detour)
            move(expert, detour)
            return moves
    if wrong:
        raise ValueError(_NO_ROOM)
    return moves
