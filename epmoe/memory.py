"""The memory plan: every buffer of one rank, to the byte, before anything is allocated.

No other code computes an offset: the service allocates by this plan, and the kernels receive it as a list of integers
(``csrc/plan.h``). Letters as in the package docstring; B is the number of fp8 scales of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from epmoe.config import EPConfig
from epmoe.placement import Placement

SCALE_BLOCK = 128  # elements of a row that share one fp8 scale
SIGNAL_BYTES = 64  # a cache line for each source: `RoundHeader` in csrc/plan.h
BUFFER_ALIGNMENT = 128
PAGE_BYTES = 4096
NUM_COUNTERS = 8
# On GPUs, calls of up to 1024 tokens use the LL protocol (csrc/cuda/exchange/ll.cuh), except dispatch with
# layout="rank". Dispatch sends the number of tokens in 12 bits, so 4095 is the limit.
LL_MAX_TOKENS = 1024
LINE_INTS = 4  # a line of the LL protocol has 16 bytes

Region = Literal["window", "scratch"]

# The fields of `ExchangePlan` in csrc/plan.h, in its order: sizes, then the offset of each buffer ("." for "_").
SIZES = (
    "R", "rank", "M", "K", "D", "E", "P", "num_local_experts", "copies", "max_rows", "alignment",
    "payload_fp8", "combine_fp8", "x_stride_bytes", "combine_stride_bytes", "scale_blocks", "combine_scale_blocks",
    "most_local_experts", "num_sms", "ll_max_tokens", "ll_row_stride_bytes", "ll_sum_stride_bytes",
    "dispatch_senders", "combine_senders", "combine_team",
)  # fmt: skip
OFFSETS = (
    "signal.dispatch", "signal.combine", "signal.error", "doorbell",
    "recv.x", "recv.scales", "recv.ids", "recv.weights", "combine.rows", "combine.scales",
    "recv.flags", "recv.ordinals", "recv.counts", "combine.flags", "ll.rows", "ll.pairs", "ll.sums",
    "rows", "row_scales",
    "state", "counts", "slots_used", "slots", "expert_offsets", "tokens_per_expert", "row_of_pair",
    "table.expert_map", "table.owners", "table.copies", "table.num_copies", "table.sentinels",
    "table.local_index", "pair_weights",
    "health.counters", "health.tokens_per_expert", "health.rows_sent", "health.waited_ns",
)  # fmt: skip


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
        """Bytes without the padding behind it; 0 for a buffer that this configuration does not use."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """This buffer as a tensor of its shape and dtype, within the region's bytes (uint8 [n])."""
        return region[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class MemoryPlan:
    """All memory of one rank: its window, which every rank maps, and its own scratch.

    A round allocates only y, the tensor [T, D] that `combine` returns, and copies of arguments whose rows are not
    contiguous or not aligned to 16 bytes.

    Attributes:
        buffers: in the order of their offsets within each region.
        sizes: the values of `SIZES`.
    """

    buffers: tuple[Buffer, ...]
    sizes: dict[str, int]

    @classmethod
    def build(
        cls, config: EPConfig, rank: int = 0, placement: Placement | None = None, nvlink: bool | None = None
    ) -> MemoryPlan:
        """Lay out the buffers of one rank. It needs no GPU, no group and no native library.

        Args:
            config: the same on all ranks.
            rank: of the group; ranks may own different numbers of experts.
            placement: by default the config's.
            nvlink: whether the windows lie in GPU memory; by default, whether `exchange.transport` is "nvlink".

        Returns:
            The plan of `rank`.
        """
        nvlink = config.exchange.transport == "nvlink" if nvlink is None else nvlink
        placement = placement or Placement.from_config(config)
        R, M = config.topology.ep_size, config.capacity.max_num_tokens_per_rank
        K, D = config.model.num_experts_per_tok, config.model.hidden_size
        E, P, e = placement.num_experts, placement.num_physical_experts, placement.num_local_experts(rank)
        x_dtype, alignment = config.model.torch_dtype, config.capacity.alignment
        most = max(map(placement.num_local_experts, range(R)))
        copies = placement.copies_table().shape[1]
        # GPUs write into each other's expert-major rows, so these are equally many on all GPUs.
        worst = R * M * K + (most if nvlink else e) * (alignment - 1)
        N = round_up(config.capacity.max_expert_rows or worst, alignment)
        B = -(-D // SCALE_BLOCK)
        padded_B = round_up(B, 4)  # GPUs copy 16 bytes at a time
        payload_fp8, combine_fp8 = (
            wire == "fp8" for wire in (config.exchange.payload, config.exchange.combine_payload)
        )
        payload = torch.float8_e4m3fn if payload_fp8 else x_dtype
        combine = torch.float8_e4m3fn if combine_fp8 else x_dtype
        ll_tokens = min(M, LL_MAX_TOKENS)
        ll_row_stride, ll_sum_stride = (
            round_up(D * wire.itemsize + 4 * B * fp8, 16)
            for wire, fp8 in ((payload, payload_fp8), (combine, combine_fp8))
        )
        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        layout: list[tuple[Region, str, tuple[int, ...], torch.dtype]] = [
            ("window", "signal.dispatch", (R, SIGNAL_BYTES), torch.uint8),
            ("window", "signal.combine", (R, SIGNAL_BYTES), torch.uint8),
            ("window", "signal.error", (R,), i64),
            ("window", "doorbell", (1,), i32),
            ("window", "recv.x", (R, M, D), payload),
            ("window", "recv.scales", (R, M, B) if payload_fp8 else (0,), f32),
            ("window", "recv.ids", (R, M, K), i32),
            ("window", "recv.weights", (R, M, K), f32),
            ("window", "combine.rows", (R, M, D), combine),
            ("window", "combine.scales", (R, M, padded_B) if combine_fp8 else (0,), f32),
            ("window", "recv.flags", (R, M) if nvlink else (0,), i32),
            ("window", "recv.ordinals", (R, M, K) if nvlink else (0,), i32),
            ("window", "recv.counts", (R, R * most + 2) if nvlink else (0,), i64),
            ("window", "combine.flags", (R, M) if nvlink else (0,), i32),
            ("window", "ll.rows", (R, ll_tokens, ll_row_stride) if nvlink else (0,), torch.uint8),
            ("window", "ll.pairs", (R, ll_tokens, K, LINE_INTS) if nvlink else (0,), i32),
            ("window", "ll.sums", (R, ll_tokens, ll_sum_stride) if nvlink else (0,), torch.uint8),
            ("window" if nvlink else "scratch", "rows", (N, D), payload),
            ("window" if nvlink else "scratch", "row_scales", (N, B) if payload_fp8 else (0,), f32),
            ("scratch", "state", (96,), i32),
            ("scratch", "counts", (R,), i32),
            ("scratch", "slots_used", (R,) if nvlink else (0,), i32),
            ("scratch", "slots", (M, R), i32),
            ("scratch", "expert_offsets", (e + 1,), i32),
            ("scratch", "tokens_per_expert", (e,), i32),
            ("scratch", "row_of_pair", (R, M, K), i32),
            ("scratch", "table.expert_map", (P,), i32),
            ("scratch", "table.owners", (P,), i32),
            ("scratch", "table.copies", (E, copies), i32),
            ("scratch", "table.num_copies", (E,), i32),
            ("scratch", "table.sentinels", (R,), i32),
            ("scratch", "table.local_index", (P,) if nvlink else (0,), i32),
            ("scratch", "pair_weights", (R, M, K) if nvlink else (0,), f32),
            ("scratch", "health.counters", (NUM_COUNTERS,), i64),
            ("scratch", "health.tokens_per_expert", (e,), i64),
            ("scratch", "health.rows_sent", (R,), i64),
            ("scratch", "health.waited_ns", (R,), i64),
        ]
        ends: dict[Region, int] = {"window": 0, "scratch": 0}
        buffers = []
        for region, name, shape, dtype in layout:
            buffer = Buffer(name, region, shape, dtype, offset=ends[region])
            buffers.append(buffer)
            ends[region] = round_up(buffer.offset + buffer.nbytes, BUFFER_ALIGNMENT)
        values = (
            R, rank, M, K, D, E, P, e, copies, N, alignment,
            payload_fp8, combine_fp8, D * payload.itemsize, D * combine.itemsize, B, padded_B, most,
            config.exchange.num_sms or 2**31 - 1, ll_tokens, ll_row_stride, ll_sum_stride, 0, 0, 0,
        )  # fmt: skip
        return cls(tuple(buffers), dict(zip(SIZES, map(int, values), strict=True)))

    def __getitem__(self, name: str) -> Buffer:
        """The buffer of this name, which must be one of the plan's."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's window, in whole pages."""
        return round_up(self._end("window"), PAGE_BYTES)

    @property
    def empty_lines(self) -> list[slice]:
        """Bytes of the window that begin as 0xff: lines of the LL protocol that have not arrived have this value."""
        return [slice(b.offset, b.offset + b.nbytes) for b in (self["ll.rows"], self["ll.sums"])]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of this rank's scratch, which no other rank maps."""
        return self._end("scratch")

    @property
    def total_bytes(self) -> int:
        """Bytes of the window and of the scratch."""
        return self.window_bytes + self.scratch_bytes

    def as_ints(self, **launch: int) -> list[int]:
        """The fields of `ExchangePlan` in order; `launch` replaces sizes of these names."""
        return [*(self.sizes | launch).values(), *(self[name].offset for name in OFFSETS)]

    def _end(self, region: Region) -> int:
        return max(round_up(b.offset + b.nbytes, BUFFER_ALIGNMENT) for b in self.buffers if b.region == region)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
