"""The slabs of one round over several nodes: where they lie, how long they are, and their way to
other nodes and back.

The slab of the own node does not travel. It comes first in `rail.received`; the slabs of the other
nodes follow in the order of the nodes, without a gap, so that the node's dispatch reads all of them
in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from epmoe.exchange.call import Call
from epmoe.exchange.extra import Extra
from epmoe.exchange.handles import Dispatched, RoundShape
from epmoe.exchange.mismatch import Differences, Traits, call_of, differences
from epmoe.native import ops
from epmoe.native.layouts import constant
from epmoe.rail.memory import FailedWords, RailMemory
from epmoe.rail.rail import Transfer

# Two int64 words behind the partial rows for a node. No row is shorter.
_NOTE_BYTES = 2 * 8
# Tells rounds apart in a stamp, beside the length of a slab, which is smaller.
_PRIME = 1_000_003


class Tokens(NamedTuple):
    """Rows of slabs, as the node's dispatch takes them."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    scales: Tensor | None


class Tag(NamedTuple):
    """The fields by which a source describes its call in each row, int32 each: `RailTag` of
    csrc/rail.h.
    """

    D: int
    K: int
    dtype_and_tag: int
    """the number of the dtype in the low byte, and the layer's tag above it"""
    stamp: int
    """the length of a slab, and on CPUs the round, too"""

    @property
    def dtype(self) -> int:
        return self.dtype_and_tag & 0xFF

    @property
    def of_layer(self) -> int:
        return self.dtype_and_tag >> 8 & constant("kMaxTag")


class Mismatch(NamedTuple):
    """What this rank knows of calls on its rail that differ from its own."""

    ranks: list[int]
    """of this rail, numbered in the group; empty where all agree"""
    tags: tuple[int, int, int] | None
    """`tags` of EPMismatchError"""
    differences: Differences


class Reports(NamedTuple):
    """What the notes behind the partial rows say."""

    aborted: list[int]
    """ranks that have aborted the round"""
    differing: list[int]
    """ranks of the group whose calls differ"""


_NO_MISMATCH = Mismatch([], None, {})


class Slabs:
    """The slabs of one round, from dispatch to the sum. Methods return the transfers that are to
    run.

    It takes a call of dispatch that was checked, whose rows have their `extra`, the round's shape,
    and the epochs of the round and of the node's round in which the rows will travel. No rank
    brings more than `most_tokens`. `limit` names what sets `slab_rows`, the most rows of a slab.
    """

    inside: Dispatched  # the round of the node's exchange, once it is open

    def __init__(
        self,
        memory: RailMemory,
        shape: RoundShape,
        call: Call,
        epoch: int,
        inside_epoch: int,
        most_tokens: int | None,
    ) -> None:
        # The call, and the rounds in which its rows travel.
        self.memory = memory
        self.shape = shape
        self.epoch = epoch
        self.inside_epoch = inside_epoch
        self.call_tag = call.tag
        self.D = shape.hidden_size
        dtype = call.x.dtype
        self.wire = memory.payload.dtype_of(dtype)
        runs_ahead = memory.processor.runs_ahead

        # How long slabs are: as all ranks say, or as long as there is room.
        S = memory.rows_per_node
        slab_rows = S
        if most_tokens is not None:
            slab_rows = max(1, min(most_tokens, S))
        self.slab_rows = slab_rows
        self.limit = "capacity.max_rows_per_node" if slab_rows == S else "at_most"

        # What ranks must agree on. On a GPU it is the length of a slab alone, since a replayed call
        # keeps its tag in other rounds. On the CPU it is the round and the length: tags of one
        # round differ if the lengths do.
        stamp = slab_rows
        if not runs_ahead:
            stamp = (epoch * _PRIME + slab_rows) % 2**31
        dtype_and_tag = ops.DTYPES.index(dtype) | call.tag << 8
        self.tag = Tag(call.x.shape[1], shape.top_k, dtype_and_tag, stamp)

        # Rows of notes behind each slab that returns. GPUs do not report an abort to other nodes.
        self.notes = int(not runs_ahead)
        self._back: Transfer | None = None

        # The way out. gloo ends a process that receives more than it has room for, so on CPUs the
        # stride between slabs that arrive has room for the longest one.
        one_each = memory.one_each()
        self.rows_of_nodes = [slab_rows * one for one in one_each]
        self.stride = slab_rows if runs_ahead else S
        room = [self.stride * one for one in one_each]
        sent = memory.views["rail.sent"].flatten(0, 1)[: sum(self.rows_of_nodes)]
        received = self._space()[slab_rows : slab_rows + sum(room)]
        self.out = Transfer(sent, received, self.rows_of_nodes, room)

    def inside_call(self, rows: Tokens, extra: Extra | None) -> Call:
        """Make the call of the node's dispatch, with `rows` or `no_rows` and their `extra`, or with
        `smallest_rows`.
        """
        shape = self.shape
        return Call(
            *rows,
            layout=shape.layout,
            weight_rows=shape.weight_rows,
            tag=self.call_tag,
            aligned=shape.aligned,
            extra=extra,
        )

    @property
    def last(self) -> Transfer:
        """The last transfer that was started."""
        back = self._back
        if back is not None and back.started:
            return back
        return self.out

    @property
    def returning(self) -> bool:
        """Whether partial rows are on their way, or have been."""
        return self._back is not None and bool(self._back.started)

    def pack(self, operands: tuple[Any, ...]) -> None:
        """Copy the tokens of the call, as `Call.operands` gives them, into the slabs."""
        memory = self.memory
        views = memory.views
        ops.rail_pack(
            *operands,
            *memory.tables,
            memory.descriptor,
            self.slab_rows,
            self.tag.stamp,
            self.call_tag,
            views["rail.received"].flatten(),
            views["rail.sent"].flatten(),
            views["rail.slots"],
            views["rail.counts"],
            views["rail.total.needed"],
            views["rail.total.counters"],
            views["rail.total.rows_sent"],
        )

    def mismatch(self) -> Mismatch:
        """Find the calls on this rail that differ from this rank's, once the rows are here. A host
        with a GPU learns of them later, by "rail.noticed".
        """
        memory = self.memory
        rows = self._space()[self.slab_rows :]
        if memory.processor.runs_ahead:
            ops.rail_tags(
                rows.flatten(),
                self.slab_rows,
                memory.descriptor,
                *self.tag,
                memory.views["rail.noticed"],
            )
            return _NO_MISMATCH

        # Any row of a slab has the tag of its source: read the first ones.
        first = rows[: len(memory.others) * self.stride : self.stride]
        begin = memory.slot.tag
        end = begin + 4 * len(self.tag)
        written = first[:, begin:end].view(torch.int32).tolist()
        tags = {}
        for node, ints in zip(memory.others, written, strict=True):
            tag = Tag(*ints)
            if tag != self.tag:
                tags[memory.of_rail(node)] = tag
        if not tags:
            return _NO_MISMATCH

        # The first of them that is in another layer, and what the first one of all has else.
        layers = None
        for rank, tag in tags.items():
            if tag.of_layer != self.call_tag:
                layers = (self.call_tag, rank, tag.of_layer)
                break
        theirs = next(iter(tags.values()))
        return Mismatch(
            list(tags), layers, differences(self._traits(self.tag), self._traits(theirs))
        )

    def _traits(self, tag: Tag) -> Traits:
        """What a tag says, on CPUs."""
        extra = self.memory.may_have_extra
        # A stamp of this round is the length of a slab.
        rows = (tag.stamp - self.epoch * _PRIME) % 2**31
        slab_rows: int | str = rows
        if rows > self.memory.rows_per_node:
            slab_rows = "of another round"
        return call_of(tag.D, tag.K, tag.dtype, extra=extra, at_most=slab_rows)

    def rows(self) -> Tokens:
        """View the tokens of all slabs, for the dispatch of the node. The `extra` of a row lies
        behind it.
        """
        slot = self.memory.slot
        payload = self.memory.payload
        rows = self._slabs()
        x = rows[:, : payload.row_bytes(self.D, self.wire)]
        scales = None
        if payload.scale:
            scales = rows[:, slot.scales : slot.scales + payload.scale_bytes(self.D)]
            scales = scales.view(payload.scale)
        # Ids and weights have 4 bytes each.
        ids = rows[:, slot.ids : slot.ids + 4 * self.shape.top_k]
        weights = rows[:, slot.weights : slot.weights + 4 * self.shape.top_k]
        return Tokens(x.view(self.wire), ids.view(torch.int32), weights.view(torch.float32), scales)

    def no_rows(self) -> Tokens:
        """No tokens of the shape of the round."""
        x, ids, weights, scales = self.rows()
        if scales is not None:
            scales = scales[:0]
        return Tokens(x[:0], ids[:0], weights[:0], scales)

    def smallest_rows(self) -> Tokens:
        """No row of the least D and K that a call may have, without `extra`: a mismatch to the
        ranks of the node, whose rows are larger. With these D and K in the config they see no
        mismatch, and get sums without these rows.
        """
        x, ids, weights, scales = self.no_rows()
        # A block of scales, or a line of 16 bytes.
        D = self.memory.largest_block or 16 // self.wire.itemsize
        if scales is not None:
            scales = scales[:, :1]
        return Tokens(x[:, :D], ids[:, :1], weights[:, :1], scales)

    def back(self, partial: Tensor, aborted: int) -> Transfer:
        """Partial rows [n, D], in the order of `rows`, for the nodes of their tokens.

        On CPUs one more row follows the rows for each node. It names the ranks of this node that
        aborted the round, a mask.
        """
        self.partial = partial
        return self._transfer_back(partial, aborted, 0, [], reads=True)

    def nothing_back(
        self, like: Tensor, aborted: int, mismatch: int, differing: list[int]
    ) -> Transfer:
        """Zeros in place of partial rows, where this rank does not read what the others send back.

        `mismatch` is 0, or 1 + a rank of the group whose call differs. Known `differing` ranks of
        this rail get no row: those that they have room for may be shorter.
        """
        zeros = like.new_zeros(self.slab_rows + sum(self.rows_of_nodes), self.D)
        nodes = [rank // self.memory.ranks_per_node for rank in differing]
        return self._transfer_back(zeros, aborted, mismatch, nodes, reads=False)

    def _transfer_back(
        self, partial: Tensor, aborted: int, mismatch: int, nobody: list[int], *, reads: bool
    ) -> Transfer:
        """Make the transfer back of `partial`, whose first slab stays here. `nobody` are nodes that
        get no row, and `reads` says whether this rank reads the received rows. The notes are those
        of `nothing_back`.
        """
        returned = self.memory.views["rail.returned"]
        one_each = self.memory.one_each()
        slab_bytes = (self.slab_rows + self.notes) * self.D * partial.itemsize

        # Bytes to each node, and from it.
        sends = [slab_bytes * one for one in one_each]
        for node in nobody:
            sends[node] = 0
        slab_room = slab_bytes
        if self.notes and not reads:
            # The others may bring rows of another length: there is room for the longest ones.
            slab_room = returned[0].numel()
        receives = [slab_room * one for one in one_each]

        # What travels, and where what comes lies.
        to_others = partial[self.slab_rows :]
        if self.notes:
            to_others = self._with_notes(to_others, aborted, mismatch, nobody)
        sent = to_others.flatten().view(torch.uint8)
        received = returned.flatten()[: sum(receives)]
        if reads:
            self.returned = received.view(partial.dtype).view(-1, self.D)
        self._back = Transfer(sent, received, sends, receives, returning=True)
        return self._back

    def _with_notes(self, slabs: Tensor, aborted: int, mismatch: int, nobody: list[int]) -> Tensor:
        """Make slabs for the other nodes except `nobody`. Each has one row more, which holds two
        words.
        """
        note = slabs.new_zeros(1, self.D)
        words = torch.tensor((aborted, mismatch)).view(torch.uint8)
        note.view(torch.uint8)[0, :_NOTE_BYTES] = words
        parts = []
        for node, slab in zip(self.memory.others, slabs.split(self.slab_rows), strict=True):
            if node not in nobody:
                parts += [slab, note]
        if not parts:
            return note[:0]
        return torch.cat(parts)

    def reports(self) -> Reports:
        """Read the notes behind the partial rows, which GPUs do not have."""
        aborted = list[int]()
        differing = set[int]()
        if not self.notes:
            return Reports(aborted, [])
        G = self.memory.ranks_per_node
        R = G * self.memory.num_nodes
        last = -1
        for node in self.memory.others:
            last += self.slab_rows + 1
            # A copy, since a row of the buffer may lie at any address.
            note = self.returned[last].view(torch.uint8)[:_NOTE_BYTES].clone()
            mask, mismatch = note.view(torch.int64).tolist()
            aborted += [node * G + local for local in range(G) if mask >> local & 1]
            if 0 < mismatch <= R:
                differing.add(mismatch - 1)
        return Reports(aborted, sorted(differing))

    def sum(self, y: Tensor, failed: FailedWords) -> None:
        """Once the partial rows are here: their sum for each token, in the order of the nodes, into
        y [T, D].
        """
        own = self.partial[: self.slab_rows]
        slots = self.memory.views["rail.slots"]
        ops.rail_sum(
            own, self.returned, slots, self.slab_rows + self.notes, self.memory.node, *failed, y
        )

    def _slabs(self) -> Tensor:
        """View the slots of all slabs, without gaps. Short slabs of three and more nodes have gaps,
        and are copied.
        """
        space = self._space()
        n = self.slab_rows
        if self.stride <= n or len(self.memory.others) == 1:
            return space[: n + sum(self.rows_of_nodes)]
        slabs = [space[:n]]
        begin = n
        for _ in self.memory.others:
            slabs.append(space[begin : begin + n])
            begin += self.stride
        return torch.cat(slabs)

    def _space(self) -> Tensor:
        """uint8 [slots, bytes]: where the slabs of all nodes lie, the own one first."""
        return self.memory.views["rail.received"].flatten(0, 1)
