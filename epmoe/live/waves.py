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
    """Moves that run at the same time. Nobody uses their slots meanwhile."""

    moves: list[SlotMove]
    slots: Tensor
    """int32 [L, P] after these moves"""


def in_place(before: Tensor, after: Tensor, slots_per_rank: int) -> Tensor:
    """Reorder the slots of each rank in `after`, so that experts that stay on a rank keep their
    slots.
    """
    L, P = before.shape
    by_rank = (L, P // slots_per_rank, slots_per_rank)
    olds = before.view(by_rank)
    result = after.clone().view(by_rank)
    for layer, rank in (olds != result).any(dim=2).nonzero().tolist():
        old = olds[layer, rank].tolist()
        new = result[layer, rank].tolist()
        # Experts that stay keep their slots, the others take the rest in order.
        stays = {expert for expert in new if expert != EMPTY and expert in old}
        rest = iter([expert for expert in new if expert not in stays])
        placed = [expert if expert in stays else next(rest) for expert in old]
        result[layer, rank] = torch.tensor(placed, dtype=result.dtype)
    return result.view(L, P)


def plan_waves(before: Tensor, after: Tensor, slots_per_rank: int) -> list[Wave]:
    """Plan the waves that lead from `before` to `after`.

    A wave overwrites a slot only if it is empty or another slot, which the wave leaves alone, holds
    its expert. Where experts without another copy change places, one of them makes a detour by a
    slot that may be overwritten. Raises ValueError if no slot is free for a detour.

    Every expert has a slot in `before`, and `after` is as `in_place` gives it. The last wave leads
    to `after`, up to the order of the slots of a rank. Where nothing moves there is no wave.
    """
    now = before.clone()
    after = after.clone()
    waves = list[Wave]()
    detours = [set[int]() for _ in before]
    while True:
        layers = (now != after).any(dim=1).nonzero().flatten().tolist()
        if not layers:
            return waves
        # Layers need not wait for one another: a wave has moves of all of them.
        moves = list[SlotMove]()
        for i in layers:
            moves += _wave_of(i, now[i], after[i], slots_per_rank, detours[i])
        for move in moves:
            now[move.layer, move.slot] = move.expert
        # Only empty slots differ from here on: the last wave leaves them.
        if not moves:
            last_moves = waves.pop().moves if waves else []
            waves.append(Wave(last_moves, after.clone()))
            return waves
        waves.append(Wave(moves, now.clone()))
        if len(waves) > 4 * now.shape[1]:
            raise ValueError(_NO_ROOM)


def _wave_of(layer: int, now: Tensor, after: Tensor, S: int, detours: set[int]) -> list[SlotMove]:
    """Plan the moves of one layer in the next wave.

    It adds the slot of a detour to `detours`, and may swap slots of a rank in `after`.
    """
    wave = _LayerWave(layer, now.tolist(), S)
    target = after.tolist()
    wrong = [slot for slot, expert in enumerate(target) if expert not in (EMPTY, wave.held[slot])]
    # First overwrite experts that keep two copies: such an expert outlives its rank.
    for copies_left in (2, 1):
        for slot in sorted(wrong, key=lambda slot: slot in detours):
            if wave.may_overwrite(slot, copies_left):
                wave.move(target[slot], slot)
        if wave.moves:
            return wave.moves
    # All wrong slots hold the only copy of an expert: one of these makes a detour.
    for slot in wrong:
        detour = wave.detour_of(wave.held[slot], target)
        if detour is None:
            continue
        expert = wave.held[slot]
        wanted_slot = wave.slots_by_rank(target, expert).get(detour // S)
        if wanted_slot is None:
            detours.add(detour)
        else:
            # It is no detour: the rank is to have the expert, and may have it in any slot.
            after[wanted_slot] = target[detour]
            after[detour] = expert
        wave.move(expert, detour)
        return wave.moves
    if wrong:
        raise ValueError(_NO_ROOM)
    return wave.moves


class _LayerWave:
    """A wave of one layer while it is made. `held` has the expert in each slot before it."""

    def __init__(self, layer: int, held: list[int], slots_per_rank: int) -> None:
        self.held = held
        self.moves = list[SlotMove]()
        self._layer = layer
        self._S = slots_per_rank
        # Slots of each expert that no move has overwritten.
        self._holders: dict[int, set[int]] = {}
        for slot, expert in enumerate(held):
            if expert != EMPTY:
                self._holders.setdefault(expert, set()).add(slot)
        # Slots that the wave overwrites, and slots that it reads.
        self._taken = set[int]()
        self._sources = set[int]()
        # The number of moves that each rank sends.
        self._pushes: dict[int, int] = {}

    def may_overwrite(self, slot: int, copies_left: int = 1) -> bool:
        """Whether nobody reads a slot, and its expert keeps at least `copies_left` other copies."""
        if slot in self._sources:
            return False
        expert = self.held[slot]
        return expert == EMPTY or len(self._holders[expert]) > copies_left

    def move(self, expert: int, slot: int) -> None:
        """Copy an expert into a slot, from the rank that sends least."""
        overwritten = self.held[slot]
        if overwritten != EMPTY:
            self._holders[overwritten].discard(slot)

        # Among ranks that send as little, take the lowest slot.
        sources = sorted(self._holders[expert] - self._taken)
        source = min(sources, key=lambda slot: self._pushes.get(slot // self._S, 0))
        rank = source // self._S
        self._pushes[rank] = self._pushes.get(rank, 0) + 1
        self._taken.add(slot)
        self._sources.add(source)
        self.moves.append(SlotMove(self._layer, expert, slot, source))

    def detour_of(self, expert: int, target: list[int]) -> int | None:
        """The best slot for a further copy of an expert, on a rank without one; None if no slot is
        free. A rank that is to have the expert is best, then a slot that is to be empty.
        """
        S = self._S
        ranks = {holder // S for holder in self._holders[expert]}
        wanted = self.slots_by_rank(target, expert)
        best: tuple[bool, bool] | None = None
        best_slot: int | None = None
        for slot in range(len(self.held)):
            if slot // S in ranks or not self.may_overwrite(slot):
                continue
            rating = (slot // S in wanted, target[slot] == EMPTY)
            if best is None or rating > best:
                best = rating
                best_slot = slot
        return best_slot

    def slots_by_rank(self, target: list[int], expert: int) -> dict[int, int]:
        """The slot that is to hold an expert, by its rank."""
        return {slot // self._S: slot for slot, held in enumerate(target) if held == expert}
