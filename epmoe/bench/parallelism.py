"""What one MoE layer moves, reads and takes with expert parallel, tensor parallel and replicated
experts, on one node.

Letters: R GPUs, each with T tokens; B = R·T; E experts, K of them a token; D and F; w the bytes of
an expert's weights. n tokens need the share p(n) = 1 − (1 − K/E)ⁿ of the experts, if all are
equally likely.

    layout     reads, bytes of weights      sends, bytes                   rows
    EP         w·max of E/R·p, E/R·p·(1−p)  T·u·(R−1)/R·(row out + back)   max of B·K/R
    TP         w·E/R·p(B)                   2·(R−1)/R·B·row                B·K, F/R wide
    replicas   w·E·p(T)                     0                              T·K of one rank

    layout     exchange
    EP         dispatch and combine
    TP         permute, finalize, all-reduce
    replicas   nothing sent

    max        of R ranks that differ by chance: mean + m(R)·√variance,
               m(R) the largest of R normal draws on average;
               the variance of rows is B·K/R·(E−K)/(E−1), times `load` like their mean
    experts    n rows an expert.
               n ≤ `_FEW_ROWS`: few_us + (1.02 + 0.009·n)·reads / memory
               else: gemm_us + ∛(m³ + c³), m = 1.08·(reads + rows·`_row_bytes`) / memory,
               c = 6·D·F·rows / flop
    exchange   EP: `NodeModel.us`, both ways,
               and quantize_ns for each row that is read or written in fp8
               TP: local_us + local·bytes of permute and finalize / memory
               + collective_us + sends / collective
    layer      route_us + exchange + experts

EP has tokens by rank, and TP has all tokens on all ranks, as tensor-parallel attention leaves them.
Where attention is data parallel, an all-gather and a reduce-scatter of as many bytes replace TP's
all-reduce. docs/parallelism.md compares the model with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from epmoe.bench.layer_sides import DENSE_FLOP_PER_US
from epmoe.bench.node_model import NodeModel, RowBytes, Speeds, Spread
from epmoe.bench.sample import Payload
from epmoe.config.config import EPConfig
from epmoe.local.gemm.few_rows import FewRows, Reading, most_rows
from epmoe.local.gemm.few_rows_by_tma import FewRowsByTma, InvariantFewRows, most_rows_by_tma
from epmoe.local.gemm.fused_experts import FusedExperts, fewest_rows_fused, most_rows_fused
from epmoe.local.weight_formats import FP8_BLOCKS
from epmoe.native.arguments import FP8

BATCHES = (1, 16, 128, 512, 1024, 4096)
"""T that are compared."""
WRONG = 1.15
"""EP is the wrong choice if it takes so many times as long as another layout: the model is not more
exact.
"""
# At 1 GB/s.
_BYTES_PER_US = 1000
# Both GPUs have as many.
_MULTIPROCESSORS = 132
# With more rows, the layers that the constants were fitted to took a GEMM.
_FEW_ROWS = 8.0
_GEMM = 1.08  # bytes of GEMMs over those that must be read, in time


@dataclass(frozen=True)
class Gpu:
    """Constants of a GPU of compute capability 9.0, whose sources are in docs/parallelism.md. 1
    GB/s is 10⁹ bytes/s.
    """

    memory_gb_per_s: float
    """GB/s, bytes read plus bytes written, of a plain copy."""
    node: Speeds
    """of the exchange within a node"""
    route_us: float = 2.0
    """µs of route."""
    local_us: tuple[float, float] = (21.0, 38.0)
    """µs of permute, with aligned segments, and finalize without rows; in fp8 they quantize and
    sort scales, too.
    """
    local: tuple[float, float] = (1.2, 1.7)
    """Time of their bytes over that of a plain copy, in bf16 and in fp8."""
    few_us: float = 6.0
    """µs of the kernels for few rows without weights."""
    gemm_us: float = 18.0
    """µs of the experts without weights and rows: two grouped GEMMs, the activation, the scales."""
    busy: tuple[float, float] = (0.58, 0.47)
    """Share of the dense rate that the GEMMs reach where nothing waits for memory, in bf16 and in
    fp8.
    """
    quantize_ns: float = 1.5
    """ns that a row of dispatch takes longer in fp8."""
    collective_us: float = 11.5
    """µs of a collective of NCCL without rows, in a CUDA graph."""
    collective_gb_per_s: float = 270.0
    """GB/s that each GPU sends in a collective of NCCL."""


GPUS = {
    "h100": Gpu(2980, Speeds(local_gb_per_s=2300, row_ns=0.5, exchange_us=4.8)),
    "h200": Gpu(4262, Speeds(local_gb_per_s=2900, row_ns=0.5, exchange_us=4.8)),
}
"""The GPUs whose constants were measured, by name."""


class Cost(NamedTuple):
    """What a layout costs each GPU, in a layer."""

    us: float
    """µs of the whole layer"""
    exchange_us: float
    """µs of it for all but route and experts"""
    experts_us: float
    """µs of it for the experts"""
    sent_bytes: float
    """bytes that a GPU sends to others"""
    read_bytes: float
    """bytes of weights that a GPU reads"""
    held_bytes: float
    """bytes of the layer's weights that a GPU holds"""


def better_than_ep(costs: dict[str, Cost]) -> str | None:
    """The layout that is faster than "EP" by `WRONG` at least, or None. Of two, the fastest."""
    fastest = min(costs, key=lambda name: costs[name].us)
    is_wrong = costs["EP"].us >= WRONG * costs[fastest].us
    return fastest if is_wrong else None


class Comparison:
    """The costs of a one-node configuration's layouts on some GPU. Raises ValueError for a case
    that the model lacks.
    """

    def __init__(self, config: EPConfig, gpu: Gpu, fp8: bool) -> None:
        model = config.model
        problem = problem_with(config, fp8)
        if problem:
            raise ValueError(problem)
        assert model.intermediate_size is not None
        self.gpu = gpu
        self.R = config.topology.ep_size
        self.E = model.num_experts
        self.K = model.num_experts_per_tok
        self.D = model.hidden_size
        self.F = model.intermediate_size
        # The dtype of weights, and of rows of dispatch.
        self.dtype = FP8 if fp8 else model.torch_dtype
        self.element = self.dtype.itemsize
        self.invariant = config.experts.batch_invariant
        config = (Payload.FP8_OUT if fp8 else Payload.PLAIN).applied(config)
        self.ways = RowBytes.of(config)
        self.exchange = NodeModel(gpu.node, self.R, Spread.of(config))
        # An exchange of one rank, for replicas.
        self.alone = NodeModel(gpu.node, 1, Spread(self.K, 1.0))
        # Weights, and in fp8 a scale of four bytes for each block of them.
        elements = 3 * self.D * self.F
        self.expert_bytes: float = elements * self.element
        if fp8:
            self.expert_bytes += elements * 4 / math.prod(FP8_BLOCKS.block)

    def costs(self, T: int, load: float = 1.0) -> dict[str, Cost]:
        """The cost of "EP", "TP" and "replicas" with R·T tokens. `load`: rows of EP's busiest rank
        over the mean.
        """
        weights = self.E * self.expert_bytes
        pairs_of_expert = self.R * T * self.K / self.E
        return {
            "EP": self._cost_of_ep(T, load, pairs_of_expert, held=weights / self.R),
            "TP": self._cost_of_tp(T, pairs_of_expert, held=weights / self.R),
            "replicas": self._cost_of_replicas(T, held=weights),
        }

    def _cost_of_ep(self, T: int, load: float, pairs_of_expert: float, held: float) -> Cost:
        R = self.R
        K = self.K
        E = self.E
        out, back = self.ways
        # The exchange: a row for each rank that a token needs, and back.
        sent = T * self.exchange.spread.ranks * (R - 1) / R * (out.node + back.node)
        exchange_us = self._exchanged_us(self.exchange, T)
        # The busiest rank reads most experts, and has most rows.
        needed = E / R * self._busy(R * T)
        variance = needed * (1 - self._busy(R * T))
        read = self.expert_bytes * min(E / R, self._busiest(needed, variance))
        pairs = R * T * K
        mean_rows = load * (R * T) * K / R
        rows = min(pairs, self._busiest(mean_rows, mean_rows * (E - K) / max(E - 1, 1)))
        experts_us = self._experts_us(read, rows, self.F, pairs_of_expert)
        return self._cost(exchange_us, experts_us, sent, read, held)

    def _cost_of_tp(self, T: int, pairs_of_expert: float, held: float) -> Cost:
        R = self.R
        gpu = self.gpu
        tokens = R * T
        # Rows are permuted and summed here, and an all-reduce adds the parts of all.
        all_reduced = 2 * (R - 1) / R * tokens * 2 * self.D
        reduce_us = 0.0
        if R > 1:
            reduce_us = gpu.collective_us
            reduce_us += all_reduced / (gpu.collective_gb_per_s * _BYTES_PER_US)
        exchange_us = self._local_us(tokens) + reduce_us
        # Each rank has a part of every expert, and all rows.
        read = held * self._busy(tokens)
        experts_us = self._experts_us(read, tokens * self.K, self.F / R, pairs_of_expert)
        return self._cost(exchange_us, experts_us, all_reduced, read, held)

    def _cost_of_replicas(self, T: int, held: float) -> Cost:
        """Nothing is sent: each rank has all experts for its own tokens."""
        read = held * self._busy(T)
        pairs = T * self.K
        experts_us = self._experts_us(read, pairs, self.F, pairs / self.E)
        return self._cost(self._exchanged_us(self.alone, T), experts_us, 0.0, read, held)

    def borders(self) -> dict[str, int]:
        """The largest T whose experts take each kernel for few rows, with EP; those of more take a
        grouped GEMM.
        """
        step = FewRows.steps.get(self.dtype, math.inf)
        if self.D % step or self.F % step:
            return {}
        bytes_of_rank = self.E / self.R * self.expert_bytes
        reading = Reading.of(bytes_of_rank, self.gpu.memory_gb_per_s, _MULTIPROCESSORS)
        # Most rows of an expert, by kernel.
        by_tma = most_rows_by_tma(self.dtype, reading)
        if self.invariant:
            rows = {InvariantFewRows.name: by_tma}
        else:
            rows = {FewRows.name: most_rows(self.dtype, reading), FewRowsByTma.name: by_tma}
        if self.dtype == FP8 and not self.invariant:
            rows[FewRowsByTma.name] = min(by_tma, fewest_rows_fused(reading))
            rows[FusedExperts.name] = most_rows_fused(reading)
        # A kernel whose calls an earlier one takes has no border.
        borders: dict[str, int] = {}
        for name, most in rows.items():
            tokens = int(most * self.E / (self.R * self.K))
            if tokens > max(borders.values(), default=0):
                borders[name] = tokens
        return borders

    def _cost(
        self, exchange_us: float, experts_us: float, sent: float, read: float, held: float
    ) -> Cost:
        us = self.gpu.route_us + exchange_us + experts_us
        return Cost(us, exchange_us, experts_us, sent, read, held)

    def _exchanged_us(self, exchange: NodeModel, T: int) -> float:
        """µs of dispatch and combine. In fp8, rows are quantized, and their scales read."""
        us = sum(exchange.us(T, way) for way in self.ways)
        if self.element == 1:
            spread = exchange.spread
            us += T * (spread.experts + spread.ranks) * self.gpu.quantize_ns / 1000
        return us

    def _experts_us(self, read: float, rows: float, width: float, of_each: float) -> float:
        """µs of the experts, which have this width and `of_each` rows on average."""
        gpu = self.gpu
        bandwidth = gpu.memory_gb_per_s * _BYTES_PER_US
        # Few rows: to read the weights. More: a GEMM, which reads and computes at once.
        if of_each <= _FEW_ROWS:
            return gpu.few_us + (1.02 + 0.009 * of_each) * read / bandwidth
        rate = DENSE_FLOP_PER_US[(9, 0), self.element] * gpu.busy[self.element == 1]
        moved = _GEMM * (read + rows * self._row_bytes(width)) / bandwidth
        computed = 6 * self.D * width * rows / rate
        return float(gpu.gemm_us + (moved**3 + computed**3) ** (1 / 3))

    def _row_bytes(self, width: float) -> float:
        """Bytes that the experts read and write for a row: x, gate and up and the activation twice,
        and the output.
        """
        return self.D * self.element + 8 * width + 2 * width * self.element + 2 * self.D

    def _local_us(self, tokens: int) -> float:
        """µs of permute and finalize, which read and write a row for each token and each of its
        experts.
        """
        moved = tokens * (1 + self.K) * self.D * (self.element + 2)
        bandwidth = self.gpu.memory_gb_per_s * _BYTES_PER_US
        is_fp8 = self.element == 1
        return self.gpu.local_us[is_fp8] + self.gpu.local[is_fp8] * moved / bandwidth

    def _busiest(self, mean: float, variance: float) -> float:
        """The largest of R independent draws, on average (Blom's approximation)."""
        if self.R == 1:
            return mean
        deviations = NormalDist().inv_cdf((self.R - 0.375) / (self.R + 0.25))
        return mean + deviations * math.sqrt(variance)

    def _busy(self, tokens: int) -> float:
        """The share of experts that so many tokens need."""
        return float(1 - (1 - self.K / self.E) ** tokens)


def problem_with(config: EPConfig, fp8: bool) -> str | None:
    """Why the model does not know this case, or None."""
    model = config.model
    step = FP8_BLOCKS.block[1]
    if model.intermediate_size is None:
        return "`model.intermediate_size` must be set, to the width of the experts"
    if model.torch_dtype.itemsize != 2:
        return f"`model.dtype` must be bfloat16 or float16, got {model.dtype}"
    if config.topology.num_nodes > 1:
        return "`topology.ranks_per_node` must be unset: the comparison is of one node"
    if fp8 and (model.hidden_size % step or model.intermediate_size % step):
        return f"fp8 needs D and F that are multiples of {step}"
    return None
