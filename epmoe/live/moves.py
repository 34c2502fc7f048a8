"""Moves of experts between slots while rounds run: make before break, without a collective.

"Make before break": an expert has its weights in the new slot before the old slot is given up.

Experts move in waves (waves.py). Each version of the tables says which slots are in use. Wave w
leads from version w − 1 to version w. Ranks tell one another by words how far they are, and each
rank takes these steps for wave w as soon as the words allow it:

    switch   to version w − 1, in which no token goes to the slots that wave w overwrites, and
             then write VERSION = w − 1
    push     weights to the staging of the rank that gets the expert, part by part, from a slot
             that stays in use, and then write PUSHED
    copy     a part from this rank's staging into the slot, once all ranks have written
             VERSION ≥ w − 1, and then write COPIED
    ready    once all slots of this rank that the wave fills have their weights: write READY = w.
             Once all ranks have written READY ≥ w, switch to version w

Why no slot is overwritten while somebody uses it: a rank writes VERSION after its last round with
the old tables. The combine of that round has waited for the sums of every rank that got tokens. So
the experts on these ranks have read their weights by then.

A word is `number << 32 | value`, where `number` counts the calls of `replace`. So the words of
earlier calls can be told from those of the present call.

A signal handler may raise between any two lines. So a step first changes the state of this rank, in
one assignment for each event. After that it posts each word that is behind the state. If an
exception comes in between, the next step posts the word, or repeats the copy. Whatever follows from
the state is computed each time, and is kept nowhere.
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
"""A function of a tag and the index of a local slot. It returns the tensors of the slot, which have
no gaps in memory. Moves read and write weights in these tensors.
"""

# The most calls of `replace`: their numbers are the upper halves of signed words of 64 bits.
MOST_CALLS = (1 << 31) - 1
# A value of PLAN: `replace` has raised on this rank, so no expert moves.
REFUSED = 0
# A value of CANCELLED: no rank may begin the first wave.
_DROPPED = 0
# A value of READY: this rank uses the last version of the tables, and the moves have ended here.
_FINISHED = (1 << 32) - 1
# `_value` returns this for a word of a later call of `replace`. It is more than any value.
_NEWER = 1 << 32
# `_value` returns this for a word that is not written yet. It is less than any value.
_UNWRITTEN = -1

Sizes = dict[int, list[tuple[tuple[int, ...], torch.dtype]]]
"""By layer, the shape and dtype of each tensor of a slot."""


class _Part(NamedTuple):
    """A part of an expert's weights that fits into the staging."""

    wave: int
    move: SlotMove
    begin: int
    """the first byte of the part, in all tensors of the slot one after another"""
    end: int
    """the byte after the last one"""
    is_last: bool
    """whether the move ends with this part"""


@dataclass(eq=False, repr=False)
class Moves:
    """The moves of one call of `replace`, as this rank carries them out. `LiveExperts` calls `step`
    between rounds, which takes the moves as far as it can without waiting.

    The constructor raises ValueError if `weights` returns tensors that do not fit.

    Attributes:
        version: the version of the tables that this rank uses; −1 before the first.
        last: the version at which the moves end, as far as this rank knows. A call of `cancel` on
            any rank makes it smaller.
        count: the number of moves on all ranks, detours included.
        total_bytes: the bytes of weights that come to this rank.
        refused_by: the ranks on which `replace` has raised, or which were given other arguments. If
            there is one, nothing has moved.
        stalls: how often nothing has happened for as long as the deadline of a round.
    """

    mail: Mail
    number: int
    """the number of the call of `replace`, which counts from 1 and is the same on all ranks"""
    slots_per_rank: int
    waves: list[Wave]
    """what `plan_waves` returns, the same on all ranks"""
    weights: SlotWeights
    """the tensors of slots, which have the same sizes in all slots of a layer"""
    staging: Tensor
    """uint8, in the window of this rank"""
    deadlines: Deadlines
    """`wait_s`: how long a move may take before it counts as stalled"""
    switch: Callable[[int], bool]
    """takes a version, puts its tables into use, and returns True. It returns False if the tables
    are not made yet, or a round is open.
    """
    holds: Callable[[int, int, int], None]
    """takes a layer, a local slot, and the expert whose weights the slot has from now on. The
    expert is −1 just before the slot is overwritten.
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
        # Whether `cancel` was called on this rank; the next step then sets `_cancelled_at`.
        self._cancels = False
        # The version at which this rank wants the moves to end.
        self._cancelled_at: int | None = None
        # How many parts this rank has copied into their slots.
        self._copied = 0
        # By rank: how many of the parts that come to it were sent once this rank had sent its last
        # one. Several ranks may send parts to the same rank.
        self._pushed = [0] * self.mail.size
        # The value that was posted last, by word and reader. The reader None stands for all ranks.
        self._posted = dict[tuple[Word, int | None], int]()
        # The words of each rank as this rank has read them last.
        self._words = list[list[int]]()
        # The parts that come to each rank, and those that come to this one.
        sizes = self._sizes()
        self._parts = self._parts_by_rank(sizes)
        self._own_parts = self._parts[self._rank]
        self.count = sum(len(wave.moves) for wave in self.waves)
        self.total_bytes = _bytes_of(self._own_parts)
        # Ranks compare this checksum by PLAN. It is equal if they were given the same arguments.
        self._checksum = self._checksum_of(sizes)
        # When something has happened last, and the state since then, to count stalls.
        self._last_progress_s = time.monotonic()
        self._last_state = self._state()

    def _parts_by_rank(self, sizes: Sizes) -> list[list[_Part]]:
        """The parts that come to each rank, in the order in which they are sent.

        All ranks compute the same lists, so the number of a part is enough to name it in a word.
        """
        parts: list[list[_Part]] = [[] for _ in self._ranks]
        for number, wave in enumerate(self.waves, 1):
            for move in wave.moves:
                tensors = sizes[move.layer]
                nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors)
                receiver = move.slot // self._S
                parts[receiver] += _parts(number, move, nbytes, len(self.staging))
        return parts

    def _checksum_of(self, sizes: Sizes) -> int:
        """A checksum of the moves, the tables and the sizes of tensors.

        It is never `REFUSED`, which has another meaning in the same word.
        """
        moves = [wave.moves for wave in self.waves]
        checksum = crc32(repr((sizes, moves)).encode())
        for wave in self.waves:
            checksum = crc32(wave.slots.numpy().tobytes(), checksum)
        return max(checksum, REFUSED + 1)

    @property
    def copied_bytes(self) -> int:
        """The bytes of weights that have come to slots of this rank so far."""
        return _bytes_of(self._own_parts[: self._copied])

    @property
    def copied_experts(self) -> int:
        """The experts that have come to slots of this rank so far, with all their weights."""
        return sum(part.is_last for part in self._own_parts[: self._copied])

    @property
    def cancelled(self) -> bool:
        """Whether the moves end, or have ended, before the last wave that was asked for."""
        return self.last < len(self.waves)

    @property
    def done(self) -> bool:
        """Whether this rank has nothing more to do for these moves: all ranks use the last version
        of the tables, as far as this rank knows, or the moves were ended before that.
        """
        return self._done

    def cancel(self) -> None:
        """Let the moves end soon. It waits for no rank.

        No rank begins a wave after the next two, and all ranks end with the same tables. If this
        rank has not begun yet, nothing moves at all, and no rank waits any more for ranks that have
        not called `replace`.

        Any thread may call it at any time, and a signal handler, too. The next `poll` tells the
        other ranks. They learn of it before they go more than one version further.
        """
        self._cancels = True

    def end(self) -> None:
        """End the moves on this rank at once: it reads and writes nothing any more."""
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
        # Slots of this rank still lack weights. Either some ranks may still send tokens to these
        # slots, or the next part has not come.
        users = self._late(Word.VERSION, self.version)
        if users:
            return users
        return [self._source_of(self._own_parts[self._copied])]

    def step(self) -> None:
        """Do what can be done at once, without waiting for a rank or a kernel.

        Raises EPRefusedError if ranks have refused the call, or were given other tables or
        weights of other sizes: nothing has moved then, and these moves have ended.
        """
        if self._done:
            return
        # After `cancel`: name the version at which the moves end. It never changes afterwards,
        # since a slow rank might see only the second of two words.
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
        """Do what the words of all ranks allow, which `step` has just read."""
        # If a rank has cancelled, end at its version, or at once if nothing has begun.
        cancelled = self._cancelled_versions()
        if _DROPPED in cancelled:
            self.end()
            return
        self._check_plan()
        self.last = min([self.last, *cancelled])
        # Use the next version, fill slots of this rank, and send weights to other ranks.
        self._use_next_version()
        self._copy()
        self._push()
        self.tell()
        if not self._late(Word.READY, _FINISHED):
            self._done = True

    def _cancelled_versions(self) -> list[int]:
        """The versions at which ranks that have called `cancel` want the moves to end, as far as
        this rank knows.
        """
        versions = []
        if self._cancelled_at is not None:
            versions.append(self._cancelled_at)
        for rank in self._ranks:
            value = self._value(rank, Word.CANCELLED)
            is_written = _UNWRITTEN < value < _NEWER
            if is_written:
                versions.append(value)
        return versions

    def _count_stalls(self) -> None:
        """Count a stall each time that nothing has happened for the deadline of a round."""
        now = time.monotonic()
        state = self._state()
        if state != self._last_state:
            self._last_state = state
            self._last_progress_s = now
        elif now - self._last_progress_s > self.deadlines.wait_s():
            self.stalls += 1
            self._last_progress_s = now

    def tell(self) -> None:
        """Post each word whose value is behind the state of this rank."""
        self._post(Word.PLAN, self._checksum)
        # CANCELLED goes before VERSION: whoever sees the version at which the moves end must know
        # that they end there.
        if self._cancelled_at is not None:
            self._post(Word.CANCELLED, self._cancelled_at)
        # VERSION is posted after all rounds with the tables of the version before.
        if self._posted.get((Word.VERSION, None), -1) < self.version:
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
        """The last wave whose weights are all in slots of this rank.

        It is at most the wave that follows the version in use, also if nothing of later waves comes
        to this rank.
        """
        last_complete = self.last
        if self._copied < len(self._own_parts):
            last_complete = self._own_parts[self._copied].wave - 1
        return min(self.version + 1, self.last, last_complete)

    def _check_plan(self) -> None:
        """Raise EPRefusedError if ranks have refused the call of `replace`, or were given other
        arguments. These moves then end on this rank.

        The PLAN of a rank may also be that of a newer call. A rank calls `replace` again before
        this rank has finished only if the moves have ended there as cancelled, refused or
        different. In each of these cases no rank has begun the first wave.
        """
        # At the last version this rank has finished, and other ranks may call `replace` again.
        if self.version == self.last:
            return
        plans = {rank: self._value(rank, Word.PLAN) for rank in self._ranks}
        agreeing_plans = (_UNWRITTEN, self._checksum)
        refused_by = [rank for rank, plan in plans.items() if plan not in agreeing_plans]
        if refused_by:
            self.refused_by = refused_by
            self.end()
            # If `replace` has raised on all of these ranks, the error says so.
            have_raised = all(plans[rank] == REFUSED for rank in refused_by)
            raise EPRefusedError(refused_by, have_raised)

    def _use_next_version(self) -> None:
        """Use the next version, once all ranks are ready for it."""
        version = self.version + 1
        if version > self.last:
            return
        # Version 0 needs all ranks to have called `replace`. A later version needs all weights of
        # its wave to be in their slots.
        if version == 0:
            late = self._late(Word.PLAN, REFUSED)
        else:
            late = self._late(Word.READY, version)
        if not late and self.switch(version):
            self.version = version

    def _copy(self) -> None:
        """Copy the next part from the staging of this rank into its slot, if that may happen now.

        Two things must be so. The part has arrived. And no rank sends tokens to the slot any more.
        """
        if self._copied == len(self._own_parts):
            return
        part = self._own_parts[self._copied]
        if part.wave > self.last:
            return
        has_arrived = self._value(self._source_of(part), Word.PUSHED) > self._copied
        if not has_arrived or self._late(Word.VERSION, part.wave - 1):
            return
        # From the first part on, the slot has no whole expert.
        layer = part.move.layer
        local = part.move.slot % self._S
        if part.begin == 0:
            self.holds(layer, local, EMPTY)
        # Copy the part, which may cover several tensors of the slot.
        begin = 0
        for piece in self._pieces(layer, local, part):
            self.mail.copy(piece, self.staging[begin : begin + len(piece)])
            begin += len(piece)
        # With the last part the slot has the expert. The count comes last: after an exception
        # before it, the next step copies the part again.
        if part.is_last:
            self.holds(layer, local, part.move.expert)
        self._copied += 1

    def _push(self) -> None:
        """Send each rank its next part, if its staging is free and the part comes from this rank.

        The staging of a rank has room for one part, so a rank must have copied the part before.
        """
        # Weights of later waves may not be in the slots of this rank yet.
        newest_wave = min(self.version + 1, self.last)
        for to, parts in enumerate(self._parts):
            # The rank has copied this many parts, so the part of this number is the next one.
            number = max(self._value(to, Word.COPIED), 0)
            was_sent = number < self._pushed[to]
            if number >= len(parts) or was_sent:
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
        """All that this rank knows of the moves. It changes whenever something happens, so two
        states that are equal mean that nothing has happened in between.
        """
        # Words from COUNTED on belong to the balancer.
        words = [row[: Word.COUNTED] for row in self._words]
        return self.version, self._copied, *self._pushed, words

    def _pieces(self, layer: int, local: int, part: _Part) -> Iterator[Tensor]:
        """The bytes of a slot that a part covers, as uint8 views, one for each tensor that it
        touches.
        """
        # `offset` is the place of a tensor's first byte in all tensors of the slot.
        offset = 0
        for tensor in self._tensors(layer, local):
            flat = tensor.view(-1).view(torch.uint8)
            begin = max(part.begin - offset, 0)
            end = min(part.end - offset, len(flat))
            if begin < end:
                yield flat[begin:end]
            offset += len(flat)

    def _tensors(self, layer: int, local: int) -> list[Tensor]:
        """The weights of a slot, as views whose dimensions are in the order of memory. So a
        transposed tensor without gaps counts as contiguous, too.
        """
        # Tags of layers begin at 1.
        tensors = [tensor.detach() for tensor in self.weights(layer + 1, local)]
        return [_in_order_of_memory(tensor) for tensor in tensors]

    def _sizes(self) -> Sizes:
        """The shapes and dtypes of a slot's tensors, for each layer whose experts move. Dimensions
        are in the order of memory.

        Raises ValueError if tensors have gaps, are on another device, or differ between slots of a
        layer.
        """
        # Check the slots of this rank that give or take an expert.
        slots = set[tuple[int, int]]()
        for wave in self.waves:
            for move in wave.moves:
                slots |= {(move.layer, move.slot), (move.layer, move.source)}
        own_slots = set[tuple[int, int]]()
        for layer, slot in slots:
            if slot // self._S == self._rank:
                own_slots.add((layer, slot % self._S))
        # Check the first slot of each layer, too. A rank needs the sizes of all layers, in order to
        # know the parts that come to other ranks, also where none of its own slots takes part.
        first_slots = {(layer, 0) for layer, _ in slots}
        device = self.staging.device
        sizes: Sizes = {}
        for layer, local in sorted(own_slots | first_slots):
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
        """Post a word to rank `to`, or to all ranks if `to` is None. If the last post of this word
        had the same value, do nothing.
        """
        if self._posted.get((word, to)) == value:
            return
        readers = self._ranks if to is None else [to]
        self.mail.post(word, self.number << 32 | value, readers)
        self._posted[word, to] = value

    def _value(self, rank: int, word: Word) -> int:
        """The value that a rank has written for this call of `replace`.

        The value is `_UNWRITTEN` if the rank has only written the word of an earlier call, and
        `_NEWER` if it has already written the word of a later call.
        """
        number, value = divmod(self._words[rank][word], 1 << 32)
        if number > self.number:
            return _NEWER
        if number < self.number:
            return _UNWRITTEN
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
    """View a tensor with its dimensions in the order of memory, the largest stride first."""
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
    """The bytes of several parts together."""
    return sum(part.end - part.begin for part in parts)
