"""The slabs of one round over several nodes: where they lie, how long they are, and their way to other nodes and back.

The slab of the own node does not travel. It comes first in `rail.received`; the slabs of the other nodes follow in the
order of the nodes, without a gap, so that the node's dispatch reads all of them in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epmoe.exchange.handles import Dispatched, Layout
from epmoe.native import ops
from epmoe.native.formats import SCALE_BLOCK, WIRE_FORMATS
from epmoe.rail.gloo import Transfer

if TYPE_CHECKING:
    from epmoe.config.placement import Placement
    from epmoe.rail.exchange import TwoLevels

_TABLES = ("rail.table.copies", "rail.table.num_copies", "rail.table.node_of", "rail.table.node_local")
_TAG_INTS = 4  # `RailTag` in csrc/rail.h
_NOTE_BYTES = 2 * 8  # no row is shorter
_PRIME = 1_000_003


def fill_tables(exchange: TwoLevels, placement: Placement) -> None:
    """Tell `exchange` what `rail_pack` knows besides a call: the whole placement, and the shape of slots and nodes."""
    tables = placement.copies_table(), placement.num_copies(), *placement.node_ids(exchange.ranks_per_node)
    exchange.rail_tables = [exchange.views[name] for name in _TABLES]
    for table, values in zip(exchange.rail_tables, tables, strict=True):
        table.copy_(values)
    shape = *tables[0].shape, exchange.rank, exchange.node, exchange.num_nodes
    exchange.rail_descriptor = torch.tensor(
        [*shape, WIRE_FORMATS[exchange.config.exchange.payload].number, *exchange.slot]
    )


class Slabs:
    """The slabs of one round, from dispatch to the sum.

    Args:
        exchange: of this rank.
        like: (K, D, dtype) of the call.
        slots: n, the most rows of a slab.
        layout: of the call.
        weight_rows: `apply_router_weight_on_input` of the call.
        epoch: of the round.
        tag: of the call.

    Attributes:
        inside: the round of the node's exchange, once it is open.
        inside_epoch: of that round.
    """

    inside: Dispatched

    def __init__(
        self,
        exchange: TwoLevels,
        like: tuple[int, int, torch.dtype],
        slots: int,
        layout: Layout,
        weight_rows: bool,
        epoch: int,
        tag: int,
    ) -> None:
        self.exchange, self.slots, self.layout, self.weight_rows = exchange, slots, layout, weight_rows
        self.K, self.D, dtype = like
        self.format = WIRE_FORMATS[exchange.config.exchange.payload]
        self.wire = self.format.dtype_of(dtype)
        on_cpu = exchange.device.type == "cpu"
        # A padded call on a GPU may be replayed in other rounds, so its tag has the length of a slab there. On the CPU
        # it has both: in the same round it differs if the lengths do.
        stamp = epoch if exchange.exact else (epoch * _PRIME + slots) % 2**31 if on_cpu else slots
        self.call_tag = tag
        self.tag = [self.D, self.K, ops.DTYPES.index(dtype) | tag << 8, stamp]  # `RailTag` in csrc/rail.h
        # Of each transfer of the round, in this order. `Rail.start` fills them, so they are right at any interrupt.
        self._lengths_started, self._rows_started, self._back_started = (
            list[Transfer](),
            list[Transfer](),
            list[Transfer](),
        )
        self.inside_epoch = exchange.inside.rounds.count + 1
        self.others = exchange.others
        self.notes = int(on_cpu)  # GPUs do not tell other nodes of a round that was given up
        self.own_rows = slots
        self.sent_rows = self.received_rows = [slots * (node in self.others) for node in range(exchange.num_nodes)]
        # Slots between received slabs. gloo ends a process that receives more than it has room for.
        self.stride = exchange.config.rows_per_node if on_cpu and not exchange.exact else slots

    @property
    def transfer(self) -> Transfer:
        """The last one that was started."""
        return (self._back_started or self._rows_started or self._lengths_started)[0]

    @property
    def returning(self) -> bool:
        """Whether the transfer of the partial rows is started."""
        return bool(self._back_started)

    def pack(
        self, x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor | None, num_tokens: Tensor | None, num_rows: int
    ) -> None:
        """Copy the tokens into the slabs, with the arguments of the operator dispatch."""
        exchange, views = self.exchange, self.exchange.views
        ops.rail_pack(
            x, ids, weights, scales, num_tokens, num_rows, *exchange.rail_tables, exchange.rail_descriptor, self.slots,
            exchange.exact, self.tag[-1], self.call_tag, views["rail.received"].flatten(), views["rail.sent"].flatten(),
            views["rail.slots"], views["rail.counts"], views["rail.total.needed"], views["rail.total.counters"],
            views["rail.total.rows_sent"],
        )  # fmt: skip

    def start(self) -> None:
        """Start the transfer to the other nodes; with exact splits, first that of the lengths.

        A second call starts what an exception has kept from it.
        """
        if not self.exchange.exact:
            return self._start_rows()
        if self._lengths_started:
            return None
        counts = self.exchange.views["rail.counts"]
        tags = counts.new_tensor([self.tag] * len(self.others))
        lengths = torch.cat([counts[self.others].unsqueeze(1), tags], 1)
        self.lengths = torch.empty_like(lengths)
        one_each = [int(node in self.others) for node in range(len(counts))]
        self.sent_lengths = lengths  # which must live until it is sent
        self.exchange.start(lengths, self.lengths, one_each, one_each, self._lengths_started)
        return None

    def finish(self) -> None:
        """With exact splits: wait for the lengths, and start the transfer of the rows. It may be called again."""
        if not self._rows_started:
            self.exchange.wait(self.transfer)
            S = self.exchange.config.rows_per_node
            counts, lengths = self.exchange.to_host(self.exchange.views["rail.counts"], self.lengths)
            self.own_rows = counts[self.exchange.node]
            self.sent_rows = [counts[node] * (node in self.others) for node in range(len(counts))]
            self.received_rows, self.received_tags = [0] * len(counts), []
            for node, (length, *tag) in zip(self.others, lengths, strict=True):
                possible = 0 <= length <= S  # otherwise it is a mismatch
                self.received_rows[node] = length if possible else S
                self.received_tags.append(tag if possible else [-1, *tag[1:]])
            self._start_rows()

    def differing(self) -> tuple[list[int], tuple[int, int, int] | None]:
        """Once the rows are here: the ranks of this rail whose call differs from this rank's, and `tags` of
        EPMismatchError."""
        exchange, rows = self.exchange, self._space()[self.own_rows :]
        if exchange.exact:
            tags = self.received_tags
        elif exchange.device.type == "cuda":  # the host hears of it later
            ops.rail_tags(rows.flatten(), self.slots, exchange.rail_descriptor, *self.tag, exchange.differing)
            return [], None
        else:
            first = rows[: len(self.others) * self.stride : self.stride]
            tags = first[:, exchange.slot.tag : exchange.slot.tag + 4 * _TAG_INTS].view(torch.int32).tolist()
        G, local = exchange.ranks_per_node, exchange.inside.rank
        differing = {
            node * G + local: tag[2] >> 8 for node, tag in zip(self.others, tags, strict=True) if tag != self.tag
        }
        other = next(((self.call_tag, rank, tag) for rank, tag in differing.items() if tag != self.call_tag), None)
        return list(differing), other

    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x, ids, weights and scales of all slabs, for the dispatch of the node: views of the slabs."""
        slot, rows = self.exchange.slot, self._slabs()
        ids, weights = (
            rows[:, begin : begin + 4 * self.K].view(dtype)
            for begin, dtype in ((slot.ids, torch.int32), (slot.weights, torch.float32))
        )
        x = rows[:, : self.format.row_bytes(self.D, self.wire)].view(self.wire)
        scales = None
        if self.format.scale:
            scales = rows[:, slot.scales : slot.scales + self.format.scale_bytes(self.D)].view(self.format.scale)
        return x, ids, weights, scales

    def no_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """No row of the call's shape, for the dispatch of the node."""
        x, ids, weights, scales = self.rows()
        return x[:0], ids[:0], weights[:0], None if scales is None else scales[:0]

    def smallest_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """No row of the least D and K that a call may have: a mismatch to the ranks of the node, whose rows are larger.

        With that very D and K in the config the ranks of the node hear of nothing, and get sums without these rows.
        """
        x, ids, weights, scales = self.no_rows()
        exchange = self.exchange.config.exchange
        D = SCALE_BLOCK if "fp8" in (exchange.payload, exchange.combine_payload) else 16 // self.wire.itemsize
        return x[:, :D], ids[:, :1], weights[:, :1], None if scales is None else scales[:, :1]

    def send_back(self, partial: Tensor, aborted: int) -> None:
        """Start the transfer of partial rows to the nodes of their tokens.

        On CPUs one more row follows the rows for each node. It says which ranks of this node have given the round up.

        Args:
            partial: [n, D], in the order of `rows`; it must live until the transfer has ended.
            aborted: these ranks, as a mask.
        """
        self.partial = partial
        self._start_back(partial, (aborted, 0), [], True)

    def send_nothing_back(self, like: Tensor, aborted: int, mismatch: int, differing: list[int]) -> None:
        """As `send_back`, with zeros, where this rank does not read what the others send back.

        Args:
            like: of the dtype and device of the partial rows.
            aborted: as of `send_back`.
            mismatch: 0, or 1 + a rank of the group whose call differs: others may not know yet.
            differing: ranks of this rail whose calls differ, as far as this rank knows. They get no row: the rows
                that they have room for may be shorter.
        """
        back = self.own_rows + sum(self.received_rows)
        zeros = like.new_zeros(back, self.D)
        self._start_back(
            zeros, (aborted, mismatch), [rank // self.exchange.ranks_per_node for rank in differing], False
        )

    def _start_back(self, partial: Tensor, note: tuple[int, int], differing: list[int], reads: bool) -> None:
        row_bytes, notes = self.D * partial.itemsize, self.notes
        returned = self.exchange.views["rail.returned"]
        receives = [(n + notes) * row_bytes * (node in self.others) for node, n in enumerate(self.sent_rows)]
        if notes and not reads:  # the others may bring rows of another length
            receives = [returned[0].numel() * (node in self.others) for node in range(len(receives))]
        sends = [
            (n + notes) * row_bytes * (node in self.others and node not in differing)
            for node, n in enumerate(self.received_rows)
        ]
        to_others = partial[self.own_rows :]
        if notes:
            last = partial.new_zeros(1, self.D)
            last.view(torch.uint8)[0, :_NOTE_BYTES] = torch.tensor(note).view(torch.uint8)
            parts = zip(self.others, to_others.split([self.received_rows[node] for node in self.others]), strict=True)
            rows = [part for node, slab in parts if node not in differing for part in (slab, last)]
            to_others = torch.cat(rows) if rows else last[:0]
        self.sent_back = to_others  # which must live until it is sent
        received = returned.flatten()[: sum(receives)]
        if reads:
            self.returned = received.view(partial.dtype).view(-1, self.D)
        self.exchange.start(
            to_others.flatten().view(torch.uint8), received, sends, receives, self._back_started, returning=True
        )

    def told(self) -> tuple[list[int], list[int]]:
        """Once the partial rows are here: the ranks of other nodes that have given the round up, and the ranks of the
        group whose calls differ, as other nodes say."""
        aborted, differing = list[int](), list[int]()
        end, G, R = 0, self.exchange.ranks_per_node, len(self.exchange.global_ranks)
        for node in self.others if self.notes else ():
            end += self.sent_rows[node] + 1
            mask, rank = self.returned[end - 1].view(torch.uint8)[:_NOTE_BYTES].clone().view(torch.int64).tolist()
            aborted += [node * G + local for local in range(G) if mask >> local & 1]
            differing += [rank - 1] if 0 < rank <= R else []
        return aborted, sorted(set(differing))

    def sum(self, y: Tensor) -> None:
        """Once the partial rows are here: their sum for each token, in the order of the nodes, into y [T, D]."""
        views, exchange = self.exchange.views, self.exchange
        counts = views["rail.counts"] + self.notes if exchange.exact else None
        own = self.partial[: self.own_rows]
        ops.rail_sum(
            own, self.returned, views["rail.slots"], counts, self.slots + self.notes, exchange.node,
            *exchange.failed_on_device, y,
        )  # fmt: skip

    def _start_rows(self) -> None:
        if self._rows_started:
            return
        room = self.received_rows
        if self.stride > self.slots:
            room = [self.stride * (node in self.others) for node in range(len(room))]
        sent = self.exchange.views["rail.sent"].flatten(0, 1)[: sum(self.sent_rows)]
        received = self._space()[self.own_rows : self.own_rows + sum(room)]
        self.exchange.start(sent, received, self.sent_rows, room, self._rows_started)

    def _slabs(self) -> Tensor:
        """The slots of all slabs, without gaps. Short slabs of three and more nodes have gaps, and are copied."""
        space = self._space()
        if self.stride <= self.slots or len(self.others) == 1:
            return space[: self.own_rows + sum(self.received_rows)]
        begins = range(self.own_rows, self.own_rows + len(self.others) * self.stride, self.stride)
        return torch.cat([space[: self.own_rows], *(space[begin : begin + self.slots] for begin in begins)])

    def _space(self) -> Tensor:
        return self.exchange.views["rail.received"].flatten(0, 1)
