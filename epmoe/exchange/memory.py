"""The memory plan: the place of every buffer of one rank, to the byte.

No other code computes an offset. The kernels take all offsets from the plan, as the struct
`ExchangePlan` of ``csrc/plan.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from epmoe.config.config import EPConfig
from epmoe.config.placement import Placement
from epmoe.native.formats import WIRE_FORMATS
from epmoe.native.layouts import words

# A cache line for each source: `RoundHeader` in csrc/plan.h.
SIGNAL_BYTES = 64
# All buffers start at multiples of it: a cache line of GPUs.
BUFFER_ALIGNMENT = 128
# Windows are whole pages, which is what processes map.
PAGE_BYTES = 4096
# The counts of `Health` that are one number: `Counter` in csrc/types.h.
NUM_COUNTERS = 8
# On GPUs, calls of up to so many tokens use the LL protocol (csrc/cuda/exchange/ll.cuh): in
# general; of a rank alone; of two ranks; and of two ranks whose rows in x are longer than
# `SHORT_ROW_BYTES`. docs/experiments.md has what was measured.
LL_MAX_TOKENS = 1024
LL_MAX_TOKENS_OF_ONE = 1535
LL_MAX_TOKENS_OF_TWO = 2048
LL_MAX_LONG_TOKENS_OF_TWO = 1792
SHORT_ROW_BYTES = 8 << 10
# The words of a source in dispatch on GPUs before its counts: `kCountColumns` in csrc/plan.h.
COUNT_COLUMNS = 3
# `RailTag` in csrc/rail.h.
RAIL_TAG_BYTES = 16
# A line of the LL protocol has 16 bytes.
LINE_INTS = 4
# On GPUs, blocks of dispatch count parts of the tokens for one another: the most parts, and the
# counts in a line. `kMaxParts` and `kPartCounts` in csrc/plan.h.
MAX_PARTS = 512
PART_COUNTS = 6
# On GPUs, the time of an expert with fewer rows than this is the time to read its weights, however
# many rows it has.
_ROWS_BEYOND_WEIGHTS = 137

# Buffers into which rows arrive for this rank's experts. A rank without experts does not have them.
_BUFFERS_OF_EXPERTS = ("recv.x", "recv.scales", "ll.rows", "rows", "row_scales")

Region = Literal["window", "scratch", "rail"]

_Layout = list[tuple[Region, str, tuple[int, ...], torch.dtype]]
"""The region, name, shape and dtype of buffers, in the order of their offsets."""
Parts = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of buffers, by name."""
# Functions of `reserve`, which add buffers to the windows of each plan.
_reserved = list[Callable[[EPConfig], Parts]]()


def reserve(parts: Callable[[EPConfig], Parts]) -> Callable[[EPConfig], Parts]:
    """Decorate a function that returns buffers which its own package needs in each window.

    Packages that this one must not import, such as epmoe/live, add their buffers so. All plans that
    are built later have room for them.
    """
    _reserved.append(parts)
    return parts


class RailSlot(NamedTuple):
    """The layout of one row on its way to another node: `RailSlot` in csrc/rail.h.

    A slot has the row with its extra bytes, its scales if the format has some, the ids and the
    weights of its experts, and a tag by which the receiver recognises the source's call. The row is
    at 0. All fields but `bytes` are offsets in bytes from the start of the slot.
    """

    bytes: int
    """the size of the slot"""
    scales: int
    ids: int
    weights: int
    tag: int

    @classmethod
    def of(cls, config: EPConfig) -> RailSlot:
        """The slot of one row of a round of the config."""
        model = config.model
        payload = WIRE_FORMATS[config.exchange.payload]
        width = payload.width(model.hidden_size, config.capacity.extra_bytes, model.torch_dtype)
        # One part follows another. An id and a weight have 4 bytes each.
        scales = payload.row_bytes(width, model.torch_dtype)
        ids = scales + payload.scale_bytes(width)
        weights = ids + 4 * model.num_experts_per_tok
        tag = weights + 4 * model.num_experts_per_tok
        nbytes = round_up(tag + RAIL_TAG_BYTES, 16)
        return cls(bytes=nbytes, scales=scales, ids=ids, weights=weights, tag=tag)


@dataclass(frozen=True)
class Buffer:
    """A named part of a region; `offset` is in bytes from the region's start."""

    name: str
    region: Region
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, without the padding behind it. A buffer that this configuration does
        not use has 0 bytes.
        """
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """This buffer as a tensor of its shape and dtype, within the region's bytes (uint8 [n])."""
        return region[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class MemoryPlan:
    """All memory of one rank: its window, which every rank of its node maps, and its own scratch.

    With more than one node there is a third region, "rail": the memory of what travels over the
    network. Window and scratch then belong to the exchange within the node.

    A round allocates only y, the tensor [T, D] that `combine` returns, and copies of arguments
    whose rows are not contiguous or not aligned to 16 bytes; with more than one node also the
    partial rows, up to [N·S, D].

    Attributes:
        buffers: in the order of their offsets within each region. On a rank without experts, the
            buffers for rows of experts keep their offsets and have 0 bytes.
        sizes: the fields of `ExchangePlan` in csrc/plan.h, except for the offsets, by their names.
        windows: bytes of each rank's window, by seat of the node, in whole pages.
    """

    buffers: tuple[Buffer, ...]
    sizes: dict[str, int]
    windows: tuple[int, ...]

    @classmethod
    def build(
        cls,
        config: EPConfig,
        rank: int = 0,
        placement: Placement | None = None,
        nvlink: bool | None = None,
        lines: bool = True,
    ) -> MemoryPlan:
        """Lay out the buffers of one rank.

        Plans of ranks differ, since ranks may own different numbers of experts. It needs no GPU, no
        group and no native library.

        Args:
            config: the config of the group.
            rank: the rank in the group; with `topology.max_ranks` the seat of the rank.
            placement: where the experts are; by default where `config.seated` places them.
            nvlink: whether the windows lie in GPU memory; by default, whether `exchange.transport`
                is "nvlink".
            lines: whether lines of the LL protocol may travel between the GPUs: see `links.py`.

        Returns:
            The plan, whose offsets are in bytes.
        """
        if nvlink is None:
            nvlink = config.exchange.transport == "nvlink"
        config = config.seated
        placement = placement or config.place_experts()
        if config.topology.num_nodes > 1:
            return cls._over_nodes(config, rank, placement, nvlink, lines)
        parts = dict[str, tuple[tuple[int, ...], torch.dtype]]()
        for reserved in _reserved:
            parts |= reserved(config)
        return cls._of_one_node(config, rank, placement, nvlink, lines, parts)

    @classmethod
    def _of_one_node(
        cls,
        config: EPConfig,
        rank: int,
        placement: Placement,
        nvlink: bool,
        lines: bool,
        parts: Parts,
    ) -> MemoryPlan:
        """Lay out the buffers for the exchange within one node.

        `parts` are buffers that other packages want in the windows.
        """
        sizes = _sizes(config, rank, placement, nvlink, lines)
        layout = _layout(config, sizes, nvlink)
        layout += [("window", name, *part) for name, part in parts.items()]
        # These come last, since the windows of ranks without experts end before them.
        layout += _layout_of_experts(config, sizes, nvlink)
        buffers = _place_buffers(layout)

        # Ranks write into one another's windows, so offsets are the same on all ranks. Only the
        # ends of the windows differ.
        whole = round_up(_end_of(buffers, "window"), PAGE_BYTES)
        without_rows = tuple(map(_without_rows, buffers))
        short = round_up(_end_of(without_rows, "window"), PAGE_BYTES)
        windows = []
        for seat in range(sizes["R"]):
            windows.append(whole if _may_get_rows(config, placement, seat) else short)
        if not _may_get_rows(config, placement, rank):
            buffers = without_rows
        return cls(buffers, sizes, tuple(windows))

    @classmethod
    def _over_nodes(
        cls, config: EPConfig, rank: int, placement: Placement, nvlink: bool, lines: bool
    ) -> MemoryPlan:
        """Lay out the buffers for the exchange within the rank's node, and for the network.

        Letters: `G` ranks of a node, `N` nodes, `S` rows of a slab, of which there is one for each
        node, `P` physical experts and `E` logical experts.
        """
        topology = config.topology
        G = topology.ranks_here
        N = topology.num_nodes
        S = config.rows_per_node
        of_node = placement.of_node(rank // G, G)
        # A word for each rank of the node. With it a rank tells the others of its node which rank
        # of another node it waits for in vain.
        parts = {"rail.missed": ((G,), torch.int64)}
        inside = cls._of_one_node(config.of_node(), rank % G, of_node, nvlink, lines, parts)

        # Slabs of rows that have arrived, that leave and that return; and tables which say for each
        # expert its node.
        P = placement.num_physical_experts
        E, copies = placement.copies_table().shape
        slot = RailSlot.of(config)
        row = config.model.hidden_size * config.model.torch_dtype.itemsize
        u8 = torch.uint8
        i32 = torch.int32
        i64 = torch.int64
        rail = _place_buffers(
            [
                # The slab of this rank's own node comes first, then those of the others by node.
                ("rail", "rail.received", (N, S, slot.bytes), u8),
                ("rail", "rail.sent", (N - 1, S, slot.bytes), u8),
                # One row more than a slab has: `Slabs.back` says why.
                ("rail", "rail.returned", (N - 1, S + 1, row), u8),
                ("rail", "rail.slots", (config.capacity.max_num_tokens_per_rank, N), i32),
                ("rail", "rail.counts", (N,), i32),
                ("rail", "rail.total.needed", (1,), i32),
                ("rail", "rail.table.copies", (E, copies), i32),
                ("rail", "rail.table.num_copies", (E,), i32),
                ("rail", "rail.table.node_of", (P,), i32),
                ("rail", "rail.table.node_local", (P,), i32),
                ("rail", "rail.total.counters", (NUM_COUNTERS,), i64),
                ("rail", "rail.total.rows_sent", (N,), i64),
            ]
        )
        # The small alignment depends on the number of tokens of a call. With several nodes a rank
        # does not know how many rows come to its node, so every round takes the large one.
        sizes = inside.sizes | {"small_alignment": inside.sizes["alignment"]}
        return cls((*inside.buffers, *rail), sizes, inside.windows)

    def __getitem__(self, name: str) -> Buffer:
        """The buffer of the plan that has this name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's window, in whole pages."""
        return self.windows[self.sizes["rank"]]

    @property
    def empty_lines(self) -> list[slice]:
        """The parts of the window that must begin as bytes of 0xff, as slices in bytes.

        They hold lines of the LL protocol. A reader takes a line of 0xff for one that has not
        arrived.
        """
        lines = (self["ll.rows"], self["ll.sums"])
        return [slice(buffer.offset, buffer.offset + buffer.nbytes) for buffer in lines]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch of this rank, which no other rank maps."""
        return _end_of(self.buffers, "scratch")

    @property
    def rail_bytes(self) -> int:
        """Bytes of the region "rail", for what travels between nodes; 0 with one node."""
        return _end_of(self.buffers, "rail")

    @property
    def total_bytes(self) -> int:
        """Bytes of all three regions: window, scratch and rail."""
        return self.window_bytes + self.scratch_bytes + self.rail_bytes

    def as_ints(self, **sizes: int) -> list[int]:
        """The fields of the struct `ExchangePlan` in their order. The caller may replace sizes of
        the plan by other values, by name.
        """
        offsets = {buffer.name.replace(".", "_"): buffer.offset for buffer in self.buffers}
        return words("ExchangePlan", self.sizes | sizes | offsets)


def _may_get_rows(config: EPConfig, placement: Placement, rank: int) -> bool:
    """Whether rows may ever arrive on a rank (or a seat) of this group.

    They arrive where experts are. If experts move, they may arrive on any rank.
    """
    return config.placement.live or placement.num_local_experts(rank) > 0


def _end_of(buffers: Iterable[Buffer], region: Region) -> int:
    """Bytes of a region, up to the end of its last buffer that has any bytes."""
    end = 0
    for buffer in buffers:
        if buffer.region == region and buffer.nbytes:
            end = max(end, round_up(buffer.offset + buffer.nbytes, BUFFER_ALIGNMENT))
    return end


def _without_rows(buffer: Buffer) -> Buffer:
    """The buffer as it is on a rank without experts: empty, if it is for rows of experts."""
    if buffer.name not in _BUFFERS_OF_EXPERTS:
        return buffer
    return replace(buffer, shape=(0, *buffer.shape[1:]))


def _sizes(
    config: EPConfig, rank: int, placement: Placement, nvlink: bool, lines: bool
) -> dict[str, int]:
    """The fields of `ExchangePlan`, except for the offsets.

    `config` and `placement` are those for all seats, whether or not each of them has a rank. The
    local letters are those of docs/design.md: `R` ranks, `M` tokens of a rank at most, `K` experts
    per token, `D` the hidden size, `E` logical experts.
    """
    R = config.topology.ep_size
    M = config.capacity.max_num_tokens_per_rank
    K = config.model.num_experts_per_tok
    D = config.model.hidden_size
    E = placement.num_experts
    x_dtype = config.model.torch_dtype
    payload = WIRE_FORMATS[config.exchange.payload]
    combine = WIRE_FORMATS[config.exchange.combine_payload]

    # Numbers of experts. If experts move, each layer has tables, with room for more copies.
    num_local_experts = placement.num_local_experts(rank)
    most_local_experts = max(map(placement.num_local_experts, range(R)))
    layers = 0
    copies = placement.copies_table().shape[1]
    few_tokens = 0
    if config.placement.live:
        layers = config.placement.layers
        copies = round_up(config.placement.most_copies, LINE_INTS)
        # Calls of so few tokens have tables of their own: the time of their experts is only the
        # time to read the weights.
        if nvlink:
            few_tokens = _ROWS_BEYOND_WEIGHTS * E // (R * K)

    # Expert-major rows. GPUs write into each other's rows, so all GPUs have equally many of them.
    alignment = config.alignment
    segments = most_local_experts if nvlink else num_local_experts
    gap_rows = segments * (alignment - 1)
    worst = R * M * K + gap_rows
    max_rows = round_up(config.capacity.max_expert_rows or worst, alignment)
    if not nvlink and not _may_get_rows(config, placement, rank):
        max_rows = 0

    # Calls of up to `small_alignment_tokens` tokens take the small alignment, which makes small
    # gaps between segments. With more tokens the large blocks of a GEMM are full on average, and
    # small blocks would read weights twice.
    ll_tokens = min(M, most_ll_tokens(R, D * x_dtype.itemsize)) if lines else 0
    small_alignment = config.small_alignment if nvlink else alignment
    small_alignment_tokens = min(ll_tokens, LL_MAX_TOKENS, config.tokens_that_fill(alignment) - 1)

    # The bytes of a row on its way to the experts, with its extra bytes, and on its way back. In
    # the LL protocol the scales follow the row. On the way back, scales fill whole lines of 16
    # bytes in the other protocols, too.
    width = payload.width(D, config.capacity.extra_bytes, x_dtype)
    scale_blocks = payload.num_scales(width)
    scales_per_line = 16 // combine.scale.itemsize if combine.scale else 1
    combine_scale_blocks = round_up(combine.num_scales(D), scales_per_line)
    x_stride_bytes = payload.row_bytes(width, x_dtype)
    combine_stride_bytes = combine.row_bytes(D, x_dtype)
    ll_row_stride_bytes = round_up(x_stride_bytes + payload.scale_bytes(width), 16)
    ll_sum_stride_bytes = round_up(combine_stride_bytes + combine.scale_bytes(D), 16)

    return dict(
        # The letters of docs/design.md.
        R=R,
        rank=rank,
        M=M,
        K=K,
        D=D,
        E=E,
        P=placement.num_physical_experts,
        # Rows by expert.
        num_local_experts=num_local_experts,
        copies=int(copies),
        max_rows=max_rows,
        alignment=alignment,
        small_alignment=small_alignment,
        small_alignment_tokens=small_alignment_tokens,
        # Rows as they travel.
        payload_format=payload.number,
        combine_format=combine.number,
        x_stride_bytes=x_stride_bytes,
        combine_stride_bytes=combine_stride_bytes,
        scale_blocks=scale_blocks,
        combine_scale_blocks=combine_scale_blocks,
        # Experts that move.
        most_local_experts=most_local_experts,
        layers=layers,
        few_tokens=few_tokens,
        # Kernels: by default a kernel takes as many multiprocessors as it can use.
        num_sms=config.exchange.num_sms or 2**31 - 1,
        ll_max_tokens=ll_tokens,
        ll_row_stride_bytes=ll_row_stride_bytes,
        ll_sum_stride_bytes=ll_sum_stride_bytes,
        # Blocks of each role. 0: csrc/launch_policy.h chooses.
        dispatch_senders=0,
        combine_senders=0,
        combine_team=0,
    )


def most_ll_tokens(R: int, row_bytes: int) -> int:
    """The most tokens of a call that uses the LL protocol, among R ranks of a node whose rows have
    so many bytes in x.
    """
    if R > 2:
        return LL_MAX_TOKENS
    if R == 1:
        return LL_MAX_TOKENS_OF_ONE
    return LL_MAX_TOKENS_OF_TWO if row_bytes <= SHORT_ROW_BYTES else LL_MAX_LONG_TOKENS_OF_TWO


def ll_tokens_of_training(ll_max_tokens: int) -> int:
    """The most tokens of a call with gradients that uses the LL protocol, where calls without them
    use it up to `ll_max_tokens`.

    Only rows of the Simple protocol are multiplied by weights as they arrive, which spares more
    than the LL protocol does for calls of more tokens.
    """
    return min(ll_max_tokens, LL_MAX_TOKENS)


def _layout(config: EPConfig, sizes: Mapping[str, int], nvlink: bool) -> _Layout:
    """The buffers of window and scratch that every rank has, in the order of csrc/plan.h.

    The local letters are those of docs/design.md, as in `_sizes`; `P` physical experts, and `e`
    experts of this rank.
    """
    R = sizes["R"]
    M = sizes["M"]
    K = sizes["K"]
    D = sizes["D"]
    E = sizes["E"]
    P = sizes["P"]
    e = sizes["num_local_experts"]
    copies = sizes["copies"]
    layers = sizes["layers"]
    ll_tokens = sizes["ll_max_tokens"]
    u8 = torch.uint8
    i32 = torch.int32
    i64 = torch.int64
    f32 = torch.float32

    part_lines = -(-(P + R) // PART_COUNTS)

    # The items of a sum on its way back.
    x_dtype = config.model.torch_dtype
    combine = WIRE_FORMATS[config.exchange.combine_payload]
    sum_dtype = combine.dtype_of(x_dtype)
    sum_items = combine.row_items(D, x_dtype)
    sum_scales = sizes["combine_scale_blocks"]

    def on_gpus(*shape: int) -> tuple[int, ...]:
        """The shape of a buffer that only GPUs use: on CPUs it is empty."""
        return shape if nvlink else (0,)

    return [
        # Signals of all ranks.
        ("window", "signal.dispatch", (R, SIGNAL_BYTES), u8),
        ("window", "signal.combine", (R, SIGNAL_BYTES), u8),
        ("window", "signal.error", (R,), i64),
        ("window", "signal.dead", (1,), i64),
        ("window", "doorbell", (1,), i32),
        # The pairs that arrive, by source rank; and the rows that return, by expert rank.
        ("window", "recv.ids", (R, M, K), i32),
        ("window", "recv.weights", (R, M, K), f32),
        ("window", "combine.rows", (R, M, sum_items), sum_dtype),
        ("window", "combine.scales", (R, M, sum_scales), combine.scale or f32),
        ("window", "combine.values", (R, M, K), i64 if nvlink else f32),
        # Flags and counts by which GPUs see each row arrive by itself.
        ("window", "recv.flags", on_gpus(R, M), i32),
        ("window", "recv.ordinals", on_gpus(R, M, K), i32),
        ("window", "recv.counts", on_gpus(R, COUNT_COLUMNS + R * sizes["most_local_experts"]), i64),
        ("window", "combine.flags", on_gpus(R, M), i32),
        # Lines of the LL protocol.
        ("window", "ll.pairs", on_gpus(R, ll_tokens, K, LINE_INTS), i32),
        ("window", "ll.sums", on_gpus(R, ll_tokens, sizes["ll_sum_stride_bytes"]), u8),
        # The state of the round (`RoundState` of csrc/plan.h), and where its rows are.
        ("scratch", "state", (112,), i32),
        ("scratch", "counts", (R,), i32),
        ("scratch", "slots_used", on_gpus(R), i32),
        ("scratch", "slots", (M, R), i32),
        ("scratch", "expert_offsets", (e + 1,), i32),
        ("scratch", "tokens_per_expert", (e,), i32),
        ("scratch", "row_of_pair", (R, M, K), i32),
        # Tables that say where experts are. If experts move, quotas stand in "table.copies", and
        # "table.num_copies" is not needed.
        ("scratch", "table.expert_map", (P,), i32),
        ("scratch", "table.owners", (P,), i32),
        ("scratch", "table.copies", (layers, 2, E, copies) if layers else (E, copies), i32),
        ("scratch", "table.num_copies", (0 if layers else E,), i32),
        ("scratch", "table.sentinels", (R,), i32),
        ("scratch", "table.local_index", on_gpus(P), i32),
        ("scratch", "pair_weights", on_gpus(R, M, K), f32),
        # What blocks of dispatch count for one another: pairs by expert, and rows by rank.
        ("scratch", "part_counts", on_gpus(MAX_PARTS, part_lines, LINE_INTS), i32),
        # Totals of all rounds.
        ("scratch", "health.counters", (NUM_COUNTERS,), i64),
        ("scratch", "health.tokens_per_expert", (layers or 1, e), i64),
        ("scratch", "health.rows_sent", (R,), i64),
        ("scratch", "health.waited_ns", (R,), i64),
        ("scratch", "health.aborted_rounds", (R,), i64),
    ]


def _layout_of_experts(config: EPConfig, sizes: Mapping[str, int], nvlink: bool) -> _Layout:
    """The buffers `_BUFFERS_OF_EXPERTS`, into which rows arrive. `N` is the number of expert-major
    rows; `R` and `M` are as in `_sizes`.
    """
    R = sizes["R"]
    M = sizes["M"]
    N = sizes["max_rows"]
    ll_tokens = sizes["ll_max_tokens"] if nvlink else 0
    scales = sizes["scale_blocks"]

    # The items of a row on its way to the experts.
    x_dtype = config.model.torch_dtype
    payload = WIRE_FORMATS[config.exchange.payload]
    dtype = payload.dtype_of(x_dtype)
    width = payload.width(sizes["D"], config.capacity.extra_bytes, x_dtype)
    items = payload.row_items(width, x_dtype)
    scale_dtype = payload.scale or torch.float32

    # On GPUs, ranks write into each other's expert-major rows.
    region_of_rows: Region = "window" if nvlink else "scratch"
    return [
        # Buffers by source.
        ("window", "recv.x", (R, M, items), dtype),
        ("window", "recv.scales", (R, M, scales), scale_dtype),
        ("window", "ll.rows", (R, ll_tokens, sizes["ll_row_stride_bytes"]), torch.uint8),
        # Buffers by expert.
        (region_of_rows, "rows", (N, items), dtype),
        (region_of_rows, "row_scales", (N, scales), scale_dtype),
    ]


def _place_buffers(layout: _Layout) -> tuple[Buffer, ...]:
    """Place the buffers of each region one behind another, at multiples of `BUFFER_ALIGNMENT`
    bytes.
    """
    ends: dict[Region, int] = {"window": 0, "scratch": 0, "rail": 0}
    buffers = []
    for region, name, shape, dtype in layout:
        buffer = Buffer(name, region, shape, dtype, offset=ends[region])
        buffers.append(buffer)
        ends[region] = round_up(buffer.offset + buffer.nbytes, BUFFER_ALIGNMENT)
    return tuple(buffers)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
