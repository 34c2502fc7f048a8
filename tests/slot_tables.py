"""Drawn tables of slots, and experts that multiply rows, for tests of experts that move."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from epmoe import Dispatched
from epmoe.live.layout import EMPTY


def draw_slots(
    seed: int | random.Random, layers: int, experts: int, ranks: int, S: int, *, least: int = 1, most: int = 4,
    free: int = 0,
) -> Tensor:  # fmt: skip
    """int32 [layers, P]: every expert has `least` to `most` copies, no rank has two; `free` slots or more are empty."""
    draw, tables = random.Random(seed) if isinstance(seed, int) else seed, []
    for _ in range(layers):
        held: list[list[int]] = [[] for _ in range(ranks)]
        for expert in draw.sample(range(experts), experts):
            # Several copies find ranks only where ranks stay even.
            places = sorted(range(ranks), key=lambda r: (len(held[r]) == S, least > 1 and len(held[r]), draw.random()))
            for rank in places[:least]:
                held[rank].append(expert)
        for expert in draw.choices(range(experts), k=max(0, ranks * S - least * experts - free)):
            places = [rank for rank in held if len(rank) < S and expert not in rank]
            if places and sum(expert in rank for rank in held) < most:
                draw.choice(places).append(expert)
        assert all(len(rank) <= S for rank in held)
        for rank in held:
            rank += [EMPTY] * (S - len(rank))
            draw.shuffle(rank)
        tables.append([expert for rank in held for expert in rank])
    return torch.tensor(tables, dtype=torch.int32)


def times_slots(d: Dispatched, gains_SD: Tensor) -> Tensor:
    """Each row times the gains of its slot; rows of no slot are NaN."""
    numbers = torch.arange(len(d.rows), dtype=torch.int32, device=d.rows.device)
    slot = (torch.searchsorted(d.expert_offsets, numbers, right=True) - 1).clamp(max=len(gains_SD) - 1)
    return torch.where(numbers[:, None] < d.expert_offsets[-1], d.rows * gains_SD[slot], torch.nan)


def weighted_sum(x: Tensor, ids: Tensor, weights: Tensor, gains_ED: Tensor) -> Tensor:
    """What combine gives for experts that multiply by their gains, float64 [T, D]."""
    return (x.double()[:, None] * gains_ED.double()[ids.long()] * weights.double()[:, :, None]).sum(1)
