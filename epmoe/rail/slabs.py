"""The slabs of one round over several nodes: where they lie, how long they are, and their way to
other nodes and back.

The slab of the own node does not travel. It comes first in `rail.received`; the slabs of the other
nodes follow in the order of the nodes, without a gap, so that the node's dispatch reads all of them
in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epmoe.exchange.call import Call
from epmoe.exchange.extra import Extra
from epmoe.exchange.handles import Dispatched, RoundShape
from epmoe.exchange.mismatch import Differences, Traits, call_of, differences
from epmoe.native import ops
from epmoe.native.layouts import constant
from epmoe.rail.memory import RailMemory
from epmoe.rail.rail import Transfer

Tokens = tuple[Tensor, Tensor, Tensor, Tensor | None]  # x, ids, weights and scales

_TAG_INTS = 4  # `RailTag` in csrc/rail.h
_NOTE_BYTES = 2 * 8  # no row is shorter
_PRIME = 1_000_003


class Slabs:
    """The slabs of one round, from dispatch to the sum. It hands back the transfers that are to
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
        self.memory = memory
        self.shape = shape
        self.epoch = epoch
        self.inside_epoch = inside_epoch
        S = memory.rows_per_node
        self.slab_rows = slab_rows = S if most_tokens is None else max(1, min(most_tokens, S))
        self.limit = "capacity.max_rows_per_node" if slab_rows == S else "at_most"
        self.call_tag = call.tag
        self.D = shape.hidden_size
        dtype = call.x.dtype
        self.wire = memory.payload.dtype_of(dtype)
        on_cpu = memory.device.type == "cpu"
        # A call on a GPU may be replayed in other rounds, so its tag has the length of a slab
        # there. On the CPU it has both: in the same round it differs if the lengths do.
        stamp = slab_rows if not on_cpu else (epoch * _PRIME + slab_rows) % 2**31
        dtype_and_tag = ops.DTYPES.index(dtype) | call.tag << 8
        self.tag = [call.x.shape[1], shape.top_k, dtype_and_tag, stamp]  # `RailTag` in csrc/rail.h
        self._back: Transfer | None = None
        self.notes = int(on_cpu)  # GPUs do not report an abort to other nodes
        self.rows_of_nodes = [slab_rows * one for one in memory.one_each()]
        # Slots between received slabs. gloo ends a process that receives more than it has room for.
        self.stride = memory.rows_per_node if on_cpu else slab_rows
        room = [self.stride * one for one in memory.one_each()]
        sent = memory.views["rail.sent"].flatten(0, 1)[: sum(self.rows_of_nodes)]
        received = self._space()[slab_rows : slab_rows + sum(room)]
        self.out = Transfer(sent, received, self.rows_of_nodes, room)

    def inside_call(self, rows: Tokens, extra: Extra | None) -> Call:
        """The call of the node's dispatch, with `rows` or `no_rows` and their `extra`, or with
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
        return self._back if self._back is not None and self._back.started else self.out

    @property
    def returning(self) -> bool:
        return self._back is not None and bool(self._back.started)

    def pack(self, operands: tuple[Any, ...]) -> None:
        """Copy the tokens of the call, as `Call.operands` gives them, into the slabs."""
        memory = self.memory
        views = self.memory.views
        ops.rail_pack(
            *operands,
            *memory.tables,
            memory.descriptor,
            self.slab_rows,
            self.tag[-1],
            self.call_tag,
            views["rail.received"].flatten(),
            views["rail.sent"].flatten(),
            views["rail.slots"],
            views["rail.counts"],
            views["rail.total.needed"],
            views["rail.total.counters"],
            views["rail.total.rows_sent"],
        )

    def differing(self) -> tuple[list[int], tuple[int, int, int] | None, Differences]:
        """Once the rows are here: the ranks of this rail whose call differs from this rank's, and
        `tags` and `differences` of EPMismatchError.
        """
        memory = self.memory
        rows = self._space()[self.slab_rows :]
        if memory.device.type == "cuda":  # the host learns of it later
            ops.rail_tags(
                rows.flatten(),
                self.slab_rows,
                memory.descriptor,
                *self.tag,
                memory.views["rail.noticed"],
            )
            return [], None, {}
        first = rows[: len(self.memory.others) * self.stride : self.stride]
        tags = (
            first[:, memory.slot.tag : memory.slot.tag + 4 * _TAG_INTS].view(torch.int32).tolist()
        )
        tagged = zip(self.memory.others, tags, strict=True)
        differing = {memory.of_rail(node): tag for node, tag in tagged if tag != self.tag}
        calls = ((rank, tag[2] >> 8 & constant("kMaxTag")) for rank, tag in differing.items())
        other = next(
            ((self.call_tag, rank, tag) for rank, tag in calls if tag != self.call_tag), None
        )
        by_what = next(
            (differences(self._traits(self.tag), self._traits(tag)) for tag in differing.values()),
            {},
        )
        return list(differing), other, by_what

    def _traits(self, tag: list[int]) -> Traits:
        """What a `RailTag` says, on CPUs."""
        D, K, dtype, stamp = tag
        extra = self.memory.may_have_extra
        rows = (stamp - self.epoch * _PRIME) % 2**31
        slab_rows = rows if rows <= self.memory.rows_per_node else "of another round"
        return call_of(D, K, dtype & 0xFF, extra=extra, at_most=slab_rows)

    def rows(self) -> Tokens:
        """x, ids, weights and scales of all slabs, for the dispatch of the node: views of the
        slabs, in which the `extra` of a row lies behind it.
        """
        slot = self.memory.slot
        rows = self._slabs()
        ids, weights = (
            rows[:, begin : begin + 4 * self.shape.top_k].view(dtype)
            for begin, dtype in ((slot.ids, torch.int32), (slot.weights, torch.float32))
        )
        payload = self.memory.payload
        x = rows[:, : payload.row_bytes(self.D, self.wire)].view(self.wire)
        scales = None
        if payload.scale:
            scales = rows[:, slot.scales : slot.scales + payload.scale_bytes(self.D)].view(
                payload.scale
            )
        return x, ids, weights, scales

    def no_rows(self) -> Tokens:
        x, ids, weights, scales = self.rows()
        return x[:0], ids[:0], weights[:0], None if scales is None else scales[:0]

    def smallest_rows(self) -> Tokens:
        """No row of the least D and K that a call may have, without `extra`: a mismatch to the
        ranks of the node, whose rows are larger. With these D and K in the config they see no
        mismatch, and get sums without these rows.
        """
        x, ids, weights, scales = self.no_rows()
        D = self.memory.largest_block or 16 // self.wire.itemsize
        return x[:, :D], ids[:, :1], weights[:, :1], None if scales is None else scales[:, :1]

    def back(self, partial: Tensor, aborted: int) -> Transfer:
        """Partial rows [n, D], in the order of `rows`, for the nodes of their tokens.

        On CPUs one more row follows the rows for each node. It names the ranks of this node that
        aborted the round, a mask.
        """
        self.partial = partial
        return self._transfer_back(partial, (aborted, 0), [], True)

    def nothing_back(
        self, like: Tensor, aborted: int, mismatch: int, differing: list[int]
    ) -> Transfer:
        """Zeros in place of partial rows, where this rank does not read what the others send back.

        `mismatch` is 0, or 1 + a rank of the group whose call differs. Known `differing` ranks of
        this rail get no row: those that they have room for may be shorter.
        """
        zeros = like.new_zeros(self.slab_rows + sum(self.rows_of_nodes), self.D)
        nodes = [rank // self.memory.ranks_per_node for rank in differing]
        return self._transfer_back(zeros, (aborted, mismatch), nodes, False)

    def _transfer_back(
        self, partial: Tensor, note: tuple[int, int], differing: list[int], reads: bool
    ) -> Transfer:
        row_bytes = self.D * partial.itemsize
        notes = self.notes
        returned = self.memory.views["rail.returned"]
        one_each = self.memory.one_each()
        slab_bytes = (self.slab_rows + notes) * row_bytes
        sends = [slab_bytes * one * (node not in differing) for node, one in enumerate(one_each)]
        # Where nobody reads, the others may bring rows of another length.
        receives = [
            (slab_bytes if reads or not notes else returned[0].numel()) * one for one in one_each
        ]
        to_others = partial[self.slab_rows :]
        if notes:
            last = partial.new_zeros(1, self.D)
            last.view(torch.uint8)[0, :_NOTE_BYTES] = torch.tensor(note).view(torch.uint8)
            parts = zip(self.memory.others, to_others.split(self.slab_rows), strict=True)
            rows = [part for node, slab in parts if node not in differing for part in (slab, last)]
            to_others = torch.cat(rows) if rows else last[:0]
        received = returned.flatten()[: sum(receives)]
        if reads:
            self.returned = received.view(partial.dtype).view(-1, self.D)
        self._back = Transfer(
            to_others.flatten().view(torch.uint8), received, sends, receives, returning=True
        )
        return self._back

    def reports(self) -> tuple[list[int], list[int]]:
        """From the partial rows: the ranks that have aborted the round, and ranks of the group
        whose calls differ.
        """
        aborted = list[int]()
        differing = list[int]()
        end = 0
        G = self.memory.ranks_per_node
        for node in self.memory.others if self.notes else ():
            end += self.slab_rows + 1
            mask, rank = (
                self.returned[end - 1]
                .view(torch.uint8)[:_NOTE_BYTES]
                .clone()
                .view(torch.int64)
                .tolist()
            )
            aborted += [node * G + local for local in range(G) if mask >> local & 1]
            differing += [rank - 1] if 0 < rank <= G * self.memory.num_nodes else []
        return aborted, sorted(set(differing))

    def sum(self, y: Tensor, failed: tuple[Tensor | None, Tensor | None, Tensor | None]) -> None:
        """Once the partial rows are here: their sum for each token, in the order of the nodes, into
        y [T, D].

        `failed` are words of GPUs: `missed` and `latched`, which make it zeros where they are not
        0, and `noticed`.
        """
        own = self.partial[: self.slab_rows]
        slots = self.memory.views["rail.slots"]
        ops.rail_sum(
            own, self.returned, slots, self.slab_rows + self.notes, self.memory.node, *failed, y
        )

    def _slabs(self) -> Tensor:
        """The slots of all slabs, without gaps. Short slabs of three and more nodes have gaps, and
        are copied.
        """
        space = self._space()
        if self.stride <= self.slab_rows or len(self.memory.others) == 1:
            return space[: self.slab_rows + sum(self.rows_of_nodes)]
        begins = range(
            self.slab_rows, self.slab_rows + len(self.memory.others) * self.stride, self.stride
        )
        return torch.cat(
            [space[: self.slab_rows], *(space[begin : begin + self.slab_rows] for begin in begins)]
        )

    def _space(self) -> Tensor:
        return self.memory.views["rail.received"].flatten(0, 1)
