"""Waves of moves: every expert keeps a copy that nobody overwrites, and nobody reads what a wave writes."""

from __future__ import annotations

import pytest
import torch
from helpers import generator

from epmoe.exchange.moves_plan import EMPTY, in_place, plan_waves
from epmoe.live import quotas


def draw_slots(layers: int, experts: int, ranks: int, S: int, seed: int, empty: bool = True) -> torch.Tensor:
    """Every expert at least once, never twice on a rank; what is left holds copies or nothing."""
    table, draw = torch.full((layers, ranks, S), EMPTY, dtype=torch.int32), generator(seed)
    for layer in table:
        free = [S] * ranks
        for expert in torch.randperm(experts, generator=draw).tolist():
            rank = max(range(ranks), key=lambda r: free[r] + float(torch.rand((), generator=draw)))
            layer[rank, S - free[rank]] = expert
            free[rank] -= 1
        for rank in range(ranks):
            for slot in range(S - free[rank], S):
                expert = int(torch.randint(experts, (), generator=draw))
                if expert not in layer[rank] and not (empty and torch.rand((), generator=draw) < 0.3):
                    layer[rank, slot] = expert
            layer[rank] = layer[rank][torch.randperm(S, generator=draw)]
    return table.view(layers, -1)


def same_ranks(first: torch.Tensor, second: torch.Tensor, S: int) -> bool:
    return torch.equal(first.view(-1, S).sort().values, second.view(-1, S).sort().values)


@pytest.mark.parametrize("seed", range(40))
def test_waves_keep_a_copy_of_every_expert(seed):
    L, E, R, S = 2, 10, 4, 4
    before = draw_slots(L, E, R, S, seed)
    after = in_place(before, draw_slots(L, E, R, S, 1000 + seed), S)
    now = before.clone()
    for wave in plan_waves(before, after, S):
        written = {(move.layer, move.slot) for move in wave.moves}
        for move in wave.moves:
            assert now[move.layer, move.source] == move.expert and (move.layer, move.source) not in written
            assert move.slot // S != move.source // S
        left = now.clone()
        for layer, slot in written:
            left[layer, slot] = EMPTY
        for layer in left:
            assert set(layer.tolist()) - {EMPTY} == set(range(E))
        now = wave.slots
        for layer in now.view(L, R, S).tolist():
            for held in layer:
                real = [expert for expert in held if expert != EMPTY]
                assert len(set(real)) == len(real)
    assert same_ranks(now, after, S)


def test_experts_that_stay_on_a_rank_stay_in_their_slot():
    before, after = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
    assert torch.equal(in_place(before, after, 2), before)
    assert plan_waves(before, before, 2) == []


def test_two_experts_change_places_by_a_free_slot():
    before = torch.tensor([[0, 1, 2, EMPTY]], dtype=torch.int32)
    after = torch.tensor([[0, 2, 1, EMPTY]], dtype=torch.int32)
    waves = plan_waves(before, after, 2)
    assert same_ranks(waves[-1].slots, after, 2) and len(waves) >= 2


def test_two_experts_without_a_free_slot_do_not_change_places():
    before, after = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.tensor([[0, 2, 1, 3]], dtype=torch.int32)
    with pytest.raises(ValueError, match="leave a slot"):
        plan_waves(before, after, 2)


def test_quotas_drop_copies_without_a_number():
    slots = torch.tensor([[7, 3, 9, 9]], dtype=torch.int32)
    thresholds = torch.tensor([[0, 2**31, 2**32, 2**32]])
    got = quotas(slots, thresholds).long() & 0xFFFFFFFF
    assert (got >> 16).tolist() == [[2**15 - 1, 2**16 - 1, 2**16 - 1, 2**16 - 1]]
    assert (got & 0xFFFF)[0, :2].tolist() == [3, 9]
