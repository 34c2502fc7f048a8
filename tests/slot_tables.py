"""Drawn tables of slots, and experts that multiply rows by their gains, for tests of experts that
move.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from helpers import randn
from torch import Tensor

from epmoe import Dispatched, ExpertParallel
from epmoe.live.layout import EMPTY


def draw_slots(
    seed: int | random.Random,
    layers: int,
    experts: int,
    ranks: int,
    S: int,
    *,
    least: int = 1,
    most: int = 4,
    free: int = 0,
) -> Tensor:
    """int32 [layers, P]: every expert has `least` to `most` copies, no rank has two; `free` slots
    or more are empty.
    """
    draw = random.Random(seed) if isinstance(seed, int) else seed
    tables = []
    for _ in range(layers):
        held: list[list[int]] = [[] for _ in range(ranks)]
        # Each expert `least` times, on the emptiest ranks.
        for expert in draw.sample(range(experts), experts):
            # Several copies find ranks only where ranks stay even.
            places = sorted(
                range(ranks),
                key=lambda r: (len(held[r]) == S, least > 1 and len(held[r]), draw.random()),
            )
            for rank in places[:least]:
                held[rank].append(expert)

        # More copies in what is left.
        for expert in draw.choices(range(experts), k=max(0, ranks * S - least * experts - free)):
            places = [rank for rank in held if len(rank) < S and expert not in rank]
            if places and sum(expert in rank for rank in held) < most:
                draw.choice(places).append(expert)

        # The rest is empty, and slots of a rank have any order.
        assert all(len(rank) <= S for rank in held)
        for rank in held:
            rank += [EMPTY] * (S - len(rank))
            draw.shuffle(rank)
        tables.append([expert for rank in held for expert in rank])
    return torch.tensor(tables, dtype=torch.int32)


def times_slots(d: Dispatched, gains_SD: Tensor) -> Tensor:
    """Each row times the gains of its slot; rows of no slot are NaN."""
    numbers = torch.arange(len(d.rows), dtype=torch.int32, device=d.rows.device)
    slot = (torch.searchsorted(d.expert_offsets, numbers, right=True) - 1).clamp(
        max=len(gains_SD) - 1
    )
    return torch.where(numbers[:, None] < d.expert_offsets[-1], d.rows * gains_SD[slot], torch.nan)


def weighted_sum(x: Tensor, ids: Tensor, weights: Tensor, gains_ED: Tensor) -> Tensor:
    """What combine gives for experts that multiply by their gains, float64 [T, D]."""
    return (x.double()[:, None] * gains_ED.double()[ids.long()] * weights.double()[:, :, None]).sum(
        1
    )


class Slots:
    """The weights of all slots of a rank: a row of gains [D], and data that only moves."""

    def __init__(self, ep: ExpertParallel, D: int, numbers: int) -> None:
        self.ep = ep
        layers = len(ep.slots)
        S = ep.num_local_experts
        self.rows = torch.full((layers, S, D), torch.nan, device=ep.device)
        self.data = torch.full((layers, S, numbers), -1, dtype=torch.int32, device=ep.device)
        self.load()

    def load(self) -> None:
        """All experts of this rank, also those that are here."""
        for layer, local, expert in self.held():
            self.rows[layer, local] = self.gain(layer, expert)
            self.data[layer, local] = expert

    def held(self) -> Iterator[tuple[int, int, int]]:
        """(layer, local slot, expert) of this rank."""
        for layer in range(len(self.rows)):
            for local, expert in enumerate(self.ep.logical_experts(layer + 1)):
                if expert != EMPTY:
                    yield layer, local, expert

    def gain(self, layer: int, expert: int) -> Tensor:
        return 1 + randn(self.rows.shape[-1], seed=100 * layer + expert).abs()

    def of(self, tag: int, local: int) -> list[Tensor]:
        return [self.rows[tag - 1, local], self.data[tag - 1, local]]

    def check(self) -> None:
        """Each slot has the weights of the expert that it holds. What holds none may
        hold anything.
        """
        for layer, local, expert in self.held():
            assert torch.equal(self.rows[layer, local].cpu(), self.gain(layer, expert)), (
                layer,
                local,
                expert,
            )
            assert (self.data[layer, local] == expert).all(), (layer, local, expert)
        self.rows[(self.ep.live.held == EMPTY).to(self.ep.device)] = torch.nan

    def run(self, d: Dispatched, layer: int) -> Tensor:
        return times_slots(d, self.rows[layer])

    def want(self, x: Tensor, ids: Tensor, weights: Tensor, layer: int) -> Tensor:
        """The sums of a round, float64 [T, D]."""
        gains = torch.stack(
            [self.gain(layer, expert) for expert in range(self.ep.config.model.num_experts)]
        )
        return weighted_sum(x, ids, weights, gains)
