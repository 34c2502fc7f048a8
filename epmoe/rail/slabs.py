"""The slabs of one round over several nodes: where they lie, how long they are, and their way to
other nodes and back.

A slab has the rows that travel from one rank to the rank of the same local index on another node.
The slab for a rank's own node does not travel. It comes first in the buffer `rail.received`. The
slabs from the other nodes follow in the order of the nodes, without a gap where that is possible,
so that the dispatch inside the node reads all slabs in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epmoe.exchange.call import Call, Operands
from epmoe.exchange.handles import Dispatched, RoundShape
from epmoe.exchange.mismatch import Differences, Traits, call_of, differences
from epmoe.native import ops
from epmoe.native.layouts import constant
from epmoe.rail.memory import FailedWords, RailMemory
from epmoe.rail.rail import Transfer

# A report has two int64 words: the mask of ranks that aborted, and the rank that differs. It is
# written into a row behind the partial rows for a node. No row is shorter than a report.
_REPORT_BYTES = 2 * 8
# A stamp is the round times this prime, plus the length of a slab. A slab has fewer rows than the
# prime, so stamps of neighbouring rounds differ whatever the lengths are.
_PRIME = 1_000_003


class Tag(NamedTuple):
    """What a source rank writes into each row about its call, so that receivers can compare calls.
    Every field is an int32. It is the `RailTag` of csrc/rail.h.
    """

    D: int
    K: int
    dtype_and_tag: int
    """the number of the dtype in the low byte, and the layer's tag above it"""
    stamp: int
    """on GPUs the length of a slab in rows; on CPUs the length and the number of the round"""

    @property
    def dtype(self) -> int:
        """The index of the dtype in `ops.DTYPES`."""
        return self.dtype_and_tag & 0xFF

    @property
    def layer(self) -> int:
        """The tag of the layer."""
        return self.dtype_and_tag >> 8 & constant("kMaxTag")


class Mismatch(NamedTuple):
    """The calls of other ranks of this rail that differ from the call of this rank."""

    ranks: list[int]
    """the ranks with these calls, numbered in the group; empty where all calls agree"""
    tags: tuple[int, int, int] | None
    """the `tags` of the EPMismatchError that will be raised"""
    differences: Differences
    """the `differences` of this error"""


class Reports(NamedTuple):
    """What the other nodes report in the row behind their partial rows."""

    aborted: list[int]
    """ranks of the group that have aborted the round"""
    differing: list[int]
    """ranks of the group whose calls differ from those of other ranks"""


_NO_MISMATCH = Mismatch([], None, {})


class Slabs:
    """The slabs of one round, from dispatch to the final sum.

    This class prepares transfers and reads what they brought. It starts none: methods return
    transfers, and the exchange gives them to the network.

    `call` is the call of dispatch, which was checked, and whose rows already have their `extra`.
    `shape` is the shape of the round, and `epoch` its number. `node_epoch` is the number of the
    round inside the node in which the received rows will travel on. No rank brings more than
    `most_tokens` tokens; None means that nobody has said a limit.

    The attribute `slab_rows` is the most rows that a slab can have in this round. `limit` is the
    name of the setting that decides it, for errors.
    """

    node_dispatched: Dispatched  # the round inside the node, once that round is open

    def __init__(
        self,
        memory: RailMemory,
        shape: RoundShape,
        call: Call,
        epoch: int,
        node_epoch: int,
        most_tokens: int | None,
    ) -> None:
        # Keep the call, and the numbers of the two rounds in which its rows travel.
        self.memory = memory
        self.shape = shape
        self.epoch = epoch
        self.node_epoch = node_epoch
        self.call_tag = call.tag
        self.D = shape.hidden_size
        dtype = call.x.dtype
        self.wire = memory.payload.dtype_of(dtype)
        runs_ahead = memory.processor.runs_ahead

        # Choose the length of slabs. Where all ranks have said how many tokens they bring at most,
        # slabs need no more rows. Otherwise slabs have all the rows for which there is room.
        S = memory.rows_per_node
        slab_rows = S
        if most_tokens is not None:
            slab_rows = max(1, min(most_tokens, S))
        self.slab_rows = slab_rows
        self.limit = "capacity.max_rows_per_node" if slab_rows == S else "at_most"

        # Write what ranks must agree on. On a GPU the stamp is the length of a slab alone: the
        # replay of a CUDA graph writes the stamp of its capture, in whichever round it runs. On
        # the CPU the stamp holds the number of the round, too, so rows of another round are
        # noticed.
        stamp = slab_rows
        if not runs_ahead:
            stamp = (epoch * _PRIME + slab_rows) % 2**31
        dtype_and_tag = ops.DTYPES.index(dtype) | call.tag << 8
        self.tag = Tag(call.x.shape[1], shape.top_k, dtype_and_tag, stamp)

        # On CPUs one row with a report follows each slab of partial rows that goes back. GPUs do
        # not report an abort to other nodes, so they have no such row.
        self.report_rows = int(not runs_ahead)
        self._back: Transfer | None = None

        # Make the transfer of dispatch. gloo ends a process that receives more rows than it has
        # room for. A rank whose call differs may send longer slabs, so on CPUs every slab that
        # arrives has room for the longest one.
        other_nodes = memory.other_nodes_mask()
        self.rows_of_nodes = [slab_rows * is_other for is_other in other_nodes]
        self.stride = slab_rows if runs_ahead else S
        room = [self.stride * is_other for is_other in other_nodes]
        sent = memory.views["rail.sent"].flatten(0, 1)[: sum(self.rows_of_nodes)]
        received = self._space()[slab_rows : slab_rows + sum(room)]
        self.out = Transfer(sent, received, self.rows_of_nodes, room)

    @property
    def last(self) -> Transfer:
        """The transfer back once it was started; until then the transfer of dispatch."""
        back = self._back
        if back is not None and back.started:
            return back
        return self.out

    @property
    def returning(self) -> bool:
        """Whether partial rows are on their way, or have been."""
        return self._back is not None and bool(self._back.started)

    def pack(self, operands: Operands) -> None:
        """Copy the tokens of the call into the slabs, one slab for each node.

        `operands` are the tensors of the call, as `Call.operands` returns them.
        """
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
        """Find the calls on this rail that differ from the call of this rank.

        The caller has waited for the rows. On a GPU a kernel compares the tags instead, and the
        host learns of a difference later, from the word "rail.noticed"; so this method finds
        nothing there.
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

        # Every row of a slab has the tag of its source. Read the tag in the first row of each slab.
        first = rows[: len(memory.others) * self.stride : self.stride]
        begin = memory.slot.tag
        end = begin + 4 * len(self.tag)
        written = first[:, begin:end].view(torch.int32).tolist()
        tags = {}
        for node, ints in zip(memory.others, written, strict=True):
            tag = Tag(*ints)
            if tag != self.tag:
                tags[memory.rank_on(node)] = tag
        if not tags:
            return _NO_MISMATCH

        # An error names the layers of the first rank that is in another layer.
        layers = None
        for rank, tag in tags.items():
            if tag.layer != self.call_tag:
                layers = (self.call_tag, rank, tag.layer)
                break
        # It names all other differences to the first rank whose call differs at all.
        first_differing = next(iter(tags.values()))
        mine = self._traits(self.tag)
        theirs = self._traits(first_differing)
        return Mismatch(list(tags), layers, differences(mine, theirs))

    def _traits(self, tag: Tag) -> Traits:
        """Translate a tag into the traits that an error names. It is for tags of CPUs."""
        extra = self.memory.may_have_extra
        # Without the part of this round, the stamp is the length of a slab. The stamp of another
        # round becomes a number that is larger than any slab.
        rows = (tag.stamp - self.epoch * _PRIME) % 2**31
        slab_rows: int | str = rows
        if rows > self.memory.rows_per_node:
            slab_rows = "of another round"
        return call_of(tag.D, tag.K, tag.dtype, extra=extra, at_most=slab_rows)

    def call(self) -> Call:
        """Make the call of the dispatch inside the node: the tokens of all slabs, as views.

        The extra bytes of a row lie behind its elements, and are not a tensor of their own.
        """
        shape = self.shape
        slot = self.memory.slot
        payload = self.memory.payload
        rows = self._slabs()
        x = rows[:, : payload.row_bytes(self.D, self.wire)]
        scales = None
        if payload.scale:
            scales = rows[:, slot.scales : slot.scales + payload.scale_bytes(self.D)]
            scales = scales.view(payload.scale)
        # Ids and weights have 4 bytes each.
        ids = rows[:, slot.ids : slot.ids + 4 * shape.top_k]
        weights = rows[:, slot.weights : slot.weights + 4 * shape.top_k]
        return Call(
            x=x.view(self.wire),
            ids=ids.view(torch.int32),
            weights=weights.view(torch.float32),
            scales=scales,
            layout=shape.layout,
            weight_rows=shape.weight_rows,
            tag=self.call_tag,
            aligned=shape.aligned,
            extra=shape.extra,
        )

    def call_without_tokens(self) -> Call:
        """Make a call that has the shape of the round and no tokens."""
        call = self.call()
        scales = None if call.scales is None else call.scales[:0]
        return call._replace(
            x=call.x[:0], ids=call.ids[:0], weights=call.weights[:0], scales=scales
        )

    def smallest_call(self) -> Call:
        """Make a call that has no tokens, and the smallest hidden size D and the fewest experts per
        token K that a call may have. It brings no extra bytes.

        A rank that has found a mismatch on its rail calls so: the other ranks of its node then
        notice that its call differs from theirs, since their rows are larger. Where the config
        itself has this D and K, they notice nothing, and get sums without the rows of this rank.
        """
        call = self.call_without_tokens()
        # The smallest row has one block of scales, or one line of 16 bytes.
        D = self.memory.largest_block or 16 // self.wire.itemsize
        scales = None if call.scales is None else call.scales[:, :1]
        return call._replace(
            x=call.x[:, :D],
            ids=call.ids[:, :1],
            weights=call.weights[:, :1],
            scales=scales,
            extra=None,
        )

    def back(self, partial: Tensor, aborted: int) -> Transfer:
        """Make the transfer that takes partial rows back to the nodes of their tokens.

        `partial` [n, D] has the rows in the order of `call`. `aborted` is a mask of the ranks of
        this node that have aborted the round; CPUs report it to the other nodes. The method also
        keeps `partial` for `sum`.
        """
        self.partial = partial
        return self._transfer_back(partial, aborted, mismatch=0, skipped_nodes=[], reads=True)

    def zeros_back(
        self, like: Tensor, aborted: int, mismatch: int, differing: list[int]
    ) -> Transfer:
        """Make the transfer that takes zeros back in place of partial rows.

        A rank that has aborted the round, or has found a mismatch, sends it: the other nodes wait
        for a transfer in any case. This rank does not read what they send back.

        `like` is a tensor of the dtype and device of partial rows, and `aborted` the mask that
        `back` takes. `mismatch` is 0, or 1 + the number of a rank of the group whose call differs.
        `differing` are the ranks of this rail whose calls are known to differ. They get no row,
        because they may have room for shorter rows only.
        """
        zeros = like.new_zeros(self.slab_rows + sum(self.rows_of_nodes), self.D)
        nodes = [rank // self.memory.ranks_per_node for rank in differing]
        return self._transfer_back(zeros, aborted, mismatch, nodes, reads=False)

    def _transfer_back(
        self,
        partial: Tensor,
        aborted: int,
        mismatch: int,
        skipped_nodes: list[int],
        *,
        reads: bool,
    ) -> Transfer:
        """Make the transfer back of `partial`. Its first slab is for this node and does not travel.

        `aborted` and `mismatch` go into the reports, see `zeros_back`. `skipped_nodes` get no row.
        `reads` says whether this rank will read the received rows. If so, they become the
        attribute `returned`.
        """
        returned = self.memory.views["rail.returned"]
        other_nodes = self.memory.other_nodes_mask()
        slab_bytes = (self.slab_rows + self.report_rows) * self.D * partial.itemsize

        # Count the bytes that go to each node.
        sends = [slab_bytes * is_other for is_other in other_nodes]
        for node in skipped_nodes:
            sends[node] = 0

        # Count the bytes that may come from each node. Where the calls may differ, the other nodes
        # may send rows of another length, so on CPUs there is room for the longest ones.
        slab_room = slab_bytes
        if self.report_rows and not reads:
            slab_room = returned[0].numel()
        receives = [slab_room * is_other for is_other in other_nodes]

        # Put reports behind the slabs to send, and choose the memory for the received slabs.
        to_others = partial[self.slab_rows :]
        if self.report_rows:
            to_others = self._with_reports(to_others, aborted, mismatch, skipped_nodes)
        sent = to_others.flatten().view(torch.uint8)
        received = returned.flatten()[: sum(receives)]
        if reads:
            self.returned = received.view(partial.dtype).view(-1, self.D)
        self._back = Transfer(sent, received, sends, receives, returning=True)
        return self._back

    def _with_reports(
        self, slabs: Tensor, aborted: int, mismatch: int, skipped_nodes: list[int]
    ) -> Tensor:
        """Copy the slabs for the other nodes, and put a row with the report behind each slab.

        Slabs for `skipped_nodes` are left out. `aborted` and `mismatch` are the two words of the
        report, see `zeros_back`.
        """
        report_row = slabs.new_zeros(1, self.D)
        report = torch.tensor((aborted, mismatch)).view(torch.uint8)
        report_row.view(torch.uint8)[0, :_REPORT_BYTES] = report
        parts = []
        for node, slab in zip(self.memory.others, slabs.split(self.slab_rows), strict=True):
            if node not in skipped_nodes:
                parts += [slab, report_row]
        if not parts:
            return report_row[:0]
        return torch.cat(parts)

    def reports(self) -> Reports:
        """Read the reports behind the partial rows that have come back. GPUs send none."""
        aborted = list[int]()
        differing = set[int]()
        if not self.report_rows:
            return Reports(aborted=[], differing=[])
        G = self.memory.ranks_per_node
        R = G * self.memory.num_nodes
        last_row = -1
        for node in self.memory.others:
            # The report is the last row of each slab.
            last_row += self.slab_rows + 1
            # Copy it before it is read as int64, since a row of the buffer may lie at any address.
            report = self.returned[last_row].view(torch.uint8)[:_REPORT_BYTES].clone()
            mask, mismatch = report.view(torch.int64).tolist()
            aborted += [node * G + local for local in range(G) if (mask >> local) & 1]
            # The words come from another process, so a number that is no rank does not count.
            if 0 < mismatch <= R:
                differing.add(mismatch - 1)
        return Reports(aborted, sorted(differing))

    def sum(self, y: Tensor, failed: FailedWords) -> None:
        """Add up the partial rows of each token, in the order of the nodes, and write the sums into
        y [T, D]. The caller has waited for the transfer back.

        `failed` are the words by which a GPU learns that the sums of this round must be zeros.
        """
        own = self.partial[: self.slab_rows]
        slots = self.memory.views["rail.slots"]
        stride = self.slab_rows + self.report_rows
        ops.rail_sum(own, self.returned, slots, stride, self.memory.node, *failed, y)

    def _slabs(self) -> Tensor:
        """Return the slots of all slabs [slots, bytes], without gaps between slabs.

        It is a view of the buffer where slabs have no gaps. On CPUs, short slabs of three or more
        nodes lie apart (see `stride`), and are copied.
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
        """The memory of the slabs of all nodes, uint8 [slots, bytes]. The slab of this node comes
        first.
        """
        return self.memory.views["rail.received"].flatten(0, 1)
