"""The experts stage: SwiGLU experts over expert-major rows. Its two grouped GEMMs are
a library's.
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
from epmoe.local.weight_formats import FORMATS, bits_of, plain_shape, product_dtype
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

DTYPES = (*FLOATS, torch.float64, *FORMATS)
# These keep their dtypes under casts, if the weights have scales.
_KEEP_DTYPE = ("w_gate_up", "w_down", "gate_up_scales", "down_scales")


class _Sizes(NamedTuple):
    """Sizes of the weights of experts, in numbers."""

    e: int
    D: int
    F: int


def _checked_sizes(w_gate_up: Tensor, w_down: Tensor) -> _Sizes:
    """The sizes of weights [e, 2F, D] and [e, D, F]. Raises TypeError or ValueError, in the words
    of users, where they do not fit each other.
    """
    # Errors name the dtype that is meant, if it is one.
    dtype = getattr(w_down, "dtype", None)
    dtypes = [known for known in DTYPES if known == dtype]
    check_tensor("w_down", w_down, dtypes or DTYPES, ("e", "D", "F"))
    e, D, F = plain_shape(w_down)

    # Numbers of few bits lie several in an item, in whole groups.
    packed = 1
    quantized = FORMATS.get(w_down.dtype)
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
    """Raise ValueError, which names the weights to transpose, if they would fit transposed."""
    if not isinstance(w_gate_up, Tensor) or w_gate_up.dim() != 3 or w_gate_up.dtype != w_down.dtype:
        return
    given = {"w_gate_up": w_gate_up, "w_down": w_down}
    if _fit(given) or w_down.dtype in FORMATS:
        return
    # Either of them, or both.
    for names in (["w_gate_up"], ["w_down"], ["w_gate_up", "w_down"]):
        turned = given | {name: given[name].mT for name in names}
        if _fit(turned):
            wants = " and ".join(f"`{name}` must be {list(turned[name].shape)}" for name in names)
            got = " and ".join(f"{list(given[name].shape)}" for name in names)
            raise ValueError(f"{wants}, got {got}, which is transposed: give its .mT")


def _fit(weights: Mapping[str, Tensor]) -> bool:
    """Whether these are [e, 2F, D] and [e, D, F] of one D and F."""
    e, two_f, d = weights["w_gate_up"].shape
    return weights["w_down"].shape == (e, d, two_f // 2) and two_f % 2 == 0


def is_called_alone(experts: object) -> TypeGuard[GroupedExperts]:
    """Whether experts are `GroupedExperts`, and a call of them runs their `forward` and nothing
    else, such as hooks.
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
    """Make a parameter that shares memory with `value`. It requires grad where autograd can have
    one: not for fp8, MXFP4 and fp64 experts, which serve only, and not for tensors of inference
    mode.
    """
    return nn.Parameter(value, requires_grad=value.dtype in FLOATS and not value.is_inference())


class GroupedExperts(nn.Module):
    """This rank's experts, `down(silu(gate(x)) · up(x))`, over rows in the order of `ep.dispatch`.

    On GPUs nothing looks at the host, so that a call can be captured into a CUDA graph: with bf16
    weights on compute capability 9.0 and later, and with fp8 and MXFP4 weights on 9.0. Rows of gaps
    and past the last segment may hold anything, and so may their outputs. Autocast changes nothing.

    Weights are parameters that share the memory of the given tensors. A call whose rows, row
    weights or parameters require grad in grad mode has gradients, which have the same bits on every
    run; any other call only serves. Outputs have the same bits either way, for the same GEMM; with
    gradients it is Hopper's, torch's, or the loop. fp8, MXFP4 and fp64 weights serve only. Frozen
    parameters keep nothing for the backward pass. Gradients of gradients raise. Casts, moves and
    `load_state_dict` choose the GEMMs again. Casts leave fp8 weights and scales alone.

    In a `MoELayer` over several ranks the weights become DTensors [E, …], of which each rank has
    its own rows: see `epmoe.training.spread`.

    `gemm` says which GEMM GPUs use:

    - "auto": DeepGEMM where it is installed (`pip install epmoe[deep_gemm]`) and takes the weights:
      fp8 with D and F multiples of 128, bf16 with multiples of 64, compute capability 9.0. All
      other weights take torch's `grouped_mm`, or kernels of our own on compute capability 9.0:
      MXFP4 with multiples of 64, and bf16 with multiples of 8, which they also train. Calls of
      `MoELayer` with few tokens take others, which read the weights once: docs/kernels.md, "Experts
      with few rows". Bits of outputs then depend on the number of tokens, unless the experts are
      `batch_invariant`.
    - "deep_gemm": DeepGEMM or an error.
    - "hopper": our own or an error.
    - "torch": neither. fp8 weights are then dequantized in every call, which is right but slow, and
      takes the memory of the weights in bf16. CPUs always do this; "auto" warns of it on GPUs.

    DeepGEMM needs segments that start at multiples of 64 rows. It is used where a call says so, by
    `alignment`, which a `MoELayer` does; "auto" takes another for any other call, and "deep_gemm"
    counts on it. MXFP4 weights that none of our kernels takes are dequantized in every call, which
    takes the memory of all experts of the layer in bf16 for as long as the call runs. Weights that
    torch does not take either (it needs strides of multiples of 16 bytes, and no fp64) go through a
    loop over the experts, which looks at the host.

    Args:
        w_gate_up: fp32, fp16, bf16, fp64 or fp8 e4m3 [e, 2F, D], in which each expert has F gate
            rows, then F up rows; or MXFP4, float4_e2m1fn_x2 [e, 2F, D/2]: an item has two codes,
            the low four bits first; bytes become them by `.view(torch.float4_e2m1fn_x2)`. D and F
            are then multiples of 32.
        w_down: [e, D, F], or [e, D, F/2] of MXFP4; same dtype and device.
        gate_up_scales: with fp8 weights fp32 [e, ⌈2F/128⌉, ⌈D/128⌉], one for each block of 128 ×
            128. With MXFP4 float8_e8m0fnu [e, 2F, D/32], one for each 32 numbers of a row.
        down_scales: fp32 [e, ⌈D/128⌉, ⌈F/128⌉] with fp8 weights, float8_e8m0fnu [e, D, F/32] with
            MXFP4.
        gate_up_bias: [e, 2F] in the dtype of outputs, or None.
        down_bias: [e, D] in the dtype of outputs, or None.
        interleaved: gate and up rows alternate in `w_gate_up` and its bias.
        limit: gate is at most this, and up lies within ± this, before the activation; None: no
            limit.
        alpha: the activation is gate · sigmoid(alpha · gate); 1 is silu.
        up_offset: is added to up.
        gemm: which library GPUs use, see above.
        batch_invariant: the bits of a row's output, and of its gradient, depend on nothing but the
            row and its own gradient. GPUs then sum in the order of one GEMM in all calls, our own
            for bf16 and MXFP4, DeepGEMM for fp8, and CPUs multiply blocks of 16 rows.

    For gpt-oss: interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0, and both biases; the
    checkpoint's weights are transposed, so pass `gate_up_proj.transpose(1, 2)`.

    Raises:
        TypeError: a weight is no tensor, or has another dtype.
        ValueError: the shapes or devices do not fit each other; DeepGEMM does not take the weights;
            or no GEMM here is `batch_invariant` for them.
        ImportError: `gemm` is "deep_gemm", and it is not installed.
    """

    w_gate_up: nn.Parameter
    w_down: nn.Parameter
    gate_up_scales: nn.Parameter | None
    down_scales: nn.Parameter | None
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    _stage: Stage
    averages_over: int
    """Gradients of parameters are divided by it. `epmoe.training.ignore_experts` and `fully_shard`
    set it.
    """

    def __init__(
        self,
        w_gate_up: Tensor,
        w_down: Tensor,
        *,
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
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
        e, D, F = _checked_sizes(w_gate_up, w_down)
        if limit is not None and limit != math.inf:
            check_number("limit", limit)
        check_number("alpha", alpha)
        check_number("up_offset", up_offset)
        if gemm not in CHOICES:
            *names, last = map(repr, CHOICES)
            raise ValueError(f"`gemm` must be {', '.join(names)} or {last}, got {gemm!r}")
        super().__init__()

        # The weights, with what belongs to each of them.
        self.w_gate_up = parameter(w_gate_up)
        self.w_down = parameter(w_down)
        self._add_part("gate_up", gate_up_scales, gate_up_bias, (e, 2 * F, D))
        self._add_part("down", down_scales, down_bias, (e, D, F))

        # The activation.
        self.interleaved = interleaved
        self.limit = limit
        self.alpha = alpha
        self.up_offset = up_offset

        # Gradients, and the GEMMs.
        self.averages_over = 1
        self._frozen_by_dtype = list[str]()
        self._wanted = gemm
        self._invariant = batch_invariant
        self._choose()

    def _add_part(
        self, part: str, scales: Tensor | None, bias: Tensor | None, sizes: tuple[int, int, int]
    ) -> None:
        """Make scales and bias of weights [e, n, k] parameters, or None. Raises TypeError or
        ValueError where they do not fit.
        """
        e, n, k = sizes
        device = self.w_down.device
        # A format with scales needs them, and one without takes none.
        quantized = FORMATS.get(self.w_down.dtype)
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
            # Quantized experts only serve.
            if quantized is not None:
                made.requires_grad_(False)
            self.register_parameter(name, made)

    @property
    def is_fp8(self) -> bool:
        """Whether the weights are fp8, with scales."""
        return self.w_down.dtype == FP8

    @property
    def is_quantized(self) -> bool:
        """Whether the weights have scales: fp8 or MXFP4, which serve only."""
        return self.w_down.dtype in FORMATS

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of outputs, and of rows without scales: that of the weights, or bf16 where
        these have scales.
        """
        return product_dtype(self.w_down)

    @property
    def wanted(self) -> Literal["auto", "torch", "deep_gemm", "hopper"]:
        """The argument `gemm`."""
        return self._wanted

    @property
    def stage(self) -> Stage:
        """The GEMMs. It is another one whenever they may have changed."""
        return self._stage

    @property
    def gemms(self) -> tuple[str, ...]:
        """Names of the GEMMs that serve. A call takes the first that takes its segments."""
        return self._stage.gemms

    @gemms.setter
    def gemms(self, names: tuple[str, ...]) -> None:
        self._stage = self._stage._replace(gemms=names)

    @property
    def gemm(self) -> str:
        """The name of the GEMM that serves calls of many rows whose segments lie as it
        wants them.
        """
        return self._stage.gemm

    @property
    def alignment(self) -> int:
        """Segments must start at multiples of this number of rows, as in rounds of `dispatch(…,
        aligned=True)`.
        """
        return self._stage.alignment

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a row's output depend on nothing but the row: docs/choosing.md,
        "Batch invariance".
        """
        return self._stage.batch_invariant

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can capture a call, which then waits for nothing on the host."""
        return GEMMS[self.gemm].is_capturable(self.w_down)

    def refuse_capture(self, *, trains: bool = False) -> None:
        """Raise RuntimeError, which names the GEMM, if the current stream captures a CUDA graph
        and a call would wait for the host. `trains`: a call with gradients.
        """
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
            rows_ND: [N, D] in `dtype`, or fp8 with `scales`. Rows past `expert_offsets[e]` have no
                effect on others. Their outputs are undefined, but in a call with gradients zeros,
                as the gradients of these rows are.
            expert_offsets: int32 [e + 1]. Expert i's segment is rows[expert_offsets[i] :
                expert_offsets[i + 1]], alignment gaps included.
            scales: fp32 [N, ⌈D/128⌉] of fp8 rows, or None. The rows are dequantized, unless a
                kernel takes them as they are.
            tokens_per_expert: int32 [e], rows of each segment without its gap, so that nothing is
                computed for gaps between the two GEMMs; by default segments count as full.
            alignment: in rows: all segments start at its multiples. That of a round is
                `Dispatched.alignment`. None: not known.
            rows_per_expert: rows of an expert on average, as far as this rank can tell, by which it
                chooses a GEMM. Any number of rows is right, but slow if there are many more. None:
                not known.
            row_weights: fp32 [N] of a round with `weights_on="both"`, whose combine multiplies
                outputs by them, or None. The outputs here are not multiplied. The gradients that
                arrive are those of weighted outputs, and the weights get gradients. With gaps,
                `tokens_per_expert` must be given, or rows of gaps and their gradients be zeros.
            added: what adapters add for each row, `ExpertAdapters.of_rows`, or None. Such a call
                has no gradients.

        Returns:
            Outputs [N, D] in `dtype`.

        Raises:
            TypeError: an argument has another dtype.
            ValueError: an argument has another shape or device; or `gemm` is "deep_gemm" or the
                experts are `batch_invariant`, and `alignment` is no multiple of the property.
            RuntimeError: something requires grad in grad mode, but the weights are fp8, MXFP4 or
                fp64.
        """
        weights = self._weights(added)
        e, D, _ = weights.down.shape
        device = weights.down.device

        # The rows, in the dtype of outputs or in fp8.
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

        # Where the rows of each expert lie, by which a GEMM is chosen.
        tokens = None
        if tokens_per_expert is not None:
            check_tensor("tokens_per_expert", tokens_per_expert, (torch.int32,), (e,), device)
            tokens = tokens_per_expert.contiguous()
        if not alignment:
            # A caller who has asked for a GEMM by name counts on its alignment.
            alignment = self.alignment if self._wanted == self.gemm else 1
        segments = Segments(expert_offsets.contiguous(), tokens, alignment, rows_per_expert)

        # With gradients, if anything requires them.
        if torch.is_grad_enabled():
            refuse_tangents(rows_ND, row_weights)
            # Not `parameters()`: a parametrization, such as PEFT's, makes tensors that require grad
            # of frozen ones.
            of_call = rows_ND, row_weights, *weights[:6]
            if wants_gradients(value for value in of_call if value is not None):
                if added is not None:
                    raise RuntimeError(
                        "`added` has no gradients: run under torch.inference_mode() or "
                        "torch.no_grad()"
                    )
                return self._recorded(rows_ND, segments, row_weights, weights)
        return self._served(rows_ND, scales, segments, weights)

    def serve(
        self, rows_ND: Tensor, scales: Tensor | None, segments: Segments, added: Added | None
    ) -> Tensor:
        """`forward` without gradients, of rows and segments that are known to fit."""
        return self._served(rows_ND, scales, segments, self._weights(added))

    def _served(
        self, rows_ND: Tensor, scales: Tensor | None, segments: Segments, weights: Weights
    ) -> Tensor:
        # Rows that are dequantized lie one after the other, whatever their stride is.
        is_dequantized = scales is not None and not self.is_fp8
        if weights.added is not None or not (rows_ND.is_contiguous() or is_dequantized):
            # Kernels for few rows take neither, so they are not asked.
            segments = segments._replace(rows_per_expert=None)
        return self._stage.serve(weights, rows_ND, scales, segments)

    def extra_repr(self) -> str:
        """What `repr` says of sizes, weights and GEMMs."""
        e, D, F = plain_shape(self._weights(None).down)
        weights = dtype_name(self.w_down.dtype)
        quantized = FORMATS.get(self.w_down.dtype)
        if quantized is not None and quantized.packed > 1:
            weights = quantized.name
        # GEMMs that take only calls of few rows.
        few = ""
        for name in self.gemms:
            most = self._stage.most_rows.get(name, math.inf)
            if most < math.inf:
                few += f", {name} up to {most:.3g} rows an expert"
        return f"e={e}, D={D}, F={F}, {weights}, gemm={self.gemm!r}{few}"

    def trained_gemm(self, rows_dtype: torch.dtype | None = None) -> str:
        """The name of the GEMM of calls with gradients, over rows of this dtype, by default the
        experts' own.

        Raises RuntimeError if there is none.
        """
        dtype = self.held()[1].dtype
        if dtype not in FLOATS or rows_dtype == FP8:
            rows_dtype = rows_dtype or self.dtype
            raise RuntimeError(
                f"`experts` of {dtype_name(dtype)} over rows of "
                f"{dtype_name(rows_dtype)} have no gradients: run under torch.inference_mode() or "
                "torch.no_grad()"
            )
        # Gradients have the order of sums of their own GEMM.
        trained = self._stage.trained
        if self._invariant and not GEMMS[trained].batch_invariant:
            raise RuntimeError(
                f"`experts` are batch_invariant, and {trained}, the GEMM of their gradients, is "
                "not: run under torch.inference_mode() or torch.no_grad()"
            )
        return trained

    def _recorded(
        self, rows_ND: Tensor, segments: Segments, row_weights: Tensor | None, weights: Weights
    ) -> Tensor:
        self.trained_gemm(rows_ND.dtype)
        if row_weights is not None:
            check_tensor(
                "row_weights", row_weights, (torch.float32,), (len(rows_ND),), rows_ND.device
            )
            row_weights = row_weights.contiguous()
        return self._stage.train(weights, rows_ND, row_weights, segments)

    @property
    def gating(self) -> Gating:
        """What the activation does."""
        limit = math.inf if self.limit is None else self.limit
        return Gating(self.interleaved, limit, self.alpha, self.up_offset)

    def _choose(self) -> None:
        """Choose the GEMMs for the weights as they are now."""
        with torch.no_grad():
            weights = self._weights(None)
        self._stage = Stage.choose(
            self._wanted, weights.gate_up, weights.down, batch_invariant=self._invariant
        )

    def held(self) -> tuple[Any, ...]:
        """The first six fields of `Weights`, as they are: parameters, DTensors with `spread`, or
        what a parametrization makes of them.
        """
        # `nn.Module` finds an attribute in half a microsecond, in Python.
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
        """This rank's weights, for one call."""
        over = self.averages_over
        held = [
            local_view(value, over) if hasattr(value, "_local_tensor") else value
            for value in self.held()
        ]
        return Weights._make([*held, self.gating, added])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move the experts. Weights with scales keep their dtype."""
        # Casts leave quantized weights alone, which move as integers.
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
        """Experts in fp64 serve only. Back in another dtype, those train that did before."""
        if self.dtype not in FLOATS:
            names = [name for name, value in self.named_parameters() if value.requires_grad]
            self._frozen_by_dtype += names
            self.requires_grad_(False)
            return
        for name in self._frozen_by_dtype:
            getattr(self, name).requires_grad_(True)
        self._frozen_by_dtype = []

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._choose()
