"""The interface of a grouped GEMM, an object that multiplies rows by the weights of their experts.

    rows [N,D] ─ gate and up ─▶ [N,2F] ─ gated activation ─▶ [N,F] ─ down ─▶ outputs [N,D]

The rows of an expert follow one another and are called its segment. There may be a gap between two
segments. Rows of gaps and rows behind the last segment may hold any values, and so may their
products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from epmoe.local.quantize import dequantize_rows, quantize_fp8
from epmoe.local.weight_formats import PACKED, dequantize_weights, plain_shape, product_dtype
from epmoe.native import ops
from epmoe.native.arguments import FP8, MXFP4, dtype_name

# The major number of Hopper's compute capability.
_HOPPER = 9
# Addresses and strides must be multiples of this number of bytes.
_BYTES_AT_ONCE = 16

Scaled = tuple[Tensor, Tensor | None]
"""A tensor of rows or weights and the scales of its format; None if the format has no scales."""


class Gating(NamedTuple):
    """The settings of the activation, as `GroupedExperts` describes them.

    They are in the order in which the operator `gated_activation` takes them.
    """

    interleaved: bool
    limit: float
    """infinite if there is no limit"""
    alpha: float
    up_offset: float


SWIGLU = Gating(interleaved=False, limit=math.inf, alpha=1.0, up_offset=0.0)
"""silu(gate) · up, where all gate rows of an expert come before its up rows"""


class Segments(NamedTuple):
    """Where the rows of each of e experts lie in a call."""

    offsets: Tensor
    """int32 [e + 1], contiguous: the first row of each segment, and the row behind the last one"""
    tokens: Tensor | None
    """int32 [e], contiguous: the rows of each segment without its gap; None: there are no gaps"""
    alignment: int
    """the number of rows at whose multiples all segments start"""
    rows_per_expert: float | None = None
    """how many rows an expert has on average, as far as this rank can tell; None: not known"""


class Factors(NamedTuple):
    """The factors b and a of all adapters of one weight. The adapters share C columns."""

    a: Tensor
    """[e, C, k]"""
    b: Tensor
    """[e, n, C]"""


class Added(NamedTuple):
    """What LoRA adapters add to the two products of a call."""

    gemm: Gemm
    """a GEMM for the products by a and b, which takes any segments"""
    gate_up: Factors
    down: Factors
    masked_columns: Tensor
    """bool [N, C]: for each row, the columns that are not those of the row's adapter. The products
    may have fewer rows than N: on CPUs the stage leaves out the rows behind the last segment.
    """

    def to(self, out: Tensor, rows: Scaled, factors: Factors, ends: Tensor) -> Tensor:
        """Add what adapters add to the product of rows [N, k] with one weight.

        `out` [N, n] is that product, and is changed in place. `factors` are those of the weight,
        and `ends`, int32 [e], are the rows behind each segment.
        """
        a, b = factors
        # Multiply each row by the factors a of all adapters: [N, C].
        plain = plain_rows(rows, a.dtype)
        products_NC = self.gemm.product((plain, None), (a, None), ends)
        # Keep the columns of the row's own adapter.
        products_NC.masked_fill_(self.masked_columns[: len(products_NC)], 0)
        return out.add_(self.gemm.product((products_NC, None), (b, None), ends))


class TrainedWeights(NamedTuple):
    """The weights of experts in a call with gradients.

    All are contiguous and have the same dtype: fp32, fp16 or bf16.
    """

    gate_up: Tensor
    """[e, 2F, D]"""
    down: Tensor
    """[e, D, F]"""
    gate_up_bias: Tensor | None
    """[e, 2F]"""
    down_bias: Tensor | None
    """[e, D]"""


class TrainedSegments(NamedTuple):
    """Where each expert's rows lie, and the settings of the activation, in a call with gradients.

    The operators of csrc take these fields, in this order, as their last arguments.
    """

    offsets: Tensor
    """int32 [e + 1], contiguous"""
    tokens: Tensor | None
    """int32 [e]: the rows of each segment without its gap; None: there are no gaps"""
    interleaved: bool
    limit: float
    """infinite if there is no limit"""
    alpha: float
    up_offset: float


class Kept(NamedTuple):
    """Tensors of the forward pass that the backward pass needs.

    A tensor is None if no gradient that is wanted needs it.
    """

    rows: Tensor | None
    """[N, D]"""
    gate_up: Tensor
    """[N, 2F], the first product, without its bias and before the activation"""
    row_weights: Tensor | None
    """fp32 [N]"""
    w_gate_up: Tensor | None
    w_down: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class ExpertGradients(NamedTuple):
    """The gradients that `Gemm.train_backward` returns."""

    gate_up: Tensor
    """[N, 2F], the gradient of the first product with its bias"""
    row_weights: Tensor
    """fp32 [N]"""
    rows: Tensor | None
    """[N, D]"""
    w_gate_up: Tensor | None
    """[e, 2F, D]"""
    w_down: Tensor | None
    """[e, D, F]"""


class Weights(NamedTuple):
    """The weights of experts, as `GroupedExperts` has them, and the other settings of a call."""

    gate_up: Tensor
    """[e, 2F, D]; [e, 2F, D/2] in MXFP4 and NVFP4"""
    down: Tensor
    """[e, D, F]; [e, D, F/2] in MXFP4 and NVFP4"""
    gate_up_scales: Tensor | None
    """scales of the shape `WeightFormat.scales_shape`, or None if the dtype has no scales"""
    down_scales: Tensor | None
    gate_up_bias: Tensor | None
    """[e, 2F]"""
    down_bias: Tensor | None
    """[e, D]"""
    gating: Gating
    added: Added | None = None
    """what adapters add in this call, which then takes a GEMM with `Gemm.takes_adapters`"""
    tensor_scales: Tensor | None = None
    """fp32 [e, 3]: the scales of the whole matrices of gate, up and down; None: there are none.
    Products of weights lack them. `Gemm.experts` applies all three around the activation.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of outputs."""
        return product_dtype(self.down)


class Gemm(ABC):
    """A grouped GEMM. An object has no state, so one object serves all experts.

    `table.choose` asks `problem_with` once for given weights. Each call asks `takes`.
    """

    name: ClassVar[str]
    """The name by which `GroupedExperts(gemm=…)` and operators refer to this GEMM."""
    needs_gpu: ClassVar[bool] = False
    """Whether it runs on GPUs only. Users can choose such a GEMM by its name."""
    block: ClassVar[int] = 1
    """The number of rows at whose multiples segments must start. It divides the numbers of
    `epmoe.config.config.ROW_BLOCKS`.
    """
    batch_invariant: ClassVar[bool] = False
    """Whether the bits of a row's output depend on the row only. If a GEMM takes only some calls
    (see `takes`), its outputs must also have the bits of the GEMM that takes the other calls.
    """
    takes_all_calls: ClassVar[bool] = True
    """Whether `takes` depends on the alignment only. If adapters may add, too, users can choose the
    GEMM by its name.
    """
    takes_all_rows: ClassVar[bool] = True
    """Whether it takes rows with and without scales. Otherwise calls ask `takes_rows`."""
    takes_fp8: ClassVar[bool] = False
    """Whether it can multiply fp8 rows by fp8 weights. Otherwise it dequantizes them."""
    takes_tensor_scales: ClassVar[bool] = False
    """Whether it takes NVFP4 weights, if `problem_with` says that it takes their codes."""
    takes_adapters: ClassVar[bool] = True
    """Whether it takes calls in which adapters add to the products."""

    @abstractmethod
    def problem_with(self, gate_up: Tensor, down: Tensor) -> Exception | None:
        """Say why this GEMM cannot take these weights on their device, or return None.

        The result is a ModuleNotFoundError if a library is not installed, and an ImportError if it
        is installed but does not work.
        """

    def most_rows(self, gate_up: Tensor, down: Tensor) -> float:
        """The most rows of an expert, on average, for which this GEMM should be used.

        It depends on the weights and their device. `Stage` asks once and gives it to `takes`.
        """
        return math.inf

    def takes(self, segments: Segments, most_rows: float = math.inf) -> bool:
        """Whether this GEMM takes a call with such segments.

        `most_rows` is the result of the method `most_rows`. Each call asks, so the method must be
        quick and must not wait for the device.
        """
        return segments.alignment % self.block == 0

    def takes_rows(self, rows: Tensor, scales: Tensor | None) -> bool:
        """Whether this GEMM takes a call with such rows, which are fp8 if there are scales."""
        return True

    def trains(self, gate_up: Tensor, down: Tensor) -> bool:
        """Whether this GEMM can compute calls with gradients for these weights.

        It must then multiply by the weights and by their transposes, and have the method
        `multiply_for_weights`.
        """
        return False

    def is_capturable(self, weights: Tensor) -> bool:
        """Whether a CUDA graph can capture products with these weights.

        It can if the host does not wait for the device.
        """
        return True

    def refuse_capture(self, weights: Tensor) -> None:
        """Raise RuntimeError if a CUDA graph is being captured and could not capture this GEMM.

        CUDA's own error would not say why, and would end the capture.
        """
        # While a compiler traces, nothing is captured. The compiled code may be captured later.
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
        """Whether torch.compile may trace `multiply`. Otherwise it becomes one opaque operator."""
        return False

    def multiply(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int) -> Tensor:
        """Multiply the rows of each expert by the expert's weight. Callers use `product`.

        It computes rows [N, k] · weights [e, n, k]ᵀ → [N, n]. The rows have the dtype of the
        weights, or they are fp8 with scales [N, k/128]. If the weights are fp8, too, and
        `takes_fp8` is True, the scales are given with contiguous columns, as the kernels need them.
        The weights have a dtype for which `problem_with` returns None. Quantized weights come with
        scales, as in `Weights`, but without tensor scales, which the product lacks. `ends` is int32
        [e], the row behind each segment. Segments start at multiples of `alignment` rows, which is
        a multiple of `block`. Products are bf16 if the weights have scales, otherwise they have the
        dtype of the weights.

        A GEMM that computes the whole stage in `experts` does not have this method.
        """
        raise NotImplementedError

    def multiply_plain(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows by weights of the same dtype, without scales and for any segments.

        Calls with gradients use it. Otherwise it is like `multiply`.
        """
        return self.multiply((rows, None), (weights, None), ends, alignment=1)

    def multiply_for_weights(self, grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        """Compute the gradients of weights: grad [N, n]ᵀ · rows [N, k] → [e, n, k], by expert.

        The gradient of an expert without rows is 0. GEMMs for which `trains` is never True do not
        have this method.
        """
        raise NotImplementedError

    def train(
        self, rows: Tensor, weights: TrainedWeights, segments: TrainedSegments, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run both products, with the activation between them, on rows [N, D].

        `bias` is that of gate and up. Returns the outputs [N, D] without the bias of down, and the
        first product [N, 2F] without `bias` and before the activation.
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
        """Compute the gradients of `train` from `grad` [N, D], the gradient of weighted outputs.

        `gate_up` [N, 2F] is the first product with its bias. The gradient of rows needs
        `kept.w_gate_up`, and the gradient of `w_gate_up` needs `kept.rows`. If the tensor that a
        gradient needs is None, the gradient is None.
        """
        ends = segments.offsets[1:]
        # Go back through down and the activation. The forward pass has not kept the inputs of down,
        # so the operator computes them again: `weighted` [N, F], times the weights of the rows.
        grad_activated = self.multiply_plain(grad, w_down.transpose(1, 2), ends)
        grad_gate_up, grad_weights, weighted = ops.weighted_gates_backward(
            grad_activated, gate_up, kept.row_weights, *segments, needs_down
        )
        grad_down = None
        if needs_down:
            grad_down = self.multiply_for_weights(grad, weighted, ends)
        grad_rows = None
        if kept.w_gate_up is not None:
            grad_rows = self.multiply_plain(grad_gate_up, kept.w_gate_up.transpose(1, 2), ends)
        grad_w_gate_up = None
        if kept.rows is not None:
            grad_w_gate_up = self.multiply_for_weights(grad_gate_up, kept.rows, ends)
        return ExpertGradients(
            gate_up=grad_gate_up,
            row_weights=grad_weights,
            rows=grad_rows,
            w_gate_up=grad_w_gate_up,
            w_down=grad_down,
        )

    def product(self, rows: Scaled, weights: Scaled, ends: Tensor, alignment: int = 1) -> Tensor:
        """Call `multiply`. Where torch.compile cannot trace it, it becomes one opaque operator."""
        if torch.compiler.is_compiling() and not self.is_traceable(rows[0], weights[0]):
            product: Tensor = torch.ops.epmoe.grouped_gemm(
                self.name, *rows, *weights, ends, alignment
            )
            return product
        return self.multiply(rows, weights, ends, alignment)

    def experts(
        self, weights: Weights, rows: Tensor, scales: Tensor | None, segments: Segments
    ) -> Tensor:
        """Run the whole experts stage without gradients: rows [N, D] → outputs [N, D].

        The rows have the dtype of outputs, or they are fp8 and `scales` is fp32 [N, ⌈D/128⌉]. A
        GEMM that computes the stage in one or two kernels replaces this method.
        """
        unquantized = (rows, scales)
        added = weights.added
        ends = segments.offsets[1:]
        n = rows.shape[0]
        alignment = segments.alignment

        # If the GEMM can multiply in fp8, give it fp8 rows, with scales in its own layout.
        in_fp8 = self.takes_fp8 and weights.down.dtype == FP8
        if in_fp8:
            if scales is None:
                rows, scales = quantize_fp8(rows, num_tokens=ends[-1])
            scales = ops.scales_by_block(scales, segments.offsets, segments.tokens).t()[:n]

        # Compute gate and up, the activation, then down. Adapters add to both products, which must
        # then have their tensor scales. Otherwise the activation applies all tensor scales.
        gate_up = self.product(
            (rows, scales), (weights.gate_up, weights.gate_up_scales), ends, alignment
        )
        tensor_scales = weights.tensor_scales
        if added is not None:
            if tensor_scales is not None:
                interleaved = weights.gating.interleaved
                gate_up = _scaled_halves(gate_up, tensor_scales[:, :2], ends, interleaved)
            gate_up = added.to(gate_up, unquantized, added.gate_up, ends)
            weights = weights._replace(tensor_scales=None)
        activated = _activation(gate_up, weights, segments, in_fp8)
        out = self.product(activated, (weights.down, weights.down_scales), ends, alignment)
        if added is not None:
            if tensor_scales is not None:
                out = (out * of_rows(tensor_scales[:, 2:], ends, n)).to(out.dtype)
            out = added.to(out, activated, added.down, ends)
        if weights.down_bias is not None:
            out = out + of_rows(weights.down_bias, ends, n)
        return out


def on_hopper(device: torch.device | str) -> bool:
    """Whether a device is a GPU of compute capability 9.x."""
    if torch.device(device).type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major == _HOPPER


def problem_on_hopper(
    name: str, gate_up: Tensor, down: Tensor, steps: dict[torch.dtype, int]
) -> ValueError | None:
    """Say why a library for compute capability 9 does not take these weights, or return None.

    `name` is the library's name in the message. `steps` has, for each dtype that the library takes,
    the number that must divide all sizes of the weights.
    """
    # Check the dtype, the GPU, then the sizes.
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
        if PACKED.get(down.dtype, 1) > 1:
            kind = "4-bit"
        return ValueError(f"{name} takes {kind} weights of multiples of {step}, got {sizes}")
    return None


def is_readable(tensor: Tensor) -> bool:
    """Whether kernels can read a tensor 16 bytes at a time, or by TMA: it must be contiguous and
    begin at a multiple of 16 bytes. A view of a longer tensor may begin anywhere.
    """
    return tensor.is_contiguous() and tensor.data_ptr() % _BYTES_AT_ONCE == 0


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if kernels cannot read it so."""
    if is_readable(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def plain_rows(rows: Scaled, dtype: torch.dtype) -> Tensor:
    """Return rows [N, k] without scales: as they are, or dequantized to `dtype`."""
    values, scales = rows
    if scales is None:
        return values
    return dequantize_rows(values, scales, dtype)


def plain_weights(weights: Scaled) -> Tensor:
    """Return weights [e, n, k] in the dtype of products: as they are, or dequantized."""
    values, scales = weights
    if scales is None:
        return values
    if values.dtype == MXFP4 and values.is_cuda:
        dequantized: Tensor = ops.dequantize_mxfp4(readable(values), scales.contiguous())
        return dequantized
    plain = torch.empty(plain_shape(values), dtype=product_dtype(values), device=values.device)
    # Dequantize expert by expert: the values in between are fp32, and those of all experts at once
    # would take four times the memory.
    for i in range(len(values)):
        plain[i] = dequantize_weights(values[i], scales[i], plain.dtype)
    return plain


def of_rows(values: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """The values of each row's expert, [N, n], from those of experts [e, n], such as biases.

    `ends` is int32 [e], the row behind each segment, and `num_rows` is N. A row behind the last
    segment has no expert; it gets the values of the first expert, and nobody reads it.
    """
    row_indices = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    experts = torch.searchsorted(ends, row_indices, right=True, out_int32=True)
    # Behind the last segment the search returns e, which is not a valid index.
    experts.masked_fill_(row_indices >= ends[-1], 0)
    return values.index_select(0, experts)


def _scaled_halves(gate_up: Tensor, scales: Tensor, ends: Tensor, interleaved: bool) -> Tensor:
    """Multiply products [N, 2F] by the tensor scales of gate and up, fp32 [e, 2]."""
    N, columns = gate_up.shape
    scales_N2 = of_rows(scales, ends, N)
    if interleaved:
        halves = gate_up.view(N, columns // 2, 2) * scales_N2[:, None, :]
    else:
        halves = gate_up.view(N, 2, columns // 2) * scales_N2[:, :, None]
    return halves.to(gate_up.dtype).view(N, columns)


def _activation(gate_up: Tensor, weights: Weights, segments: Segments, quantize: bool) -> Scaled:
    """Run the gated activation, [N, 2F] → [N, F]. With `quantize` the result is fp8 with scales.

    Tensor scales of gate and up multiply the products before the bias is added, and those of down
    multiply the activations, in fp32: then the product by down has them. The kernel computes only
    rows of segments, since N may be much larger.
    """
    bias = weights.gate_up_bias
    gating = weights.gating
    if gate_up.dtype != torch.float64:
        if bias is not None:
            bias = bias.contiguous()
        activated, scales = ops.gated_activation(
            gate_up,
            segments.offsets,
            segments.tokens,
            bias,
            *gating,
            quantize,
            weights.tensor_scales,
        )
        if not quantize:
            return activated, None
        return activated, scales.t()[: len(gate_up)]

    # The kernel does not take fp64. If there is no limit, the limit is infinite and has no effect.
    if bias is not None:
        gate_up = gate_up + of_rows(bias, segments.offsets[1:], len(gate_up))
    if gating.interleaved:
        gate = gate_up[:, ::2]
        up = gate_up[:, 1::2]
    else:
        gate, up = gate_up.chunk(2, dim=1)
    gate = gate.clamp(max=gating.limit)
    up = up.clamp(-gating.limit, gating.limit)
    return gate * torch.sigmoid(gating.alpha * gate) * (up + gating.up_offset), None
