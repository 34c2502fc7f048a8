"""Moves of experts between slots while rounds go on: make before break, without a collective.

A version of the tables says which slots are in use; wave w lies between versions w − 1 and w. Each rank goes its way:

    switch   to version w − 1, in which no token goes to the slots of wave w, and say so: VERSION
    push     weights from slots that stay in use to the staging of the other rank, one part after another: PUSHED
    copy     a part from the own staging into the slot, once all ranks have said VERSION ≥ w − 1: COPIED
    ready    once all own slots of the wave have their weights: READY. When all ranks are, switch to version w

Why no slot is overwritten in use: a rank says VERSION behind its last round with the old tables. Its combine of that
round has waited for the sums of every rank that it sent tokens to, so their experts have read their weights.

Words are `number << 32 | value`, where `number` counts the calls of `replace`. So old words mean nothing.

A signal handler may raise between any two lines. So a step changes the state of this rank first, in one assignment for
each event, and then posts the words that lag behind the state. What an exception kept from its place, the next step
posts, or does again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from epmoe.exchange.mail import Mail
from epmoe.exchange.memory import Buffer
from epmoe.exchange.moves_plan import EMPTY, SlotMove, Wave
from epmoe.group.errors import EPRefusedError

Weights = Callable[[int, int], Sequence[Tensor]]
"""(tag, index of a local slot) → its tensors without gaps, in which weights are read and written in place"""

# Words, by number. The last three are of epmoe/balancer.py.
PLAN, VERSION, READY, COPIED, PUSHED, CANCELLED, COUNTED, PLANNED, LAST_PLAN = range(9)
REFUSED = 0  # of PLAN: this rank takes no part in the call
_DROPPED = 0  # of CANCELLED: nobody begins the first wave
_FINISHED = (1 << 32) - 1  # of READY: this rank uses the last version, and goes on to no other
_NEWER = 1 << 32  # more than any value
MOST_CALLS = (1 << 31) - 1  # of `replace`, since words are signed
_MOVES_WORDS = slice(PLAN, COUNTED)


class _Part(NamedTuple):
    """Bytes of a move that fit into the staging."""

    wave: int
    move: SlotMove
    begin: int
    end: int
    is_last: bool


class _Size(NamedTuple):
    shape: tuple[int, ...]
    """with dimensions in the order of memory"""
    dtype: torch.dtype
    nbytes: int


class Moves:
    """The moves of one call of `replace`, on this rank. `tell` and `step` take them further.

    Args:
        mail: of this rank.
        number: of the call, from 1 and the same on all ranks.
        rank: this one.
        size: R
        slots_per_rank: S
        waves: as of `plan_waves`, the same on all ranks.
        weights: of slots; tensors of slots of one layer have the same sizes.
        staging: of each rank, in its window, and the bytes of this rank's.
        timeout_s: how long a move may take before it counts as stalled.
        switch: takes a version, and puts its tables into use: False if it cannot yet.
        holds: takes a layer, a local slot, and the expert that it holds from now on; −1 before it is overwritten.

    Attributes:
        version: of the tables that this rank uses; −1 before the first.
        count: moves on all ranks, detours included.
        total_bytes: that come to this rank.
        copied_bytes: that have come to this rank so far.
        copied_experts: likewise.
        refused_by: ranks that took no part in the call, or were given other arguments; then nothing has moved.
        stalls: how often nothing has happened for `timeout_s`.

    Raises:
        ValueError: `weights` returns tensors that do not fit.
    """

    def __init__(
        self,
        mail: Mail,
        number: int,
        rank: int,
        size: int,
        slots_per_rank: int,
        waves: list[Wave],
        weights: Weights,
        staging: tuple[Buffer, Tensor],
        timeout_s: float,
        switch: Callable[[int], bool],
        holds: Callable[[int, int, int], None],
    ) -> None:
        self._mail, self._number, self._rank, self._ranks = mail, number, rank, range(size)
        self._S, self._weights, self._staging = slots_per_rank, weights, staging
        self._timeout_s, self._switch, self._holds = timeout_s, switch, holds
        self.version, self.copied_bytes, self.copied_experts, self.stalls = -1, 0, 0, 0
        self._last = self._waves = len(waves)
        self._done = self._finished = self._ended = self._cancels = False
        self._cancelled_at: int | None = None
        self.refused_by = list[int]()
        self._pushed, self._told = [0] * size, dict[tuple[int, int | None], int]()
        self._copied, self._ready = 0, 0
        sizes = self._sizes(waves)
        parts: list[list[_Part]] = [[] for _ in self._ranks]
        for number_of_wave, wave in enumerate(waves, 1):
            for move in wave.moves:
                nbytes = sum(size.nbytes for size in sizes[move.layer])
                parts[move.slot // slots_per_rank] += _parts(number_of_wave, move, nbytes, staging[0].nbytes)
        self._parts, self._words = parts, list[list[int]]()
        self.count = sum(len(wave.moves) for wave in waves)
        self.total_bytes = sum(part.end - part.begin for part in parts[rank])
        self._checksum = crc32(repr((sizes, [wave.moves for wave in waves])).encode())
        for wave in waves:
            self._checksum = crc32(wave.slots.numpy().tobytes(), self._checksum)
        self._checksum = max(self._checksum, REFUSED + 1)
        self._progress, self._seen = time.monotonic(), self._state()

    @property
    def cancelled(self) -> bool:
        """Whether they end, or have ended, before the last wave that was asked for."""
        return self._ended or self._last < self._waves

    @property
    def done(self) -> bool:
        """Whether all ranks use the tables of the last version, as far as this one knows, or the moves have ended."""
        return self._done

    def cancel(self) -> None:
        """End soon: no rank begins another wave than the next two, and all end with the same tables. Waits for no rank.

        Before this rank has begun, nothing moves at all, and no rank waits for ranks that have not called `replace`.

        Any thread may call it at any time, also a signal handler. The next `poll` tells the other ranks, which see it
        when they have gone one version further.
        """
        self._cancels = True

    def end(self) -> None:
        """Here and now: nothing is read or written any more."""
        self._ended = self._ended or not self._done
        self._done = True

    def waits_for(self) -> list[int]:
        """Other ranks that the next step of this one needs, as far as it knows."""
        if self._done or not self._words:
            return []
        if self._finished:
            return [rank for rank in self._ranks if self._value(rank, READY) < _FINISHED]
        wanted = self.version + 1
        if wanted == 0:
            return [rank for rank in self._ranks if self._value(rank, PLAN) < 0]
        mine = self._parts[self._rank]
        if self._ready >= wanted or self._copied == len(mine):
            return [rank for rank in self._ranks if self._value(rank, READY) < wanted]
        late = [rank for rank in self._ranks if self._value(rank, VERSION) < self.version]
        return late or [mine[self._copied].move.source // self._S]

    def step(self) -> None:
        """Do what can be done now. It waits for no rank and for no kernel.

        Raises EPRefusedError where ranks have refused the call, or were given other tables or weights of other sizes:
        nothing has moved then, and these moves have ended.
        """
        if self._done:
            return
        if self._cancels and self._cancelled_at is None:  # a second word could be the first that a slow rank sees
            self._cancelled_at = _DROPPED if self.version < 0 else self.version + 2
        self.tell()
        if (words := self._mail.words()) is not None:
            self._words = words
            if _DROPPED in (cancelled := [*self._cancelled()]):
                self.end()
                return
            self._check_plan()
            self._last = min([self._last, *cancelled])
            self._go_on()
            self._copy()
            self._count_ready()
            self._push()
            self._finish()
            self.tell()
            self._done = self._done or all(self._value(rank, READY) >= _FINISHED for rank in self._ranks)
        now = time.monotonic()
        if (state := self._state()) != self._seen:
            self._seen, self._progress = state, now
        elif now - self._progress > self._timeout_s:
            self.stalls += 1
            self._progress = now

    def tell(self) -> None:
        """Post the words that lag behind the state."""
        self._post(PLAN, self._checksum)
        if self._cancelled_at is not None:
            self._post(CANCELLED, self._cancelled_at)  # before the VERSION at which it ends
        if self._told.get((VERSION, None), -1) < self.version:
            self._mail.after_rounds()
            self._post(VERSION, self.version)
        for to, pushed in enumerate(self._pushed):
            if pushed:
                self._post(PUSHED, pushed, to)
        if self._copied:
            self._post(COPIED, self._copied)
        if ready := _FINISHED if self._finished else self._ready:
            self._post(READY, ready)

    def _check_plan(self) -> None:
        """A rank whose word is of a newer call has ended this one, before this rank has said that it is done: it was
        cancelled, refused or not the same, and nobody has begun the first wave."""
        if self._finished:
            return
        others = [rank for rank in self._ranks if self._value(rank, PLAN) not in (-1, self._checksum)]
        if others:
            self.refused_by, self._ended, self._done = others, True, True
            raise EPRefusedError(others, all(self._value(rank, PLAN) == REFUSED for rank in others))

    def _cancelled(self) -> Iterator[int]:
        if self._cancelled_at is not None:
            yield self._cancelled_at
        yield from (value for rank in self._ranks if 0 <= (value := self._value(rank, CANCELLED)) < _NEWER)

    def _go_on(self) -> None:
        """The next version, once all ranks are ready for it."""
        version = self.version + 1
        if version > self._last:
            return
        word, least = (PLAN, 0) if version == 0 else (READY, version)
        if all(self._value(rank, word) >= least for rank in self._ranks) and self._switch(version):
            self.version = version
            self._count_ready()

    def _finish(self) -> None:
        self._finished = self._finished or self.version == self._last

    def _copy(self) -> None:
        """The next part from the staging of this rank into its slot."""
        mine = self._parts[self._rank]
        if self._copied == len(mine) or (part := mine[self._copied]).wave > self._last:
            return
        dropped = all(self._value(rank, VERSION) >= part.wave - 1 for rank in self._ranks)
        if not dropped or self._value(part.move.source // self._S, PUSHED) <= self._copied:
            return
        layer, expert, slot, _ = part.move
        local = slot % self._S
        if part.begin == 0:
            self._holds(layer, local, EMPTY)
        begin = 0
        for piece in self._pieces(layer, local, part):
            self._mail.copy(piece, self._staging[1][begin : begin + len(piece)])
            begin += len(piece)
        if part.is_last:
            self._holds(layer, local, expert)
        nbytes, experts = self.copied_bytes + part.end - part.begin, self.copied_experts + part.is_last
        self._copied, self.copied_bytes, self.copied_experts = self._copied + 1, nbytes, experts

    def _count_ready(self) -> None:
        mine = self._parts[self._rank]
        while self._ready < min(self.version + 1, self._last) and not (
            self._copied < len(mine) and mine[self._copied].wave <= self._ready + 1
        ):
            self._ready += 1

    def _push(self) -> None:
        """To each rank the part that its staging is free for, if it comes from here."""
        for to, parts in enumerate(self._parts):
            number = max(self._value(to, COPIED), 0)
            if number >= len(parts) or number < self._pushed[to]:
                continue
            part = parts[number]
            if part.move.source // self._S != self._rank or part.wave > min(self.version + 1, self._last):
                continue
            offset = self._staging[0].offset
            for piece in self._pieces(part.move.layer, part.move.source % self._S, part):
                self._mail.put(to, offset, piece)
                offset += len(piece)
            self._pushed[to] = number + 1

    def _state(self) -> tuple[object, ...]:
        """What changes when this rank or another one gets further."""
        words = [row[_MOVES_WORDS] for row in self._words]
        return self.version, self._copied, self._ready, self._finished, *self._pushed, words

    def _pieces(self, layer: int, local: int, part: _Part) -> Iterator[Tensor]:
        """The bytes of a slot from `part.begin` to `part.end`."""
        at = 0
        for tensor in self._tensors(layer, local):
            flat = tensor.view(-1).view(torch.uint8)
            begin, end = max(part.begin - at, 0), min(part.end - at, len(flat))
            if begin < end:
                yield flat[begin:end]
            at += len(flat)

    def _tensors(self, layer: int, local: int) -> list[Tensor]:
        """With their dimensions in the order of memory."""
        tensors = [tensor.detach() for tensor in self._weights(layer + 1, local)]
        return [t.permute(sorted(range(t.dim()), key=t.stride().__getitem__, reverse=True)) for t in tensors]

    def _sizes(self, waves: list[Wave]) -> dict[int, list[_Size]]:
        """By layer whose experts move, what its slots have."""
        slots = {(move.layer, slot) for wave in waves for move in wave.moves for slot in (move.slot, move.source)}
        mine = {(layer, slot % self._S) for layer, slot in slots if slot // self._S == self._rank}
        device, sizes = self._staging[1].device, dict[int, list[_Size]]()
        for layer, local in sorted(mine | {(layer, 0) for layer, _ in slots}):
            tensors = self._tensors(layer, local)
            found = [_Size(tuple(t.shape), t.dtype, t.nbytes) for t in tensors]
            fits = all(t.is_contiguous() and t.device == device for t in tensors)
            if not fits or sizes.setdefault(layer, found) != found:
                raise ValueError(
                    f"`weights` must return tensors on {device}, without gaps, and of the same sizes for all slots of "
                    f"a layer, got {found} for slot {local} of tag {layer + 1}"
                )
        return sizes

    def _post(self, word: int, value: int, to: int | None = None) -> None:
        """To one rank, or to all, unless it is there."""
        if self._told.get((word, to)) != value:
            self._mail.post(word, self._number << 32 | value, self._ranks if to is None else [to])
            self._told[word, to] = value

    def _value(self, rank: int, word: int) -> int:
        """−1: not written yet. `_NEWER`: the rank has left this call behind it."""
        number, value = divmod(self._words[rank][word], 1 << 32)
        return value if number == self._number else _NEWER if number > self._number else -1

    def __repr__(self) -> str:
        state = "done" if self.done else f"waits for rank(s) {waits}" if (waits := self.waits_for()) else "moving"
        return f"Moves(version {max(self.version, 0)} of {self._last}, {self.total_bytes:,} bytes, {state})"


def _parts(wave: int, move: SlotMove, nbytes: int, staging: int) -> list[_Part]:
    starts = range(0, nbytes, staging)
    return [_Part(wave, move, begin, min(begin + staging, nbytes), begin == starts[-1]) for begin in starts]
