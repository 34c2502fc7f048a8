"""The experts stage as a module: `GroupedExperts`, the SwiGLU experts of one rank.

It computes on expert-major rows, by two grouped GEMMs that `Stage` chooses for the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor, nn

from epmoe.local.gemm.gemm import Added, Gating, Segments, Weights
from epmoe.local.gemm.table import CHOICES, GEMMS
from epmoe.local.spread import local_view
from epmoe.local.stage import Stage
from epmoe.local.weight_formats import (
    PACKED,
    WeightFormat,
    bits_of,
    format_of,
    plain_shape,
    product_dtype,
)
from epmoe.native.arguments import (
    FLOATS,
    FP8,
    check_number,
    check_tensor,
    dtype_name,
    refuse_tangents,
    wants_gradients,
)
from epmoe.native.formats import format_of_rows

# The dtypes that weights may have.
DTYPES = (*FLOATS, torch.float64, *PACKED)
# The parameters that casts leave alone if the weights have scales.
_KEEP_DTYPE = ("w_gate_up", "w_down", "gate_up_scales", "down_scales", "tensor_scales")


class _Sizes(NamedTuple):
    """The sizes of experts' weights, counted in numbers even if an item of memory has several."""

    e: int
    """how many experts this rank has"""
    D: int
    """the hidden size"""
    F: int
    """the width of an expert"""


def _checked_sizes(w_gate_up: Tensor, w_down: Tensor, quantized: WeightFormat | None) -> _Sizes:
    """Check the shapes and dtypes of weights [e, 2F, D] and [e, D, F], and return their sizes.

    `quantized` is the format of weights with scales. Raises TypeError or ValueError, which names
    the argument, if the weights do not fit each other.
    """
    # Both weights must have the same dtype. If that of `w_down` is allowed, errors name it alone,
    # otherwise they list all allowed dtypes.
    dtype = getattr(w_down, "dtype", None)
    dtypes = [known for known in DTYPES if known == dtype]
    check_tensor("w_down", w_down, dtypes or DTYPES, ("e", "D", "F"))
    e, D, F = plain_shape(w_down)

    # An item of e2m1 has two numbers, and a group of 32 or 16 numbers has one scale.
    packed = 1
    if quantized is not None and quantized.packed > 1:
        packed = quantized.packed
        group = quantized.block[1]
        if D % group or F % group:
            raise ValueError(
                f"D and F of {quantized.name} must be multiples of {group}, got {D} and {F}"
            )

    _check_not_transposed(w_gate_up, w_down)
    check_tensor("w_gate_up", w_gate_up, dtypes, (e, 2 * F, D // packed), w_down.device)
    return _Sizes(e, D, F)


def _check_not_transposed(w_gate_up: object, w_down: Tensor) -> None:
    """Raise ValueError if the weights do not fit, but would fit if some of them were transposed.

    The error names these weights. Weights in a format with scales are not looked at.
    """
    if not isinstance(w_gate_up, Tensor) or w_gate_up.dim() != 3 or w_gate_up.dtype != w_down.dtype:
        return
    weights = {"w_gate_up": w_gate_up, "w_down": w_down}
    if _fit(weights) or w_down.dtype in PACKED:
        return
    # Try to transpose one of the weights, then both.
    for names in (["w_gate_up"], ["w_down"], ["w_gate_up", "w_down"]):
        transposed = weights | {name: weights[name].mT for name in names}
        if _fit(transposed):
            shapes = {name: list(transposed[name].shape) for name in names}
            wants = " and ".join(f"`{name}` must be {shape}" for name, shape in shapes.items())
            got = " and ".join(f"{list(weights[name].shape)}" for name in names)
            raise ValueError(f"{wants}, got {got}, which is transposed: give its .mT")


def _fit(weights: Mapping[str, Tensor]) -> bool:
    """Whether the weights are [e, 2F, D] and [e, D, F] with the same e, D and F."""
    e, two_f, d = weights["w_gate_up"].shape
    return weights["w_down"].shape == (e, d, two_f // 2) and two_f % 2 == 0


def is_called_alone(experts: object) -> TypeGuard[GroupedExperts]:
    """Whether experts are `GroupedExperts` whose call does nothing but run the known `forward`.

    That is not so if there are hooks, or if a subclass or other code has replaced `forward`. A
    layer may then skip `forward` and call `serve`, which is faster.
    """
    if not isinstance(experts, GroupedExperts):
        return False
    if type(experts).forward is not GroupedExperts.forward or "forward" in experts.__dict__:
        return False
    return not (
        experts._forward_pre_hooks
        or experts._forward_hooks
        or experts._backward_pre_hooks
        or experts._backward_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def parameter(value: Tensor) -> nn.Parameter:
    """Make a parameter that shares memory with `value`.

    The parameter requires grad, with two exceptions. fp8, e2m1 and fp64 weights do not, since such
    experts cannot be trained, and tensors that were made in inference mode cannot have gradients.
    """
    return nn.Parameter(value, requires_grad=value.dtype in FLOATS and not value.is_inference())


class GroupedExperts(nn.Module):
    """The SwiGLU experts of one rank: each expert computes `down(silu(gate(x)) · up(x))`.

    A call takes rows that lie expert by expert, as `ep.dispatch` returns them. Between the segments
    of two experts there may be a gap. Rows of gaps and rows behind the last segment may hold any
    values, and so may their outputs. Autocast has no effect.

    On GPUs the host does not wait in a call, so that a CUDA graph can capture it. This holds for
    bf16 weights on compute capability 9.0 and later, and for fp8, MXFP4 and NVFP4 weights on 9.0.

    The weights are parameters that share memory with the tensors that the constructor gets. In grad
    mode, a call has gradients if its rows, row weights or a parameter require grad; any other call
    only serves. The gradients have the same bits in every run. The outputs have the same bits with
    and without gradients if the same GEMM computes them; for calls with gradients it is Hopper's,
    torch's, or a loop. fp8, MXFP4, NVFP4 and fp64 weights cannot be trained. For frozen parameters
    nothing is kept for the backward pass. Gradients of gradients are refused.

    Casts, moves and `load_state_dict` choose the GEMMs again. A cast does not change weights with
    scales, and their scales.

    Products of NVFP4 weights are computed without the tensor scales, since bf16 has all values of
    codes times scales. The tensor scales are applied in fp32, around the activation.

    In a `MoELayer` over several ranks the weights become DTensors [E, …] of the experts of all
    ranks, of which each rank has its own rows. See `epmoe.training.spread`.

    The argument `gemm` says which GEMM is used on GPUs:

    - "auto": on compute capability 9.0, epmoe's own kernel for the whole stage. It takes fp8 with D
      and F multiples of 128, and bf16 with multiples of 64 and up to 224 experts of a rank. If
      adapters add to the products, or if a rank has more experts, DeepGEMM, if it is installed
      (`pip install epmoe[deep_gemm]`). Otherwise epmoe's own GEMMs on compute capability 9.0, for
      MXFP4 and NVFP4 with multiples of 64, and for bf16 with multiples of 8, which they can also
      train. Otherwise torch's `grouped_mm`. Calls of `MoELayer` with few tokens use other kernels,
      which read the weights only once: docs/kernels.md, "Experts with few rows". The bits of
      outputs then depend on the number of tokens, unless the experts are `batch_invariant`.
    - "deep_gemm": DeepGEMM. It is an error if it does not take the weights.
    - "hopper": epmoe's own kernels. It is an error if they do not take the weights.
    - "torch": none of these. fp8 weights are then dequantized in every call. The result is right,
      but the call is slow and needs memory for the weights in bf16. CPUs always do this; on GPUs
      "auto" warns if it has to.

    DeepGEMM needs segments that start at multiples of 64 rows. A call says by `alignment` that its
    segments do, as `MoELayer` does. For a call that does not say so, "auto" uses another GEMM, and
    "deep_gemm" assumes that the segments are aligned.

    If none of epmoe's kernels takes MXFP4 or NVFP4 weights, they are dequantized in every call,
    which needs memory for all experts of the layer in bf16 while the call runs. torch does not take
    fp64, nor strides that are no multiples of 16 bytes. Such weights are multiplied in a loop over
    the experts, in which the host waits for the GPU.

    Args:
        w_gate_up: the weights of gate and up, [e, 2F, D] in fp32, fp16, bf16, fp64 or fp8 e4m3.
            Each expert has F rows of gate, then F rows of up. Or MXFP4 and NVFP4: float4_e2m1fn_x2
            [e, 2F, D/2], where an item has two codes, the low four bits first. Bytes become such
            items by `.view(torch.float4_e2m1fn_x2)`. D and F must be multiples of 32 for MXFP4, and
            of 16 for NVFP4.
        w_down: the weights of down, [e, D, F], or [e, D, F/2] for MXFP4 and NVFP4, in the same
            dtype and on the same device.
        gate_up_scales: for fp8 weights, fp32 [e, ⌈2F/128⌉, ⌈D/128⌉]: a scale for each block of 128
            × 128. For MXFP4, float8_e8m0fnu [e, 2F, D/32]: a scale for each 32 numbers of a row.
            For NVFP4, float8_e4m3fn [e, 2F, D/16].
        down_scales: for fp8 weights, fp32 [e, ⌈D/128⌉, ⌈F/128⌉]. For MXFP4, float8_e8m0fnu [e, D,
            F/32]. For NVFP4, float8_e4m3fn [e, D, F/16].
        tensor_scales: for NVFP4, fp32 [e, 3]: the scales of the whole matrices of gate, up and
            down. A weight is code · scale · tensor scale. For other weights None.
        gate_up_bias: [e, 2F] in the dtype of outputs, or None.
        down_bias: [e, D] in the dtype of outputs, or None.
        interleaved: whether gate and up rows alternate in `w_gate_up` and its bias.
        limit: before the activation, gate is cut off above this number, and up outside of ± this
            number. None: no limit.
        alpha: the activation is gate · sigmoid(alpha · gate). With 1 it is silu.
        up_offset: this number is added to up.
        gemm: the GEMM that GPUs use, see above.
        batch_invariant: if True, the bits of a row's output depend on nothing but the row, and
            those of the row's gradient also on the gradient of its output. On GPUs all calls then
            sum in the order of one of epmoe's own kernels. CPUs multiply blocks of 16 rows.

    For gpt-oss, pass interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0 and both biases. The
    weights in its checkpoint are transposed, so pass `gate_up_proj.transpose(1, 2)`.

    Raises:
        TypeError: a weight is not a tensor, or has another dtype.
        ValueError: shapes or devices do not fit each other; or the GEMM that `gemm` names does not
            take the weights; or no GEMM on this machine is `batch_invariant` for them.
        ImportError: `gemm` is "deep_gemm", and DeepGEMM is not installed.
    """

    w_gate_up: nn.Parameter
    w_down: nn.Parameter
    gate_up_scales: nn.Parameter | None
    down_scales: nn.Parameter | None
    tensor_scales: nn.Parameter | None
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    _stage: Stage
    averages_over: int
    """The number by which gradients of parameters are divided. `epmoe.training.ignore_experts` and
    `fully_shard` set it.
    """

    def __init__(
        self,
        w_gate_up: Tensor,
        w_down: Tensor,
        *,
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
        tensor_scales: Tensor | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        interleaved: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
        gemm: Literal["auto", "torch", "deep_gemm", "hopper"] = "auto",
        batch_invariant: bool = False,
    ) -> None:
        # Check all arguments before the module holds anything.
        quantized = format_of(w_down, down_scales)
        e, D, F = _checked_sizes(w_gate_up, w_down, quantized)
        if limit is not None and limit != math.inf:
            check_number("limit", limit)
        check_number("alpha", alpha)
        check_number("up_offset", up_offset)
        if gemm not in CHOICES:
            *names, last = map(repr, CHOICES)
            raise ValueError(f"`gemm` must be {', '.join(names)} or {last}, got {gemm!r}")
        super().__init__()

        # The weights, and their scales and biases.
        self.w_gate_up = parameter(w_gate_up)
        self.w_down = parameter(w_down)
        self._add_part("gate_up", quantized, gate_up_scales, gate_up_bias, (e, 2 * F, D))
        self._add_part("down", quantized, down_scales, down_bias, (e, D, F))
        self._add_tensor_scales(quantized, tensor_scales)

        # The activation.
        self.interleaved = interleaved
        self.limit = limit
        self.alpha = alpha
        self.up_offset = up_offset

        # What gradients need, and which GEMMs the caller wants.
        self.averages_over = 1
        self._frozen_by_dtype = list[str]()
        self._wanted = gemm
        self._invariant = batch_invariant
        self._choose()

    def _add_part(
        self,
        part: str,
        quantized: WeightFormat | None,
        scales: Tensor | None,
        bias: Tensor | None,
        sizes: tuple[int, int, int],
    ) -> None:
        """Register the scales and the bias of one weight [e, n, k] as parameters, or as None.

        `part` is "gate_up" or "down", `quantized` is the format of weights with scales, and `sizes`
        is (e, n, k). Raises TypeError or ValueError if they do not fit the weight.
        """
        e, n, k = sizes
        device = self.w_down.device
        # A format with scales needs them, and one without takes none.
        if quantized is not None:
            shape = quantized.scales_shape(e, n, k)
            check_tensor(f"{part}_scales", scales, (quantized.scale,), shape, device)
        elif scales is not None:
            name = dtype_name(self.w_down.dtype)
            raise ValueError(f"`{part}_scales` must be None where the weights are {name}")
        if bias is not None:
            check_tensor(f"{part}_bias", bias, (self.dtype,), (e, n), device)

        for name, value in ((f"{part}_scales", scales), (f"{part}_bias", bias)):
            if value is None:
                self.register_parameter(name, None)
                continue
            made = parameter(value)
            # Quantized experts cannot be trained.
            if quantized is not None:
                made.requires_grad_(False)
            self.register_parameter(name, made)

    def _add_tensor_scales(self, quantized: WeightFormat | None, scales: Tensor | None) -> None:
        """Register the tensor scales as a parameter, or as None.

        Raises TypeError or ValueError if they do not fit the format of the weights.
        """
        if quantized is not None and quantized.has_tensor_scales:
            shape = (len(self.w_down), 3)
            check_tensor("tensor_scales", scales, (torch.float32,), shape, self.w_down.device)
        elif scales is not None:
            name = quantized.name if quantized else dtype_name(self.w_down.dtype)
            raise ValueError(f"`tensor_scales` must be None where the weights are {name}")
        if scales is None:
            self.register_parameter("tensor_scales", None)
            return
        made = parameter(scales)
        made.requires_grad_(False)
        self.register_parameter("tensor_scales", made)

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format of weights with scales. None: the weights have no scales."""
        return format_of(self.w_down, self.down_scales)

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are fp8, with scales."""
        return self.w_down.dtype == FP8

    @property
    def is_quantized(self) -> bool:
        """Whether the weights have scales. Such weights, fp8, MXFP4 or NVFP4, cannot be trained."""
        return self.w_down.dtype in PACKED

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of outputs, and of rows that have no scales.

        It is that of the weights, or bf16 if the weights have scales.
        """
        return product_dtype(self.w_down)

    @property
    def wanted(self) -> Literal["auto", "torch", "deep_gemm", "hopper"]:
        """The argument `gemm`."""
        return self._wanted

    @property
    def stage(self) -> Stage:
        """The chosen GEMMs. It is a new object whenever they may have changed."""
        return self._stage

    @property
    def gemms(self) -> tuple[str, ...]:
        """The names of the GEMMs for calls without gradients.

        A call uses the first of them that takes its segments.
        """
        return self._stage.gemms

    @gemms.setter
    def gemms(self, names: tuple[str, ...]) -> None:
        self._stage = self._stage._replace(gemms=names)

    @property
    def gemm(self) -> str:
        """The name of the GEMM for calls with many rows whose segments are aligned as it needs."""
        return self._stage.gemm

    @property
    def alignment(self) -> int:
        """The number of rows at whose multiples segments must start.

        They do in a round of `dispatch(…, aligned=True)`.
        """
        return self._stage.alignment

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row's output depend on nothing but the row: docs/choosing.md,
        "Batch invariance".
        """
        return self._stage.batch_invariant

    @property
    def _has_own_forward(self) -> bool:
        """Whether a subclass computes the outputs in a way that this class does not know."""
        return type(self).forward is not GroupedExperts.forward

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can capture a call. The host does not wait in such a call.

        Nothing is known against a subclass with a `forward` of its own.
        """
        if self._has_own_forward:
            return True
        return GEMMS[self.gemm].is_capturable(self.w_down)

    def refuse_capture(self, *, trains: bool = False) -> None:
        """Raise RuntimeError if a CUDA graph is being captured that could not capture a call.

        That is the case if the GEMM of the call, which the error names, makes the host wait.
        `trains` means a call with gradients. A subclass with a `forward` of its own multiplies with
        something else, so nothing is refused.
        """
        if self._has_own_forward:
            return
        self._stage.refuse_capture(self.w_down, trains=trains)

    def forward(
        self,
        rows_ND: Tensor,
        expert_offsets: Tensor,
        scales: Tensor | None = None,
        *,
        tokens_per_expert: Tensor | None = None,
        alignment: int | None = None,
        rows_per_expert: float | None = None,
        row_weights: Tensor | None = None,
        added: Added | None = None,
    ) -> Tensor:
        """Apply each expert to its segment of rows.

        Args:
            rows_ND: the rows, [N, D] in `dtype`, or fp8 with `scales`. Rows behind
                `expert_offsets[e]` have no effect on the outputs of others. In a call with
                gradients, their outputs and gradients are zeros. In any other call, their outputs
                are undefined.
            expert_offsets: int32 [e + 1]. The segment of expert i is rows[expert_offsets[i] :
                expert_offsets[i + 1]], including the gap behind its rows.
            scales: the scales of fp8 rows, fp32 [N, ⌈D/128⌉], or None. The rows are dequantized
                unless a kernel takes fp8 rows.
            tokens_per_expert: int32 [e], the rows of each segment without its gap. Then nothing is
                computed for gaps between the two GEMMs. None: segments have no gaps.
            alignment: the number of rows at whose multiples all segments start. For a round it is
                `Dispatched.alignment`. None: not known.
            rows_per_expert: how many rows an expert has on average, as far as this rank can tell. A
                GEMM is chosen by it. The result is right for any number of rows, but the call is
                slow if there are many more than this. None: not known.
            row_weights: the weights of rows, fp32 [N], or None. It is for rounds with
                `weights_on="both"`, in which combine multiplies the outputs by these weights. This
                call does not multiply by them, but it expects gradients of weighted outputs, and
                computes the gradients of the weights. If segments have gaps, `tokens_per_expert`
                must be given, or the rows of gaps and their gradients must be zeros.
            added: what adapters add for each row, the result of `ExpertAdapters.of_rows`, or None.
                Such a call has no gradients.

        Returns:
            Outputs [N, D] in `dtype`.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another shape or device; or no GEMM takes segments with this
                `alignment`, because `gemm` is "deep_gemm" or the experts are `batch_invariant`, and
                it is no multiple of the property `alignment`.
            RuntimeError: an argument or a parameter requires grad in grad mode, but the weights are
                fp8, MXFP4, NVFP4 or fp64.
        """
        weights = self._weights(added)
        e, D, _ = weights.down.shape
        device = weights.down.device

        # Check the rows, which have the dtype of outputs or are fp8.
        dtype = self.dtype if scales is None else FP8
        check_tensor("rows", rows_ND, (dtype,), ("N", D), device)
        check_tensor("expert_offsets", expert_offsets, (torch.int32,), (e + 1,), device)
        N = rows_ND.shape[0]
        if scales is not None:
            num_scales = 0
            if isinstance(scales, Tensor) and scales.dim():
                num_scales = scales.shape[-1]
            wire = format_of_rows(D, num_scales)
            shape = (N, wire.num_scales(D))
            check_tensor("scales", scales, (wire.scale or torch.float32,), shape, device)

        # Describe where the rows of each expert lie. The GEMM is chosen by this.
        tokens = None
        if tokens_per_expert is not None:
            check_tensor("tokens_per_expert", tokens_per_expert, (torch.int32,), (e,), device)
            tokens = tokens_per_expert.contiguous()
        if not alignment:
            # The caller does not say how segments are aligned. If the caller has asked for a GEMM
            # by its name, the segments are assumed to be aligned as this GEMM needs.
            alignment = self.alignment if self._wanted == self.gemm else 1
        segments = Segments(expert_offsets.contiguous(), tokens, alignment, rows_per_expert)

        # Compute with gradients if anything in this call requires grad.
        if torch.is_grad_enabled():
            refuse_tangents(rows_ND, row_weights)
            # Look at the tensors of this call, not at `parameters()`: a parametrization, such as
            # PEFT's, computes tensors that require grad from frozen parameters.
            inputs = (rows_ND, row_weights, *weights[:6])
            if wants_gradients(value for value in inputs if value is not None):
                if added is not None:
                    raise RuntimeError(
                        "`added` has no gradients: run under torch.inference_mode() or "
                        "torch.no_grad()"
                    )
                return self._train(rows_ND, segments, row_weights, weights)
        return self._serve_with(rows_ND, scales, segments, weights)

    def serve(
        self, rows_ND: Tensor, scales: Tensor | None, segments: Segments, added: Added | None
    ) -> Tensor:
        """Do what `forward` does, without gradients and without checks of rows and segments.

        `MoELayer` calls it while it serves, if `is_called_alone` says that `forward` may be
        skipped.
        """
        return self._serve_with(rows_ND, scales, segments, self._weights(added))

    def _serve_with(
        self, rows_ND: Tensor, scales: Tensor | None, segments: Segments, weights: Weights
    ) -> Tensor:
        """Run the GEMMs with these weights, without gradients."""
        # Rows become contiguous when they are dequantized.
        is_dequantized = scales is not None and not self.is_fp8
        if not (rows_ND.is_contiguous() or is_dequantized):
            # Kernels for few rows cannot read rows with a stride. They are chosen by this number
            # only, so without it they are not chosen.
            segments = segments._replace(rows_per_expert=None)
        return self._stage.serve(weights, rows_ND, scales, segments)

    def extra_repr(self) -> str:
        """What `repr` says of sizes, weights and GEMMs."""
        e, D, F = plain_shape(self._weights(None).down)
        weights = dtype_name(self.w_down.dtype)
        quantized = self.weight_format
        if quantized is not None and quantized.packed > 1:
            weights = quantized.name
        # Add the GEMMs that are used only for few rows.
        few = ""
        for name in self.gemms:
            most = self._stage.most_rows.get(name, math.inf)
            if 0 < most < math.inf:
                few += f", {name} up to {most:.3g} rows an expert"
        return f"e={e}, D={D}, F={F}, {weights}, gemm={self.gemm!r}{few}"

    def trained_gemm(self, rows_dtype: torch.dtype | None = None) -> str:
        """The name of the GEMM for calls with gradients.

        `rows_dtype` is the dtype of the rows, by default that of outputs. Raises RuntimeError if
        the experts cannot be trained on such rows.
        """
        dtype = self.held()[1].dtype
        if dtype not in FLOATS or rows_dtype == FP8:
            rows_dtype = rows_dtype or self.dtype
            raise RuntimeError(
                f"`experts` of {dtype_name(dtype)} over rows of "
                f"{dtype_name(rows_dtype)} have no gradients: run under torch.inference_mode() or "
                "torch.no_grad()"
            )
        # The GEMM of gradients has an order of sums of its own, which may depend on the batch.
        trained = self._stage.trained
        if self._invariant and not GEMMS[trained].batch_invariant:
            raise RuntimeError(
                f"`experts` are batch_invariant, and {trained}, the GEMM of their gradients, is "
                "not: run under torch.inference_mode() or torch.no_grad()"
            )
        return trained

    def _train(
        self, rows_ND: Tensor, segments: Segments, row_weights: Tensor | None, weights: Weights
    ) -> Tensor:
        """Run the GEMMs with these weights so that autograd can compute gradients."""
        # Refuse experts that cannot be trained.
        self.trained_gemm(rows_ND.dtype)
        if row_weights is not None:
            check_tensor(
                "row_weights", row_weights, (torch.float32,), (len(rows_ND),), rows_ND.device
            )
            row_weights = row_weights.contiguous()
        return self._stage.train(weights, rows_ND, row_weights, segments)

    @property
    def gating(self) -> Gating:
        """The settings of the activation."""
        limit = math.inf if self.limit is None else self.limit
        return Gating(self.interleaved, limit, self.alpha, self.up_offset)

    def _choose(self) -> None:
        """Choose the GEMMs for the weights as they are now, after any change of them."""
        with torch.no_grad():
            weights = self._weights(None)
        self._stage = Stage.choose(
            self._wanted,
            weights.gate_up,
            weights.down,
            batch_invariant=self._invariant,
            has_tensor_scales=weights.tensor_scales is not None,
        )

    def held(self) -> tuple[Any, ...]:
        """The first six fields of `Weights`, as this module holds them.

        They may be plain parameters, DTensors of spread experts, or tensors that a parametrization
        computes.
        """
        # Take the parameters from their dict: each access as an attribute would run Python code of
        # `nn.Module` for half a microsecond. A parametrized weight is not in the dict.
        found = self._parameters
        try:
            return (
                found["w_gate_up"],
                found["w_down"],
                found["gate_up_scales"],
                found["down_scales"],
                found["gate_up_bias"],
                found["down_bias"],
            )
        except KeyError:
            return (
                self.w_gate_up,
                self.w_down,
                self.gate_up_scales,
                self.down_scales,
                self.gate_up_bias,
                self.down_bias,
            )

    def _weights(self, added: Added | None) -> Weights:
        """This rank's weights for one call. `added` is what adapters add in this call."""
        over = self.averages_over
        held = [
            local_view(value, over) if hasattr(value, "_local_tensor") else value
            for value in self.held()
        ]
        return Weights._make([*held, self.gating, added, self._parameters["tensor_scales"]])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move the experts. torch calls it for `to`, `cuda`, `half` and the like.

        Weights with scales keep their dtype.
        """
        # Quantized weights and scales are moved as integers, which casts of torch do not change.
        quantized = list[Tensor]()
        if self.is_quantized:
            quantized = [getattr(self, name) for name in _KEEP_DTYPE]

        def apply(value: Tensor) -> Tensor:
            keeps_dtype = any(value is one for one in quantized)
            if keeps_dtype:
                return fn(bits_of(value)).view(value.dtype)
            return fn(value)

        super()._apply(apply, recurse)
        self._freeze_by_dtype()
        self._choose()
        return self

    def _freeze_by_dtype(self) -> None:
        """Freeze the parameters if a cast has made them fp64, which cannot be trained.

        After a cast back, the parameters that had been trainable are trainable again.
        """
        if self.dtype not in FLOATS:
            names = [name for name, value in self.named_parameters() if value.requires_grad]
            self._frozen_by_dtype += names
            self.requires_grad_(False)
            return
        for name in self._frozen_by_dtype:
            getattr(self, name).requires_grad_(True)
        self._frozen_by_dtype = []

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load a state dict, and choose the GEMMs again: other weights may be in place now."""
        super()._load_from_state_dict(*arguments)
        self._choose()
