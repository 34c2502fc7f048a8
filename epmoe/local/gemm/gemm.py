"""What a grouped GEMM is: an object that multiplies rows by the weights of their experts.

    rows [N,D] ─ gate and up ─▶ [N,2F] ─ gated activation ─▶ [N,F] ─ down ─▶ outputs [N,D]

Rows lie expert by expert. Rows of gaps and past the last segment may hold anything, and so may
their products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from epmoe.local.quantize import dequantize_rows, quantize_fp8
from epmoe.local.weight_formats import FORMATS, dequantize_weights, plain_shape, product_dtype
from epmoe.native import ops
from epmoe.native.arguments import FP8, MXFP4, dtype_name

# Major number of the compute capability.
_HOPPER = 9

Scaled = tuple[Tensor, Tensor | None]
"""A tensor, and the scales of its format, or None."""


class Gating(NamedTuple):
    """What the activation does, as `GroupedExperts` has it; in the order of `gated_activation`."""

    interleaved: bool
    limit: float
    """infinite for none"""
    alpha: float
    up_offset: float


SWIGLU = Gating(interleaved=False, limit=math.inf, alpha=1.0, up_offset=0.0)
"""silu(gate) · up, all gates before all ups"""


class Segments(NamedTuple):
    """Where the rows of each expert lie in a call."""

    offsets: Tensor
    """int32 [e + 1], contiguous"""
    tokens: Tensor | None
    """int32 [e], contiguous: rows of each segment without its gap; None: there are no gaps"""
    alignment: int
    """in rows: all segments start at its multiples"""
    rows_per_expert: float | None = None
    """of an expert on average, as far as this rank can tell; None: not known"""


class Factors(NamedTuple):
    """The factors b · a of adapters, whose C columns lie side by side."""

    a: Tensor
    """[e, C, k]"""
    b: Tensor
    """[e, n, C]"""


class Added(NamedTuple):
    """What adapters add to both products of a call. Each row has some of their columns."""

    gemm: Gemm
    """multiplies by a and b, whatever the segments are"""
    gate_up: Factors
    down: Factors
    masked_columns: Tensor
    """bool [N, C]: columns that do not count for a row; the stage may leave out rows at the end"""

    def to(self, out: Tensor, rows: Scaled, factors: Factors, ends: Tensor) -> Tensor:
        """Add the products of rows [N, k] and the factors to `out` [N, n], in place."""
        a, b = factors
        low = self.gemm.product((plain_rows(rows, a.dtype), None), (a, None), ends)
        # Columns of other adapters than the row's do not count.
        low.masked_fill_(self.masked_columns[: len(low)], 0)
        return out.add_(self.gemm.product((low, None), (b, None), ends))


class TrainedWeights(NamedTuple):
    """The weights of experts with gradients, contiguous, in one dtype: fp32, fp16 or bf16."""

    gate_up: Tensor
    """[e, 2F, D]"""
    down: Tensor
    """[e, D, F]"""
    gate_up_bias: Tensor | None
    """[e, 2F]"""
    down_bias: Tensor | None
    """[e, D]"""


class TrainedSegments(NamedTuple):
    """Where each expert's rows lie, and what the activation does with them: the last arguments of
    the operators of csrc.
    """

    offsets: Tensor
    """int32 [e + 1], contiguous"""
    tokens: Tensor | None
    """int32 [e], rows of each segment without its gap; None: all"""
    interleaved: bool
    limit: float
    """infinite for none"""
    alpha: float
    up_offset: float


class Kept(NamedTuple):
    """Tensors of the forward pass that the backward pass needs. A tensor is None where only
    gradients need it that nobody asks for.
    """

    rows: Tensor | None
    """[N, D]"""
    gate_up: Tensor
    """[N, 2F], in front of the bias and the activation"""
    row_weights: Tensor | None
    """fp32 [N]"""
    w_gate_up: Tensor | None
    w_down: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class ExpertGradients(NamedTuple):
    """The gradients that `Gemm.train_backward` returns."""

    gate_up: Tensor
    """[N, 2F], of the first product behind its bias"""
    row_weights: Tensor
    """fp32 [N]"""
    rows: Tensor | None
    """[N, D]"""
    w_gate_up: Tensor | None
    """[e, 2F, D]"""
    w_down: Tensor | None
    """[e, D, F]"""


class Weights(NamedTuple):
    """The weights of experts, as `GroupedExperts` has them, and what belongs to a call of them."""

    gate_up: Tensor
    """[e, 2F, D]; [e, 2F, D/2] in MXFP4"""
    down: Tensor
    """[e, D, F]; [e, D, F/2] in MXFP4"""
    gate_up_scales: Tensor | None
    """of `WeightFormat.scales_shape`, or None where the format has none"""
    down_scales: Tensor | None
    gate_up_bias: Tensor | None
    """[e, 2F]"""
    down_bias: Tensor | None
    """[e, D]"""
    gating: Gating
    added: Added | None = None
    """what adapters add in this call. GEMMs for few rows do not get it"""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of outputs."""
        return product_dtype(self.down)


class Gemm(ABC):
    """A grouped GEMM. It has no state. `table.choose` asks it once for given weights, and each call
    asks `takes`.
    """

    name: ClassVar[str]
    """`GroupedExperts(gemm=…)` and operators use it."""
    needs_gpu: ClassVar[bool] = False
    """It runs on GPUs only, and users can choose it by its name."""
    block: ClassVar[int] = 1
    """Segments must start at multiples of this number of rows, which divides
    `epmoe.config.config.ROW_BLOCKS`.
    """
    batch_invariant: ClassVar[bool] = False
    """The bits of a row's output depend on the row only. A GEMM that takes some of the calls only
    (see `takes`) has the bits of the GEMM that takes the others, or says False.
    """
    takes_all_calls: ClassVar[bool] = True
    """`takes` asks for the alignment only, so users can choose it by its name."""
    takes_fp8: ClassVar[bool] = False
    """`multiply` takes rows and weights in fp8 as they are, if both are. Otherwise it dequantizes
    them.
    """

    @abstractmethod
    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """Why it cannot take these weights on their device, or None. ImportError: a library does
        not work; ModuleNotFoundError: it is not installed.
        """

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        """The most rows of an expert, on average, of calls that it takes with these weights on
        their device.
        """
        return math.inf

    def takes(self, segments: Segments, most_rows: float = math.inf) -> bool:
        """Whether it takes a call with such segments. `most_rows` is its own; it does not look at
        the device.
        """
        return segments.alignment % self.block == 0

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        """Whether it multiplies by these weights in both directions, and has
        `multiply_for_weights`.
        """
        return False

    def is_capturable(self, weights: Tensor) -> bool:
        """Whether a CUDA graph can capture products with these weights. The host then waits for
        nothing.
        """
        return True

    def refuse_capture(self, weights: Tensor) -> None:
        """Raise RuntimeError if the current stream captures a CUDA graph, and this GEMM would
        wait for the host. CUDA's own error would not say why, and would end the capture.
        """
        # Compilers have no such question: what they trace may be captured later.
        if not weights.is_cuda or torch.compiler.is_compiling():
            return
        if not torch.cuda.is_current_stream_capturing():
            return
        if not self.is_capturable(weights):
            major, minor = torch.cuda.get_device_capability(weights.device)
            raise RuntimeError(
                f"a CUDA graph cannot capture these experts: {self.name}, the grouped GEMM for "
                f"{dtype_name(weights.dtype)} weights on compute capability {major}.{minor}, reads "
                "on the host where the rows of each expert end. Ordinary calls are right"
            )

    def is_traceable(self, rows: Tensor, weights: Tensor) -> bool:
        """Whether torch.compile may trace `multiply`; otherwise it is an opaque operator."""
        return False

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        """rows [N, k] · weights [e, n, k]ᵀ → [N, n], by expert. Callers take `product`.

        `rows` are in the weights' dtype, or fp8 with scales [N, k/128]. With `takes_fp8` and fp8
        weights these lie block by block: their columns are contiguous. `weights` are in a dtype
        that `problem_with` takes; fp8 and MXFP4 have scales, as in `Weights`. `ends` is int32 [e],
        the row behind each segment. Segments start at multiples of `alignment` rows, which is one
        of `block`. Products are bf16 where the weights have scales, else in the weights' dtype. A
        GEMM that fuses the stage in `experts` has no such method.
        """
        raise NotImplementedError

    def multiply_plain(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """`multiply` of rows and weights in one dtype without scales, whatever the segments are."""
        return self.multiply((rows, None), (weights, None), ends, alignment=1)

    def multiply_for_weights(self, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        """grad [N, n]ᵀ · rows [N, k] → [e, n, k], by expert; 0 for an expert without rows. See
        `trains`.
        """
        raise NotImplementedError

    def train(
        self, rows: Tensor, weights: TrainedWeights, segments: TrainedSegments, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run both products with the activation between them, for rows [N, D].

        Returns outputs [N, D] without the bias of down, and [N, 2F], the first product before
        `bias` and activation.
        """
        offsets, tokens, *gating = segments
        ends = offsets[1:]
        gate_up = self.multiply_plain(rows, weights.gate_up, ends)
        activated, _ = ops.gated_activation(gate_up, offsets, tokens, bias, *gating, False)
        return self.multiply_plain(activated, weights.down, ends), gate_up

    def train_backward(
        self,
        grad: Tensor,
        gate_up: Tensor,
        kept: Kept,
        w_down: Tensor,
        segments: TrainedSegments,
        needs_down: bool,
    ) -> ExpertGradients:
        """The gradients of `train`, given that of outputs [N, D].

        `gate_up` [N, 2F] has its bias. Gradients of rows need `kept.w_gate_up`, and those of
        `w_gate_up` need `kept.rows`: each is None without.
        """
        ends = segments.offsets[1:]
        # `weighted` [N, F], the inputs of the second product, are computed once more: the forward
        # pass has not kept them.
        grad_activated = self.multiply_plain(grad, w_down.transpose(1, 2), ends)
        grad_gate_up, grad_weights, weighted = ops.weighted_gates_backward(
            grad_activated, gate_up, kept.row_weights, *segments, needs_down
        )
        of_down = None
        if needs_down:
            of_down = self.multiply_for_weights(grad, weighted, ends)
        grad_rows = None
        if kept.w_gate_up is not None:
            grad_rows = self.multiply_plain(grad_gate_up, kept.w_gate_up.transpose(1, 2), ends)
        of_gate_up = None
        if kept.rows is not None:
            of_gate_up = self.multiply_for_weights(grad_gate_up, kept.rows, ends)
        return ExpertGradients(grad_gate_up, grad_weights, grad_rows, of_gate_up, of_down)

    def product(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int = 1) -> Tensor:
        """`multiply`, which torch.compile sees as one operator where it cannot trace it."""
        if torch.compiler.is_compiling() and not self.is_traceable(rows[0], weights[0]):
            product: Tensor = torch.ops.epmoe.grouped_gemm(
                self.name, *rows, *weights, ends, alignment
            )
            return product
        return self.multiply(rows, weights, ends, alignment)

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """The whole stage: rows [N, D] → outputs [N, D].

        Rows are in the dtype of outputs, or fp8 with scales fp32 [N, ⌈D/128⌉]. A GEMM that fuses
        the stage has a method of its own, opaque to torch.compile.
        """
        unquantized = (rows, scales)
        added = weights.added
        ends = segments.offsets[1:]
        n = rows.shape[0]
        alignment = segments.alignment

        # Rows in fp8, if the GEMM multiplies in it, with scales as it wants them.
        in_fp8 = self.takes_fp8 and weights.down.dtype == FP8
        if in_fp8:
            if scales is None:
                rows, scales = quantize_fp8(rows, num_tokens=ends[-1])
            scales = ops.scales_by_block(scales, segments.offsets, segments.tokens).t()[:n]

        # Gate and up, the activation, then down. Adapters add to both products.
        gate_up = self.product(
            (rows, scales), (weights.gate_up, weights.gate_up_scales), ends, alignment
        )
        if added is not None:
            gate_up = added.to(gate_up, unquantized, added.gate_up, ends)
        activated = _activation(gate_up, weights, segments, in_fp8)
        out = self.product(activated, (weights.down, weights.down_scales), ends, alignment)
        if added is not None:
            out = added.to(out, activated, added.down, ends)
        if weights.down_bias is not None:
            out = out + bias_of_rows(weights.down_bias, ends, n)
        return out


def on_hopper(device: torch.device | str) -> bool:
    """Whether a device is a GPU of compute capability 9."""
    if torch.device(device).type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major == _HOPPER


def problem_on_hopper(
    name: str, gate_up: Tensor, down: Tensor, steps: dict[torch.dtype, int]
) -> ValueError | None:
    """Why a library called `name`, for compute capability 9, does not take these weights, or None.
    `steps`: by dtype, the number that must divide all sizes.
    """
    # The dtype, the GPU, then the sizes.
    if down.dtype not in steps:
        names = " or ".join(map(dtype_name, steps))
        return ValueError(f"{name} takes weights in {names}, got {down.dtype}")
    major, _ = torch.cuda.get_device_capability(down.device)
    if major != _HOPPER:
        return ValueError(
            f"{name} takes these weights on GPUs of compute capability {_HOPPER}, got {major}"
        )
    sizes = (*plain_shape(gate_up)[1:], *plain_shape(down)[1:])
    step = steps[down.dtype]
    if any(size % step for size in sizes):
        kind = dtype_name(down.dtype)
        if down.dtype in FORMATS:
            kind = FORMATS[down.dtype].name
        return ValueError(f"{name} takes {kind} weights of multiples of {step}, got {sizes}")
    return None


def plain_rows(rows: Scaled, dtype: torch.dtype) -> Tensor:
    """Rows [N, k]: themselves, or dequantized to `dtype`."""
    values, scales = rows
    if scales is None:
        return values
    return dequantize_rows(values, scales, dtype)


def plain_weights(weights: Scaled) -> Tensor:
    """Weights [e, n, k] in the dtype of products: themselves, or dequantized."""
    values, scales = weights
    if scales is None:
        return values
    if values.dtype == MXFP4 and values.is_cuda:
        dequantized: Tensor = ops.dequantize_mxfp4(values.contiguous(), scales.contiguous())
        return dequantized
    plain = torch.empty(plain_shape(values), dtype=product_dtype(values), device=values.device)
    # All at once would take four times the memory.
    for i in range(len(values)):
        plain[i] = dequantize_weights(values[i], scales[i], plain.dtype)
    return plain


def bias_of_rows(bias: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """The bias of each row's expert, [N, n], by the ends of segments, int32 [e]. Rows past the last
    segment have that of the first expert.
    """
    numbers = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    experts = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    # Past the last segment there is no expert, but an index must be one.
    experts.masked_fill_(numbers >= ends[-1], 0)
    return bias.index_select(0, experts)


def _activation(gate_up: Tensor, weights: Weights, segments: Segments, quantize: bool) -> Scaled:
    """The gated activation, [N, 2F] → [N, F]; with `quantize` in fp8 with scales. Only rows of
    segments are computed, since there may be many more.
    """
    bias = weights.gate_up_bias
    gating = weights.gating
    if gate_up.dtype != torch.float64:
        if bias is not None:
            bias = bias.contiguous()
        activated, scales = ops.gated_activation(
            gate_up, segments.offsets, segments.tokens, bias, *gating, quantize
        )
        if not quantize:
            return activated, None
        return activated, scales.t()[: len(gate_up)]

    # In fp64 there is no kernel. A limit of infinity changes nothing.
    if bias is not None:
        gate_up = gate_up + bias_of_rows(bias, segments.offsets[1:], len(gate_up))
    if gating.interleaved:
        gate = gate_up[:, ::2]
        up = gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=1)
    gate = gate.clamp(max=gating.limit)
    up = up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(gating.alpha * gate) * (up + gating.up_offset), None
