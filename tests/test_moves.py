"""Waves of moves; and moves of all ranks in one process, in drawn orders of all that can happen:
hosts run ahead of their GPUs, words are late, ranks cancel, and signal handlers raise.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable

import pytest
import torch
from helpers import slow
from slot_tables import draw_slots
from torch import Tensor

from epmoe.config.deadlines import Deadlines
from epmoe.live.layout import EMPTY, Word
from epmoe.live.moves import Moves
from epmoe.live.waves import in_place, plan_waves

L = 2
E = 10
R = 4
S = 4
STAGING = 16  # bytes; a slot has 40


def seeds(quick: int, all_: int) -> pytest.MarkDecorator:
    """The first ones in every run, the others of a simulation in longer ones."""
    later = [slow(seed) for seed in range(quick, all_)]
    return pytest.mark.parametrize("seed", [*range(quick), *later])


def table(seed: int) -> Tensor:
    return draw_slots(seed, L, E, R, S, free=1)


def same_ranks(first: Tensor, second: Tensor, S: int) -> bool:
    return torch.equal(first.view(-1, S).sort().values, second.view(-1, S).sort().values)


@pytest.mark.parametrize("seed", range(40))
def test_waves_keep_a_copy_of_every_expert(seed):
    before = table(seed)
    after = in_place(before, table(1000 + seed), S)
    now = before.clone()
    for wave in plan_waves(before, after, S):
        written = {(move.layer, move.slot) for move in wave.moves}
        # A move reads what its source holds, on another rank, and nothing that this wave writes.
        for move in wave.moves:
            assert (
                now[move.layer, move.source] == move.expert
                and (move.layer, move.source) not in written
            )
            assert move.slot // S != move.source // S
        # While slots are written, each expert has another one.
        left = now.clone()
        for layer, slot in written:
            left[layer, slot] = EMPTY
        for layer in left:
            assert set(layer.tolist()) - {EMPTY} == set(range(E))
        now = wave.slots
        # Behind the wave no rank has an expert twice.
        for layer in now.view(L, R, S).tolist():
            for held in layer:
                real = [expert for expert in held if expert != EMPTY]
                assert len(set(real)) == len(real)
    assert same_ranks(now, after, S)


def test_experts_that_stay_on_a_rank_stay_in_their_slot():
    before = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    after = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
    assert torch.equal(in_place(before, after, 2), before)
    assert plan_waves(before, before, 2) == []


def test_two_experts_without_a_free_slot_do_not_change_places():
    before = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    after = torch.tensor([[0, 2, 1, 3]], dtype=torch.int32)
    with pytest.raises(ValueError, match="leave a slot"):
        plan_waves(before, after, 2)


class Interrupt(BaseException):
    """What a signal handler raises."""


class Rank:
    """A rank whose mail, like that on a GPU, is a queue of its own, and whose rounds are behind its
    host.

    `interrupts`: how likely a signal handler raises before or after a call of the mail, or of
    `switch` and `holds`.
    """

    def __init__(
        self,
        number: int,
        group: list[Rank],
        before: Tensor,
        after: Tensor,
        draw: random.Random,
        interrupts: float,
    ) -> None:
        # What stands in for the mail of a rank.
        self.rank = number
        self.size = R
        self.group = group
        self.draw = draw
        self.before = before
        self.signals = random.Random(number)
        self.interrupts = 0.0
        self.board = [[0] * len(Word) for _ in range(R)]
        self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        # Its memory: the staging, and the weights of its slots.
        self.staging = torch.zeros(STAGING, dtype=torch.uint8)
        self.weights = before.view(L, R, S)[:, number, :, None].repeat(1, 1, 5).long()
        self.used = (
            self.switched
        ) = -1  # versions of the tables that rounds use, and that the host has chosen
        # A copy of the board on its way.
        self.snapshot: list[list[int]] | None = None
        self.reading = False
        # The moves under test.
        self.waves = plan_waves(before, in_place(before, after, S), S)
        self.moves = Moves(
            self,
            1,
            S,
            self.waves,
            lambda tag, slot: [self.weights[tag - 1, slot]],
            self.staging,
            Deadlines(30.0, 30.0, lambda: 0),
            self.switch,
            lambda *_: self.may_raise(),
        )
        self.interrupts = interrupts

    def may_raise(self) -> None:
        if self.signals.random() < self.interrupts:
            raise Interrupt

    def switch(self, version: int) -> bool:
        if self.draw.random() < 0.5:
            return False
        self.switched = version
        self.may_raise()
        return True

    def send(self, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.may_raise()
        self.queue.append((ready, run))
        self.may_raise()

    def after_rounds(self) -> None:
        version = self.switched
        self.send(lambda: None, lambda: self.used >= version)

    def put(self, rank: int, name: str, source: Tensor, begin: int) -> None:
        assert name == "moves.staging"
        self.send(lambda: self.group[rank].staging[begin : begin + len(source)].copy_(source))

    def post(self, number: int, value: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.send(
                lambda rank=rank: self.group[rank].board[self.rank].__setitem__(number, value)
            )

    def copy(self, to: Tensor, source: Tensor) -> None:
        def run() -> None:
            at = (to.data_ptr() - self.weights.data_ptr()) // 40
            layer, local = divmod(at, S)
            slot = self.rank * S + local
            assert not any(rank.in_use()[layer, slot] != EMPTY for rank in self.group), (
                "overwritten in use"
            )
            to.copy_(source)

        self.send(run)

    def words(self) -> list[list[int]] | None:
        # A copy of the board is asked for, and is there once the queue has come to it.
        if not self.reading:
            self.snapshot = None
            self.send(lambda: setattr(self, "snapshot", [list(row) for row in self.board]))
            self.reading = True
        elif self.snapshot is not None:
            self.reading = False
            return self.snapshot
        return None

    def after(self, version: int) -> Tensor:
        return self.before if version <= 0 else self.waves[version - 1].slots

    def in_use(self) -> Tensor:
        """The table of this rank's rounds."""
        slots = self.after(self.used).clone()
        if 0 <= self.used < len(self.waves) and self.used < self.moves.last:
            for move in self.waves[self.used].moves:
                slots[move.layer, move.slot] = EMPTY
        return slots

    def act(self) -> None:
        """Something that can happen now."""
        what = self.draw.random()
        # The host takes a step, which a signal handler may end.
        if what < 0.4:
            try:
                self.moves.step()
            except Interrupt:
                assert set(self.moves.waits_for()) <= set(range(R)) and "Moves(version" in repr(
                    self.moves
                )
        # The first thing in the queue happens.
        elif what < 0.8 and self.queue and self.queue[0][0]():
            self.queue.popleft()[1]()
        elif what >= 0.8 and self.used < self.switched:
            # Rounds use the next table, in which all experts are whole.
            self.used += 1
            held = torch.stack([rank.weights for rank in self.group], dim=1).view(L, R * S, 5)
            table = self.in_use().long()
            assert ((held == table[:, :, None]) | (table[:, :, None] == EMPTY)).all(), (
                "in use before it is whole"
            )
            assert all(set(row) >= set(range(E)) for row in table.tolist()), (
                "an expert in no slot in use"
            )


def make_group(seed: int, draw: random.Random, interrupts: float = 0.0) -> list[Rank]:
    group = list[Rank]()
    group += [
        Rank(number, group, table(seed), table(1000 + seed), draw, interrupts)
        for number in range(R)
    ]
    return group


def run(seed: int, weights: list[float], likely: float = 0.0, interrupts: float = 0.0) -> None:
    """Until all is done. Rank 0 cancels from a version on, now and then again in each of the next
    ones.
    """
    draw = random.Random(seed)
    group = make_group(seed, draw, interrupts)
    cancelled = set[int]()
    moves = group[0].moves
    for _ in range(200_000):
        if all(rank.moves.done and not rank.queue for rank in group):
            break
        # Some rank does something, and rank 0 may cancel.
        draw.choices(group, weights)[0].act()
        if (
            likely
            and moves.version >= seed % 3
            and draw.random() < likely
            and moves.version not in cancelled
        ):
            cancelled.add(moves.version)
            moves.cancel()
            likely = 0.5
    # All have ended at the same version.
    assert all(rank.moves.done for rank in group)
    assert {rank.moves.version for rank in group} == {
        min([len(group[0].waves), *(v + 2 for v in cancelled)])
    }
    assert not any(rank.moves.stalls for rank in group)


@seeds(10, 25)
def test_no_order_of_events_breaks_a_rank(seed):
    """Some ranks are slow."""
    draw = random.Random(seed)
    run(seed, [draw.random() ** 3 + 0.01 for _ in range(R)])


@seeds(8, 20)
def test_moves_that_are_cancelled_before_they_begin_wait_for_nobody(seed):
    """Rank 0 may cancel until it begins. With odd seeds rank 3 comes when the others have ended."""
    draw = random.Random(seed)
    late = seed % 2
    group = make_group(seed, draw)
    moves = group[0].moves
    for present in (group[:-1] if late else group, group):
        # Those that are there act until they have ended.
        for _ in range(200_000):
            if all(rank.moves.done and not rank.queue for rank in present):
                break
            draw.choice(present).act()
            if moves.version < 0 and draw.random() < 0.01:
                moves.cancel()
        assert all(rank.moves.done for rank in present)
    # All have moved, or none.
    versions = {rank.moves.version for rank in group}
    assert versions <= {-1, 0} if moves.cancelled else versions == {len(group[0].waves)}
    assert moves.cancelled or not late


@seeds(8, 20)
def test_what_a_signal_handler_interrupts_is_done_later(seed):
    """It raises anywhere in a step, also between a change of state and the word that tells it."""
    run(seed, [1, 1, 1, 1], likely=0.0005 * (seed % 2), interrupts=0.15)


@seeds(12, 40)
def test_cancelled_moves_end_alike(seed):
    """Also on a slow rank, which may miss the first of several calls."""
    run(seed, [1, 1, 1, 0.05], likely=0.0005)
