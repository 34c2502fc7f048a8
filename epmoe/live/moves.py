"""Moves of experts between slots while rounds run: make before break, without a collective.

A version of the tables says which slots are in use; wave w lies between versions w − 1 and w. Each
rank goes its way:

    switch   to version w − 1, in which no token goes to the slots of wave w, and say so: VERSION
    push     weights from slots that stay in use to the staging of the other rank,
             one part after another: PUSHED
    copy     a part from the own staging into the slot,
             once all ranks have said VERSION ≥ w − 1: COPIED
    ready    once all own slots of the wave have their weights: READY.
             When all ranks are, switch to version w

Why no slot is overwritten in use: a rank says VERSION behind its last round with the old tables.
Its combine of that round has waited for the sums of every rank that it sent tokens to, so their
experts have read their weights.

Words are `number << 32 | value`, where `number` counts the calls of `replace`. So old words mean
nothing.

A signal handler may raise between any two lines. So a step changes the state of this rank first, in
one assignment for each event, and then posts the words that lag behind the state. What an exception
kept from its place, the next step posts, or does again. What follows from the state is computed
from it, and kept nowhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from epmoe.config.deadlines import Deadlines
from epmoe.group.errors import EPRefusedError
from epmoe.live.layout import EMPTY, Word
from epmoe.live.mail import Mail
from epmoe.live.waves import SlotMove, Wave

SlotWeights = Callable[[int, int], Sequence[Tensor]]
"""(tag, index of a local slot) → its tensors without gaps, in which weights are read and written in
place
"""

# Calls of `replace`, whose numbers are the upper halves of words, which are signed.
MOST_CALLS = (1 << 31) - 1
# A value of PLAN: this rank takes no part in the call.
REFUSED = 0
# A value of CANCELLED: nobody begins the first wave.
_DROPPED = 0
# A value of READY: this rank uses the last version, and will use no other.
_FINISHED = (1 << 32) - 1
# `_value` returns it for a rank that has left this call behind it: more than any value.
_NEWER = 1 << 32
# `_value` returns it for a word that is not written yet: less than any value.
_UNSAID = -1

Sizes = dict[int, list[tuple[tuple[int, ...], torch.dtype]]]
"""by layer, the shape and dtype of each tensor of a slot"""


class _Part(NamedTuple):
    """Bytes of a move that fit into the staging."""

    wave: int
    move: SlotMove
    begin: int
    end: int
    is_last: bool


@dataclass(eq=False, repr=False)
class Moves:
    """The moves of one call of `replace`, on this rank. `step` does what can be done, and `tell`
    posts words.

    Raises ValueError if `weights` returns tensors that do not fit.

    Attributes:
        version: of the tables that this rank uses; −1 before the first.
        last: the version at which the moves end, as far as this rank knows: `cancel` of any rank
            lowers it.
        count: moves on all ranks, detours included.
        total_bytes: that come to this rank.
        refused_by: ranks that took no part in the call, or were given other arguments; then nothing
            has moved.
        stalls: how often nothing has happened for the deadline of a round.
    """

    mail: Mail
    number: int
    """of the call, from 1 and the same on all ranks"""
    slots_per_rank: int
    waves: list[Wave]
    """what `plan_waves` returns, the same on all ranks"""
    weights: SlotWeights
    """of slots; tensors of slots of one layer have the same sizes"""
    staging: Tensor
    """uint8, in the window of this rank"""
    deadlines: Deadlines
    """`wait_s`: how long a move may take before it counts as stalled"""
    switch: Callable[[int], bool]
    """takes a version, and puts its tables into use: False if it cannot yet"""
    holds: Callable[[int, int, int], None]
    """takes a layer, a local slot, and the expert that it holds from now on; −1 before it is
    overwritten
    """

    def __post_init__(self) -> None:
        self.version = -1
        self.last = len(self.waves)
        self.stalls = 0
        self.refused_by = list[int]()
        self._rank = self.mail.rank
        self._ranks = range(self.mail.size)
        self._S = self.slots_per_rank
        self._done = False
        self._cancels = False
        # The version at which this rank lets the moves end.
        self._cancelled_at: int | None = None
        # Parts in their slots, of those that come to this rank.
        self._copied = 0
        # The number behind the last part that each rank got from here.
        self._pushed = [0] * self.mail.size
        # The value that was posted, by word and reader; None: to all.
        self._told = dict[tuple[Word, int | None], int]()
        # The words of each rank as this rank has read them last.
        self._words = list[list[int]]()
        # The parts that come to each rank.
        sizes = self._sizes()
        self._parts = self._parts_by_rank(sizes)
        self._mine = self._parts[self._rank]
        self.count = sum(len(wave.moves) for wave in self.waves)
        self.total_bytes = _bytes_of(self._mine)
        # Equal on ranks that were given the same.
        self._checksum = self._checksum_of(sizes)
        # When something has happened last, and what.
        self._progress = time.monotonic()
        self._seen = self._state()

    def _parts_by_rank(self, sizes: Sizes) -> list[list[_Part]]:
        """The parts that come to each rank, in the order of waves. Each fits into the staging."""
        parts: list[list[_Part]] = [[] for _ in self._ranks]
        for wave, (moves, _) in enumerate(self.waves, 1):
            for move in moves:
                tensors = sizes[move.layer]
                nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)
                receiver = move.slot // self._S
                parts[receiver] += _parts(wave, move, nbytes, len(self.staging))
        return parts

    def _checksum_of(self, sizes: Sizes) -> int:
        """A checksum of moves, tables and sizes. It is above `REFUSED`."""
        moves = [wave.moves for wave in self.waves]
        checksum = crc32(repr((sizes, moves)).encode())
        for wave in self.waves:
            checksum = crc32(wave.slots.numpy().tobytes(), checksum)
        return max(checksum, REFUSED + 1)

    @property
    def copied_bytes(self) -> int:
        return _bytes_of(self._mine[: self._copied])

    @property
    def copied_experts(self) -> int:
        return sum(part.is_last for part in self._mine[: self._copied])

    @property
    def cancelled(self) -> bool:
        """Whether they end, or have ended, before the last wave that was asked for."""
        return self.last < len(self.waves)

    @property
    def done(self) -> bool:
        """Whether the moves have ended, or all ranks use the tables of the last version, as far as
        this rank knows.
        """
        return self._done

    def cancel(self) -> None:
        """End soon: no rank begins another wave than the next two, and all end with the same
        tables. Waits for no rank.

        Before this rank has begun, nothing moves at all, and no rank waits for ranks that have not
        called `replace`.

        Any thread may call it at any time, also a signal handler. The next `poll` tells the other
        ranks, which see it when they have gone one version further.
        """
        self._cancels = True

    def end(self) -> None:
        """End at once: nothing is read or written any more."""
        if not self._done:
            self.last = self.version
            self._done = True

    def waits_for(self) -> list[int]:
        """The ranks for which the next step of this rank waits, as far as it knows."""
        if self._done or not self._words:
            return []
        if self.version == self.last:
            return self._late(Word.READY, _FINISHED)
        wanted = self.version + 1
        if wanted == 0:
            return self._late(Word.PLAN, REFUSED)
        if self._ready >= wanted:
            return self._late(Word.READY, wanted)
        # Own slots are not ready: others use them, or their weights have not come.
        users = self._late(Word.VERSION, self.version)
        if users:
            return users
        return [self._source_of(self._mine[self._copied])]

    def step(self) -> None:
        """Do what can be done at once, without waiting for a rank or a kernel.

        Raises EPRefusedError if ranks have refused the call, or were given other tables or
        weights of other sizes: nothing has moved then, and these moves have ended.
        """
        if self._done:
            return
        # Cancel once: a second word could be the first that a slow rank sees.
        if self._cancels and self._cancelled_at is None:
            self._cancelled_at = _DROPPED if self.version < 0 else self.version + 2
        self.tell()
        words = self.mail.words()
        if words is not None:
            self._words = words
            self._follow_words()
        if not self._done:
            self._count_stalls()

    def _follow_words(self) -> None:
        """Do what the words of all ranks allow."""
        # End where a rank has cancelled, or at once if nothing has begun.
        cancelled = self._cancelled_versions()
        if _DROPPED in cancelled:
            self.end()
            return
        self._check_plan()
        self.last = min([self.last, *cancelled])
        # Use the next version, fill own slots, and send to others.
        self._use_next_version()
        self._copy()
        self._push()
        self.tell()
        if not self._late(Word.READY, _FINISHED):
            self._done = True

    def _cancelled_versions(self) -> list[int]:
        """The versions at which ranks let the moves end, as far as this one knows."""
        versions = []
        if self._cancelled_at is not None:
            versions.append(self._cancelled_at)
        for rank in self._ranks:
            value = self._value(rank, Word.CANCELLED)
            if _UNSAID < value < _NEWER:
                versions.append(value)
        return versions

    def _count_stalls(self) -> None:
        """Count each deadline that passes while nothing happens."""
        now = time.monotonic()
        state = self._state()
        if state != self._seen:
            self._seen = state
            self._progress = now
        elif now - self._progress > self.deadlines.wait_s():
            self.stalls += 1
            self._progress = now

    def tell(self) -> None:
        """Post the words that lag behind the state."""
        self._post(Word.PLAN, self._checksum)
        # CANCELLED goes before the VERSION at which the moves end.
        if self._cancelled_at is not None:
            self._post(Word.CANCELLED, self._cancelled_at)
        # A version is said behind the rounds that use the one before.
        if self._told.get((Word.VERSION, None), -1) < self.version:
            self.mail.after_rounds()
            self._post(Word.VERSION, self.version)
        for to, pushed in enumerate(self._pushed):
            if pushed:
                self._post(Word.PUSHED, pushed, to)
        if self._copied:
            self._post(Word.COPIED, self._copied)
        ready = _FINISHED if self.version == self.last else self._ready
        if ready:
            self._post(Word.READY, ready)

    @property
    def _ready(self) -> int:
        """The last wave whose weights are all in the slots of this rank. It is at most the wave
        behind the version in use.
        """
        last_complete = self.last
        if self._copied < len(self._mine):
            last_complete = self._mine[self._copied].wave - 1
        return min(self.version + 1, self.last, last_complete)

    def _check_plan(self) -> None:
        """Raise EPRefusedError if ranks have refused the call, or were given other arguments.

        A rank may have gone on to a newer call before this rank has said that it is done. Then it
        has ended this one as cancelled, refused or different, and nobody has begun the first wave.
        """
        if self.version == self.last:
            return
        plans = {rank: self._value(rank, Word.PLAN) for rank in self._ranks}
        others = [rank for rank, plan in plans.items() if plan not in (_UNSAID, self._checksum)]
        if others:
            self.refused_by = others
            self.end()
            have_raised = all(plans[rank] == REFUSED for rank in others)
            raise EPRefusedError(others, have_raised)

    def _use_next_version(self) -> None:
        """Use the next version, once all ranks are ready for it."""
        version = self.version + 1
        if version > self.last:
            return
        # Version 0 needs the calls of all ranks, a later one the weights of its wave.
        if version == 0:
            late = self._late(Word.PLAN, REFUSED)
        else:
            late = self._late(Word.READY, version)
        if not late and self.switch(version):
            self.version = version

    def _copy(self) -> None:
        """Copy the next part from the staging of this rank into its slot."""
        if self._copied == len(self._mine):
            return
        part = self._mine[self._copied]
        if part.wave > self.last:
            return
        # It has come, and nobody sends tokens to the slot.
        is_here = self._value(self._source_of(part), Word.PUSHED) > self._copied
        if not is_here or self._late(Word.VERSION, part.wave - 1):
            return
        layer, expert, slot, _ = part.move
        local = slot % self._S
        if part.begin == 0:
            self.holds(layer, local, EMPTY)
        begin = 0
        for piece in self._pieces(layer, local, part):
            self.mail.copy(piece, self.staging[begin : begin + len(piece)])
            begin += len(piece)
        if part.is_last:
            self.holds(layer, local, expert)
        self._copied += 1

    def _push(self) -> None:
        """Send each rank the part that its staging is free for, if it comes from here."""
        # The wave behind the version in use: its slots of this rank stay in use.
        newest_wave = min(self.version + 1, self.last)
        for to, parts in enumerate(self._parts):
            # The next part is due once the rank has copied the one before.
            number = max(self._value(to, Word.COPIED), 0)
            if number >= len(parts) or number < self._pushed[to]:
                continue
            part = parts[number]
            if self._source_of(part) != self._rank or part.wave > newest_wave:
                continue
            begin = 0
            for piece in self._pieces(part.move.layer, part.move.source % self._S, part):
                self.mail.put(to, "moves.staging", piece, begin)
                begin += len(piece)
            self._pushed[to] = number + 1

    def _source_of(self, part: _Part) -> int:
        """The rank that sends a part."""
        return part.move.source // self._S

    def _state(self) -> tuple[object, ...]:
        """Values of which one changes whenever something happens. Words from COUNTED on are the
        balancer's.
        """
        words = [row[: Word.COUNTED] for row in self._words]
        return self.version, self._copied, *self._pushed, words

    def _pieces(self, layer: int, local: int, part: _Part) -> Iterator[Tensor]:
        """The bytes of a slot's tensors that a part covers, tensor by tensor."""
        offset = 0
        for tensor in self._tensors(layer, local):
            flat = tensor.view(-1).view(torch.uint8)
            begin = max(part.begin - offset, 0)
            end = min(part.end - offset, len(flat))
            if begin < end:
                yield flat[begin:end]
            offset += len(flat)

    def _tensors(self, layer: int, local: int) -> list[Tensor]:
        """The weights of a slot, with their dimensions in the order of memory."""
        tensors = [tensor.detach() for tensor in self.weights(layer + 1, local)]
        return [_in_order_of_memory(tensor) for tensor in tensors]

    def _sizes(self) -> Sizes:
        """The shapes, in the order of memory, and dtypes of a slot's tensors, for each layer whose
        experts move. Raises ValueError if slots of a layer differ.
        """
        # Slots of this rank that give or take an expert.
        slots = set[tuple[int, int]]()
        for wave in self.waves:
            for move in wave.moves:
                slots |= {(move.layer, move.slot), (move.layer, move.source)}
        mine = {(layer, slot % self._S) for layer, slot in slots if slot // self._S == self._rank}
        # The first slot of each layer, too: a rank needs sizes to know the parts of others.
        first = {(layer, 0) for layer, _ in slots}
        device = self.staging.device
        sizes: Sizes = {}
        for layer, local in sorted(mine | first):
            tensors = self._tensors(layer, local)
            found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            fits = all(tensor.is_contiguous() and tensor.device == device for tensor in tensors)
            if not fits or sizes.setdefault(layer, found) != found:
                raise ValueError(
                    f"`weights` must return tensors on {device}, without gaps, and of the same "
                    f"sizes for all slots of a layer, got {found} for slot {local} of tag "
                    f"{layer + 1}"
                )
        return sizes

    def _post(self, word: Word, value: int, to: int | None = None) -> None:
        """Post a word to one rank, or to all, unless it has this value already."""
        if self._told.get((word, to)) == value:
            return
        readers = self._ranks if to is None else [to]
        self.mail.post(word, self.number << 32 | value, readers)
        self._told[word, to] = value

    def _value(self, rank: int, word: Word) -> int:
        """The value of a rank's word in this call: `_UNSAID`, a value, or `_NEWER`."""
        number, value = divmod(self._words[rank][word], 1 << 32)
        if number > self.number:
            return _NEWER
        if number < self.number:
            return _UNSAID
        return value

    def _late(self, word: Word, least: int) -> list[int]:
        """The ranks whose word is below `least`."""
        return [rank for rank in self._ranks if self._value(rank, word) < least]

    def __repr__(self) -> str:
        state = "moving"
        waits = self.waits_for()
        if self.done:
            state = "done"
        elif waits:
            state = f"waits for rank(s) {waits}"
        return (
            f"Moves(version {max(self.version, 0)} of {self.last}, {self.total_bytes:,} bytes, "
            f"{state})"
        )


def _in_order_of_memory(tensor: Tensor) -> Tensor:
    """A view whose dimensions have falling strides."""
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    return tensor.permute(dims)


def _parts(wave: int, move: SlotMove, nbytes: int, staging: int) -> list[_Part]:
    """Cut a move of `nbytes` into parts that fit into the staging."""
    parts = []
    for begin in range(0, nbytes, staging):
        end = min(begin + staging, nbytes)
        parts.append(_Part(wave, move, begin, end, is_last=end == nbytes))
    return parts


def _bytes_of(parts: Sequence[_Part]) -> int:
    return sum(part.end - part.begin for part in parts)
