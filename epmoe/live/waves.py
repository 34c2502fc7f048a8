"""Plans in which order experts move from one table of slots to another, so that every expert always
keeps a copy in use.

A table is [L, P]: L layers, and P slots of a layer on all ranks. A rank has S slots of each layer,
so slot p lies on rank p // S. A slot holds a logical expert, or −1.
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
    """the slot that gets the expert"""
    source: int
    """the slot from which the weights are copied"""


class Wave(NamedTuple):
    """Moves that run at the same time. While they run, no rank sends tokens to the slots that get
    experts.
    """

    moves: list[SlotMove]
    slots: Tensor
    """int32 [L, P]: the expert in each slot after these moves, or −1"""


def in_place(before: Tensor, after: Tensor, slots_per_rank: int) -> Tensor:
    """Reorder the slots of each rank in `after`, so that experts that stay on a rank keep the slots
    that they have in `before`. Then fewer experts have to move.

    Both tables are [L, P]. Returns the reordered table.
    """
    L, P = before.shape
    R = P // slots_per_rank
    before_LRS = before.view(L, R, slots_per_rank)
    result_LRS = after.clone().view(L, R, slots_per_rank)
    # Only ranks whose slots differ need work.
    differs_LR = (before_LRS != result_LRS).any(dim=2)
    for layer, rank in differs_LR.nonzero().tolist():
        old_experts = before_LRS[layer, rank].tolist()
        new_experts = result_LRS[layer, rank].tolist()
        # Experts that stay keep their slots. The new experts and the empty slots take the rest of
        # the slots, in their order.
        staying = {expert for expert in new_experts if expert != EMPTY and expert in old_experts}
        arriving = iter([expert for expert in new_experts if expert not in staying])
        placed = [expert if expert in staying else next(arriving) for expert in old_experts]
        result_LRS[layer, rank] = torch.tensor(placed, dtype=result_LRS.dtype)
    return result_LRS.view(L, P)


def plan_waves(before: Tensor, after: Tensor, slots_per_rank: int) -> list[Wave]:
    """Plan the waves that lead from the table `before` to the table `after`, both [L, P].

    A wave may overwrite a slot in two cases: the slot is empty, or its expert has another slot that
    the wave does not overwrite. If experts that have no second copy are to change places, one
    expert makes a detour: it is first copied to a third slot. Raises ValueError if no slot is free
    for a detour.

    Every expert must have a slot in `before`, and `after` must be a result of `in_place`. The last
    wave leads to `after`, but a rank may then have its experts in another order of slots. If
    nothing has to move, there is no wave.
    """
    now = before.clone()
    after = after.clone()
    waves = list[Wave]()
    # By layer: the slots to which experts have made detours.
    detours = [set[int]() for _ in before]
    while True:
        layers = (now != after).any(dim=1).nonzero().flatten().tolist()
        if not layers:
            return waves
        # A wave has moves of all layers that differ, since layers need not wait for one another.
        moves = list[SlotMove]()
        for layer in layers:
            moves += _moves_of_layer(
                layer,
                now=now[layer],
                after=after[layer],
                slots_per_rank=slots_per_rank,
                detours=detours[layer],
            )
        for move in moves:
            now[move.layer, move.slot] = move.expert
        # No moves are left, but tables differ: slots still hold experts that are to be empty. They
        # become empty with the last wave, or with a wave without moves if there is none.
        if not moves:
            last_moves = waves.pop().moves if waves else []
            waves.append(Wave(last_moves, after.clone()))
            return waves
        waves.append(Wave(moves, now.clone()))
        # So many waves mean that experts go round in a circle.
        if len(waves) > 4 * now.shape[1]:
            raise ValueError(_NO_ROOM)


def _moves_of_layer(
    layer: int, now: Tensor, after: Tensor, slots_per_rank: int, detours: set[int]
) -> list[SlotMove]:
    """Plan the moves of one layer in the next wave, from the slots `now` to the slots `after`.

    Both are [P]. If an expert makes a detour, its slot is added to `detours`. The function may also
    swap two slots of a rank in `after`.
    """
    wave = _LayerWave(layer, now.tolist(), slots_per_rank)
    target = after.tolist()
    # The slots that are to get an expert that they do not hold.
    wrong = [slot for slot, expert in enumerate(target) if expert not in (EMPTY, wave.held[slot])]
    # First try to overwrite only experts that then still have two copies, so that the death of a
    # rank loses none of them. If there are none, one copy that stays is enough. Slots of detours
    # come last, as their experts have just moved there.
    for copies_left in (2, 1):
        for slot in sorted(wrong, key=lambda slot: slot in detours):
            if wave.may_overwrite(slot, copies_left):
                wave.move(target[slot], slot)
        if wave.moves:
            return wave.moves
    # Now each wrong slot holds the only copy of an expert. Let one of these experts make a detour.
    for slot in wrong:
        detour = wave.detour_of(wave.held[slot], target)
        if detour is None:
            continue
        expert = wave.held[slot]
        rank = detour // slots_per_rank
        wanted_slot = wave.slots_by_rank(target, expert).get(rank)
        if wanted_slot is None:
            detours.add(detour)
        else:
            # The rank of this slot is to have the expert anyway, and may have it in any slot. So
            # the expert stays here: swap the two slots in the target.
            after[wanted_slot] = target[detour]
            after[detour] = expert
        wave.move(expert, detour)
        return wave.moves
    if wrong:
        raise ValueError(_NO_ROOM)
    return wave.moves


class _LayerWave:
    """The moves of one layer in a wave, while the wave is being planned.

    `held` has the expert in each slot before the wave, or −1.
    """

    def __init__(self, layer: int, held: list[int], slots_per_rank: int) -> None:
        self.held = held
        self.moves = list[SlotMove]()
        self._layer = layer
        self._S = slots_per_rank
        # By expert: the slots that hold it, without those that the wave overwrites.
        self._holders: dict[int, set[int]] = {}
        for slot, expert in enumerate(held):
            if expert != EMPTY:
                self._holders.setdefault(expert, set()).add(slot)
        # The slots that the wave overwrites, and the slots that it reads.
        self._overwritten = set[int]()
        self._sources = set[int]()
        # By rank: how many experts the rank sends.
        self._num_sent: dict[int, int] = {}

    def may_overwrite(self, slot: int, copies_left: int = 1) -> bool:
        """Whether the wave may overwrite a slot: it does not read the slot, and the expert in it
        keeps at least `copies_left` other copies.
        """
        if slot in self._sources:
            return False
        expert = self.held[slot]
        return expert == EMPTY or len(self._holders[expert]) > copies_left

    def move(self, expert: int, slot: int) -> None:
        """Add a move of an expert into a slot, from the rank that sends the fewest experts."""
        dropped = self.held[slot]
        if dropped != EMPTY:
            self._holders[dropped].discard(slot)

        # If several ranks send equally few, take the lowest slot: `min` finds the first one.
        sources = sorted(self._holders[expert] - self._overwritten)
        source = min(sources, key=lambda slot: self._num_sent.get(slot // self._S, 0))
        rank = source // self._S
        self._num_sent[rank] = self._num_sent.get(rank, 0) + 1
        self._overwritten.add(slot)
        self._sources.add(source)
        self.moves.append(SlotMove(self._layer, expert, slot, source))

    def detour_of(self, expert: int, target: list[int]) -> int | None:
        """Find the best slot for one more copy of an expert, on a rank that has none.

        `target` has the expert that each slot is to hold in the end. A slot is best on a rank that
        is to have the expert; after that, a slot that is to be empty. Returns None if no slot may
        be overwritten.
        """
        S = self._S
        ranks_with_copy = {holder // S for holder in self._holders[expert]}
        wanted_slots = self.slots_by_rank(target, expert)
        best_rating: tuple[bool, bool] | None = None
        best_slot: int | None = None
        for slot in range(len(self.held)):
            rank = slot // S
            if rank in ranks_with_copy or not self.may_overwrite(slot):
                continue
            rating = (rank in wanted_slots, target[slot] == EMPTY)
            if best_rating is None or rating > best_rating:
                best_rating = rating
                best_slot = slot
        return best_slot

    def slots_by_rank(self, target: list[int], expert: int) -> dict[int, int]:
        """The slots that are to hold an expert by `target`, by the rank of the slot. A rank has at
        most one.
        """
        return {slot // self._S: slot for slot, held in enumerate(target) if held == expert}
